//! The only way state changes. Replaying the events from the start gives the same state again.
//!
//! Each fact states what must hold before it; a fact that does not fit is an [`IllegalEvent`] and changes nothing.

mod attempt;
mod node;

use std::collections::BTreeMap;
use std::sync::Arc;

use spotq_model::{
    Event, Fact, Generation, JobId, JobSpec, Outcome, RefusalKind, Scope, Span, TaskId, Timestamp, WaitReason,
};

use crate::state::{Cluster, CoolDown, Job, Phase, QueueKey, Task};

use attempt::{apply_attempt, end_attempt, place};
use node::{NewNode, adopt_orphan, apply_node, request_node};

/// An event that does not fit the state: a fault of ours or a damaged store, never a matter of timing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("event {version} ({fact}) does not fit: {why}")]
pub struct IllegalEvent {
    pub version: u64,
    pub fact: String,
    pub why: String,
}

/// Applies all events in order, stopping at the first that does not fit.
pub fn replay<'a>(
    cluster: &mut Cluster,
    events: impl IntoIterator<Item = &'a Event>,
) -> Result<(), IllegalEvent> {
    events.into_iter().try_for_each(|event| apply(cluster, event))
}

/// Makes `event` true.
pub fn apply(cluster: &mut Cluster, event: &Event) -> Result<(), IllegalEvent> {
    let at = event.at.max(cluster.now);
    apply_fact(cluster, at, &event.fact).map_err(|why| IllegalEvent {
        version: cluster.version.0,
        fact: fact_name(&event.fact),
        why,
    })?;
    cluster.now = at;
    cluster.version = cluster.version.next();
    Ok(())
}

type Applied = Result<(), String>;

fn apply_fact(c: &mut Cluster, at: Timestamp, fact: &Fact) -> Applied {
    match fact {
        Fact::JobSubmitted { job, uuid, client_key, spec } => submit(c, at, *job, uuid, client_key, spec),
        Fact::TaskHeld { .. }
        | Fact::TaskReleased { .. }
        | Fact::TaskWaits { .. }
        | Fact::TaskDone { .. } => apply_task(c, at, fact),
        Fact::AttemptPlaced { task, generation, node } => place(c, at, *task, *generation, *node),
        Fact::AttemptEnded { task, generation, end, exit, floor } => {
            end_attempt(c, at, (*task, *generation), end, exit.as_ref(), *floor)
        }
        Fact::AttemptAccepted { .. }
        | Fact::AttemptRestored { .. }
        | Fact::AttemptStarted { .. }
        | Fact::AttemptProgressed { .. }
        | Fact::CheckpointCommitted { .. }
        | Fact::StopAsked { .. }
        | Fact::AttemptExited { .. } => apply_attempt(c, at, fact),
        Fact::NodeRequested { node, key, pool, shape, quote, expires_at } => {
            request_node(c, at, *node, NewNode { key, pool, shape, quote, expires_at: *expires_at })
        }
        Fact::NodeOrphaned { node, key, instance, pool } => adopt_orphan(c, at, *node, key, instance, pool),
        Fact::NodeLaunched { .. }
        | Fact::NodeRefused { .. }
        | Fact::NodeJoined { .. }
        | Fact::NodeNoticed { .. }
        | Fact::NoticeWithdrawn { .. }
        | Fact::NodeEnding { .. }
        | Fact::NodeGone { .. }
        | Fact::NodeRepriced { .. }
        | Fact::DrillAsked { .. }
        | Fact::DrillAnswered { .. } => apply_node(c, at, fact),
        Fact::PoolCooled { scope, kind, until, message } => cool(c, at, scope, *kind, *until, message),
    }
}

fn submit(c: &mut Cluster, at: Timestamp, id: JobId, uuid: &str, key: &str, spec: &Arc<JobSpec>) -> Applied {
    if c.jobs.last_key_value().is_some_and(|(last, _)| *last >= id) {
        return Err(format!("job {id} is not above the last one"));
    }
    if c.by_client_key.contains_key(key) {
        return Err(format!("client key `{key}` is taken"));
    }
    let task_id = TaskId::only(id);
    let task = Task {
        id: task_id,
        phase: Phase::Pending { reason: WaitReason::Queued, next_try: at },
        phase_since: at,
        generation: Generation(0),
        floor: Generation(0),
        attempts: Vec::new(),
        checkpoint: None,
        progress: None,
        preemptions: 0,
        failures: 0,
        fruitless: 0,
        ran: Span::ZERO,
        waited: BTreeMap::new(),
    };
    let key: Arc<str> = key.into();
    let job = Job {
        id,
        uuid: uuid.to_owned(),
        client_key: Arc::clone(&key),
        spec: Arc::clone(spec),
        submitted_at: at,
        tasks: BTreeMap::from([(0, Arc::new(task))]),
    };
    c.queue.insert(QueueKey::of(&job, task_id));
    c.by_client_key.insert(key, id);
    c.jobs.insert(id, Arc::new(job));
    Ok(())
}

#[expect(
    clippy::wildcard_enum_match_arm,
    reason = "`apply_fact` matches every fact and sends each where it belongs"
)]
fn apply_task(c: &mut Cluster, at: Timestamp, fact: &Fact) -> Applied {
    match fact {
        Fact::TaskHeld { task, reason } => {
            in_phase(c, *task, |phase| matches!(phase, Phase::Pending { .. }))?;
            set_phase(c, at, *task, Phase::Held { reason: reason.clone() });
            Ok(())
        }
        Fact::TaskReleased { task } => {
            in_phase(c, *task, |phase| matches!(phase, Phase::Held { .. }))?;
            set_phase(c, at, *task, Phase::Pending { reason: WaitReason::Queued, next_try: at });
            Ok(())
        }
        Fact::TaskWaits { task, reason, next_try } => {
            in_phase(c, *task, |phase| matches!(phase, Phase::Pending { .. }))?;
            set_phase(c, at, *task, Phase::Pending { reason: reason.clone(), next_try: *next_try });
            Ok(())
        }
        Fact::TaskDone { task, outcome } => finish(c, at, *task, outcome),
        other => Err(format!("{} is not about a task", fact_name(other))),
    }
}

fn finish(c: &mut Cluster, at: Timestamp, id: TaskId, outcome: &Outcome) -> Applied {
    in_phase(c, id, |phase| matches!(phase, Phase::Held { .. } | Phase::Pending { .. }))?;
    set_phase(c, at, id, Phase::Done { outcome: outcome.clone() });
    Ok(())
}

fn cool(
    c: &mut Cluster,
    at: Timestamp,
    scope: &Scope,
    kind: RefusalKind,
    until: Timestamp,
    message: &str,
) -> Applied {
    c.cool_downs.retain(|known| known.until > at || known.scope == *scope);
    // A refusal that comes later after the last one than it lasts itself starts from the beginning.
    let lately =
        c.cool_downs.iter().find(|known| known.scope == *scope && at.since(known.until) < until.since(at));
    let strikes = lately.map_or(0, |known| known.strikes).saturating_add(1);
    c.cool_downs.retain(|known| known.scope != *scope);
    c.cool_downs.push(CoolDown { scope: scope.clone(), kind, until, strikes, message: message.to_owned() });
    Ok(())
}

/// Sets the phase and keeps the queue, the active set and the waiting times true to it.
fn set_phase(c: &mut Cluster, at: Timestamp, id: TaskId, phase: Phase) {
    let Some(job) = c.jobs.get(&id.job) else { return };
    let key = QueueKey::of(job, id);
    let Ok(task) = task_mut(c, id) else { return };
    if let Phase::Pending { reason, .. } = &task.phase {
        let waited = at.since(task.phase_since);
        *task.waited.entry(wait_name(reason).to_owned()).or_default() += waited;
    }
    task.phase = phase;
    task.phase_since = at;
    let (pending, active) = (matches!(task.phase, Phase::Pending { .. }), task.phase.node().is_some());
    if pending {
        c.queue.insert(key);
    } else {
        c.queue.remove(&key);
    }
    if active {
        c.active.insert(id);
    } else {
        c.active.remove(&id);
    }
}

/// The reason's word, under which waiting time is summed.
fn wait_name(reason: &WaitReason) -> &'static str {
    match reason {
        WaitReason::Queued => "queued",
        WaitReason::BeginTime { .. } => "begin_time",
        WaitReason::NoSuchPool { .. } => "no_such_pool",
        WaitReason::CoolingDown { .. } => "cooling_down",
        WaitReason::TooExpensive { .. } => "too_expensive",
        WaitReason::SpotNotWorthIt => "spot_not_worth_it",
        WaitReason::NoOffers => "no_offers",
        WaitReason::NodeLimit { .. } => "node_limit",
        WaitReason::BackOff { .. } => "back_off",
    }
}

fn in_phase(c: &Cluster, id: TaskId, allowed: impl Fn(&Phase) -> bool) -> Applied {
    let task = c.task(id).ok_or_else(|| unknown_task(id))?;
    if allowed(&task.phase) { Ok(()) } else { Err(format!("task {id} is {}", task.phase.name())) }
}

fn task_mut(c: &mut Cluster, id: TaskId) -> Result<&mut Task, String> {
    let job = c.jobs.get_mut(&id.job).map(Arc::make_mut);
    let task = job.and_then(|job| job.tasks.get_mut(&id.index)).map(Arc::make_mut);
    task.ok_or_else(|| unknown_task(id))
}

fn unknown_task(id: TaskId) -> String {
    format!("task {id} is unknown")
}

/// The variant's name, for messages.
fn fact_name(fact: &Fact) -> String {
    let text = format!("{fact:?}");
    text.split([' ', '{']).next().unwrap_or("fact").to_owned()
}
