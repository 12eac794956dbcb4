//! What must hold in every state, by id. Used by tests, by the simulator and by the engine after recovery.

use std::collections::BTreeSet;

use spotq_model::{NodeId, TaskId, Timestamp, Usd};

use crate::state::{Cluster, Job, Node, NodeState, Phase, QueueKey, Task};

/// A broken invariant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    pub id: &'static str,
    pub text: String,
}

/// Everything that does not hold in `c`.
#[must_use]
pub fn check(c: &Cluster) -> Vec<Violation> {
    let mut found = Vec::new();
    for job in c.jobs.values() {
        job.tasks.values().for_each(|task| check_task(c, job, task, &mut found));
    }
    for node in c.nodes.values() {
        check_node(c, node, &mut found);
        check_ledger(node, c.now, &mut found);
    }
    check_queue(c, &mut found);
    check_launch_keys(c, &mut found);
    check_instances(c, &mut found);
    found
}

/// What does not hold of these tasks and nodes: all that an event about them can break, but for the order of the queue
/// and what nodes share.
#[must_use]
pub fn check_part(c: &Cluster, tasks: &BTreeSet<TaskId>, nodes: &BTreeSet<NodeId>) -> Vec<Violation> {
    let mut found = Vec::new();
    for id in tasks {
        if let Some((job, task)) = c.jobs.get(&id.job).and_then(|job| Some((job, job.tasks.get(&id.index)?)))
        {
            check_task(c, job, task, &mut found);
        }
    }
    for node in nodes.iter().filter_map(|id| c.nodes.get(id)) {
        check_node(c, node, &mut found);
        check_ledger(node, c.now, &mut found);
    }
    found
}

/// INV-09: what the tasks cost is what their nodes cost while they held them.
#[must_use]
pub fn check_spend(c: &Cluster) -> Option<Violation> {
    let segments = c.nodes.values().flat_map(|node| &node.ledger.segments);
    let held: Usd = segments.filter(|s| s.holder.is_some()).map(|s| s.amount_at(c.now)).sum();
    let tasks = c.jobs.values().flat_map(|job| job.tasks.values());
    let billed: Usd = tasks.map(|task| c.spend(task.id, c.now)).sum();
    (billed != held)
        .then(|| Violation { id: "INV-09", text: format!("the tasks cost {billed}, their nodes {held}") })
}

fn check_task(c: &Cluster, job: &Job, task: &Task, found: &mut Vec<Violation>) {
    check_generations(task, found);
    check_indexes(c, job, task, found);
    check_steps(task, found);
    check_place(c, task, found);
}

/// INV-02: generations only go up, and at most the newest is under way.
fn check_generations(task: &Task, found: &mut Vec<Violation>) {
    let rising = task.attempts.windows(2).all(|pair| pair[0].generation < pair[1].generation);
    let older_ended = task.attempts.iter().rev().skip(1).all(|attempt| attempt.end.is_some());
    let newest = task.attempts.last().is_none_or(|attempt| attempt.generation == task.generation);
    if !(rising && older_ended && newest) {
        found.push(Violation {
            id: "INV-02",
            text: format!("generations of task {} are out of order", task.id),
        });
    }
}

/// INV-11: a phase is exactly one, a done task has no attempt under way, the indexes agree with the phases.
fn check_indexes(c: &Cluster, job: &Job, task: &Task, found: &mut Vec<Violation>) {
    let pending = matches!(task.phase, Phase::Pending { .. });
    let queued = c.queue.contains(&QueueKey::of(job, task.id));
    let active = task.phase.node().is_some();
    let under_way = task.under_way().is_some();
    if pending != queued || active != c.active.contains(&task.id) || active != under_way {
        let text = format!("task {} is {} but its indexes say otherwise", task.id, task.phase.name());
        found.push(Violation { id: "INV-11", text });
    }
}

/// INV-11: nothing stands in the queue but what waits, each once.
fn check_queue(c: &Cluster, found: &mut Vec<Violation>) {
    let waits = |id| c.task(id).is_some_and(|task| matches!(task.phase, Phase::Pending { .. }));
    let mut seen = BTreeSet::new();
    for key in c.queue.iter().filter(|key| !waits(key.task) || !seen.insert(key.task)) {
        let text = format!("task {} is queued and does not wait, or is queued twice", key.task);
        found.push(Violation { id: "INV-11", text });
    }
}

/// INV-03: no task is on a node that is gone.
fn check_place(c: &Cluster, task: &Task, found: &mut Vec<Violation>) {
    let Some(node) = task.phase.node().and_then(|id| c.nodes.get(&id)) else { return };
    if node.state == NodeState::Gone {
        let text = format!("task {} is on node {}, which is gone", task.id, node.id);
        found.push(Violation { id: "INV-03", text });
    }
}

/// INV-06: an attempt starts at the newest checkpoint that was committed before it and passed verification.
fn check_steps(task: &Task, found: &mut Vec<Violation>) {
    let mut committed = None;
    for attempt in &task.attempts {
        let resumed = attempt.resumed.as_ref();
        let below = |known: &u64| resumed.is_none_or(|r| r.sequence < *known);
        if attempt.started_at.is_some() && attempt.fell_back == 0 && committed.as_ref().is_some_and(below) {
            let text =
                format!("generation {} of task {} started below its checkpoint", attempt.generation, task.id);
            found.push(Violation { id: "INV-06", text });
        }
        if attempt.fell_back > 0 {
            // Those that were passed over are quarantined.
            committed = resumed.map(|checkpoint| checkpoint.sequence);
        }
        committed = attempt.committed.as_ref().map(|checkpoint| checkpoint.sequence).or(committed);
    }
}

/// INV-03: a node that we pay for is held by an attempt, idle, or being ended.
fn check_node(c: &Cluster, node: &Node, found: &mut Vec<Violation>) {
    let alive = node.state != NodeState::Gone;
    if alive != c.live.contains(&node.id) {
        found.push(Violation {
            id: "INV-03",
            text: format!("node {} is not where it is looked for", node.id),
        });
    }
    if let Some((task, generation)) = node.holder {
        let held = c.attempt_under_way(task, generation).is_some_and(|attempt| attempt.node == node.id);
        if !held || !alive {
            let text = format!("node {} is held by task {task}, which does not know", node.id);
            found.push(Violation { id: "INV-03", text });
        }
    } else if matches!(node.state, NodeState::Booting | NodeState::Ready) && node.idle_since.is_none() {
        found.push(Violation {
            id: "INV-03",
            text: format!("node {} is free but nobody will end it", node.id),
        });
    }
}

/// INV-09: segments follow each other without gap or overlap, amounts are price times time, the end is final.
fn check_ledger(node: &Node, now: Timestamp, found: &mut Vec<Violation>) {
    let segments = &node.ledger.segments;
    let orphaned = node.ending == Some(spotq_model::EndWhy::Orphan);
    let joined = segments
        .windows(2)
        .all(|pair| pair[0].end.is_some_and(|end| end == pair[1].start || (orphaned && end < pair[1].start)));
    let amounts =
        segments.iter().all(|s| s.end.is_none_or(|end| s.amount == s.quote.price.cost(end.since(s.start))));
    let forward = segments.iter().all(|s| s.end.is_none_or(|end| s.start < end) && s.start <= now);
    let open_iff_alive = segments.last().is_some_and(|s| s.end.is_none())
        == (node.launched_at.is_some() && node.state != NodeState::Gone);
    let open_iff_alive = open_iff_alive || segments.is_empty();
    if !(joined && amounts && forward && open_iff_alive) {
        found.push(Violation {
            id: "INV-09",
            text: format!("the ledger of node {} does not add up", node.id),
        });
    }
}

/// INV-04: no two nodes were asked for with the same key.
fn check_launch_keys(c: &Cluster, found: &mut Vec<Violation>) {
    let mut keys = BTreeSet::new();
    let asked = c.nodes.values().filter(|node| node.ending != Some(spotq_model::EndWhy::Orphan));
    let doubled: Vec<NodeId> = asked.filter(|node| !keys.insert(&node.key)).map(|node| node.id).collect();
    for node in doubled {
        found.push(Violation { id: "INV-04", text: format!("node {node} has the launch key of another") });
    }
}

/// INV-03: an instance is paid for once, so one live node refers to it.
fn check_instances(c: &Cluster, found: &mut Vec<Violation>) {
    let mut seen = BTreeSet::new();
    for node in c.live_nodes() {
        if let Some(instance) = node.instance.as_ref().filter(|instance| !seen.insert(*instance)) {
            let text = format!("instance {instance} is in the ledger of node {} and of another", node.id);
            found.push(Violation { id: "INV-03", text });
        }
    }
}
