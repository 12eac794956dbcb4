//! How things end, and why they wait.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{RefusalKind, Timestamp};

/// How a task ended. A done task never changes again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "outcome")]
pub enum Outcome {
    Completed,
    Failed { exit_code: i32 },
    Timeout,
    Cancelled,
    PreemptionBudgetSpent,
    NodeFailure,
    OutOfMemory,
    LaunchFailure { message: String },
    BudgetExhausted,
}

impl Outcome {
    /// The exit code of `spotq wait` and `spotq run`: the job's own if it ran to an end, else a documented one.
    #[must_use]
    pub fn exit_code(&self) -> i32 {
        match self {
            Outcome::Completed => 0,
            Outcome::Failed { exit_code } => *exit_code,
            Outcome::Timeout => 124,
            Outcome::LaunchFailure { .. } => 125,
            Outcome::OutOfMemory => 137,
            Outcome::Cancelled => 130,
            Outcome::PreemptionBudgetSpent => 75,
            Outcome::NodeFailure => 76,
            Outcome::BudgetExhausted => 77,
        }
    }

    /// One word for tables and JSON.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Outcome::Completed => "completed",
            Outcome::Failed { .. } => "failed",
            Outcome::Timeout => "timeout",
            Outcome::Cancelled => "cancelled",
            Outcome::PreemptionBudgetSpent => "preemption_budget_spent",
            Outcome::NodeFailure => "node_failure",
            Outcome::OutOfMemory => "out_of_memory",
            Outcome::LaunchFailure { .. } => "launch_failure",
            Outcome::BudgetExhausted => "budget_exhausted",
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Completed => f.write_str("completed"),
            Outcome::Failed { exit_code } => write!(f, "failed with exit code {exit_code}"),
            Outcome::Timeout => f.write_str("stopped at its time limit"),
            Outcome::Cancelled => f.write_str("cancelled"),
            Outcome::PreemptionBudgetSpent => {
                f.write_str("preempted more often than `retry.preemptions` allows")
            }
            Outcome::NodeFailure => f.write_str(
                "lost its node, or was killed from outside, again and again without a new checkpoint",
            ),
            Outcome::OutOfMemory => f.write_str("killed for lack of memory"),
            Outcome::LaunchFailure { message } => write!(f, "could not be started: {message}"),
            Outcome::BudgetExhausted => f.write_str("stopped at its budget"),
        }
    }
}

/// Why a task waits: exactly one reason at a time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "reason")]
pub enum WaitReason {
    /// Just submitted or just returned to the queue; the planner has not looked at it yet.
    Queued,
    /// `begin:` is in the future.
    BeginTime { at: Timestamp },
    /// No pool at all has such a node; the request has to change.
    NoSuchPool { hint: String },
    /// Pools exist, each refused lately; next try when the first cool-down ends.
    CoolingDown { pools: u32, last: RefusalKind },
    /// Every pool costs more than `max_hourly_cost`.
    TooExpensive { cheapest: crate::UsdPerHour },
    /// Spot costs at least on-demand everywhere, and the policy is spot-only.
    SpotNotWorthIt,
    /// The cloud has not quoted prices yet.
    NoOffers,
    /// The limit on live nodes is reached.
    NodeLimit { limit: u32 },
    /// Failed and is tried again after a pause.
    BackOff { failures: u32 },
}

impl fmt::Display for WaitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WaitReason::Queued => f.write_str("in the queue"),
            WaitReason::BeginTime { .. } => f.write_str("`begin:` is in the future"),
            WaitReason::NoSuchPool { hint } => write!(f, "no pool has such a node: {hint}"),
            WaitReason::CoolingDown { pools, last } => {
                write!(f, "all {pools} matching pools refused lately (last: {last})")
            }
            WaitReason::TooExpensive { cheapest } => {
                write!(f, "the cheapest pool costs ${cheapest:.4}/h, above `max_hourly_cost`")
            }
            WaitReason::SpotNotWorthIt => f.write_str("spot costs as much as on-demand everywhere"),
            WaitReason::NoOffers => f.write_str("no prices from any cloud yet"),
            WaitReason::NodeLimit { limit } => write!(f, "the limit of {limit} live nodes is reached"),
            WaitReason::BackOff { failures } => write!(f, "pausing after failure {failures}"),
        }
    }
}

/// Why a task is held.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "reason")]
pub enum HoldReason {
    /// By `hold:` or `spotq hold`.
    User,
}

/// How an attempt ended, after classification.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "end")]
pub enum AttemptEnd {
    Completed,
    Cancelled,
    Timeout,
    BudgetExhausted,
    /// The cloud took the node back. `noticed`: it said so in advance.
    Preempted {
        noticed: bool,
    },
    /// The node or its worker was lost for a reason that is not the market's.
    NodeLost {
        detail: String,
    },
    OutOfMemory,
    /// The command never started.
    LaunchFailed {
        message: String,
    },
    Failed {
        exit_code: i32,
    },
    /// Stopped by the user to be queued again.
    Requeued,
}

impl AttemptEnd {
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            AttemptEnd::Completed => "completed",
            AttemptEnd::Cancelled => "cancelled",
            AttemptEnd::Timeout => "timeout",
            AttemptEnd::BudgetExhausted => "budget_exhausted",
            AttemptEnd::Preempted { .. } => "preempted",
            AttemptEnd::NodeLost { .. } => "node_lost",
            AttemptEnd::OutOfMemory => "out_of_memory",
            AttemptEnd::LaunchFailed { .. } => "launch_failed",
            AttemptEnd::Failed { .. } => "failed",
            AttemptEnd::Requeued => "requeued",
        }
    }
}
