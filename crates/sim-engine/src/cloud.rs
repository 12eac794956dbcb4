//! The cloud: one instance per launch key, refusals with a scope, lists that lag, notices of any length, prices that move,
//! calls and answers that are lost, late or doubled, and ends that nobody announced. What an instance costs and when it
//! lived is true here and nowhere else.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use spotq_model::{
    EffectKey, GoneCause, InstanceId, Market, NodeId, Offer, Pool, Quote, Refusal, RefusalKind, Scope, Span,
    Timestamp, Usd, UsdPerHour,
};
use spotq_provider::{
    Billable, Bootstrap, CHANGES_KEPT, CloudProvider, Instance, InstanceChange, InstanceState, LaunchRequest,
    Launched, TAG_CLUSTER, TerminateState,
};
use tokio::sync::broadcast;

use crate::counts::Count;
use crate::draw::START;
use crate::driver::Act;
use crate::faults::Ev;
use crate::node::Slot;
use crate::oracle::Oracle;
use crate::world::{Inner, World};

/// A list shows an instance that has ended for so long.
const LISTED_AFTER_END: u64 = 120_000;

#[derive(Debug)]
pub(crate) struct Cloud {
    pub insts: Vec<Inst>,
    by_key: BTreeMap<EffectKey, usize>,
    news: broadcast::Sender<InstanceChange>,
}

impl Default for Cloud {
    fn default() -> Self {
        Cloud { insts: Vec::new(), by_key: BTreeMap::new(), news: broadcast::channel(CHANGES_KEPT).0 }
    }
}

/// An instance, and what is known of its worker from outside.
#[derive(Debug)]
pub(crate) struct Inst {
    pub id: InstanceId,
    pub key: EffectKey,
    pub node: NodeId,
    pub pool: Pool,
    pub quote: Quote,
    pub bootstrap: Bootstrap,
    cluster: String,
    pub launched_at: u64,
    pub state: InstanceState,
    /// Told to end and not gone yet.
    ending: bool,
    /// The host that it runs on.
    pub slot: usize,
    /// How often its worker was started.
    pub starts: u32,
    /// When the cloud will take it, as far as it has said so.
    pub notice: Option<u64>,
    /// How much later lists show what is true.
    lag: u64,
    /// Something happened to it or its connection, beside the scheduler.
    pub touched: bool,
    /// Commands that run there: job and generation.
    pub commands: Vec<(u32, u64)>,
    /// Steps that its notice left time for.
    pub owed: Vec<Owed>,
    /// When a call of it to the checkpoint store last failed or was slow.
    pub store_trouble_at: u64,
}

/// A step that is to be stored before its instance goes.
#[derive(Debug, Clone)]
pub(crate) struct Owed {
    pub uuid: String,
    pub generation: u64,
    pub step: u64,
    /// Since when.
    pub since: u64,
}

impl Inst {
    pub(crate) fn is_up(&self) -> bool {
        !self.state.is_gone()
    }

    pub(crate) fn gone_at(&self) -> Option<u64> {
        match self.state {
            InstanceState::Gone { at, .. } => Some(at.0 - START),
            InstanceState::Pending | InstanceState::Running | InstanceState::Ending => None,
        }
    }
}

/// The cloud as the scheduler reaches it.
#[derive(Debug)]
pub(crate) struct SimCloud {
    world: World,
    news: broadcast::Sender<InstanceChange>,
}

impl SimCloud {
    pub(crate) fn new(world: &World) -> SimCloud {
        SimCloud { world: world.clone(), news: world.lock().cloud.news.clone() }
    }

    /// One call over an unreliable line.
    async fn call<T>(
        &self,
        what: &'static str,
        work: impl Fn(&mut Inner) -> Result<T, Refusal> + Send,
    ) -> Result<T, Refusal> {
        let lost = || Refusal {
            kind: RefusalKind::Transient,
            scope: Scope::Cloud { cloud: spotq_model::Cloud::Aws },
            cool_down: Span::secs(1),
            message: format!("{what}: the connection was lost"),
        };
        let pause = self.world.lock().rng.within(10, 150);
        tokio::time::sleep(Duration::from_millis(pause)).await;
        let (answer, late, unheard) = {
            let inner = &mut *self.world.lock();
            let faults = inner.d.faults.clone();
            if inner.fault(faults.call_loss_ppm) {
                inner.count(Count::CallLost);
                return Err(lost());
            }
            let mut answer = work(inner);
            if inner.fault(faults.call_double_ppm) {
                inner.count(Count::CallDoubled);
                answer = work(inner);
            }
            let late = inner.fault(faults.call_late_ppm).then(|| inner.rng.within(500, 8000));
            (answer, late, inner.fault(faults.call_loss_ppm))
        };
        if let Some(late) = late {
            self.world.lock().count(Count::CallLate);
            tokio::time::sleep(Duration::from_millis(late)).await;
        }
        if unheard {
            self.world.lock().count(Count::CallAnswerLost);
            return Err(lost());
        }
        answer
    }
}

#[async_trait]
impl CloudProvider for SimCloud {
    fn name(&self) -> &str {
        "simulated"
    }

    async fn offers(&self) -> Result<Vec<Offer>, Refusal> {
        self.call("offers", |inner| Ok(inner.d.offers.clone())).await
    }

    async fn launch(&self, request: LaunchRequest) -> Result<Launched, Refusal> {
        self.call("launch", move |inner| launch(inner, &request)).await
    }

    async fn list_owned(&self, cluster: &str) -> Result<Vec<Instance>, Refusal> {
        self.call("list", move |inner| Ok(list(inner, cluster))).await
    }

    async fn terminate(&self, instance: &InstanceId) -> Result<TerminateState, Refusal> {
        self.call("terminate", move |inner| Ok(terminate(inner, instance))).await
    }

    async fn simulate_interruption(&self, instance: &InstanceId, notice: Span) -> Result<(), Refusal> {
        self.call("drill", move |inner| {
            let up = inner.cloud.insts.iter().position(|inst| inst.id == *instance && inst.is_up());
            match up {
                Some(inst) => {
                    reclaim(inner, inst, notice.0);
                    Ok(())
                }
                None => Err(Refusal {
                    kind: RefusalKind::NotFound,
                    scope: Scope::Cloud { cloud: spotq_model::Cloud::Aws },
                    cool_down: Span::secs(1),
                    message: "no such instance".into(),
                }),
            }
        })
        .await
    }

    fn changes(&self) -> broadcast::Receiver<InstanceChange> {
        self.news.subscribe()
    }

    fn billed(&self, stretch: &Billable) -> Usd {
        stretch.quote.price.cost(stretch.end.since(stretch.start))
    }
}

/// The instance's operating system is up.
pub(crate) fn boot(inner: &mut Inner, inst: usize) {
    let node = &mut inner.cloud.insts[inst];
    if node.state != InstanceState::Pending {
        return;
    }
    node.state = InstanceState::Running;
    let slot = node.slot;
    inner.slots[slot].runs = true;
    inner.acts().push(Act::Start { slot });
}

/// The market wants the instance back, with this much warning.
pub(crate) fn reclaim(inner: &mut Inner, inst: usize, notice: u64) {
    let t = inner.t;
    let node = &mut inner.cloud.insts[inst];
    if !node.is_up() || node.notice.is_some() {
        return;
    }
    node.touched = true;
    let deadline = t + notice;
    if notice > 0 {
        node.notice = Some(deadline);
        let withdrawn = !inner.calm && inner.rng.percent(20);
        inner.count(Count::Notice);
        inner.say(|| format!("notice: i-{inst} has {notice} ms"));
        if withdrawn {
            let at = t + inner.rng.below(notice);
            return inner.at(at, Ev::Withdraw { inst });
        }
    } else {
        inner.count(Count::LostWithoutNotice);
    }
    inner.at(deadline, Ev::Gone { inst, cause: GoneCause::Preempted });
}

pub(crate) fn withdraw(inner: &mut Inner, inst: usize) {
    let node = &mut inner.cloud.insts[inst];
    if node.is_up() {
        node.notice = None;
        node.owed.clear();
        inner.count(Count::NoticeWithdrawn);
        inner.say(|| format!("withdrawn: the notice of i-{inst}"));
    }
}

/// The instance is no more, and nothing on it.
pub(crate) fn gone(inner: &mut Inner, inst: usize, cause: GoneCause) {
    let node = &inner.cloud.insts[inst];
    let withdrawn = cause == GoneCause::Preempted && node.notice.is_some_and(|deadline| deadline > inner.t);
    if !node.is_up() || withdrawn {
        return;
    }
    let calm = inner.calm;
    Oracle::instance_ends(inner, inst, cause);
    let at = inner.true_now();
    let silent = !calm && inner.rng.percent(50);
    let node = &mut inner.cloud.insts[inst];
    node.state = InstanceState::Gone { cause, at };
    node.touched = true;
    node.commands.clear();
    let (slot, id, number) = (node.slot, node.id.clone(), node.node);
    inner.say(|| format!("gone: {id} {cause:?}"));
    inner.count(match cause {
        GoneCause::Crashed => Count::NodeCrash,
        GoneCause::Expired => Count::Expired,
        GoneCause::Preempted if inner.cloud.insts[inst].notice.is_some() => Count::Preempted,
        GoneCause::Preempted | GoneCause::Terminated => Count::Event,
    });
    if silent {
        inner.count(Count::Silent);
    }
    inner.slots[slot] = Slot::default();
    inner.acts().push(Act::Kill { slot, silent });
    let loss = inner.d.faults.news_loss_ppm;
    if inner.fault(loss) {
        inner.count(Count::NewsLost);
    } else {
        let change =
            InstanceChange { instance: id, node: Some(number), state: InstanceState::Gone { cause, at } };
        // Nobody listening is fine: news are lossy by contract.
        let _ = inner.cloud.news.send(change);
    }
}

/// Prices move; spot may cost more than on demand for a while.
pub(crate) fn move_prices(inner: &mut Inner) {
    let as_of = inner.true_now();
    for n in 0..inner.d.offers.len() {
        if inner.d.offers[n].pool.market == Market::Spot && inner.rng.percent(40) {
            let most = if inner.calm { 600_000_000 } else { 1_300_000_000 };
            let nanos = inner.rng.within(100_000_000, most);
            let quote = &mut inner.d.offers[n].quote;
            quote.price = UsdPerHour::nanos(i64::try_from(nanos).unwrap_or(i64::MAX));
            quote.as_of = as_of;
            inner.count(Count::PriceMoved);
        }
    }
}

fn launch(inner: &mut Inner, request: &LaunchRequest) -> Result<Launched, Refusal> {
    if let Some(known) = inner.cloud.by_key.get(&request.key).copied() {
        inner.count(Count::LaunchRepeated);
        Oracle::launched_again(inner, known, request);
        return Ok(launched(&inner.cloud.insts[known]));
    }
    Oracle::launching(inner, request);
    let refuse = inner.d.faults.refuse_ppm;
    if inner.fault(refuse) {
        inner.count(Count::Refused);
        return Err(refusal(inner, request.pool.clone()));
    }
    let expires_at = request.expires_at.0.saturating_sub(START);
    let free = inner.slots.iter().position(|slot| slot.inst.is_none());
    let Some(slot) = free.filter(|_| expires_at > inner.t) else {
        return Err(Refusal {
            kind: RefusalKind::InsufficientCapacity,
            scope: Scope::Pool { pool: request.pool.clone() },
            cool_down: Span::secs(2),
            message: "no capacity".into(),
        });
    };
    let inst = make(inner, request, slot, expires_at);
    Ok(launched(&inner.cloud.insts[inst]))
}

fn make(inner: &mut Inner, request: &LaunchRequest, slot: usize, expires_at: u64) -> usize {
    let inst = inner.cloud.insts.len();
    let quote = inner.d.offers.iter().find(|offer| offer.pool == request.pool).map(|o| o.quote.clone());
    let faults = inner.d.faults.clone();
    let lag = inner.rng.within(0, faults.list_lag_max);
    inner.cloud.by_key.insert(request.key.clone(), inst);
    inner.cloud.insts.push(Inst {
        id: InstanceId(format!("i-{inst}")),
        key: request.key.clone(),
        node: request.node,
        pool: request.pool.clone(),
        quote: quote.unwrap_or_else(|| unknown_price(inner.true_now())),
        bootstrap: request.bootstrap.clone(),
        cluster: request.tags.get(TAG_CLUSTER).cloned().unwrap_or_default(),
        launched_at: inner.t,
        state: InstanceState::Pending,
        ending: false,
        slot,
        starts: 0,
        notice: None,
        lag,
        touched: false,
        commands: Vec::new(),
        owed: Vec::new(),
        store_trouble_at: 0,
    });
    inner.slots[slot].inst = Some(inst);
    inner.say(|| format!("launched: i-{inst} for node {} on host {slot}", request.node));
    inner.at(expires_at, Ev::Gone { inst, cause: GoneCause::Expired });
    if inner.fault(faults.node_crash_ppm / 3) {
        inner.count(Count::NeverBooted);
    } else {
        let delay = inner.rng.within(200, 4000);
        inner.after(delay, Ev::Boot { inst });
    }
    if request.pool.market == Market::Spot && inner.fault(faults.notice_ppm) {
        let (delay, notice) = (inner.rng.gap(15_000), notice_length(inner));
        inner.after(delay, Ev::Reclaim { inst, notice });
    }
    if inner.fault(faults.node_crash_ppm) {
        let delay = inner.rng.gap(15_000);
        inner.after(delay, Ev::Gone { inst, cause: GoneCause::Crashed });
    }
    inst
}

fn notice_length(inner: &mut Inner) -> u64 {
    match inner.rng.below(6) {
        0 => 0,
        1 => inner.rng.within(1, 2000),
        2 | 3 => inner.rng.within(2000, 15_000),
        4 => 30_000,
        _ => 120_000,
    }
}

fn refusal(inner: &mut Inner, pool: Pool) -> Refusal {
    let cool_down = Span::secs(inner.rng.within(1, 8));
    let (kind, scope, message) = match inner.rng.below(5) {
        0 => {
            inner.count(Count::RefusedQuota);
            let (cloud, region, market) = (pool.cloud, pool.region, pool.market);
            (
                RefusalKind::QuotaExceeded,
                Scope::RegionMarket { cloud, region, market },
                "quota of this region",
            )
        }
        1 => (RefusalKind::PriceTooLow, Scope::Pool { pool }, "price above the offer"),
        2 => {
            let scope = Scope::Zone { cloud: pool.cloud, zone: pool.zone };
            (RefusalKind::InsufficientCapacity, scope, "zone is full")
        }
        _ => (RefusalKind::InsufficientCapacity, Scope::Pool { pool }, "no capacity"),
    };
    Refusal { kind, scope, cool_down, message: message.into() }
}

fn launched(inst: &Inst) -> Launched {
    Launched {
        instance: inst.id.clone(),
        quote: inst.quote.clone(),
        launched_at: Timestamp(START + inst.launched_at),
    }
}

fn list(inner: &mut Inner, cluster: &str) -> Vec<Instance> {
    let (t, calm) = (inner.t, inner.calm);
    let mut lagged = false;
    let mut listed = Vec::new();
    for inst in inner.cloud.insts.iter().filter(|inst| inst.cluster == cluster) {
        let seen_at = t.saturating_sub(if calm { 0 } else { inst.lag });
        if inst.launched_at > seen_at {
            lagged = true;
            continue;
        }
        let mut state = inst.state;
        if let Some(gone_at) = inst.gone_at() {
            if gone_at > seen_at {
                lagged = true;
                state = InstanceState::Running;
            } else if gone_at + LISTED_AFTER_END < t {
                continue;
            }
        }
        listed.push(Instance {
            instance: inst.id.clone(),
            key: inst.key.clone(),
            node: Some(inst.node),
            state,
            pool: inst.pool.clone(),
            launched_at: Timestamp(START + inst.launched_at),
        });
    }
    if lagged {
        inner.count(Count::ListLagged);
    }
    listed
}

fn terminate(inner: &mut Inner, instance: &InstanceId) -> TerminateState {
    let Some(inst) = inner.cloud.insts.iter().position(|inst| inst.id == *instance && inst.is_up()) else {
        return TerminateState::Gone;
    };
    Oracle::terminating(inner, inst);
    if inner.cloud.insts[inst].ending {
        return TerminateState::Ending;
    }
    inner.cloud.insts[inst].ending = true;
    inner.cloud.insts[inst].touched = true;
    if inner.rng.percent(50) {
        // The operating system is asked to shut down, and asks the worker.
        let slot = inner.cloud.insts[inst].slot;
        if let Some(terminate) = &inner.slots[slot].terminate {
            let _ = terminate.try_send(());
        }
    }
    let delay = if inner.calm { inner.rng.within(20, 500) } else { inner.rng.within(20, 6000) };
    inner.after(delay, Ev::Gone { inst, cause: GoneCause::Terminated });
    TerminateState::Ending
}

fn unknown_price(at: Timestamp) -> Quote {
    let price = UsdPerHour::nanos(1_000_000_000);
    Quote { price, on_demand: price, source: "sim".into(), as_of: at }
}
