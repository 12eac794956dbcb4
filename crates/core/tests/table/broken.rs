//! The check of the invariants finds what is broken on purpose, names it by its id, and stays silent where nothing is.

use std::collections::BTreeSet;
use std::sync::Arc;

use spotq_core::{Cluster, Node, NodeState, Phase, QueueKey, Task, invariants};
use spotq_model::{
    AttemptEnd, EffectKey, Fact, Generation, HoldReason, InstanceId, NodeId, Span, TaskId, Timestamp, Usd,
};

use super::{BOOTING, CURRENT, Feed, GONE, IDLE, MINE, NEW, POOL, REQUESTED, TASK, checkpoint};
use spotq_testkit::offer;

/// The newest attempt's; the one before it is [`CURRENT`].
const SECOND: Generation = Generation(2);

type Change = fn(&mut Cluster);
/// What is wrong, the invariant that says so with a piece of its text, and how it comes about.
type Broken = (&'static str, (&'static str, &'static str), Change);

#[test]
fn each_broken_invariant_is_found_under_its_id() {
    let tables = [&TASKS[..], &CHECKPOINTS[..], &NODES[..], &LEDGERS[..], &SHARED[..]];
    for (wrong, (id, text), make_wrong) in tables.into_iter().flatten() {
        let mut c = sound();
        make_wrong(&mut c);
        let found = invariants::check(&c);
        let told = found.iter().any(|violation| violation.id == *id && violation.text.contains(text));
        assert!(told, "{wrong}: {found:?}");
    }
}

/// A look at what an event touched finds there what a look at everything finds, but for what the whole shares.
#[test]
fn a_check_of_the_touched_part_finds_what_is_broken_in_it_and_nothing_elsewhere() {
    for (wrong, (id, text), make_wrong) in TASKS.iter().chain(&CHECKPOINTS).chain(&NODES).chain(&LEDGERS) {
        let mut c = sound();
        let (tasks, nodes) = (BTreeSet::from([TASK]), c.nodes.keys().copied().collect());
        let none = BTreeSet::new();
        assert_eq!(invariants::check_part(&c, &tasks, &nodes), [], "before {wrong}");
        make_wrong(&mut c);
        let nowhere = invariants::check_part(&c, &none, &BTreeSet::new());
        assert_eq!(nowhere, [], "{wrong}");
        let found = invariants::check_part(&c, &tasks, &nodes);
        let told = found.iter().any(|violation| violation.id == *id && violation.text.contains(text));
        assert!(told, "{wrong}: {found:?}");
    }
}

const ORDER: (&str, &str) = ("INV-02", "generations of task 1 are out of order");
const INDEXES: (&str, &str) = ("INV-11", "its indexes say otherwise");

const TASKS: [Broken; 10] = [
    ("two attempts of one generation", ORDER, |c| task(c).attempts[0].generation = SECOND),
    ("an attempt older than the one before it", ORDER, |c| task(c).attempts[0].generation = Generation(9)),
    ("an older attempt that goes on", ORDER, |c| task(c).attempts[0].end = None),
    ("a generation that no attempt has", ORDER, |c| task(c).generation = Generation(3)),
    ("a waiting task that no plan will see", INDEXES, |c| {
        waits(c);
        c.queue.clear();
    }),
    ("a running task in the queue", INDEXES, |c| {
        let mut waiting = c.clone();
        waits(&mut waiting);
        c.queue = waiting.queue;
    }),
    ("a running task that no tick will see", INDEXES, |c| {
        c.active.remove(&TASK);
    }),
    ("a held task among the active ones", INDEXES, |c| {
        ends(c);
        task(c).phase = Phase::Held { reason: HoldReason::User };
    }),
    ("a phase on a node without an attempt", INDEXES, ends),
    ("an attempt under way of a task that waits", INDEXES, |c| {
        waits(c);
        task(c).attempts[1].end = None;
    }),
];

const BELOW: (&str, &str) = ("INV-06", "generation 2 of task 1 started below its checkpoint");

const CHECKPOINTS: [Broken; 4] = [
    ("a start from nothing", BELOW, |c| task(c).attempts[1].resumed = None),
    ("a start from an older checkpoint", BELOW, |c| {
        task(c).attempts[1].resumed = Some(checkpoint(6, CURRENT));
    }),
    ("a start below what a fall-back had found", ("INV-06", "generation 3"), |c| {
        task(c).attempts[1].fell_back = 1;
        third_attempt(c, Some(5));
    }),
    ("a start from nothing after one that was never made", ("INV-06", "generation 3"), |c| {
        (task(c).attempts[1].resumed, task(c).attempts[1].started_at) = (None, None);
        third_attempt(c, None);
    }),
];

const LOOKED_FOR: (&str, &str) = ("INV-03", "is not where it is looked for");
const UNKNOWN_HOLDER: (&str, &str) = ("INV-03", "which does not know");
const FREE: (&str, &str) = ("INV-03", "is free but nobody will end it");

const NODES: [Broken; 8] = [
    ("a node that is not among the live ones", LOOKED_FOR, |c| {
        c.live.remove(&IDLE);
    }),
    ("a gone node among the live ones", LOOKED_FOR, |c| {
        c.live.insert(GONE);
    }),
    ("a node held for another generation", UNKNOWN_HOLDER, |c| node(c, MINE).holder = Some((TASK, CURRENT))),
    ("a node held by a task on another node", UNKNOWN_HOLDER, |c| {
        node(c, IDLE).holder = Some((TASK, SECOND));
    }),
    ("a gone node that is held", UNKNOWN_HOLDER, |c| {
        node(c, MINE).state = NodeState::Gone;
        c.live.remove(&MINE);
    }),
    ("a free node since never", FREE, |c| node(c, IDLE).idle_since = None),
    ("a free node that boots since never", FREE, |c| node(c, BOOTING).idle_since = None),
    ("a task on a node that is gone", ("INV-03", "task 1 is on node 1, which is gone"), |c| {
        node(c, MINE).holder = None;
        node(c, MINE).state = NodeState::Gone;
        c.live.remove(&MINE);
    }),
];

const QUEUE: (&str, &str) = ("INV-11", "task 1 is queued and does not wait, or is queued twice");

/// What no single task or node can show.
const SHARED: [Broken; 5] = [
    ("a task in the queue that does not wait", QUEUE, |c| {
        let mut waiting = c.clone();
        waits(&mut waiting);
        c.queue = waiting.queue;
    }),
    ("a waiting task twice in the queue", QUEUE, |c| {
        waits(c);
        let other = QueueKey { submitted: Timestamp(1), ..*c.queue.first().unwrap() };
        c.queue.insert(other);
    }),
    ("two nodes with one launch key", ("INV-04", "node 2 has the launch key of another"), |c| {
        node(c, IDLE).key = EffectKey("k1".into());
    }),
    ("one instance on two bills", ("INV-03", "is in the ledger of node 2 and of another"), |c| {
        node(c, IDLE).instance = Some(InstanceId("i-1".into()));
    }),
    ("one instance on two bills, one of them an orphan's", ("INV-03", "and of another"), |c| {
        node(c, NEW).instance = Some(InstanceId("i-1".into()));
    }),
];

const LEDGER: (&str, &str) = ("INV-09", "the ledger of node 1 does not add up");

const LEDGERS: [Broken; 9] = [
    ("a gap", LEDGER, |c| segment(c, 1).start = Timestamp(59_999)),
    ("an overlap", LEDGER, |c| {
        segment(c, 1).start = Timestamp(50_000);
    }),
    ("an overlap on an orphan", ("INV-09", "node 6"), |c| {
        let end = node(c, NEW).ledger.segments[0].start + Span(1);
        earlier_segment(c, end);
    }),
    ("an amount that is not price times time", LEDGER, |c| segment(c, 0).amount.0 += 1),
    ("a segment without length", LEDGER, |c| {
        let start = segment(c, 0).start;
        let mut empty = segment(c, 0).clone();
        (empty.end, empty.amount) = (Some(start), Usd::ZERO);
        node(c, MINE).ledger.segments.insert(0, empty);
    }),
    ("a segment from the future", LEDGER, |c| {
        let later = c.now + Span(1);
        let (closed, open) = (segment(c, 0).quote.price.cost(later.since(segment(c, 0).start)), 1);
        (segment(c, 0).end, segment(c, 0).amount) = (Some(later), closed);
        segment(c, open).start = later;
    }),
    ("a node that is up and costs nothing any more", LEDGER, |c| {
        let now = c.now;
        node(c, MINE).ledger.segments.truncate(1);
        let amount = segment(c, 0).quote.price.cost(now.since(segment(c, 0).start));
        (segment(c, 0).end, segment(c, 0).amount) = (Some(now), amount);
    }),
    ("a node that is gone and goes on costing", LEDGER, |c| node(c, MINE).state = NodeState::Gone),
    ("a node that costs before it was launched", LEDGER, |c| node(c, MINE).launched_at = None),
];

#[test]
fn what_looks_odd_and_is_right_is_not_found() {
    let odd: [(&str, Change); 9] = [
        ("two attempts, nodes in every state, an orphan", |_| {}),
        ("a start from the newest checkpoint", |c| {
            task(c).attempts[1].resumed = Some(checkpoint(7, CURRENT));
        }),
        ("a start from a newer checkpoint than was told", |c| {
            task(c).attempts[1].resumed = Some(checkpoint(8, CURRENT));
        }),
        ("nothing restored yet", |c| {
            (task(c).attempts[1].resumed, task(c).attempts[1].started_at) = (None, None);
        }),
        ("newer checkpoints were damaged", |c| {
            (task(c).attempts[1].resumed, task(c).attempts[1].fell_back) = (None, 1);
        }),
        ("damaged once, and not expected again", |c| {
            task(c).attempts[1].fell_back = 2;
            task(c).attempts[1].resumed = Some(checkpoint(5, CURRENT));
            third_attempt(c, Some(5));
        }),
        ("an orphan with the key of its launch", |c| node(c, NEW).key = EffectKey("k5".into())),
        ("an orphan that was up again after its end", |c| {
            earlier_segment(c, Timestamp(3));
        }),
        ("a gone node and a live one with the same instance", |c| {
            node(c, GONE).instance = Some(InstanceId("i-1".into()));
        }),
    ];
    for (what, make_odd) in odd {
        let mut c = sound();
        make_odd(&mut c);
        assert_eq!(invariants::check(&c), [], "{what}");
    }
}

/// A task in its second attempt, on a node with two segments; nodes in every state, one of them an orphan's.
fn sound() -> Cluster {
    let mut feed = Feed::new();
    feed.node(MINE, 2);
    feed.node(IDLE, 2);
    feed.node(REQUESTED, 0);
    feed.node(BOOTING, 1);
    feed.node(GONE, 2);
    feed.fact(Fact::NodeGone { node: GONE, cause: spotq_model::GoneCause::Crashed, ended_at: feed.at });
    feed.fact(Fact::NodeOrphaned {
        node: NEW,
        key: EffectKey("orphan".into()),
        instance: InstanceId("i-6".into()),
        pool: offer(POOL, "0.31").build().pool,
    });
    feed.attempt(CURRENT, None, 4);
    feed.fact(Fact::CheckpointCommitted {
        task: TASK,
        generation: CURRENT,
        checkpoint: checkpoint(7, CURRENT),
    });
    let (task, generation, end) = (TASK, CURRENT, AttemptEnd::Requeued);
    feed.fact(Fact::AttemptEnded { task, generation, end, exit: None, floor: None });
    feed.at = Timestamp(59_000);
    feed.attempt(SECOND, Some(checkpoint(7, CURRENT)), 4);
    let segments = &mut node(&mut feed.c, MINE).ledger.segments;
    segments.remove(0);
    assert_eq!((segments.len(), segments[1].start), (2, Timestamp(60_000)), "two segments of this node");
    feed.c
}

/// Gives the orphan another segment before its own.
fn earlier_segment(c: &mut Cluster, end: Timestamp) {
    let mut earlier = node(c, MINE).ledger.segments[0].clone();
    (earlier.start, earlier.end) = (Timestamp(1), Some(end));
    earlier.amount = earlier.quote.price.cost(end.since(earlier.start));
    node(c, NEW).ledger.segments.insert(0, earlier);
}

fn third_attempt(c: &mut Cluster, resumed: Option<u64>) {
    let mut third = task(c).attempts[1].clone();
    task(c).attempts[1].end = Some(AttemptEnd::Requeued);
    (third.generation, third.fell_back) = (Generation(3), 0);
    third.started_at = Some(third.placed_at);
    third.resumed = resumed.map(|sequence| checkpoint(sequence, CURRENT));
    task(c).attempts.push(third);
    task(c).generation = Generation(3);
    node(c, MINE).holder = Some((TASK, Generation(3)));
}

fn ends(c: &mut Cluster) {
    task(c).attempts[1].end = Some(AttemptEnd::Requeued);
}

/// As the end of its attempt leaves a task.
fn waits(c: &mut Cluster) {
    let event = Fact::AttemptEnded {
        task: TASK,
        generation: SECOND,
        end: AttemptEnd::Requeued,
        exit: None,
        floor: None,
    };
    spotq_core::apply(c, &spotq_model::Event { at: c.now, fact: event }).unwrap();
}

fn task(c: &mut Cluster) -> &mut Task {
    let TaskId { job, index } = TASK;
    Arc::make_mut(Arc::make_mut(c.jobs.get_mut(&job).unwrap()).tasks.get_mut(&index).unwrap())
}

fn node(c: &mut Cluster, id: NodeId) -> &mut Node {
    Arc::make_mut(c.nodes.get_mut(&id).unwrap())
}

fn segment(c: &mut Cluster, number: usize) -> &mut spotq_core::Segment {
    &mut node(c, MINE).ledger.segments[number]
}
