//! The checkpoint engine: content-addressed chunks, a signed manifest, a commit log with put-if-absent only.
//!
//! One [`Repository`] is one job's checkpoints (or its outputs) under one prefix of an object store:
//!
//! ```text
//! log/<seq>.json               put-if-absent only, hash-chained, signed: Fence, Commit, Quarantine, Retire
//! man/<checkpoint>-<hash>.json content-addressed, signed
//! chk/<hh>/<keyed hash>        32 MiB pieces of files, one PUT each, immutable
//! probe                        asks the store whether it honours put-if-absent
//! ```
//!
//! It must never rename or delete an object, use multipart uploads, make a partial checkpoint visible (INV-05),
//! or let an older generation commit after a newer one fenced (INV-02). Whether a job's files are complete is
//! decided by the worker, not here.

mod address;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod error;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod key;
mod log;
mod manifest;
mod objects;
mod path;
mod push;
mod repo;
mod restore;
mod scan;
mod verify;

pub use error::CheckpointError;
pub use key::{Digest, JobKey};
pub use log::{Action, CheckpointSeq, Head, LogEntry, LogSeq, LogState, fold};
pub use manifest::{CHUNK_BYTES, ChunkRef, Entry, MAX_ENTRIES, MAX_FILE_BYTES, Manifest, Node, SCHEMA};
pub use path::{LinkTarget, MAX_DEPTH, MAX_NAME_BYTES, MAX_PATH_BYTES, RelPath};
pub use push::{Committed, Progress, PushRequest, Pushed};
pub use repo::{Options, Repository};
pub use restore::{FellBack, Restore, Restored};
pub use scan::{Candidate, FileStat, ScannedEntry, ScannedNode, Selection};
pub use verify::{Finding, VerifyReport};
