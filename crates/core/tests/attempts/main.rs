//! What becomes of attempts: how their ends are classified, what reports about them change, and what time alone does.
#![expect(clippy::unwrap_used, reason = "a test, helpers included, ends at the first surprise")]

mod classify;
mod reports;
mod time;

use std::sync::Arc;

use spotq_core::{
    Attempt, Cluster, Loss, NodeState, Phase, Policies, Stop, apply, classify, decide, is_current,
};
use spotq_model::{
    AttemptEnd, Checkpoint, EffectKey, EndWhy, Event, Exit, Fact, Generation, GoneCause, Input, InstanceId,
    InstanceSeen, JobId, JobSpec, NodeId, Offer, Outcome, Progress, Report, Retry, Span, StopWhy, TaskId,
    Timestamp, WaitReason,
};
use spotq_testkit::{job, offer};

const TASK: TaskId = TaskId { job: JobId(1), index: 0 };
const NODE: NodeId = NodeId(1);
const FIRST: Generation = Generation(1);
const POOL: &str = "aws/us-east-1/us-east-1a/t4/spot";
/// How long after its request a node expires.
const LIFE: Span = Span::secs(86_400);

/// A cluster with one task, whose command runs.
struct Running {
    c: Cluster,
    at: Timestamp,
    /// Where the task is, or was last.
    node: NodeId,
}

impl Running {
    fn start(spec: JobSpec) -> Running {
        let mut world = Running { c: Cluster::default(), at: Timestamp(1_000_000), node: NodeId(0) };
        world.fact(Fact::JobSubmitted {
            job: TASK.job,
            uuid: "feed".into(),
            client_key: "key".into(),
            spec: Arc::new(spec),
        });
        world.run_again(FIRST);
        world
    }

    fn run_again(&mut self, generation: Generation) {
        self.node = self.place(generation, true);
        for report in [Report::Accepted, Report::Restored { from: None, fell_back: 0 }, Report::Started] {
            self.report(report);
        }
        assert!(matches!(self.phase(), Phase::Running { .. }), "{:?}", self.phase());
    }

    fn accept_again(&mut self, generation: Generation) {
        self.node = self.place(generation, true);
        self.report(Report::Accepted);
    }

    /// Puts the task on a new node; `up`: one that is there already.
    fn place(&mut self, generation: Generation, up: bool) -> NodeId {
        let Offer { pool, shape, quote, .. } = offer(POOL, "0.31").build();
        let node = self.c.nodes.last_key_value().map_or(NODE, |(last, _)| last.next());
        let (key, expires_at) = (EffectKey(format!("k{node}")), self.at + LIFE);
        self.fact(Fact::NodeRequested { node, key, pool, shape, quote: quote.clone(), expires_at });
        if up {
            let instance = if node == NODE { "i".into() } else { format!("i{node}") };
            self.fact(Fact::NodeLaunched { node, instance: InstanceId(instance), quote, billed_from: None });
            self.fact(Fact::NodeJoined { node });
        }
        self.fact(Fact::AttemptPlaced { task: TASK, generation, node });
        node
    }

    fn fact(&mut self, fact: Fact) {
        apply(&mut self.c, &Event { at: self.at, fact }).unwrap();
    }

    fn input(&mut self, input: Input) {
        for event in self.decided(&input) {
            apply(&mut self.c, &event).unwrap();
        }
    }

    fn decided(&self, input: &Input) -> Vec<Event> {
        decide(&self.c, &Policies::default(), self.at, input)
    }

    fn report(&mut self, report: Report) {
        let generation = self.c.task(TASK).unwrap().generation;
        self.input(Input::Reported { node: self.node, task: TASK, generation, report });
    }

    /// Whether the report is news.
    fn hears(&mut self, report: Report) -> bool {
        let before = self.c.version;
        self.report(report);
        self.c.version > before
    }

    fn fail(&mut self, exit_code: i32) {
        self.report(Report::Finished { exit: exit(exit_code) });
        self.later(Policies::default().settle);
        self.input(Input::Tick);
    }

    fn preempt(&mut self) {
        let instance = self.c.nodes[&self.node].instance.clone().unwrap();
        self.input(Input::InstanceGone { instance, cause: GoneCause::Preempted, at: self.at });
    }

    fn later(&mut self, span: Span) {
        self.at = self.at + span;
    }

    fn phase(&self) -> &Phase {
        &self.c.task(TASK).unwrap().phase
    }

    fn stop(&self) -> Option<StopWhy> {
        self.c.task(TASK)?.under_way()?.stop.map(|stop| stop.why)
    }
}

fn checkpoint(sequence: u64) -> Checkpoint {
    spotq_testkit::checkpoint(sequence, FIRST, Timestamp(1_000_000))
}

fn exit(code: i32) -> Exit {
    spotq_testkit::exit(code, Timestamp(1_000_000))
}
