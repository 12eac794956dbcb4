//! The loop round the core as the engine runs it: take, decide, append, apply; answers and effects only on what is
//! durable. It decides nothing itself; it can die between any two of its steps.

use std::collections::{BTreeMap, VecDeque};

use spotq_core::{Cluster, NodeState, apply, decide, due, is_current, owes_effects, replay, wakes_planner};
use spotq_model::{
    Epoch, Event, Generation, Input, JobId, NodeId, Offer, Report, StopWhy, TaskId, Timestamp,
};

use crate::counts::Count;
use crate::effects::Key;
use crate::oracle::{DEEP_EVERY, Oracle};
use crate::store::Refused;
use crate::users::Reply;
use crate::worker::ToWorker;
use crate::world::{Ev, World};

/// As in the engine.
const APPENDS_MAX: usize = 4;
/// Ticks while nothing is under way are this much rarer.
const IDLE_TICKS: u64 = 4;
/// A leader that has nothing to append learns within this time that another one leads.
const LEAD_CHECK: u64 = 5000;
/// How long a dead scheduler stays away.
const AWAY_MS: (u64, u64) = (100, 20_000);

pub(crate) type Grant = (TaskId, Generation);

/// The process died here.
#[derive(Debug)]
pub(crate) struct Crash;

/// A scheduler's process. It may lead, believe that it leads, or be away.
#[derive(Debug, Default)]
pub(crate) struct Proc {
    /// Counts its lives; what was meant for an earlier one is dropped.
    pub inc: u32,
    /// How far its clock is off.
    pub skew: i64,
    pub core: Option<Box<Core>>,
}

#[derive(Debug)]
pub(crate) struct Core {
    epoch: Epoch,
    pub c: Cluster,
    durable: u64,
    in_air: usize,
    answers: VecDeque<(u64, Answer)>,
    pub flights: BTreeMap<Key, Flight>,
    /// The stream of each connected worker.
    pub sessions: BTreeMap<NodeId, usize>,
    pub heard: BTreeMap<NodeId, u64>,
    inbox: VecDeque<Msg>,
    stepping: bool,
    offers: Vec<Offer>,
    plan_wanted: bool,
    planned: u64,
    effects_wanted: bool,
    snapshot_at: u64,
    /// When the store last said that this one leads.
    checked: u64,
}

/// An effect that runs, or may not run again before a time.
#[derive(Debug)]
pub(crate) struct Flight {
    pub busy: bool,
    pub not_before: u64,
    pub tries: u32,
}

/// What comes into a scheduler.
#[derive(Debug)]
pub(crate) enum Msg {
    Submit { client: usize },
    Wish { client: usize, wish: usize, input: Input },
    Input(Input),
    Offers(Vec<Offer>),
    EffectOver(Key),
    Hello { conn: usize, node: NodeId, held: Vec<Grant> },
    Report { conn: usize, id: u64, node: NodeId, grant: Grant, report: Report },
    Joined(NodeId),
}

/// What goes out once the state that it saw is durable.
#[derive(Debug)]
enum Answer {
    Client { client: usize, reply: Reply },
    Welcome { conn: usize, node: NodeId, stale: Vec<Grant> },
    Ack { conn: usize, id: u64, superseded: Option<Grant> },
}

impl World {
    /// The wall clock of a scheduler's host.
    pub(crate) fn clock(&self, proc: usize) -> Timestamp {
        Timestamp(self.t.saturating_add_signed(self.procs[proc].skew))
    }

    /// Sends into a scheduler's inbox, after `delay`.
    pub(crate) fn tell(&mut self, (proc, inc): (usize, u32), delay: u64, msg: Msg) {
        self.after(delay, Ev::Inbox { proc, inc, msg: Box::new(msg) });
    }

    /// Takes the leadership, whoever has it, and recovers.
    pub(crate) fn lead(&mut self, proc: usize) {
        if self.procs[proc].core.is_some() {
            if proc == self.leader {
                return;
            }
            // It had led before and does not know better: it is started anew.
            self.stopped(proc);
        }
        if self.procs[self.leader].core.is_some() {
            self.counts.add(Count::TakeOver);
        }
        self.procs[proc].inc += 1;
        let inc = self.procs[proc].inc;
        self.leader = proc;
        self.store.epoch = self.store.epoch.next();
        if self.may_crash(Count::CrashBeforeAppend).is_err() {
            self.crashed(proc);
            return;
        }
        let c = self.recover();
        Oracle::recovered(self, &c);
        let version = c.version.0;
        let core = Core {
            epoch: self.store.epoch,
            c,
            durable: version,
            in_air: 0,
            answers: VecDeque::new(),
            flights: BTreeMap::new(),
            sessions: BTreeMap::new(),
            heard: BTreeMap::new(),
            inbox: VecDeque::new(),
            stepping: false,
            offers: Vec::new(),
            plan_wanted: true,
            planned: 0,
            effects_wanted: true,
            snapshot_at: version,
            checked: self.t,
        };
        self.procs[proc].core = Some(Box::new(core));
        self.after(1, Ev::Tick { proc, inc });
        self.after(2, Ev::PollOffers { proc, inc });
        self.after(3, Ev::PollList { proc, inc });
    }

    fn recover(&mut self) -> Cluster {
        self.counts.add(Count::Recovery);
        // A snapshot that cannot be read is set aside; the records behind it are still there.
        let aside = !self.calm && self.rng.percent(10);
        if aside && self.store.snapshot.take().is_some() {
            self.counts.add(Count::SnapshotLost);
        }
        let (from, mut c) = self.store.snapshot.clone().unwrap_or_default();
        if from > 0 && self.seed.is_multiple_of(DEEP_EVERY) {
            // As it is written and read.
            let text = serde_json::to_string(&c).unwrap_or_default();
            match serde_json::from_str(&text) {
                Ok(read) => c = read,
                Err(error) => self.violated("INV-01", format!("a snapshot does not read back: {error}")),
            }
        }
        if from > 0 {
            self.counts.add(Count::SnapshotUsed);
        }
        if let Err(illegal) = replay(&mut c, &self.store.log[from as usize..]) {
            self.violated("INV-01", format!("the log does not replay: {illegal}"));
        }
        c
    }

    /// Whether the process dies at this point.
    pub(crate) fn may_crash(&mut self, point: Count) -> Result<(), Crash> {
        if !self.calm && self.rng.chance(self.d.faults.crash_ppm) {
            self.counts.add(point);
            return Err(Crash);
        }
        Ok(())
    }

    fn crashed(&mut self, proc: usize) {
        self.counts.add(Count::SchedulerCrash);
        self.trace.line(|| format!("scheduler {proc} crashes"));
        self.stopped(proc);
    }

    /// A process is no more: its streams break, and if it led, another one will.
    fn stopped(&mut self, proc: usize) {
        let inc = self.procs[proc].inc;
        self.procs[proc].core = None;
        self.store_lost_writer(proc, inc);
        self.procs[proc].inc += 1;
        self.scheduler_conns_break(proc, inc);
        if proc == self.leader {
            let next = self.rng.below(self.procs.len() as u64) as usize;
            let away = self.rng.within(AWAY_MS.0, AWAY_MS.1);
            self.after(away, Ev::Lead { proc: next });
        }
    }

    /// Works with the core of a process, if it is up; it may die doing so.
    fn with_core(
        &mut self,
        (proc, inc): (usize, u32),
        work: impl FnOnce(&mut World, &mut Core) -> Result<(), Crash>,
    ) {
        if self.procs[proc].inc != inc {
            return;
        }
        let Some(mut core) = self.procs[proc].core.take() else { return };
        match work(self, &mut core) {
            Ok(()) => {
                if !core.stepping && !core.inbox.is_empty() && core.has_room() {
                    core.stepping = true;
                    self.after(1, Ev::Step { proc, inc });
                }
                self.procs[proc].core = Some(core);
            }
            Err(Crash) => self.crashed(proc),
        }
    }

    pub(crate) fn inbox(&mut self, who: (usize, u32), msg: Msg) {
        self.with_core(who, |_, core| {
            core.inbox.push_back(msg);
            Ok(())
        });
    }

    pub(crate) fn step(&mut self, who: (usize, u32)) {
        self.with_core(who, |world, core| {
            core.stepping = false;
            if !core.has_room() {
                return Ok(());
            }
            let mut events = Vec::new();
            for msg in std::mem::take(&mut core.inbox) {
                world.take(who, core, msg, &mut events);
            }
            world.maybe_plan(who, core, &mut events);
            world.append(who, core, events)
        });
    }

    pub(crate) fn tick(&mut self, who: (usize, u32)) {
        self.with_core(who, |world, core| {
            // A leader asks the store now and then whether it still leads: an append of nothing.
            if core.epoch != world.store.epoch && world.t - core.checked >= LEAD_CHECK {
                world.after(1, Ev::Appended { proc: who.0, inc: who.1, result: Err(Refused::Fenced) });
                return Ok(());
            }
            core.checked = if core.epoch == world.store.epoch { world.t } else { core.checked };
            let busy = !core.c.live.is_empty() || !core.c.queue.is_empty();
            let period = world.d.tick_ms * if busy { 1 } else { IDLE_TICKS };
            world.after(period, Ev::Tick { proc: who.0, inc: who.1 });
            if core.in_air >= APPENDS_MAX {
                return Ok(());
            }
            let mut events = Vec::new();
            world.decide(who, core, &Input::Tick, &mut events);
            for node in world.silent_nodes(core) {
                world.decide(who, core, &Input::LeaseExpired { node }, &mut events);
            }
            core.plan_wanted |= !core.c.queue.is_empty();
            world.maybe_plan(who, core, &mut events);
            // As in the engine: while something is in the air, effects would interrupt the flow of appends.
            let all_durable = core.in_air == 0 && events.is_empty();
            core.effects_wanted |= all_durable || !due(&core.c, world.clock(who.0)).is_empty();
            world.append(who, core, events)
        });
    }

    fn silent_nodes(&self, core: &mut Core) -> Vec<NodeId> {
        let ttl = self.d.policies.lease_ttl.0;
        let ready: Vec<NodeId> =
            core.c.live_nodes().filter(|n| n.state == NodeState::Ready).map(|n| n.id).collect();
        let silent = |node: &NodeId| match core.sessions.get(node) {
            // Heartbeats come all the time on a stream that works.
            Some(conn) if self.flows(*conn) => false,
            Some(conn) => self.t.saturating_sub(self.conns[*conn].cut_at) > ttl,
            None => self.t - *core.heard.entry(*node).or_insert(self.t) > ttl,
        };
        ready.into_iter().filter(silent).collect()
    }

    fn take(&mut self, who: (usize, u32), core: &mut Core, msg: Msg, events: &mut Vec<Event>) {
        match msg {
            Msg::Submit { client } => {
                let plan = &self.d.jobs[client];
                let (client_key, uuid, spec) =
                    (plan.client_key.clone(), plan.uuid.clone(), plan.spec.clone());
                let job_key = client_key.clone();
                self.decide(who, core, &Input::Submit { client_key, uuid, spec }, events);
                let job = core.c.by_client_key.get(job_key.as_str()).copied().unwrap_or(JobId(0));
                core.answer(Answer::Client { client, reply: Reply::Submitted(job) });
            }
            Msg::Wish { client, wish, input } => {
                self.decide(who, core, &input, events);
                core.answer(Answer::Client { client, reply: Reply::Wished(wish) });
            }
            Msg::Input(input) => self.decide(who, core, &input, events),
            Msg::Offers(offers) => {
                let input = Input::Offers { offers };
                self.decide(who, core, &input, events);
                if let Input::Offers { offers } = input {
                    core.plan_wanted |= !core.c.queue.is_empty();
                    core.offers = offers;
                }
            }
            Msg::EffectOver(key) => {
                if let Some(flight) = core.flights.get_mut(&key) {
                    flight.busy = false;
                }
                core.effects_wanted = true;
            }
            Msg::Hello { conn, node, held } => self.hello(who, core, (conn, node), held, events),
            Msg::Report { conn, id, node, grant: (task, generation), report } => {
                core.heard.insert(node, self.t);
                let finished = matches!(report, Report::Finished { .. });
                self.decide(who, core, &Input::Reported { node, task, generation, report }, events);
                let current = is_current(&core.c, node, task, generation);
                let superseded = (!current && !finished).then_some((task, generation));
                core.answer(Answer::Ack { conn, id, superseded });
            }
            Msg::Joined(node) => {
                core.flights.retain(|(_, of, _), flight| flight.busy || *of != node);
                core.effects_wanted = true;
            }
        }
    }

    fn hello(
        &mut self,
        who: (usize, u32),
        core: &mut Core,
        (conn, node): (usize, NodeId),
        held: Vec<Grant>,
        events: &mut Vec<Event>,
    ) {
        let state = core.c.nodes.get(&node).map(|known| known.state);
        if !matches!(state, Some(NodeState::Booting | NodeState::Ready)) {
            self.conn_break(conn);
            return;
        }
        self.decide(who, core, &Input::WorkerJoined { node, held: held.clone() }, events);
        let stale =
            held.into_iter().filter(|(task, generation)| !is_current(&core.c, node, *task, *generation));
        let stale = stale.collect();
        core.answer(Answer::Welcome { conn, node, stale });
    }

    /// The shipped `decide` and `apply`, on the state that the appends in the air will lead to.
    fn decide(&mut self, (proc, _): (usize, u32), core: &mut Core, input: &Input, events: &mut Vec<Event>) {
        for event in decide(&core.c, &self.d.policies, self.clock(proc), input) {
            if let Err(illegal) = apply(&mut core.c, &event) {
                self.violated("INV-12", format!("a decision does not fit its own state: {illegal}"));
                return;
            }
            core.plan_wanted |= wakes_planner(&event.fact);
            core.effects_wanted |= owes_effects(&event.fact);
            events.push(event);
        }
    }

    fn maybe_plan(&mut self, who: (usize, u32), core: &mut Core, events: &mut Vec<Event>) {
        if core.plan_wanted && self.t - core.planned >= self.d.plan_ms && !core.offers.is_empty() {
            core.plan_wanted = false;
            core.planned = self.t;
            let input = Input::Plan { offers: std::mem::take(&mut core.offers) };
            self.decide(who, core, &input, events);
            if let Input::Plan { offers } = input {
                core.offers = offers;
            }
        }
    }

    fn append(&mut self, who: (usize, u32), core: &mut Core, events: Vec<Event>) -> Result<(), Crash> {
        if events.is_empty() {
            self.release(core)?;
        } else {
            self.may_crash(Count::CrashBeforeAppend)?;
            let expected = core.c.version.0 - events.len() as u64;
            core.in_air += 1;
            self.store_append(who, core.epoch, expected, events);
            self.may_crash(Count::CrashAppending)?;
        }
        self.settled(who, core)
    }

    pub(crate) fn appended(&mut self, who: (usize, u32), result: Result<u64, Refused>) {
        if self.procs[who.0].inc != who.1 {
            return;
        }
        let Ok(version) = result else {
            // Fenced: another one leads. The store's word ends this process; a standby of it may lead again.
            self.trace.line(|| format!("scheduler {} is refused by the store and ends", who.0));
            self.stopped(who.0);
            return;
        };
        self.with_core(who, |world, core| {
            core.in_air -= 1;
            core.durable = version;
            world.release(core)?;
            world.settled(who, core)
        });
    }

    fn release(&mut self, core: &mut Core) -> Result<(), Crash> {
        while core.answers.front().is_some_and(|(version, _)| *version <= core.durable) {
            self.may_crash(Count::CrashBeforeAnswer)?;
            let Some((_, answer)) = core.answers.pop_front() else { break };
            match answer {
                Answer::Client { client, reply } => self.reply(client, reply),
                Answer::Welcome { conn, node, stale } => {
                    core.sessions.insert(node, conn);
                    core.heard.insert(node, self.t);
                    self.send_to_worker(conn, ToWorker::Welcome);
                    for grant in stale {
                        self.send_to_worker(conn, ToWorker::Superseded { grant });
                    }
                    core.inbox.push_back(Msg::Joined(node));
                }
                Answer::Ack { conn, id, superseded } => {
                    if let Some(grant) = superseded {
                        self.send_to_worker(conn, ToWorker::Superseded { grant });
                    }
                    self.send_to_worker(conn, ToWorker::Ack { id });
                }
            }
        }
        Ok(())
    }

    /// Everything known is durable: it may be acted on.
    fn settled(&mut self, who: (usize, u32), core: &mut Core) -> Result<(), Crash> {
        if core.in_air > 0 {
            return Ok(());
        }
        if std::mem::take(&mut core.effects_wanted) {
            self.effects(who, core)?;
        }
        if core.durable >= core.snapshot_at + self.d.snapshot_every {
            core.snapshot_at = core.durable;
            if !self.calm && self.rng.percent(10) {
                self.counts.add(Count::SnapshotLost);
            } else if core.epoch == self.store.epoch {
                Oracle::snapshot(self, &core.c);
                self.store.snapshot = Some((core.durable, core.c.clone()));
            }
        }
        Ok(())
    }
}

impl Core {
    fn has_room(&self) -> bool {
        self.in_air < APPENDS_MAX && (self.in_air == 0 || !self.effects_wanted)
    }

    fn answer(&mut self, answer: Answer) {
        self.answers.push_back((self.c.version.0, answer));
    }

    /// Whether nothing is on its way to the store.
    pub(crate) fn is_settled(&self) -> bool {
        self.in_air == 0
    }
}

/// Whether a stop lets the command save first.
pub(crate) fn saves_first(why: StopWhy) -> bool {
    why != StopWhy::Cancel
}
