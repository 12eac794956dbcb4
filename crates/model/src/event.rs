//! What became true (events) and what the world still owes (effects).

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{
    AttemptEnd, EffectKey, Generation, GoneCause, HoldReason, InstanceId, JobId, JobSpec, NodeId, Outcome,
    Pool, Quote, RefusalKind, Scope, Shape, Span, TaskId, Timestamp, WaitReason,
};

/// The version of the disk format. Old ones are read for ever.
pub const EVENT_SCHEMA: u16 = 1;

/// Something that became true at a time. Events are durable before anything acts on them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    pub at: Timestamp,
    pub fact: Fact,
}

/// An event as the store keeps it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventRecord {
    pub schema: u16,
    pub event: Event,
}

/// What became true.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "fact")]
pub enum Fact {
    JobSubmitted {
        job: JobId,
        uuid: String,
        client_key: String,
        spec: Arc<JobSpec>,
    },
    TaskHeld {
        task: TaskId,
        reason: HoldReason,
    },
    TaskReleased {
        task: TaskId,
    },
    /// The one reason why the task waits, and when it is looked at again.
    TaskWaits {
        task: TaskId,
        reason: WaitReason,
        next_try: Timestamp,
    },
    AttemptPlaced {
        task: TaskId,
        generation: Generation,
        node: NodeId,
    },
    AttemptAccepted {
        task: TaskId,
        generation: Generation,
    },
    AttemptRestored {
        task: TaskId,
        generation: Generation,
        from: Option<Checkpoint>,
        fell_back: u32,
    },
    AttemptStarted {
        task: TaskId,
        generation: Generation,
    },
    AttemptProgressed {
        task: TaskId,
        generation: Generation,
        progress: Progress,
    },
    CheckpointCommitted {
        task: TaskId,
        generation: Generation,
        checkpoint: Checkpoint,
    },
    StopAsked {
        task: TaskId,
        generation: Generation,
        why: StopWhy,
        deadline: Timestamp,
    },
    /// The command ended badly; held until `until`, in case its node turns out to be lost.
    AttemptExited {
        task: TaskId,
        generation: Generation,
        exit: Exit,
        until: Timestamp,
    },
    /// `floor`: the checkpoint store has seen this generation, so the next one must be higher.
    AttemptEnded {
        task: TaskId,
        generation: Generation,
        end: AttemptEnd,
        exit: Option<Exit>,
        floor: Option<Generation>,
    },
    TaskDone {
        task: TaskId,
        outcome: Outcome,
    },
    NodeRequested {
        node: NodeId,
        key: EffectKey,
        pool: Pool,
        shape: Shape,
        quote: Quote,
        expires_at: Timestamp,
    },
    NodeLaunched {
        node: NodeId,
        instance: InstanceId,
        quote: Quote,
        /// Where billing starts, as the cloud says; where this event is if it does not.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        billed_from: Option<Timestamp>,
    },
    /// The cloud refused; nothing is paid.
    NodeRefused {
        node: NodeId,
        kind: RefusalKind,
        message: String,
    },
    NodeJoined {
        node: NodeId,
    },
    NodeNoticed {
        node: NodeId,
        deadline: Timestamp,
        source: String,
    },
    NoticeWithdrawn {
        node: NodeId,
    },
    NodeEnding {
        node: NodeId,
        why: EndWhy,
    },
    NodeGone {
        node: NodeId,
        cause: GoneCause,
        ended_at: Timestamp,
    },
    /// The cloud lists an instance of ours that no live node refers to; it is ended.
    NodeOrphaned {
        node: NodeId,
        key: EffectKey,
        instance: InstanceId,
        pool: Pool,
    },
    NodeRepriced {
        node: NodeId,
        quote: Quote,
    },
    DrillAsked {
        node: NodeId,
        notice: Span,
    },
    DrillAnswered {
        node: NodeId,
        error: Option<String>,
    },
    PoolCooled {
        scope: Scope,
        kind: RefusalKind,
        until: Timestamp,
        message: String,
    },
}

impl Fact {
    /// The task that it is about.
    #[must_use]
    pub fn task(&self) -> Option<TaskId> {
        match self {
            Fact::JobSubmitted { job, .. } => Some(TaskId::only(*job)),
            Fact::TaskHeld { task, .. }
            | Fact::TaskReleased { task }
            | Fact::TaskWaits { task, .. }
            | Fact::AttemptPlaced { task, .. }
            | Fact::AttemptAccepted { task, .. }
            | Fact::AttemptRestored { task, .. }
            | Fact::AttemptStarted { task, .. }
            | Fact::AttemptProgressed { task, .. }
            | Fact::CheckpointCommitted { task, .. }
            | Fact::StopAsked { task, .. }
            | Fact::AttemptExited { task, .. }
            | Fact::AttemptEnded { task, .. }
            | Fact::TaskDone { task, .. } => Some(*task),
            Fact::NodeRequested { .. }
            | Fact::NodeLaunched { .. }
            | Fact::NodeRefused { .. }
            | Fact::NodeJoined { .. }
            | Fact::NodeNoticed { .. }
            | Fact::NoticeWithdrawn { .. }
            | Fact::NodeEnding { .. }
            | Fact::NodeGone { .. }
            | Fact::NodeOrphaned { .. }
            | Fact::NodeRepriced { .. }
            | Fact::DrillAsked { .. }
            | Fact::DrillAnswered { .. }
            | Fact::PoolCooled { .. } => None,
        }
    }

    /// The node that it is about.
    #[must_use]
    pub fn node(&self) -> Option<NodeId> {
        match self {
            Fact::AttemptPlaced { node, .. }
            | Fact::NodeRequested { node, .. }
            | Fact::NodeLaunched { node, .. }
            | Fact::NodeRefused { node, .. }
            | Fact::NodeJoined { node }
            | Fact::NodeNoticed { node, .. }
            | Fact::NoticeWithdrawn { node }
            | Fact::NodeEnding { node, .. }
            | Fact::NodeGone { node, .. }
            | Fact::NodeOrphaned { node, .. }
            | Fact::NodeRepriced { node, .. }
            | Fact::DrillAsked { node, .. }
            | Fact::DrillAnswered { node, .. } => Some(*node),
            Fact::JobSubmitted { .. }
            | Fact::TaskHeld { .. }
            | Fact::TaskReleased { .. }
            | Fact::TaskWaits { .. }
            | Fact::AttemptAccepted { .. }
            | Fact::AttemptRestored { .. }
            | Fact::AttemptStarted { .. }
            | Fact::AttemptProgressed { .. }
            | Fact::CheckpointCommitted { .. }
            | Fact::StopAsked { .. }
            | Fact::AttemptExited { .. }
            | Fact::AttemptEnded { .. }
            | Fact::TaskDone { .. }
            | Fact::PoolCooled { .. } => None,
        }
    }
}

/// Why a running attempt is stopped by us.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopWhy {
    Cancel,
    TimeLimit,
    Budget,
    Requeue,
    /// The node nears its time to live.
    NodeExpires,
}

/// Why we end a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EndWhy {
    /// Nothing to run on it for the idle time.
    Idle,
    /// The cloud takes it back; what ran on it is safe.
    Noticed,
    /// Its worker never came or is silent.
    Silent,
    /// No live state refers to it.
    Orphan,
    /// It is near its time to live.
    Expires,
    /// The task that it was asked for no longer needs it.
    Unneeded,
}

/// A complete, committed set of files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// Number within the job.
    pub sequence: u64,
    /// Its place in the commit log.
    pub log_sequence: u64,
    pub generation: Generation,
    /// The training step, where the job says it.
    pub step: Option<u64>,
    pub bytes_total: u64,
    pub bytes_uploaded: u64,
    /// When its newest file was last written.
    pub saved_at: Timestamp,
    pub manifest_hash: String,
}

/// How far the training is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Progress {
    pub step: u64,
    pub total: Option<u64>,
}

/// How a command ended, as its worker saw it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    pub out_of_memory: bool,
    /// It never started.
    pub launch_error: Option<String>,
    /// The worker had sent a stop signal before the command ended.
    pub signalled: bool,
    /// The worker stopped it because the worker itself had to leave.
    pub worker_leaving: bool,
    pub stopped_at: Timestamp,
    pub last_progress: Option<Progress>,
    pub detail: Option<String>,
}

/// Something to do outside. Computed from state, so that a crash only means it is computed again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "effect")]
pub enum Effect {
    Launch { node: NodeId, key: EffectKey, pool: Pool, expires_at: Timestamp },
    Terminate { node: NodeId, instance: InstanceId },
    Grant { node: NodeId, task: TaskId, generation: Generation },
    Stop { node: NodeId, task: TaskId, generation: Generation, why: StopWhy, deadline: Timestamp },
    Drill { node: NodeId, instance: InstanceId, notice: Span },
}

impl Effect {
    /// Tells effects apart while they are in flight. The same effect computed twice has the same key.
    #[must_use]
    pub fn key(&self) -> (EffectClass, NodeId, Generation) {
        match self {
            Effect::Launch { node, .. } => (EffectClass::Launch, *node, Generation(0)),
            Effect::Terminate { node, .. } => (EffectClass::Terminate, *node, Generation(0)),
            Effect::Grant { node, generation, .. } => (EffectClass::Grant, *node, *generation),
            Effect::Stop { node, generation, .. } => (EffectClass::Stop, *node, *generation),
            Effect::Drill { node, .. } => (EffectClass::Drill, *node, Generation(0)),
        }
    }
}

/// The kinds of effects, for keys and metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EffectClass {
    Launch,
    Terminate,
    Grant,
    Stop,
    Drill,
}
