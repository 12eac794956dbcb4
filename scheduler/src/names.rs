//! One program, several names: it starts itself again as its own cloud and as the workers of that cloud's nodes.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser as _;

use crate::daemon::daemon_main;

/// A program that is called by this name is the scheduler.
pub const DAEMON_ARGV0: &str = "spotqd";

/// Runs what the program is called by, if that is one of our names; `None` for any other name.
#[must_use]
pub fn by_name(args: impl IntoIterator<Item = OsString>) -> Option<ExitCode> {
    let args: Vec<OsString> = args.into_iter().collect();
    let name = Path::new(args.first()?).file_name()?.to_str()?;
    match name {
        spotq_worker::WORKER_ARGV0 => Some(spotq_worker::worker_main(args)),
        spotq_provider_local::CLOUD_ARGV0 => Some(cloud(args)),
        DAEMON_ARGV0 => Some(daemon_main(args)),
        _ => None,
    }
}

fn cloud(args: Vec<OsString>) -> ExitCode {
    let parsed = match spotq_provider_local::CloudArgs::try_parse_from(args) {
        Ok(parsed) => parsed,
        Err(error) => {
            // Whoever started it reads the log; a closed stderr leaves nobody to tell.
            let _ = error.print();
            return ExitCode::from(2);
        }
    };
    crate::daemon::start_logging();
    match spotq_provider_local::cloud_main(parsed) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("the local cloud ended: {error:#}");
            ExitCode::FAILURE
        }
    }
}
