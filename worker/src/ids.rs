//! Which attempt, and what time it is. Nothing else.

use std::fmt;

use spotq_model::{Generation, TaskId};
use spotq_proto::v1;

pub use spotq_host::{Instant, now};

/// One attempt of a task: what a grant names. Prints as `7-3`, also used as a directory name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AttemptId {
    pub task: TaskId,
    pub generation: Generation,
}

impl fmt::Display for AttemptId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.task, self.generation)
    }
}

impl AttemptId {
    /// From the wire; `None` if it names no attempt.
    #[must_use]
    pub fn from_wire(grant: v1::Grant) -> Option<AttemptId> {
        let (task, generation) = grant.try_into().ok()?;
        Some(AttemptId { task, generation })
    }

    #[must_use]
    pub fn to_wire(self) -> v1::Grant {
        (self.task, self.generation).into()
    }
}
