//! What must hold, looked at from outside: from what became durable, from what the clouds and the checkpoint stores
//! really hold, and from what clients were told. It trusts no scheduler and uses the core only to apply events.

use std::collections::{BTreeMap, BTreeSet};

use spotq_checkpoint::CheckpointSeq;
use spotq_core::{Cluster, Node, NodeState, Phase, apply, invariants, replay};
use spotq_model::{
    AttemptEnd, EffectKey, EndWhy, Event, EventRecord, Fact, Generation, GoneCause, JobId, NodeId, Outcome,
    Pool, Span, TaskId, Timestamp, Usd, UsdPerHour,
};

use crate::counts::Count;
use crate::draw::MARKER;
use crate::objects::Objects;
use crate::scheduler::Grant;
use crate::world::World;

/// An instance to which no durable state refers is found and ended within this time, once faults have stopped: two
/// polls, the lag of a list, and the end itself.
const ORPHAN_MAX: u64 = 5 * 60_000;
/// The whole state is checked after so many events; what an event touches is checked at once.
const FULL_CHECK_EVERY: u64 = 512;
/// Every so many seeds, all that was written is read as text: for planted secrets, and through JSON.
pub(crate) const DEEP_EVERY: u64 = 16;

/// The outside view of one run.
#[derive(Debug, Default)]
pub(crate) struct Oracle {
    /// What is durable.
    pub shadow: Cluster,
    objects: Vec<Objects>,
    clients: BTreeMap<JobId, usize>,
    touched_tasks: BTreeSet<TaskId>,
    touched_nodes: BTreeSet<NodeId>,
    unchecked: u64,
    done: BTreeSet<TaskId>,
    /// Since when a task waits, and how long it waited before.
    waits: BTreeMap<TaskId, (Option<Timestamp>, Span)>,
    /// From each moment on, what an hour of a node costs; nothing while there is no instance.
    bills: BTreeMap<NodeId, Vec<(Timestamp, Option<UsdPerHour>)>>,
    committed: BTreeMap<TaskId, Option<u64>>,
    placed: BTreeMap<TaskId, Generation>,
    unreferenced: BTreeMap<usize, u64>,
}

impl Oracle {
    pub(crate) fn new(jobs: usize) -> Oracle {
        Oracle { objects: (0..jobs).map(|_| Objects::default()).collect(), ..Oracle::default() }
    }

    /// Which client's job a task is.
    pub(crate) fn client_of(&self, task: TaskId) -> usize {
        self.clients.get(&task.job).copied().unwrap_or(0)
    }

    pub(crate) fn objects(&mut self, task: TaskId) -> &mut Objects {
        let client = self.client_of(task);
        &mut self.objects[client]
    }

    /// An event became durable.
    pub(crate) fn committed(world: &mut World, event: &Event) {
        before(world, event);
        if let Err(illegal) = apply(&mut world.oracle.shadow, event) {
            world.violated("INV-12", format!("what is durable does not fit: {illegal}"));
            return;
        }
        watch(world, event);
        world.oracle.unchecked += 1;
    }

    /// A whole append became durable: what it touched is checked.
    pub(crate) fn appended(world: &mut World) {
        let oracle = &mut world.oracle;
        let tasks = std::mem::take(&mut oracle.touched_tasks);
        let nodes = std::mem::take(&mut oracle.touched_nodes);
        let (tasks, nodes) = with_partners(&oracle.shadow, tasks, nodes);
        if let Some(broken) = invariants::check_part(&oracle.shadow, &tasks, &nodes).into_iter().next() {
            world.violated(broken.id, broken.text);
        }
        let found: Vec<_> = tasks.iter().filter_map(|id| wait_without_reason(world, *id)).collect();
        let bills = nodes.iter().filter_map(|id| wrong_bill(world, *id));
        if let Some((id, text)) = found.into_iter().chain(bills).next() {
            world.violated(id, text);
        }
        if world.oracle.unchecked >= FULL_CHECK_EVERY {
            full_check(world);
        }
    }

    /// A scheduler has recovered: it knows all that was ever acknowledged, and nothing else (INV-01).
    pub(crate) fn recovered(world: &mut World, c: &Cluster) {
        if *c != world.oracle.shadow {
            world.violated("INV-01", "a recovery gives another state than what was made durable".into());
        }
        for plan in &world.d.jobs {
            let known = c.by_client_key.get(plan.client_key.as_str()).copied();
            if plan.answered.is_some() && plan.answered != known {
                let text = format!(
                    "`{}` was told job {:?}, a new leader knows {known:?}",
                    plan.client_key, plan.answered
                );
                world.violated("INV-01", text);
                break;
            }
        }
        let running = world.cloud.insts.iter().flat_map(|i| &i.worker.attempts).filter(|a| a.runs()).count();
        (0..running).for_each(|_| world.counts.add(Count::RanOn));
        full_check(world);
    }

    /// A leader's own state is what is durable when nothing is in the air.
    pub(crate) fn snapshot(world: &mut World, c: &Cluster) {
        if c.version == world.oracle.shadow.version && *c != world.oracle.shadow {
            world.violated("INV-01", "a leader's state is not what its events say".into());
        }
    }

    /// A cloud is asked for an instance (INV-04: the intent is durable).
    pub(crate) fn launching(world: &mut World, node: NodeId, key: &EffectKey, pool: &Pool) {
        let intent = world.oracle.shadow.nodes.get(&node);
        if !intent.is_some_and(|known| known.key == *key && known.pool == *pool) {
            world.violated("INV-04", format!("node {node} is launched without a durable intent"));
        }
        if world.d.jobs.iter().any(|job| key.0.contains(&job.client_key)) || key.0.contains(MARKER) {
            world.violated("INV-14", format!("launch key `{key}` says too much"));
        }
    }

    /// INV-04: the same key is the same request.
    pub(crate) fn launched_again(world: &mut World, inst: usize, node: NodeId, pool: &Pool) {
        let known = &world.cloud.insts[inst];
        if known.node != node || known.pool != *pool {
            let text = format!("launch key `{}` is used for two nodes", known.key);
            world.violated("INV-04", text);
        }
    }

    /// INV-04: an instance is ended only after it was decided durably.
    pub(crate) fn terminating(world: &mut World, inst: usize) {
        let id = &world.cloud.insts[inst].id;
        let decided = world
            .oracle
            .shadow
            .nodes
            .values()
            .any(|node| node.instance.as_ref() == Some(id) && node.state >= NodeState::Ending);
        if !decided {
            world.violated("INV-04", format!("i-{inst} is ended without a durable decision"));
        }
    }

    /// INV-07: what a notice left time for is saved before the instance goes.
    pub(crate) fn instance_ends(world: &mut World, inst: usize, cause: GoneCause) {
        if cause == GoneCause::Crashed || world.clocks_jump() {
            return;
        }
        let owed = world.cloud.insts[inst].worker.attempts.iter().find_map(|a| Some((a.grant, a.owed?)));
        if let Some(((task, generation), step)) = owed {
            let text = format!(
                "generation {generation} of task {task} had time to save step {step}; i-{inst} is {cause:?} first"
            );
            world.violated("INV-07", text);
        }
    }

    /// INV-12: nobody takes a command away from a worker that is heard and whose attempt is under way.
    pub(crate) fn told_superseded(world: &mut World, inst: usize, grant: Grant) {
        let current =
            spotq_core::is_current(&world.oracle.shadow, world.cloud.insts[inst].node, grant.0, grant.1);
        let worker = &mut world.cloud.insts[inst].worker;
        let runs = worker.attempt(grant).is_some_and(|a| a.runs());
        if runs && !current {
            world.counts.add(Count::Zombie);
        }
        if runs && current && !worker.touched && !worker.noticed {
            let (task, generation) = grant;
            world
                .violated("INV-12", format!("generation {generation} of task {task} is told that it is not"));
        }
    }

    /// INV-02, INV-05, INV-06: what is restored is what was saved, and the newest of it that is whole.
    pub(crate) fn restores(world: &mut World, (task, generation): Grant, found: Option<(u64, u64)>) {
        let expected = world.oracle.objects(task).head_by_hand();
        if expected != found {
            let text = format!(
                "generation {generation} of task {task} restores {found:?}, the log says {expected:?}"
            );
            let (wanted, got) = (expected.map(|(c, _)| c), found.map(|(c, _)| c));
            let void = got.is_some_and(|checkpoint| world.oracle.objects(task).is_void(checkpoint));
            let id = match got {
                _ if void => "INV-02",
                _ if got < wanted => "INV-06",
                _ => "INV-05",
            };
            world.violated(id, text);
        }
    }

    /// INV-02: what a writer commits that no newer one has fenced counts at once, and nothing else does.
    pub(crate) fn commits(
        world: &mut World,
        (task, generation): Grant,
        checkpoint: CheckpointSeq,
        counts: bool,
    ) {
        let by_hand = world.oracle.objects(task).head_by_hand().map(|(checkpoint, _)| checkpoint);
        let log = &world.oracle.objects(task).log;
        let newer = log.iter().any(|entry| entry.generation > generation);
        let mine = by_hand == Some(checkpoint.0);
        if newer || !counts || !mine {
            let text = format!(
                "generation {generation} of task {task} commits {checkpoint}; newer: {newer}, it counts: {counts}, by hand: {by_hand:?}"
            );
            world.violated("INV-02", text);
        }
    }

    /// INV-03: what we pay for is known, or is found soon.
    pub(crate) fn audit(world: &mut World) {
        let t = world.t;
        for inst in 0..world.cloud.insts.len() {
            let seen = &world.cloud.insts[inst];
            let by_tag = |node: &Node| node.key == seen.key && node.state != NodeState::Gone;
            let known = world.oracle.shadow.nodes.get(&seen.node).is_some_and(|node| by_tag(node))
                || world.oracle.shadow.live_nodes().any(|node| node.instance.as_ref() == Some(&seen.id));
            if known || !seen.is_up() {
                world.oracle.unreferenced.remove(&inst);
                continue;
            }
            let since = *world.oracle.unreferenced.entry(inst).or_insert(t);
            let expired = t > seen.expires_at;
            if expired || (world.calm && t - since.max(world.calm_from) > ORPHAN_MAX) {
                world.violated("INV-03", format!("i-{inst} is paid for and nobody knows it"));
            }
        }
    }

    /// Everything is over: the log tells the same story again.
    pub(crate) fn ended(world: &mut World) {
        full_check(world);
        let mut again = Cluster::default();
        let replayed = replay(&mut again, &world.store.log);
        if replayed.is_err() || again != world.oracle.shadow {
            world.violated("INV-01", "a replay from the start gives another state".into());
        }
        for plan in &world.d.jobs {
            let known = world.oracle.shadow.by_client_key.get(plan.client_key.as_str()).copied();
            if plan.answered != known {
                world.violated("INV-01", format!("`{}` is lost", plan.client_key));
                return;
            }
        }
        check_outcomes(world);
        if let Some(broken) = invariants::check_spend(&world.oracle.shadow) {
            world.violated(broken.id, broken.text);
        }
        if world.seed.is_multiple_of(DEEP_EVERY) {
            check_text(world);
        }
    }
}

impl World {
    /// Whether times in this run mean nothing, since clocks jump.
    pub(crate) fn clocks_jump(&self) -> bool {
        self.d.faults.clock_jump_every > 0
    }
}

/// What an event may not say about the state that it finds.
fn before(world: &mut World, event: &Event) {
    match &event.fact {
        Fact::AttemptEnded { task, generation, end, .. } => attempt_ends(world, (*task, *generation), end),
        Fact::CheckpointCommitted { task, generation, checkpoint } => {
            let newest = world.oracle.placed.get(task).copied();
            if newest != Some(*generation) || checkpoint.generation != *generation {
                let text = format!(
                    "a commit of generation {generation} of task {task} is taken; {newest:?} is newest"
                );
                world.violated("INV-02", text);
            }
        }
        Fact::AttemptPlaced { task, generation, .. } => {
            let before = world.oracle.placed.insert(*task, *generation);
            world.counts.add(Count::Attempts);
            if before.is_some_and(|before| before >= *generation) {
                world.violated("INV-02", format!("generation {generation} of task {task} is not the newest"));
            }
        }
        _ => {}
    }
    if let Some(task) = event.fact.task()
        && world.oracle.done.contains(&task)
    {
        world.violated("INV-11", format!("after the end of task {task}: {:?}", event.fact));
    }
}

/// INV-12: an attempt is not given up while its command runs on a node that nothing happened to.
fn attempt_ends(world: &mut World, grant: Grant, end: &AttemptEnd) {
    if world.clocks_jump() {
        return;
    }
    let (task, generation) = grant;
    let Some(attempt) = world.oracle.shadow.attempt_under_way(task, generation) else { return };
    let excused = attempt.stop.is_some() || attempt.held_exit.is_some();
    let given_up =
        matches!(end, AttemptEnd::NodeLost { .. } | AttemptEnd::Requeued | AttemptEnd::Preempted { .. });
    if excused || !given_up {
        return;
    }
    let Some(instance) = world.oracle.shadow.nodes.get(&attempt.node).and_then(|n| n.instance.clone()) else {
        return;
    };
    let inst = world.cloud.insts.iter_mut().find(|inst| inst.id == instance && inst.is_up());
    let Some(inst) = inst.filter(|inst| !inst.worker.touched && !inst.worker.noticed) else { return };
    if inst.worker.attempt(grant).is_some_and(|a| a.runs()) {
        let text = format!(
            "generation {generation} of task {task} runs undisturbed on {instance} and is given up: {end:?}"
        );
        world.violated("INV-12", text);
    }
}

/// What an event means for the books of the oracle.
fn watch(world: &mut World, event: &Event) {
    let at = world.oracle.shadow.now;
    watch_task(world, at, &event.fact);
    watch_checkpoints(world, &event.fact);
    watch_node(world, at, &event.fact);
    if let Some(task) = event.fact.task() {
        world.oracle.touched_tasks.insert(task);
    }
    if let Some(node) = event.fact.node() {
        world.oracle.touched_nodes.insert(node);
    }
}

fn watch_task(world: &mut World, at: Timestamp, fact: &Fact) {
    let (id, waits) = match fact {
        Fact::JobSubmitted { job, client_key, .. } => {
            let client = client_key.strip_prefix("client-").and_then(|n| n.parse().ok());
            world.oracle.clients.insert(*job, client.unwrap_or(0));
            (TaskId::only(*job), true)
        }
        Fact::TaskReleased { task } | Fact::TaskWaits { task, .. } | Fact::AttemptEnded { task, .. } => {
            (*task, true)
        }
        Fact::TaskHeld { task, .. } | Fact::AttemptPlaced { task, .. } | Fact::TaskDone { task, .. } => {
            (*task, false)
        }
        _ => return,
    };
    let (since, total) = world.oracle.waits.entry(id).or_default();
    if let Some(before) = *since {
        *total += at.since(before);
    }
    *since = waits.then_some(at);
    if let Fact::TaskDone { outcome, .. } = fact {
        world.counts.add(match outcome {
            Outcome::Completed => Count::Completed,
            Outcome::Failed { .. } => Count::Failed,
            Outcome::Timeout => Count::Timeout,
            Outcome::Cancelled => Count::Cancelled,
            Outcome::PreemptionBudgetSpent => Count::PreemptionBudget,
            Outcome::NodeFailure => Count::NodeFailure,
            Outcome::OutOfMemory => Count::OutOfMemory,
            Outcome::LaunchFailure { .. } => Count::LaunchFailure,
            Outcome::BudgetExhausted => Count::BudgetExhausted,
        });
        if !world.oracle.done.insert(id) {
            world.violated("INV-11", format!("task {id} was done twice"));
        }
    }
}

/// INV-06: a command never starts below what was committed, unless that was found damaged.
fn watch_checkpoints(world: &mut World, fact: &Fact) {
    match fact {
        Fact::CheckpointCommitted { task, checkpoint, .. } => {
            world.oracle.committed.insert(*task, Some(checkpoint.sequence));
        }
        Fact::AttemptRestored { task, from, fell_back, .. } if *fell_back > 0 => {
            world.oracle.committed.insert(*task, from.as_ref().map(|from| from.sequence));
        }
        Fact::AttemptStarted { task, .. } => {
            let newest = world.oracle.committed.get(task).copied().flatten();
            let under_way = world.oracle.shadow.task(*task).and_then(|t| t.under_way());
            let resumed = under_way.and_then(|a| a.resumed.as_ref()).map(|from| from.sequence);
            if resumed < newest {
                world.violated("INV-06", format!("task {task} resumes at {resumed:?}, below {newest:?}"));
            }
        }
        _ => {}
    }
}

fn watch_node(world: &mut World, at: Timestamp, fact: &Fact) {
    match fact {
        Fact::NodeLaunched { node, quote, billed_from, .. } => {
            let asked = world.oracle.shadow.nodes.get(node).map_or(at, |n| n.requested_at);
            let start = billed_from.map_or(at, |from| from.max(asked).min(at));
            cut(world, start, *node, Some(quote.price));
        }
        Fact::NodeRepriced { node, quote } => cut(world, at, *node, Some(quote.price)),
        Fact::NodeOrphaned { node, .. } => {
            world.counts.add(Count::Orphan);
            let price = world.oracle.shadow.nodes.get(node).map(|n| n.quote.price);
            cut(world, at, *node, price);
        }
        Fact::AttemptPlaced { node, .. } => {
            let price = world.oracle.bills.get(node).and_then(|bill| bill.last()?.1);
            if price.is_some() {
                cut(world, at, *node, price);
            }
        }
        Fact::NodeGone { node, ended_at, .. } => {
            cut(world, at.min(*ended_at), *node, None);
            check_lifetime(world, *node);
        }
        _ => {}
    }
}

fn cut(world: &mut World, at: Timestamp, node: NodeId, price: Option<UsdPerHour>) {
    let bill = world.oracle.bills.entry(node).or_default();
    // An end that is heard of late takes back what was thought to come after it.
    bill.retain(|(from, _)| *from < at);
    bill.push((at, price));
}

/// INV-09: the bill begins and ends where the cloud's own does.
fn check_lifetime(world: &mut World, id: NodeId) {
    if world.clocks_jump() {
        return;
    }
    let Some(node) = world.oracle.shadow.nodes.get(&id).filter(|n| n.ending != Some(EndWhy::Orphan)) else {
        return;
    };
    let inst = world.cloud.insts.iter().find(|inst| Some(&inst.id) == node.instance.as_ref());
    let (Some(inst), Some(first), Some(last)) =
        (inst, node.ledger.segments.first(), node.ledger.segments.last())
    else {
        return;
    };
    let Some((_, gone_at)) = inst.gone else {
        let text = format!("{} is up, and node {id} is given up as gone", inst.id);
        world.violated("INV-03", text);
        return;
    };
    let end = last.end.unwrap_or_default().0;
    if first.start.0 != inst.launched_at || end < gone_at || end > world.t {
        let text = format!(
            "node {id} is billed from {} to {end}, the cloud has it from {} to {gone_at}",
            first.start.0, inst.launched_at
        );
        world.violated("INV-09", text);
    }
}

/// The tasks and the nodes that these are tied to: a node of a task, the task of a node.
fn with_partners(
    c: &Cluster,
    mut tasks: BTreeSet<TaskId>,
    mut nodes: BTreeSet<NodeId>,
) -> (BTreeSet<TaskId>, BTreeSet<NodeId>) {
    nodes.extend(tasks.iter().filter_map(|id| Some(c.task(*id)?.attempts.last()?.node)));
    tasks.extend(nodes.iter().filter_map(|id| Some(c.nodes.get(id)?.holder?.0)));
    (tasks, nodes)
}

/// INV-11: every pending second has a reason.
fn wait_without_reason(world: &World, id: TaskId) -> Option<(&'static str, String)> {
    let task = world.oracle.shadow.task(id)?;
    let now = world.oracle.shadow.now;
    let (since, before) = world.oracle.waits.get(&id).copied().unwrap_or_default();
    let current = since.map_or(Span::ZERO, |since| now.since(since));
    let known: Span = task.waited.values().copied().sum();
    let open = match task.phase {
        Phase::Pending { .. } => now.since(task.phase_since),
        _ => Span::ZERO,
    };
    (known + open != before + current).then(|| ("INV-11", format!("pending time of task {id} has no reason")))
}

/// INV-09: the ledger is what the events say.
fn wrong_bill(world: &World, id: NodeId) -> Option<(&'static str, String)> {
    let node = world.oracle.shadow.nodes.get(&id)?;
    let now = world.oracle.shadow.now;
    let total: Usd = node.ledger.segments.iter().map(|s| s.amount_at(now)).sum();
    let bill = world.oracle.bills.get(&id).map_or(&[][..], Vec::as_slice);
    let ends = bill.iter().skip(1).map(|(from, _)| *from).chain([now]);
    let pieces = bill.iter().zip(ends);
    let expected: Usd =
        pieces.filter_map(|((from, price), end)| Some(price.as_ref()?.cost(end.since(*from)))).sum();
    (total != expected).then(|| ("INV-09", format!("node {id} costs {total}, its events say {expected}")))
}

/// INV-11: one end for each task, and a cancel that was heard is obeyed.
fn check_outcomes(world: &mut World) {
    let ends = world.store.log.iter().filter(|e| matches!(e.fact, Fact::TaskDone { .. })).count();
    if ends != world.oracle.shadow.jobs.len() {
        world.violated("INV-11", format!("{ends} ends for {} jobs", world.oracle.shadow.jobs.len()));
    }
    let outcome = |job: &spotq_core::Job| match &job.tasks.values().next()?.phase {
        Phase::Done { outcome } => Some(outcome.clone()),
        _ => None,
    };
    let broken = world.oracle.shadow.jobs.values().find_map(|job| {
        let plan = &world.d.jobs[*world.oracle.clients.get(&job.id)?];
        let unexpected = match outcome(job)? {
            // Nobody asked for it.
            Outcome::Cancelled => !plan.wishes.iter().any(|(_, wish)| *wish == crate::draw::Wish::Cancel),
            Outcome::BudgetExhausted => plan.spec.budget.is_none(),
            Outcome::Timeout => plan.spec.time_limit.is_none(),
            Outcome::PreemptionBudgetSpent => plan.spec.retry.preemptions.is_none(),
            _ => false,
        };
        unexpected.then(|| format!("job {} ended as {:?}, which nobody asked for", job.id, outcome(job)))
    });
    if let Some(text) = broken {
        world.violated("INV-11", text);
    }
}

/// INV-14, and the disk format: no event but the submit itself says a secret, and each is the same after JSON.
fn check_text(world: &mut World) {
    for event in &world.store.log {
        let record = EventRecord { schema: spotq_model::EVENT_SCHEMA, event: event.clone() };
        let Ok(text) = serde_json::to_string(&record) else { continue };
        let read = serde_json::from_str::<EventRecord>(&text).map(|record| record.event);
        if read.is_ok_and(|read| read == *event) {
            let submit = matches!(event.fact, Fact::JobSubmitted { .. });
            if !submit && text.contains(MARKER) {
                let text = format!("a secret is in {text}");
                world.violated("INV-14", text);
                return;
            }
        } else {
            let text = format!("an event is not the same after JSON: {text}");
            world.violated("INV-01", text);
            return;
        }
    }
}

fn full_check(world: &mut World) {
    world.counts.add(Count::FullCheck);
    world.oracle.unchecked = 0;
    if let Some(broken) = invariants::check(&world.oracle.shadow).into_iter().next() {
        world.violated(broken.id, broken.text);
    }
}
