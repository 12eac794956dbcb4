//! Finds the processes of one system's nodes by what only they carry: the node's variable, and directories below the
//! system's own.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use spotq_testkit::processes::{self, Process};

/// In the environment of everything that runs on a node of the local cloud.
const NODE: &str = "SPOTQ_NODE";
/// Set by the worker for its command; its value lies below the system's directory.
const CHECKPOINT_DIR: &str = "SPOTQ_CHECKPOINT_DIR";

/// Trainers of the system whose directory is `system`, from their first moment on.
pub(crate) fn trainers(system: &Path) -> Vec<Process> {
    let mut found = processes::with_env(CHECKPOINT_DIR, None);
    found.retain(|process| {
        variable(process.pid, CHECKPOINT_DIR)
            .is_some_and(|dir| Path::new(OsStr::from_bytes(&dir)).starts_with(system))
    });
    found
}

/// Workers of the system, from their first moment on. Their arguments name their directory.
pub(crate) fn workers(system: &Path) -> Vec<Process> {
    let mut found = on_nodes(system);
    found.retain(|process| variable(process.pid, CHECKPOINT_DIR).is_none());
    found
}

/// Whatever runs on the system's nodes.
pub(crate) fn on_nodes(system: &Path) -> Vec<Process> {
    let below = format!("{}/", system.display());
    let mut found = processes::with_env(NODE, None);
    found.retain(|process| {
        let of_ours = |dir: Vec<u8>| Path::new(OsStr::from_bytes(&dir)).starts_with(system);
        process.command.contains(&below) || variable(process.pid, CHECKPOINT_DIR).is_some_and(of_ours)
    });
    found
}

/// A variable of a process's environment as it was at its start; `None` once the process is gone.
fn variable(pid: u32, name: &str) -> Option<Vec<u8>> {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
    let prefix = format!("{name}=");
    let entry = environment.split(|byte| *byte == 0).find(|entry| entry.starts_with(prefix.as_bytes()))?;
    Some(entry[prefix.len()..].to_vec())
}
