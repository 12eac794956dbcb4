//! Facts about nodes and their ledgers. A node is not taken away from under the attempt that holds it.

use std::sync::Arc;

use spotq_model::{
    EffectKey, EndWhy, Fact, GoneCause, InstanceId, NodeId, Pool, Quote, Shape, Timestamp, UsdPerHour,
};

use super::attempt::attempt_mut;
use super::{Applied, fact_name, set_phase, task_mut};
use crate::ledger::Ledger;
use crate::state::{Cluster, Drill, Node, NodeState, NoticeSeen, Phase};

#[expect(
    clippy::wildcard_enum_match_arm,
    reason = "`apply_fact` matches every fact and sends each where it belongs"
)]
pub(super) fn apply_node(c: &mut Cluster, at: Timestamp, fact: &Fact) -> Applied {
    match fact {
        Fact::NodeLaunched { node, instance, quote, billed_from } => {
            launched(c, at, *node, instance, quote, *billed_from)
        }
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
            let node = node_mut(c, *node)?;
            let drill = node.drill.as_mut().ok_or("no drill was asked for")?;
            drill.done = true;
            drill.error.clone_from(error);
            Ok(())
        }
        other => Err(format!("{} is not about a node", fact_name(other))),
    }
}

pub(super) struct NewNode<'a> {
    pub(super) key: &'a EffectKey,
    pub(super) pool: &'a Pool,
    pub(super) shape: &'a Shape,
    pub(super) quote: &'a Quote,
    pub(super) expires_at: Timestamp,
}

pub(super) fn request_node(c: &mut Cluster, at: Timestamp, id: NodeId, new: NewNode<'_>) -> Applied {
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
    c.nodes.insert(id, Arc::new(node));
    Ok(())
}

/// An instance that nobody refers to: we pay for it, so it is in the ledger until it is gone.
pub(super) fn adopt_orphan(
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
            price: UsdPerHour::default(),
            on_demand: UsdPerHour::default(),
            source: "unknown: found as an orphan".into(),
            as_of: at,
        };
        let shape = Shape { accelerator: None, accelerator_count: 0, cpus: 0, memory_gib: 0 };
        let new = NewNode { key, pool, shape: &shape, quote: &quote, expires_at: at };
        request_node(c, at, id, new)?;
    }
    let node = node_mut(c, id)?;
    node.instance = Some(instance.clone());
    node.state = NodeState::Ending;
    node.ending = Some(EndWhy::Orphan);
    node.gone_at = None;
    node.gone = None;
    node.launched_at = node.launched_at.or(Some(at));
    let (quote, holder) = (node.quote.clone(), node.ledger.segments.last().and_then(|s| s.holder));
    node.ledger.open(at, quote, holder);
    c.live.insert(id);
    Ok(())
}

fn launched(
    c: &mut Cluster,
    at: Timestamp,
    id: NodeId,
    instance: &InstanceId,
    quote: &Quote,
    billed_from: Option<Timestamp>,
) -> Applied {
    let node = not_launched(c, id)?;
    node.instance = Some(instance.clone());
    node.launched_at = Some(at);
    node.quote = quote.clone();
    let holder = node.holder;
    // The cloud's clock is not ours: what it made it made between our asking and its answer.
    let start = billed_from.map_or(at, |from| from.clamp(node.requested_at.min(at), at));
    node.ledger.open(start, quote.clone(), holder);
    // One that became unneeded meanwhile stays on its way out.
    node.state = node.state.max(NodeState::Booting);
    Ok(())
}

fn gone(c: &mut Cluster, at: Timestamp, id: NodeId, cause: GoneCause, ended_at: Timestamp) -> Applied {
    let alive = [NodeState::Requested, NodeState::Booting, NodeState::Ready, NodeState::Ending];
    let node = released(node_in(c, id, &alive)?)?;
    // The cloud may know the end better than the moment we hear of it, but it cannot lie in the future.
    node.ledger.end(ended_at.min(at));
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

pub(super) fn node_mut(c: &mut Cluster, id: NodeId) -> Result<&mut Node, String> {
    c.nodes.get_mut(&id).map(Arc::make_mut).ok_or_else(|| unknown_node(id))
}

fn node_in<'a>(c: &'a mut Cluster, id: NodeId, allowed: &[NodeState]) -> Result<&'a mut Node, String> {
    let node = node_mut(c, id)?;
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

pub(super) fn unknown_node(id: NodeId) -> String {
    format!("node {id} is unknown")
}
