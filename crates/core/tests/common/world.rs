//! The world round a cluster: what is due is done, what was said is heard. One honest round after the other brings every
//! task to its end.

use std::collections::BTreeMap;

use spotq_core::{NodeState, Phase, Policies, due, is_current};
use spotq_model::{
    Effect, Event, Fact, Generation, GoneCause, Input, InstanceId, InstanceSeen, LaunchAnswer, NodeId, Offer,
    Report, Span, TaskId, Timestamp,
};
use spotq_testkit::offer;

use super::checked::Checked;
use super::cloud::Cloud;
use super::workers::{CheckpointStore, Stage, Workers};

/// How much time an honest round takes.
const ROUND: Span = Span::secs(5);
/// Rounds within which an honest world finishes all work: the longest cool-downs and pauses, several times over.
const ROUNDS_MAX: u32 = 2000;
/// Rounds within which idle nodes and strangers are gone: several times the idle time and the lag of a list.
const IDLE_ROUNDS_MAX: u32 = 40;
/// Jobs of this name end with exit code 1.
pub const FAILING: &str = "fails";

#[derive(Debug)]
pub struct World {
    pub core: Checked,
    pub cloud: Cloud,
    pub workers: Workers,
    pub stores: BTreeMap<TaskId, CheckpointStore>,
    /// The wall clock; it can be set back.
    pub clock: Timestamp,
    pub offers: Vec<Offer>,
    /// A list that the cloud gave a while ago.
    pub old_list: (Timestamp, Vec<InstanceSeen>),
}

impl World {
    pub fn new() -> World {
        let policies = Policies {
            nodes_max: 4,
            node_ttl: Span::secs(3600),
            idle_ttl: Span::secs(30),
            launch_timeout: Span::secs(120),
            list_lag: Span::secs(30),
            ..Policies::default()
        };
        World {
            core: Checked::new(policies),
            cloud: Cloud::default(),
            workers: Workers::default(),
            stores: BTreeMap::new(),
            clock: Timestamp(1_000_000),
            offers: prices(300),
            old_list: (Timestamp(0), Vec::new()),
        }
    }

    pub fn feed(&mut self, input: &Input) -> Vec<Event> {
        self.core.feed(self.clock, input)
    }

    /// What changes nothing: repetitions and voices from the past.
    pub fn feed_in_vain(&mut self, input: &Input, why: &str) {
        assert_eq!(self.feed(input), [], "{why}: {input:?}");
    }

    /// Faults stop: every task gets done, and then nothing is paid any more.
    pub fn calm(&mut self) {
        self.clock = self.clock.max(self.core.cluster.now);
        self.offers = prices(300);
        let held: Vec<_> = self.core.cluster.jobs.keys().copied().collect();
        held.into_iter().for_each(|job| drop(self.feed(&Input::Release { job })));
        self.reconnect();
        self.rounds_until(ROUNDS_MAX, "the tasks are done", World::all_done);
        self.rounds_until(IDLE_ROUNDS_MAX, "nothing is paid any more", World::nothing_is_paid);
        self.core.check_replay();
    }

    fn rounds_until(&mut self, most: u32, what: &str, holds: fn(&World) -> bool) {
        for _ in 0..most {
            if holds(self) {
                return;
            }
            self.round();
        }
        panic!("{most} honest rounds, and it does not hold that {what}:\n{}", self.unfinished());
    }

    /// The cloud, the workers and the scheduler do what they owe each other.
    pub fn round(&mut self) {
        self.clock = self.clock + ROUND;
        for instance in self.cloud.reclaim(self.clock) {
            self.feed(&Input::InstanceGone { instance, cause: GoneCause::Preempted, at: self.clock });
        }
        let offers = self.offers.clone();
        self.feed(&Input::Offers { offers: offers.clone() });
        self.feed(&Input::Plan { offers });
        self.feed(&Input::Tick);
        for effect in due(&self.core.cluster, self.clock) {
            self.serve(effect);
        }
        self.join();
        self.work();
        let list = Input::Instances { asked_at: self.clock, instances: self.cloud.instances.clone() };
        self.feed(&list);
    }

    pub fn serve(&mut self, effect: Effect) {
        match effect {
            Effect::Launch { node, key, pool, .. } => {
                let InstanceSeen { instance, launched_at, .. } =
                    self.cloud.launch(self.clock, &key, Some(node), &pool);
                let quote = self.core.cluster.nodes[&node].quote.clone();
                self.feed(&Input::LaunchAnswered {
                    node,
                    answer: LaunchAnswer::Launched { instance, quote, launched_at },
                });
            }
            Effect::Terminate { instance, .. } => {
                self.cloud.end(&instance, GoneCause::Terminated, self.clock);
                self.feed(&Input::InstanceGone { instance, cause: GoneCause::Terminated, at: self.clock });
            }
            Effect::Drill { node, instance, notice } => {
                self.cloud.notices.push((instance, self.clock + notice));
                self.feed(&Input::DrillAnswered { node, error: None });
            }
            Effect::Grant { node, task, generation } => {
                if self.is_up(node) {
                    let report = self.workers.grant(node, task, generation);
                    self.feed(&Input::Reported { node, task, generation, report });
                }
            }
            Effect::Stop { node, task, generation, .. } => {
                if self.workers.held(node).contains(&(task, generation)) {
                    self.workers.stop(node, task, generation);
                }
            }
        }
    }

    fn join(&mut self) {
        let booting = self.nodes_in(&[NodeState::Booting]);
        for node in booting {
            let held = self.workers.held(node);
            self.feed(&Input::WorkerJoined { node, held });
        }
    }

    /// Every worker opens a new session and says what it holds.
    fn reconnect(&mut self) {
        for node in self.nodes_in(&[NodeState::Booting, NodeState::Ready]) {
            let held = self.workers.held(node);
            self.feed(&Input::WorkerJoined { node, held });
        }
    }

    fn nodes_in(&self, states: &[NodeState]) -> Vec<NodeId> {
        let live = self.core.cluster.live_nodes().filter(|node| states.contains(&node.state));
        live.map(|node| node.id).filter(|node| self.is_up(*node)).collect()
    }

    /// Each worker goes on with each of its grants. What is no longer its own it drops.
    fn work(&mut self) {
        let grants: Vec<_> = self.workers.grants.keys().copied().collect();
        for (node, task, generation) in grants {
            if !self.is_up(node) || !is_current(&self.core.cluster, node, task, generation) {
                self.workers.grants.remove(&(node, task, generation));
                continue;
            }
            self.heed_notice(node, task, generation);
            let exit_code = i32::from(self.core.cluster.spec(task).is_some_and(|spec| spec.name == FAILING));
            let store = self.stores.entry(task).or_default();
            if let Some(report) = self.workers.work((node, task, generation), store, exit_code, self.clock) {
                self.feed(&Input::Reported { node, task, generation, report });
            }
        }
    }

    /// On a notice: tell it, save, and stop.
    fn heed_notice(&mut self, node: NodeId, task: TaskId, generation: Generation) {
        let Some(deadline) = self.instance(node).and_then(|instance| self.cloud.notice(&instance)) else {
            return;
        };
        let report = |report| Input::Reported { node, task, generation, report };
        self.feed(&report(Report::Noticed { deadline, source: "imds".into() }));
        if matches!(self.workers.grants.get(&(node, task, generation)), Some(Stage::Working(_))) {
            let checkpoint = self.stores.entry(task).or_default().commit(generation, self.clock);
            self.feed(&report(Report::Committed { checkpoint }));
        }
        self.workers.stop(node, task, generation);
    }

    fn instance(&self, node: NodeId) -> Option<InstanceId> {
        self.core.cluster.nodes.get(&node)?.instance.clone()
    }

    pub fn is_up(&self, node: NodeId) -> bool {
        self.instance(node).is_some_and(|instance| self.cloud.is_up(&instance))
    }

    fn all_done(&self) -> bool {
        self.core.cluster.jobs.values().flat_map(|job| job.tasks.values()).all(|task| task.is_done())
    }

    /// INV-03, from both sides: we know of no node, and the cloud has none.
    fn nothing_is_paid(&self) -> bool {
        self.core.cluster.live.is_empty()
            && self.cloud.instances.iter().all(|instance| instance.gone.is_some())
    }

    fn unfinished(&self) -> String {
        let c = &self.core.cluster;
        let tasks = c.jobs.values().flat_map(|job| job.tasks.values()).filter(|task| !task.is_done());
        let tasks: Vec<_> = tasks.map(|task| (task.id, &task.phase, task.last_attempt())).collect();
        let nodes: Vec<_> =
            c.live_nodes().map(|node| (node.id, node.state, &node.holder, &node.instance)).collect();
        let up: Vec<_> = self.cloud.instances.iter().filter(|instance| instance.gone.is_none()).collect();
        format!("{tasks:#?}\n{nodes:#?}\n{up:#?}")
    }

    /// INV-11: each task has one end in the log, and nothing about it after.
    pub fn check_ends(&self) {
        let mut ended = std::collections::BTreeSet::new();
        for event in &self.core.log {
            if let Some(task) = event.fact.task() {
                assert!(!ended.contains(&task), "INV-11: after the end of task {task}: {event:?}");
                if matches!(event.fact, Fact::TaskDone { .. }) {
                    ended.insert(task);
                }
            }
        }
        let pending_is_queued = self.core.cluster.queue.iter().all(|key| {
            self.core.cluster.task(key.task).is_some_and(|task| matches!(task.phase, Phase::Pending { .. }))
        });
        assert!(pending_is_queued, "the queue holds a task that does not wait");
    }
}

/// Five pools of three clouds. `level` moves the spot prices, in thousandths of a dollar; on demand costs 1.
pub fn prices(level: u64) -> Vec<Offer> {
    let spot = |pool, more: u64| {
        let price = format!("{}.{:03}", (level + more) / 1000, (level + more) % 1000);
        offer(pool, &price).on_demand("1").build()
    };
    vec![
        spot("aws/us-east-1/us-east-1a/t4/spot", 0),
        spot("aws/us-east-1/us-east-1b/t4/spot", 20),
        spot("gcp/us-central1/us-central1-a/l4/spot", 7),
        offer("aws/us-east-1/us-east-1a/t4/on-demand", "1").build(),
        offer("gcp/us-central1/us-central1-a/l4/on-demand", "1.1").build(),
    ]
}
