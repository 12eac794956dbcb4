//! Why a task is where it is, computed from what the planner itself uses.

use spotq_model::{Offer, Pool, Quote, TaskId, Timestamp, WaitReason};
use spotq_policy::{Score, WhyNot};

use crate::plan::{plan_input, verdict};
use crate::policies::Policies;
use crate::state::{Cluster, Phase};

/// What the task does now and why, what would change that, and each pool's verdict, the best first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    pub headline: String,
    pub next: String,
    pub pools: Vec<PoolVerdict>,
}

/// One pool as the planner sees it for this task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolVerdict {
    pub pool: Pool,
    pub quote: Quote,
    pub verdict: Result<Score, WhyNot>,
}

/// Explains `id`; `None` if there is no such task.
#[must_use]
pub fn explain(
    c: &Cluster,
    p: &Policies,
    now: Timestamp,
    offers: &[Offer],
    id: TaskId,
) -> Option<Explanation> {
    let task = c.task(id)?;
    let spec = c.spec(id)?;
    let input = plan_input(c, p, now, offers);
    let mut pools: Vec<PoolVerdict> = offers
        .iter()
        .map(|offer| PoolVerdict {
            pool: offer.pool.clone(),
            quote: offer.quote.clone(),
            verdict: verdict(p, spec, offer, input.cooling(&offer.pool)),
        })
        .collect();
    pools.sort_by(|a, b| match (&a.verdict, &b.verdict) {
        (Ok(x), Ok(y)) => x.cmp(y).then_with(|| a.pool.cmp(&b.pool)),
        (Ok(_), Err(_)) => std::cmp::Ordering::Less,
        (Err(_), Ok(_)) => std::cmp::Ordering::Greater,
        // A pool that only rests comes before one that never fits.
        (Err(x), Err(y)) => y.cmp(x).then_with(|| a.pool.cmp(&b.pool)),
    });
    let (headline, next) = words(c, now, &task.phase);
    Some(Explanation { headline, next, pools })
}

fn words(c: &Cluster, now: Timestamp, phase: &Phase) -> (String, String) {
    let on = |id: &spotq_model::NodeId| {
        c.nodes.get(id).map_or_else(
            || format!("node {id}"),
            |node| {
                format!(
                    "{} at ${:.4}/h (on-demand ${:.4}/h)",
                    node.pool, node.quote.price, node.quote.on_demand
                )
            },
        )
    };
    match phase {
        Phase::Held { .. } => ("held by its user".into(), "`spotq release` puts it in the queue".into()),
        Phase::Pending { reason, next_try } => {
            let wait = next_try.since(now);
            let when = if wait.0 == 0 { "at once".to_owned() } else { format!("in {wait}") };
            (format!("waits: {reason}"), format!("the planner looks again {when}{}", hint(reason)))
        }
        Phase::Provisioning { node } => {
            (format!("waits for its node in {}", on(node)), "starts when the node is up".into())
        }
        Phase::Restoring { node } => {
            (format!("restores its checkpoint on {}", on(node)), "runs when the files are verified".into())
        }
        Phase::Running { node } => (
            format!("runs on {}", on(node)),
            "the cheapest pool that would do when it was placed; it moves when the cloud takes the node back"
                .into(),
        ),
        Phase::Draining { node, deadline } => (
            format!("saves and leaves {}", on(node)),
            format!("the node may be gone in {}; it goes on elsewhere after that", deadline.since(now)),
        ),
        Phase::Completing { .. } => (
            "its command ended badly; waiting whether its node was the reason".into(),
            "decided within seconds".into(),
        ),
        Phase::Done { outcome } => (outcome.to_string(), "nothing; a done task never changes again".into()),
    }
}

fn hint(reason: &WaitReason) -> &'static str {
    match reason {
        WaitReason::NoSuchPool { .. } => "; change `resources:` to something on `spotq offers`",
        WaitReason::TooExpensive { .. } => "; a higher `max_hourly_cost` or a lower price would let it start",
        WaitReason::SpotNotWorthIt => "; `policy: spot-first` would take on-demand meanwhile",
        WaitReason::NodeLimit { .. } => "; it starts when another node ends",
        WaitReason::Queued
        | WaitReason::BeginTime { .. }
        | WaitReason::CoolingDown { .. }
        | WaitReason::NoOffers
        | WaitReason::BackOff { .. } => "",
    }
}
