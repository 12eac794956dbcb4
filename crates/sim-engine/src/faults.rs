//! What happens in a run, and when: the fates of instances, and the faults that come again and again. Changes the models
//! and says what is to be done to hosts; it touches none itself.

use spotq_model::GoneCause;

use crate::counts::Count;
use crate::draw::Drawn;
use crate::driver::{Act, host_name};
use crate::oracle::Oracle;
use crate::world::{FIRST_NODE_HOST, Inner, SLOTS};
use crate::{cloud, objects};

/// How often the cloud is looked at for instances that nobody knows.
const AUDIT_MS: u64 = 1000;
const PRICES_MS: u64 = 7000;

/// Something that happens at a time.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Ev {
    Boot { inst: usize },
    Reclaim { inst: usize, notice: u64 },
    Withdraw { inst: usize },
    Gone { inst: usize, cause: GoneCause },
    WorkerBack { inst: usize },
    SchedulerBack,
    LinkBack { host: usize },
    Fault(Fault),
    Prices,
    Audit,
    Calm,
}

/// Kinds of faults that come again and again.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fault {
    SchedulerCrash,
    WorkerCrash,
    Partition,
    Hold,
    ClockJump,
    Corrupt,
}

const FAULTS: [Fault; 6] = [
    Fault::SchedulerCrash,
    Fault::WorkerCrash,
    Fault::Partition,
    Fault::Hold,
    Fault::ClockJump,
    Fault::Corrupt,
];

/// All hosts are there: the safety phase begins.
pub(crate) fn begin(inner: &mut Inner) {
    let t = inner.t;
    inner.at(t + inner.d.safety_ms, Ev::Calm);
    inner.after(AUDIT_MS, Ev::Audit);
    inner.after(PRICES_MS, Ev::Prices);
    if inner.d.faults.message_loss_ppm > 0 {
        inner.count(Count::Lossy);
    }
    for fault in FAULTS {
        let mean = every(&inner.d, fault);
        if mean > 0 {
            let gap = inner.rng.gap(mean);
            inner.after(gap, Ev::Fault(fault));
        }
    }
}

pub(crate) fn happens(inner: &mut Inner, ev: Ev) {
    match ev {
        Ev::Boot { inst } => cloud::boot(inner, inst),
        Ev::Reclaim { inst, notice } => cloud::reclaim(inner, inst, notice),
        Ev::Withdraw { inst } => cloud::withdraw(inner, inst),
        Ev::Gone { inst, cause } => cloud::gone(inner, inst, cause),
        Ev::WorkerBack { inst } => {
            if inner.cloud.insts[inst].is_up() {
                let slot = inner.cloud.insts[inst].slot;
                inner.count(Count::WorkerBack);
                inner.say(|| format!("worker of i-{inst} is started again"));
                inner.slots[slot].runs = true;
                inner.acts().push(Act::Start { slot });
            }
        }
        Ev::SchedulerBack => {
            inner.say(|| "the scheduler starts".into());
            inner.scheduler_up = true;
            inner.acts().push(Act::StartScheduler);
        }
        Ev::LinkBack { host } => inner.acts().push(Act::Repair { host }),
        Ev::Fault(fault) if !inner.calm => {
            let mean = every(&inner.d, fault);
            let gap = inner.rng.gap(mean);
            inner.after(gap, Ev::Fault(fault));
            strikes(inner, fault);
        }
        Ev::Fault(_) => {}
        Ev::Prices => {
            cloud::move_prices(inner);
            inner.after(PRICES_MS, Ev::Prices);
        }
        Ev::Audit => {
            Oracle::audit(inner);
            inner.after(AUDIT_MS, Ev::Audit);
        }
        Ev::Calm => {
            inner.calm = true;
            inner.calm_from = inner.t;
            inner.say(|| "no more faults".into());
            inner.skews.iter_mut().for_each(|skew| *skew = 0);
            inner.acts().push(Act::LoseNothing);
            (1..FIRST_NODE_HOST + SLOTS).for_each(|host| inner.acts().push(Act::Repair { host }));
        }
    }
}

/// A process that has ended by itself is started again like one that was killed.
pub(crate) fn mind_the_scheduler(inner: &mut Inner) {
    if std::mem::take(&mut inner.scheduler_over) {
        scheduler_dies(inner);
    }
}

fn strikes(inner: &mut Inner, fault: Fault) {
    match fault {
        Fault::SchedulerCrash => {
            if inner.scheduler_up {
                inner.count(Count::SchedulerCrash);
                scheduler_dies(inner);
            }
        }
        Fault::WorkerCrash => worker_dies(inner),
        Fault::Partition | Fault::Hold => link_breaks(inner, fault),
        Fault::ClockJump => {
            let hosts = inner.skews.len() as u64;
            let host = inner.rng.below(hosts) as usize;
            let skew = inner.rng.within(0, 120_000) as i64 - 60_000;
            inner.skews[host] = skew;
            inner.count(Count::ClockJump);
            inner.say(|| format!("the clock of {} is off by {skew} ms", host_name(host)));
        }
        Fault::Corrupt => {
            let jobs: Vec<String> = inner.objects.logs.keys().cloned().collect();
            if !jobs.is_empty() {
                let job = inner.rng.pick(&jobs).clone();
                objects::corrupt(inner, &job);
            }
        }
    }
}

fn scheduler_dies(inner: &mut Inner) {
    inner.say(|| "the scheduler is killed".into());
    let back = inner.rng.within(50, 6000);
    inner.after(back, Ev::SchedulerBack);
    inner.scheduler_up = false;
    inner.acts().push(Act::KillScheduler);
}

fn worker_dies(inner: &mut Inner) {
    let up: Vec<usize> = (0..SLOTS).filter(|slot| inner.slots[*slot].runs).collect();
    if up.is_empty() {
        return;
    }
    let slot = *inner.rng.pick(&up);
    let Some(inst) = inner.slots[slot].inst else { return };
    inner.count(Count::WorkerCrash);
    inner.say(|| format!("worker of i-{inst} is killed"));
    let node = &mut inner.cloud.insts[inst];
    node.touched = true;
    node.commands.clear();
    node.owed.clear();
    inner.slots[slot].terminate = None;
    inner.slots[slot].runs = false;
    if inner.rng.percent(80) {
        let back = inner.rng.within(100, 5000);
        inner.after(back, Ev::WorkerBack { inst });
    }
    inner.acts().push(Act::Kill { slot, silent: false });
}

fn link_breaks(inner: &mut Inner, fault: Fault) {
    let host = 1 + inner.rng.below((FIRST_NODE_HOST + SLOTS - 1) as u64) as usize;
    if let Some(inst) = host.checked_sub(FIRST_NODE_HOST).and_then(|slot| inner.slots[slot].inst) {
        inner.cloud.insts[inst].touched = true;
    }
    let (act, count) = match (fault, inner.rng.below(4)) {
        (Fault::Hold, _) => (Act::Hold { host }, Count::Hold),
        (_, 0) => (Act::CutFrom { host }, Count::OneWay),
        (_, 1) => (Act::CutTo { host }, Count::OneWay),
        (_, _) => (Act::Partition { host }, Count::Partition),
    };
    inner.count(count);
    inner.say(|| format!("{act:?}: {} and the scheduler", host_name(host)));
    inner.acts().push(act);
    let back = inner.rng.within(100, 20_000);
    inner.after(back, Ev::LinkBack { host });
}

/// How far apart faults of this kind are on average; 0 for never.
fn every(d: &Drawn, fault: Fault) -> u64 {
    match fault {
        Fault::SchedulerCrash => d.faults.scheduler_crash_every,
        Fault::WorkerCrash => d.faults.worker_crash_every,
        Fault::Partition => d.faults.partition_every,
        Fault::Hold => d.faults.hold_every,
        Fault::ClockJump => d.faults.clock_jump_every,
        Fault::Corrupt => d.faults.corrupt_every,
    }
}
