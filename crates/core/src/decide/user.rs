//! What users ask for.

use std::sync::Arc;

use spotq_model::{AttemptEnd, Fact, HoldReason, JobId, JobSpec, Outcome, Span, StopWhy, TaskId, Timestamp};

use super::Facts;
use super::attempt::end_attempt;
use crate::classify::Loss;
use crate::policies::Policies;
use crate::state::{Attempt, Cluster, NodeState, Phase, Task};

pub(super) fn submit(c: &Cluster, client_key: &str, uuid: &str, spec: &Arc<JobSpec>) -> Facts {
    if c.by_client_key.contains_key(client_key) {
        return Vec::new();
    }
    let job = c.jobs.last_key_value().map_or(JobId(1), |(last, _)| last.next());
    let submitted = Fact::JobSubmitted {
        job,
        uuid: uuid.to_owned(),
        client_key: client_key.to_owned(),
        spec: Arc::clone(spec),
    };
    let held = spec.hold.then(|| Fact::TaskHeld { task: TaskId::only(job), reason: HoldReason::User });
    std::iter::once(submitted).chain(held).collect()
}

pub(super) fn cancel(c: &Cluster, p: &Policies, now: Timestamp, job: JobId) -> Facts {
    each_task(c, job, |task| match &task.phase {
        Phase::Held { .. } | Phase::Pending { .. } => {
            vec![Fact::TaskDone { task: task.id, outcome: Outcome::Cancelled }]
        }
        Phase::Provisioning { .. }
        | Phase::Restoring { .. }
        | Phase::Running { .. }
        | Phase::Draining { .. }
        | Phase::Completing { .. } => stop(c, p, now, task, StopWhy::Cancel),
        Phase::Done { .. } => Vec::new(),
    })
}

pub(super) fn hold(c: &Cluster, job: JobId) -> Facts {
    each_task(c, job, |task| match &task.phase {
        Phase::Pending { .. } => vec![Fact::TaskHeld { task: task.id, reason: HoldReason::User }],
        Phase::Held { .. }
        | Phase::Provisioning { .. }
        | Phase::Restoring { .. }
        | Phase::Running { .. }
        | Phase::Draining { .. }
        | Phase::Completing { .. }
        | Phase::Done { .. } => Vec::new(),
    })
}

pub(super) fn release(c: &Cluster, job: JobId) -> Facts {
    each_task(c, job, |task| match &task.phase {
        Phase::Held { .. } => vec![Fact::TaskReleased { task: task.id }],
        Phase::Pending { .. }
        | Phase::Provisioning { .. }
        | Phase::Restoring { .. }
        | Phase::Running { .. }
        | Phase::Draining { .. }
        | Phase::Completing { .. }
        | Phase::Done { .. } => Vec::new(),
    })
}

pub(super) fn requeue(c: &Cluster, p: &Policies, now: Timestamp, job: JobId) -> Facts {
    each_task(c, job, |task| match &task.phase {
        Phase::Restoring { .. } | Phase::Running { .. } => stop(c, p, now, task, StopWhy::Requeue),
        Phase::Held { .. }
        | Phase::Pending { .. }
        | Phase::Provisioning { .. }
        | Phase::Draining { .. }
        | Phase::Completing { .. }
        | Phase::Done { .. } => Vec::new(),
    })
}

pub(super) fn drill(c: &Cluster, job: JobId, notice: Span) -> Facts {
    each_task(c, job, |task| {
        let node = task.phase.node().and_then(|id| c.nodes.get(&id));
        let can_be_interrupted = |state| matches!(state, NodeState::Booting | NodeState::Ready);
        match node {
            Some(node) if can_be_interrupted(node.state) && node.notice.is_none() => {
                vec![Fact::DrillAsked { node: node.id, notice }]
            }
            Some(_) | None => Vec::new(),
        }
    })
}

/// Asks for a stop; an attempt whose command has not begun ends at once.
pub(super) fn stop(c: &Cluster, p: &Policies, now: Timestamp, task: &Task, why: StopWhy) -> Facts {
    let Some(attempt) = task.under_way() else { return Vec::new() };
    if attempt.stop.is_some_and(|stop| stop.why == StopWhy::Cancel || why != StopWhy::Cancel) {
        return Vec::new();
    }
    let asked = Fact::StopAsked {
        task: task.id,
        generation: attempt.generation,
        why,
        deadline: now + grace_of(c, task.id),
    };
    if attempt.accepted_at.is_some() && attempt.held_exit.is_none() {
        return vec![asked];
    }
    let end = end_now(attempt, why);
    let mut facts = vec![asked];
    facts.extend(end_attempt(c, p, now, task, end, None));
    facts
}

fn end_now(attempt: &Attempt, why: StopWhy) -> AttemptEnd {
    let mut stopped = attempt.clone();
    stopped.stop = Some(crate::state::Stop { why, asked_at: attempt.placed_at, deadline: attempt.placed_at });
    crate::classify::classify(&stopped, stopped.held_exit.as_ref(), &Loss::None)
}

fn grace_of(c: &Cluster, task: TaskId) -> Span {
    c.spec(task).map_or(Span::ZERO, |spec| spec.checkpoint.grace)
}

fn each_task(c: &Cluster, job: JobId, facts: impl Fn(&Task) -> Facts) -> Facts {
    c.jobs.get(&job).into_iter().flat_map(|job| job.tasks.values()).flat_map(|task| facts(task)).collect()
}
