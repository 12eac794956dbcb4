//! Instances as a cloud reports them.

use serde::{Deserialize, Serialize};
use spotq_model::{EffectKey, GoneCause, InstanceId, NodeId, Pool, Quote, Timestamp};

/// An instance that we own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Instance {
    pub instance: InstanceId,
    /// The key it was launched with.
    pub key: EffectKey,
    /// From its tags; `None` if they are missing or not ours to read.
    pub node: Option<NodeId>,
    pub state: InstanceState,
    pub pool: Pool,
    /// Billing starts here.
    pub launched_at: Timestamp,
}

/// Where an instance is in its life. It only moves down this list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "state")]
pub enum InstanceState {
    /// Accepted by the cloud, not booted.
    Pending,
    Running,
    /// Being ended; nothing on it can be relied on.
    Ending,
    /// Nothing of it is left and nothing more is billed.
    Gone {
        cause: GoneCause,
        at: Timestamp,
    },
}

impl InstanceState {
    #[must_use]
    pub fn is_gone(self) -> bool {
        matches!(self, InstanceState::Gone { .. })
    }
}

/// News of one instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceChange {
    pub instance: InstanceId,
    pub node: Option<NodeId>,
    pub state: InstanceState,
}

/// How far an ending has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TerminateState {
    Ending,
    Gone,
}

/// A stretch of node time at one frozen price, to be charged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Billable {
    pub pool: Pool,
    pub quote: Quote,
    /// Start of the node; some clouds charge its first hour by other rules.
    pub launched_at: Timestamp,
    pub start: Timestamp,
    pub end: Timestamp,
    /// Why the node ended at `end`; `None` while it lives on in the next stretch.
    pub cause: Option<GoneCause>,
}
