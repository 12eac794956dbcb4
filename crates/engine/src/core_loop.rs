//! The loop: take what has come, decide, append, apply; answer and act when it is durable.
//!
//! Appends are pipelined: while one is being made durable the next inputs are decided on the state that it will lead
//! to. Answers wait for the version that they saw. Effects wait until nothing is in the air, so that they never act on
//! what a power cut could take back.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::FuturesOrdered;
use spotq_core::{Cluster, apply, decide, due, invariants, owes_effects, wakes_planner};
use spotq_model::{Epoch, Event, Fact, Input, Offer, Progress, Report, TaskId, Version};
use spotq_store::{Appending, Store, StoreError};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::clock::now;
use crate::config::EngineConfig;
use crate::effects::Effects;
use crate::gather::{BATCH_MAX, Gather};
use crate::handle::{Handle, INBOX_SIZE, Msg, Release, Seen, Shared};
use crate::records::{RecordError, encode_event, encode_snapshot, rebuild};
use crate::sessions::Sessions;

/// Appends in the air at once. One is written while the next is gathered; more only add delay.
const APPENDS_MAX: usize = 4;
/// How often time itself is an input while anything is under way.
const TICK: Duration = Duration::from_millis(100);
/// And while nothing is.
const TICK_IDLE: Duration = Duration::from_secs(1);
/// Plans are at least this far apart, so that a burst of submits is planned once.
const PLAN_EVERY: Duration = Duration::from_millis(10);
/// While something waits, it is looked at again this often.
const REPLAN: Duration = Duration::from_millis(250);

/// Reading a job or a node from a snapshot takes about as long as replaying so many events.
const SNAPSHOT_EVENTS_PER_ENTRY: u64 = 2;

/// A running engine.
#[derive(Debug)]
pub struct Running {
    pub handle: Handle,
    pub(crate) shared: Shared,
    stop: CancellationToken,
    tasks: Vec<JoinHandle<()>>,
    main: JoinHandle<Result<(), StoreError>>,
    /// `main` has ended and its result was taken.
    over: bool,
}

/// Recovers the state, takes the leadership and starts the loop.
pub async fn start(config: EngineConfig) -> Result<Running, RecordError> {
    let epoch = config.store.take_leadership().await?;
    let recovered = config.store.recover().await?;
    let cluster = rebuild(&recovered)?;
    for violation in invariants::check(&cluster) {
        tracing::error!(violation.id, violation.text, "recovered state breaks an invariant");
    }
    tracing::info!(%epoch, version = %cluster.version, jobs = cluster.jobs.len(), "recovered");
    let (inbox, messages) = mpsc::channel(INBOX_SIZE);
    let (changed, changes) = watch::channel(0);
    let handle = Handle { inbox, changes };
    let shared = Shared {
        config: config.into(),
        sessions: Sessions::default().into(),
        security: Arc::default(),
        handle: handle.clone(),
    };
    let stop = CancellationToken::new();
    let core = Core {
        durable: cluster.version,
        cluster,
        epoch,
        shared: shared.clone(),
        offers: Vec::new(),
        progress: HashMap::new(),
        appends: FuturesOrdered::new(),
        answers: VecDeque::new(),
        decided: Decided::default(),
        appended_at: VecDeque::new(),
        gather: Gather::default(),
        effects: Effects::default(),
        changed,
        plan_wanted: true,
        planned: Instant::now(),
        effects_wanted: true,
        snapshot_at: recovered.first_version(),
        snapshot: None,
    };
    let (loops, over) = (core.run(messages, stop.clone()), stop.clone().drop_guard());
    let main = tokio::spawn(async move {
        // However the loop ends, nobody goes on asking the cloud for it.
        let _over = over;
        loops.await
    });
    let tasks = vec![
        tokio::spawn(crate::poll::offers(shared.clone(), stop.clone())),
        tokio::spawn(crate::poll::instances(shared.clone(), stop.clone())),
        tokio::spawn(crate::poll::changes(shared.clone(), stop.clone())),
    ];
    Ok(Running { handle, shared, stop, tasks, main, over: false })
}

impl Running {
    /// Ends the loop; what was acknowledged is durable already, so nothing else needs to be done.
    pub async fn stop(self) -> Result<(), StoreError> {
        self.stop.cancel();
        for task in self.tasks {
            // A poll that is in the middle of a call is not waited for.
            task.abort();
        }
        if self.over {
            // How it ended was told already, and a task gives its result once.
            return Ok(());
        }
        self.main.await.unwrap_or(Err(StoreError::Stopped))
    }

    /// Resolves when the loop ends by itself, which only a broken store makes it do.
    pub async fn failed(&mut self) -> Result<(), StoreError> {
        let ended = (&mut self.main).await;
        self.over = true;
        ended.unwrap_or(Err(StoreError::Stopped))
    }
}

struct Core {
    cluster: Cluster,
    /// Everything up to here is durable.
    durable: Version,
    epoch: Epoch,
    shared: Shared,
    offers: Vec<Offer>,
    progress: HashMap<TaskId, Progress>,
    appends: FuturesOrdered<Appending>,
    /// Answers, each with the version that must be durable before it goes out.
    answers: VecDeque<(Version, Release)>,
    /// What the next append takes.
    decided: Decided,
    /// When each append in the air began.
    appended_at: VecDeque<Instant>,
    gather: Gather,
    effects: Effects,
    changed: watch::Sender<u64>,
    plan_wanted: bool,
    planned: Instant,
    effects_wanted: bool,
    snapshot_at: Version,
    /// The one that is being written.
    snapshot: Option<JoinHandle<Result<(), StoreError>>>,
}

/// Decided and applied, but not appended yet: it is still growing.
#[derive(Default)]
struct Decided {
    records: Vec<Vec<u8>>,
    /// Messages that it came from.
    messages: usize,
}

impl Core {
    async fn run(
        mut self,
        mut messages: mpsc::Receiver<Msg>,
        stop: CancellationToken,
    ) -> Result<(), StoreError> {
        let mut batch = Vec::with_capacity(BATCH_MAX);
        let mut ticked = Instant::now();
        loop {
            // With effects to start, no new input is taken until what they rest on is durable.
            let room = self.appends.len() < APPENDS_MAX && (self.all_durable() || !self.effects_wanted);
            let to_tick = self.tick_period().saturating_sub(ticked.elapsed());
            let to_plan = self.plan_wanted.then(|| PLAN_EVERY.saturating_sub(self.planned.elapsed()));
            let gather = self.gather_pause();
            let pause = [to_plan, gather].into_iter().flatten().fold(to_tick, Duration::min);
            if gather.is_some_and(|pause| pause.is_zero()) {
                self.append();
            } else if room && to_tick.is_zero() {
                // Before the inbox, which may never be empty: leases and limits do not wait for a quiet moment.
                ticked = Instant::now();
                self.tick();
            } else if room && pause.is_zero() {
                // No tick: that would look for effects, and so interrupt the flow of appends.
                self.plan_now();
            } else {
                let space = BATCH_MAX - self.decided.messages;
                tokio::select! {
                    biased;
                    () = stop.cancelled() => return self.snapshot_over().await,
                    Some(appended) = self.appends.next() => self.appended(appended?),
                    count = messages.recv_many(&mut batch, space), if room && space > 0 => {
                        if count == 0 {
                            return self.snapshot_over().await;
                        }
                        self.take(&mut batch);
                    }
                    () = tokio::time::sleep(pause), if room => {}
                }
            }
            if self.all_durable() {
                self.settled().await?;
            }
        }
    }

    fn all_durable(&self) -> bool {
        self.appends.is_empty() && self.decided.records.is_empty()
    }

    fn tick_period(&self) -> Duration {
        let busy = !self.cluster.live.is_empty() || !self.cluster.queue.is_empty();
        if busy { TICK } else { TICK_IDLE }
    }

    /// For how long what was decided should still grow; nothing where there is nothing, or where no append may begin.
    fn gather_pause(&self) -> Option<Duration> {
        if self.decided.records.is_empty() || self.appends.len() >= APPENDS_MAX {
            return None;
        }
        // Answers are in the order of the versions that they saw.
        let appended = self.cluster.version.0 - self.decided.records.len() as u64;
        let in_the_air = self.answers.partition_point(|(version, _)| version.0 <= appended);
        Some(if self.effects_wanted {
            Duration::ZERO
        } else {
            self.gather.pause(self.decided.messages, in_the_air)
        })
    }

    fn take(&mut self, batch: &mut Vec<Msg>) {
        self.gather.arrived(batch.len());
        self.decided.messages += batch.len();
        for message in batch.drain(..) {
            match message {
                Msg::Do { input, then } => {
                    if let Some(input) = input {
                        self.decide(&input);
                    }
                    if let Some(then) = then {
                        let release = then(&self.seen());
                        self.answers.push_back((self.cluster.version, release));
                    }
                }
                Msg::Offers(offers) => {
                    let input = Input::Offers { offers };
                    self.decide(&input);
                    if let Input::Offers { offers } = input {
                        self.plan_wanted |= !self.cluster.queue.is_empty();
                        self.offers = offers;
                    }
                }
                Msg::EffectOver(key) => {
                    self.effects.over(key);
                    self.effects_wanted = true;
                }
                Msg::Joined(node) => {
                    self.effects.node_joined(node);
                    self.effects_wanted = true;
                }
            }
        }
        self.maybe_plan();
        if self.decided.records.is_empty() {
            // Nothing changed: only what is in the air already has to become durable.
            self.append();
        }
    }

    fn tick(&mut self) {
        self.decide(&Input::Tick);
        for node in self.silent_nodes() {
            self.decide(&Input::LeaseExpired { node });
        }
        self.plan_wanted |= !self.cluster.queue.is_empty() && self.planned.elapsed() >= REPLAN;
        self.maybe_plan();
        // While something is in the air, effects interrupt the flow of appends, so they are looked for beforehand.
        self.effects_wanted |= self.all_durable() || !due(&self.cluster, now()).is_empty();
        self.append();
    }

    fn plan_now(&mut self) {
        self.maybe_plan();
        self.append();
    }

    fn silent_nodes(&self) -> Vec<spotq_model::NodeId> {
        let ttl = self.shared.config.policies.lease_ttl.as_duration();
        let ready = self.cluster.live_nodes().filter(|node| node.state == spotq_core::NodeState::Ready);
        ready.map(|node| node.id).filter(|node| self.shared.sessions.silent_for(*node) > ttl).collect()
    }

    fn maybe_plan(&mut self) {
        if self.plan_wanted && self.planned.elapsed() >= PLAN_EVERY && !self.offers.is_empty() {
            self.plan_wanted = false;
            self.planned = Instant::now();
            let input = Input::Plan { offers: std::mem::take(&mut self.offers) };
            self.decide(&input);
            if let Input::Plan { offers } = input {
                self.offers = offers;
            }
        } else if self.offers.is_empty() {
            // Without prices there is nothing to plan; they wake the planner when they come.
            self.plan_wanted = false;
        }
    }

    /// Decides and applies; what it led to is appended with the rest of what was decided.
    fn decide(&mut self, input: &Input) {
        if let Input::Reported { task, report: Report::Progressed { progress }, .. } = input {
            self.progress.insert(*task, *progress);
            self.changed.send_modify(|count| *count += 1);
        }
        for event in decide(&self.cluster, &self.shared.config.policies, now(), input) {
            if let Err(illegal) = apply(&mut self.cluster, &event) {
                // Our own decision does not fit our own state: a fault of the core. What came before it is whole and
                // logged; the rest is dropped, so that one job's trouble does not stop the others.
                debug_assert!(false, "{illegal}");
                tracing::error!(%illegal, "a decision was dropped");
                break;
            }
            self.note(&event);
            self.decided.records.push(encode_event(&event));
        }
    }

    fn note(&mut self, event: &Event) {
        self.plan_wanted |= wakes_planner(&event.fact);
        self.effects_wanted |= owes_effects(&event.fact);
        if let Fact::TaskDone { task, outcome } = &event.fact {
            self.progress.remove(task);
            tracing::info!(%task, %outcome, "done");
        }
        if let Fact::AttemptEnded { task, generation, end, .. } = &event.fact {
            tracing::info!(%task, %generation, ?end, "attempt ended");
        }
    }

    fn append(&mut self) {
        let Decided { records, .. } = std::mem::take(&mut self.decided);
        self.gather.taken();
        if records.is_empty() {
            self.release_answers();
            return;
        }
        let expected = Version(self.cluster.version.0 - records.len() as u64);
        self.appended_at.push_back(Instant::now());
        self.appends.push_back(self.shared.config.store.append(self.epoch, expected, records));
    }

    fn appended(&mut self, version: Version) {
        self.durable = version;
        self.changed.send_modify(|count| *count += 1);
        let waiting = self.answers.len();
        self.release_answers();
        let started = self.appended_at.pop_front();
        self.gather.answered(waiting - self.answers.len(), started.map_or(Duration::ZERO, |at| at.elapsed()));
    }

    fn release_answers(&mut self) {
        while self.answers.front().is_some_and(|(version, _)| *version <= self.durable) {
            if let Some((_, release)) = self.answers.pop_front() {
                release();
            }
        }
    }

    /// Everything known is durable: now it may be acted on.
    async fn settled(&mut self) -> Result<(), StoreError> {
        if std::mem::take(&mut self.effects_wanted) {
            let effects = due(&self.cluster, now());
            self.effects.run(&self.shared, &self.cluster, effects);
            let cluster = &self.cluster;
            self.shared.sessions.forget(|node| !cluster.live.contains(&node));
        }
        if self.durable.0 >= self.snapshot_at.0.saturating_add(self.snapshot_every()) {
            self.snapshot_over().await?;
            self.snapshot_at = self.durable;
            let store = self.shared.config.store.clone();
            let (epoch, version, cluster) = (self.epoch, self.durable, self.cluster.clone());
            self.snapshot = Some(tokio::spawn(snapshot(store, epoch, version, cluster)));
        } else if self.snapshot.as_ref().is_some_and(JoinHandle::is_finished) {
            self.snapshot_over().await?;
        }
        Ok(())
    }

    /// Events until the next snapshot. A large state is written less often, so that the cost of an event does not grow
    /// with it: reading it back then takes at most as long as the records behind it.
    fn snapshot_every(&self) -> u64 {
        let size = self.cluster.jobs.len() + self.cluster.nodes.len();
        self.shared.config.snapshot_every.max(SNAPSHOT_EVENTS_PER_ENTRY * size as u64)
    }

    /// Waits for the snapshot that is being written, if one is. A store that cannot keep it ends the loop.
    async fn snapshot_over(&mut self) -> Result<(), StoreError> {
        match self.snapshot.take() {
            Some(task) => task.await.unwrap_or(Err(StoreError::Stopped)),
            None => Ok(()),
        }
    }

    fn seen(&self) -> Seen<'_> {
        Seen {
            cluster: &self.cluster,
            policies: &self.shared.config.policies,
            offers: &self.offers,
            progress: &self.progress,
            now: now().max(self.cluster.now),
            epoch: self.epoch,
        }
    }
}

/// Writes a snapshot beside the loop: the state of a hundred thousand jobs takes a second, in which others want answers.
async fn snapshot(
    store: Arc<dyn Store>,
    epoch: Epoch,
    version: Version,
    cluster: Cluster,
) -> Result<(), StoreError> {
    let bytes = spotq_host::blocking(move || encode_snapshot(&cluster)).await;
    store.snapshot(epoch, version, bytes.map_err(|_| StoreError::Stopped)?).await
}
