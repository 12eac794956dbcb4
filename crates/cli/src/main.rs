//! The `spotq` command.
//!
//! One binary is everything that a first run needs: by the name that it is called it is also the worker, the local
//! cloud and the scheduler. What it says goes through `out`; what goes wrong is an `ExpectedError` or a bug.

mod args;
mod client;
mod commands;
mod config;
mod contexts;
mod demo;
mod error;
mod follow;
mod json;
mod login;
mod narrate;
mod out;
mod pull;
mod report;
mod screen;
mod stream;
mod submit;
mod views;
mod words;

use std::process::ExitCode;

use clap::Parser as _;

use crate::args::Cli;
use crate::error::ExpectedError;
use crate::out::{NoColour, Out};

fn main() -> ExitCode {
    if let Some(code) = spotq_scheduler::by_name(std::env::args_os()) {
        return code;
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => return usage(&e),
    };
    let no_colour = if cli.global.no_color { NoColour::Asked } else { NoColour::NotAsked };
    let out = Out::new(cli.global.output, no_colour, cli.global.quiet);
    match commands::run(cli.command, &cli.global, &out) {
        Ok(code) => code,
        Err(error) => explain(&error),
    }
}

/// Help and version go to stdout and are no failure; anything else is wrong usage.
fn usage(error: &clap::Error) -> ExitCode {
    // A reader that closed the pipe, as `spotq --help | head` does, has seen enough.
    let _ = error.print();
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(error::codes::USAGE))
}

fn explain(error: &ExpectedError) -> ExitCode {
    if !matches!(error, ExpectedError::ClosedPipe) {
        out::talk(&format!("spotq: {error}"));
    }
    ExitCode::from(error.exit_code())
}
