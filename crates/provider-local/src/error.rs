//! What can go wrong before a cloud answers, sorted by what the caller can do about it.

use std::io;
use std::path::{Path, PathBuf};

/// Errors of starting and reaching the simulated cloud.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// The caller asked for something that cannot be; the message says what to change.
    #[error("local cloud configuration {path}: {detail}; correct the file or leave it out", path = path.display())]
    Config { path: PathBuf, detail: String },
    #[error(
        "the local cloud in {dir} runs with seed {running}, not {wanted}; use another directory or that seed",
        dir = dir.display()
    )]
    OtherSeed { dir: PathBuf, running: u64, wanted: u64 },
    #[error("the local cloud in {dir} is already running; each directory holds one cloud", dir = dir.display())]
    DirInUse { dir: PathBuf },
    /// The machine did not let us.
    #[error("local cloud: could not {action} {path}: {source}", path = path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("local cloud: could not listen on 127.0.0.1:{port}: {source}; another program may use the port")]
    Listen { port: u16, source: io::Error },
    #[error("the local cloud in {dir} did not come up: {detail}; see {log}", dir = dir.display(), log = log.display())]
    NotUp { dir: PathBuf, detail: String, log: PathBuf },
}

impl LocalError {
    /// For `map_err`: names the action and the path.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> LocalError {
        let path = path.to_path_buf();
        move |source| LocalError::Io { action, path, source }
    }
}
