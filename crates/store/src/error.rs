//! What can go wrong with a store, sorted by what the caller can do about it.

use std::path::PathBuf;

use spotq_model::{Epoch, Version};
use thiserror::Error;

/// The result of every store operation.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;

/// Errors can be cloned because one failed commit answers many callers.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum StoreError {
    // The caller was out of date: recover, decide again.
    /// Nothing was written.
    #[error(
        "append expected version {expected}, but the store is at {actual}; read the newer records and decide again"
    )]
    Conflict { expected: Version, actual: Version },

    // The caller is no longer the leader: stop acting.
    /// Nothing was written.
    #[error("epoch {epoch} was fenced by epoch {by}: another scheduler leads now; stop this one")]
    Fenced { epoch: Epoch, by: Epoch },

    // The caller sends too much: wait, or send less.
    /// Nothing was written.
    #[error(
        "the store has {queued} appends queued, the most it takes; wait for some to finish and try again"
    )]
    Busy { queued: usize },
    /// Nothing was written.
    #[error("{what} of {size} is larger than the limit of {limit}; send less at once")]
    TooLarge { what: &'static str, size: u64, limit: u64 },

    // The user can repair the surroundings and try again.
    /// The disk, or the quota on it, has no room. `needed` is how many bytes are missing, 0 when that is not known.
    /// Where `needed` is known the store refused in advance: nothing was written, and it goes on once there is room.
    #[error("the disk that holds {} is full; free {} and try again", path.display(), room(*needed))]
    DiskFull { path: PathBuf, needed: u64 },
    #[error("cannot write to {}: {reason}; make the directory writable for this user, or choose another one with --data", path.display())]
    ReadOnly { path: PathBuf, reason: String },
    #[error("{} is not a directory; choose another place with --data", path.display())]
    NotADirectory { path: PathBuf },
    #[error("the store in {} is in use by another process; stop that one first, or choose another directory with --data", path.display())]
    InUse { path: PathBuf },
    #[error("the store in {} has format {found}, but this program knows formats up to {known}; use a newer release", path.display())]
    UnknownFormat { path: PathBuf, found: u64, known: u64 },

    // Bytes on disk are not what was written: restore from a copy.
    #[error("the store in {} is damaged: {what}; copy the directory away before anything else, then restore it from a backup", path.display())]
    Corrupt { path: PathBuf, what: String },

    // The store cannot go on: end the process and start again; recovery tells what was written.
    #[error(
        "{operation} failed: {reason}; the store has stopped so that nothing is lost, restart to recover"
    )]
    Failed { operation: String, reason: String },
    #[error("the store has stopped; restart to recover")]
    Stopped,
}

fn room(needed: u64) -> String {
    if needed == 0 { "some space".to_owned() } else { format!("at least {needed} bytes") }
}
