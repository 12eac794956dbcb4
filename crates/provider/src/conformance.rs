//! The rules that every `CloudProvider` keeps, as a suite that each implementation's tests run.
//!
//! It panics with the rule that was broken. It launches a handful of instances and ends all of them, and must
//! never touch an instance that it did not launch.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::time::{Duration, Instant, SystemTime};

use spotq_model::{EffectKey, InstanceId, Market, NodeId, Pool, RefusalKind, Span, Timestamp, Usd};

use crate::{
    Billable, Bootstrap, CloudProvider, GoneCause, Instance, InstanceState, LaunchRequest, Launched, Secret,
    TAG_CLUSTER, TAG_NODE, TerminateState,
};

/// How often a state is looked at while the suite waits for it.
const POLL: Duration = Duration::from_millis(10);

/// What differs between providers under test.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Name of the cluster; unique per run, so that runs do not see each other.
    pub cluster: String,
    /// Bound on each wait, such as for a boot.
    pub patience: Duration,
    /// Notice of the drill; shorter than `patience`.
    pub notice: Span,
    /// Time-to-live of the instance that is left to expire.
    pub time_to_live: Span,
}

impl Default for Setup {
    fn default() -> Self {
        Setup {
            cluster: "conformance".into(),
            patience: Duration::from_secs(20),
            notice: Span::millis(200),
            time_to_live: Span::millis(600),
        }
    }
}

impl Setup {
    /// A launch of node `number` in `pool`.
    #[must_use]
    pub fn request(&self, pool: &Pool, number: u64) -> LaunchRequest {
        LaunchRequest {
            key: EffectKey(format!("{}-{number}", self.cluster)),
            node: NodeId(number),
            pool: pool.clone(),
            tags: BTreeMap::from([
                (TAG_CLUSTER.into(), self.cluster.clone()),
                (TAG_NODE.into(), number.to_string()),
            ]),
            expires_at: now() + Span::secs(600),
            bootstrap: Bootstrap {
                server: "http://127.0.0.1:9".into(),
                join_secret: Secret::new("conformance"),
                env: BTreeMap::new(),
            },
        }
    }
}

/// Runs every rule.
///
/// # Panics
/// When a rule is broken.
pub async fn run(cloud: &dyn CloudProvider, setup: &Setup) {
    let pools = offers_are_sound(cloud).await;
    a_key_launches_once(cloud, setup, &pools).await;
    concurrent_calls_with_one_key_launch_once(cloud, setup, &pools).await;
    an_instance_boots_and_terminates_for_good(cloud, setup, &pools).await;
    a_drill_preempts_and_is_told(cloud, setup, &pools).await;
    an_instance_ends_at_its_time_to_live(cloud, setup, &pools).await;
    unknown_things_are_refused_or_gone(cloud, setup, &pools).await;
    billing_is_additive(cloud).await;
    let left = cloud.list_owned(&setup.cluster).await.expect("list_owned answers");
    assert!(left.iter().all(|i| i.state.is_gone()), "the suite left instances behind: {left:?}");
}

async fn offers_are_sound(cloud: &dyn CloudProvider) -> Vec<Pool> {
    let offers = cloud.offers().await.expect("offers are answered");
    assert!(!offers.is_empty(), "a cloud without offers cannot be used");
    let mut seen = BTreeSet::new();
    for offer in &offers {
        assert!(seen.insert(&offer.pool), "pool {} is offered twice", offer.pool);
        assert!(offer.quote.price.0 > Usd::ZERO, "pool {} has no price", offer.pool);
        assert!(!offer.quote.source.is_empty(), "the price of {} has no source", offer.pool);
        if offer.pool.market == Market::OnDemand {
            assert_eq!(offer.quote.price, offer.quote.on_demand, "on-demand price of {}", offer.pool);
        }
        let has_kind = offer.shape.accelerator.is_some();
        assert_eq!(has_kind, offer.shape.accelerator_count > 0, "accelerators of {}", offer.pool);
    }
    // Spot first: a drill needs a pool that can be preempted.
    let (spot, rest): (Vec<_>, Vec<_>) =
        offers.into_iter().map(|o| o.pool).partition(|p| p.market == Market::Spot);
    spot.into_iter().chain(rest).collect()
}

async fn a_key_launches_once(cloud: &dyn CloudProvider, setup: &Setup, pools: &[Pool]) {
    let (request, first) = launch_somewhere(cloud, setup, pools, 1).await;
    let second = cloud.launch(request.clone()).await.expect("the same key is answered again");
    assert_eq!(first, second, "the same key gives the same instance at the same price");
    let listed = cloud.list_owned(&setup.cluster).await.expect("list_owned answers");
    let with_key: Vec<&Instance> = listed.iter().filter(|i| i.key == request.key).collect();
    assert_eq!(with_key.len(), 1, "one key, one instance: {with_key:?}");
    assert_eq!(with_key[0].instance, first.instance);
    assert_eq!(with_key[0].node, Some(request.node), "the node number comes back from the tags");
    assert_eq!(with_key[0].pool, request.pool);
    let other = cloud.list_owned("another cluster").await.expect("list_owned answers");
    assert!(other.iter().all(|i| i.instance != first.instance), "a cluster sees only its own instances");

    end(cloud, setup, &first.instance).await;
    let replay = cloud.launch(request).await.expect("the key of a dead instance is answered");
    assert_eq!(replay.instance, first.instance, "a key never launches a second instance");
}

async fn concurrent_calls_with_one_key_launch_once(cloud: &dyn CloudProvider, setup: &Setup, pools: &[Pool]) {
    let (request, first) = launch_somewhere(cloud, setup, pools, 2).await;
    let again = || cloud.launch(request.clone());
    let (a, b, c) = tokio::join!(again(), again(), again());
    for answer in [a, b, c] {
        assert_eq!(answer.expect("a concurrent repeat is answered").instance, first.instance);
    }
    end(cloud, setup, &first.instance).await;
}

async fn an_instance_boots_and_terminates_for_good(cloud: &dyn CloudProvider, setup: &Setup, pools: &[Pool]) {
    let (_, launched) = launch_somewhere(cloud, setup, pools, 3).await;
    wait_for(cloud, setup, &launched.instance, "runs", |s| s == InstanceState::Running).await;
    end(cloud, setup, &launched.instance).await;
    let state = state_of(cloud, setup, &launched.instance).await;
    assert!(
        matches!(state, None | Some(InstanceState::Gone { cause: GoneCause::Terminated, .. })),
        "an instance that we ended says so, it says {state:?}"
    );
    let again = cloud.terminate(&launched.instance).await.expect("terminate is idempotent");
    assert_eq!(again, TerminateState::Gone);
}

async fn a_drill_preempts_and_is_told(cloud: &dyn CloudProvider, setup: &Setup, pools: &[Pool]) {
    let mut changes = cloud.changes();
    let (_, launched) = launch_somewhere(cloud, setup, pools, 4).await;
    wait_for(cloud, setup, &launched.instance, "runs", |s| s == InstanceState::Running).await;
    let asked = Instant::now();
    cloud.simulate_interruption(&launched.instance, setup.notice).await.expect("a drill is allowed");
    let told = async {
        loop {
            match changes.recv().await {
                Ok(change) if change.instance == launched.instance && change.state.is_gone() => {
                    break change.state;
                }
                Ok(_) => {}
                Err(error) => panic!("changes ended or lagged: {error}"),
            }
        }
    };
    let state = within(setup, "the death is told", told).await;
    assert!(matches!(state, InstanceState::Gone { cause: GoneCause::Preempted, .. }), "{state:?}");
    assert!(asked.elapsed() >= setup.notice.as_duration(), "the notice is kept");
    end(cloud, setup, &launched.instance).await;
}

async fn an_instance_ends_at_its_time_to_live(cloud: &dyn CloudProvider, setup: &Setup, pools: &[Pool]) {
    let (_, launched) =
        launch_with(cloud, setup, pools, 5, |r| r.expires_at = now() + setup.time_to_live).await;
    let id = &launched.instance;
    let state = wait_for(cloud, setup, id, "expires", InstanceState::is_gone).await;
    assert!(matches!(state, InstanceState::Gone { cause: GoneCause::Expired, .. }), "{state:?}");
}

async fn unknown_things_are_refused_or_gone(cloud: &dyn CloudProvider, setup: &Setup, pools: &[Pool]) {
    let nobody = InstanceId("i-does-not-exist".into());
    assert_eq!(cloud.terminate(&nobody).await.expect("nothing to end is no error"), TerminateState::Gone);
    let drill = cloud.simulate_interruption(&nobody, Span::ZERO).await;
    assert_eq!(drill.expect_err("no drill on an unknown instance").kind, RefusalKind::NotFound);
    let nowhere = Pool { instance_type: "no-such-type".into(), ..pools[0].clone() };
    let refused = cloud.launch(setup.request(&nowhere, 6)).await.expect_err("an unknown type is refused");
    assert_eq!(refused.kind, RefusalKind::InvalidRequest);
    assert!(refused.scope.covers(&nowhere), "a refusal covers the pool that was asked: {}", refused.scope);
}

async fn billing_is_additive(cloud: &dyn CloudProvider) {
    let offers = cloud.offers().await.expect("offers are answered");
    let stretch = |start, end| Billable {
        pool: offers[0].pool.clone(),
        quote: offers[0].quote.clone(),
        launched_at: Timestamp(0),
        start: Timestamp(start),
        end: Timestamp(end),
        cause: None,
    };
    assert_eq!(cloud.billed(&stretch(5, 5)), Usd::ZERO, "no time costs nothing");
    let day = 86_400_000;
    let (whole, first, second) = (
        cloud.billed(&stretch(0, day)),
        cloud.billed(&stretch(0, day / 3)),
        cloud.billed(&stretch(day / 3, day)),
    );
    assert!((whole.0 - first.0 - second.0).abs() <= 1, "splitting a stretch moves at most one nano-dollar");
}

async fn launch_somewhere(
    cloud: &dyn CloudProvider,
    setup: &Setup,
    pools: &[Pool],
    number: u64,
) -> (LaunchRequest, Launched) {
    launch_with(cloud, setup, pools, number, |_| {}).await
}

/// Tries the pools in turn, because a market may refuse some of them at any moment.
async fn launch_with(
    cloud: &dyn CloudProvider,
    setup: &Setup,
    pools: &[Pool],
    number: u64,
    change: impl Fn(&mut LaunchRequest),
) -> (LaunchRequest, Launched) {
    let mut refused = Vec::new();
    for pool in pools {
        let mut request = setup.request(pool, number);
        change(&mut request);
        match cloud.launch(request.clone()).await {
            Ok(launched) => return (request, launched),
            Err(refusal) => {
                assert!(refusal.scope.covers(pool), "a refusal covers the pool that was asked: {refusal:?}");
                refused.push(refusal);
            }
        }
    }
    panic!("no pool accepted a launch: {refused:?}");
}

async fn end(cloud: &dyn CloudProvider, setup: &Setup, instance: &InstanceId) {
    let ended = async {
        while cloud.terminate(instance).await.expect("terminate answers") != TerminateState::Gone {
            tokio::time::sleep(POLL).await;
        }
    };
    within(setup, "terminate, repeated, ends at Gone", ended).await;
}

async fn wait_for(
    cloud: &dyn CloudProvider,
    setup: &Setup,
    instance: &InstanceId,
    what: &str,
    wanted: impl Fn(InstanceState) -> bool,
) -> InstanceState {
    let reached = async {
        loop {
            if let Some(state) = state_of(cloud, setup, instance).await
                && wanted(state)
            {
                return state;
            }
            tokio::time::sleep(POLL).await;
        }
    };
    within(setup, what, reached).await
}

async fn state_of(cloud: &dyn CloudProvider, setup: &Setup, instance: &InstanceId) -> Option<InstanceState> {
    let listed = cloud.list_owned(&setup.cluster).await.expect("list_owned answers");
    listed.into_iter().find(|i| i.instance == *instance).map(|i| i.state)
}

async fn within<T>(setup: &Setup, what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(setup.patience, work)
        .await
        .unwrap_or_else(|_| panic!("{what}: not within {:?}", setup.patience))
}

fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Timestamp(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
