//! The state of the cluster. Only `apply` changes it; everything else reads.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use spotq_model::{
    AttemptEnd, Checkpoint, EffectKey, EndWhy, Exit, Generation, GoneCause, HoldReason, InstanceId, JobId,
    JobSpec, NodeId, Outcome, Pool, Progress, Quote, RefusalKind, Scope, Shape, Span, StopWhy, TaskId,
    Timestamp, Usd, Version, WaitReason,
};

use crate::ledger::{Ledger, Segment};

/// Everything that must survive a restart. Jobs, tasks and nodes are shared between copies of it until one of them
/// changes, so that a copy for a snapshot is cheap.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cluster {
    /// How many events made this state.
    pub version: Version,
    /// The time of the newest event; time never runs backwards in here.
    pub now: Timestamp,
    pub jobs: BTreeMap<JobId, Arc<Job>>,
    pub by_client_key: BTreeMap<Arc<str>, JobId>,
    /// Tasks that wait for a node, best first.
    pub queue: BTreeSet<QueueKey>,
    /// Tasks with an attempt under way.
    pub active: BTreeSet<TaskId>,
    pub nodes: BTreeMap<NodeId, Arc<Node>>,
    /// Nodes that are not gone.
    pub live: BTreeSet<NodeId>,
    /// What refused lately. One entry per scope.
    pub cool_downs: Vec<CoolDown>,
}

/// The order of the queue: higher priority first, then who came first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct QueueKey {
    pub priority: std::cmp::Reverse<i32>,
    pub submitted: Timestamp,
    pub task: TaskId,
}

impl QueueKey {
    /// Where `task` of `job` stands while it waits.
    #[must_use]
    pub fn of(job: &Job, task: TaskId) -> QueueKey {
        QueueKey { priority: std::cmp::Reverse(job.spec.priority), submitted: job.submitted_at, task }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    pub id: JobId,
    /// Names cloud objects and prefixes.
    pub uuid: String,
    pub client_key: Arc<str>,
    pub spec: Arc<JobSpec>,
    pub submitted_at: Timestamp,
    pub tasks: BTreeMap<u32, Arc<Task>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Task {
    pub id: TaskId,
    pub phase: Phase,
    /// When the phase began.
    pub phase_since: Timestamp,
    /// The newest attempt's; 0 before the first.
    pub generation: Generation,
    /// The next generation is higher than this, whatever `generation` says: set when the checkpoint store has seen more.
    pub floor: Generation,
    /// Every attempt, in order of generation. Only the last may be under way.
    pub attempts: Vec<Attempt>,
    /// The newest committed checkpoint over all attempts.
    pub checkpoint: Option<Checkpoint>,
    pub progress: Option<Progress>,
    pub preemptions: u32,
    pub failures: u32,
    /// Node losses since the last new checkpoint.
    pub fruitless: u32,
    /// Time that commands ran, over all ended attempts.
    pub ran: Span,
    /// Pending time by reason, for ended waits.
    pub waited: BTreeMap<String, Span>,
}

/// Where a task is in its life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "phase")]
pub enum Phase {
    Held {
        reason: HoldReason,
    },
    Pending {
        reason: WaitReason,
        next_try: Timestamp,
    },
    /// A node is on its way, or has come and is being told.
    Provisioning {
        node: NodeId,
    },
    Restoring {
        node: NodeId,
    },
    Running {
        node: NodeId,
    },
    /// The node goes away at the deadline, or we asked for a stop by then.
    Draining {
        node: NodeId,
        deadline: Timestamp,
    },
    /// The command is over with a bad exit; until `until` we see whether its node was lost.
    Completing {
        node: NodeId,
        until: Timestamp,
    },
    Done {
        outcome: Outcome,
    },
}

impl Phase {
    /// One word for tables and JSON.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Phase::Held { .. } => "held",
            Phase::Pending { .. } => "pending",
            Phase::Provisioning { .. } => "provisioning",
            Phase::Restoring { .. } => "restoring",
            Phase::Running { .. } => "running",
            Phase::Draining { .. } => "draining",
            Phase::Completing { .. } => "completing",
            Phase::Done { .. } => "done",
        }
    }

    /// The node that the task is on or waits for.
    #[must_use]
    pub fn node(&self) -> Option<NodeId> {
        match self {
            Phase::Provisioning { node }
            | Phase::Restoring { node }
            | Phase::Running { node }
            | Phase::Draining { node, .. }
            | Phase::Completing { node, .. } => Some(*node),
            Phase::Held { .. } | Phase::Pending { .. } | Phase::Done { .. } => None,
        }
    }

    /// A worker has taken the task, and the task is not done.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        match self {
            Phase::Restoring { .. }
            | Phase::Running { .. }
            | Phase::Draining { .. }
            | Phase::Completing { .. } => true,
            Phase::Held { .. } | Phase::Pending { .. } | Phase::Provisioning { .. } | Phase::Done { .. } => {
                false
            }
        }
    }
}

/// One placement of a task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    pub generation: Generation,
    pub node: NodeId,
    pub pool: Pool,
    pub placed_at: Timestamp,
    /// The worker has the grant; restore begins.
    pub accepted_at: Option<Timestamp>,
    /// The command runs.
    pub started_at: Option<Timestamp>,
    /// The command's process ended, as the worker's clock has it, within [started_at, ended_at].
    pub stopped_at: Option<Timestamp>,
    pub ended_at: Option<Timestamp>,
    pub end: Option<AttemptEnd>,
    pub exit: Option<Exit>,
    /// What it was restored from; `None` with `accepted_at` set means a first start.
    pub resumed: Option<Checkpoint>,
    /// How many newer checkpoints failed verification at the restore.
    pub fell_back: u32,
    /// The newest checkpoint that it committed itself.
    pub committed: Option<Checkpoint>,
    pub progress: Option<Progress>,
    /// When `progress` was made durable.
    pub progress_at: Option<Timestamp>,
    pub noticed_at: Option<Timestamp>,
    pub stop: Option<Stop>,
    /// A bad exit that is held for the settle time.
    pub held_exit: Option<Exit>,
}

/// A stop that we asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stop {
    pub why: StopWhy,
    pub asked_at: Timestamp,
    pub deadline: Timestamp,
}

/// An instance that we pay for, or asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    pub id: NodeId,
    pub key: EffectKey,
    pub pool: Pool,
    pub shape: Shape,
    pub quote: Quote,
    pub state: NodeState,
    pub instance: Option<InstanceId>,
    pub requested_at: Timestamp,
    pub launched_at: Option<Timestamp>,
    pub joined_at: Option<Timestamp>,
    pub gone_at: Option<Timestamp>,
    pub gone: Option<GoneCause>,
    pub ending: Option<EndWhy>,
    pub expires_at: Timestamp,
    pub notice: Option<NoticeSeen>,
    pub drill: Option<Drill>,
    /// Whose node it is now. Cleared when the attempt ends.
    pub holder: Option<(TaskId, Generation)>,
    pub idle_since: Option<Timestamp>,
    /// Why the cloud refused it, for people.
    pub refused: Option<(RefusalKind, String)>,
    pub ledger: Ledger,
}

/// Where a node is in its life. It only moves down this list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeState {
    /// The cloud has not answered yet.
    Requested,
    /// Accepted by the cloud; its worker has not joined.
    Booting,
    /// Its worker has joined.
    Ready,
    /// We want it gone and say so until it is.
    Ending,
    Gone,
}

impl NodeState {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            NodeState::Requested => "requested",
            NodeState::Booting => "booting",
            NodeState::Ready => "ready",
            NodeState::Ending => "ending",
            NodeState::Gone => "gone",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NoticeSeen {
    pub at: Timestamp,
    pub deadline: Timestamp,
    pub source: String,
}

/// A rehearsal that was asked for; `done` once the cloud has answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drill {
    pub notice: Span,
    pub done: bool,
    pub error: Option<String>,
}

/// A refusal that still holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoolDown {
    pub scope: Scope,
    pub kind: RefusalKind,
    pub until: Timestamp,
    /// Refusals in a row; each doubles the next cool-down up to a limit.
    pub strikes: u32,
    pub message: String,
}

impl Cluster {
    #[must_use]
    pub fn task(&self, id: TaskId) -> Option<&Task> {
        self.jobs.get(&id.job)?.tasks.get(&id.index).map(Arc::as_ref)
    }

    #[must_use]
    pub fn spec(&self, id: TaskId) -> Option<&Arc<JobSpec>> {
        self.jobs.get(&id.job).map(|job| &job.spec)
    }

    /// The attempt of `task` with this generation, if it is under way.
    #[must_use]
    pub fn attempt_under_way(&self, task: TaskId, generation: Generation) -> Option<&Attempt> {
        self.task(task)?.under_way().filter(|attempt| attempt.generation == generation)
    }

    /// The cool-down that holds for `pool` the longest.
    #[must_use]
    pub fn cool_down(&self, pool: &Pool, now: Timestamp) -> Option<&CoolDown> {
        self.cool_downs.iter().filter(|c| c.until > now && c.scope.covers(pool)).max_by_key(|c| c.until)
    }

    /// All nodes that this state refers to as alive.
    pub fn live_nodes(&self) -> impl Iterator<Item = &Node> {
        self.live.iter().filter_map(|id| self.nodes.get(id)).map(Arc::as_ref)
    }

    /// The node that the cloud calls `instance`.
    #[must_use]
    pub fn node_of_instance(&self, instance: &InstanceId) -> Option<&Node> {
        self.live_nodes().find(|node| node.instance.as_ref() == Some(instance))
    }

    /// All ledger segments of a task, in order of node and time.
    pub fn segments_of(&self, task: TaskId) -> impl Iterator<Item = (&Node, &Segment)> {
        let nodes: BTreeSet<NodeId> =
            self.task(task).map(|t| t.attempts.iter().map(|a| a.node).collect()).unwrap_or_default();
        nodes.into_iter().filter_map(|id| self.nodes.get(&id)).map(Arc::as_ref).flat_map(move |node| {
            node.ledger
                .segments
                .iter()
                .filter(move |s| s.holder.is_some_and(|(holder, _)| holder == task))
                .map(move |s| (node, s))
        })
    }

    /// What `task` has cost up to `now`, open segments included.
    #[must_use]
    pub fn spend(&self, task: TaskId, now: Timestamp) -> Usd {
        self.segments_of(task).map(|(_, segment)| segment.amount_at(now)).sum()
    }
}

impl Task {
    #[must_use]
    pub fn last_attempt(&self) -> Option<&Attempt> {
        self.attempts.last()
    }

    /// The attempt that has not ended.
    #[must_use]
    pub fn under_way(&self) -> Option<&Attempt> {
        self.attempts.last().filter(|attempt| attempt.end.is_none())
    }

    /// Running time over all attempts, as `time_limit` counts it.
    #[must_use]
    pub fn running_time(&self, now: Timestamp) -> Span {
        let current =
            self.under_way().and_then(|a| a.started_at).map_or(Span::ZERO, |start| now.since(start));
        self.ran + current
    }

    #[must_use]
    pub fn is_done(&self) -> bool {
        matches!(self.phase, Phase::Done { .. })
    }

    /// The generation that the next attempt gets.
    #[must_use]
    pub fn next_generation(&self) -> Generation {
        self.generation.max(self.floor).next()
    }
}
