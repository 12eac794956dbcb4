//! The vocabulary of supervision: what happens to an attempt, what is to be done, what is told.

use spotq_model::{Signal, Span, Timestamp};

/// What the job asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    pub signal: Option<Signal>,
    pub grace: Span,
    pub setup: bool,
}

/// Why the worker stops a command. Ordered: a later reason replaces an earlier one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stop {
    Requeue,
    WorkerLeaving,
    Notice,
    Budget,
    TimeLimit,
    Cancel,
    Superseded,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct End {
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub out_of_memory: bool,
    pub at: Timestamp,
}

/// How an upload ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pushed {
    /// The store holds what was on disk at `saved_at`, by this push or an earlier one.
    Held {
        saved_at: Timestamp,
    },
    /// Tried again with the next complete state.
    Failed,
    Superseded {
        by: u64,
    },
}

/// Whose fault it is that a checkpoint could not be restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blame {
    /// Another node would fail as well.
    Job,
    /// This node's, or the store's, and it may pass: the attempt is lost, the job is tried again.
    Surroundings,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    Restored,
    RestoreFailed {
        message: String,
        blame: Blame,
    },
    Spawned {
        pid: u32,
    },
    SpawnFailed {
        message: String,
    },
    Exited(End),
    Notice {
        deadline: Timestamp,
        source: String,
    },
    NoticeWithdrawn,
    /// `deadline`: until when saving may take; the job's own grace if absent.
    Stop {
        reason: Stop,
        deadline: Option<Timestamp>,
    },
    /// A newer generation fenced the store while restoring.
    Fenced {
        by: u64,
    },
    /// A complete checkpoint is on disk; its newest file was written at `at`.
    Saved {
        at: Timestamp,
    },
    Pushed(Pushed),
    /// The rest of the tree has ended by itself.
    TreeEmpty,
    /// Nothing of the attempt runs any more: it was looked for and killed.
    TreeGone {
        leftover: Option<String>,
    },
    /// One of the last uploads did not work; it is tried again.
    FinalFailed {
        problem: String,
    },
    /// The last uploads have ended; `problem` says what is not stored and never will be.
    FinalDone {
        problem: Option<String>,
    },
    /// How long the next upload will take, by the last ones.
    UploadEstimate(Span),
    Tick,
}

/// What to do. The order within one step matters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    Restore,
    AbandonRestore,
    SpawnSetup,
    SpawnCommand,
    WriteNotice {
        deadline: Timestamp,
        source: String,
    },
    RemoveNotice,
    SendSave,
    SendTerm,
    /// Say [`Input::TreeEmpty`] when the rest of the tree has ended by itself.
    AwaitTree,
    KillTree,
    Push,
    /// Upload the last complete checkpoint and the outputs, again and again until they are stored.
    FinalPush,
    Report(News),
}

/// What the scheduler is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News {
    Accepted,
    Restored,
    Started { pid: u32 },
    Noticed { deadline: Timestamp, source: String },
    NoticeWithdrawn,
    Superseded { by: u64 },
    Finished(Finish),
}

/// The end of an attempt.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Finish {
    pub end: Option<End>,
    pub launch_error: Option<String>,
    pub stopped: Option<Stop>,
    /// We sent a signal that may have ended it.
    pub signalled: bool,
    /// What the command made and nobody holds but this node, and why. A success without its results is none: `end`
    /// then has no exit code, and the attempt counts as lost.
    pub unstored: Option<String>,
    pub detail: Option<String>,
}

/// Where an attempt is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    Restoring,
    /// `setup:` runs.
    Preparing,
    /// The command is being started.
    Starting,
    Running,
    /// Waiting for a save before the stop.
    Draining,
    /// TERM was sent.
    Terminating,
    /// The rest of the process tree is being killed.
    Sweeping,
    /// The last uploads run.
    Finishing,
    Done,
}

impl Stop {
    /// One word for people and for the notice file.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Stop::Requeue => "requeue",
            Stop::WorkerLeaving => "worker-leaving",
            Stop::Notice => "notice",
            Stop::Budget => "budget",
            Stop::TimeLimit => "time-limit",
            Stop::Cancel => "cancel",
            Stop::Superseded => "superseded",
        }
    }
}
