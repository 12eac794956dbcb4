//! What workers report about attempts, and what an attempt's end means for its task.

use spotq_model::{
    AttemptEnd, Checkpoint, EndWhy, Exit, Fact, Generation, Market, NodeId, Outcome, Progress, RefusalKind,
    Report, Scope, Span, StopWhy, TaskId, Timestamp, WaitReason,
};

use super::Facts;
use crate::classify::{Loss, classify};
use crate::policies::Policies;
use crate::state::{Attempt, Cluster, Node, NodeState, Phase, Task};

/// No store has seen this many attempts: a worker that says more must not leave us without numbers, nor with a launch
/// key that is longer than the clouds take.
const FLOOR_MAX: Generation = Generation(1 << 32);

pub(super) fn reported(
    c: &Cluster,
    p: &Policies,
    now: Timestamp,
    (node, task_id, generation): (NodeId, TaskId, Generation),
    report: &Report,
) -> Facts {
    // A report of an older generation, or of another node, or about an attempt that has ended changes nothing (INV-02).
    let Some(attempt) = c.attempt_under_way(task_id, generation).filter(|a| a.node == node) else {
        return Vec::new();
    };
    let Some(task) = c.task(task_id) else { return Vec::new() };
    match report {
        Report::Accepted => match task.phase {
            Phase::Provisioning { .. } => vec![Fact::AttemptAccepted { task: task_id, generation }],
            Phase::Held { .. }
            | Phase::Pending { .. }
            | Phase::Restoring { .. }
            | Phase::Running { .. }
            | Phase::Draining { .. }
            | Phase::Completing { .. }
            | Phase::Done { .. } => Vec::new(),
        },
        // Who has committed has restored long before: taken now, it would set aside what was just committed.
        Report::Restored { from, fell_back } if may_start(attempt) && attempt.committed.is_none() => {
            restored(c, p, now, task, attempt, from.as_ref(), *fell_back)
        }
        Report::Started if may_start(attempt) => {
            if is_below_known(task, attempt.resumed.as_ref(), attempt.fell_back) {
                return below_known(c, p, now, task, attempt);
            }
            vec![Fact::AttemptStarted { task: task_id, generation }]
        }
        Report::Restored { .. } | Report::Started => Vec::new(),
        Report::Progressed { progress } => progressed(p, now, task, attempt, *progress),
        Report::Noticed { deadline, source } => noticed(c, node, *deadline, source),
        Report::NoticeWithdrawn => match c.nodes.get(&node) {
            Some(n) if n.notice.is_some() && n.state <= NodeState::Ready => {
                vec![Fact::NoticeWithdrawn { node }]
            }
            Some(_) | None => Vec::new(),
        },
        Report::Committed { checkpoint } => committed(task, attempt, checkpoint),
        Report::Finished { exit } => finished(c, p, now, task, attempt, exit),
        Report::Superseded { by } => superseded(c, p, now, task, attempt, *by),
    }
}

fn may_start(attempt: &Attempt) -> bool {
    attempt.accepted_at.is_some() && attempt.started_at.is_none() && attempt.held_exit.is_none()
}

fn restored(
    c: &Cluster,
    p: &Policies,
    now: Timestamp,
    task: &Task,
    attempt: &Attempt,
    from: Option<&Checkpoint>,
    fell_back: u32,
) -> Facts {
    if is_below_known(task, from, fell_back) {
        return below_known(c, p, now, task, attempt);
    }
    // What its own attempt said about a checkpoint when it was committed is more than a restore can tell.
    let known = from.and_then(|from| {
        let mut committed = task.attempts.iter().filter_map(|a| a.committed.as_ref());
        committed.find(|known| known.sequence == from.sequence && known.generation == from.generation)
    });
    let from = known.or(from).cloned();
    let is_news = from != attempt.resumed || fell_back > attempt.fell_back;
    // The first start of a task restores nothing, which looks like not having restored yet.
    if !is_news && (from.is_some() || fell_back > 0) {
        return Vec::new();
    }
    vec![Fact::AttemptRestored { task: task.id, generation: attempt.generation, from, fell_back }]
}

/// INV-06: only a checkpoint that failed verification may be passed over.
fn is_below_known(task: &Task, from: Option<&Checkpoint>, fell_back: u32) -> bool {
    let newest = task.checkpoint.as_ref().map(|newest| newest.sequence);
    fell_back == 0 && newest.is_some_and(|newest| from.is_none_or(|from| from.sequence < newest))
}

fn below_known(c: &Cluster, p: &Policies, now: Timestamp, task: &Task, attempt: &Attempt) -> Facts {
    let detail = "its worker did not restore the newest committed checkpoint".to_owned();
    let end = classify(attempt, None, &Loss::Lost { detail });
    end_attempt(c, p, now, task, end, None)
}

fn progressed(p: &Policies, now: Timestamp, task: &Task, attempt: &Attempt, progress: Progress) -> Facts {
    let known = attempt.progress;
    // The engine keeps the newest figure for people to see; what is durable may lag by `progress_every`.
    let due = match known {
        None => true,
        Some(known) if known == progress => false,
        Some(_) => {
            progress.total == Some(progress.step) || now.since(task_progress_at(task)) >= p.progress_every
        }
    };
    let running = attempt.accepted_at.is_some() && attempt.held_exit.is_none();
    if due && running {
        vec![Fact::AttemptProgressed { task: task.id, generation: attempt.generation, progress }]
    } else {
        Vec::new()
    }
}

/// When progress was last made durable.
fn task_progress_at(task: &Task) -> Timestamp {
    task.under_way().and_then(|a| a.progress_at).unwrap_or(task.phase_since)
}

fn noticed(c: &Cluster, id: NodeId, deadline: Timestamp, source: &str) -> Facts {
    match c.nodes.get(&id) {
        Some(node) if matches!(node.state, NodeState::Booting | NodeState::Ready) => match &node.notice {
            Some(seen) if seen.deadline == deadline => Vec::new(),
            Some(_) | None => vec![Fact::NodeNoticed { node: id, deadline, source: source.to_owned() }],
        },
        Some(_) | None => Vec::new(),
    }
}

fn committed(task: &Task, attempt: &Attempt, checkpoint: &Checkpoint) -> Facts {
    let newer = task.checkpoint.as_ref().is_none_or(|known| checkpoint.log_sequence > known.log_sequence);
    if newer && attempt.accepted_at.is_some() && checkpoint.generation == attempt.generation {
        let (task, generation) = (task.id, attempt.generation);
        vec![Fact::CheckpointCommitted { task, generation, checkpoint: checkpoint.clone() }]
    } else {
        Vec::new()
    }
}

fn finished(c: &Cluster, p: &Policies, now: Timestamp, task: &Task, attempt: &Attempt, exit: &Exit) -> Facts {
    if attempt.held_exit.is_some() {
        return Vec::new();
    }
    let end = classify(attempt, Some(exit), &Loss::None);
    let may_be_the_node = matches!(end, AttemptEnd::Failed { .. });
    if may_be_the_node && matches!(task.phase, Phase::Restoring { .. } | Phase::Running { .. }) {
        let (task, generation) = (task.id, attempt.generation);
        return vec![Fact::AttemptExited { task, generation, exit: exit.clone(), until: now + p.settle }];
    }
    end_attempt(c, p, now, task, end, Some(exit))
}

fn superseded(
    c: &Cluster,
    p: &Policies,
    now: Timestamp,
    task: &Task,
    attempt: &Attempt,
    by: Generation,
) -> Facts {
    let detail = format!("the checkpoint store is fenced by generation {by}");
    let end = classify(attempt, None, &Loss::Lost { detail });
    let mut facts = end_attempt(c, p, now, task, end, None);
    for fact in &mut facts {
        if let Fact::AttemptEnded { floor, .. } = fact {
            *floor = Some(by.min(FLOOR_MAX));
        }
    }
    facts
}

/// The end of an attempt and what follows from it: the task is done or waits, its pool may need a rest, its node may go.
pub(super) fn end_attempt(
    c: &Cluster,
    p: &Policies,
    now: Timestamp,
    task: &Task,
    end: AttemptEnd,
    exit: Option<&Exit>,
) -> Facts {
    let Some(attempt) = task.under_way() else { return Vec::new() };
    let next = after(c, p, now, task, &end);
    let mut facts = vec![Fact::AttemptEnded {
        task: task.id,
        generation: attempt.generation,
        end: end.clone(),
        exit: exit.cloned(),
        floor: None,
    }];
    facts.push(match next {
        Next::Done(outcome) => Fact::TaskDone { task: task.id, outcome },
        Next::Wait(reason, next_try) => Fact::TaskWaits { task: task.id, reason, next_try },
    });
    let Some(node) = c.nodes.get(&attempt.node) else { return facts };
    if matches!(end, AttemptEnd::Preempted { .. }) && node.pool.market == Market::Spot {
        facts.push(Fact::PoolCooled {
            scope: Scope::Pool { pool: node.pool.clone() },
            kind: RefusalKind::InsufficientCapacity,
            until: now + p.preempted_cool_down,
            message: "it took a node back".into(),
        });
    }
    facts.extend(end_node_after(node, attempt));
    facts
}

/// A node that is going away, that never answered, or that nears its end is not kept for the next task. It is not ending
/// yet: no node ends while an attempt holds it.
fn end_node_after(node: &Node, attempt: &Attempt) -> Option<Fact> {
    let why = if node.notice.is_some() {
        EndWhy::Noticed
    } else if node.state < NodeState::Ready {
        EndWhy::Unneeded
    } else if attempt.stop.is_some_and(|stop| stop.why == StopWhy::NodeExpires) {
        EndWhy::Expires
    } else {
        return None;
    };
    Some(Fact::NodeEnding { node: node.id, why })
}

enum Next {
    Done(Outcome),
    Wait(WaitReason, Timestamp),
}

fn after(c: &Cluster, p: &Policies, now: Timestamp, task: &Task, end: &AttemptEnd) -> Next {
    let Some(retry) = c.spec(task.id).map(|spec| &spec.retry) else { return Next::Done(Outcome::Cancelled) };
    match end {
        AttemptEnd::Completed => Next::Done(Outcome::Completed),
        AttemptEnd::Cancelled => Next::Done(Outcome::Cancelled),
        AttemptEnd::Timeout => Next::Done(Outcome::Timeout),
        AttemptEnd::BudgetExhausted => Next::Done(Outcome::BudgetExhausted),
        AttemptEnd::OutOfMemory => Next::Done(Outcome::OutOfMemory),
        AttemptEnd::LaunchFailed { message } => {
            Next::Done(Outcome::LaunchFailure { message: message.clone() })
        }
        AttemptEnd::Requeued => Next::Wait(WaitReason::Queued, now),
        AttemptEnd::Preempted { .. } => match retry.preemptions {
            Some(limit) if task.preemptions >= limit => Next::Done(Outcome::PreemptionBudgetSpent),
            Some(_) | None => Next::Wait(WaitReason::Queued, now),
        },
        AttemptEnd::NodeLost { .. } if task.fruitless >= p.fruitless_losses_max => {
            Next::Done(Outcome::NodeFailure)
        }
        // The first loss is tried again at once; more of them without progress wait longer and longer.
        AttemptEnd::NodeLost { .. } if task.fruitless == 0 => Next::Wait(WaitReason::Queued, now),
        AttemptEnd::NodeLost { .. } => back_off(p, now, task.fruitless),
        AttemptEnd::Failed { exit_code } => {
            let listed = retry.exit_codes.is_empty() || retry.exit_codes.contains(exit_code);
            if listed && task.failures < retry.failures {
                back_off(p, now, task.failures + 1)
            } else {
                Next::Done(Outcome::Failed { exit_code: *exit_code })
            }
        }
    }
}

fn back_off(p: &Policies, now: Timestamp, failures: u32) -> Next {
    let doubled = p.back_off.0.saturating_mul(1 << failures.saturating_sub(1).min(20));
    Next::Wait(WaitReason::BackOff { failures }, now + Span(doubled.min(p.back_off_max.0)))
}
