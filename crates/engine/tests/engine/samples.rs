//! Events of every kind with every value that they can hold.

use std::sync::Arc;

use spotq_model::{
    AttemptEnd, Checkpoint, CheckpointSpec, Choice, Cloud, Command, EffectKey, EndWhy, Event, Exit, Fact,
    Generation, GoneCause, HoldReason, InstanceId, JobId, JobSpec, Market, NodeId, Outcome, PlacementPolicy,
    Pool, Profile, Progress, Quote, RefusalKind, Resources, Retry, Scope, Shape, Signal, SignalTarget, Span,
    StopWhy, TaskId, Timestamp, Usd, UsdPerHour, WaitReason,
};
use spotq_testkit::job;

/// One of every kind, and one of every value that an event can hold.
pub fn samples() -> Vec<Event> {
    let facts = task_facts().into_iter().chain(node_facts()).chain(value_facts()).chain(later_facts());
    (1..).zip(facts).map(|(at, fact)| Event { at: Timestamp(at), fact }).collect()
}

const TASK: TaskId = TaskId { job: JobId(7), index: 3 };
const GENERATION: Generation = Generation(2);
const NODE: NodeId = NodeId(11);

fn pool() -> Pool {
    Pool {
        cloud: Cloud::Gcp,
        region: "us-central1".into(),
        zone: "us-central1-a".into(),
        instance_type: "g2-standard-4".into(),
        market: Market::Spot,
    }
}

fn quote() -> Quote {
    Quote {
        price: UsdPerHour::nanos(310_000_000),
        on_demand: UsdPerHour::nanos(700_000_000),
        source: "test".into(),
        as_of: Timestamp(99),
    }
}

fn checkpoint() -> Checkpoint {
    Checkpoint {
        sequence: 4,
        log_sequence: 6,
        generation: GENERATION,
        step: Some(400),
        bytes_total: 1000,
        bytes_uploaded: 10,
        saved_at: Timestamp(98),
        manifest_hash: "abc".into(),
    }
}

fn exit() -> Exit {
    Exit {
        exit_code: Some(1),
        signal: None,
        out_of_memory: false,
        launch_error: None,
        signalled: false,
        worker_leaving: false,
        stopped_at: Timestamp(97),
        last_progress: Some(Progress { step: 401, total: Some(500) }),
        detail: Some("detail".into()),
    }
}

fn task_facts() -> Vec<Fact> {
    let (task, generation) = (TASK, GENERATION);
    vec![
        Fact::JobSubmitted {
            job: JobId(7),
            uuid: "uuid".into(),
            client_key: "key".into(),
            spec: Arc::new(job("train")),
        },
        Fact::TaskHeld { task, reason: HoldReason::User },
        Fact::TaskReleased { task },
        Fact::TaskWaits { task, reason: WaitReason::Queued, next_try: Timestamp(5) },
        Fact::AttemptPlaced { task, generation, node: NODE },
        Fact::AttemptAccepted { task, generation },
        Fact::AttemptRestored { task, generation, from: Some(checkpoint()), fell_back: 1 },
        Fact::AttemptStarted { task, generation },
        Fact::AttemptProgressed { task, generation, progress: Progress { step: 5, total: None } },
        Fact::CheckpointCommitted { task, generation, checkpoint: checkpoint() },
        Fact::StopAsked { task, generation, why: StopWhy::Cancel, deadline: Timestamp(9) },
        Fact::AttemptExited { task, generation, exit: exit(), until: Timestamp(10) },
        Fact::AttemptEnded {
            task,
            generation,
            end: AttemptEnd::Completed,
            exit: Some(exit()),
            floor: Some(Generation(8)),
        },
        Fact::TaskDone { task, outcome: Outcome::Completed },
    ]
}

fn node_facts() -> Vec<Fact> {
    let (node, key, instance) = (NODE, EffectKey("launch-key".into()), InstanceId("i-1".into()));
    let shape = Shape { accelerator: Some("L4".into()), accelerator_count: 1, cpus: 4, memory_gib: 16 };
    vec![
        Fact::NodeRequested {
            node,
            key: key.clone(),
            pool: pool(),
            shape,
            quote: quote(),
            expires_at: Timestamp(100),
        },
        Fact::NodeLaunched { node, instance: instance.clone(), quote: quote(), billed_from: None },
        Fact::NodeRefused { node, kind: RefusalKind::InsufficientCapacity, message: "full".into() },
        Fact::NodeJoined { node },
        Fact::NodeNoticed { node, deadline: Timestamp(30), source: "gcp:preempted".into() },
        Fact::NoticeWithdrawn { node },
        Fact::NodeEnding { node, why: EndWhy::Idle },
        Fact::NodeGone { node, cause: GoneCause::Preempted, ended_at: Timestamp(40) },
        Fact::NodeOrphaned { node, key, instance, pool: pool() },
        Fact::NodeRepriced { node, quote: quote() },
        Fact::DrillAsked { node, notice: Span::secs(30) },
        Fact::DrillAnswered { node, error: Some("no".into()) },
        Fact::PoolCooled {
            scope: Scope::Pool { pool: pool() },
            kind: RefusalKind::Throttled,
            until: Timestamp(50),
            message: "slow down".into(),
        },
    ]
}

/// What came later. Its lines stand at the end of the golden file.
fn later_facts() -> Vec<Fact> {
    let instance = InstanceId("i-1".into());
    vec![Fact::NodeLaunched { node: NODE, instance, quote: quote(), billed_from: Some(Timestamp(7)) }]
}

fn value_facts() -> Vec<Fact> {
    let (task, generation) = (TASK, GENERATION);
    let ends = [
        AttemptEnd::Cancelled,
        AttemptEnd::Timeout,
        AttemptEnd::BudgetExhausted,
        AttemptEnd::Preempted { noticed: true },
        AttemptEnd::NodeLost { detail: "gone".into() },
        AttemptEnd::OutOfMemory,
        AttemptEnd::LaunchFailed { message: "no such file".into() },
        AttemptEnd::Failed { exit_code: 3 },
        AttemptEnd::Requeued,
    ];
    let outcomes = [
        Outcome::Failed { exit_code: 3 },
        Outcome::Timeout,
        Outcome::Cancelled,
        Outcome::PreemptionBudgetSpent,
        Outcome::NodeFailure,
        Outcome::OutOfMemory,
        Outcome::LaunchFailure { message: "no such file".into() },
        Outcome::BudgetExhausted,
    ];
    let waits = [
        WaitReason::BeginTime { at: Timestamp(6) },
        WaitReason::NoSuchPool { hint: "hint".into() },
        WaitReason::CoolingDown { pools: 2, last: RefusalKind::QuotaExceeded },
        WaitReason::TooExpensive { cheapest: UsdPerHour::nanos(1) },
        WaitReason::SpotNotWorthIt,
        WaitReason::NoOffers,
        WaitReason::NodeLimit { limit: 3 },
        WaitReason::BackOff { failures: 2 },
    ];
    let stops = [StopWhy::TimeLimit, StopWhy::Budget, StopWhy::Requeue, StopWhy::NodeExpires];
    let endings = [EndWhy::Noticed, EndWhy::Silent, EndWhy::Orphan, EndWhy::Expires, EndWhy::Unneeded];
    let causes = [GoneCause::Terminated, GoneCause::Crashed, GoneCause::Expired];
    let refusals = [
        RefusalKind::PriceTooLow,
        RefusalKind::NotFound,
        RefusalKind::Denied,
        RefusalKind::InvalidRequest,
        RefusalKind::Transient,
    ];
    let ended = |end| Fact::AttemptEnded { task, generation, end, exit: None, floor: None };
    ends.into_iter()
        .map(ended)
        .chain(outcomes.into_iter().map(|outcome| Fact::TaskDone { task, outcome }))
        .chain(waits.into_iter().map(|reason| Fact::TaskWaits { task, reason, next_try: Timestamp(5) }))
        .chain(stops.into_iter().map(|why| Fact::StopAsked { task, generation, why, deadline: Timestamp(9) }))
        .chain(endings.into_iter().map(|why| Fact::NodeEnding { node: NODE, why }))
        .chain(causes.into_iter().map(|cause| Fact::NodeGone { node: NODE, cause, ended_at: Timestamp(40) }))
        .chain(refusals.into_iter().map(|kind| Fact::NodeRefused {
            node: NODE,
            kind,
            message: String::new(),
        }))
        .chain(scopes().into_iter().map(|scope| Fact::PoolCooled {
            scope,
            kind: RefusalKind::Denied,
            until: Timestamp(50),
            message: String::new(),
        }))
        .chain([Fact::JobSubmitted {
            job: JobId(8),
            uuid: "uuid-2".into(),
            client_key: "key-2".into(),
            spec: Arc::new(full_job()),
        }])
        .collect()
}

fn scopes() -> [Scope; 4] {
    let (cloud, region, zone) = (Cloud::Azure, String::from("westeurope"), String::from("1"));
    [
        Scope::Zone { cloud: Cloud::Aws, zone },
        Scope::Region { cloud, region: region.clone() },
        Scope::RegionMarket { cloud, region, market: Market::OnDemand },
        Scope::Cloud { cloud },
    ]
}

fn full_job() -> JobSpec {
    let choice = Choice {
        accelerator: Some("A100-80GB".into()),
        accelerator_count: 8,
        cpus_min: 96,
        memory_gib_min: 500,
        cloud: Some(Cloud::Aws),
        region: Some("us-east-1".into()),
        zone: Some("us-east-1a".into()),
        instance_type: Some("p4de.24xlarge".into()),
    };
    JobSpec {
        command: Command::Script { text: "#!/bin/sh\nexit 0\n".into(), args: vec!["a b".into()] },
        setup: Some("pip install x".into()),
        workdir: Some("~/code".into()),
        env: [("KEY".to_owned(), "value".to_owned())].into(),
        resources: Resources {
            any_of: vec![choice, Choice::default()],
            max_hourly: Some(UsdPerHour::nanos(5)),
        },
        checkpoint: CheckpointSpec {
            dir: Some("ckpt".into()),
            interval: Some(Span::secs(60)),
            signal: Some(Signal::Usr1),
            signal_target: SignalTarget::All,
            grace: Span::secs(5),
            profile: Profile::Orbax,
            complete_when: Some("*/done".into()),
            keep: 2,
        },
        policy: PlacementPolicy::SpotOnly,
        budget: Some(Usd(1_000_000_000)),
        project: Some("project".into()),
        tags: [("team".to_owned(), "vision".to_owned())].into(),
        time_limit: Some(Span::secs(3600)),
        retry: Retry { preemptions: Some(3), failures: 2, exit_codes: vec![1, 75] },
        priority: -5,
        begin: Some(Timestamp(77)),
        hold: true,
        outputs: vec!["out/*.bin".into()],
        ..job("full")
    }
}
