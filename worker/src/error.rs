//! Why a worker cannot begin, sorted by what can be done about it.

use std::io;
use std::path::{Path, PathBuf};

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// Correct the arguments.
    #[error("{0}")]
    Invalid(String),
    /// Free space, or make the directory writable.
    #[error("cannot {operation} {}: {source}; is the disk full or read-only?", path.display())]
    Disk { operation: &'static str, path: PathBuf, source: io::Error },
    /// The system refuses something basic.
    #[error("cannot {operation}: {source}")]
    System { operation: &'static str, source: io::Error },
}

impl WorkerError {
    pub(crate) fn disk(operation: &'static str, path: &Path, source: io::Error) -> WorkerError {
        WorkerError::Disk { operation, path: path.to_owned(), source }
    }

    pub(crate) fn system(operation: &'static str, source: io::Error) -> WorkerError {
        WorkerError::System { operation, source }
    }
}
