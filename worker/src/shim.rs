//! The last step before the user's command: a re-execution of this program that prepares itself and then becomes
//! the command.
//!
//! It exists because joining a cgroup, leaving the session and asking for a death signal must happen in the child,
//! and doing that between fork and exec needs unsafe code. It must never outlive its `exec`.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use rustix::process::{Pid, Signal};

/// Hidden subcommand of the worker.
pub const EXEC_IN: &str = "exec-in";
/// Exit code when the command could not be started; the status file says why.
const CANNOT_START: u8 = 125;

/// What the shim does before the command.
#[derive(Debug, Clone, Default)]
pub struct ShimArgs {
    /// Directories of cgroups to join.
    pub cgroups: Vec<PathBuf>,
    /// The worker: if it is gone already, the command does not start.
    pub parent: u32,
    /// Where a reason goes if the command cannot be started.
    pub status: PathBuf,
    pub command: Vec<OsString>,
}

impl ShimArgs {
    /// As arguments, without the program's name.
    #[must_use]
    pub fn to_args(&self) -> Vec<OsString> {
        let mut args: Vec<OsString> =
            vec![EXEC_IN.into(), self.parent.to_string().into(), self.status.clone().into()];
        args.push(self.cgroups.len().to_string().into());
        args.extend(self.cgroups.iter().map(|dir| dir.clone().into_os_string()));
        args.extend(self.command.iter().cloned());
        args
    }

    /// From the arguments after [`EXEC_IN`].
    #[must_use]
    pub fn parse(mut args: impl Iterator<Item = OsString>) -> Option<ShimArgs> {
        let parent = args.next()?.to_str()?.parse().ok()?;
        let status = PathBuf::from(args.next()?);
        let count: usize = args.next()?.to_str()?.parse().ok()?;
        let cgroups: Vec<PathBuf> = args.by_ref().take(count).map(PathBuf::from).collect();
        let command: Vec<OsString> = args.collect();
        (cgroups.len() == count && !command.is_empty()).then_some(ShimArgs {
            cgroups,
            parent,
            status,
            command,
        })
    }
}

/// Becomes the command, or leaves the reason in the status file.
#[must_use]
pub fn run(args: impl Iterator<Item = OsString>) -> ExitCode {
    let Some(args) = ShimArgs::parse(args) else { return ExitCode::from(CANNOT_START) };
    let problem = become_command(&args);
    // Nobody to tell if this fails too; the exit code is left.
    let _ = fs::write(&args.status, problem);
    ExitCode::from(CANNOT_START)
}

/// Returns only the reason why it could not.
fn become_command(args: &ShimArgs) -> String {
    for dir in &args.cgroups {
        // The tree is found by its mark as well, so a cgroup that refuses us only costs certainty.
        let _ = fs::write(dir.join("cgroup.procs"), std::process::id().to_string());
    }
    let _ = rustix::process::setsid();
    if let Err(errno) = rustix::process::set_parent_process_death_signal(Some(Signal::KILL)) {
        return format!("cannot tie the command to its worker: {errno}");
    }
    let parent = rustix::process::getppid().map(Pid::as_raw_nonzero);
    if parent.and_then(|pid| u32::try_from(pid.get()).ok()) != Some(args.parent) {
        return "the worker ended before the command started".to_owned();
    }
    let program = &args.command[0];
    let error = std::process::Command::new(program).args(&args.command[1..]).exec();
    explain(program, &error)
}

fn explain(program: &OsStr, error: &io::Error) -> String {
    let name = Path::new(program).display();
    match error.kind() {
        io::ErrorKind::NotFound => format!(
            "cannot run `{name}`: command not found; is it installed on the node, and its `#!` interpreter too?"
        ),
        io::ErrorKind::PermissionDenied => {
            format!("cannot run `{name}`: permission denied; is the file executable?")
        }
        io::ErrorKind::ArgumentListTooLong => format!(
            "cannot run `{name}`: arguments and environment are too large for the system; one variable may hold 128 KB, all together about 2 MB"
        ),
        _ => format!("cannot run `{name}`: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_survive_a_round_trip_and_nonsense_is_refused() {
        let args = ShimArgs {
            cgroups: vec!["/c/a".into(), "/c/b".into()],
            parent: 7,
            status: "/s".into(),
            command: vec!["x".into(), "".into(), "a b\n".into()],
        };
        let parsed = ShimArgs::parse(args.to_args().into_iter().skip(1)).unwrap();
        assert_eq!((parsed.cgroups, parsed.parent, parsed.command), (args.cgroups, 7, args.command));
        for bad in [&["x"][..], &["7", "/s", "3", "/c/a"], &["7", "/s", "0"]] {
            assert!(ShimArgs::parse(bad.iter().map(OsString::from)).is_none(), "{bad:?}");
        }
    }
}
