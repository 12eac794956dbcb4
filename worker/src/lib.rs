//! The agent on a node: runs the user's unmodified command, watches for the cloud's notices, saves, reports.
//!
//! Decisions are in `supervise`, which is pure; everything else carries them out. It must never adopt work that it
//! was not granted, act for a generation that was superseded, block training on a slow scheduler, or leave a process
//! behind.

mod agent;
mod args;
mod attempt;
mod bootstrap;
mod cgroup;
mod environment;
mod error;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod identity;
mod ids;
mod journal;
mod logs;
mod notice;
mod observe;
mod outbox;
mod process;
mod progress;
mod pushes;
mod renames;
mod restoring;
mod saves;
mod session;
mod shim;
#[cfg(feature = "simulation")]
pub mod simulation;
pub mod supervise;
mod surroundings;
mod tree;
mod uploads;
mod words;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;

pub use agent::Departure;
pub use environment::STORE_PREFIX;
pub use error::WorkerError;

/// A program that is called by this name is to call [`worker_main`].
pub const WORKER_ARGV0: &str = "spotq-worker";
/// The worker could not begin.
const EXIT_CANNOT_BEGIN: u8 = 2;
/// No scheduler wanted it or answered.
const EXIT_ABANDONED: u8 = 3;

/// The whole worker. `args` begins with the program's name.
#[must_use]
pub fn worker_main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.into_iter().collect();
    if args.get(1).is_some_and(|arg| arg == shim::EXEC_IN) {
        return shim::run(args.into_iter().skip(2));
    }
    let parsed = match args::Args::try_parse_from(args) {
        Ok(parsed) => parsed,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { EXIT_CANNOT_BEGIN } else { 0 });
        }
    };
    start_logging();
    match run(parsed) {
        Ok(Departure::Orderly) => ExitCode::SUCCESS,
        Ok(Departure::Abandoned) => ExitCode::from(EXIT_ABANDONED),
        Err(error) => {
            tracing::error!(%error, "the worker cannot begin");
            ExitCode::from(EXIT_CANNOT_BEGIN)
        }
    }
}

fn run(args: args::Args) -> Result<Departure, WorkerError> {
    let config = args.into_config()?;
    // Orphans of the jobs come to us, so that they can be found and collected.
    if let Err(errno) = rustix::process::set_child_subreaper(rustix::process::Pid::from_raw(1)) {
        tracing::warn!(%errno, "orphans of jobs will not come to this worker");
    }
    // One thread: a child that asks to die with its parent thread dies with the whole worker, and only then.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| WorkerError::system("start the runtime", e))?;
    let departure = runtime.block_on(agent::run(config));
    // A blocking task that hangs on a dead disk must not hold the node.
    runtime.shutdown_background();
    departure
}

fn start_logging() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("SPOTQ_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    // Somebody else's subscriber stays: this may be a library in a larger program.
    let _ = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).try_init();
}
