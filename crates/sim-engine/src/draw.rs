//! What a seed is made of: which faults happen in it and how often, its policies, its clouds and its jobs.
//!
//! Each seed leaves about half of the kinds of faults out, so that the loud ones do not hide the rare ones.

use std::sync::Arc;

use spotq_core::Policies;
use spotq_model::{
    CheckpointSpec, Choice, Command, JobSpec, Offer, PlacementPolicy, Profile, Resources, Retry, Signal,
    Span, Timestamp,
};
use spotq_sim::{Ppm, Rng};

/// The moment at which every run begins. It is over for long, so that times of files that no trainer has set lie in the
/// future, where they prove nothing.
pub(crate) const START: u64 = 1_700_000_000_000;
/// A secret of a user, planted to be searched for (INV-14).
pub(crate) const MARKER: &str = "mark3r-0f-a-s3cret";

/// How often each kind of fault happens in a run. Zero: never.
#[derive(Debug, Clone, Default)]
pub(crate) struct Faults {
    pub scheduler_crash_every: u64,
    pub store_slow_ppm: Ppm,
    pub store_fail_ppm: Ppm,
    pub impatient_ppm: Ppm,
    pub partition_every: u64,
    pub hold_every: u64,
    pub message_loss_ppm: Ppm,
    pub worker_crash_every: u64,
    pub clock_jump_every: u64,
    pub call_loss_ppm: Ppm,
    pub call_late_ppm: Ppm,
    pub call_double_ppm: Ppm,
    pub refuse_ppm: Ppm,
    pub list_lag_max: u64,
    pub news_loss_ppm: Ppm,
    pub notice_ppm: Ppm,
    pub node_crash_ppm: Ppm,
    pub put_fail_ppm: Ppm,
    pub get_fail_ppm: Ppm,
    pub objects_slow_ppm: Ppm,
    pub corrupt_every: u64,
}

/// A run as drawn.
#[derive(Debug)]
pub(crate) struct Drawn {
    pub faults: Faults,
    pub policies: Policies,
    /// Length of the safety phase.
    pub safety_ms: u64,
    pub poll_ms: u64,
    pub dead_man_ms: u64,
    pub snapshot_every: u64,
    pub latency_max_ms: u64,
    pub offers: Vec<Offer>,
    pub jobs: Vec<Arc<JobPlan>>,
}

/// A job: what its user asks for, and how its command behaves.
#[derive(Debug)]
pub(crate) struct JobPlan {
    pub number: usize,
    pub client_key: String,
    pub spec: Arc<JobSpec>,
    pub submit_at: u64,
    pub wishes: Vec<(u64, Wish)>,
    pub steps: u64,
    pub step_ms: u64,
    /// Steps between saves.
    pub save_every: u64,
    pub save_ms: u64,
    pub style: Style,
    pub saves_on_signal: bool,
    pub on_term: OnTerm,
    pub end: End,
    /// How often the command fails before it ends as planned.
    pub fails_first: u32,
}

/// How a trainer writes its checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Style {
    /// Aside, then renamed to a name with its step; older ones are removed.
    Named,
    /// Aside, then renamed over the one before.
    OneName,
    /// Two files under their final names, one after the other.
    InPlace,
}

/// What a trainer does when it is told to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnTerm {
    /// It has no handler.
    Dies,
    ExitsZero,
    SavesAndExitsZero,
    Ignores,
}

/// How a command ends if nobody disturbs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Well,
    Badly(i32),
    Signal(i32),
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
    let safety_ms = rng.within(30, 75) * 1000;
    let faults = faults(rng);
    Drawn {
        faults,
        policies: policies(rng),
        safety_ms,
        poll_ms: rng.within(1000, 3000),
        dead_man_ms: rng.within(15, 40) * 1000,
        snapshot_every: *rng.pick(&[40, 200, 50_000]),
        latency_max_ms: *rng.pick(&[1, 10, 80, 300]),
        offers: offers(rng),
        jobs: (0..jobs).map(|n| Arc::new(job(rng, n as usize, safety_ms))).collect(),
    }
}

fn faults(rng: &mut Rng) -> Faults {
    let mut some = |levels: &[u64]| if rng.percent(50) { *rng.pick(levels) } else { 0 };
    Faults {
        scheduler_crash_every: some(&[8000, 20_000]),
        store_slow_ppm: some(&[20_000, 200_000]) as Ppm,
        store_fail_ppm: some(&[2000, 10_000]) as Ppm,
        impatient_ppm: some(&[50_000, 300_000]) as Ppm,
        partition_every: some(&[8000, 25_000]),
        hold_every: some(&[8000, 25_000]),
        message_loss_ppm: some(&[500, 3000]) as Ppm,
        worker_crash_every: some(&[10_000, 30_000]),
        clock_jump_every: some(&[10_000, 30_000]),
        call_loss_ppm: some(&[30_000, 150_000]) as Ppm,
        call_late_ppm: some(&[50_000, 200_000]) as Ppm,
        call_double_ppm: some(&[50_000, 200_000]) as Ppm,
        refuse_ppm: some(&[50_000, 300_000]) as Ppm,
        list_lag_max: some(&[2000, 6000]),
        news_loss_ppm: some(&[200_000, 1_000_000]) as Ppm,
        notice_ppm: some(&[300_000, 700_000]) as Ppm,
        node_crash_ppm: some(&[100_000, 250_000]) as Ppm,
        put_fail_ppm: some(&[20_000, 100_000]) as Ppm,
        get_fail_ppm: some(&[20_000, 100_000]) as Ppm,
        objects_slow_ppm: some(&[50_000, 200_000]) as Ppm,
        corrupt_every: some(&[3000, 12_000]),
    }
}

fn policies(rng: &mut Rng) -> Policies {
    let short_lived = rng.percent(40);
    Policies {
        nodes_max: rng.within(2, 6) as u32,
        // Longer than it takes a worker to notice that nobody answers any more.
        lease_ttl: Span::secs(rng.within(13, 22)),
        launch_timeout: Span::secs(rng.within(15, 40)),
        list_lag: Span::secs(8),
        boot_timeout: Span::secs(rng.within(20, 40)),
        idle_ttl: Span::secs(rng.within(1, 8)),
        node_ttl: Span::secs(if short_lived { rng.within(20, 45) } else { 3600 }),
        node_ttl_margin: Span::secs(3),
        drain_grace: Span::secs(3),
        preempted_cool_down: Span::secs(rng.within(2, 10)),
        back_off_max: Span::secs(8),
        fruitless_losses_max: rng.within(1, 6) as u32,
        progress_every: Span::secs(1),
        ..Policies::default()
    }
}

fn offers(rng: &mut Rng) -> Vec<Offer> {
    const POOLS: [(&str, &str, u32); 5] = [
        ("aws/us-east-1/us-east-1a/g4/spot", "T4", 1),
        ("gcp/us-central1/us-central1-a/g2/spot", "L4", 1),
        ("azure/eastus/eastus-1/nc8/spot", "T4", 2),
        ("aws/us-east-1/us-east-1a/g4/on-demand", "T4", 1),
        ("gcp/us-central1/us-central1-a/g2/on-demand", "L4", 1),
    ];
    spotq_sim::market(rng, &POOLS, Timestamp(START))
}

fn job(rng: &mut Rng, number: usize, safety_ms: u64) -> JobPlan {
    let submit_at = 500 + rng.below(safety_ms / 2);
    let steps = rng.within(5, 40);
    let end = match rng.below(20) {
        0 => End::Badly(1),
        1 => *rng.pick(&[End::OutOfMemory, End::NeverStarts, End::Signal(11), End::Signal(9)]),
        _ => End::Well,
    };
    let style = *rng.pick(&[Style::Named, Style::Named, Style::OneName, Style::InPlace]);
    let saves_on_signal = rng.percent(60);
    JobPlan {
        number,
        client_key: format!("client-{number}"),
        spec: Arc::new(spec(rng, number, style, saves_on_signal)),
        submit_at,
        wishes: wishes(rng, submit_at),
        steps,
        step_ms: rng.within(100, 800),
        save_every: rng.within(2, 12),
        save_ms: rng.within(10, 600),
        style,
        saves_on_signal,
        on_term: *rng.pick(&[OnTerm::Dies, OnTerm::ExitsZero, OnTerm::SavesAndExitsZero, OnTerm::Ignores]),
        end,
        fails_first: if rng.percent(10) { rng.within(1, 2) as u32 } else { 0 },
    }
}

fn wishes(rng: &mut Rng, submit_at: u64) -> Vec<(u64, Wish)> {
    let mut wishes = Vec::new();
    let mut at = submit_at;
    while rng.percent(30) {
        at += rng.gap(8000);
        match rng.below(10) {
            0 | 1 => wishes.push((at, Wish::Cancel)),
            2 | 3 => {
                wishes.push((at, Wish::Hold));
                at += rng.gap(5000);
                wishes.push((at, Wish::Release));
            }
            4..=6 => wishes.push((at, Wish::Requeue)),
            _ => wishes.push((at, Wish::Drill(rng.within(0, 30) * 1000))),
        }
    }
    wishes
}

fn spec(rng: &mut Rng, number: usize, style: Style, saves_on_signal: bool) -> JobSpec {
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
    let profile = match style {
        Style::Named | Style::OneName => *rng.pick(&[Profile::Rename, Profile::Generic]),
        Style::InPlace => Profile::Generic,
    };
    JobSpec {
        name: format!("job-{number}"),
        user: "sim".into(),
        command: Command::Argv { argv: vec!["train".into(), number.to_string()] },
        setup: rng.percent(20).then(|| "prepare".into()),
        workdir: None,
        env: [("API_TOKEN".to_owned(), MARKER.to_owned())].into(),
        resources: Resources { any_of: accelerator.map(choice).into_iter().collect(), max_hourly: None },
        checkpoint: CheckpointSpec {
            signal: saves_on_signal.then_some(Signal::Usr1),
            grace: Span::secs(rng.within(1, 8)),
            profile,
            ..CheckpointSpec::default()
        },
        policy,
        budget: None,
        project: None,
        tags: std::collections::BTreeMap::new(),
        time_limit: rng.percent(8).then(|| Span::secs(rng.within(3, 20))),
        retry: Retry {
            preemptions: rng.percent(15).then(|| rng.below(2) as u32),
            failures: rng.below(4) as u32,
            exit_codes: Vec::new(),
        },
        priority: rng.below(3) as i32,
        begin: rng.percent(8).then(|| Timestamp(START + rng.below(20_000))),
        hold: false,
        outputs: Vec::new(),
    }
}
