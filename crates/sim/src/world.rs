//! The world of one run: what is true, what is still to come, and what chance does. Virtual time moves from one event to
//! the next; nothing here waits and nothing here reads a clock.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use spotq_model::{EffectClass, Generation, NodeId};

use crate::attempt::Work;
use crate::cloud::{Cloud, CloudCall, Fate};
use crate::counts::{Count, Counts};
use crate::draw::{Drawn, START, Wish, draw};
use crate::net::Conn;
use crate::oracle::Oracle;
use crate::rng::Rng;
use crate::scheduler::{Grant, Msg, Proc};
use crate::store::{Refused, Store};
use crate::trace::Trace;
use crate::users::Reply;
use crate::worker::ToWorker;
use crate::{Options, Run, Violation};

/// All work is done within this virtual time after the faults have stopped: what fifty jobs need on eight nodes, and the
/// longest cool-downs and pauses on top.
pub(crate) const CALM_MAX: u64 = 4 * 3_600_000;
/// How often what nobody refers to is looked for.
const AUDIT_MS: u64 = 30_000;
/// More events than any run needs: a loop that never ends is found, too.
const EVENTS_MAX: u64 = 2_000_000;

/// Something to come.
#[derive(Debug)]
pub(crate) enum Ev {
    Submit { client: usize, tried: bool },
    Wish { client: usize, wish: usize },
    Reply { client: usize, reply: Reply },
    Lead { proc: usize },
    Inbox { proc: usize, inc: u32, msg: Box<Msg> },
    Step { proc: usize, inc: u32 },
    Tick { proc: usize, inc: u32 },
    PollOffers { proc: usize, inc: u32 },
    PollList { proc: usize, inc: u32 },
    Write { id: u64 },
    Appended { proc: usize, inc: u32, result: Result<u64, Refused> },
    Call { who: (usize, u32), key: (EffectClass, NodeId, Generation), call: Box<CloudCall> },
    Fate { inst: usize, fate: Fate },
    Dial { inst: usize, inc: u32 },
    ToScheduler { conn: usize, msg: Box<Msg> },
    ToWorker { conn: usize, msg: Box<ToWorker> },
    Broken { conn: usize },
    NoticeSeen { inst: usize, inc: u32, deadline: Option<u64> },
    WorkerBack { inst: usize, inc: u32 },
    Work { inst: usize, inc: u32, grant: Grant, what: Box<Work> },
    Fault(Fault),
    Calm,
    Audit,
}

/// What chance does now and then.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fault {
    TakeOver,
    ClockJump,
    StreamBreak,
    Partition,
    WorkerCrash,
    TrainerKill,
    Price,
}

/// One run.
#[derive(Debug)]
pub(crate) struct World {
    pub seed: u64,
    pub rng: Rng,
    pub d: Drawn,
    /// Milliseconds since the Unix epoch, as nobody's clock shows them.
    pub t: u64,
    to_come: ToCome,
    next: u64,
    /// Faults have stopped.
    pub calm: bool,
    pub calm_from: u64,
    pub store: Store,
    pub procs: Vec<Proc>,
    /// Who took the leadership last.
    pub leader: usize,
    pub conns: Vec<Conn>,
    pub cloud: Cloud,
    /// Wishes that were answered.
    pub heard: BTreeSet<(usize, usize)>,
    pub oracle: Oracle,
    pub counts: Counts,
    pub violation: Option<Violation>,
    pub trace: Trace,
}

/// What becomes durable in the life of a job, roughly: the log is not to be copied as it grows.
const EVENTS_OF_A_JOB: usize = 32;

/// What is going to happen, by time and then in the order in which it was caused.
#[derive(Debug, Default)]
struct ToCome {
    /// When, in which order, and its place in `events`: small, since a heap moves its entries about.
    order: BinaryHeap<Reverse<(u64, u64, usize)>>,
    events: Vec<Option<Ev>>,
    free: Vec<usize>,
}

impl ToCome {
    fn push(&mut self, at: u64, order: u64, ev: Ev) {
        let place = self.free.pop().unwrap_or_else(|| {
            self.events.push(None);
            self.events.len() - 1
        });
        self.events[place] = Some(ev);
        self.order.push(Reverse((at, order, place)));
    }

    fn pop(&mut self) -> Option<(u64, Ev)> {
        let Reverse((at, _, place)) = self.order.pop()?;
        self.free.push(place);
        self.events[place].take().map(|ev| (at, ev))
    }
}

impl World {
    pub(crate) fn new(seed: u64, options: &Options) -> World {
        let mut rng = Rng::new(seed);
        let d = draw(&mut rng, options.jobs);
        let procs = (0..d.faults.schedulers).map(|_| Proc::default()).collect();
        let oracle = Oracle::new(d.jobs.len());
        let mut world = World {
            seed,
            rng,
            d,
            t: START,
            to_come: ToCome::default(),
            next: 0,
            calm: false,
            calm_from: u64::MAX,
            store: Store::new(EVENTS_OF_A_JOB * options.jobs as usize),
            procs,
            leader: 0,
            conns: Vec::new(),
            cloud: Cloud::default(),
            heard: BTreeSet::new(),
            oracle,
            counts: Counts::default(),
            violation: None,
            trace: Trace::new(options.trace),
        };
        world.begin();
        world
    }

    fn begin(&mut self) {
        self.at(START, Ev::Lead { proc: 0 });
        self.at(START + self.d.safety_ms, Ev::Calm);
        self.after(AUDIT_MS, Ev::Audit);
        for client in 0..self.d.jobs.len() {
            self.at(START + self.d.jobs[client].submit_at, Ev::Submit { client, tried: false });
            for wish in 0..self.d.jobs[client].wishes.len() {
                self.at(START + self.d.jobs[client].wishes[wish].0, Ev::Wish { client, wish });
            }
        }
        let all = [
            Fault::TakeOver,
            Fault::ClockJump,
            Fault::StreamBreak,
            Fault::Partition,
            Fault::WorkerCrash,
            Fault::TrainerKill,
            Fault::Price,
        ];
        all.into_iter().for_each(|fault| self.again(fault));
    }

    pub(crate) fn at(&mut self, at: u64, ev: Ev) {
        self.next += 1;
        self.to_come.push(at.max(self.t), self.next, ev);
    }

    pub(crate) fn after(&mut self, delay: u64, ev: Ev) {
        self.at(self.t + delay, ev);
    }

    /// The first violation is the one that counts; the run ends with it.
    pub(crate) fn violated(&mut self, id: &'static str, text: String) {
        if self.violation.is_none() {
            self.trace.line(|| format!("VIOLATION {id}: {text}"));
            self.violation = Some(Violation { id, text });
        }
    }

    pub(crate) fn run(mut self) -> Run {
        while self.violation.is_none() {
            let Some((at, ev)) = self.to_come.pop() else { break };
            self.t = at;
            self.trace.step(self.t, &ev);
            self.happens(ev);
            if self.calm && self.over() {
                break;
            }
            if self.t > self.calm_from.saturating_add(CALM_MAX) || self.next > EVENTS_MAX {
                let left = self.unfinished();
                self.violated("INV-12", format!("no fault for {CALM_MAX} ms, and still: {left}"));
            }
        }
        if self.violation.is_none() {
            Oracle::ended(&mut self);
        }
        let virtual_ms = self.t - START;
        let (hash, trace) = self.trace.finish();
        Run { seed: self.seed, violation: self.violation, counts: self.counts, virtual_ms, hash, trace }
    }

    fn happens(&mut self, ev: Ev) {
        match ev {
            Ev::Submit { client, tried } => self.submit(client, tried),
            Ev::Wish { client, wish } => self.wish(client, wish),
            Ev::Reply { client, reply } => self.replied(client, reply),
            Ev::Lead { proc } => self.lead(proc),
            Ev::Inbox { proc, inc, msg } => self.inbox((proc, inc), *msg),
            Ev::Step { proc, inc } => self.step((proc, inc)),
            Ev::Tick { proc, inc } => self.tick((proc, inc)),
            Ev::PollOffers { proc, inc } => self.poll_offers(proc, inc),
            Ev::PollList { proc, inc } => self.poll_list(proc, inc),
            Ev::Write { id } => self.store_write(id),
            Ev::Appended { proc, inc, result } => self.appended((proc, inc), result),
            Ev::Call { who, key, call } => self.cloud_called(who, key, *call),
            Ev::Fate { inst, fate } => self.fate(inst, fate),
            Ev::Dial { inst, inc } => self.dial(inst, inc),
            Ev::ToScheduler { conn, msg } => self.arrive_at_scheduler(conn, *msg),
            Ev::ToWorker { conn, msg } => self.arrive_at_worker(conn, *msg),
            Ev::Broken { conn } => self.broken(conn),
            Ev::NoticeSeen { inst, inc, deadline } => self.notice_seen(inst, inc, deadline),
            Ev::WorkerBack { inst, inc } => self.worker_back(inst, inc),
            Ev::Work { inst, inc, grant, what } => self.work(inst, inc, grant, *what),
            Ev::Fault(fault) => {
                if !self.calm {
                    self.fault(fault);
                    self.again(fault);
                }
            }
            Ev::Calm => self.calm_down(),
            Ev::Audit => {
                Oracle::audit(self);
                self.after(AUDIT_MS, Ev::Audit);
            }
        }
    }

    /// When a fault comes next, if this run has it.
    fn again(&mut self, fault: Fault) {
        let faults = &self.d.faults;
        let every = match fault {
            Fault::TakeOver if faults.schedulers < 2 => 0,
            Fault::TakeOver => faults.takeover_every,
            Fault::ClockJump => faults.clock_jump_every,
            Fault::StreamBreak => faults.stream_break_every,
            Fault::Partition => faults.partition_every,
            Fault::WorkerCrash => faults.worker_crash_every,
            Fault::TrainerKill => faults.trainer_kill_every,
            Fault::Price => 45_000,
        };
        if every > 0 {
            let gap = self.rng.gap(every);
            self.after(gap, Ev::Fault(fault));
        }
    }

    fn fault(&mut self, fault: Fault) {
        match fault {
            Fault::TakeOver => {
                let proc = self.rng.below(self.procs.len() as u64) as usize;
                self.lead(proc);
            }
            Fault::ClockJump => {
                self.counts.add(Count::ClockJump);
                let proc = self.rng.below(self.procs.len() as u64) as usize;
                let max = self.d.faults.clock_jump_max;
                self.procs[proc].skew = self.rng.below(2 * max) as i64 - max as i64;
            }
            Fault::StreamBreak => {
                if let Some(conn) = self.some_stream() {
                    self.counts.add(Count::StreamBroken);
                    self.conn_break(conn);
                }
            }
            Fault::Partition => {
                let Some(conn) = self.some_stream() else { return };
                if self.rng.percent(50) {
                    self.counts.add(Count::HalfOpen);
                    self.touch_by_stream(conn, 0);
                } else {
                    self.counts.add(Count::Partition);
                    let until = self.t + self.rng.gap(40_000);
                    self.touch_by_stream(conn, until);
                }
                self.conn_half_open(conn);
            }
            Fault::WorkerCrash => {
                if let Some(inst) = self.some_worker() {
                    self.worker_crash(inst);
                }
            }
            Fault::TrainerKill => {
                if let Some(inst) = self.some_worker() {
                    self.trainer_killed(inst);
                }
            }
            Fault::Price => self.move_price(),
        }
    }

    fn touch_by_stream(&mut self, conn: usize, until: u64) {
        let inst = self.cloud.insts.iter_mut().find(|inst| inst.worker.conn == Some(conn));
        if let Some(inst) = inst {
            inst.worker.touch();
            inst.worker.partitioned_until = until;
        }
    }

    fn some_worker(&mut self) -> Option<usize> {
        let up = self.cloud.insts.iter().enumerate().filter(|(_, i)| i.is_up() && i.worker.is_up());
        let up: Vec<usize> = up.map(|(inst, _)| inst).collect();
        (!up.is_empty()).then(|| *self.rng.pick(&up))
    }

    fn some_stream(&mut self) -> Option<usize> {
        let inst = self.some_worker()?;
        self.cloud.insts[inst].worker.conn
    }

    /// Faults stop. Clocks are right again, prices are fair, and what was held is released.
    fn calm_down(&mut self) {
        self.trace.line(|| "the faults stop".into());
        (self.calm, self.calm_from) = (true, self.t);
        self.procs.iter_mut().for_each(|proc| proc.skew = 0);
        self.calm_prices();
        for client in 0..self.d.jobs.len() {
            let wish = self.d.jobs[client].wishes.len();
            self.d.jobs[client].wishes.push((0, Wish::Release));
            // After everything that its user wanted before.
            let last = self.d.jobs[client].wishes.iter().map(|(at, _)| START + at).max().unwrap_or(0);
            self.at(last + 60_000, Ev::Wish { client, wish });
        }
    }

    /// Nothing is left to do, and nobody pays.
    fn over(&self) -> bool {
        let c = &self.oracle.shadow;
        // Asked at every step, so what is seldom true comes first.
        c.live.is_empty()
            && c.active.is_empty()
            && c.queue.is_empty()
            && c.jobs.len() == self.d.jobs.len()
            && self.d.jobs.iter().all(|job| job.answered.is_some())
            && c.jobs.values().all(|job| job.tasks.values().all(|task| task.is_done()))
            && self.cloud.insts.iter().all(|inst| !inst.is_up())
            && self.procs[self.leader].core.as_ref().is_some_and(|core| core.is_settled())
    }

    fn unfinished(&self) -> String {
        let c = &self.oracle.shadow;
        let open = c.jobs.values().flat_map(|job| job.tasks.values()).filter(|task| !task.is_done());
        let open: Vec<String> = open.take(3).map(|task| format!("{} {:?}", task.id, task.phase)).collect();
        let live: Vec<String> =
            c.live_nodes().take(3).map(|n| format!("node {} {:?}", n.id, n.state)).collect();
        let up = self.cloud.insts.iter().filter(|inst| inst.is_up()).count();
        let unheard = self.d.jobs.iter().filter(|job| job.answered.is_none()).count();
        format!("tasks {open:?}, {live:?}, {up} instances up, {unheard} clients without an answer")
    }
}
