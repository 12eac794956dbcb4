//! Carries out what is due. Every effect is safe to repeat; this only keeps one at a time from running twice at once.

use std::collections::HashMap;
use std::time::Duration;

use spotq_core::Cluster;
use spotq_model::{
    Effect, EffectClass, Generation, GoneCause, Input, InstanceId, LaunchAnswer, NodeId, Refusal,
    RefusalKind, StopWhy,
};
use spotq_proto::v1::{GrantTask, StopReason, StopTask, scheduler_message::Kind};
use spotq_provider::{
    Bootstrap, InstanceState, LaunchRequest, Launched, Secret, TAG_CLUSTER, TAG_NODE, TerminateState,
};

use crate::clock::{Instant, now};
use crate::config::EngineConfig;
use crate::handle::{Msg, Shared};

pub(crate) type Key = (EffectClass, NodeId, Generation);

/// In the environment that workers are given: the certificates of the CA that they trust. The worker knows it, too.
pub const CA_VARIABLE: &str = "SPOTQ_CA_PEM";
/// No call to a cloud is waited for longer than this; it is then repeated with the same key.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);
/// Grants and stops are repeated this often until the worker has reported that it took them.
const TELL_AGAIN: Duration = Duration::from_secs(1);
/// A worker that is not connected is looked for again after this.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// A call to a cloud that failed or is not finished is repeated after this, twice as late each time.
const CALL_AGAIN: Duration = Duration::from_millis(200);
const CALL_AGAIN_MAX: Duration = Duration::from_secs(15);

/// What is in flight, and what may not start before a time.
#[derive(Debug, Default)]
pub(crate) struct Effects {
    flights: HashMap<Key, Flight>,
}

#[derive(Debug)]
struct Flight {
    busy: bool,
    not_before: Instant,
    tries: u32,
}

impl Effects {
    /// Starts every due effect that is not in flight.
    pub(crate) fn run(&mut self, shared: &Shared, cluster: &Cluster, due: Vec<Effect>) {
        let started = Instant::now();
        let keys: std::collections::HashSet<Key> = due.iter().map(Effect::key).collect();
        self.flights.retain(|key, flight| flight.busy || keys.contains(key));
        for effect in due {
            let key = effect.key();
            let flight =
                self.flights.entry(key).or_insert(Flight { busy: false, not_before: started, tries: 0 });
            if flight.busy || flight.not_before > started {
                continue;
            }
            flight.tries += 1;
            match start(shared, cluster, effect) {
                Started::Call => {
                    flight.busy = true;
                    let wait = CALL_AGAIN * 2_u32.pow(flight.tries.min(8) - 1);
                    flight.not_before = started + wait.min(CALL_AGAIN_MAX);
                }
                Started::Told => flight.not_before = started + TELL_AGAIN,
                Started::NobodyThere => flight.not_before = started + LOOK_AGAIN,
            }
        }
    }

    pub(crate) fn over(&mut self, key: Key) {
        if let Some(flight) = self.flights.get_mut(&key) {
            flight.busy = false;
        }
    }

    /// What waited for this node's worker may be told at once.
    pub(crate) fn node_joined(&mut self, node: NodeId) {
        self.flights.retain(|(_, of, _), flight| flight.busy || *of != node);
    }
}

enum Started {
    /// A call to the cloud runs; `EffectOver` tells its end.
    Call,
    /// The worker was told.
    Told,
    NobodyThere,
}

fn start(shared: &Shared, cluster: &Cluster, effect: Effect) -> Started {
    let key = effect.key();
    match effect {
        Effect::Launch { node, key: launch_key, pool, expires_at } => {
            let request = LaunchRequest {
                key: launch_key,
                node,
                pool,
                tags: tags(shared, node),
                expires_at,
                bootstrap: Bootstrap {
                    server: shared.config.server_url.clone(),
                    join_secret: Secret::new(shared.config.secret.join_secret(node)),
                    env: worker_env(shared),
                },
            };
            call(shared, key, launch(shared.clone(), request))
        }
        Effect::Terminate { instance, .. } => call(shared, key, terminate(shared.clone(), instance)),
        Effect::Drill { node, instance, notice } => {
            let task = async move |shared: Shared| {
                let asked = shared.config.provider.simulate_interruption(&instance, notice).await;
                Some(Input::DrillAnswered { node, error: asked.err().map(|refusal| refusal.message) })
            };
            let shared_too = shared.clone();
            call(shared, key, async move { task(shared_too).await })
        }
        Effect::Grant { node, task, generation } => {
            let Some(job) = cluster.jobs.get(&task.job) else { return Started::NobodyThere };
            let newest = job.tasks.get(&task.index).and_then(|t| t.checkpoint.as_ref());
            tell(
                shared,
                node,
                Kind::Grant(GrantTask {
                    grant: Some((task, generation).into()),
                    spec: Some(job.spec.as_ref().into()),
                    checkpoint_url: shared.config.checkpoint_url(&job.uuid),
                    checkpoint_key: shared.config.secret.checkpoint_key(&job.uuid).to_vec(),
                    job_uuid: job.uuid.clone(),
                    newest_step: newest.and_then(|checkpoint| checkpoint.step),
                }),
            )
        }
        Effect::Stop { node, task, generation, why, deadline } => {
            let stop = StopTask {
                grant: Some((task, generation).into()),
                reason: reason(why).into(),
                deadline_ms: deadline.0,
            };
            tell(shared, node, Kind::Stop(stop))
        }
    }
}

/// What the settings say, with the CA as it is now.
fn worker_env(shared: &Shared) -> std::collections::BTreeMap<String, String> {
    let mut env = shared.config.worker_env.clone();
    if let Some(security) = shared.security.get() {
        env.insert(CA_VARIABLE.to_owned(), security.ca_pem().to_string());
    }
    env
}

fn tell(shared: &Shared, node: NodeId, kind: Kind) -> Started {
    if shared.sessions.send(node, kind) { Started::Told } else { Started::NobodyThere }
}

fn reason(why: StopWhy) -> StopReason {
    match why {
        StopWhy::Cancel => StopReason::Cancel,
        StopWhy::TimeLimit => StopReason::TimeLimit,
        StopWhy::Budget => StopReason::Budget,
        StopWhy::Requeue | StopWhy::NodeExpires => StopReason::Requeue,
    }
}

fn tags(shared: &Shared, node: NodeId) -> std::collections::BTreeMap<String, String> {
    [(TAG_CLUSTER, shared.config.policies.cluster.clone()), (TAG_NODE, node.to_string())]
        .map(|(key, value)| (key.to_owned(), value))
        .into()
}

/// Runs a call beside the loop; its answer is an input like any other.
fn call(shared: &Shared, key: Key, work: impl Future<Output = Option<Input>> + Send + 'static) -> Started {
    let handle = shared.handle.clone();
    tokio::spawn(async move {
        if let Some(input) = bounded(work).await {
            handle.input(input).await;
        }
        handle.tell(Msg::EffectOver(key)).await;
    });
    Started::Call
}

/// Whatever becomes of a call, it is over after [`CALL_TIMEOUT`] and may be made again: also one that panics.
async fn bounded(work: impl Future<Output = Option<Input>> + Send + 'static) -> Option<Input> {
    let mut work = tokio::spawn(work);
    match tokio::time::timeout(CALL_TIMEOUT, &mut work).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(fault)) => {
            tracing::error!(%fault, "a call to the cloud broke");
            None
        }
        Err(_) => {
            work.abort();
            None
        }
    }
}

/// `None`: nothing is known, so the same launch is asked for again with the same key.
async fn launch(shared: Shared, request: LaunchRequest) -> Option<Input> {
    let node = request.node;
    let answer = match shared.config.provider.launch(request).await {
        Ok(Launched { instance, quote, launched_at }) => {
            LaunchAnswer::Launched { instance, quote, launched_at }
        }
        Err(refusal) if outcome_unknown(&refusal) => {
            tracing::info!(%node, %refusal.kind, refusal.message, "launch is asked again");
            return None;
        }
        Err(refusal) => LaunchAnswer::Refused { refusal },
    };
    Some(Input::LaunchAnswered { node, answer })
}

fn outcome_unknown(refusal: &Refusal) -> bool {
    match refusal.kind {
        RefusalKind::Transient | RefusalKind::Throttled => true,
        RefusalKind::InsufficientCapacity
        | RefusalKind::QuotaExceeded
        | RefusalKind::PriceTooLow
        | RefusalKind::NotFound
        | RefusalKind::Denied
        | RefusalKind::InvalidRequest => false,
    }
}

/// Repeated until the cloud says that the instance is gone.
async fn terminate(shared: Shared, instance: InstanceId) -> Option<Input> {
    match shared.config.provider.terminate(&instance).await {
        Ok(TerminateState::Ending) => None,
        Ok(TerminateState::Gone) => Some(how_it_ended(shared.config.as_ref(), instance).await),
        Err(refusal) if refusal.kind == RefusalKind::NotFound => {
            Some(how_it_ended(shared.config.as_ref(), instance).await)
        }
        Err(refusal) => {
            tracing::warn!(%instance, %refusal.kind, refusal.message, "the cloud did not end a node; asking again");
            None
        }
    }
}

/// It may have ended while nobody listened: the cloud's list knows when, and until when it is billed.
async fn how_it_ended(config: &EngineConfig, instance: InstanceId) -> Input {
    let asked = now();
    let listed = config.provider.list_owned(&config.policies.cluster).await;
    let told = listed.into_iter().flatten().find(|known| known.instance == instance).map(|known| known.state);
    let (cause, at) = match told {
        Some(InstanceState::Gone { cause, at }) => (cause, at),
        Some(InstanceState::Pending | InstanceState::Running | InstanceState::Ending) | None => {
            (GoneCause::Terminated, asked)
        }
    };
    Input::InstanceGone { instance, cause, at }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use spotq_core::Policies;
    use spotq_model::{EffectKey, Span, Timestamp};
    use spotq_provider::{CloudProvider as _, FakeProvider};
    use spotq_store::MemStore;

    use super::*;
    use crate::config::ClusterSecret;

    fn config(cloud: &FakeProvider) -> EngineConfig {
        EngineConfig {
            policies: Policies::default(),
            store: Arc::new(MemStore::default()),
            provider: Arc::new(cloud.clone()),
            data_dir: std::path::PathBuf::new(),
            checkpoint_root: "file:///checkpoints".into(),
            secret: ClusterSecret::new([7; 32]),
            server_url: "http://127.0.0.1:1".into(),
            worker_env: std::collections::BTreeMap::default(),
            poll_every: Duration::from_secs(1),
            heartbeat: Duration::from_secs(1),
            dead_man: Duration::from_secs(600),
            snapshot_every: EngineConfig::SNAPSHOT_EVERY,
        }
    }

    #[tokio::test]
    async fn a_node_that_ended_while_nobody_listened_is_billed_until_its_end() {
        let cloud = FakeProvider::with_small_market();
        let config = config(&cloud);
        let pool = cloud.offers().await.unwrap()[0].pool.clone();
        let tags = [(TAG_CLUSTER, config.policies.cluster.clone()), (TAG_NODE, "1".to_owned())];
        let request = LaunchRequest {
            key: EffectKey("k".into()),
            node: NodeId(1),
            pool,
            tags: tags.map(|(key, value)| (key.to_owned(), value)).into(),
            expires_at: now() + Span::secs(3600),
            bootstrap: Bootstrap {
                server: "http://127.0.0.1:1".into(),
                join_secret: Secret::new("s"),
                env: std::collections::BTreeMap::default(),
            },
        };
        let instance = cloud.launch(request).await.unwrap().instance;
        cloud.end(&instance, GoneCause::Preempted);
        let ended = now();
        let heard = spotq_testkit::wait_until_async(
            Duration::from_secs(5),
            async || now() > ended + Span(50),
            "later",
        );
        heard.await.unwrap();
        match how_it_ended(&config, instance.clone()).await {
            Input::InstanceGone { cause, at, .. } => assert!(cause == GoneCause::Preempted && at <= ended),
            other => panic!("{other:?}"),
        }
        let unknown = InstanceId("i-nobody-knows".into());
        let Input::InstanceGone { at, .. } = how_it_ended(&config, unknown).await else { panic!("no end") };
        assert!(
            at > ended && at != Timestamp(0),
            "of what the cloud has forgotten only our own time is known"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_panics_or_never_ends_is_over_all_the_same() {
        assert_eq!(bounded(async { Some(Input::Tick) }).await, Some(Input::Tick));
        assert_eq!(bounded(async { panic!("a fault of a provider") }).await, None);
        assert_eq!(bounded(std::future::pending()).await, None);
    }
}
