//! A cloud in memory for tests of whatever uses one.
//!
//! It keeps the contract of `CloudProvider` (the conformance suite runs on it) and can be told to break the
//! network between: refuse, answer late, or lose an answer whose work was done. It must never spend money or time.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use spotq_model::{
    Cloud, EffectKey, InstanceId, Market, NodeId, Offer, Pool, Quote, Refusal, RefusalKind, Scope, Shape,
    Span, Timestamp, Usd, UsdPerHour,
};
use tokio::sync::broadcast;

use crate::{
    Billable, CHANGES_KEPT, CloudProvider, GoneCause, Instance, InstanceChange, InstanceState, LaunchRequest,
    Launched, TAG_CLUSTER, TAG_NODE, TerminateState,
};

/// A call that the fake received, as recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    Offers,
    Launch(Box<LaunchRequest>),
    ListOwned { cluster: String },
    Terminate { instance: InstanceId },
    Interrupt { instance: InstanceId, notice: Span },
}

/// A cloud in memory. Clones are the same cloud.
#[derive(Debug, Clone)]
pub struct FakeProvider {
    state: Arc<Mutex<State>>,
    changes: broadcast::Sender<InstanceChange>,
}

#[derive(Debug, Default)]
struct State {
    offers: Vec<Offer>,
    nodes: BTreeMap<InstanceId, FakeNode>,
    by_key: BTreeMap<EffectKey, InstanceId>,
    calls: Vec<Call>,
    refusals: VecDeque<Refusal>,
    lost_launch_answers: u32,
    delays: VecDeque<Duration>,
    hold_boots: bool,
    slow_endings: bool,
    double_changes: bool,
}

#[derive(Debug)]
struct FakeNode {
    seen: Instance,
    cluster: String,
    quote: Quote,
}

impl FakeNode {
    fn launched(&self) -> Launched {
        let Instance { instance, launched_at, .. } = self.seen.clone();
        Launched { instance, quote: self.quote.clone(), launched_at }
    }
}

impl FakeProvider {
    /// A cloud that sells the given offers.
    #[must_use]
    pub fn new(offers: Vec<Offer>) -> Self {
        let state = State { offers, ..State::default() };
        FakeProvider { state: Arc::new(Mutex::new(state)), changes: broadcast::Sender::new(CHANGES_KEPT) }
    }

    /// A cloud with two spot pools and an on-demand one of the same CPU node.
    #[must_use]
    pub fn with_small_market() -> Self {
        let offer = |zone: &str, market, price| Offer {
            pool: Pool {
                cloud: Cloud::Aws,
                region: "us-east-1".into(),
                zone: zone.into(),
                instance_type: "c7i.xlarge".into(),
                market,
            },
            shape: Shape { accelerator: None, accelerator_count: 0, cpus: 4, memory_gib: 8 },
            quote: Quote {
                price: UsdPerHour::nanos(price),
                on_demand: UsdPerHour::nanos(178_500_000),
                source: "fake".into(),
                as_of: Timestamp(0),
            },
            interruptions_per_hour_ppm: if market == Market::Spot { 50_000 } else { 0 },
        };
        FakeProvider::new(vec![
            offer("us-east-1a", Market::Spot, 60_000_000),
            offer("us-east-1b", Market::Spot, 70_000_000),
            offer("us-east-1a", Market::OnDemand, 178_500_000),
        ])
    }

    /// Replaces the price list.
    pub fn set_offers(&self, offers: Vec<Offer>) {
        self.lock().offers = offers;
    }

    /// The next call that can be refused is refused so; several are used in order.
    pub fn refuse_next(&self, refusal: Refusal) {
        self.lock().refusals.push_back(refusal);
    }

    /// The next launch succeeds in the cloud, but its caller gets a transient fault.
    pub fn lose_next_launch_answer(&self) {
        self.lock().lost_launch_answers += 1;
    }

    /// The next call answers this late; its effect is immediate.
    pub fn delay_next(&self, delay: Span) {
        self.lock().delays.push_back(delay.as_duration());
    }

    /// New instances stay pending until `finish_boot`.
    pub fn hold_boots(&self) {
        self.lock().hold_boots = true;
    }

    /// Terminated instances stay in `Ending` until the call is repeated.
    pub fn slow_endings(&self) {
        self.lock().slow_endings = true;
    }

    /// Each change is sent twice from now on.
    pub fn double_changes(&self) {
        self.lock().double_changes = true;
    }

    /// A pending instance runs.
    pub fn finish_boot(&self, instance: &InstanceId) {
        self.lock().advance(&self.changes, instance, InstanceState::Running);
    }

    /// The instance is gone, for this cause, now.
    pub fn end(&self, instance: &InstanceId, cause: GoneCause) {
        self.lock().advance(&self.changes, instance, InstanceState::Gone { cause, at: now() });
    }

    /// Everything that was called, in order.
    #[must_use]
    pub fn calls(&self) -> Vec<Call> {
        self.lock().calls.clone()
    }

    /// Instances that are not gone.
    #[must_use]
    pub fn live(&self) -> Vec<Instance> {
        self.lock().nodes.values().filter(|n| !n.seen.state.is_gone()).map(|n| n.seen.clone()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic in another test thread leaves plain data behind, which is still what it says.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn answer<T>(&self, result: T) -> T {
        let delay = self.lock().delays.pop_front();
        if let Some(delay) = delay {
            tokio::time::sleep(delay).await;
        }
        result
    }

    fn end_later(&self, instance: &InstanceId, cause: GoneCause, wait: Duration) {
        let (cloud, instance) = (self.clone(), instance.clone());
        tokio::spawn(async move {
            tokio::time::sleep(wait).await;
            cloud.end(&instance, cause);
        });
    }

    fn launch_now(&self, request: &LaunchRequest) -> Result<Launched, Refusal> {
        let mut state = self.lock();
        if let Some(known) = state.by_key.get(&request.key).and_then(|id| state.nodes.get(id)) {
            return Ok(known.launched());
        }
        let scope = Scope::Pool { pool: request.pool.clone() };
        let Some(quote) = state.offers.iter().find(|o| o.pool == request.pool).map(|o| o.quote.clone())
        else {
            return Err(refusal(RefusalKind::InvalidRequest, scope, "no such pool"));
        };
        let instance = InstanceId(format!("i-fake-{}", state.nodes.len() + 1));
        let node = request.tags.get(TAG_NODE).and_then(|n| n.parse().ok()).map(NodeId);
        let seen = Instance {
            instance: instance.clone(),
            key: request.key.clone(),
            node,
            state: InstanceState::Pending,
            pool: request.pool.clone(),
            launched_at: now(),
        };
        let cluster = request.tags.get(TAG_CLUSTER).cloned().unwrap_or_default();
        let node = FakeNode { seen, cluster, quote };
        let launched = node.launched();
        state.nodes.insert(instance.clone(), node);
        state.by_key.insert(request.key.clone(), instance.clone());
        if !state.hold_boots {
            state.advance(&self.changes, &instance, InstanceState::Running);
        }
        drop(state);
        self.end_later(&instance, GoneCause::Expired, request.expires_at.since(now()).as_duration());
        Ok(launched)
    }
}

#[async_trait]
impl CloudProvider for FakeProvider {
    fn name(&self) -> &str {
        "fake"
    }

    async fn offers(&self) -> Result<Vec<Offer>, Refusal> {
        let offers = self.lock().begin(Call::Offers).map(|state| state.offers.clone());
        self.answer(offers).await
    }

    async fn launch(&self, request: LaunchRequest) -> Result<Launched, Refusal> {
        let allowed = self.lock().begin(Call::Launch(Box::new(request.clone()))).map(|_| ());
        let mut result = allowed.and_then(|()| self.launch_now(&request));
        {
            let mut state = self.lock();
            if result.is_ok() && state.lost_launch_answers > 0 {
                state.lost_launch_answers -= 1;
                let scope = Scope::Pool { pool: request.pool };
                result = Err(refusal(RefusalKind::Transient, scope, "the answer was lost"));
            }
        }
        self.answer(result).await
    }

    async fn list_owned(&self, cluster: &str) -> Result<Vec<Instance>, Refusal> {
        let list = self.lock().begin(Call::ListOwned { cluster: cluster.into() }).map(|state| {
            state.nodes.values().filter(|n| n.cluster == cluster).map(|n| n.seen.clone()).collect()
        });
        self.answer(list).await
    }

    async fn terminate(&self, instance: &InstanceId) -> Result<TerminateState, Refusal> {
        let result =
            self.lock().begin(Call::Terminate { instance: instance.clone() }).map(|state| {
                match state.nodes.get(instance).map(|n| n.seen.state) {
                    None | Some(InstanceState::Gone { .. }) => TerminateState::Gone,
                    Some(InstanceState::Pending | InstanceState::Running) if state.slow_endings => {
                        state.advance(&self.changes, instance, InstanceState::Ending);
                        TerminateState::Ending
                    }
                    Some(InstanceState::Pending | InstanceState::Running | InstanceState::Ending) => {
                        let gone = InstanceState::Gone { cause: GoneCause::Terminated, at: now() };
                        state.advance(&self.changes, instance, gone);
                        TerminateState::Gone
                    }
                }
            });
        self.answer(result).await
    }

    async fn simulate_interruption(&self, instance: &InstanceId, notice: Span) -> Result<(), Refusal> {
        let call = Call::Interrupt { instance: instance.clone(), notice };
        let result = self.lock().begin(call).and_then(|state| {
            let live = state.nodes.get(instance).is_some_and(|n| !n.seen.state.is_gone());
            let scope = Scope::Cloud { cloud: Cloud::Aws };
            if live { Ok(()) } else { Err(refusal(RefusalKind::NotFound, scope, "no such instance")) }
        });
        if result.is_ok() {
            self.end_later(instance, GoneCause::Preempted, notice.as_duration());
        }
        self.answer(result).await
    }

    fn changes(&self) -> broadcast::Receiver<InstanceChange> {
        self.changes.subscribe()
    }

    fn billed(&self, stretch: &Billable) -> Usd {
        stretch.quote.price.cost(stretch.end.since(stretch.start))
    }
}

impl State {
    /// Records a call and takes the refusal that waits for it, if any.
    fn begin(&mut self, call: Call) -> Result<&mut Self, Refusal> {
        self.calls.push(call);
        match self.refusals.pop_front() {
            Some(refusal) => Err(refusal),
            None => Ok(self),
        }
    }

    fn advance(&mut self, out: &broadcast::Sender<InstanceChange>, id: &InstanceId, to: InstanceState) {
        let Some(node) = self.nodes.get_mut(id) else { return };
        if node.seen.state.is_gone() || node.seen.state == to {
            return;
        }
        node.seen.state = to;
        let change = InstanceChange { instance: id.clone(), node: node.seen.node, state: to };
        for _ in 0..if self.double_changes { 2 } else { 1 } {
            // Nobody listening is fine: changes are lossy by contract.
            let _ = out.send(change.clone());
        }
    }
}

fn refusal(kind: RefusalKind, scope: Scope, message: &str) -> Refusal {
    Refusal { kind, scope, cool_down: Span::secs(30), message: message.into() }
}

fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Timestamp(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance;

    #[tokio::test]
    async fn the_fake_keeps_the_contract() {
        conformance::run(&FakeProvider::with_small_market(), &conformance::Setup::default()).await;
    }

    #[tokio::test]
    async fn the_fake_keeps_the_contract_when_it_is_slow() {
        let cloud = FakeProvider::with_small_market();
        cloud.slow_endings();
        cloud.double_changes();
        conformance::run(&cloud, &conformance::Setup::default()).await;
    }

    #[tokio::test]
    async fn a_lost_answer_leaves_an_instance_that_the_same_key_finds() {
        let cloud = FakeProvider::with_small_market();
        let offers = cloud.offers().await.unwrap();
        let request = conformance::Setup::default().request(&offers[0].pool, 7);
        cloud.lose_next_launch_answer();
        assert_eq!(cloud.launch(request.clone()).await.unwrap_err().kind, RefusalKind::Transient);
        assert_eq!(cloud.live().len(), 1);
        cloud.launch(request).await.unwrap();
        assert_eq!(cloud.live().len(), 1);
        assert_eq!(cloud.calls().iter().filter(|c| matches!(c, Call::Launch(_))).count(), 2);
    }

    #[tokio::test]
    async fn refusals_are_used_once_and_in_order() {
        let cloud = FakeProvider::with_small_market();
        for kind in [RefusalKind::Throttled, RefusalKind::QuotaExceeded] {
            cloud.refuse_next(refusal(kind, Scope::Cloud { cloud: Cloud::Aws }, "told to"));
        }
        assert_eq!(cloud.offers().await.unwrap_err().kind, RefusalKind::Throttled);
        assert_eq!(cloud.list_owned("c").await.unwrap_err().kind, RefusalKind::QuotaExceeded);
        assert!(cloud.offers().await.is_ok());
    }
}
