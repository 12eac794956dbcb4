//! What a seed is made of: which faults happen in it and how often, its policies, its clouds and its jobs.
//!
//! Each seed leaves some kinds of faults out altogether. A run with everything at once mostly shows the loudest fault;
//! rare combinations come up when the others are silent.

use std::sync::Arc;

use spotq_core::Policies;
use spotq_model::{
    CheckpointSpec, Choice, Command, JobId, JobSpec, Offer, PlacementPolicy, Quote, Resources, Retry, Shape,
    Signal, Span, Timestamp, Usd, UsdPerHour,
};

use crate::rng::{Ppm, Rng};

/// The moment at which every run begins.
pub(crate) const START: u64 = 1_700_000_000_000;
/// A secret of a user, planted to be searched for (INV-14).
pub(crate) const MARKER: &str = "mark3r-0f-a-s3cret";
/// An instance expires well after the safety phase, so that expiry is a fault of its own and not the end of all.
const NODE_TTL: Span = Span::secs(2 * 3600);

/// How often each kind of fault happens in a run. Zero: never.
#[derive(Debug, Clone, Default)]
pub(crate) struct Faults {
    pub crash_ppm: Ppm,
    pub schedulers: usize,
    pub takeover_every: u64,
    pub clock_jump_every: u64,
    pub clock_jump_max: u64,
    pub client_loss_ppm: Ppm,
    pub stream_break_every: u64,
    pub partition_every: u64,
    pub cloud_loss_ppm: Ppm,
    pub cloud_double_ppm: Ppm,
    pub cloud_late_ppm: Ppm,
    pub refuse_ppm: Ppm,
    pub unknown_ppm: Ppm,
    pub list_lag_max: u64,
    pub news_loss_ppm: Ppm,
    pub notice_ppm: Ppm,
    pub node_crash_ppm: Ppm,
    pub worker_crash_every: u64,
    pub trainer_kill_every: u64,
    pub blind_ppm: Ppm,
    pub corrupt_ppm: Ppm,
    pub lie_ppm: Ppm,
    pub upload_fail_ppm: Ppm,
    pub slow_store_ppm: Ppm,
    pub store_fail_ppm: Ppm,
}

/// A run as drawn.
#[derive(Debug)]
pub(crate) struct Drawn {
    pub faults: Faults,
    pub policies: Policies,
    /// Length of the safety phase.
    pub safety_ms: u64,
    pub tick_ms: u64,
    pub plan_ms: u64,
    pub poll_ms: u64,
    pub snapshot_every: u64,
    pub offers: Vec<Offer>,
    pub jobs: Vec<JobPlan>,
}

/// A job: what its user asks for, and how its command behaves.
#[derive(Debug)]
pub(crate) struct JobPlan {
    pub client_key: String,
    pub uuid: String,
    pub spec: Arc<JobSpec>,
    pub submit_at: u64,
    pub steps: u64,
    pub step_ms: u64,
    pub save_every: u64,
    pub save_ms: u64,
    pub upload_ms: u64,
    pub end: End,
    /// How often the command fails before it ends as planned.
    pub fails_first: u32,
    pub wishes: Vec<(u64, Wish)>,
    /// What the client was told.
    pub answered: Option<JobId>,
    pub cancel_acked: bool,
}

/// How a command ends if nobody disturbs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Well,
    Badly(i32),
    OutOfMemory,
    NeverStarts,
}

/// What a user asks for later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wish {
    Cancel,
    Hold,
    Release,
    Requeue,
    Drill(u64),
}

pub(crate) fn draw(rng: &mut Rng, jobs: u32) -> Drawn {
    let safety_ms = rng.within(240, 600) * 1000;
    let faults = faults(rng);
    let policies = policies(rng);
    let offers = offers(rng);
    let jobs = (0..jobs).map(|n| job(rng, n, safety_ms)).collect();
    Drawn {
        faults,
        policies,
        safety_ms,
        tick_ms: *rng.pick(&[2000, 3000, 5000]),
        plan_ms: *rng.pick(&[2000, 4000, 8000]),
        poll_ms: rng.within(10, 40) * 1000,
        snapshot_every: *rng.pick(&[50, 200, 1000]),
        offers,
        jobs,
    }
}

fn faults(rng: &mut Rng) -> Faults {
    // Half of the kinds are silent in each run.
    let mut some = |levels: &[u64]| if rng.percent(50) { *rng.pick(levels) } else { 0 };
    let mut ppm = |levels: &[u64]| some(levels) as Ppm;
    let (crash_ppm, client_loss_ppm) = (ppm(&[200, 1000, 4000]), ppm(&[20_000, 150_000]));
    let (cloud_loss_ppm, cloud_double_ppm) = (ppm(&[20_000, 150_000]), ppm(&[50_000, 200_000]));
    let (cloud_late_ppm, refuse_ppm) = (ppm(&[20_000, 200_000]), ppm(&[50_000, 200_000, 500_000]));
    let (unknown_ppm, news_loss_ppm) = (ppm(&[50_000, 200_000]), ppm(&[200_000, 1_000_000]));
    let (notice_ppm, node_crash_ppm) = (ppm(&[200_000, 500_000, 900_000]), ppm(&[50_000, 150_000]));
    let (blind_ppm, corrupt_ppm) = (ppm(&[500_000, 1_000_000]), ppm(&[30_000, 150_000]));
    let (lie_ppm, upload_fail_ppm) = (ppm(&[50_000]), ppm(&[30_000, 150_000]));
    let (slow_store_ppm, store_fail_ppm) = (ppm(&[10_000, 50_000]), ppm(&[1000, 5000]));
    let takeover_every = some(&[60_000, 200_000]);
    let (clock_jump_every, clock_jump_max) = (some(&[60_000, 200_000]), 180_000);
    let (stream_break_every, partition_every) = (some(&[10_000, 40_000]), some(&[30_000, 120_000]));
    let (worker_crash_every, trainer_kill_every) = (some(&[60_000, 200_000]), some(&[60_000, 200_000]));
    let list_lag_max = some(&[5000, 25_000]);
    let schedulers = rng.within(1, 3) as usize;
    Faults {
        crash_ppm,
        schedulers,
        takeover_every,
        clock_jump_every,
        clock_jump_max,
        client_loss_ppm,
        stream_break_every,
        partition_every,
        cloud_loss_ppm,
        cloud_double_ppm,
        cloud_late_ppm,
        refuse_ppm,
        unknown_ppm,
        list_lag_max,
        news_loss_ppm,
        notice_ppm,
        node_crash_ppm,
        worker_crash_every,
        trainer_kill_every,
        blind_ppm,
        corrupt_ppm,
        lie_ppm,
        upload_fail_ppm,
        slow_store_ppm,
        store_fail_ppm,
    }
}

fn policies(rng: &mut Rng) -> Policies {
    Policies {
        nodes_max: rng.within(8, 40) as u32,
        node_ttl: NODE_TTL,
        node_ttl_margin: Span::secs(120),
        idle_ttl: Span::secs(rng.within(10, 90)),
        launch_timeout: Span::secs(rng.within(60, 180)),
        list_lag: Span::secs(30),
        boot_timeout: Span::secs(rng.within(120, 300)),
        preempted_cool_down: Span::secs(rng.within(10, 60)),
        back_off_max: Span::secs(60),
        fruitless_losses_max: rng.within(2, 8) as u32,
        ..Policies::default()
    }
}

fn offers(rng: &mut Rng) -> Vec<Offer> {
    const POOLS: [(&str, &str, u32); 7] = [
        ("aws/us-east-1/us-east-1a/g4/spot", "T4", 1),
        ("aws/us-east-1/us-east-1b/g4/spot", "T4", 1),
        ("gcp/us-central1/us-central1-a/g2/spot", "L4", 1),
        ("azure/eastus/eastus-1/nc8/spot", "T4", 2),
        ("aws/us-east-1/us-east-1a/g4/on-demand", "T4", 1),
        ("gcp/us-central1/us-central1-a/g2/on-demand", "L4", 1),
        ("azure/eastus/eastus-1/nc8/on-demand", "T4", 2),
    ];
    market(rng, &POOLS, Timestamp(START))
}

/// Prices for pools: each with its accelerator and how many of them a node has. Spot prices are drawn.
pub fn market(rng: &mut Rng, pools: &[(&str, &str, u32)], as_of: Timestamp) -> Vec<Offer> {
    let offer = |(pool, accelerator, count): &(&str, &str, u32)| {
        let on_demand = UsdPerHour::nanos(900_000_000 + i64::from(*count) * 100_000_000);
        let spot = UsdPerHour::nanos(rng.within(100_000_000, 500_000_000) as i64);
        let pool: spotq_model::Pool = pool.parse().expect("the pools of a simulation are well written");
        let price = if pool.market == spotq_model::Market::Spot { spot } else { on_demand };
        Offer {
            pool,
            shape: Shape {
                accelerator: Some((*accelerator).into()),
                accelerator_count: *count,
                cpus: 8,
                memory_gib: 32,
            },
            quote: Quote { price, on_demand, source: "sim".into(), as_of },
            interruptions_per_hour_ppm: rng.within(0, 300_000),
        }
    };
    pools.iter().map(offer).collect()
}

fn job(rng: &mut Rng, n: u32, safety_ms: u64) -> JobPlan {
    let submit_at = rng.below(safety_ms * 2 / 3);
    let steps = rng.within(10, 100);
    let end = match rng.below(20) {
        0 => End::Badly(1),
        1 => *rng.pick(&[End::OutOfMemory, End::NeverStarts, End::Badly(3)]),
        _ => End::Well,
    };
    JobPlan {
        client_key: format!("client-{n}"),
        uuid: uuid::Uuid::from_u64_pair(rng.below(u64::MAX), u64::from(n)).simple().to_string(),
        spec: Arc::new(spec(rng, n, safety_ms)),
        submit_at,
        steps,
        step_ms: rng.within(300, 2500),
        save_every: rng.within(10, 60) * 1000,
        save_ms: rng.within(100, 3000),
        upload_ms: rng.within(100, 8000),
        end,
        fails_first: if rng.percent(10) { rng.within(1, 2) as u32 } else { 0 },
        wishes: wishes(rng, submit_at),
        answered: None,
        cancel_acked: false,
    }
}

fn wishes(rng: &mut Rng, submit_at: u64) -> Vec<(u64, Wish)> {
    let mut wishes = Vec::new();
    let mut at = submit_at;
    while rng.percent(25) {
        at += rng.gap(60_000);
        let wish = match rng.below(10) {
            0 | 1 => Wish::Cancel,
            2 => Wish::Hold,
            3 => Wish::Release,
            4..=6 => Wish::Requeue,
            _ => Wish::Drill(rng.within(0, 120) * 1000),
        };
        wishes.push((at, wish));
    }
    wishes
}

fn spec(rng: &mut Rng, n: u32, safety_ms: u64) -> JobSpec {
    let accelerator = match rng.below(4) {
        0 => Some("L4"),
        1 | 2 => Some("T4"),
        _ => None,
    };
    let choice = |accelerator: &str| Choice {
        accelerator: Some(accelerator.to_owned()),
        accelerator_count: 1,
        ..Choice::default()
    };
    let policy = match rng.below(10) {
        0 => PlacementPolicy::OnDemand,
        1 | 2 => PlacementPolicy::SpotOnly,
        _ => PlacementPolicy::SpotFirst,
    };
    JobSpec {
        name: format!("job-{n}"),
        user: "sim".into(),
        command: Command::Argv { argv: vec!["train".into()] },
        setup: None,
        workdir: None,
        env: [("API_TOKEN".to_owned(), MARKER.to_owned())].into(),
        resources: Resources { any_of: accelerator.map(choice).into_iter().collect(), max_hourly: None },
        checkpoint: CheckpointSpec {
            signal: rng.percent(50).then_some(Signal::Usr1),
            grace: Span::secs(rng.within(2, 20)),
            ..CheckpointSpec::default()
        },
        policy,
        budget: rng.percent(8).then(|| Usd(rng.within(5_000_000, 50_000_000) as i64)),
        project: None,
        tags: std::collections::BTreeMap::new(),
        time_limit: rng.percent(8).then(|| Span::secs(rng.within(20, 200))),
        retry: Retry {
            preemptions: rng.percent(10).then(|| rng.below(3) as u32),
            failures: rng.below(4) as u32,
            exit_codes: Vec::new(),
        },
        priority: rng.below(3) as i32,
        begin: rng.percent(8).then(|| Timestamp(START + rng.below(safety_ms))),
        hold: rng.percent(5),
        outputs: Vec::new(),
    }
}
