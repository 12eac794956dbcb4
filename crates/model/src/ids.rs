//! Identifiers. Each is a type of its own, so that two of them cannot be swapped.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

macro_rules! number_id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl $name {
            /// The id after this one.
            #[must_use]
            pub fn next(self) -> Self {
                Self(self.0 + 1)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number_id! {
    /// What a user submits. Tools of other schedulers expect a 32-bit number.
    JobId(u32)
}
number_id! {
    /// Numbers the attempts of a task: it goes up with each placement and never down. 0 means "never placed".
    Generation(u64)
}
number_id! {
    /// A scheduler's term of leadership; the store refuses writes of an older one.
    Epoch(u64)
}
number_id! {
    /// How many events the store holds; the event that is appended next has this number.
    Version(u64)
}
number_id! {
    /// An instance that we pay for. The number is ours, given before the cloud is asked for it.
    NodeId(u64)
}

/// One member of an array job, or the job itself (index 0). Prints as `7` or `7_3`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TaskId {
    pub job: JobId,
    pub index: u32,
}

impl TaskId {
    /// The only task of a job that is not an array.
    #[must_use]
    pub fn only(job: JobId) -> Self {
        Self { job, index: 0 }
    }
}

impl fmt::Display for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.index == 0 { write!(f, "{}", self.job) } else { write!(f, "{}_{}", self.job, self.index) }
    }
}

impl FromStr for TaskId {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let bad =
            || format!("`{s}` is not a job id: expected a number such as 7, or 7_3 for an array member");
        let (job, index) = s.split_once('_').unwrap_or((s, "0"));
        Ok(Self { job: JobId(job.parse().map_err(|_| bad())?), index: index.parse().map_err(|_| bad())? })
    }
}

/// The key that makes an effect idempotent; it becomes the cloud's client token (at most 64 ASCII characters).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EffectKey(pub String);

impl fmt::Display for EffectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What the cloud calls an instance. Opaque to us.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct InstanceId(pub String);

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
