//! Which tasks and nodes an event is about, and the part of the state that they make up. It only picks; it checks nothing.

use std::collections::BTreeSet;
use std::sync::Arc;

use spotq_core::Cluster;
use spotq_model::{Fact, NodeId, TaskId};

/// The part of the state that events touched, as a state of its own. Shares its jobs and nodes.
pub(crate) fn part_of(c: &Cluster, tasks: &BTreeSet<TaskId>, nodes: &BTreeSet<NodeId>) -> Cluster {
    let mut part = Cluster { version: c.version, now: c.now, ..Cluster::default() };
    let holders = nodes.iter().filter_map(|id| Some(c.nodes.get(id)?.holder?.0));
    for id in tasks.iter().copied().chain(holders) {
        let Some(job) = c.jobs.get(&id.job) else { continue };
        for task in job.tasks.values() {
            if let Some(node) = task.attempts.last().and_then(|a| c.nodes.get(&a.node)) {
                part.nodes.insert(node.id, Arc::clone(node));
            }
            if c.active.contains(&task.id) {
                part.active.insert(task.id);
            }
            let key = spotq_core::QueueKey {
                priority: std::cmp::Reverse(job.spec.priority),
                submitted: job.submitted_at,
                task: task.id,
            };
            if c.queue.contains(&key) {
                part.queue.insert(key);
            }
        }
        part.jobs.insert(id.job, Arc::clone(job));
    }
    for id in nodes {
        if let Some(node) = c.nodes.get(id) {
            part.nodes.insert(*id, Arc::clone(node));
        }
    }
    // A node that came with its task may be held by another one by now.
    let more: Vec<TaskId> = part.nodes.values().filter_map(|n| Some(n.holder?.0)).collect();
    for id in more {
        if let Some(job) = c.jobs.get(&id.job)
            && !part.jobs.contains_key(&id.job)
        {
            part.jobs.insert(id.job, Arc::clone(job));
            part.active.extend(c.active.get(&id).copied());
        }
    }
    part.live = part.nodes.keys().filter(|id| c.live.contains(id)).copied().collect();
    part
}

/// The task that an event is about.
pub(crate) fn task_of(fact: &Fact) -> Option<TaskId> {
    match fact {
        Fact::JobSubmitted { job, .. } => Some(TaskId::only(*job)),
        Fact::TaskHeld { task, .. }
        | Fact::TaskReleased { task }
        | Fact::TaskWaits { task, .. }
        | Fact::AttemptPlaced { task, .. }
        | Fact::AttemptAccepted { task, .. }
        | Fact::AttemptRestored { task, .. }
        | Fact::AttemptStarted { task, .. }
        | Fact::AttemptProgressed { task, .. }
        | Fact::CheckpointCommitted { task, .. }
        | Fact::StopAsked { task, .. }
        | Fact::AttemptExited { task, .. }
        | Fact::AttemptEnded { task, .. }
        | Fact::TaskDone { task, .. } => Some(*task),
        _ => None,
    }
}

/// The node that an event is about.
pub(crate) fn node_of(fact: &Fact) -> Option<NodeId> {
    match fact {
        Fact::AttemptPlaced { node, .. }
        | Fact::NodeRequested { node, .. }
        | Fact::NodeLaunched { node, .. }
        | Fact::NodeRefused { node, .. }
        | Fact::NodeJoined { node }
        | Fact::NodeNoticed { node, .. }
        | Fact::NoticeWithdrawn { node }
        | Fact::NodeEnding { node, .. }
        | Fact::NodeGone { node, .. }
        | Fact::NodeOrphaned { node, .. }
        | Fact::NodeRepriced { node, .. }
        | Fact::DrillAsked { node, .. }
        | Fact::DrillAnswered { node, .. } => Some(*node),
        _ => None,
    }
}
