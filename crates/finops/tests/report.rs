//! Histories made by hand, with the figures that a person gets with pencil and paper, to the nano-dollar.
//!
//! Spot costs $3.60 an hour and on demand $10.80, so that a second costs 1 and 3 thousandths of a dollar.
#![expect(clippy::unwrap_used, reason = "a test, helpers included, ends at the first surprise")]

use std::collections::BTreeMap;
use std::sync::Arc;

use spotq_core::{Cluster, apply, invariants};
use spotq_finops::{Cause, JobCost, job_cost, job_report};
use spotq_model::{
    AttemptEnd, Checkpoint, EffectKey, Event, Exit, Fact, Generation, GoneCause, InstanceId, JobId, NodeId,
    Offer, Outcome, Progress, RefusalKind, Span, TaskId, Timestamp, Usd, UsdPerHour, WaitReason,
};
use spotq_testkit::{job, offer};

/// What a second of spot costs, in nano-dollars.
const SECOND: i64 = 1_000_000;
const FIRST: TaskId = TaskId { job: JobId(1), index: 0 };
const SECOND_JOB: TaskId = TaskId { job: JobId(2), index: 0 };

#[test]
fn a_job_that_completes_without_preemption() {
    let mut h = History::new();
    h.run(FIRST, 1, 1, Times { placed: 0, launched: 0, accepted: 20, started: 30 }, None);
    h.end(FIRST, 1, 132, AttemptEnd::Completed, Some(exit(130)));
    h.at(132, Fact::TaskDone { task: FIRST, outcome: Outcome::Completed });
    h.gone(1, 192, 192, GoneCause::Terminated);
    let cost = h.cost(FIRST, 500);
    assert_eq!(cost.billed, Usd(192 * SECOND));
    assert_eq!(cost.billed_time, Span::secs(192));
    assert_eq!((cost.useful_time, cost.on_demand_useful), (Span::secs(100), Usd(300 * SECOND)));
    assert_eq!(
        waste(&cost),
        [(Cause::Boot, 20), (Cause::Restore, 10), (Cause::Drain, 2), (Cause::Idle, 60)].into()
    );
    assert_eq!(cost.wasted, Usd(92 * SECOND));
    assert_eq!(cost.saved_net(), Usd(108 * SECOND), "300 on demand, 192 paid");
    assert_eq!(cost.saved_gross(), Usd(384 * SECOND), "the same 192 seconds, at a third of the price");
    assert_eq!(cost.saved_percent(), Some(36.0));
}

#[test]
fn a_notice_that_leaves_time_to_save_wastes_only_what_came_after_the_save() {
    let mut h = History::new();
    h.run(FIRST, 1, 1, Times { placed: 0, launched: 0, accepted: 10, started: 20 }, None);
    h.progress(FIRST, 1, 90, 1010);
    h.at(100, Fact::NodeNoticed { node: NodeId(1), deadline: seconds(130), source: "imds".into() });
    h.commit(FIRST, 120, checkpoint(1, 1, 118, 1000));
    h.end(FIRST, 1, 122, AttemptEnd::Preempted { noticed: true }, Some(exit(121)));
    h.gone(1, 131, 130, GoneCause::Preempted);
    let resumed = Some(checkpoint(1, 1, 118, 1000));
    h.run(FIRST, 2, 2, Times { placed: 132, launched: 135, accepted: 150, started: 160 }, resumed);
    h.end(FIRST, 2, 260, AttemptEnd::Completed, Some(exit(260)));
    h.gone(2, 260, 260, GoneCause::Terminated);
    let cost = h.cost(FIRST, 500);
    assert_eq!(cost.billed, Usd((130 + 125) * SECOND));
    assert_eq!(cost.useful_time, Span::secs(98 + 100));
    let causes = [
        (Cause::Boot, 10 + 15),
        (Cause::Restore, 20),
        (Cause::Redone, 3),
        (Cause::Drain, 1),
        (Cause::Idle, 8),
    ];
    assert_eq!(waste(&cost), causes.into());
    let report = job_report(&h.c, FIRST, seconds(500)).unwrap();
    assert_eq!((report.attempts, report.preemptions, report.preemptions_without_notice), (2, 1, 0));
    assert_eq!((report.steps_done, report.steps_repeated), (1010, 10));
}

#[test]
fn a_node_lost_without_notice_wastes_the_work_since_the_last_checkpoint() {
    let mut h = History::new();
    lost_after_a_checkpoint(&mut h);
    let resumed = Some(checkpoint(1, 1, 50, 30));
    h.run(FIRST, 2, 2, Times { placed: 103, launched: 103, accepted: 113, started: 123 }, resumed);
    h.end(FIRST, 2, 173, AttemptEnd::Completed, Some(exit(173)));
    h.gone(2, 173, 173, GoneCause::Terminated);
    let cost = h.cost(FIRST, 500);
    assert_eq!(
        cost.billed,
        Usd((100 + 70) * SECOND),
        "the cloud says that the first node ended at 100, not at 103"
    );
    assert_eq!(cost.useful_time, Span::secs(30 + 50));
    assert_eq!(waste(&cost), [(Cause::Boot, 20), (Cause::Restore, 20), (Cause::Redone, 50)].into());
    let report = job_report(&h.c, FIRST, seconds(500)).unwrap();
    assert_eq!((report.preemptions, report.preemptions_without_notice), (1, 1));
    assert_eq!((report.steps_done, report.steps_repeated), (80, 50));
}

#[test]
fn before_anybody_resumed_the_work_up_to_the_last_commit_counts_as_kept() {
    let mut h = History::new();
    lost_after_a_checkpoint(&mut h);
    let cost = h.cost(FIRST, 500);
    assert_eq!((cost.useful_time, waste(&cost)[&Cause::Redone]), (Span::secs(30), 50));
}

#[test]
fn a_fall_back_makes_the_work_of_earlier_attempts_redone() {
    let mut h = History::new();
    let old = checkpoint(1, 1, 50, 30);
    h.run(FIRST, 1, 1, Times { placed: 0, launched: 0, accepted: 10, started: 20 }, None);
    h.commit(FIRST, 51, old.clone());
    h.commit(FIRST, 91, checkpoint(2, 1, 90, 70));
    h.end(FIRST, 1, 100, AttemptEnd::Preempted { noticed: false }, None);
    h.gone(1, 100, 100, GoneCause::Preempted);
    h.run(
        FIRST,
        2,
        2,
        Times { placed: 100, launched: 100, accepted: 110, started: 120 },
        Some(checkpoint(2, 1, 90, 70)),
    );
    h.commit(FIRST, 161, checkpoint(3, 2, 160, 110));
    let kept = h.cost(FIRST, 161);
    assert_eq!(kept.useful_time, Span::secs(70 + 41), "20 to 90, and what runs now");
    h.end(FIRST, 2, 200, AttemptEnd::Preempted { noticed: false }, None);
    h.gone(2, 200, 200, GoneCause::Preempted);
    // The two newer ones turn out to be damaged.
    h.fell_back = 2;
    h.run(FIRST, 3, 3, Times { placed: 200, launched: 200, accepted: 210, started: 220 }, Some(old));
    h.end(FIRST, 3, 320, AttemptEnd::Completed, Some(exit(320)));
    h.gone(3, 320, 320, GoneCause::Terminated);
    let cost = h.cost(FIRST, 500);
    assert_eq!(cost.useful_time, Span::secs(30 + 100), "20 to 50 of the first, all of the third");
    assert_eq!(waste(&cost), [(Cause::Boot, 30), (Cause::Restore, 30), (Cause::Redone, 50 + 80)].into());
}

#[test]
fn a_command_that_never_starts_wastes_its_node_time() {
    let mut h = History::new();
    h.place(FIRST, 1, 1, 0, 0);
    h.at(10, Fact::AttemptAccepted { task: FIRST, generation: Generation(1) });
    let no = Exit { launch_error: Some("no such file".into()), exit_code: None, ..exit(15) };
    h.end(FIRST, 1, 16, AttemptEnd::LaunchFailed { message: "no such file".into() }, Some(no));
    h.gone(1, 20, 20, GoneCause::Terminated);
    let cost = h.cost(FIRST, 500);
    assert_eq!((cost.billed, cost.wasted), (Usd(20 * SECOND), Usd(20 * SECOND)));
    assert_eq!(waste(&cost), [(Cause::FailedStart, 16), (Cause::Idle, 4)].into());
    assert_eq!((cost.useful_time, cost.saved_percent()), (Span::ZERO, None));
    assert_eq!(cost.saved_net(), Usd(-20 * SECOND), "a loss is told as one");
}

#[test]
fn two_jobs_on_one_node_share_its_bill_at_the_hand_over() {
    let mut h = History::new();
    h.submit(2);
    h.run(FIRST, 1, 1, Times { placed: 0, launched: 0, accepted: 5, started: 10 }, None);
    h.end(FIRST, 1, 100, AttemptEnd::Completed, Some(exit(100)));
    let (generation, node) = (Generation(1), NodeId(1));
    h.at(110, Fact::AttemptPlaced { task: SECOND_JOB, generation, node });
    h.start(SECOND_JOB, 1, 112, 113, None);
    h.end(SECOND_JOB, 1, 200, AttemptEnd::Completed, Some(exit(200)));
    h.gone(1, 260, 260, GoneCause::Terminated);
    let (one, two) = (h.cost(FIRST, 500), h.cost(SECOND_JOB, 500));
    assert_eq!((one.billed, two.billed), (Usd(110 * SECOND), Usd(150 * SECOND)));
    assert_eq!(one.billed + two.billed, h.bill(1));
    assert_eq!(waste(&one), [(Cause::Boot, 5), (Cause::Restore, 5), (Cause::Idle, 10)].into());
    assert_eq!(waste(&two), [(Cause::Boot, 2), (Cause::Restore, 1), (Cause::Idle, 60)].into());
    assert_eq!((one.useful_time, two.useful_time), (Span::secs(90), Span::secs(87)));
}

#[test]
fn each_part_is_paid_at_the_price_of_its_own_time() {
    let mut h = History::new();
    h.run(FIRST, 1, 1, Times { placed: 0, launched: 0, accepted: 0, started: 0 }, None);
    let mut quote = h.c.nodes[&NodeId(1)].quote.clone();
    quote.price = "7.20".parse().unwrap();
    h.at(60, Fact::NodeRepriced { node: NodeId(1), quote: quote.clone() });
    quote.on_demand = "21.60".parse().unwrap();
    h.at(90, Fact::NodeRepriced { node: NodeId(1), quote });
    h.end(FIRST, 1, 100, AttemptEnd::Completed, Some(exit(100)));
    h.gone(1, 110, 110, GoneCause::Terminated);
    let cost = h.cost(FIRST, 500);
    assert_eq!(cost.billed, Usd((60 + 2 * 50) * SECOND));
    assert_eq!(cost.on_demand_useful, Usd((3 * 90 + 6 * 10) * SECOND));
    assert_eq!(cost.on_demand_billed, Usd((3 * 90 + 6 * 20) * SECOND));
    assert_eq!(cost.wasted, Usd(2 * 10 * SECOND), "ten idle seconds at the new price");
    assert_eq!(h.c.nodes[&NodeId(1)].ledger.segments.len(), 3);
}

#[test]
fn rounding_leaves_no_nano_dollar_behind() {
    let mut h = History::new();
    h.price = UsdPerHour::nanos(1801);
    // Parts of odd lengths at a price that no millisecond divides.
    h.run(FIRST, 1, 1, Times { placed: 0, launched: 0, accepted: 1, started: 2 }, None);
    h.end(FIRST, 1, 5, AttemptEnd::Preempted { noticed: false }, Some(exit(4)));
    h.gone(1, 7, 7, GoneCause::Preempted);
    let cost = h.cost(FIRST, 500);
    assert_eq!(cost.billed, Usd(4), "3.501… rounded once");
    let lines: Usd = cost.waste.iter().map(|line| line.amount).sum();
    assert_eq!((lines, cost.wasted), (Usd(4), Usd(4)));
    assert_eq!(cost, h.cost(FIRST, 900), "what is over does not change with the time of the report");
}

#[test]
fn a_job_under_way_counts_its_running_time_as_useful_until_now() {
    let mut h = History::new();
    h.place(FIRST, 1, 1, 0, 0);
    assert_eq!(waste(&h.cost(FIRST, 8)), [(Cause::Boot, 8)].into());
    h.at(10, Fact::AttemptAccepted { task: FIRST, generation: Generation(1) });
    assert_eq!(waste(&h.cost(FIRST, 15)), [(Cause::Boot, 10), (Cause::Restore, 5)].into());
    h.at(20, Fact::AttemptStarted { task: FIRST, generation: Generation(1) });
    let cost = h.cost(FIRST, 50);
    assert_eq!((cost.billed, cost.useful_time), (Usd(50 * SECOND), Span::secs(30)));
    assert_eq!(cost, h.cost(FIRST, 50), "INV-09: printed twice it is the same");
}

#[test]
fn a_refused_launch_costs_nothing_and_is_no_attempt() {
    let mut h = History::new();
    h.place(FIRST, 1, 1, 0, -1);
    h.end(FIRST, 1, 5, AttemptEnd::Requeued, None);
    h.at(
        5,
        Fact::NodeRefused {
            node: NodeId(1),
            kind: RefusalKind::InsufficientCapacity,
            message: "none".into(),
        },
    );
    h.at(5, Fact::TaskWaits { task: FIRST, reason: WaitReason::Queued, next_try: seconds(5) });
    let report = job_report(&h.c, FIRST, seconds(500)).unwrap();
    assert_eq!((report.attempts, report.preemptions, report.steps_repeated), (0, 0, 0));
    assert_eq!(report.cost, JobCost::default());
    assert_eq!(job_report(&h.c, SECOND_JOB, seconds(500)), None, "there is no such job");
}

/// Started at 20, saved at 50, at step 80 when the node went at 100, of which we hear at 103.
fn lost_after_a_checkpoint(h: &mut History) {
    h.run(FIRST, 1, 1, Times { placed: 0, launched: 0, accepted: 10, started: 20 }, None);
    h.commit(FIRST, 52, checkpoint(1, 1, 50, 30));
    h.progress(FIRST, 1, 99, 80);
    h.end(FIRST, 1, 103, AttemptEnd::Preempted { noticed: false }, None);
    h.gone(1, 103, 100, GoneCause::Preempted);
}

/// Events with their seconds, applied as they are written down.
struct History {
    c: Cluster,
    price: UsdPerHour,
    /// What the next restore passes over.
    fell_back: u32,
}

struct Times {
    placed: u64,
    launched: i64,
    accepted: u64,
    started: u64,
}

impl History {
    fn new() -> History {
        let mut h = History { c: Cluster::default(), price: "3.60".parse().unwrap(), fell_back: 0 };
        h.submit(1);
        h
    }

    fn submit(&mut self, number: u32) {
        let (uuid, client_key) = (format!("feed{number}"), format!("key{number}"));
        self.at(0, Fact::JobSubmitted { job: JobId(number), uuid, client_key, spec: Arc::new(job("train")) });
    }

    fn at(&mut self, second: u64, fact: Fact) {
        apply(&mut self.c, &Event { at: seconds(second), fact }).unwrap();
    }

    /// Asks for a node and puts the task on it; `launched` below zero: the cloud has not answered.
    fn place(&mut self, task: TaskId, generation: u64, node: u64, placed: u64, launched: i64) {
        let Offer { pool, shape, mut quote, .. } = offer("aws/us-east-1/us-east-1a/t4/spot", "3.60").build();
        quote.price = self.price;
        let (node, key) = (NodeId(node), EffectKey(format!("k{node}")));
        self.at(
            placed,
            Fact::NodeRequested { node, key, pool, shape, quote: quote.clone(), expires_at: seconds(9999) },
        );
        self.at(placed, Fact::AttemptPlaced { task, generation: Generation(generation), node });
        if let Ok(launched) = u64::try_from(launched) {
            self.at(
                launched,
                Fact::NodeLaunched {
                    node,
                    instance: InstanceId(format!("i{node}")),
                    quote,
                    billed_from: None,
                },
            );
            self.at(launched, Fact::NodeJoined { node });
        }
    }

    fn run(&mut self, task: TaskId, generation: u64, node: u64, times: Times, from: Option<Checkpoint>) {
        self.place(task, generation, node, times.placed, times.launched);
        self.start(task, generation, times.accepted, times.started, from);
    }

    fn start(
        &mut self,
        task: TaskId,
        generation: u64,
        accepted: u64,
        started: u64,
        from: Option<Checkpoint>,
    ) {
        let (generation, fell_back) = (Generation(generation), std::mem::take(&mut self.fell_back));
        self.at(accepted, Fact::AttemptAccepted { task, generation });
        self.at(started, Fact::AttemptRestored { task, generation, from, fell_back });
        self.at(started, Fact::AttemptStarted { task, generation });
    }

    fn progress(&mut self, task: TaskId, generation: u64, second: u64, step: u64) {
        let progress = Progress { step, total: None };
        self.at(second, Fact::AttemptProgressed { task, generation: Generation(generation), progress });
    }

    fn commit(&mut self, task: TaskId, second: u64, checkpoint: Checkpoint) {
        let generation = checkpoint.generation;
        self.at(second, Fact::CheckpointCommitted { task, generation, checkpoint });
    }

    fn end(&mut self, task: TaskId, generation: u64, second: u64, end: AttemptEnd, exit: Option<Exit>) {
        let generation = Generation(generation);
        self.at(second, Fact::AttemptEnded { task, generation, end, exit, floor: None });
    }

    fn gone(&mut self, node: u64, heard: u64, ended: u64, cause: GoneCause) {
        self.at(heard, Fact::NodeGone { node: NodeId(node), cause, ended_at: seconds(ended) });
        assert_eq!(invariants::check(&self.c), []);
    }

    fn cost(&self, task: TaskId, second: u64) -> JobCost {
        job_cost(&self.c, task, seconds(second))
    }

    fn bill(&self, node: u64) -> Usd {
        self.c.nodes[&NodeId(node)].ledger.segments.iter().map(|segment| segment.amount).sum()
    }
}

/// Seconds by cause; the money of each line is its time at the price of spot.
fn waste(cost: &JobCost) -> BTreeMap<Cause, u64> {
    for line in &cost.waste {
        assert_eq!(line.amount, Usd(i64::try_from(line.time.0).unwrap() * SECOND / 1000), "{line:?}");
    }
    cost.waste.iter().map(|line| (line.cause, line.time.0 / 1000)).collect()
}

fn checkpoint(sequence: u64, generation: u64, saved: u64, step: u64) -> Checkpoint {
    Checkpoint {
        sequence,
        log_sequence: sequence,
        generation: Generation(generation),
        step: Some(step),
        bytes_total: 1,
        bytes_uploaded: 1,
        saved_at: seconds(saved),
        manifest_hash: "00".into(),
    }
}

fn exit(stopped: u64) -> Exit {
    Exit {
        exit_code: Some(0),
        signal: None,
        out_of_memory: false,
        launch_error: None,
        signalled: false,
        worker_leaving: false,
        stopped_at: seconds(stopped),
        last_progress: None,
        detail: None,
    }
}

fn seconds(second: u64) -> Timestamp {
    Timestamp(1_000_000 + second * 1000)
}
