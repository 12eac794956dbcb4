//! The figures of one task.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use spotq_core::{Attempt, Cluster, Segment, Task};
use spotq_model::{AttemptEnd, Checkpoint, Generation, Span, TaskId, Timestamp, Usd};

/// Where paid time went that was not kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// From the launch until the worker took the grant.
    Boot,
    /// From the grant to the command's start: fetching and verifying the checkpoint.
    Restore,
    /// Work after the checkpoint that the next attempt resumed from; it is done again.
    Redone,
    /// After the command ended, until its last files were safe.
    Drain,
    /// Nothing to run.
    Idle,
    /// A node whose command never started.
    FailedStart,
}

impl Cause {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Cause::Boot => "boot",
            Cause::Restore => "restore",
            Cause::Redone => "redone",
            Cause::Drain => "drain",
            Cause::Idle => "idle",
            Cause::FailedStart => "failed_start",
        }
    }
}

/// One cause of waste.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WasteLine {
    pub cause: Cause,
    pub time: Span,
    pub amount: Usd,
}

/// Money and time of one task. All amounts are in nano-dollars.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobCost {
    /// The sum of its segments: the bill.
    pub billed: Usd,
    pub billed_time: Span,
    /// The useful time at the on-demand prices that were frozen with it.
    pub on_demand_useful: Usd,
    pub useful_time: Span,
    /// The billed time at on-demand prices.
    pub on_demand_billed: Usd,
    /// `billed` less what the useful part of it cost.
    pub wasted: Usd,
    /// By cause; the amounts sum to `wasted`.
    pub waste: Vec<WasteLine>,
}

impl JobCost {
    /// Saved against running the useful time on demand, all waste paid.
    #[must_use]
    pub fn saved_net(&self) -> Usd {
        self.on_demand_useful - self.billed
    }

    /// Saved by price alone: the billed time at on-demand prices, less the bill.
    #[must_use]
    pub fn saved_gross(&self) -> Usd {
        self.on_demand_billed - self.billed
    }

    /// Net savings in per cent of the on-demand cost; `None` before there is any useful time.
    #[must_use]
    pub fn saved_percent(&self) -> Option<f64> {
        (self.on_demand_useful.0 > 0)
            .then(|| self.saved_net().0 as f64 / self.on_demand_useful.0 as f64 * 100.0)
    }
}

/// A task's money and what happened to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobReport {
    pub task: TaskId,
    pub cost: JobCost,
    /// Attempts that reached a node; a launch that the cloud refused is none.
    pub attempts: u32,
    pub preemptions: u32,
    pub preemptions_without_notice: u32,
    /// The highest step that was reached.
    pub steps_done: u64,
    /// Steps that were done more than once.
    pub steps_repeated: u64,
}

/// The report of `id` as of `now`; `None` if there is no such task.
#[must_use]
pub fn job_report(c: &Cluster, id: TaskId, now: Timestamp) -> Option<JobReport> {
    let task = c.task(id)?;
    let unnoticed = |a: &&Attempt| a.end == Some(AttemptEnd::Preempted { noticed: false });
    Some(JobReport {
        task: id,
        cost: job_cost(c, id, now),
        attempts: count(task.attempts.iter().filter(|a| a.accepted_at.is_some())),
        preemptions: task.preemptions,
        preemptions_without_notice: count(task.attempts.iter().filter(unnoticed)),
        steps_done: task.attempts.iter().filter_map(|a| a.progress).map(|p| p.step).max().unwrap_or(0),
        steps_repeated: steps_repeated(task),
    })
}

/// The money of `id` as of `now`; nothing if there is no such task.
#[must_use]
pub fn job_cost(c: &Cluster, id: TaskId, now: Timestamp) -> JobCost {
    let Some(task) = c.task(id) else { return JobCost::default() };
    let parts: BTreeMap<Generation, Parts> =
        task.attempts.iter().map(|a| (a.generation, Parts::of(task, a, now))).collect();
    let mut cost = JobCost::default();
    let mut useful_billed = Usd::ZERO;
    let mut waste: BTreeMap<Cause, (Span, Usd)> = BTreeMap::new();
    for (_, segment) in c.segments_of(id) {
        cost.billed += segment.amount_at(now);
        cost.billed_time += segment.length(now);
        cost.on_demand_billed += segment.on_demand_at(now);
        let Some(parts) = segment.holder.and_then(|(_, generation)| parts.get(&generation)) else { continue };
        for (part, time) in parts.of_segment(segment, now) {
            match part {
                Part::Useful => {
                    cost.useful_time += time;
                    cost.on_demand_useful += segment.quote.on_demand.cost(time);
                    useful_billed += segment.quote.price.cost(time);
                }
                Part::Waste(cause) => {
                    let line = waste.entry(cause).or_default();
                    line.0 += time;
                    line.1 += segment.quote.price.cost(time);
                }
            }
        }
    }
    cost.wasted = cost.billed - useful_billed;
    cost.waste = waste_lines(waste, cost.wasted);
    cost
}

/// Each part of a segment is rounded to a nano-dollar; the largest line takes up the difference, so the sum is exact.
fn waste_lines(waste: BTreeMap<Cause, (Span, Usd)>, wasted: Usd) -> Vec<WasteLine> {
    let mut lines: Vec<WasteLine> =
        waste.into_iter().map(|(cause, (time, amount))| WasteLine { cause, time, amount }).collect();
    let rounding = wasted - lines.iter().map(|line| line.amount).sum();
    if let Some(largest) = lines.iter_mut().max_by_key(|line| line.amount) {
        largest.amount += rounding;
    }
    lines.retain(|line| line.time > Span::ZERO || line.amount != Usd::ZERO);
    lines
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Useful,
    Waste(Cause),
}

/// The moments that divide an attempt's node time.
struct Parts {
    /// Each part lasts until its moment; the last one until the end of the segment.
    until: Vec<(Part, Timestamp)>,
    last: Part,
}

impl Parts {
    fn of(task: &Task, attempt: &Attempt, now: Timestamp) -> Parts {
        let ended = attempt.ended_at;
        let Some(started) = attempt.started_at else {
            // Not started yet is boot and restore; never started is a failed start.
            let mut until = Vec::new();
            let waiting = match (ended, attempt.accepted_at) {
                (Some(end), _) => {
                    until.push((Part::Waste(Cause::FailedStart), end));
                    Cause::Idle
                }
                (None, Some(accepted)) => {
                    until.push((Part::Waste(Cause::Boot), accepted));
                    Cause::Restore
                }
                (None, None) => Cause::Boot,
            };
            return Parts { until, last: Part::Waste(waiting) };
        };
        let stopped = attempt.stopped_at.or(ended).unwrap_or(now);
        let kept = kept_until(task, attempt, started, stopped);
        let until = vec![
            (Part::Waste(Cause::Boot), attempt.accepted_at.unwrap_or(started)),
            (Part::Waste(Cause::Restore), started),
            (Part::Useful, kept),
            (Part::Waste(Cause::Redone), stopped),
            (Part::Waste(Cause::Drain), ended.unwrap_or(now)),
        ];
        Parts { until, last: Part::Waste(Cause::Idle) }
    }

    fn of_segment(&self, segment: &Segment, now: Timestamp) -> Vec<(Part, Span)> {
        let end = segment.end.unwrap_or(now);
        let mut at = segment.start;
        let mut parts = Vec::new();
        for (part, until) in &self.until {
            let until = (*until).clamp(at, end.max(at));
            parts.push((*part, until.since(at)));
            at = until;
        }
        parts.push((self.last, end.since(at)));
        parts
    }
}

/// Up to when the work of `attempt` was kept: told by what the attempts that started after it resumed from. A later one
/// that had to fall back further than the next one takes more of it away.
fn kept_until(task: &Task, attempt: &Attempt, started: Timestamp, stopped: Timestamp) -> Timestamp {
    match &attempt.end {
        None | Some(AttemptEnd::Completed) => return stopped,
        Some(_) => {}
    }
    let kept_by = |from: Option<&Checkpoint>| match from {
        Some(from) if from.generation == attempt.generation => from.saved_at.clamp(started, stopped),
        Some(from) if from.generation > attempt.generation => stopped,
        Some(_) | None => started,
    };
    let later = task.attempts.iter().filter(|a| a.generation > attempt.generation && a.started_at.is_some());
    later.map(|a| kept_by(a.resumed.as_ref())).min().unwrap_or_else(|| kept_by(attempt.committed.as_ref()))
}

/// For each attempt that another one followed: the steps beyond those that the other one resumed from.
fn steps_repeated(task: &Task) -> u64 {
    let started: Vec<&Attempt> = task.attempts.iter().filter(|a| a.started_at.is_some()).collect();
    started
        .windows(2)
        .map(|pair| {
            let reached = pair[0].progress.map_or(0, |p| p.step);
            let resumed = pair[1].resumed.as_ref().and_then(|from| from.step).unwrap_or(0);
            reached.saturating_sub(resumed)
        })
        .sum()
}

fn count<T>(items: impl Iterator<Item = T>) -> u32 {
    u32::try_from(items.count()).unwrap_or(u32::MAX)
}
