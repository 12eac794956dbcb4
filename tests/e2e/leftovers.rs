//! Finds every process that belongs to a test's directory, through any number of forks and changes of environment.

use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use spotq_testkit::{processes, wait_for};

/// Live processes with `dir` in their arguments, environment or working directory, as `pid command`. A node has an
/// environment of its own, so no variable of the test reaches it; its directory always does.
pub fn of(dir: &Path) -> Vec<(u32, String)> {
    let wanted = dir.as_os_str().as_bytes();
    let own = std::process::id();
    let entries = std::fs::read_dir("/proc").unwrap();
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| *pid != own && processes::is_alive(*pid))
        .filter_map(|pid| {
            let proc = PathBuf::from(format!("/proc/{pid}"));
            let arguments = std::fs::read(proc.join("cmdline")).unwrap_or_default();
            let environment = std::fs::read(proc.join("environ")).unwrap_or_default();
            let cwd = std::fs::read_link(proc.join("cwd")).unwrap_or_default();
            let texts = [arguments.as_slice(), &environment, cwd.as_os_str().as_bytes()];
            let ours = texts.iter().any(|text| text.windows(wanted.len()).any(|part| part == wanted));
            ours.then(|| (pid, String::from_utf8_lossy(&arguments).replace('\0', " ")))
        })
        .collect()
}

/// Waits until no process of `dir` lives; the failure lists those that do.
pub fn wait_gone(dir: &Path, deadline: Duration) {
    let mut live = Vec::new();
    let gone = wait_for(
        deadline,
        || {
            live = of(dir);
            live.is_empty().then_some(())
        },
        "the end of every process of the test",
    );
    assert!(gone.is_ok(), "processes are left: {live:#?}");
}

/// Kills what is left of a failed test, one process at a time.
pub fn kill(dir: &Path) {
    /// A process may fork while it is swept; its child is there at the next sweep.
    const SWEEPS: usize = 3;
    for _ in 0..SWEEPS {
        for (pid, _) in of(dir) {
            // One that ended meanwhile is what we want.
            let _ = processes::signal(pid, Signal::KILL);
        }
    }
}
