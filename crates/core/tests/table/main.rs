//! Every phase of a task against every fact and every input: what is legal, where it leads, and that the rest changes
//! nothing. A new fact, input or phase does not compile before it has its row here.
#![expect(clippy::unwrap_used, reason = "a test, helpers included, ends at the first surprise")]

mod broken;

use std::collections::BTreeSet;
use std::sync::Arc;

use spotq_core::{
    Cluster, Phase, Policies, apply, decide, due, invariants, owes_effects, plan, plan_input, wakes_planner,
};
use spotq_model::{
    AttemptEnd, Checkpoint, Cloud, Effect, EffectKey, EndWhy, Event, Exit, Fact, Generation, GoneCause,
    HoldReason, Input, InstanceId, InstanceSeen, JobId, JobSpec, LaunchAnswer, NodeId, Offer, Outcome,
    Progress, Refusal, RefusalKind, Report, Scope, Span, StopWhy, TaskId, Timestamp, WaitReason,
};
use spotq_testkit::{FACT_KINDS, fact_kind, job, offer};

const JOB: JobId = JobId(1);
const TASK: TaskId = TaskId { job: JOB, index: 0 };
/// The generation of the attempt under way, where there is one.
const CURRENT: Generation = Generation(1);
/// The task's node; idle where the task has none.
const MINE: NodeId = NodeId(1);
/// Up, idle, with a drill that the cloud has not answered.
const IDLE: NodeId = NodeId(2);
/// Asked for, not answered, nobody's.
const REQUESTED: NodeId = NodeId(3);
/// Launched, its worker has not joined, nobody's.
const BOOTING: NodeId = NodeId(4);
const GONE: NodeId = NodeId(5);
const NEW: NodeId = NodeId(6);
const POOL: &str = "aws/us-east-1/us-east-1a/t4/spot";
const NOTICE_DEADLINE: Timestamp = Timestamp(500_000);
const LATER: Timestamp = Timestamp(900_000);
/// When every node reaches its age.
const EXPIRES: Timestamp = Timestamp(9_000_000);

/// The situations that a task can be in: the phases, some of them in more than one way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Held,
    Pending,
    /// Its node is not launched yet.
    Asked,
    /// Its node is up; the grant is on its way.
    Granted,
    Restoring,
    Running,
    /// A notice came before the command ran.
    DrainingEarly,
    Draining,
    Completing,
    Done,
}

const ALL: [At; 10] = [
    At::Held,
    At::Pending,
    At::Asked,
    At::Granted,
    At::Restoring,
    At::Running,
    At::DrainingEarly,
    At::Draining,
    At::Completing,
    At::Done,
];

/// What a fact does to the phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum To {
    /// Illegal.
    No,
    /// Legal; the phase stays.
    Same,
    Phase(&'static str),
}

use To::{No, Same};
const HELD: To = To::Phase("held");
const PENDING: To = To::Phase("pending");
const PROVISIONING: To = To::Phase("provisioning");
const RESTORING: To = To::Phase("restoring");
const RUNNING: To = To::Phase("running");
const DRAINING: To = To::Phase("draining");
const COMPLETING: To = To::Phase("completing");
const DONE: To = To::Phase("done");

/// A fact with what it does in each situation of [`ALL`], in that order.
type Row = (Fact, [To; 10]);

#[test]
fn every_fact_in_every_phase_leads_where_the_table_says_or_changes_nothing() {
    let rows: Vec<Row> = [task_facts(), attempt_facts(), node_facts()].concat();
    let kinds: BTreeSet<usize> = rows.iter().map(|(fact, _)| fact_kind(fact)).collect();
    assert_eq!(kinds, (0..FACT_KINDS).collect(), "a kind of fact has no row");
    for at in ALL {
        let before = cluster_at(at);
        for (fact, row) in &rows {
            check(at, &before, fact, row[at as usize]);
        }
    }
}

fn check(at: At, before: &Cluster, fact: &Fact, to: To) {
    let mut after = before.clone();
    let applied = apply(&mut after, &Event { at: before.now + Span::secs(1), fact: fact.clone() });
    let told = format!("{fact:?} at {at:?}: {applied:?}");
    match to {
        To::No => {
            assert!(applied.is_err(), "{told}");
            assert_eq!(*before, after, "an illegal event changed something: {told}");
        }
        To::Same => {
            assert!(applied.is_ok(), "{told}");
            assert_eq!(phase(before).name(), phase(&after).name(), "{told}");
        }
        To::Phase(name) => {
            assert!(applied.is_ok(), "{told}");
            assert_eq!(phase(&after).name(), name, "{told}");
        }
    }
    if at == At::Done {
        assert_eq!(before.task(TASK), after.task(TASK), "a done task changed: {told}");
    }
}

#[test]
fn what_is_decided_in_any_phase_is_legal_and_leaves_a_sound_state() {
    let policies = Policies::default();
    let jumps = [Span::ZERO, Span::secs(3), Span::secs(3600), Span::secs(30 * 86_400)];
    for at in ALL {
        let before = cluster_at(at);
        let inputs = every_input(&before);
        let kinds: BTreeSet<usize> = inputs.iter().map(input_kind).collect();
        assert_eq!(kinds, (0..INPUT_KINDS).collect(), "a kind of input is not tried");
        for (input, jump) in inputs.iter().flat_map(|input| jumps.map(|jump| (input, jump))) {
            let mut after = before.clone();
            for event in decide(&before, &policies, before.now + jump, input) {
                apply(&mut after, &event)
                    .unwrap_or_else(|e| panic!("{e}\nat {at:?} after {jump}: {input:?}"));
            }
            assert_eq!(invariants::check(&after), [], "at {at:?} after {jump}: {input:?}");
            let again = decide(&after, &policies, before.now + jump, input);
            assert!(again.is_empty() || may_be_news_twice(input), "INV-04: {input:?} at {at:?}: {again:?}");
            if at == At::Done {
                assert_eq!(before.task(TASK), after.task(TASK), "a done task changed: {input:?}");
            }
        }
    }
}

/// A restore of nothing looks like none; a user may rehearse as often as he likes; a plan and a tick may find more to do.
fn may_be_news_twice(input: &Input) -> bool {
    let first_start =
        matches!(input, Input::Reported { report: Report::Restored { from: None, fell_back: 0 }, .. });
    first_start || matches!(input, Input::Drill { .. } | Input::Plan { .. } | Input::Tick)
}

#[test]
fn the_situations_of_the_table_cover_all_phases() {
    let kinds: BTreeSet<usize> = ALL.iter().map(|at| phase_kind(phase(&cluster_at(*at)))).collect();
    assert_eq!(kinds, (0..PHASE_KINDS).collect());
    for at in ALL {
        assert_eq!(cluster_at(at).task(TASK).unwrap().is_done(), at == At::Done, "{at:?}");
    }
}

#[test]
fn what_a_user_asks_for_is_decided_by_the_phase() {
    const NO: &[&str] = &[];
    const STOP: &[&str] = &["stop_asked"];
    // The command has not begun, or is over: there is nothing to wait for.
    const STOP_NOW: &[&str] = &["stop_asked", "attempt_ended", "task_done"];
    const UNNEEDED: &[&str] = &["stop_asked", "attempt_ended", "task_done", "node_ending"];
    const DRILL: &[&str] = &["drill_asked"];
    const OVER: &[&str] = &["task_done"];
    let rows: [(Input, [&[&str]; 10]); 5] = [
        (Input::Cancel { job: JOB }, [OVER, OVER, UNNEEDED, STOP_NOW, STOP, STOP, STOP, STOP, STOP_NOW, NO]),
        (Input::Hold { job: JOB }, [NO, &["task_held"], NO, NO, NO, NO, NO, NO, NO, NO]),
        (Input::Release { job: JOB }, [&["task_released"], NO, NO, NO, NO, NO, NO, NO, NO, NO]),
        (Input::Requeue { job: JOB }, [NO, NO, NO, NO, STOP, STOP, NO, NO, NO, NO]),
        (
            Input::Drill { job: JOB, notice: Span::secs(30) },
            [NO, NO, NO, DRILL, DRILL, DRILL, NO, NO, DRILL, NO],
        ),
    ];
    for (at, (input, row)) in ALL.iter().flat_map(|at| rows.iter().map(move |row| (*at, row))) {
        assert_eq!(decided(&cluster_at(at), input), row[at as usize], "{input:?} at {at:?}");
    }
    let submits = user_inputs().into_iter().filter(|input| matches!(input, Input::Submit { .. }));
    let told: Vec<_> = submits.map(|input| decided(&cluster_at(At::Pending), &input)).collect();
    assert_eq!(told, [vec![], vec!["job_submitted"], vec!["job_submitted", "task_held"]], "known, new, held");
}

/// The kinds of facts that follow from an input.
fn decided(c: &Cluster, input: &Input) -> Vec<String> {
    let events = decide(c, &Policies::default(), c.now, input);
    let kind =
        |event: &Event| serde_json::to_value(&event.fact).unwrap()["fact"].as_str().unwrap().to_owned();
    events.iter().map(kind).collect()
}

/// What wakes the planner is exactly what can give a task its node. The exception is an unanswered drill's node: it is
/// free again after a drill that failed, and the planner comes by itself soon enough.
#[test]
fn facts_after_which_more_can_be_placed_wake_the_planner_and_no_others() {
    let rows: Vec<Row> = [task_facts(), attempt_facts(), node_facts()].concat();
    let (mut helped, mut woken) = (BTreeSet::new(), BTreeSet::new());
    // Where no node is free, a place comes from a node that joins or makes room.
    let mut crowded = cluster_at(At::Pending);
    let ending = Fact::NodeEnding { node: MINE, why: EndWhy::Idle };
    apply(&mut crowded, &Event { at: Timestamp(0), fact: ending }).unwrap();
    for before in ALL.map(cluster_at).into_iter().chain([crowded]) {
        for (fact, _) in &rows {
            if wakes_planner(fact) {
                woken.insert(fact_kind(fact));
            }
            let mut after = before.clone();
            let event = Event { at: before.now, fact: fact.clone() };
            if apply(&mut after, &event).is_ok() && !matches!(fact, Fact::DrillAnswered { .. }) {
                let more = !placed(&after, &before).is_subset(&placed(&before, &before));
                helped.extend(more.then(|| fact_kind(fact)));
            }
        }
    }
    assert_eq!(helped, woken);
}

/// Tasks for which a plan finds a place: on the nodes that are there, and on new ones where `before` had no room for any.
fn placed(c: &Cluster, before: &Cluster) -> BTreeSet<(TaskId, usize)> {
    let full = Policies { nodes_max: u32::try_from(before.live.len()).unwrap(), ..Policies::default() };
    let offers = [offer(POOL, "0.1").build()];
    let tries = [(Policies::default(), &offers[..]), (full, &offers[..]), (Policies::default(), &[])];
    let plans = tries.map(|(p, offers)| plan(&plan_input(c, &p, c.now, offers), &p));
    let moves = plans.iter().enumerate().flat_map(|(n, plan)| plan.moves.iter().map(move |m| (m.task(), n)));
    moves.collect()
}

#[test]
fn facts_after_which_more_is_owed_interrupt_the_flow_of_appends_and_the_frequent_ones_do_not() {
    let rows: Vec<Row> = [task_facts(), attempt_facts(), node_facts()].concat();
    for (at, (fact, _)) in ALL.iter().flat_map(|at| rows.iter().map(move |row| (*at, row))) {
        let before = cluster_at(at);
        let mut after = before.clone();
        if apply(&mut after, &Event { at: before.now, fact: fact.clone() }).is_ok() {
            let owed = due(&before, before.now);
            let more = due(&after, before.now).iter().any(|effect| !owed.contains(effect));
            assert!(!more || owes_effects(fact), "{at:?}: {fact:?}");
        }
        let frequent = matches!(
            fact,
            Fact::JobSubmitted { .. } | Fact::AttemptProgressed { .. } | Fact::CheckpointCommitted { .. }
        );
        assert!(!frequent || !owes_effects(fact), "{fact:?}");
    }
}

#[test]
fn one_stop_is_asked_for_and_only_a_cancel_overrides_another() {
    let mut c = cluster_at(At::Running);
    let asks = [
        (StopWhy::Requeue, true),
        (StopWhy::TimeLimit, false),
        (StopWhy::Cancel, true),
        (StopWhy::Cancel, false),
        (StopWhy::Requeue, false),
    ];
    for (why, fits) in asks {
        let fact = Fact::StopAsked { task: TASK, generation: CURRENT, why, deadline: LATER };
        assert_eq!(apply(&mut c, &Event { at: LATER, fact }).is_ok(), fits, "{why:?}");
    }
}

#[test]
fn what_the_world_owes_follows_from_the_state_of_each_node() {
    let (task, generation, node) = (TASK, CURRENT, MINE);
    let stop = || Fact::StopAsked { task, generation, why: StopWhy::Cancel, deadline: LATER };
    let notice = || Fact::NodeNoticed { node, deadline: NOTICE_DEADLINE, source: "imds".into() };
    let (instance, quote) = (InstanceId("i-1".into()), offer(POOL, "0.31").build().quote);
    let launched =
        || Fact::NodeLaunched { node, instance: instance.clone(), quote: quote.clone(), billed_from: None };
    let ending = |node| Fact::NodeEnding { node, why: EndWhy::Idle };
    // The idle node is to be rehearsed on, the one that was asked for is to be launched; this comes on top of that.
    let cases: [(At, Vec<Fact>, &[&str]); 14] = [
        (At::Pending, vec![], &["drill 2", "launch 3"]),
        (At::Asked, vec![], &["launch 1", "drill 2", "launch 3"]),
        (At::Asked, vec![launched()], &["drill 2", "launch 3"]),
        (At::Asked, vec![launched(), Fact::NodeJoined { node }], &["grant 1", "drill 2", "launch 3"]),
        (At::Granted, vec![], &["grant 1", "drill 2", "launch 3"]),
        (At::Granted, vec![notice()], &["drill 2", "launch 3"]),
        (At::Granted, vec![stop()], &["stop 1", "drill 2", "launch 3"]),
        (At::Restoring, vec![], &["drill 2", "launch 3"]),
        (At::Running, vec![], &["drill 2", "launch 3"]),
        (At::Running, vec![stop()], &["stop 1", "drill 2", "launch 3"]),
        (At::Draining, vec![], &["drill 2", "launch 3"]),
        (At::Done, vec![ending(MINE)], &["terminate 1", "drill 2", "launch 3"]),
        (At::Done, vec![ending(REQUESTED)], &["drill 2"]),
        (At::Done, vec![Fact::DrillAnswered { node: IDLE, error: None }], &["launch 3"]),
    ];
    for (at, facts, owed) in cases {
        let mut c = cluster_at(at);
        for fact in facts {
            apply(&mut c, &Event { at: Timestamp(0), fact }).unwrap();
        }
        assert_eq!(owed_at(&c, c.now), owed, "at {at:?}");
    }
    let c = cluster_at(At::Pending);
    let answered = |node| decided(&c, &Input::DrillAnswered { node, error: None });
    assert_eq!((answered(IDLE), answered(MINE)), (vec!["drill_answered".to_owned()], vec![]));
    assert_eq!(owed_at(&c, EXPIRES - Span(1)), ["drill 2", "launch 3"]);
    assert_eq!(owed_at(&c, EXPIRES), ["drill 2"], "a late launch would only be ended again");
}

fn owed_at(c: &Cluster, now: Timestamp) -> Vec<String> {
    let told = due(c, now).into_iter().map(|effect| match effect {
        Effect::Launch { node, .. } => format!("launch {node}"),
        Effect::Terminate { node, .. } => format!("terminate {node}"),
        Effect::Drill { node, .. } => format!("drill {node}"),
        Effect::Grant { node, .. } => format!("grant {node}"),
        Effect::Stop { node, .. } => format!("stop {node}"),
    });
    told.collect()
}

#[test]
fn the_time_that_a_task_waits_is_summed_under_the_word_of_its_reason() {
    let reasons = [
        WaitReason::Queued,
        WaitReason::BeginTime { at: LATER },
        WaitReason::NoSuchPool { hint: String::new() },
        WaitReason::CoolingDown { pools: 1, last: RefusalKind::Transient },
        WaitReason::TooExpensive { cheapest: "1".parse().unwrap() },
        WaitReason::SpotNotWorthIt,
        WaitReason::NoOffers,
        WaitReason::NodeLimit { limit: 1 },
        WaitReason::BackOff { failures: 1 },
    ];
    for reason in reasons {
        let mut feed = Feed::new();
        let word = serde_json::to_value(&reason).unwrap()["reason"].as_str().unwrap().to_owned();
        feed.fact(Fact::TaskWaits { task: TASK, reason, next_try: LATER });
        feed.at = feed.at + Span::secs(9);
        feed.fact(Fact::TaskHeld { task: TASK, reason: HoldReason::User });
        // One second in the queue came before it.
        let expected = [("queued".to_owned(), Span::secs(1)), (word.clone(), Span::secs(10))];
        let waited: Vec<_> = feed.c.task(TASK).unwrap().waited.clone().into_iter().collect();
        let sum: Span = waited.iter().map(|(_, span)| *span).sum();
        assert_eq!(sum, Span::secs(11));
        assert!(waited.iter().all(|line| expected.contains(line) || word == "queued"), "{word}: {waited:?}");
    }
}

#[test]
fn an_event_that_does_not_fit_names_itself_and_what_it_is_about() {
    let (stranger, unknown) = (TaskId::only(JobId(77)), NodeId(77));
    let cases = [
        (Fact::TaskReleased { task: stranger }, "(TaskReleased) does not fit: task 77 is unknown"),
        (Fact::NodeJoined { node: unknown }, "(NodeJoined) does not fit: node 77 is unknown"),
        (Fact::TaskReleased { task: TASK }, "(TaskReleased) does not fit: task 1 is pending"),
        (Fact::NodeJoined { node: IDLE }, "(NodeJoined) does not fit: node 2 is ready"),
    ];
    let mut c = cluster_at(At::Pending);
    for (fact, text) in cases {
        let told = apply(&mut c, &Event { at: LATER, fact }).unwrap_err().to_string();
        assert_eq!(told, format!("event {} {text}", c.version.0));
    }
}

// The columns: held, pending, asked, granted, restoring, running, draining early, draining, completing, done.

fn task_facts() -> Vec<Row> {
    let submit = |job, key: &str| Fact::JobSubmitted {
        job,
        uuid: "u2".into(),
        client_key: key.into(),
        spec: Arc::new(spotq_testkit::job("other")),
    };
    let cooled = Fact::PoolCooled {
        scope: Scope::Cloud { cloud: Cloud::Aws },
        kind: RefusalKind::QuotaExceeded,
        until: LATER,
        message: "enough".into(),
    };
    let waits = Fact::TaskWaits { task: TASK, reason: WaitReason::NoOffers, next_try: LATER };
    let done = |task| Fact::TaskDone { task, outcome: Outcome::Cancelled };
    vec![
        (submit(JobId(2), "new"), [Same; 10]),
        (submit(JobId(1), "new"), [No; 10]),
        (submit(JobId(2), "key"), [No; 10]),
        (Fact::TaskHeld { task: TASK, reason: HoldReason::User }, [No, HELD, No, No, No, No, No, No, No, No]),
        (Fact::TaskReleased { task: TASK }, [PENDING, No, No, No, No, No, No, No, No, No]),
        (waits, [No, PENDING, No, No, No, No, No, No, No, No]),
        (done(TASK), [DONE, DONE, No, No, No, No, No, No, No, No]),
        (done(TaskId::only(JobId(77))), [No; 10]),
        (cooled, [Same; 10]),
    ]
}

fn attempt_facts() -> Vec<Row> {
    let (task, generation) = (TASK, CURRENT);
    let active = |provisioning, rest: [To; 5]| {
        let [restoring, running, early, draining, completing] = rest;
        [No, No, provisioning, provisioning, restoring, running, early, draining, completing, No]
    };
    let place = |generation, node| Fact::AttemptPlaced { task, generation, node };
    let pending_only = [No, PROVISIONING, No, No, No, No, No, No, No, No];
    let ended = |generation| Fact::AttemptEnded {
        task,
        generation,
        end: AttemptEnd::Requeued,
        exit: None,
        floor: None,
    };
    let restored = Fact::AttemptRestored { task, generation, from: None, fell_back: 1 };
    let progressed =
        Fact::AttemptProgressed { task, generation, progress: Progress { step: 3, total: None } };
    let committed =
        |generation| Fact::CheckpointCommitted { task, generation, checkpoint: checkpoint(7, generation) };
    let stop = Fact::StopAsked { task, generation, why: StopWhy::Requeue, deadline: LATER };
    let exited = Fact::AttemptExited { task, generation, exit: exit(1), until: LATER };
    vec![
        (place(Generation(1), IDLE), pending_only),
        (place(Generation(9), REQUESTED), pending_only),
        (place(Generation(0), IDLE), [No; 10]),
        (place(Generation(9), GONE), [No; 10]),
        (Fact::AttemptAccepted { task, generation }, active(RESTORING, [No; 5])),
        (restored, active(No, [Same, No, Same, No, No])),
        (Fact::AttemptStarted { task, generation }, active(No, [RUNNING, No, Same, No, No])),
        (progressed, active(No, [Same; 5])),
        (committed(CURRENT), active(No, [Same; 5])),
        (stop, active(Same, [DRAINING, DRAINING, Same, Same, Same])),
        (exited, active(No, [COMPLETING, COMPLETING, No, No, No])),
        (ended(CURRENT), active(PENDING, [PENDING; 5])),
        // Older and unborn generations can change nothing (INV-02).
        (ended(Generation(0)), [No; 10]),
        (ended(Generation(2)), [No; 10]),
        (Fact::AttemptStarted { task, generation: Generation(0) }, [No; 10]),
        (committed(Generation(2)), [No; 10]),
    ]
}

fn node_facts() -> Vec<Row> {
    let Offer { pool, shape, quote, .. } = offer(POOL, "0.5").build();
    let launched = |node| Fact::NodeLaunched {
        node,
        instance: InstanceId("i-new".into()),
        quote: quote.clone(),
        billed_from: None,
    };
    let refused =
        |node| Fact::NodeRefused { node, kind: RefusalKind::InsufficientCapacity, message: "no".into() };
    let noticed =
        |node| Fact::NodeNoticed { node, deadline: NOTICE_DEADLINE + Span::secs(1), source: "imds".into() };
    let ending = |node| Fact::NodeEnding { node, why: EndWhy::Idle };
    let gone = |node| Fact::NodeGone { node, cause: GoneCause::Crashed, ended_at: Timestamp(1) };
    let orphaned = |node| Fact::NodeOrphaned {
        node,
        key: EffectKey("orphan".into()),
        instance: InstanceId("i-orphan".into()),
        pool: pool.clone(),
    };
    let requested = |node: NodeId| Fact::NodeRequested {
        node,
        key: EffectKey(format!("key-{node}")),
        pool: pool.clone(),
        shape: shape.clone(),
        quote: quote.clone(),
        expires_at: LATER,
    };
    // Nothing takes a node away from under the task that holds it.
    let unheld = [Same, Same, No, No, No, No, No, No, No, Same];
    let launched_only = [Same, Same, No, Same, Same, Same, Same, Same, Same, Same];
    let noticing = [Same, Same, No, Same, DRAINING, DRAINING, Same, Same, Same, Same];
    vec![
        (requested(NEW), [Same; 10]),
        (requested(IDLE), [No; 10]),
        (launched(MINE), [No, No, Same, No, No, No, No, No, No, No]),
        (launched(REQUESTED), [Same; 10]),
        (launched(BOOTING), [No; 10]),
        (refused(MINE), [No; 10]),
        (refused(REQUESTED), [Same; 10]),
        (Fact::NodeJoined { node: MINE }, [No; 10]),
        (Fact::NodeJoined { node: BOOTING }, [Same; 10]),
        (noticed(MINE), noticing),
        (noticed(GONE), [No; 10]),
        (Fact::NoticeWithdrawn { node: MINE }, [No, No, No, No, No, No, RESTORING, RUNNING, No, No]),
        (ending(MINE), unheld),
        (ending(GONE), [No; 10]),
        (gone(MINE), unheld),
        (gone(BOOTING), [Same; 10]),
        (gone(GONE), [No; 10]),
        (orphaned(MINE), [No; 10]),
        (orphaned(GONE), [Same; 10]),
        (orphaned(NEW), [Same; 10]),
        (Fact::NodeRepriced { node: MINE, quote: quote.clone() }, launched_only),
        (Fact::DrillAsked { node: MINE, notice: Span::secs(30) }, launched_only),
        (Fact::DrillAnswered { node: MINE, error: None }, [No; 10]),
        (Fact::DrillAnswered { node: IDLE, error: None }, [Same; 10]),
    ]
}

const PHASE_KINDS: usize = 8;

fn phase_kind(phase: &Phase) -> usize {
    match phase {
        Phase::Held { .. } => 0,
        Phase::Pending { .. } => 1,
        Phase::Provisioning { .. } => 2,
        Phase::Restoring { .. } => 3,
        Phase::Running { .. } => 4,
        Phase::Draining { .. } => 5,
        Phase::Completing { .. } => 6,
        Phase::Done { .. } => 7,
    }
}

const INPUT_KINDS: usize = 16;

fn input_kind(input: &Input) -> usize {
    match input {
        Input::Submit { .. } => 0,
        Input::Cancel { .. } => 1,
        Input::Hold { .. } => 2,
        Input::Release { .. } => 3,
        Input::Requeue { .. } => 4,
        Input::Drill { .. } => 5,
        Input::LaunchAnswered { .. } => 6,
        Input::DrillAnswered { .. } => 7,
        Input::Instances { .. } => 8,
        Input::InstanceGone { .. } => 9,
        Input::WorkerJoined { .. } => 10,
        Input::LeaseExpired { .. } => 11,
        Input::Reported { .. } => 12,
        Input::Offers { .. } => 13,
        Input::Plan { .. } => 14,
        Input::Tick => 15,
    }
}

fn every_input(c: &Cluster) -> Vec<Input> {
    let offers = |price| vec![offer(POOL, price).build()];
    let planner = vec![
        Input::Offers { offers: offers("0.7") },
        Input::Offers { offers: Vec::new() },
        Input::Plan { offers: offers("0.2") },
        Input::Plan { offers: offers("0") },
        Input::Plan { offers: Vec::new() },
        Input::Tick,
    ];
    [user_inputs(), launch_inputs(), list_inputs(c), worker_inputs(), planner].concat()
}

fn user_inputs() -> Vec<Input> {
    let submit = |key: &str, hold| Input::Submit {
        client_key: key.into(),
        uuid: "cafe".into(),
        spec: Arc::new(JobSpec { hold, ..job("other") }),
    };
    let of = |job| {
        let notice = Span::secs(30);
        [
            Input::Cancel { job },
            Input::Hold { job },
            Input::Release { job },
            Input::Requeue { job },
            Input::Drill { job, notice },
        ]
    };
    let submits = [submit("key", false), submit("new", false), submit("new", true)];
    submits.into_iter().chain(of(JOB)).chain(of(JobId(9))).collect()
}

fn launch_inputs() -> Vec<Input> {
    let mut inputs = Vec::new();
    for node in (1..=7).map(NodeId) {
        let quote = offer(POOL, "0.4").build().quote;
        let refusal = Refusal {
            kind: RefusalKind::InsufficientCapacity,
            scope: Scope::Cloud { cloud: Cloud::Aws },
            cool_down: Span::secs(60),
            message: "none left".into(),
        };
        let instance = InstanceId(format!("i-late-{node}"));
        inputs.push(Input::LaunchAnswered {
            node,
            answer: LaunchAnswer::Launched { instance, quote, launched_at: Timestamp(1) },
        });
        inputs.push(Input::LaunchAnswered { node, answer: LaunchAnswer::Refused { refusal } });
        inputs.push(Input::DrillAnswered { node, error: Some("not here".into()) });
        inputs.push(Input::LeaseExpired { node });
        for cause in [GoneCause::Preempted, GoneCause::Terminated, GoneCause::Crashed, GoneCause::Expired] {
            let instance = InstanceId(format!("i-{node}"));
            inputs.push(Input::InstanceGone { instance, cause, at: Timestamp(1) });
        }
    }
    inputs
}

/// Lists that are empty, honest, at an end, and full of strangers, twins and repetitions.
fn list_inputs(c: &Cluster) -> Vec<Input> {
    let honest: Vec<InstanceSeen> = c
        .nodes
        .values()
        .map(|node| InstanceSeen {
            instance: node.instance.clone().unwrap_or_else(|| InstanceId(format!("i-{}", node.id))),
            key: node.key.clone(),
            node: Some(node.id),
            pool: node.pool.clone(),
            launched_at: Timestamp(1),
            gone: None,
            gone_at: None,
        })
        .collect();
    let at_an_end: Vec<InstanceSeen> =
        honest.iter().map(|seen| InstanceSeen { gone: Some(GoneCause::Preempted), ..seen.clone() }).collect();
    let stranger = InstanceSeen {
        instance: InstanceId("i-stranger".into()),
        key: EffectKey("who knows".into()),
        node: None,
        ..honest[0].clone()
    };
    let twins = honest
        .iter()
        .map(|seen| InstanceSeen { instance: InstanceId(format!("{}-twin", seen.instance)), ..seen.clone() });
    let twins: Vec<InstanceSeen> = twins.collect();
    let strange =
        [honest.clone(), vec![stranger.clone(), stranger], twins.clone(), twins, honest.clone()].concat();
    let mut inputs = Vec::new();
    for asked_at in [Timestamp(0), c.now, c.now + Span::secs(3600)] {
        for instances in [Vec::new(), honest.clone(), at_an_end.clone(), strange.clone()] {
            inputs.push(Input::Instances { asked_at, instances });
        }
    }
    inputs
}

fn worker_inputs() -> Vec<Input> {
    let mut inputs = Vec::new();
    for node in (1..=6).map(NodeId) {
        inputs.push(Input::WorkerJoined { node, held: Vec::new() });
        inputs.push(Input::WorkerJoined { node, held: vec![(TASK, CURRENT)] });
    }
    for generation in [Generation(0), CURRENT, Generation(2)] {
        for node in [MINE, IDLE] {
            let of_node = |report| Input::Reported { node, task: TASK, generation, report };
            inputs.extend(reports(generation).into_iter().map(of_node));
        }
    }
    inputs
}

fn reports(generation: Generation) -> Vec<Report> {
    vec![
        Report::Accepted,
        Report::Restored { from: None, fell_back: 0 },
        Report::Restored { from: None, fell_back: 2 },
        Report::Restored { from: Some(checkpoint(9, CURRENT)), fell_back: 0 },
        Report::Started,
        Report::Progressed { progress: Progress { step: 9, total: Some(9) } },
        Report::Noticed { deadline: NOTICE_DEADLINE, source: "imds".into() },
        Report::Noticed { deadline: Timestamp(1), source: "imds".into() },
        Report::NoticeWithdrawn,
        Report::Committed { checkpoint: checkpoint(8, generation) },
        Report::Finished { exit: exit(0) },
        Report::Finished { exit: exit(3) },
        Report::Finished { exit: Exit { exit_code: None, signal: Some(15), signalled: true, ..exit(0) } },
        Report::Superseded { by: Generation(u64::MAX) },
    ]
}

/// A cluster with the task in the wanted situation, made by events alone.
fn cluster_at(at: At) -> Cluster {
    let mut feed = Feed::new();
    feed.node(MINE, if at == At::Asked { 0 } else { 2 });
    feed.node(IDLE, 2);
    feed.node(REQUESTED, 0);
    feed.node(BOOTING, 1);
    feed.node(GONE, 2);
    feed.fact(Fact::NodeGone { node: GONE, cause: GoneCause::Crashed, ended_at: LATER });
    feed.fact(Fact::DrillAsked { node: IDLE, notice: Span::secs(30) });
    feed.bring(at);
    assert_eq!(invariants::check(&feed.c), [], "{at:?}");
    feed.c
}

struct Feed {
    c: Cluster,
    at: Timestamp,
}

impl Feed {
    /// The task waits; there are no nodes.
    fn new() -> Feed {
        let mut feed = Feed { c: Cluster::default(), at: Timestamp(1000) };
        let spec = Arc::new(job("train"));
        feed.fact(Fact::JobSubmitted { job: JOB, uuid: "feed".into(), client_key: "key".into(), spec });
        feed
    }

    fn fact(&mut self, fact: Fact) {
        self.at = self.at + Span::secs(1);
        apply(&mut self.c, &Event { at: self.at, fact }).unwrap();
    }

    /// `steps`: 0 asked for, 1 launched, 2 joined.
    fn node(&mut self, node: NodeId, steps: usize) {
        let Offer { pool, shape, quote, .. } = offer(POOL, "0.31").build();
        let (key, expires_at) = (EffectKey(format!("k{node}")), EXPIRES);
        self.fact(Fact::NodeRequested { node, key, pool, shape, quote: quote.clone(), expires_at });
        let instance = InstanceId(format!("i-{node}"));
        let rest =
            [Fact::NodeLaunched { node, instance, quote, billed_from: None }, Fact::NodeJoined { node }];
        rest.into_iter().take(steps).for_each(|fact| self.fact(fact));
    }

    /// The first so many steps of an attempt: placed, accepted, restored, started.
    fn attempt(&mut self, generation: Generation, from: Option<Checkpoint>, steps: usize) {
        let task = TASK;
        let all = [
            Fact::AttemptPlaced { task, generation, node: MINE },
            Fact::AttemptAccepted { task, generation },
            Fact::AttemptRestored { task, generation, from, fell_back: 0 },
            Fact::AttemptStarted { task, generation },
        ];
        all.into_iter().take(steps).for_each(|fact| self.fact(fact));
    }

    fn bring(&mut self, at: At) {
        let (task, generation) = (TASK, CURRENT);
        let notice = Fact::NodeNoticed { node: MINE, deadline: NOTICE_DEADLINE, source: "imds".into() };
        let exited = Fact::AttemptExited { task, generation, exit: exit(1), until: LATER };
        let (steps, last) = match at {
            At::Held => (0, Some(Fact::TaskHeld { task, reason: HoldReason::User })),
            At::Pending => (0, None),
            At::Asked | At::Granted => (1, None),
            At::Restoring => (2, None),
            At::Running => (4, None),
            At::DrainingEarly => (2, Some(notice)),
            At::Draining => (4, Some(notice)),
            At::Completing => (4, Some(exited)),
            At::Done => (0, Some(Fact::TaskDone { task, outcome: Outcome::Cancelled })),
        };
        self.attempt(CURRENT, None, steps);
        last.into_iter().for_each(|fact| self.fact(fact));
    }
}

fn phase(c: &Cluster) -> &Phase {
    &c.task(TASK).unwrap().phase
}

fn checkpoint(sequence: u64, generation: Generation) -> Checkpoint {
    spotq_testkit::checkpoint(sequence, generation, Timestamp(1))
}

fn exit(code: i32) -> Exit {
    spotq_testkit::exit(code, Timestamp(1))
}
