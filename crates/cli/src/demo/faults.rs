//! Takes the job's nodes away at moments drawn from the seed, and kills the scheduler once.

use std::time::Duration;

use spotq_model::{InstanceId, Span, TaskId};
use spotq_proto::v1;
use spotq_provider::CloudProvider as _;
use tokio::sync::mpsc;

use super::daemon::Daemon;
use super::story::Story;
use crate::client::Client;
use crate::error::ExpectedError;
use crate::stream::{self, Event, QUEUE_MAX};
use crate::words;

/// The notices of the clouds: none, GCP's and Azure's 30 s, AWS's 120 s, and a short one.
const NOTICES: [Span; 3] = [Span::secs(10), Span::secs(30), Span::secs(120)];
/// How long the scheduler stays dead while the node drains without it.
const SCHEDULER_AWAY: Duration = Duration::from_millis(800);

/// When to interrupt, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    faults: Vec<Fault>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Fault {
    /// Not before the job has reached this step.
    step: u64,
    notice: Span,
    scheduler: Scheduler,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scheduler {
    Alive,
    /// Killed right after the interruption, and started again while the node is going away.
    Killed,
}

impl Plan {
    /// `count` interruptions spread over `steps`. One comes without notice, and another one meets a dead scheduler.
    pub(super) fn new(seed: u64, count: u32, steps: u64) -> Plan {
        let mut draws = Draws(seed);
        let n = u64::from(count);
        let silent = draws.below(n);
        let killed = (silent + 1 + draws.below(n - 1)) % n;
        let apart = steps / (n + 1);
        let faults = (0..n).map(|index| Fault {
            // Up to a quarter of the distance early or late.
            step: apart * (index + 1) + draws.below(apart / 2 + 1) - apart / 4,
            notice: if index == silent {
                Span::ZERO
            } else {
                NOTICES[usize::try_from(draws.below(NOTICES.len() as u64)).unwrap_or(0)]
            },
            scheduler: if index == killed { Scheduler::Killed } else { Scheduler::Alive },
        });
        Plan { faults: faults.collect() }
    }
}

/// Watches the job to its end and interrupts it on the way; every interruption hits another attempt.
pub(super) async fn run(
    daemon: &mut Daemon,
    client: &Client,
    task: TaskId,
    plan: Plan,
    story: Story,
) -> Result<Story, ExpectedError> {
    let (tx, mut events) = mpsc::channel(QUEUE_MAX);
    tokio::spawn(stream::watch(client.clone(), 0, task, tx));
    let mut faults = plan.faults.into_iter().peekable();
    let mut hit = 0;
    while let Some(event) = events.recv().await {
        match event {
            Event::View(_, view) => {
                story.job(&view);
                if words::is_done(&view) {
                    return Ok(story);
                }
                let step = view.progress.map_or(0, |p| p.step);
                let due = faults.peek().is_some_and(|fault| step >= fault.step);
                let target =
                    (due && view.phase == "running" && view.generation > hit).then(|| instance(&view));
                if let (Some(Some(instance)), Some(fault)) = (target, faults.peek().copied()) {
                    hit = view.generation;
                    faults.next();
                    interrupt(daemon, &instance, fault, &story).await?;
                }
            }
            Event::Failed(error) => return Err(error),
            Event::Away(_) | Event::Back | Event::Log(_) | Event::LogsEnd | Event::Interrupt => {}
        }
    }
    Err(ExpectedError::Internal("the job went out of sight".into()))
}

fn instance(view: &v1::JobView) -> Option<InstanceId> {
    let node = view.node.as_ref().filter(|node| node.state == "ready")?;
    (!node.instance_id.is_empty()).then(|| InstanceId(node.instance_id.clone()))
}

async fn interrupt(
    daemon: &mut Daemon,
    instance: &InstanceId,
    fault: Fault,
    story: &Story,
) -> Result<(), ExpectedError> {
    let how =
        if fault.notice == Span::ZERO { "without notice".into() } else { format!("notice {}", fault.notice) };
    story.say(&format!("the market takes {instance} back ({how})"));
    daemon.cloud().simulate_interruption(instance, fault.notice).await.map_err(|refusal| {
        ExpectedError::Internal(format!("cannot interrupt a node: {}", refusal.message))
    })?;
    if fault.scheduler == Scheduler::Killed {
        story.say("kill -9 of the scheduler, while the node is going away");
        daemon.kill().await?;
        tokio::time::sleep(SCHEDULER_AWAY).await;
        daemon.restart().await?;
        story.say("the scheduler is back");
    }
    Ok(())
}

/// A small generator with a fixed stream (splitmix64), so that a seed means the same for ever.
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `n`; 0 for an `n` of 0.
    fn below(&mut self, n: u64) -> u64 {
        self.next().checked_rem(n).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_seed_has_one_silent_fault_one_dead_scheduler_and_faults_in_order() {
        for seed in 0..500 {
            for count in [2, 5, 9] {
                let plan = Plan::new(seed, count, 3000).faults;
                assert_eq!(plan.len(), count as usize);
                let silent = plan.iter().position(|f| f.notice == Span::ZERO);
                let killed = plan.iter().position(|f| f.scheduler == Scheduler::Killed);
                assert!(silent.is_some() && killed.is_some() && silent != killed, "seed {seed}: {plan:?}");
                assert_eq!(plan.iter().filter(|f| f.notice == Span::ZERO).count(), 1);
                assert!(plan.windows(2).all(|pair| pair[0].step < pair[1].step), "seed {seed}: {plan:?}");
                assert!(plan.iter().all(|f| f.step < 3000));
            }
        }
    }

    #[test]
    fn another_seed_is_another_plan() {
        assert_ne!(Plan::new(1, 5, 3000), Plan::new(2, 5, 3000));
        assert_eq!(Plan::new(7, 5, 3000), Plan::new(7, 5, 3000));
    }
}
