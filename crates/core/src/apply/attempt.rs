//! Facts about attempts. Only the one under way can change.

use spotq_model::{
    AttemptEnd, Checkpoint, Exit, Fact, Generation, NodeId, Span, StopWhy, TaskId, Timestamp, WaitReason,
};

use super::{Applied, fact_name, in_phase, node::node_mut, set_phase, task_mut, unknown_task};
use crate::state::{Attempt, Cluster, NodeState, Phase, Stop};

pub(super) fn place(
    c: &mut Cluster,
    at: Timestamp,
    id: TaskId,
    generation: Generation,
    node_id: NodeId,
) -> Applied {
    in_phase(c, id, |phase| matches!(phase, Phase::Pending { .. }))?;
    let task = c.task(id).ok_or_else(|| unknown_task(id))?;
    if generation < task.next_generation() {
        return Err(format!("generation {generation} is not above {}", task.generation.max(task.floor)));
    }
    let node = node_mut(c, node_id)?;
    if node.holder.is_some() || node.state > NodeState::Ready || node.notice.is_some() {
        return Err(format!("node {node_id} is not free"));
    }
    let pool = node.pool.clone();
    node.holder = Some((id, generation));
    node.idle_since = None;
    node.ledger.hand_over(at, (id, generation));
    let attempt = Attempt {
        generation,
        node: node_id,
        pool,
        placed_at: at,
        accepted_at: None,
        started_at: None,
        stopped_at: None,
        ended_at: None,
        end: None,
        exit: None,
        resumed: None,
        fell_back: 0,
        committed: None,
        progress: None,
        progress_at: None,
        noticed_at: None,
        stop: None,
        held_exit: None,
    };
    let task = task_mut(c, id)?;
    task.generation = generation;
    task.attempts.push(attempt);
    set_phase(c, at, id, Phase::Provisioning { node: node_id });
    Ok(())
}

#[expect(
    clippy::wildcard_enum_match_arm,
    reason = "`apply_fact` matches every fact and sends each where it belongs"
)]
pub(super) fn apply_attempt(c: &mut Cluster, at: Timestamp, fact: &Fact) -> Applied {
    match fact {
        Fact::AttemptAccepted { task, generation } => {
            in_phase(c, *task, |phase| matches!(phase, Phase::Provisioning { .. }))?;
            let attempt = attempt_mut(c, *task, *generation)?;
            attempt.accepted_at = Some(at);
            let node = attempt.node;
            // The notice may have come while the grant was on its way.
            let deadline = c.nodes.get(&node).and_then(|n| n.notice.as_ref()).map(|seen| seen.deadline);
            let phase = match deadline {
                Some(deadline) => Phase::Draining { node, deadline },
                None => Phase::Restoring { node },
            };
            set_phase(c, at, *task, phase);
            Ok(())
        }
        Fact::AttemptRestored { task, generation, from, fell_back } => {
            in_phase(c, *task, |phase| matches!(phase, Phase::Restoring { .. } | Phase::Draining { .. }))?;
            let attempt = not_started(c, *task, *generation)?;
            attempt.resumed.clone_from(from);
            attempt.fell_back = attempt.fell_back.max(*fell_back);
            if *fell_back > 0 {
                // What was passed over is quarantined: the next attempt is not expected to find it.
                task_mut(c, *task)?.checkpoint.clone_from(from);
            }
            Ok(())
        }
        Fact::AttemptStarted { task, generation } => {
            in_phase(c, *task, |phase| matches!(phase, Phase::Restoring { .. } | Phase::Draining { .. }))?;
            let attempt = not_started(c, *task, *generation)?;
            attempt.started_at = Some(at);
            let node = attempt.node;
            if matches!(task_mut(c, *task)?.phase, Phase::Restoring { .. }) {
                set_phase(c, at, *task, Phase::Running { node });
            }
            Ok(())
        }
        Fact::AttemptProgressed { task, generation, progress } => {
            in_phase(c, *task, Phase::has_begun)?;
            let attempt = attempt_mut(c, *task, *generation)?;
            attempt.progress = Some(*progress);
            attempt.progress_at = Some(at);
            task_mut(c, *task)?.progress = Some(*progress);
            Ok(())
        }
        Fact::CheckpointCommitted { task, generation, checkpoint } => {
            commit(c, *task, *generation, checkpoint)
        }
        Fact::StopAsked { task, generation, why, deadline } => {
            ask_stop(c, at, (*task, *generation), *why, *deadline)
        }
        Fact::AttemptExited { task, generation, exit, until } => {
            in_phase(c, *task, |phase| matches!(phase, Phase::Restoring { .. } | Phase::Running { .. }))?;
            let attempt = attempt_mut(c, *task, *generation)?;
            attempt.held_exit = Some(exit.clone());
            let node = attempt.node;
            set_phase(c, at, *task, Phase::Completing { node, until: *until });
            Ok(())
        }
        other => Err(format!("{} is not about an attempt", fact_name(other))),
    }
}

fn commit(c: &mut Cluster, id: TaskId, generation: Generation, checkpoint: &Checkpoint) -> Applied {
    in_phase(c, id, Phase::has_begun)?;
    attempt_mut(c, id, generation)?;
    let task = task_mut(c, id)?;
    if task.checkpoint.as_ref().is_some_and(|known| known.log_sequence >= checkpoint.log_sequence) {
        return Err(format!("checkpoint at log {} is not newer", checkpoint.log_sequence));
    }
    let advanced = task
        .checkpoint
        .as_ref()
        .is_none_or(|known| checkpoint.step.is_none() || checkpoint.step > known.step);
    if advanced {
        task.fruitless = 0;
    }
    task.checkpoint = Some(checkpoint.clone());
    attempt_mut(c, id, generation)?.committed = Some(checkpoint.clone());
    Ok(())
}

fn ask_stop(
    c: &mut Cluster,
    at: Timestamp,
    (id, generation): (TaskId, Generation),
    why: StopWhy,
    deadline: Timestamp,
) -> Applied {
    in_phase(c, id, |phase| phase.node().is_some())?;
    let attempt = attempt_mut(c, id, generation)?;
    // A user's cancel overrides every other stop; nothing overrides a cancel.
    if attempt.stop.is_some_and(|stop| stop.why == StopWhy::Cancel || why != StopWhy::Cancel) {
        return Err("a stop was asked for already".into());
    }
    attempt.stop = Some(Stop { why, asked_at: at, deadline });
    let node = attempt.node;
    let phase = &task_mut(c, id)?.phase;
    if matches!(phase, Phase::Restoring { .. } | Phase::Running { .. }) {
        set_phase(c, at, id, Phase::Draining { node, deadline });
    }
    Ok(())
}

pub(super) fn end_attempt(
    c: &mut Cluster,
    at: Timestamp,
    (id, generation): (TaskId, Generation),
    end: &AttemptEnd,
    exit: Option<&Exit>,
    floor: Option<Generation>,
) -> Applied {
    let attempt = attempt_mut(c, id, generation)?;
    attempt.end = Some(end.clone());
    attempt.ended_at = Some(at);
    let node_id = attempt.node;
    let exit = exit.cloned().or_else(|| attempt.held_exit.take());
    if let Some(start) = attempt.started_at {
        let stopped = exit.as_ref().map_or(at, |e| e.stopped_at.clamp(start, at));
        attempt.stopped_at = Some(stopped);
    }
    if let Some(progress) = exit.as_ref().and_then(|e| e.last_progress) {
        attempt.progress = Some(progress);
    }
    attempt.exit = exit;
    let ran =
        attempt.stopped_at.zip(attempt.started_at).map_or(Span::ZERO, |(stop, start)| stop.since(start));
    let progress = attempt.progress;
    let task = task_mut(c, id)?;
    task.ran += ran;
    task.progress = progress.or(task.progress);
    task.floor = task.floor.max(floor.unwrap_or_default());
    match end {
        AttemptEnd::Preempted { .. } => task.preemptions += 1,
        AttemptEnd::NodeLost { .. } => task.fruitless += 1,
        AttemptEnd::Failed { .. } => task.failures += 1,
        AttemptEnd::Completed
        | AttemptEnd::Cancelled
        | AttemptEnd::Timeout
        | AttemptEnd::BudgetExhausted
        | AttemptEnd::OutOfMemory
        | AttemptEnd::LaunchFailed { .. }
        | AttemptEnd::Requeued => {}
    }
    if let Ok(node) = node_mut(c, node_id)
        && node.holder == Some((id, generation))
    {
        node.holder = None;
        node.idle_since = Some(at);
    }
    set_phase(c, at, id, Phase::Pending { reason: WaitReason::Queued, next_try: at });
    Ok(())
}

fn not_started(c: &mut Cluster, id: TaskId, generation: Generation) -> Result<&mut Attempt, String> {
    let attempt = attempt_mut(c, id, generation)?;
    if attempt.started_at.is_some() { Err("its command runs already".into()) } else { Ok(attempt) }
}

/// The attempt under way with this generation: an older one can change nothing (INV-02).
pub(super) fn attempt_mut(
    c: &mut Cluster,
    id: TaskId,
    generation: Generation,
) -> Result<&mut Attempt, String> {
    let task = task_mut(c, id)?;
    let current = task.generation;
    task.attempts
        .last_mut()
        .filter(|a| a.generation == generation && a.end.is_none())
        .ok_or_else(|| format!("generation {generation} of task {id} is not under way (newest is {current})"))
}
