//! A cluster that is watched: every input goes through the real `decide` and `apply`, and after each one everything
//! that must hold is checked against what the events alone say.

use std::collections::BTreeMap;

use spotq_core::{Cluster, Phase, Policies, apply, decide, due, invariants, replay};
use spotq_finops::{job_cost, job_report};
use spotq_model::{Event, EventRecord, Fact, Input, NodeId, Span, TaskId, Timestamp, Usd, UsdPerHour};

#[derive(Debug)]
pub struct Checked {
    pub cluster: Cluster,
    pub policies: Policies,
    pub log: Vec<Event>,
    /// Made from the same events after a journey through JSON.
    shadow: Cluster,
    /// Done tasks as they were when they became so.
    done: BTreeMap<TaskId, spotq_core::Task>,
    /// Since when a task waits, and how long it waited before.
    waits: BTreeMap<TaskId, (Option<Timestamp>, Span)>,
    bills: BTreeMap<NodeId, Bill>,
    /// The newest committed checkpoint that is not quarantined.
    committed: BTreeMap<TaskId, Option<u64>>,
}

/// What a node costs, told by its events alone.
#[derive(Debug, Default)]
struct Bill {
    /// From each moment on, what an hour costs; nothing while there is no instance.
    prices: Vec<(Timestamp, Option<UsdPerHour>)>,
}

impl Checked {
    pub fn new(policies: Policies) -> Checked {
        Checked {
            cluster: Cluster::default(),
            policies,
            log: Vec::new(),
            shadow: Cluster::default(),
            done: BTreeMap::new(),
            waits: BTreeMap::new(),
            bills: BTreeMap::new(),
            committed: BTreeMap::new(),
        }
    }

    /// Decides, applies and checks; returns what became true.
    pub fn feed(&mut self, now: Timestamp, input: &Input) -> Vec<Event> {
        let events = decide(&self.cluster, &self.policies, now, input);
        let again = decide(&self.cluster.clone(), &self.policies, now, input);
        assert_eq!(events, again, "the same question had two answers: {input:?}");
        for event in &events {
            apply(&mut self.cluster, event)
                .unwrap_or_else(|e| panic!("{e}\nafter {input:?}\nwhich gave {events:#?}"));
            apply(&mut self.shadow, &through_json(event)).unwrap();
            self.watch(event);
            self.log.push(event.clone());
        }
        self.check(input);
        events
    }

    /// What was decided so far gives the same state from nothing, and the state itself survives JSON.
    pub fn check_replay(&self) {
        let mut again = Cluster::default();
        replay(&mut again, &self.log).unwrap();
        assert_eq!(again, self.cluster, "a replay from the start gives another state");
        let text = serde_json::to_string(&self.cluster).unwrap();
        let read: Cluster = serde_json::from_str(&text).unwrap();
        assert_eq!(read, self.cluster, "a snapshot reads back as another state");
    }

    fn check(&self, input: &Input) {
        let told = || format!("after {input:?}");
        assert_eq!(invariants::check(&self.cluster), [], "{}", told());
        assert_eq!(self.cluster, self.shadow, "events changed in JSON, {}", told());
        for (id, done) in &self.done {
            assert_eq!(self.cluster.task(*id), Some(done), "INV-11: a done task changed, {}", told());
        }
        let keys: Vec<_> =
            due(&self.cluster, self.cluster.now).iter().map(spotq_model::Effect::key).collect();
        let again: Vec<_> =
            due(&self.shadow, self.cluster.now).iter().map(spotq_model::Effect::key).collect();
        assert_eq!(keys, again, "INV-04: the same state owes different effects, {}", told());
        let unique: std::collections::BTreeSet<_> = keys.iter().collect();
        assert_eq!(unique.len(), keys.len(), "INV-04: one key for two effects, {}", told());
        self.check_waits();
        self.check_money();
    }

    /// INV-11: every pending second has a reason.
    fn check_waits(&self) {
        for task in self.cluster.jobs.values().flat_map(|job| job.tasks.values()) {
            let (since, before) = self.waits[&task.id];
            let current = since.map_or(Span::ZERO, |since| self.cluster.now.since(since));
            let known: Span = task.waited.values().copied().sum();
            let open = match task.phase {
                Phase::Pending { .. } => self.cluster.now.since(task.phase_since),
                _ => Span::ZERO,
            };
            assert_eq!(
                known + open,
                before + current,
                "INV-11: pending time of task {} has no reason",
                task.id
            );
        }
    }

    /// INV-09: the bill is what the events say, the jobs' costs are the bill, and a report printed twice is the same.
    fn check_money(&self) {
        let now = self.cluster.now;
        for node in self.cluster.nodes.values() {
            let total: Usd = node.ledger.segments.iter().map(|s| s.amount_at(now)).sum();
            let expected = self.bills.get(&node.id).map_or(Usd::ZERO, |bill| bill.at(now));
            assert_eq!(total, expected, "INV-09: node {} costs something else than its events say", node.id);
        }
        let segments = self.cluster.nodes.values().flat_map(|node| &node.ledger.segments);
        let held: Usd = segments.filter(|s| s.holder.is_some()).map(|s| s.amount_at(now)).sum();
        let tasks = self.cluster.jobs.values().flat_map(|job| job.tasks.keys().map(|index| (job.id, *index)));
        let mut billed = Usd::ZERO;
        for (job, index) in tasks {
            let id = TaskId { job, index };
            let cost = job_cost(&self.cluster, id, now);
            assert_eq!(job_report(&self.cluster, id, now), job_report(&self.shadow, id, now), "INV-09");
            assert_eq!(cost.billed, self.cluster.spend(id, now), "INV-09: a bill and a spend of task {id}");
            let lines: Usd = cost.waste.iter().map(|line| line.amount).sum();
            assert_eq!(lines, cost.wasted, "INV-09: the causes of waste of task {id}");
            assert!(
                cost.wasted >= Usd::ZERO && cost.wasted <= cost.billed,
                "INV-09: waste of task {id}: {cost:?}"
            );
            let wasted_time: Span = cost.waste.iter().map(|line| line.time).sum();
            assert_eq!(cost.useful_time + wasted_time, cost.billed_time, "INV-09: the time of task {id}");
            billed += cost.billed;
        }
        assert_eq!(billed, held, "INV-09: what the jobs cost is what their nodes cost");
    }

    fn watch(&mut self, event: &Event) {
        let at = self.cluster.now;
        self.watch_task(at, &event.fact);
        self.watch_checkpoints(&event.fact);
        match &event.fact {
            Fact::NodeLaunched { node, quote, billed_from, .. } => {
                let asked = self.cluster.nodes[node].requested_at;
                let start = billed_from.map_or(at, |from| from.max(asked).min(at));
                self.cut(start, *node, Some(quote.price));
            }
            Fact::NodeRepriced { node, quote } => self.cut(at, *node, Some(quote.price)),
            Fact::NodeOrphaned { node, .. } => {
                let price = self.cluster.nodes[node].quote.price;
                self.cut(at, *node, Some(price));
            }
            Fact::AttemptPlaced { node, .. } => {
                let price = self.bills.get(node).and_then(|bill| bill.prices.last()?.1);
                if price.is_some() {
                    self.cut(at, *node, price);
                }
            }
            Fact::NodeGone { node, ended_at, .. } => self.cut(at.min(*ended_at), *node, None),
            _ => {}
        }
    }

    fn cut(&mut self, at: Timestamp, node: NodeId, price: Option<UsdPerHour>) {
        let bill = self.bills.entry(node).or_default();
        // An end that is heard of late takes back what was thought to come after it.
        bill.prices.retain(|(from, _)| *from < at);
        bill.prices.push((at, price));
    }

    fn watch_task(&mut self, at: Timestamp, fact: &Fact) {
        let (id, waits) = match fact {
            Fact::JobSubmitted { job, .. } => (TaskId::only(*job), true),
            Fact::TaskReleased { task } | Fact::TaskWaits { task, .. } | Fact::AttemptEnded { task, .. } => {
                (*task, true)
            }
            Fact::TaskHeld { task, .. } | Fact::AttemptPlaced { task, .. } | Fact::TaskDone { task, .. } => {
                (*task, false)
            }
            _ => return,
        };
        let (since, total) = self.waits.entry(id).or_default();
        if let Some(before) = *since {
            *total += at.since(before);
        }
        *since = waits.then_some(at);
        if matches!(fact, Fact::TaskDone { .. }) {
            let done = self.cluster.task(id).unwrap().clone();
            assert!(self.done.insert(id, done).is_none(), "INV-11: task {id} was done twice");
        }
    }

    /// INV-06: a command never starts below what was committed, unless that was found damaged.
    fn watch_checkpoints(&mut self, fact: &Fact) {
        match fact {
            Fact::CheckpointCommitted { task, checkpoint, .. } => {
                self.committed.insert(*task, Some(checkpoint.sequence));
            }
            Fact::AttemptRestored { task, from, fell_back, .. } if *fell_back > 0 => {
                self.committed.insert(*task, from.as_ref().map(|from| from.sequence));
            }
            Fact::AttemptStarted { task, .. } => {
                let newest = self.committed.get(task).copied().flatten();
                let resumed =
                    self.cluster.task(*task).and_then(|t| t.under_way()?.resumed.as_ref()?.sequence.into());
                assert!(resumed >= newest, "INV-06: task {task} resumed at {resumed:?}, below {newest:?}");
            }
            _ => {}
        }
    }
}

impl Bill {
    /// What is to be paid up to `now`.
    fn at(&self, now: Timestamp) -> Usd {
        let ends = self.prices.iter().skip(1).map(|(from, _)| *from).chain([now]);
        let pieces = self.prices.iter().zip(ends);
        pieces.filter_map(|((from, price), end)| Some(price.as_ref()?.cost(end.since(*from)))).sum()
    }
}

fn through_json(event: &Event) -> Event {
    let record = EventRecord { schema: spotq_model::EVENT_SCHEMA, event: event.clone() };
    let text = serde_json::to_string(&record).unwrap();
    serde_json::from_str::<EventRecord>(&text).unwrap().event
}
