//! What the world still owes this state. Computed from state alone, so a crash only means it is computed again.

use spotq_model::{Effect, Fact, Timestamp};

use crate::state::{Cluster, Node, NodeState, Phase};

/// Every effect that is due. The caller skips those in flight, by [`Effect::key`].
#[must_use]
pub fn due(c: &Cluster, now: Timestamp) -> Vec<Effect> {
    let mut owed = Vec::new();
    for node in c.live_nodes() {
        of_node(c, now, node, &mut owed);
    }
    owed
}

fn of_node(c: &Cluster, now: Timestamp, node: &Node, owed: &mut Vec<Effect>) {
    match (node.state, &node.instance) {
        // Past its time to live a late launch would only be ended again.
        (NodeState::Requested, _) if now < node.expires_at => owed.push(Effect::Launch {
            node: node.id,
            key: node.key.clone(),
            pool: node.pool.clone(),
            expires_at: node.expires_at,
        }),
        (NodeState::Ending, Some(instance)) => {
            owed.push(Effect::Terminate { node: node.id, instance: instance.clone() });
        }
        (NodeState::Booting | NodeState::Ready, Some(instance)) => {
            if let Some(drill) = node.drill.as_ref().filter(|drill| !drill.done) {
                owed.push(Effect::Drill { node: node.id, instance: instance.clone(), notice: drill.notice });
            }
            owed.extend(of_holder(c, node));
        }
        // Unneeded before the cloud answered: the answer, or the cloud's list, says whether there is anything to end.
        (NodeState::Ending, None) => {}
        (NodeState::Requested, _) | (NodeState::Booting | NodeState::Ready, None) | (NodeState::Gone, _) => {}
    }
}

fn of_holder(c: &Cluster, node: &Node) -> Option<Effect> {
    let (task, generation) = node.holder?;
    let known = c.task(task)?;
    let attempt = known.under_way().filter(|attempt| attempt.generation == generation)?;
    if let Some(stop) = attempt.stop {
        let node = node.id;
        return Some(Effect::Stop { node, task, generation, why: stop.why, deadline: stop.deadline });
    }
    let waits_for_node = matches!(known.phase, Phase::Provisioning { .. });
    (waits_for_node && node.state == NodeState::Ready && node.notice.is_none()).then_some(Effect::Grant {
        node: node.id,
        task,
        generation,
    })
}

/// Facts that may make an effect due. The others, of which there are many, must not interrupt the flow of appends.
#[must_use]
pub fn owes_effects(fact: &Fact) -> bool {
    !matches!(
        fact,
        Fact::JobSubmitted { .. }
            | Fact::TaskHeld { .. }
            | Fact::TaskReleased { .. }
            | Fact::TaskWaits { .. }
            | Fact::AttemptProgressed { .. }
            | Fact::CheckpointCommitted { .. }
            | Fact::NodeRepriced { .. }
            | Fact::PoolCooled { .. }
    )
}
