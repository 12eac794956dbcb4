//! The planner: who goes where, and why the others wait. A plan is a value; nothing happens until it is adopted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use spotq_model::{
    EffectKey, Fact, Generation, JobSpec, NodeId, Offer, Pool, Quote, RefusalKind, Shape, Span, TaskId,
    Timestamp, UsdPerHour, WaitReason,
};
use spotq_policy::{Score, WhyNot, score};

use crate::lint::{Severity, lint};
use crate::policies::Policies;
use crate::state::{Cluster, CoolDown, NodeState, Phase};

/// How soon the planner looks again at a task that waits for something whose end is unknown.
const LOOK_AGAIN: Span = Span::secs(1);
/// A free node is used although it costs up to this many times the best offer: for a short task the boot that it saves
/// is worth more than the difference.
const FREE_NODE_FACTOR: i64 = 2;

/// All that the planner sees.
#[derive(Debug, Clone)]
pub struct PlanInput<'a> {
    pub now: Timestamp,
    /// Best first; at most `plan_width`.
    pub waiting: Vec<Waiting>,
    pub free_nodes: Vec<FreeNode>,
    pub offers: &'a [Offer],
    pub cool_downs: Vec<CoolDown>,
    pub nodes_live: u32,
    pub next_node: NodeId,
}

impl PlanInput<'_> {
    /// The cool-down that holds for `pool` the longest.
    pub(crate) fn cooling(&self, pool: &Pool) -> Option<&CoolDown> {
        self.cool_downs.iter().filter(|cool| cool.scope.covers(pool)).max_by_key(|cool| cool.until)
    }
}

/// An offer that has a price, and the cool-down of its pool.
type Priced<'a> = (&'a Offer, Option<&'a CoolDown>);

/// A task that waits.
#[derive(Debug, Clone)]
pub struct Waiting {
    pub task: TaskId,
    pub uuid: String,
    pub next_generation: Generation,
    pub spec: Arc<JobSpec>,
    /// What it is known to wait for.
    pub reason: WaitReason,
    pub next_try: Timestamp,
}

/// A node that is up and has nothing to do.
#[derive(Debug, Clone)]
pub struct FreeNode {
    pub node: NodeId,
    pub pool: Pool,
    pub shape: Shape,
    pub quote: Quote,
}

impl FreeNode {
    /// The node as if it were offered now, for the same questions as any offer.
    pub(crate) fn as_offer(&self) -> Offer {
        Offer {
            pool: self.pool.clone(),
            shape: self.shape.clone(),
            quote: self.quote.clone(),
            interruptions_per_hour_ppm: 0,
        }
    }
}

/// What to do, and why not for the rest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    pub moves: Vec<Move>,
    /// One reason and the time of the next look for each task that keeps waiting.
    pub report: BTreeMap<TaskId, (WaitReason, Timestamp)>,
}

/// One placement.
#[expect(clippy::large_enum_variant, reason = "a plan lives for a moment; most moves are launches")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Move {
    /// Onto a node that we pay for already.
    Use { task: TaskId, generation: Generation, node: NodeId },
    /// Onto a new node.
    Launch {
        task: TaskId,
        generation: Generation,
        node: NodeId,
        key: EffectKey,
        offer: Offer,
        expires_at: Timestamp,
    },
}

impl Move {
    #[must_use]
    pub fn task(&self) -> TaskId {
        match self {
            Move::Use { task, .. } | Move::Launch { task, .. } => *task,
        }
    }

    #[must_use]
    pub fn node(&self) -> NodeId {
        match self {
            Move::Use { node, .. } | Move::Launch { node, .. } => *node,
        }
    }
}

/// Gathers what the planner needs from the state.
#[must_use]
pub fn plan_input<'a>(c: &Cluster, p: &Policies, now: Timestamp, offers: &'a [Offer]) -> PlanInput<'a> {
    let waiting = c.queue.iter().filter_map(|key| {
        let job = c.jobs.get(&key.task.job)?;
        let task = job.tasks.get(&key.task.index)?;
        let Phase::Pending { reason, next_try } = &task.phase else { return None };
        // Told already when its time comes: it must not take the place of one that can be placed now.
        let sleeps = matches!(reason, WaitReason::BeginTime { .. } | WaitReason::BackOff { .. });
        if sleeps && *next_try > now {
            return None;
        }
        Some(Waiting {
            task: task.id,
            uuid: job.uuid.clone(),
            next_generation: task.next_generation(),
            spec: Arc::clone(&job.spec),
            reason: reason.clone(),
            next_try: *next_try,
        })
    });
    let free_nodes = c
        .live_nodes()
        .filter(|n| n.holder.is_none() && n.state == NodeState::Ready && n.notice.is_none())
        .filter(|n| n.drill.as_ref().is_none_or(|drill| drill.done) && now + p.node_ttl_margin < n.expires_at)
        .map(|n| FreeNode {
            node: n.id,
            pool: n.pool.clone(),
            shape: n.shape.clone(),
            quote: n.quote.clone(),
        });
    PlanInput {
        now,
        waiting: waiting.take(p.plan_width as usize).collect(),
        free_nodes: free_nodes.collect(),
        offers,
        cool_downs: c.cool_downs.iter().filter(|cool| cool.until > now).cloned().collect(),
        nodes_live: u32::try_from(c.live.len()).unwrap_or(u32::MAX),
        next_node: c.nodes.last_key_value().map_or(NodeId(1), |(last, _)| last.next()),
    }
}

/// Facts after which something that waits might be placed.
#[must_use]
pub fn wakes_planner(fact: &Fact) -> bool {
    matches!(
        fact,
        Fact::JobSubmitted { .. }
            | Fact::TaskReleased { .. }
            | Fact::AttemptEnded { .. }
            | Fact::NodeJoined { .. }
            | Fact::NodeRefused { .. }
            | Fact::NodeGone { .. }
    )
}

/// Places what can be placed, best task first, each on its best pool.
#[must_use]
pub fn plan(input: &PlanInput<'_>, p: &Policies) -> Plan {
    let mut plan = Plan::default();
    let mut taken = BTreeSet::new();
    let mut next_node = input.next_node;
    let mut live = input.nodes_live;
    // An offer without a price says nothing yet.
    let priced = input.offers.iter().filter(|offer| offer.quote.price > UsdPerHour::default());
    let market: Vec<Priced<'_>> = priced.map(|offer| (offer, input.cooling(&offer.pool))).collect();
    for waiting in &input.waiting {
        if let Some(wait) = must_wait(input, waiting) {
            plan.report.insert(waiting.task, wait);
            continue;
        }
        let (task, generation) = (waiting.task, waiting.next_generation);
        let offer = best_offer(input, p, waiting, &market);
        let free = best_free_node(input, p, waiting, &taken);
        if let Some((_, node)) =
            free.filter(|(score, _)| is_worth_it(score, offer.as_ref().ok(), live < p.nodes_max))
        {
            taken.insert(node);
            plan.moves.push(Move::Use { task, generation, node });
            continue;
        }
        match offer {
            Ok(_) if live >= p.nodes_max => {
                let reason = WaitReason::NodeLimit { limit: p.nodes_max };
                plan.report.insert(task, (reason, input.now + LOOK_AGAIN));
            }
            Ok((_, offer)) => {
                let node = next_node;
                next_node = next_node.next();
                live += 1;
                let key = launch_key(p, waiting, node);
                let expires_at = input.now + p.node_ttl;
                plan.moves.push(Move::Launch {
                    task,
                    generation,
                    node,
                    key,
                    offer: offer.clone(),
                    expires_at,
                });
            }
            Err(wait) => {
                plan.report.insert(task, wait);
            }
        }
    }
    plan
}

/// Plans, checks the plan, and turns it into facts; a plan with a fatal note is not adopted.
pub(crate) fn lint_and_place(input: &PlanInput<'_>, p: &Policies) -> Vec<Fact> {
    let plan = plan(input, p);
    if lint(input, &plan).iter().any(|note| note.severity == Severity::Fatal) {
        return Vec::new();
    }
    let mut facts = Vec::new();
    for step in plan.moves {
        match step {
            Move::Use { task, generation, node } => {
                facts.push(Fact::AttemptPlaced { task, generation, node });
            }
            Move::Launch { task, generation, node, key, offer, expires_at } => {
                let Offer { pool, shape, quote, .. } = offer;
                facts.push(Fact::NodeRequested { node, key, pool, shape, quote, expires_at });
                facts.push(Fact::AttemptPlaced { task, generation, node });
            }
        }
    }
    let known: BTreeMap<TaskId, &Waiting> = input.waiting.iter().map(|w| (w.task, w)).collect();
    for (task, (reason, next_try)) in plan.report {
        // The same reason again is not news, however often it is looked at; another end of a cool-down is.
        let ends = matches!(reason, WaitReason::CoolingDown { .. });
        let is_news = |w: &&Waiting| w.reason != reason || (ends && w.next_try + LOOK_AGAIN < next_try);
        if known.get(&task).is_none_or(is_news) {
            facts.push(Fact::TaskWaits { task, reason, next_try });
        }
    }
    facts
}

/// A reason to wait that no pool can lift. A task whose pause or begin time is known is not looked at before its end.
fn must_wait(input: &PlanInput<'_>, waiting: &Waiting) -> Option<(WaitReason, Timestamp)> {
    let begin = waiting.spec.begin.filter(|at| *at > input.now);
    begin.map(|at| (WaitReason::BeginTime { at }, at))
}

fn best_free_node(
    input: &PlanInput<'_>,
    p: &Policies,
    waiting: &Waiting,
    taken: &BTreeSet<NodeId>,
) -> Option<(Score, NodeId)> {
    let candidates = input.free_nodes.iter().filter(|free| !taken.contains(&free.node));
    let scored = candidates.filter_map(|free| {
        score(&waiting.spec, &free.as_offer(), p.restart_overhead).ok().map(|score| (score, free.node))
    });
    scored.min()
}

/// A node that is up saves the boot of another one, but not at any price.
fn is_worth_it(free: &Score, offer: Option<&(Score, &Offer)>, may_launch: bool) -> bool {
    let limit =
        offer.filter(|_| may_launch).map(|(best, _)| best.expected_per_hour.saturating_mul(FREE_NODE_FACTOR));
    limit.is_none_or(|limit| free.expected_per_hour <= limit)
}

fn best_offer<'a>(
    input: &PlanInput<'_>,
    p: &Policies,
    waiting: &Waiting,
    market: &[Priced<'a>],
) -> Result<(Score, &'a Offer), (WaitReason, Timestamp)> {
    let mut refusals = Vec::new();
    let mut best: Option<(Score, &'a Offer)> = None;
    for (offer, cooling) in market {
        let is_better = |score, (known, than): (Score, &Offer)| (score, &offer.pool) < (known, &than.pool);
        match verdict(p, &waiting.spec, offer, *cooling) {
            Ok(score) if best.is_none_or(|best| is_better(score, best)) => best = Some((score, offer)),
            Ok(_) => {}
            Err(why) => refusals.push((why, *offer)),
        }
    }
    best.ok_or_else(|| why_none(input, &refusals))
}

/// What the planner thinks of one offer for one job, while its pool is cooling down or not.
pub(crate) fn verdict(
    p: &Policies,
    spec: &JobSpec,
    offer: &Offer,
    cooling: Option<&CoolDown>,
) -> Result<Score, WhyNot> {
    let score = score(spec, offer, p.restart_overhead)?;
    match cooling {
        Some(cool) => {
            Err(WhyNot::CoolingDown { kind: cool.kind, until: cool.until, message: cool.message.clone() })
        }
        None => Ok(score),
    }
}

/// The one reason to report when no offer will do: the one that is nearest to being lifted.
fn why_none(input: &PlanInput<'_>, refusals: &[(WhyNot, &Offer)]) -> (WaitReason, Timestamp) {
    let look_again = input.now + LOOK_AGAIN;
    if refusals.is_empty() {
        return (WaitReason::NoOffers, look_again);
    }
    let mut cooling: Vec<(Timestamp, RefusalKind)> = Vec::new();
    let mut cheapest: Option<UsdPerHour> = None;
    let mut not_worth = false;
    let mut closest: Option<&WhyNot> = None;
    for (why, offer) in refusals {
        match why {
            WhyNot::CoolingDown { kind, until, .. } => cooling.push((*until, *kind)),
            WhyNot::TooExpensive { .. } => {
                let price = offer.quote.price;
                cheapest = Some(cheapest.map_or(price, |known| known.min(price)));
            }
            WhyNot::SpotNotWorthIt => not_worth = true,
            WhyNot::OtherAccelerator { .. }
            | WhyNot::TooFewAccelerators { .. }
            | WhyNot::TooFewCpus { .. }
            | WhyNot::TooLittleMemory { .. }
            | WhyNot::OtherPlace { .. }
            | WhyNot::OtherInstanceType { .. }
            | WhyNot::MarketByPolicy { .. } => closest = Some(closest.map_or(why, |known| known.max(why))),
        }
    }
    if let Some((until, kind)) = cooling.iter().min() {
        let pools = u32::try_from(cooling.len()).unwrap_or(u32::MAX);
        return (WaitReason::CoolingDown { pools, last: *kind }, *until);
    }
    if let Some(cheapest) = cheapest {
        return (WaitReason::TooExpensive { cheapest }, look_again);
    }
    if not_worth {
        return (WaitReason::SpotNotWorthIt, look_again);
    }
    let hint = closest.map_or_else(|| "no pool matches".to_owned(), ToString::to_string);
    (WaitReason::NoSuchPool { hint }, look_again)
}

/// At most 64 ASCII characters, the same for the same intent: cluster, job and generation, and our number of the node.
fn launch_key(p: &Policies, waiting: &Waiting, node: NodeId) -> EffectKey {
    let cluster: String = p.cluster.chars().filter(char::is_ascii_alphanumeric).take(12).collect();
    let job: String = waiting.uuid.chars().filter(char::is_ascii_hexdigit).take(12).collect();
    EffectKey(format!("{cluster}-{job}-g{}-n{node}", waiting.next_generation))
}
