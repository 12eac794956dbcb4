//! What time alone makes true: leases of launches, settle windows, limits, idle nodes.

use std::collections::BTreeSet;

use spotq_model::{
    AttemptEnd, EndWhy, Fact, Refusal, RefusalKind, Scope, Span, StopWhy, TaskId, Timestamp, Usd,
};

use super::Facts;
use super::attempt::end_attempt;
use super::node::{end_silent, never_joined, refused};
use super::user::stop;
use crate::classify::{Loss, classify};
use crate::policies::Policies;
use crate::state::{Attempt, Cluster, Node, NodeState, Phase, Task};

pub(super) fn tick(c: &Cluster, p: &Policies, now: Timestamp) -> Facts {
    let mut facts: Facts = c.live_nodes().flat_map(|node| node_due(c, p, now, node)).collect();
    // A node that is ended here has released its task already; its task must not be touched twice.
    let released: BTreeSet<TaskId> = facts.iter().filter_map(released_task).collect();
    let others = c.active.iter().filter(|id| !released.contains(id)).filter_map(|id| c.task(*id));
    facts.extend(others.flat_map(|task| task_due(c, p, now, task)));
    facts
}

fn released_task(fact: &Fact) -> Option<TaskId> {
    if let Fact::AttemptEnded { task, .. } = fact { Some(*task) } else { None }
}

fn node_due(c: &Cluster, p: &Policies, now: Timestamp, node: &Node) -> Facts {
    match node.state {
        NodeState::Requested if now.since(node.requested_at) > p.launch_timeout => {
            let refusal = Refusal {
                kind: RefusalKind::Transient,
                scope: Scope::Pool { pool: node.pool.clone() },
                cool_down: p.preempted_cool_down,
                message: format!("no answer to the launch within {}", p.launch_timeout),
            };
            refused(c, now, node, &refusal)
        }
        NodeState::Booting if node.launched_at.is_some_and(|at| now.since(at) > p.boot_timeout) => {
            never_joined(c, p, now, node)
        }
        NodeState::Ready | NodeState::Booting => {
            let idle =
                node.holder.is_none() && node.idle_since.is_some_and(|since| now.since(since) >= p.idle_ttl);
            let overdue = node.notice.as_ref().is_some_and(|notice| now > notice.deadline + p.drain_grace);
            if idle {
                vec![Fact::NodeEnding { node: node.id, why: EndWhy::Idle }]
            } else if overdue {
                end_silent(c, p, now, node, "past the deadline of its notice".into())
            } else {
                Vec::new()
            }
        }
        NodeState::Requested | NodeState::Ending | NodeState::Gone => Vec::new(),
    }
}

fn task_due(c: &Cluster, p: &Policies, now: Timestamp, task: &Task) -> Facts {
    let Some(attempt) = task.under_way() else { return Vec::new() };
    match &task.phase {
        Phase::Completing { until, .. } if now >= *until => {
            let end = classify(attempt, attempt.held_exit.as_ref(), &Loss::None);
            end_attempt(c, p, now, task, end, attempt.held_exit.as_ref())
        }
        Phase::Provisioning { .. } if attempt.noticed_at.is_some() => {
            end_attempt(c, p, now, task, AttemptEnd::Preempted { noticed: true }, None)
        }
        Phase::Provisioning { .. } | Phase::Restoring { .. } | Phase::Running { .. } => {
            limit_reached(c, p, now, task, attempt).map(|why| stop(c, p, now, task, why)).unwrap_or_default()
        }
        Phase::Draining { .. } => overdue_stop(c, p, now, task, attempt),
        Phase::Held { .. } | Phase::Pending { .. } | Phase::Completing { .. } | Phase::Done { .. } => {
            Vec::new()
        }
    }
}

fn limit_reached(
    c: &Cluster,
    p: &Policies,
    now: Timestamp,
    task: &Task,
    attempt: &Attempt,
) -> Option<StopWhy> {
    let spec = c.spec(task.id)?;
    if spec.time_limit.is_some_and(|limit| task.running_time(now) >= limit) {
        return Some(StopWhy::TimeLimit);
    }
    if let Some(budget) = spec.budget
        && c.spend(task.id, now) + one_quantum(c, attempt) >= budget
    {
        return Some(StopWhy::Budget);
    }
    let node = c.nodes.get(&attempt.node)?;
    (now + p.node_ttl_margin >= node.expires_at).then_some(StopWhy::NodeExpires)
}

/// What a second of the node costs: spend is looked at about that often (INV-10).
fn one_quantum(c: &Cluster, attempt: &Attempt) -> Usd {
    c.nodes.get(&attempt.node).map_or(Usd::ZERO, |node| node.quote.price.cost(Span::secs(1)))
}

/// A stop that the worker has not answered long after its deadline: the node no longer obeys and is ended.
fn overdue_stop(c: &Cluster, p: &Policies, now: Timestamp, task: &Task, attempt: &Attempt) -> Facts {
    let Some(stop) = attempt.stop else { return Vec::new() };
    let Some(node) = c.nodes.get(&attempt.node) else { return Vec::new() };
    let patience = p.drain_grace + p.lease_ttl;
    if now > stop.deadline + patience && node.state <= NodeState::Ready {
        return end_silent(c, p, now, node, format!("task {} did not stop when it was told to", task.id));
    }
    Vec::new()
}
