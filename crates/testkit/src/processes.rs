//! Finds processes by what only ours carry, to prove that none was leaked. Reads `/proc`; ends only single pids.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal};

use crate::{TestkitError, wait_for};

/// A live process; a zombie is not live.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Process {
    pub pid: u32,
    /// The arguments, joined by blanks, for messages.
    pub command: String,
}

/// Marks everything that a test starts, through any number of forks, by a variable in the environment. Dropping it
/// kills, one by one, what is left: a failed test must not leave its processes to the next.
#[derive(Debug)]
pub struct Mark {
    value: String,
}

impl Mark {
    /// The variable that carries the mark.
    pub const VARIABLE: &str = "SPOTQ_TEST_MARK";

    /// A mark that no other test has.
    #[must_use]
    pub fn new() -> Mark {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let (pid, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        Mark { value: format!("{pid}-{count}") }
    }

    /// Marks what `command` will start.
    pub fn put_on(&self, command: &mut Command) {
        command.env(Mark::VARIABLE, &self.value);
    }

    /// What is alive of it. A process that cleared its environment is not found.
    #[must_use]
    pub fn live(&self) -> Vec<Process> {
        with_env(Mark::VARIABLE, Some(&self.value))
    }

    /// Waits until nothing marked is alive.
    ///
    /// # Errors
    /// [`TestkitError::TimedOut`], which lists what still lives at the deadline.
    pub fn wait_gone(&self, deadline: Duration) -> Result<(), TestkitError> {
        let mut live = Vec::new();
        let gone = wait_for(
            deadline,
            || {
                live = self.live();
                live.is_empty().then_some(())
            },
            "the end of marked processes",
        );
        gone.map_err(|mut timed_out| {
            let list: Vec<String> = live.iter().map(|p| format!("{} `{}`", p.pid, p.command)).collect();
            timed_out.what = format!("the end of {}", list.join(", "));
            timed_out.into()
        })
    }
}

impl Default for Mark {
    fn default() -> Self {
        Mark::new()
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        /// A process may fork while it is swept; its child is there at the next sweep.
        const SWEEPS: usize = 3;
        for _ in 0..SWEEPS {
            for process in self.live() {
                // One that ended meanwhile is what we want.
                let _ = signal(process.pid, Signal::KILL);
            }
        }
    }
}

/// Processes whose environment at start had `key`, with `value` if one is given. This finds double-forked children
/// too, since the environment is inherited. The calling process is left out.
#[must_use]
pub fn with_env(key: &str, value: Option<&str>) -> Vec<Process> {
    let prefix = format!("{key}=");
    sweep(|dir| {
        let environment = std::fs::read(dir.join("environ")).ok()?;
        let found = environment.split(|b| *b == 0).any(|entry| match value {
            Some(value) => entry.strip_prefix(prefix.as_bytes()) == Some(value.as_bytes()),
            None => entry.starts_with(prefix.as_bytes()),
        });
        found.then_some(())
    })
}

/// Processes that run this executable file.
#[must_use]
pub fn of_exe(exe: &Path) -> Vec<Process> {
    let wanted = std::fs::canonicalize(exe).unwrap_or_else(|_| exe.to_path_buf());
    sweep(|dir| {
        let link = std::fs::read_link(dir.join("exe")).ok()?;
        // The kernel marks the file of a running program that was replaced by a new build.
        let name = link.as_os_str().as_bytes();
        let name = name.strip_suffix(b" (deleted)").unwrap_or(name);
        (Path::new(OsStr::from_bytes(name)) == wanted).then_some(())
    })
}

/// Processes with `part` in their arguments (joined by blanks).
#[must_use]
pub fn of_cmdline(part: &str) -> Vec<Process> {
    sweep(|dir| command_of(dir).contains(part).then_some(()))
}

/// Whether the process exists and is no zombie.
#[must_use]
pub fn is_alive(pid: u32) -> bool {
    state_of(&Path::new("/proc").join(pid.to_string())).is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// Sends a signal to one process.
///
/// # Errors
/// [`TestkitError::Process`] when there is no such process or it is not ours to signal.
pub fn signal(pid: u32, signal: Signal) -> Result<(), TestkitError> {
    let bad = |source: std::io::Error| TestkitError::Process { operation: "signal", pid, source };
    let raw = i32::try_from(pid).ok().filter(|raw| *raw > 0).and_then(Pid::from_raw);
    let pid = raw.ok_or_else(|| bad(std::io::ErrorKind::InvalidInput.into()))?;
    rustix::process::kill_process(pid, signal).map_err(|errno| bad(errno.into()))
}

/// Every live process that `wanted` accepts, by pid. One that ends while it is read is skipped.
fn sweep(wanted: impl Fn(&Path) -> Option<()>) -> Vec<Process> {
    let own = std::process::id();
    let entries = std::fs::read_dir("/proc").expect("these tests run on Linux, where /proc is mounted");
    let mut found: Vec<Process> = entries
        .flatten()
        .filter_map(|entry| {
            let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
            let dir = entry.path();
            if pid == own || !is_alive(pid) {
                return None;
            }
            wanted(&dir)?;
            Some(Process { pid, command: command_of(&dir) })
        })
        .collect();
    found.sort();
    found
}

fn command_of(dir: &Path) -> String {
    let bytes = std::fs::read(dir.join("cmdline")).unwrap_or_default();
    let parts: Vec<_> =
        bytes.split(|b| *b == 0).filter(|p| !p.is_empty()).map(String::from_utf8_lossy).collect();
    parts.join(" ")
}

/// The state letter of `/proc/PID/stat`; it follows the last `)`, since a program's name may contain anything.
fn state_of(dir: &Path) -> Option<char> {
    let stat = std::fs::read(dir.join("stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait_until;

    const LIMIT: Duration = Duration::from_secs(10);

    #[test]
    fn a_child_is_found_by_environment_program_and_arguments_until_it_ends() {
        let mark = format!("mark-{}", std::process::id());
        let mut child = Command::new("sleep").arg("3723").env("SPOTQ_TESTKIT_MARK", &mark).spawn().unwrap();
        let pid = child.id();
        let in_env = || with_env("SPOTQ_TESTKIT_MARK", Some(&mark)).iter().any(|p| p.pid == pid);
        // Between fork and exec the child still looks like this test.
        wait_until(LIMIT, in_env, "the child's environment").unwrap();
        assert!(with_env("SPOTQ_TESTKIT_MARK", None).iter().any(|p| p.pid == pid));
        assert!(with_env("SPOTQ_TESTKIT_MARK", Some("another")).is_empty());
        assert!(of_cmdline("sleep 3723").iter().any(|p| p.pid == pid && p.command == "sleep 3723"));
        let program = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap();
        assert!(of_exe(&program).iter().any(|p| p.pid == pid));

        signal(pid, Signal::KILL).unwrap();
        // Not yet waited for, the child is a zombie; a zombie is not a leak.
        wait_until(LIMIT, || !is_alive(pid), "the child's end").unwrap();
        assert!(!in_env());
        child.wait().unwrap();
    }

    #[test]
    fn a_marked_grandchild_is_seen_and_does_not_outlive_the_mark() {
        let mark = Mark::new();
        let mut command = Command::new("sh");
        command.args(["-c", "setsid sleep 3724 >/dev/null 2>&1 & exit 0"]);
        mark.put_on(&mut command);
        assert!(command.status().unwrap().success());
        let pid =
            wait_for(LIMIT, || Some(mark.live().iter().find(|p| p.command == "sleep 3724")?.pid), "sleep")
                .unwrap();
        let error = mark.wait_gone(Duration::ZERO).unwrap_err().to_string();
        assert!(error.contains("sleep 3724"), "{error}");
        drop(mark);
        wait_until(LIMIT, || !is_alive(pid), "the end of sleep").unwrap();
        assert!(Mark::new().wait_gone(Duration::ZERO).is_ok());
    }

    #[test]
    fn a_signal_to_no_process_is_an_error_and_never_goes_to_a_group() {
        assert!(signal(0, Signal::TERM).is_err());
        assert!(signal(u32::MAX, Signal::TERM).is_err());
    }
}
