//! The worker's own loop: grants become attempts, what they tell goes to the scheduler, notices go to all of them.
//!
//! Keeps training while the scheduler is away. Adopts nothing that it was not granted, and takes each grant once.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use spotq_checkpoint::JobKey;
use spotq_model::{JobSpec, Span, Timestamp};
use spotq_proto::tls::Trust;
use spotq_proto::v1;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::MissedTickBehavior;
use v1::report::What;
use v1::scheduler_message::Kind;

use crate::attempt::{self, Handle, Order, Setting, Told};
use crate::bootstrap::{Bootstrap, CA_VARIABLE};
use crate::environment::Places;
use crate::error::WorkerError;
use crate::identity::Identity;
use crate::ids::{AttemptId, Instant, now};
use crate::journal::Journal;
use crate::notice::{CloudSays, WatchConfig};
use crate::outbox::{Novelty, Outbox};
use crate::saves::Quiet;
use crate::session::{self, Line};
use crate::supervise::{Input, Stop};
use crate::surroundings::{Node, Surroundings};
use crate::uploads::StoreAddress;
use crate::words;

/// Until the scheduler says otherwise.
const HEARTBEAT: Duration = Duration::from_secs(2);
/// Without a scheduler for this long a node only costs money; the scheduler may set another limit.
const DEAD_MAN: Duration = Duration::from_secs(600);
/// Who ends this process by a signal usually kills it five seconds later.
const SIGNAL_DEADLINE: Span = Span::millis(4500);
/// After the last attempt ended, a leaving worker waits this long for its reports to be acknowledged.
const FAREWELL: Duration = Duration::from_secs(5);
/// A scheduler that refuses an idle worker this often will not change its mind.
///
/// With the pauses between them about a minute: a node that its own launch has not been told of yet waits as well.
const REFUSALS_MAX: u32 = 30;
/// Messages between the tasks of this process; small, since each is taken at once.
const CHANNEL_MAX: usize = 64;

/// How a worker is set up.
#[derive(Debug)]
pub struct Config {
    pub server: String,
    pub node: u64,
    pub instance: String,
    pub dir: PathBuf,
    pub bootstrap: Bootstrap,
    pub watch: Option<WatchConfig>,
    pub quiet: Quiet,
    /// Processes are found without cgroups.
    pub no_cgroups: bool,
    /// This program, for the shim.
    pub exe: PathBuf,
}

/// How it left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Departure {
    /// Asked to, everything reported.
    Orderly,
    /// No scheduler wanted it or answered.
    Abandoned,
}

/// Runs until the node is to end.
///
/// # Errors
/// It could not begin: the directory, the address or the journal.
pub async fn run(config: Config) -> Result<Departure, WorkerError> {
    let mut signals =
        signal(SignalKind::terminate()).map_err(|e| WorkerError::system("listen for signals", e))?;
    let (terminate, terminated) = mpsc::channel(CHANNEL_MAX);
    tokio::spawn(async move { while signals.recv().await.is_some() && terminate.send(()).await.is_ok() {} });
    run_in(config, Arc::new(Node), terminated).await
}

/// As [`run`], in any surroundings; `terminate` says that somebody wants this process to end.
///
/// # Errors
/// As [`run`].
pub async fn run_in(
    config: Config,
    around: Arc<dyn Surroundings>,
    mut terminate: mpsc::Receiver<()>,
) -> Result<Departure, WorkerError> {
    let endpoint = session::endpoint(&config.server).map_err(WorkerError::Invalid)?;
    let (tell, mut told) = mpsc::channel(CHANNEL_MAX);
    let mut agent = Agent::open(config, around.clone(), tell).await?;
    let (line_tell, mut line) = mpsc::channel(CHANNEL_MAX);
    let dialling = tokio::spawn(session::keep_open(around, endpoint, agent.trust.subscribe(), line_tell));
    let mut cloud = agent.watch_cloud();
    let mut beat = tokio::time::interval(HEARTBEAT);
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let departure = loop {
        let heartbeat = agent.heartbeat;
        if beat.period() != heartbeat {
            beat = tokio::time::interval(heartbeat);
            beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        }
        let grown = Arc::clone(&agent.setting.grown);
        let (out, stuck) = (agent.out.clone(), agent.stuck);
        tokio::select! {
            // In a fixed order, so that a simulation repeats itself: what is rare and presses comes first.
            biased;
            Some(()) = terminate.recv() => agent.leave(Some(now() + SIGNAL_DEADLINE)),
            _ = beat.tick() => agent.on_beat(),
            Some(says) = cloud.recv() => agent.on_cloud(says),
            Some(told) = told.recv() => agent.on_told(told),
            Some(event) = line.recv() => agent.on_line(event),
            () = grown.notified() => {}
            () = room(out), if stuck => {}
        }
        agent.send_all();
        agent.forget_settled();
        agent.update_durable();
        if let Some(departure) = agent.departure() {
            break departure;
        }
    };
    dialling.abort();
    Ok(departure)
}

struct Agent {
    config: Config,
    identity: Identity,
    /// What the store's client gets, and no job.
    given: Arc<BTreeMap<String, String>>,
    /// Whom the next dial trusts.
    trust: watch::Sender<Trust>,
    setting: Setting,
    outbox: Outbox,
    running: BTreeMap<AttemptId, Handle>,
    told: mpsc::Sender<Told>,
    out: Option<mpsc::Sender<v1::WorkerMessage>>,
    welcomed: bool,
    /// The stream is full.
    stuck: bool,
    last_contact: Instant,
    dead_man: Duration,
    heartbeat: Duration,
    refusals: u32,
    notice: Option<(Timestamp, String)>,
    durable: watch::Sender<bool>,
    leaving: bool,
    abandoned: bool,
    /// Since when a leaving worker has nothing running.
    idle_since: Option<Instant>,
}

impl Agent {
    async fn open(
        mut config: Config,
        around: Arc<dyn Surroundings>,
        told: mpsc::Sender<Told>,
    ) -> Result<Agent, WorkerError> {
        let attempts = config.dir.join("attempts");
        std::fs::create_dir_all(&attempts).map_err(|e| WorkerError::disk("make", &attempts, e))?;
        let (journal, recovered) = Journal::open(&config.dir)
            .map_err(|e| WorkerError::disk("open the journal in", &config.dir, e))?;
        let ca_pem = config.bootstrap.env.remove(CA_VARIABLE);
        let identity = Identity::open(&config.dir, ca_pem.as_deref())?;
        let trust = watch::channel(trust(&identity)).0;
        let given = Arc::new(std::mem::take(&mut config.bootstrap.env));
        let mark_prefix = mark_prefix(config.node, &config.dir);
        if let Some(problem) = around.clean(mark_prefix.clone()).await {
            tracing::error!(problem, "the node is not clean");
        }
        let log_of = |id| Places::below(&attempts, id).log;
        let outbox = Outbox::recover(journal, recovered, log_of);
        let setting = Setting {
            around,
            exe: config.exe.clone(),
            attempts,
            mark_prefix,
            quiet: config.quiet,
            no_cgroups: config.no_cgroups,
            grown: Arc::new(Notify::new()),
        };
        Ok(Agent {
            setting,
            outbox,
            running: BTreeMap::new(),
            told,
            out: None,
            welcomed: false,
            stuck: false,
            last_contact: Instant::now(),
            dead_man: DEAD_MAN,
            heartbeat: HEARTBEAT,
            refusals: 0,
            notice: None,
            durable: watch::channel(false).0,
            leaving: false,
            abandoned: false,
            idle_since: None,
            identity,
            given,
            trust,
            config,
        })
    }

    fn watch_cloud(&self) -> mpsc::Receiver<CloudSays> {
        let (tell, says) = mpsc::channel(CHANNEL_MAX);
        if let Some(watch) = self.config.watch.clone() {
            tokio::spawn(self.setting.around.watch(watch, tell, self.durable.subscribe()));
        }
        says
    }

    fn on_line(&mut self, event: Line) {
        match event {
            Line::Open(out) => {
                self.outbox.rewind();
                self.welcomed = false;
                let hello = v1::Hello {
                    node_id: self.config.node,
                    instance_id: self.config.instance.clone(),
                    join_secret: self.config.bootstrap.join_secret.clone(),
                    protocol_minor: spotq_proto::PROTOCOL_MINOR,
                    worker_version: env!("CARGO_PKG_VERSION").to_owned(),
                    held: self.outbox.held(),
                    worker_key: self.identity.worker_key().to_owned(),
                    identity: self.identity.token().to_owned(),
                    // Wanted by no scheduler yet.
                    cloud_proof: None,
                };
                // The channel is new: there is room.
                let _ = out.try_send(message(v1::worker_message::Kind::Hello(hello)));
                self.out = Some(out);
            }
            Line::Heard(kind) => {
                self.last_contact = Instant::now();
                self.refusals = 0;
                self.on_heard(*kind);
            }
            Line::Closed => {
                self.out = None;
                self.welcomed = false;
                self.stuck = false;
            }
            Line::Refused { message } => {
                self.refusals += 1;
                tracing::warn!(message, count = self.refusals, "the scheduler refuses this worker");
            }
        }
    }

    fn on_heard(&mut self, kind: Kind) {
        match kind {
            Kind::Welcome(welcome) => {
                tracing::info!(cluster = welcome.cluster, "connected");
                self.welcomed = true;
                self.heartbeat = millis(welcome.heartbeat_ms, HEARTBEAT);
                self.dead_man = millis(welcome.dead_man_ms, DEAD_MAN);
                welcome.identity.into_iter().for_each(|identity| self.renew(identity));
                for ack in welcome.logs {
                    if let Some(id) = ack.grant.and_then(AttemptId::from_wire) {
                        self.outbox.log_restart(id, ack.offset);
                    }
                }
                self.outbox.rewind();
            }
            Kind::Grant(grant) => self.on_grant(grant),
            Kind::Stop(stop) => self.on_stop(&stop),
            Kind::ReportAck(ack) => {
                let noted = self.outbox.acked(ack.id);
                warn_of(noted, "note an acknowledgement");
            }
            Kind::LogAck(ack) => self.on_log_ack(ack),
            Kind::Identity(identity) => self.renew(identity),
            Kind::Leave(leave) => {
                tracing::info!(reason = leave.reason, "asked to leave");
                self.leave(None);
            }
        }
    }

    fn renew(&mut self, given: v1::Identity) {
        if let Err(error) = self.identity.renew(given) {
            // What this process has in memory is the newest all the same.
            tracing::error!(%error, "the identity cannot be written; is the node's disk full?");
        }
        let trust = trust(&self.identity);
        self.trust.send_if_modified(|current| {
            let changed = current.ca_pem != trust.ca_pem;
            *current = trust;
            changed
        });
    }

    fn on_log_ack(&mut self, ack: v1::LogAck) {
        if let Some(id) = ack.grant.and_then(AttemptId::from_wire) {
            self.outbox.log_acked(id, ack.offset);
        }
    }

    fn on_grant(&mut self, grant: v1::GrantTask) {
        let Some(id) = grant.grant.and_then(AttemptId::from_wire) else {
            tracing::warn!("a grant that names no attempt was ignored");
            return;
        };
        match self.outbox.judge(id) {
            Novelty::Old { newest } => {
                tracing::warn!(%id, %newest, "a grant older than one that was taken is refused");
            }
            Novelty::Known if self.running.contains_key(&id) => {
                self.report(id, What::Accepted(v1::Accepted {}));
            }
            Novelty::Known => {
                tracing::debug!(%id, "granted again after its end; its reports are on their way");
            }
            Novelty::New if self.leaving => tracing::info!(%id, "not taken: this worker is leaving"),
            Novelty::New => self.take(id, grant),
        }
    }

    fn take(&mut self, id: AttemptId, grant: v1::GrantTask) {
        // An older generation of the same task has no right to run any more.
        for (other, handle) in &self.running {
            if other.task == id.task {
                handle.send(Input::Stop { reason: Stop::Superseded, deadline: None });
            }
        }
        let places = Places::below(&self.setting.attempts, id);
        if let Err(error) = self.outbox.granted(id, places.log) {
            // What a crash would make us forget is not begun. The scheduler waits for an answer without a limit.
            tracing::error!(%error, %id, "not taken: the journal cannot be written; is the node's disk full?");
            let detail = format!("its node could not note the grant ({error}); is the node's disk full?");
            self.report(id, What::Accepted(v1::Accepted {}));
            self.report(id, words::lost(detail));
            return;
        }
        match order(id, grant, self.given.clone()) {
            Ok(order) => {
                let handle = attempt::begin(self.setting.clone(), order, self.told.clone());
                if let Some((deadline, source)) = self.notice.clone() {
                    handle.send(Input::Notice { deadline, source });
                }
                self.running.insert(id, handle);
                self.durable.send_replace(false);
            }
            Err(message) => self.report(id, words::cannot_start(message)),
        }
    }

    fn on_stop(&mut self, stop: &v1::StopTask) {
        let Some(id) = stop.grant.and_then(AttemptId::from_wire) else { return };
        let Some(reason) = words::stop_from(stop.reason()) else { return };
        if let Some(handle) = self.running.get(&id) {
            let deadline = (stop.deadline_ms > 0).then_some(Timestamp(stop.deadline_ms));
            handle.send(Input::Stop { reason, deadline });
        } else if self.outbox.judge(id) == Novelty::New {
            // It never came here, and after this it never will.
            let places = Places::below(&self.setting.attempts, id);
            warn_of(self.outbox.granted(id, places.log), "refuse a stopped grant");
            let finish = v1::Finished {
                stopped: stop.reason,
                stopped_at_ms: now().0,
                detail: Some("it never ran on this node".to_owned()),
                ..Default::default()
            };
            self.report(id, What::Finished(finish));
        }
    }

    fn on_told(&mut self, told: Told) {
        if matches!(told.what, What::Finished(_)) {
            self.running.remove(&told.id);
        }
        warn_of(self.outbox.report(told.id, told.at.0, told.what), "keep a report");
    }

    fn on_cloud(&mut self, says: CloudSays) {
        match says {
            CloudSays::Notice { deadline, source } => {
                tracing::info!(source, left = %deadline.since(now()), "the cloud will take this node");
                self.notice = Some((deadline, source));
                self.pass_notice();
            }
            CloudSays::Withdrawn => {
                self.notice = None;
                self.running.values().for_each(|handle| handle.send(Input::NoticeWithdrawn));
            }
        }
    }

    fn on_beat(&mut self) {
        if let (true, Some(out)) = (self.welcomed, &self.out) {
            self.last_contact = Instant::now();
            let beat = v1::Heartbeat { now_ms: now().0, resident_bytes: resident_bytes() };
            // A stream without room is slow, not dead; the next beat will do.
            let _ = out.try_send(message(v1::worker_message::Kind::Heartbeat(beat)));
        }
        // An attempt whose queue was full hears of the notice again.
        self.pass_notice();
        if !self.leaving && self.last_contact.elapsed() > self.dead_man {
            tracing::error!("no scheduler for too long; saving and leaving");
            self.abandoned = true;
            self.leave(None);
        }
    }

    fn pass_notice(&self) {
        if let Some((deadline, source)) = &self.notice {
            for handle in self.running.values() {
                handle.send(Input::Notice { deadline: *deadline, source: source.clone() });
            }
        }
    }

    fn leave(&mut self, deadline: Option<Timestamp>) {
        self.leaving = true;
        for handle in self.running.values() {
            handle.send(Input::Stop { reason: Stop::WorkerLeaving, deadline });
        }
    }

    fn departure(&mut self) -> Option<Departure> {
        if !self.leaving {
            let unwanted = self.refusals >= REFUSALS_MAX && self.running.is_empty();
            return unwanted.then_some(Departure::Abandoned);
        }
        if !self.running.is_empty() {
            self.idle_since = None;
            return None;
        }
        let idle = *self.idle_since.get_or_insert_with(Instant::now);
        let over =
            self.outbox.is_empty() || idle.elapsed() > FAREWELL || self.out.is_none() && self.abandoned;
        over.then_some(if self.abandoned { Departure::Abandoned } else { Departure::Orderly })
    }

    /// Sends what there is room for.
    fn send_all(&mut self) {
        let Some(out) = self.out.clone().filter(|_| self.welcomed) else { return };
        self.stuck = false;
        loop {
            match out.try_reserve() {
                Ok(permit) => match self.outbox.next_message() {
                    Some(kind) => permit.send(message(kind)),
                    None => return,
                },
                Err(mpsc::error::TrySendError::Full(())) => {
                    self.stuck = true;
                    return;
                }
                Err(mpsc::error::TrySendError::Closed(())) => {
                    self.out = None;
                    return;
                }
            }
        }
    }

    /// What is all with the scheduler needs no room on this node any more.
    fn forget_settled(&mut self) {
        for id in self.outbox.take_settled() {
            let places = Places::below(&self.setting.attempts, id);
            spotq_host::blocking(move || {
                if let Err(error) = std::fs::remove_dir_all(&places.dir) {
                    tracing::debug!(%error, dir = %places.dir.display(), "not removed");
                }
            });
        }
    }

    /// A cloud that asks for consent gets it when a noticed node has nothing left to save or to tell: it may take the
    /// node at once, and what the scheduler has not heard by then, it never hears.
    fn update_durable(&self) {
        let durable = self.notice.is_some() && self.running.is_empty() && self.outbox.is_empty();
        self.durable.send_if_modified(|current| std::mem::replace(current, durable) != durable);
    }

    fn report(&mut self, id: AttemptId, what: What) {
        warn_of(self.outbox.report(id, now().0, what), "keep a report");
    }
}

/// Waits until the stream takes more.
async fn room(out: Option<mpsc::Sender<v1::WorkerMessage>>) {
    if let Some(out) = out {
        let _ = out.reserve().await;
    }
}

fn order(id: AttemptId, grant: v1::GrantTask, given: Arc<BTreeMap<String, String>>) -> Result<Order, String> {
    let spec = grant.spec.ok_or("the grant has no job; are scheduler and worker of one version?")?;
    let spec = JobSpec::try_from(spec).map_err(|e| format!("the job is not understood: {e}"))?;
    let key: [u8; 32] = grant
        .checkpoint_key
        .as_slice()
        .try_into()
        .map_err(|_| "the grant's checkpoint key has not 32 bytes")?;
    let store =
        StoreAddress { url: grant.checkpoint_url, key: JobKey(key), newest_step: grant.newest_step, given };
    Ok(Order { id, spec, store })
}

/// Begins the mark of every process of this node. Node numbers repeat between clusters on one machine; the
/// directory does not, and a worker that is started again in it finds what its predecessor left.
fn mark_prefix(node: u64, dir: &std::path::Path) -> String {
    let mut hasher = crate::saves::Fnv::default();
    std::hash::Hash::hash(dir, &mut hasher);
    format!("{node}.{:016x}-", std::hash::Hasher::finish(&hasher))
}

fn trust(identity: &Identity) -> Trust {
    Trust { ca_pem: identity.ca_pem().to_owned(), identity_pem: None }
}

fn message(kind: v1::worker_message::Kind) -> v1::WorkerMessage {
    v1::WorkerMessage { kind: Some(kind) }
}

/// 0 is "not said".
fn millis(ms: u64, otherwise: Duration) -> Duration {
    if ms == 0 { otherwise } else { Duration::from_millis(ms) }
}

fn warn_of(result: std::io::Result<()>, operation: &str) {
    if let Err(error) = result {
        tracing::error!(%error, operation, "the journal cannot be written; is the node's disk full?");
    }
}

fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::full_disk;

    #[tokio::test]
    async fn a_grant_that_cannot_be_noted_is_answered_as_lost_once() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config {
            server: "http://127.0.0.1:1".to_owned(),
            node: 1,
            instance: "i".to_owned(),
            dir: dir.path().to_owned(),
            bootstrap: Bootstrap::default(),
            watch: None,
            quiet: Quiet::default(),
            no_cgroups: false,
            exe: PathBuf::new(),
        };
        let mut agent = Agent::open(config, Arc::new(Node), mpsc::channel(1).0).await.unwrap();
        let wire = v1::Grant { job_id: 1, task_index: 0, generation: 1 };
        let grant = v1::GrantTask {
            grant: Some(wire),
            spec: Some((&spotq_testkit::job("x")).into()),
            checkpoint_key: vec![7; 32],
            ..Default::default()
        };
        full_disk::set_room(Some(10));
        agent.on_grant(grant.clone());
        // It comes again when the connection was lost meanwhile.
        agent.on_grant(grant);
        full_disk::set_room(None);
        assert!(agent.running.is_empty());
        assert_eq!(agent.outbox.held(), vec![wire]);
        let mut told = std::iter::from_fn(|| agent.outbox.next_message()).map(|kind| match kind {
            v1::worker_message::Kind::Report(report) => report.what,
            other => panic!("{other:?}"),
        });
        assert_eq!(told.next(), Some(Some(What::Accepted(v1::Accepted {}))));
        match told.next() {
            Some(Some(What::Finished(end))) => {
                assert_eq!((end.exit_code, end.signal, end.launch_error.clone()), (None, None, None));
                assert_eq!(end.stopped(), v1::StopReason::None);
                assert!(end.detail.unwrap().contains("disk full"));
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(told.next(), None);
    }
}
