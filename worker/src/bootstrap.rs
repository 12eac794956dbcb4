//! What whoever launches the node hands over besides arguments: the join secret, the store's keys, the CA.
//!
//! Comes through a pipe, or a file that is gone once it was read, so that no job finds it in the worker's environment
//! or arguments. Never printed.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io::{self, Read as _};
use std::path::Path;

use serde::Deserialize;

use crate::error::WorkerError;

/// Means standard input in place of a file.
const STDIN: &str = "-";
/// More is no bootstrap. A pipe takes 64 KiB without a reader, which whoever writes it relies on.
const BYTES_MAX: u64 = 64 * 1024;
/// The CA of the scheduler, in PEM, among `env`.
pub const CA_VARIABLE: &str = "SPOTQ_CA_PEM";

/// As JSON: `{"join_secret": "…", "env": {"NAME": "value"}}`.
#[derive(Clone, Default, Deserialize)]
#[serde(default)]
pub struct Bootstrap {
    pub join_secret: String,
    pub env: BTreeMap<String, String>,
}

/// Only the names: the values are secrets.
impl fmt::Debug for Bootstrap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bootstrap").field("env", &self.env.keys()).finish_non_exhaustive()
    }
}

impl Bootstrap {
    /// Reads it, and removes it if it is a file. A file that is not there was read by this node's worker before.
    ///
    /// # Errors
    /// It cannot be read or removed, or is something else.
    pub fn take(from: &Path) -> Result<Self, WorkerError> {
        let mut text = Vec::new();
        if from == Path::new(STDIN) {
            let read = io::stdin().lock().take(BYTES_MAX).read_to_end(&mut text);
            read.map_err(|e| WorkerError::disk("read the bootstrap from", from, e))?;
        } else {
            match fs::File::open(from) {
                Ok(file) => {
                    let read = file.take(BYTES_MAX).read_to_end(&mut text);
                    read.map_err(|e| WorkerError::disk("read", from, e))?;
                    fs::remove_file(from).map_err(|e| WorkerError::disk("remove", from, e))?;
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Bootstrap::default()),
                Err(error) => return Err(WorkerError::disk("open", from, error)),
            }
        }
        // The text of the error would quote what is there.
        serde_json::from_slice(&text).map_err(|_| {
            WorkerError::Invalid(format!("the bootstrap in {} is no JSON of a bootstrap", from.display()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_gone_once_it_was_read_and_its_absence_is_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bootstrap");
        fs::write(&path, r#"{"join_secret":"sesame","env":{"A":"b"}}"#).unwrap();
        let taken = Bootstrap::take(&path).unwrap();
        assert_eq!((taken.join_secret.as_str(), taken.env["A"].as_str()), ("sesame", "b"));
        assert!(!path.exists());
        assert!(!format!("{taken:?}").contains("sesame"));
        assert!(Bootstrap::take(&path).unwrap().join_secret.is_empty());
        fs::write(&path, "sesame").unwrap();
        let error = Bootstrap::take(&path).unwrap_err().to_string();
        assert!(!error.contains("sesame"), "{error}");
    }
}
