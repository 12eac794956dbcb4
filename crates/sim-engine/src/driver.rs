//! Makes one run: steps the hosts, lets what was drawn happen to them, and looks whether all is over.

use std::rc::Rc;
use std::time::Duration;

use spotq_sim::{Rng, TraceLevel, Violation};
use turmoil::Sim;

use crate::net::SCHEDULER;
use crate::oracle::Oracle;
use crate::world::{FIRST_NODE_HOST, Machines, SCHEDULER_HOST, SLOTS, TICK_MS, USERS_HOST, World};
use crate::{Options, Run, draw, faults, logs, node, scheduler, store, users};

/// Without faults everything is over after this much longer.
const CALM_MAX_MS: u64 = 15 * 60_000;
const USERS: &str = "users";

/// What is to be done to a host or its connection with the scheduler.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Act {
    StartScheduler,
    KillScheduler,
    /// The machine boots, or its worker is started again.
    Start {
        slot: usize,
    },
    /// The machine or its worker is no more. `silent`: nobody closes its connections.
    Kill {
        slot: usize,
        silent: bool,
    },
    Hold {
        host: usize,
    },
    Partition {
        host: usize,
    },
    /// Nothing comes from the scheduler to the host.
    CutTo {
        host: usize,
    },
    /// Nothing comes from the host to the scheduler.
    CutFrom {
        host: usize,
    },
    Repair {
        host: usize,
    },
    LoseNothing,
}

/// Makes the run of a seed.
pub(crate) fn run(seed: u64, options: &Options) -> Run {
    let mut rng = Rng::new(seed);
    let drawn = draw::draw(&mut rng, options.jobs);
    let dir = match directory() {
        Ok(dir) => dir,
        Err(error) => return failed(seed, format!("no directory for the nodes' disks: {error}")),
    };
    let random = Rng::new(seed ^ 0x5eed);
    let world = World::new(rng, drawn, dir.path().to_owned(), options.trace);
    let machines = Machines { world: world.clone(), random: random.into() };
    let _machine = spotq_host::simulation::install(Rc::new(machines));
    let logs = logs::Logs::new(&world, options.trace != TraceLevel::Hash || seed.is_multiple_of(logs::EVERY));
    let ended = logs.during(|| Driver::new(seed, &world).run());
    let inner = &mut *world.lock();
    if let Some(broken) = ended {
        inner.violated(broken.id, broken.text);
    }
    Oracle::check_log(inner, &logs.text());
    let (hash, trace) = inner.trace.finish();
    Run {
        seed,
        violation: inner.violation.take(),
        counts: inner.counts.clone(),
        virtual_ms: inner.t,
        hash,
        trace,
    }
}

/// Where the disks of the nodes are: in memory, if the system has such a place.
fn directory() -> std::io::Result<tempfile::TempDir> {
    const IN_MEMORY: &str = "/dev/shm";
    let builder = &mut tempfile::Builder::new();
    builder.prefix("spotq-sim-");
    builder.tempdir_in(IN_MEMORY).or_else(|_| builder.tempdir())
}

fn failed(seed: u64, text: String) -> Run {
    let violation = Some(Violation { id: "none", text });
    Run { seed, violation, counts: Default::default(), virtual_ms: 0, hash: 0, trace: Vec::new() }
}

struct Driver<'a> {
    sim: Sim<'a>,
    world: World,
}

impl<'a> Driver<'a> {
    fn new(seed: u64, world: &World) -> Driver<'a> {
        let mut builder = turmoil::Builder::new();
        let latency = {
            let d = &world.lock().d;
            (Duration::from_millis(d.latency_max_ms), f64::from(d.faults.message_loss_ppm) / 1e6)
        };
        builder
            .rng_seed(seed)
            .tick_duration(Duration::from_millis(TICK_MS))
            .simulation_duration(Duration::from_secs(24 * 3600))
            .min_message_latency(Duration::ZERO)
            .max_message_latency(latency.0)
            .fail_rate(latency.1)
            .tcp_capacity(1024);
        Driver { sim: builder.build(), world: world.clone() }
    }

    /// What broke beside what the models saw.
    fn run(mut self) -> Option<Violation> {
        let broken = self.make_hosts().err();
        if let Some(broken) = broken {
            return Some(broken);
        }
        faults::begin(&mut self.world.lock());
        loop {
            if let Err(broken) = self.step() {
                return Some(broken);
            }
            let due = {
                let inner = &mut *self.world.lock();
                let t = inner.t;
                let later = inner.events.split_off(&(t, u64::MAX));
                std::mem::replace(&mut inner.events, later)
            };
            for ev in due.into_values() {
                faults::happens(&mut self.world.lock(), ev);
                self.act();
            }
            faults::mind_the_scheduler(&mut self.world.lock());
            self.act();
            let inner = &mut *self.world.lock();
            if inner.violation.is_some() {
                return None;
            }
            if inner.calm && Oracle::is_over(inner) {
                Oracle::ended(inner);
                return None;
            }
            if inner.calm && inner.t > inner.calm_from + CALM_MAX_MS {
                let left = Oracle::what_is_left(inner);
                inner.violated("INV-12", format!("without faults it is not over: {left}"));
                return None;
            }
        }
    }

    /// Each host is made in a step of its own, by which its machine is known.
    fn make_hosts(&mut self) -> Result<(), Violation> {
        let world = self.world.clone();
        self.sim.host(SCHEDULER, move || booted(scheduler::run(world.clone())));
        self.step()?;
        let world = self.world.clone();
        self.sim.host(USERS, move || booted(users::run(world.clone())));
        self.step()?;
        for slot in 0..SLOTS {
            let world = self.world.clone();
            self.sim.host(host_of(slot), move || booted(node::run(world.clone(), slot)));
            self.step()?;
        }
        Ok(())
    }

    fn step(&mut self) -> Result<(), Violation> {
        self.world.lock().stepping = true;
        let stepped = self.sim.step();
        let t = u64::try_from(self.sim.elapsed().as_millis()).unwrap_or(u64::MAX);
        let inner = &mut *self.world.lock();
        inner.stepping = false;
        inner.t = t;
        stepped.map(|_| ()).map_err(|error| Violation { id: "INV-12", text: format!("a host ends: {error}") })
    }

    /// Does what the models asked for. Hosts look at the world while they start and end, so nobody holds it meanwhile.
    fn act(&mut self) {
        loop {
            let acts = std::mem::take(self.world.lock().acts());
            if acts.is_empty() {
                return;
            }
            acts.into_iter().for_each(|act| self.act_once(act));
        }
    }

    fn act_once(&mut self, act: Act) {
        match act {
            Act::StartScheduler => self.sim.bounce(SCHEDULER),
            Act::KillScheduler => {
                let silent = self.world.lock().rng.percent(30);
                self.crash(SCHEDULER_HOST, silent);
                store::crash(&mut self.world.lock());
            }
            Act::Start { slot } => self.sim.bounce(host_of(slot)),
            Act::Kill { slot, silent } => self.crash(FIRST_NODE_HOST + slot, silent),
            Act::Hold { host } => self.sim.hold(host_name(host), SCHEDULER),
            Act::Partition { host } => self.sim.partition(host_name(host), SCHEDULER),
            Act::CutTo { host } => self.sim.partition_oneway(SCHEDULER, host_name(host)),
            Act::CutFrom { host } => self.sim.partition_oneway(host_name(host), SCHEDULER),
            Act::Repair { host } => self.sim.release(host_name(host), SCHEDULER),
            Act::LoseNothing => self.sim.set_fail_rate(0.0),
        }
    }

    /// Whatever runs on the host is no more. `silent`: what it would still say is lost; else its system closes its
    /// connections.
    ///
    /// The runtime drops its tasks in an order that depends on other runs in this process. So each connection is closed
    /// as fast as any other meanwhile, none of it is lost by chance, and the users, who have many on one link, hear
    /// nothing.
    fn crash(&mut self, host: usize, silent: bool) {
        let peers = if host == SCHEDULER_HOST { USERS_HOST..FIRST_NODE_HOST + SLOTS } else { 0..1 };
        let (name, peers): (String, Vec<String>) = (host_name(host), peers.map(host_name).collect());
        let silent = |peer: &str| silent || peer == USERS;
        for peer in &peers {
            match silent(peer) {
                true => self.sim.partition(name.as_str(), peer.as_str()),
                false => self.sim.set_link_latency(name.as_str(), peer.as_str(), Duration::ZERO),
            }
        }
        self.sim.set_fail_rate(0.0);
        self.sim.crash(name.as_str());
        let (latency, loss) = {
            let inner = self.world.lock();
            let loss = if inner.calm { 0 } else { inner.d.faults.message_loss_ppm };
            (Duration::from_millis(inner.d.latency_max_ms), f64::from(loss) / 1e6)
        };
        self.sim.set_fail_rate(loss);
        for peer in &peers {
            match silent(peer) {
                true => self.sim.repair(name.as_str(), peer.as_str()),
                false => self.sim.set_link_max_message_latency(name.as_str(), peer.as_str(), latency),
            }
        }
    }
}

/// A host takes its first step when its clock runs: turmoil polls what it starts once before that.
async fn booted(software: impl Future<Output = turmoil::Result>) -> turmoil::Result {
    tokio::time::sleep(Duration::from_millis(1)).await;
    software.await
}

fn host_of(slot: usize) -> String {
    format!("node-{slot}")
}

/// Its name in the network.
pub(crate) fn host_name(host: usize) -> String {
    match host {
        SCHEDULER_HOST => SCHEDULER.to_owned(),
        USERS_HOST => USERS.to_owned(),
        node => host_of(node - FIRST_NODE_HOST),
    }
}
