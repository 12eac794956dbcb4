//! The worker as a program of its own. Everything is in the library, which other binaries re-execute too.

use std::process::ExitCode;

fn main() -> ExitCode {
    spotq_worker::worker_main(std::env::args_os())
}
