//! What reaches the core from outside: users, clouds, workers, time.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{
    Checkpoint, EffectKey, Exit, Generation, InstanceId, JobId, JobSpec, NodeId, Offer, Pool, Progress,
    Quote, Refusal, Span, TaskId, Timestamp,
};

/// One input. A recorded sequence of (time, input) replays to the same events.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "input")]
pub enum Input {
    /// `uuid` is drawn by the caller; a known `client_key` makes this a repetition, and nothing happens.
    Submit {
        client_key: String,
        uuid: String,
        spec: Arc<JobSpec>,
    },
    Cancel {
        job: JobId,
    },
    Hold {
        job: JobId,
    },
    Release {
        job: JobId,
    },
    /// Stop the running attempt, with a checkpoint, and queue the task again.
    Requeue {
        job: JobId,
    },
    /// Have the cloud interrupt the node of the job, as a rehearsal.
    Drill {
        job: JobId,
        notice: Span,
    },
    /// The cloud answered a launch.
    LaunchAnswered {
        node: NodeId,
        answer: LaunchAnswer,
    },
    /// The cloud did (or refused) the drill that was asked for.
    DrillAnswered {
        node: NodeId,
        error: Option<String>,
    },
    /// All instances that the cloud holds for this cluster; asked for at `asked_at`.
    Instances {
        asked_at: Timestamp,
        instances: Vec<InstanceSeen>,
    },
    /// The cloud says that this instance is no more.
    InstanceGone {
        instance: InstanceId,
        cause: GoneCause,
        at: Timestamp,
    },
    /// A worker opened its session.
    WorkerJoined {
        node: NodeId,
        held: Vec<(TaskId, Generation)>,
    },
    /// The worker's lease ran out.
    LeaseExpired {
        node: NodeId,
    },
    /// A worker's report about an attempt.
    Reported {
        node: NodeId,
        task: TaskId,
        generation: Generation,
        report: Report,
    },
    /// Prices as of now; nodes whose pool has another price get a new ledger segment.
    Offers {
        offers: Vec<Offer>,
    },
    /// Place what waits.
    Plan {
        offers: Vec<Offer>,
    },
    /// Time passed.
    Tick,
}

/// What the cloud said to a launch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "answer")]
pub enum LaunchAnswer {
    /// `launched_at` is the cloud's word: billing starts there.
    Launched {
        instance: InstanceId,
        quote: Quote,
        launched_at: Timestamp,
    },
    Refused {
        refusal: Refusal,
    },
}

/// One instance as the cloud lists it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceSeen {
    pub instance: InstanceId,
    pub key: EffectKey,
    /// From the tag that we set at launch.
    pub node: Option<NodeId>,
    pub pool: Pool,
    pub launched_at: Timestamp,
    pub gone: Option<GoneCause>,
    pub gone_at: Option<Timestamp>,
}

/// Why an instance is gone, as far as the cloud says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GoneCause {
    /// The market took it back.
    Preempted,
    /// We ended it.
    Terminated,
    /// It died by itself.
    Crashed,
    /// It reached its time to live.
    Expired,
}

/// What a worker says about an attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "report")]
pub enum Report {
    Accepted,
    Restored {
        from: Option<Checkpoint>,
        fell_back: u32,
    },
    Started,
    Progressed {
        progress: Progress,
    },
    Noticed {
        deadline: Timestamp,
        source: String,
    },
    NoticeWithdrawn,
    Committed {
        checkpoint: Checkpoint,
    },
    Finished {
        exit: Exit,
    },
    /// The checkpoint store holds a fence of a newer generation.
    Superseded {
        by: Generation,
    },
}
