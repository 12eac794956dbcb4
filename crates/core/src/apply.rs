//! The only way state changes. Replaying the events from the start gives the same state again.
//!
//! Each fact states what must hold before it; a fact that does not fit is an [`IllegalEvent`] and changes nothing.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

use spotq_model::{
    AttemptEnd, Checkpoint, EffectKey, Event, Exit, Fact, Generation, GoneCause, InstanceId, JobId, JobSpec, NodeId,
    Outcome, Pool, Quote, RefusalKind, Scope, Shape, Span, StopWhy, TaskId, Timestamp, WaitReason,
};

use crate::ledger::Ledger;
use crate::state::{
    Attempt, Cluster, CoolDown, Drill, Job, Node, NodeState, NoticeSeen, Phase, QueueKey, Stop, Task,
};

/// An event that does not fit the state: a fault of ours or a damaged store, never a matter of timing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("event {version} ({fact}) does not fit: {why}")]
pub struct IllegalEvent {
    pub version: u64,
    pub fact: String,
    pub why: String,
}

/// Applies all events in order, stopping at the first that does not fit.
pub fn replay<'a>(cluster: &mut Cluster, events: impl IntoIterator<Item = &'a Event>) -> Result<(), IllegalEvent> {
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

fn submit(c: &mut Cluster, at: Timestamp, id: JobId, uuid: &str, key: &str, spec: &JobSpec) -> Applied {
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
    let job = Job {
        id,
        uuid: uuid.to_owned(),
        client_key: key.to_owned(),
        spec: Arc::new(spec.clone()),
        submitted_at: at,
        tasks: BTreeMap::from([(0, task)]),
    };
    c.queue.insert(queue_key(&job, task_id));
    c.by_client_key.insert(key.to_owned(), id);
    c.jobs.insert(id, job);
    Ok(())
}

fn apply_task(c: &mut Cluster, at: Timestamp, fact: &Fact) -> Applied {
    match fact {
        Fact::TaskHeld { task, reason } => {
            in_phase(c, *task, &["pending"])?;
            set_phase(c, at, *task, Phase::Held { reason: reason.clone() });
            Ok(())
        }
        Fact::TaskReleased { task } => {
            in_phase(c, *task, &["held"])?;
            set_phase(c, at, *task, Phase::Pending { reason: WaitReason::Queued, next_try: at });
            Ok(())
        }
        Fact::TaskWaits { task, reason, next_try } => {
            in_phase(c, *task, &["pending"])?;
            set_phase(c, at, *task, Phase::Pending { reason: reason.clone(), next_try: *next_try });
            Ok(())
        }
        Fact::TaskDone { task, outcome } => finish(c, at, *task, outcome),
        other => Err(format!("{} is not about a task", fact_name(other))),
    }
}

fn finish(c: &mut Cluster, at: Timestamp, id: TaskId, outcome: &Outcome) -> Applied {
    in_phase(c, id, &["held", "pending"])?;
    set_phase(c, at, id, Phase::Done { outcome: outcome.clone() });
    Ok(())
}

fn place(c: &mut Cluster, at: Timestamp, id: TaskId, generation: Generation, node_id: NodeId) -> Applied {
    in_phase(c, id, &["pending"])?;
    let task = c.task(id).ok_or_else(|| unknown_task(id))?;
    if generation < task.next_generation() {
        return Err(format!("generation {generation} is not above {}", task.generation.max(task.floor)));
    }
    let node = c.nodes.get_mut(&node_id).ok_or_else(|| unknown_node(node_id))?;
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

fn apply_attempt(c: &mut Cluster, at: Timestamp, fact: &Fact) -> Applied {
    match fact {
        Fact::AttemptAccepted { task, generation } => {
            in_phase(c, *task, &["provisioning"])?;
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
            in_phase(c, *task, &["restoring", "draining"])?;
            let attempt = not_started(c, *task, *generation)?;
            attempt.resumed.clone_from(from);
            attempt.fell_back = *fell_back;
            if *fell_back > 0 {
                // What was passed over is quarantined: the next attempt is not expected to find it.
                task_mut(c, *task)?.checkpoint.clone_from(from);
            }
            Ok(())
        }
        Fact::AttemptStarted { task, generation } => {
            in_phase(c, *task, &["restoring", "draining"])?;
            let attempt = not_started(c, *task, *generation)?;
            attempt.started_at = Some(at);
            let node = attempt.node;
            if matches!(task_mut(c, *task)?.phase, Phase::Restoring { .. }) {
                set_phase(c, at, *task, Phase::Running { node });
            }
            Ok(())
        }
        Fact::AttemptProgressed { task, generation, progress } => {
            in_phase(c, *task, &["restoring", "running", "draining", "completing"])?;
            let attempt = attempt_mut(c, *task, *generation)?;
            attempt.progress = Some(*progress);
            attempt.progress_at = Some(at);
            task_mut(c, *task)?.progress = Some(*progress);
            Ok(())
        }
        Fact::CheckpointCommitted { task, generation, checkpoint } => commit(c, *task, *generation, checkpoint),
        Fact::StopAsked { task, generation, why, deadline } => {
            ask_stop(c, at, (*task, *generation), *why, *deadline)
        }
        Fact::AttemptExited { task, generation, exit, until } => {
            in_phase(c, *task, &["restoring", "running"])?;
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
    in_phase(c, id, &["restoring", "running", "draining", "completing"])?;
    attempt_mut(c, id, generation)?;
    let task = task_mut(c, id)?;
    if task.checkpoint.as_ref().is_some_and(|known| known.log_sequence >= checkpoint.log_sequence) {
        return Err(format!("checkpoint at log {} is not newer", checkpoint.log_sequence));
    }
    let advanced = task.checkpoint.as_ref().is_none_or(|known| checkpoint.step.is_none() || checkpoint.step > known.step);
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
    in_phase(c, id, &["provisioning", "restoring", "running", "draining", "completing"])?;
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

fn end_attempt(
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
    let ran = attempt.stopped_at.zip(attempt.started_at).map_or(Span::ZERO, |(stop, start)| stop.since(start));
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
    if let Some(node) = c.nodes.get_mut(&node_id).filter(|n| n.holder == Some((id, generation))) {
        node.holder = None;
        node.idle_since = Some(at);
    }
    set_phase(c, at, id, Phase::Pending { reason: WaitReason::Queued, next_try: at });
    Ok(())
}

struct NewNode<'a> {
    key: &'a EffectKey,
    pool: &'a Pool,
    shape: &'a Shape,
    quote: &'a Quote,
    expires_at: Timestamp,
}

fn request_node(c: &mut Cluster, at: Timestamp, id: NodeId, new: NewNode<'_>) -> Applied {
    if c.nodes.last_key_value().is_some_and(|(last, _)| *last >= id) {
        return Err(format!("node {id} is not above the last one"));
    }
    let node = Node {
        id,
        key: new.key.clone(),
        pool: new.pool.clone(),
        shape: new.shape.clone(),
        quote: new.quote.clone(),
        state: NodeState::Requested,
        instance: None,
        requested_at: at,
        launched_at: None,
        joined_at: None,
        gone_at: None,
        gone: None,
        ending: None,
        expires_at: new.expires_at,
        notice: None,
        drill: None,
        holder: None,
        idle_since: Some(at),
        refused: None,
        ledger: Ledger::default(),
    };
    c.live.insert(id);
    c.nodes.insert(id, node);
    Ok(())
}

/// An instance that nobody refers to: we pay for it, so it is in the ledger until it is gone.
fn adopt_orphan(
    c: &mut Cluster,
    at: Timestamp,
    id: NodeId,
    key: &EffectKey,
    instance: &InstanceId,
    pool: &Pool,
) -> Applied {
    if c.nodes.get(&id).is_some_and(|known| known.state != NodeState::Gone) {
        return Err(format!("node {id} is alive"));
    }
    if !c.nodes.contains_key(&id) {
        let quote = Quote {
            price: spotq_model::UsdPerHour::default(),
            on_demand: spotq_model::UsdPerHour::default(),
            source: "unknown: found as an orphan".into(),
            as_of: at,
        };
        let shape = Shape { accelerator: None, accelerator_count: 0, cpus: 0, memory_gib: 0 };
        let new = NewNode { key, pool, shape: &shape, quote: &quote, expires_at: at };
        request_node(c, at, id, new)?;
    }
    let node = c.nodes.get_mut(&id).ok_or_else(|| unknown_node(id))?;
    node.instance = Some(instance.clone());
    node.state = NodeState::Ending;
    node.ending = Some(spotq_model::EndWhy::Orphan);
    node.gone_at = None;
    node.gone = None;
    node.launched_at = node.launched_at.or(Some(at));
    let (quote, holder) = (node.quote.clone(), node.ledger.segments.last().and_then(|s| s.holder));
    node.ledger.open(at, quote, holder);
    c.live.insert(id);
    Ok(())
}

fn apply_node(c: &mut Cluster, at: Timestamp, fact: &Fact) -> Applied {
    match fact {
        Fact::NodeLaunched { node, instance, quote } => launched(c, at, *node, instance, quote),
        Fact::NodeRefused { node, kind, message } => {
            let id = *node;
            let node = released(not_launched(c, id)?)?;
            node.refused = Some((*kind, message.clone()));
            node.state = NodeState::Gone;
            node.gone_at = Some(at);
            c.live.remove(&id);
            Ok(())
        }
        Fact::NodeJoined { node } => {
            let node = node_in(c, *node, &[NodeState::Booting])?;
            node.state = NodeState::Ready;
            node.joined_at = Some(at);
            Ok(())
        }
        Fact::NodeNoticed { node, deadline, source } => notice(c, at, *node, *deadline, source),
        Fact::NoticeWithdrawn { node } => withdraw(c, at, *node),
        Fact::NodeEnding { node, why } => {
            let alive = [NodeState::Requested, NodeState::Booting, NodeState::Ready];
            let node = released(node_in(c, *node, &alive)?)?;
            node.state = NodeState::Ending;
            node.ending = Some(*why);
            Ok(())
        }
        Fact::NodeGone { node, cause, ended_at } => gone(c, at, *node, *cause, *ended_at),
        Fact::NodeRepriced { node, quote } => {
            let node = node_in(c, *node, &[NodeState::Booting, NodeState::Ready, NodeState::Ending])?;
            node.quote = quote.clone();
            node.ledger.reprice(at, quote.clone());
            Ok(())
        }
        Fact::DrillAsked { node, notice } => {
            let node = node_in(c, *node, &[NodeState::Booting, NodeState::Ready])?;
            node.drill = Some(Drill { notice: *notice, done: false, error: None });
            Ok(())
        }
        Fact::DrillAnswered { node, error } => {
            let node = c.nodes.get_mut(node).ok_or_else(|| unknown_node(*node))?;
            let drill = node.drill.as_mut().ok_or("no drill was asked for")?;
            drill.done = true;
            drill.error.clone_from(error);
            Ok(())
        }
        other => Err(format!("{} is not about a node", fact_name(other))),
    }
}

fn launched(c: &mut Cluster, at: Timestamp, id: NodeId, instance: &InstanceId, quote: &Quote) -> Applied {
    let node = not_launched(c, id)?;
    node.instance = Some(instance.clone());
    node.launched_at = Some(at);
    node.quote = quote.clone();
    let holder = node.holder;
    node.ledger.open(at, quote.clone(), holder);
    // One that became unneeded meanwhile stays on its way out.
    node.state = node.state.max(NodeState::Booting);
    Ok(())
}

fn gone(c: &mut Cluster, at: Timestamp, id: NodeId, cause: GoneCause, ended_at: Timestamp) -> Applied {
    let alive = [NodeState::Requested, NodeState::Booting, NodeState::Ready, NodeState::Ending];
    let node = released(node_in(c, id, &alive)?)?;
    // The cloud may know the end better than the moment we hear of it, but it cannot lie in the future.
    node.ledger.close(ended_at.min(at));
    node.state = NodeState::Gone;
    node.gone_at = Some(at);
    node.gone = Some(cause);
    c.live.remove(&id);
    Ok(())
}

fn notice(c: &mut Cluster, at: Timestamp, id: NodeId, deadline: Timestamp, source: &str) -> Applied {
    let node = node_in(c, id, &[NodeState::Booting, NodeState::Ready])?;
    let at_first = node.notice.as_ref().map_or(at, |seen| seen.at);
    node.notice = Some(NoticeSeen { at: at_first, deadline, source: source.to_owned() });
    let Some((task_id, generation)) = node.holder else { return Ok(()) };
    let attempt = attempt_mut(c, task_id, generation)?;
    attempt.noticed_at = attempt.noticed_at.or(Some(at));
    let phase = &task_mut(c, task_id)?.phase;
    if matches!(phase, Phase::Restoring { .. } | Phase::Running { .. } | Phase::Draining { .. }) {
        set_phase(c, at, task_id, Phase::Draining { node: id, deadline });
    }
    Ok(())
}

fn withdraw(c: &mut Cluster, at: Timestamp, id: NodeId) -> Applied {
    let node = node_in(c, id, &[NodeState::Booting, NodeState::Ready])?;
    if node.notice.take().is_none() {
        return Err("no notice was seen".into());
    }
    let Some((task_id, generation)) = node.holder else { return Ok(()) };
    let attempt = attempt_mut(c, task_id, generation)?;
    attempt.noticed_at = None;
    let (stopping, started) = (attempt.stop.is_some(), attempt.started_at.is_some());
    if !stopping && matches!(task_mut(c, task_id)?.phase, Phase::Draining { .. }) {
        let phase = if started { Phase::Running { node: id } } else { Phase::Restoring { node: id } };
        set_phase(c, at, task_id, phase);
    }
    Ok(())
}

fn cool(c: &mut Cluster, at: Timestamp, scope: &Scope, kind: RefusalKind, until: Timestamp, message: &str) -> Applied {
    c.cool_downs.retain(|known| known.until > at || known.scope == *scope);
    // A refusal that comes later after the last one than it lasts itself starts from the beginning.
    let lately = c.cool_downs.iter().find(|known| known.scope == *scope && at.since(known.until) < until.since(at));
    let strikes = lately.map_or(0, |known| known.strikes).saturating_add(1);
    c.cool_downs.retain(|known| known.scope != *scope);
    c.cool_downs.push(CoolDown { scope: scope.clone(), kind, until, strikes, message: message.to_owned() });
    Ok(())
}

/// Sets the phase and keeps the queue, the active set and the waiting times true to it.
fn set_phase(c: &mut Cluster, at: Timestamp, id: TaskId, phase: Phase) {
    let Some(job) = c.jobs.get_mut(&id.job) else { return };
    let key = queue_key(job, id);
    let Some(task) = job.tasks.get_mut(&id.index) else { return };
    if let Phase::Pending { reason, .. } = &task.phase {
        let waited = at.since(task.phase_since);
        *task.waited.entry(wait_name(reason).to_owned()).or_default() += waited;
    }
    task.phase = phase;
    task.phase_since = at;
    if matches!(task.phase, Phase::Pending { .. }) {
        c.queue.insert(key);
    } else {
        c.queue.remove(&key);
    }
    if task.phase.node().is_some() {
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

fn queue_key(job: &Job, task: TaskId) -> QueueKey {
    QueueKey { priority: Reverse(job.spec.priority), submitted: job.submitted_at, task }
}

fn in_phase(c: &Cluster, id: TaskId, allowed: &[&str]) -> Applied {
    let task = c.task(id).ok_or_else(|| unknown_task(id))?;
    let name = task.phase.name();
    if allowed.contains(&name) { Ok(()) } else { Err(format!("task {id} is {name}")) }
}

fn task_mut(c: &mut Cluster, id: TaskId) -> Result<&mut Task, String> {
    c.jobs.get_mut(&id.job).and_then(|job| job.tasks.get_mut(&id.index)).ok_or_else(|| unknown_task(id))
}

/// The attempt under way with this generation: an older one can change nothing (INV-02).
fn attempt_mut(c: &mut Cluster, id: TaskId, generation: Generation) -> Result<&mut Attempt, String> {
    let task = task_mut(c, id)?;
    let current = task.generation;
    task.attempts
        .last_mut()
        .filter(|a| a.generation == generation && a.end.is_none())
        .ok_or_else(|| format!("generation {generation} of task {id} is not under way (newest is {current})"))
}

fn not_started(c: &mut Cluster, id: TaskId, generation: Generation) -> Result<&mut Attempt, String> {
    let attempt = attempt_mut(c, id, generation)?;
    if attempt.started_at.is_some() { Err("its command runs already".into()) } else { Ok(attempt) }
}

fn node_in<'a>(c: &'a mut Cluster, id: NodeId, allowed: &[NodeState]) -> Result<&'a mut Node, String> {
    let node = c.nodes.get_mut(&id).ok_or_else(|| unknown_node(id))?;
    if allowed.contains(&node.state) { Ok(node) } else { Err(format!("node {id} is {}", node.state.name())) }
}

fn not_launched(c: &mut Cluster, id: NodeId) -> Result<&mut Node, String> {
    let node = node_in(c, id, &[NodeState::Requested, NodeState::Ending])?;
    if node.launched_at.is_some() { Err(format!("node {id} was launched already")) } else { Ok(node) }
}

/// A node goes only after the attempt that holds it has ended, so that no task is left on a node that is not there.
fn released(node: &mut Node) -> Result<&mut Node, String> {
    match node.holder {
        Some((task, _)) => Err(format!("node {} is held by task {task}", node.id)),
        None => Ok(node),
    }
}

fn unknown_task(id: TaskId) -> String {
    format!("task {id} is unknown")
}

fn unknown_node(id: NodeId) -> String {
    format!("node {id} is unknown")
}

/// The variant's name, for messages.
fn fact_name(fact: &Fact) -> String {
    let text = format!("{fact:?}");
    text.split([' ', '{']).next().unwrap_or("fact").to_owned()
}
