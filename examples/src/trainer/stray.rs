//! A process that leaves its parent's session and group, as daemons and careless data loaders do.
//!
//! Whoever runs the trainer has to find and end it. It lives a bounded time, so that a failed test leaves nothing behind.

use std::{env, process::Command, time::Duration};

use anyhow::Context;

use super::{pause, say};

/// Far longer than any test waits, short enough to be gone soon.
const LIFE: Duration = Duration::from_secs(300);

/// Starts the grandchild: this program again, twice.
///
/// # Errors
/// The program cannot be started once more.
pub fn start() -> anyhow::Result<()> {
    let mut child = again("1")?.spawn().context("cannot start the first process of the double fork")?;
    child.wait().context("cannot wait for the first process of the double fork")?;
    Ok(())
}

/// What the processes that [`start`] leads to do: 1 leaves the session and starts 2, which waits its life out.
///
/// # Errors
/// A call of the system fails.
pub fn run_stage(stage: u8) -> anyhow::Result<()> {
    if stage == 1 {
        rustix::process::setsid().context("cannot start a session")?;
        // Nobody waits for it: its parent ends now, and the nearest reaper inherits it.
        again("2")?.spawn().context("cannot start the second process of the double fork")?;
        return Ok(());
    }
    say(&format!("stray process {} started", std::process::id()));
    pause(LIFE);
    Ok(())
}

/// This program with its own arguments, so that it works whatever it is embedded in; the last stage given wins.
fn again(stage: &str) -> anyhow::Result<Command> {
    let program = env::current_exe().context("cannot find this program's own file")?;
    let mut command = Command::new(program);
    let mut args = env::args_os().skip(1).peekable();
    while let Some(arg) = args.next() {
        if arg == "--stray-stage" {
            args.next();
            continue;
        }
        command.arg(arg);
    }
    command.args(["--stray-stage", stage]);
    Ok(command)
}
