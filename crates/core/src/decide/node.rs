//! What clouds and workers say about nodes.

use std::collections::{BTreeMap, BTreeSet};

use spotq_model::{
    AttemptEnd, EndWhy, Fact, Generation, GoneCause, InstanceId, InstanceSeen, LaunchAnswer, NodeId, Offer,
    Pool, Refusal, RefusalKind, Scope, Span, TaskId, Timestamp, WaitReason,
};

use super::Facts;
use super::attempt::end_attempt;
use crate::classify::{Loss, classify};
use crate::policies::Policies;
use crate::state::{Cluster, Node, NodeState};

/// A refusal that repeats rests at most this many times longer than the cloud's own figure.
const COOL_DOWN_DOUBLINGS_MAX: u32 = 6;

pub(super) fn launch_answered(c: &Cluster, now: Timestamp, id: NodeId, answer: &LaunchAnswer) -> Facts {
    let Some(node) = c.nodes.get(&id) else { return Vec::new() };
    let open = node.launched_at.is_none() && matches!(node.state, NodeState::Requested | NodeState::Ending);
    if !open {
        return Vec::new();
    }
    match answer {
        LaunchAnswer::Launched { instance, quote, launched_at } => vec![Fact::NodeLaunched {
            node: id,
            instance: instance.clone(),
            quote: quote.clone(),
            billed_from: Some(*launched_at),
        }],
        LaunchAnswer::Refused { refusal } => refused(c, now, node, refusal),
    }
}

/// The pool rests, the task goes back to the queue; nothing was paid.
pub(super) fn refused(c: &Cluster, now: Timestamp, node: &Node, refusal: &Refusal) -> Facts {
    let mut facts = Vec::new();
    // A refused launch is neither a loss nor a preemption: it spends nothing of what the task may lose.
    if let Some((task, generation)) = node.holder {
        let (end, exit, floor) = (AttemptEnd::Requeued, None, None);
        facts.push(Fact::AttemptEnded { task, generation, end, exit, floor });
        facts.push(Fact::TaskWaits { task, reason: WaitReason::Queued, next_try: now });
    }
    let message = refusal.message.clone();
    facts.push(Fact::NodeRefused { node: node.id, kind: refusal.kind, message: message.clone() });
    facts.push(Fact::PoolCooled {
        scope: refusal.scope.clone(),
        kind: refusal.kind,
        until: now + longer_each_time(c, now, refusal),
        message,
    });
    facts
}

fn longer_each_time(c: &Cluster, now: Timestamp, refusal: &Refusal) -> Span {
    let lately = c.cool_downs.iter().find(|known| known.scope == refusal.scope);
    // A refusal long after the last one starts from the beginning.
    let strikes =
        lately.filter(|known| now.since(known.until) < refusal.cool_down).map_or(0, |known| known.strikes);
    Span(refusal.cool_down.0.saturating_mul(1 << strikes.min(COOL_DOWN_DOUBLINGS_MAX)))
}

pub(super) fn drill_answered(c: &Cluster, id: NodeId, error: Option<&String>) -> Facts {
    match c.nodes.get(&id).and_then(|node| node.drill.as_ref()) {
        Some(drill) if !drill.done => vec![Fact::DrillAnswered { node: id, error: error.cloned() }],
        Some(_) | None => Vec::new(),
    }
}

pub(super) fn instance_gone(
    c: &Cluster,
    p: &Policies,
    now: Timestamp,
    instance: &InstanceId,
    cause: GoneCause,
    ended_at: Timestamp,
) -> Facts {
    c.node_of_instance(instance).map(|node| gone(c, p, now, node, cause, ended_at)).unwrap_or_default()
}

fn gone(
    c: &Cluster,
    p: &Policies,
    now: Timestamp,
    node: &Node,
    cause: GoneCause,
    ended_at: Timestamp,
) -> Facts {
    let loss = match cause {
        GoneCause::Preempted => Loss::Preempted,
        GoneCause::Terminated => Loss::Lost { detail: "the node was ended".into() },
        GoneCause::Crashed => Loss::Lost { detail: "the node died".into() },
        GoneCause::Expired => Loss::Lost { detail: "the node reached its time to live".into() },
    };
    let mut facts = release_holder(c, p, now, node, &loss);
    facts.retain(|fact| !matches!(fact, Fact::NodeEnding { .. }));
    facts.push(Fact::NodeGone { node: node.id, cause, ended_at });
    facts
}

/// Ends the attempt that holds the node, if one does.
pub(super) fn release_holder(c: &Cluster, p: &Policies, now: Timestamp, node: &Node, loss: &Loss) -> Facts {
    let Some((task_id, generation)) = node.holder else { return Vec::new() };
    let Some(attempt) = c.attempt_under_way(task_id, generation) else { return Vec::new() };
    let Some(task) = c.task(task_id) else { return Vec::new() };
    let end = classify(attempt, attempt.held_exit.as_ref(), loss);
    end_attempt(c, p, now, task, end, attempt.held_exit.as_ref())
}

pub(super) fn worker_joined(
    c: &Cluster,
    p: &Policies,
    now: Timestamp,
    id: NodeId,
    held: &[(TaskId, Generation)],
) -> Facts {
    let Some(node) = c.nodes.get(&id) else { return Vec::new() };
    let mut facts = Vec::new();
    if node.state == NodeState::Booting {
        facts.push(Fact::NodeJoined { node: id });
    }
    // A worker that no longer knows an attempt that it had accepted has lost it.
    if let Some((task_id, generation)) = node.holder {
        let accepted = c.attempt_under_way(task_id, generation).is_some_and(|a| a.accepted_at.is_some());
        if accepted && !held.contains(&(task_id, generation)) {
            let loss = Loss::Lost { detail: "its worker came back without it".into() };
            facts.extend(release_holder(c, p, now, node, &loss));
        }
    }
    facts
}

pub(super) fn lease_expired(c: &Cluster, p: &Policies, now: Timestamp, id: NodeId) -> Facts {
    let Some(node) = c.nodes.get(&id).filter(|node| node.state == NodeState::Ready) else {
        return Vec::new();
    };
    let detail = format!("no sign of life from its worker for {}", p.lease_ttl);
    end_silent(c, p, now, node, detail)
}

/// The node is lost to us; the cloud is told to end it, so that we stop paying.
pub(super) fn end_silent(c: &Cluster, p: &Policies, now: Timestamp, node: &Node, detail: String) -> Facts {
    let mut facts = release_holder(c, p, now, node, &Loss::Lost { detail });
    if !facts.iter().any(|fact| matches!(fact, Fact::NodeEnding { .. })) {
        facts.push(Fact::NodeEnding { node: node.id, why: EndWhy::Silent });
    }
    facts
}

/// A pool whose nodes never come up is left alone for a while.
pub(super) fn never_joined(c: &Cluster, p: &Policies, now: Timestamp, node: &Node) -> Facts {
    let detail = format!("its worker did not join within {}", p.boot_timeout);
    let mut facts = end_silent(c, p, now, node, detail);
    facts.push(Fact::PoolCooled {
        scope: Scope::Pool { pool: node.pool.clone() },
        kind: RefusalKind::Transient,
        until: now + p.preempted_cool_down,
        message: "a node of it never came up".into(),
    });
    facts
}

/// Compares what the cloud holds with what we believe (INV-03).
pub(super) fn instances(
    c: &Cluster,
    p: &Policies,
    now: Timestamp,
    asked_at: Timestamp,
    instances: &[InstanceSeen],
) -> Facts {
    let mut facts = Vec::new();
    let mut orphans = Orphans::new(c, p, asked_at);
    let seen: BTreeMap<&InstanceId, &InstanceSeen> = instances.iter().map(|i| (&i.instance, i)).collect();
    for instance in instances.iter().filter(|i| i.gone.is_none()) {
        if let Some(id) = orphans.number(instance) {
            let (key, instance, pool) =
                (instance.key.clone(), instance.instance.clone(), instance.pool.clone());
            facts.push(Fact::NodeOrphaned { node: id, key, instance, pool });
        }
    }
    for node in c.live_nodes() {
        let Some(instance) = &node.instance else {
            facts.extend(unanswered(p, asked_at, node, instances));
            continue;
        };
        match seen.get(instance) {
            Some(InstanceSeen { gone: Some(cause), gone_at, .. }) => {
                facts.extend(gone(c, p, now, node, *cause, gone_at.unwrap_or(asked_at)));
            }
            Some(_) => {}
            None if node.launched_at.is_some_and(|at| asked_at.since(at) > p.list_lag) => {
                facts.extend(gone(c, p, now, node, GoneCause::Crashed, asked_at));
            }
            None => {}
        }
    }
    facts
}

/// A node that became unneeded before its launch was answered: the list says whether there is anything to end.
fn unanswered(p: &Policies, asked_at: Timestamp, node: &Node, instances: &[InstanceSeen]) -> Option<Fact> {
    if node.state != NodeState::Ending {
        return None;
    }
    match instances.iter().find(|i| i.key == node.key && i.gone.is_none()) {
        Some(found) => Some(Fact::NodeLaunched {
            node: node.id,
            instance: found.instance.clone(),
            quote: node.quote.clone(),
            billed_from: Some(found.launched_at),
        }),
        None if asked_at.since(node.requested_at) > p.list_lag => Some(Fact::NodeRefused {
            node: node.id,
            kind: RefusalKind::NotFound,
            message: "no longer needed before the cloud had made it".into(),
        }),
        None => None,
    }
}

/// Finds the instances in a list that nobody refers to, each once.
struct Orphans<'a> {
    c: &'a Cluster,
    p: &'a Policies,
    asked_at: Timestamp,
    next_node: NodeId,
    /// What live nodes refer to, and what this list has given a number already.
    known: BTreeSet<&'a InstanceId>,
    revived: BTreeSet<NodeId>,
}

impl<'a> Orphans<'a> {
    fn new(c: &'a Cluster, p: &'a Policies, asked_at: Timestamp) -> Self {
        let next_node = c.nodes.last_key_value().map_or(NodeId(1), |(last, _)| last.next());
        let known = c.live_nodes().filter_map(|node| node.instance.as_ref()).collect();
        Orphans { c, p, asked_at, next_node, known, revived: BTreeSet::new() }
    }

    /// The number under which an instance that nobody refers to is ended; `None` if somebody refers to it.
    fn number(&mut self, seen: &'a InstanceSeen) -> Option<NodeId> {
        if self.known.contains(&seen.instance) {
            return None;
        }
        let tagged = seen.node.and_then(|id| self.c.nodes.get(&id)).filter(|node| node.key == seen.key);
        let id = match tagged {
            // A launch that has not answered yet: the launch is repeated with the same key and finds it, or the
            // instance is ended as soon as it is known.
            Some(node) if node.state != NodeState::Gone && node.launched_at.is_none() => return None,
            Some(node) if node.state == NodeState::Gone && self.may_be_old_news(node, seen) => return None,
            Some(node) if is_ghost(node, seen) && self.revived.insert(node.id) => node.id,
            // Another instance than the one that the node has, or had: it is ended under a number of its own.
            Some(_) | None => {
                let id = self.next_node;
                self.next_node = id.next();
                id
            }
        };
        self.known.insert(&seen.instance);
        Some(id)
    }

    /// A cloud may list an instance for a while after it has ended.
    fn may_be_old_news(&self, node: &Node, seen: &InstanceSeen) -> bool {
        let same = node.instance.as_ref() == Some(&seen.instance);
        same && node.gone_at.is_some_and(|gone_at| self.asked_at.since(gone_at) <= self.p.list_lag)
    }
}

/// The instance of a node that we had given up.
fn is_ghost(node: &Node, seen: &InstanceSeen) -> bool {
    node.state == NodeState::Gone && node.instance.as_ref().is_none_or(|known| *known == seen.instance)
}

pub(super) fn offers(c: &Cluster, offers: &[Offer]) -> Facts {
    let by_pool: BTreeMap<&Pool, &Offer> = offers.iter().map(|offer| (&offer.pool, offer)).collect();
    c.live_nodes()
        .filter(|node| node.launched_at.is_some())
        .filter_map(|node| {
            let quote = &by_pool.get(&node.pool)?.quote;
            let moved = quote.price != node.quote.price || quote.on_demand != node.quote.on_demand;
            moved.then(|| Fact::NodeRepriced { node: node.id, quote: quote.clone() })
        })
        .collect()
}
