//! The one state of a run, shared by the models of all hosts. Everything runs on one thread; the lock is held for moments
//! and never across an await.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use spotq_model::Timestamp;
use spotq_sim::{Rng, TraceLevel, Violation};

use crate::cloud::Cloud;
use crate::counts::{Count, Counts};
use crate::draw::{Drawn, START};
use crate::driver::Act;
use crate::faults::Ev;
use crate::node::Slot;
use crate::objects::Objects;
use crate::oracle::Oracle;
use crate::store::Disk;
use crate::trace::Trace;

/// One step of the network and of every host. Messages take at least this long.
pub(crate) const TICK_MS: u64 = 20;
/// Nodes that may be up at once. Each is a host that is there from the start and runs what its newest node runs.
pub(crate) const SLOTS: usize = 8;
/// Hosts are told apart by the step in which they were made.
pub(crate) const SCHEDULER_HOST: usize = 0;
pub(crate) const USERS_HOST: usize = 1;
pub(crate) const FIRST_NODE_HOST: usize = 2;

/// What all hosts share.
#[derive(Debug, Clone)]
pub(crate) struct World(Arc<Mutex<Inner>>);

#[derive(Debug)]
pub(crate) struct Inner {
    /// Milliseconds since the start.
    pub t: u64,
    /// Hosts run, and their clocks with them. In between turmoil's clocks show how much real time has passed.
    pub stepping: bool,
    /// No more faults.
    pub calm: bool,
    pub calm_from: u64,
    pub rng: Rng,
    pub d: Drawn,
    pub dir: PathBuf,
    pub counts: Counts,
    pub trace: Trace,
    pub violation: Option<Violation>,
    /// How far each host's wall clock is off.
    pub skews: Vec<i64>,
    pub events: BTreeMap<(u64, u64), Ev>,
    next_event: u64,
    next_pid: u32,
    acts: Vec<Act>,
    pub cloud: Cloud,
    pub slots: Vec<Slot>,
    pub disk: Disk,
    pub objects: Objects,
    pub oracle: Oracle,
    /// The scheduler's process has ended by itself.
    pub scheduler_over: bool,
    pub scheduler_up: bool,
    pub jobs: Vec<JobState>,
}

/// What has become of a user's job, as far as its user and its commands know.
#[derive(Debug, Default, Clone)]
pub(crate) struct JobState {
    /// What the user was told: number and name.
    pub told: Option<(u32, String)>,
    pub user_is_done: bool,
    pub failed_so_far: u32,
}

impl World {
    pub(crate) fn new(rng: Rng, d: Drawn, dir: PathBuf, level: TraceLevel) -> World {
        let jobs = vec![JobState::default(); d.jobs.len()];
        World(Arc::new(Mutex::new(Inner {
            t: 0,
            stepping: false,
            calm: false,
            calm_from: 0,
            rng,
            d,
            dir,
            counts: Counts::default(),
            trace: Trace::new(level),
            violation: None,
            skews: vec![0; FIRST_NODE_HOST + SLOTS],
            events: BTreeMap::new(),
            next_event: 0,
            next_pid: 1000,
            acts: Vec::new(),
            cloud: Cloud::default(),
            slots: (0..SLOTS).map(|_| Slot::default()).collect(),
            disk: Disk::default(),
            objects: Objects::default(),
            oracle: Oracle::default(),
            scheduler_over: false,
            scheduler_up: true,
            jobs,
        })))
    }

    /// The state, with its time up to date.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic in one host is a violation of its own; the state stays whole enough to tell of it.
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(elapsed) = turmoil::sim_elapsed().filter(|_| inner.stepping) {
            inner.t = inner.t.max(millis(elapsed));
        }
        inner
    }
}

impl Inner {
    /// The first one counts.
    pub(crate) fn violated(&mut self, id: &'static str, text: String) {
        let t = self.t;
        self.trace.line(t, || format!("!!! {id}: {text}"));
        self.violation.get_or_insert(Violation { id, text });
    }

    pub(crate) fn at(&mut self, t: u64, ev: Ev) {
        self.next_event += 1;
        self.events.insert((t, self.next_event), ev);
    }

    pub(crate) fn after(&mut self, delay: u64, ev: Ev) {
        self.at(self.t + delay, ev);
    }

    /// What is to be done to hosts.
    pub(crate) fn acts(&mut self) -> &mut Vec<Act> {
        &mut self.acts
    }

    /// A number of a process that no other one of this run has.
    pub(crate) fn next_pid(&mut self) -> u32 {
        self.next_pid += 1;
        self.next_pid
    }

    pub(crate) fn say(&mut self, text: impl FnOnce() -> String) {
        let t = self.t;
        self.trace.line(t, text);
    }

    pub(crate) fn count(&mut self, what: Count) {
        self.counts.add(what);
    }

    /// Draws a fault, of which there are none in the calm.
    pub(crate) fn fault(&mut self, ppm: spotq_sim::Ppm) -> bool {
        !self.calm && self.rng.chance(ppm)
    }

    /// The true time, as a right wall clock shows it.
    pub(crate) fn true_now(&self) -> Timestamp {
        Timestamp(START + self.t)
    }

    pub(crate) fn clock_of(&self, host: usize) -> Timestamp {
        Timestamp((START + self.t).saturating_add_signed(self.skews[host]))
    }

    /// Whether times in this run mean nothing, since clocks jump.
    pub(crate) fn clocks_jump(&self) -> bool {
        self.d.faults.clock_jump_every > 0
    }
}

/// Answers for every machine of a run. Which one asks is told by when its host was made.
#[derive(Debug)]
pub(crate) struct Machines {
    pub world: World,
    pub random: std::cell::RefCell<Rng>,
}

impl spotq_host::simulation::Machine for Machines {
    fn now(&self) -> Timestamp {
        let host = current_host();
        let inner = self.world.lock();
        host.map_or_else(|| inner.true_now(), |host| inner.clock_of(host))
    }

    fn random(&self) -> u128 {
        let mut rng = self.random.borrow_mut();
        u128::from(rng.below(u64::MAX)) << 64 | u128::from(rng.below(u64::MAX))
    }
}

fn current_host() -> Option<usize> {
    let since_start = turmoil::sim_elapsed()?;
    let made_at = millis(since_start.saturating_sub(turmoil::elapsed()));
    usize::try_from(made_at / TICK_MS).ok()
}

fn millis(span: std::time::Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
