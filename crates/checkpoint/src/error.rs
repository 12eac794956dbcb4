//! What can go wrong with a checkpoint store, sorted by what the caller can do about it.
//!
//! Never carries a key, a credential or file contents (INV-14).

use std::error::Error as StdError;
use std::io;
use std::path::{Path, PathBuf};

use spotq_model::Generation;

/// Errors of this crate. Each variant asks something different of the caller.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// Stop the job and leave: a newer attempt owns the checkpoints.
    #[error(
        "checkpoint store: this attempt was superseded by generation {by}; stop the job, the newer attempt owns its checkpoints"
    )]
    Superseded { by: Generation },

    /// Wait until the job has finished writing, scan again, push again.
    #[error("push: {} changed while it was uploaded; push again when the job has finished writing", path.display())]
    Changed { path: PathBuf },

    /// Use another store: this one cannot keep two writers apart.
    #[error(
        "{store} does not honour put-if-absent ({why}); use a store that refuses to overwrite under `If-None-Match: *`"
    )]
    Refused { store: String, why: String },

    /// The object is damaged or missing. Restore falls back by itself; elsewhere a person must look.
    #[error("{object} is damaged: {why}; run `spotq ckpt verify` to see what else is")]
    Corrupt { object: String, why: String },

    /// Free space, then try again.
    #[error("no space left: {what}; free some space or use a larger disk")]
    NoSpace { what: String },

    /// Fix permissions or credentials.
    #[error(
        "not allowed: {what}; check the permissions, the credentials and that the file system is writable"
    )]
    Denied { what: String },

    /// Try again later: nothing is known to be wrong with the data.
    #[error("{what} failed; it is safe to try again")]
    Unavailable {
        what: String,
        #[source]
        source: Box<dyn StdError + Send + Sync>,
    },

    /// Fix the request: trying again will not help.
    #[error("{what}: {why}")]
    Invalid { what: String, why: String },
}

impl CheckpointError {
    pub(crate) fn corrupt(object: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Corrupt { object: object.into(), why: why.into() }
    }

    pub(crate) fn invalid(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Invalid { what: what.into(), why: why.into() }
    }

    /// An error of a local file operation.
    pub(crate) fn io(operation: &str, path: &Path, error: io::Error) -> Self {
        let what = format!("{operation} {}", path.display());
        from_io_kind(&what, &error).unwrap_or_else(|| Self::Unavailable { what, source: Box::new(error) })
    }

    /// An error of the object store. A missing object is a broken promise here: callers for whom absence is
    /// normal ask with `Objects::get`, which says so with `None`.
    pub(crate) fn store(operation: &str, object: &str, error: object_store::Error) -> Self {
        use object_store::Error as E;
        let what = format!("{operation} {object}");
        match &error {
            E::NotFound { .. } => Self::invalid(
                what,
                "the bucket or directory does not exist; create it or correct the address",
            ),
            E::PermissionDenied { .. } | E::Unauthenticated { .. } => {
                Self::Denied { what: format!("{what} ({error})") }
            }
            E::NotSupported { .. } | E::NotImplemented { .. } => {
                Self::Refused { store: object.to_owned(), why: error.to_string() }
            }
            E::InvalidPath { .. } | E::UnknownConfigurationKey { .. } => {
                Self::invalid(what, error.to_string())
            }
            _ => {
                let named = io_in_chain(&error).and_then(|io| from_io_kind(&what, io));
                named.unwrap_or_else(|| Self::Unavailable { what, source: Box::new(error) })
            }
        }
    }

    /// A task of ours that ended without an answer: the runtime is shutting down.
    pub(crate) fn join(error: tokio::task::JoinError) -> Self {
        Self::Unavailable { what: "background file work".to_owned(), source: Box::new(error) }
    }
}

/// Names what a person must fix; `None` for an error that may pass by itself.
fn from_io_kind(what: &str, error: &io::Error) -> Option<CheckpointError> {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            Some(CheckpointError::NoSpace { what: format!("{what} ({error})") })
        }
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
            Some(CheckpointError::Denied { what: format!("{what} ({error})") })
        }
        _ => None,
    }
}

fn io_in_chain<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a io::Error> {
    let mut next = Some(error);
    while let Some(current) = next {
        if let Some(io) = current.downcast_ref::<io::Error>() {
            return Some(io);
        }
        next = current.source();
    }
    None
}
