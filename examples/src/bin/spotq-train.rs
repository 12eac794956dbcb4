//! The character model's trainer as a program of its own, for tests that need one from outside `spotq`.
//!
//! It parses flags and calls the library; it must never hold logic of its own.

use std::process::ExitCode;

use clap::Parser;
use spotq_examples::TrainArgs;

/// Train a small character-level language model that survives preemption.
#[derive(Debug, Parser)]
#[command(name = "spotq-train", version)]
struct Cli {
    #[command(flatten)]
    args: TrainArgs,
}

fn main() -> anyhow::Result<ExitCode> {
    spotq_examples::run(Cli::parse().args)
}
