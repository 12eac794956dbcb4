//! Who this worker is: its own key, the newest identity that the scheduler gave, and whom it trusts.
//!
//! Kept in the worker's directory for its owner alone, so that a worker that is started again is the same one.

use std::fmt;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use spotq_proto::v1;

use crate::error::WorkerError;

const FILE: &str = "identity.json";
const KEY_BYTES: usize = 32;

/// The file, and what is in it.
pub struct Identity {
    path: PathBuf,
    kept: Kept,
}

#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Kept {
    worker_key: String,
    #[serde(default)]
    identity: String,
    #[serde(default)]
    ca_pem: String,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Identity {
    /// That of this directory, made if there is none. A CA that was handed over counts before one that was kept.
    ///
    /// # Errors
    /// The file cannot be read or written.
    pub fn open(dir: &Path, ca_pem: Option<&str>) -> Result<Self, WorkerError> {
        let path = dir.join(FILE);
        let kept = match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|_| {
                WorkerError::Invalid(format!("{} is damaged; this node cannot join any more", path.display()))
            })?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let worker_key = draw().map_err(|e| WorkerError::system("draw a random key", e))?;
                Kept { worker_key, identity: String::new(), ca_pem: String::new() }
            }
            Err(error) => return Err(WorkerError::disk("read", &path, error)),
        };
        let mut identity = Identity { path, kept };
        if let Some(ca_pem) = ca_pem {
            ca_pem.clone_into(&mut identity.kept.ca_pem);
        }
        identity.save().map_err(|e| WorkerError::disk("write", &identity.path, e))?;
        Ok(identity)
    }

    #[must_use]
    pub fn worker_key(&self) -> &str {
        &self.kept.worker_key
    }

    #[must_use]
    pub fn token(&self) -> &str {
        &self.kept.identity
    }

    #[must_use]
    pub fn ca_pem(&self) -> &str {
        &self.kept.ca_pem
    }

    /// Keeps what the scheduler has given.
    ///
    /// # Errors
    /// The file cannot be written; what it had stays.
    pub fn renew(&mut self, given: v1::Identity) -> io::Result<()> {
        let before = self.kept.clone();
        self.kept.identity = given.token;
        if !given.ca_pem.is_empty() {
            self.kept.ca_pem = given.ca_pem;
        }
        if self.kept == before { Ok(()) } else { self.save() }
    }

    fn save(&self) -> io::Result<()> {
        let new = self.path.with_extension("new");
        let mut file =
            fs::OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&new)?;
        file.write_all(&serde_json::to_vec(&self.kept)?)?;
        file.sync_all()?;
        fs::rename(&new, &self.path)
    }
}

fn draw() -> io::Result<String> {
    use std::io::Read as _;
    let mut bytes = [0_u8; KEY_BYTES];
    fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_worker_that_is_started_again_is_the_same_and_its_file_is_its_owners() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = Identity::open(dir.path(), Some("ca one")).unwrap();
        assert_eq!(first.worker_key().len(), 64);
        let given = v1::Identity { token: "t".into(), expires_ms: 1, ca_pem: "ca two".into() };
        first.renew(given).unwrap();
        let again = Identity::open(dir.path(), None).unwrap();
        assert_eq!((again.worker_key(), again.token(), again.ca_pem()), (first.worker_key(), "t", "ca two"));
        let mode = fs::metadata(dir.path().join(FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let other = tempfile::tempdir().unwrap();
        let other = Identity::open(other.path(), None).unwrap();
        assert_ne!(other.worker_key(), first.worker_key());
    }
}
