//! The `spotqd` program.

use std::process::ExitCode;

fn main() -> ExitCode {
    spotq_scheduler::by_name(std::env::args_os())
        .unwrap_or_else(|| spotq_scheduler::daemon_main(std::env::args_os()))
}
