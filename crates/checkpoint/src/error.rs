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

#[cfg(test)]
mod tests {
    use super::*;
    use object_store::Error as E;

    fn kind(error: &CheckpointError) -> &'static str {
        match error {
            CheckpointError::Superseded { .. } => "superseded",
            CheckpointError::Changed { .. } => "changed",
            CheckpointError::Refused { .. } => "refused",
            CheckpointError::Corrupt { .. } => "corrupt",
            CheckpointError::NoSpace { .. } => "no space",
            CheckpointError::Denied { .. } => "denied",
            CheckpointError::Unavailable { .. } => "unavailable",
            CheckpointError::Invalid { .. } => "invalid",
        }
    }

    #[test]
    fn what_a_file_system_says_asks_for_the_right_thing() {
        for (said, asks_for) in [
            (io::ErrorKind::StorageFull, "no space"),
            (io::ErrorKind::QuotaExceeded, "no space"),
            (io::ErrorKind::ReadOnlyFilesystem, "denied"),
            (io::ErrorKind::PermissionDenied, "denied"),
            (io::ErrorKind::TimedOut, "unavailable"),
        ] {
            let here = CheckpointError::io("write", Path::new("/job/model"), said.into());
            assert_eq!(kind(&here), asks_for, "{said:?}");
            assert!(here.to_string().contains("write /job/model"), "{here}");
            // A local store wraps the same error, more than once.
            let inner = E::Generic { store: "Local", source: Box::new(io::Error::from(said)) };
            let wrapped = E::Generic { store: "Local", source: Box::new(inner) };
            assert_eq!(
                kind(&CheckpointError::store("write", "chk/1", wrapped)),
                asks_for,
                "{said:?} in a store"
            );
        }
    }

    #[test]
    fn what_an_object_store_says_asks_for_the_right_thing() {
        let (path, source) = (|| "chk/1".to_owned(), || "no".into());
        let cases: [(E, &str); 8] = [
            (E::NotFound { path: path(), source: source() }, "invalid"),
            (E::PermissionDenied { path: path(), source: source() }, "denied"),
            (E::Unauthenticated { path: path(), source: source() }, "denied"),
            (E::NotSupported { source: source() }, "refused"),
            (E::NotImplemented { operation: "put".into(), implementer: "x".into() }, "refused"),
            (E::InvalidPath { source: object_store::path::Error::EmptySegment { path: path() } }, "invalid"),
            (E::UnknownConfigurationKey { store: "S3", key: "x".into() }, "invalid"),
            (E::Generic { store: "S3", source: source() }, "unavailable"),
        ];
        for (said, asks_for) in cases {
            let text = said.to_string();
            let error = CheckpointError::store("read", "chk/1", said);
            assert_eq!(kind(&error), asks_for, "{text}");
            assert!(error.to_string().contains("chk/1"), "{error}");
        }
    }
}
