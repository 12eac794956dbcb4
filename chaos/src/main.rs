//! `spotq-chaos`: prints what was done and what broke; ends with 1 and the command to repeat it if anything did.

use std::process::ExitCode;

use clap::Parser as _;
use spotq_chaos::cli::{Cli, Command};

#[expect(clippy::print_stdout, reason = "a command-line tool: the summary is its output")]
fn main() -> anyhow::Result<ExitCode> {
    let Command::Kills(args) = Cli::parse().command;
    let summary = spotq_chaos::run(&args.to_kills()?)?;
    print!("{summary}");
    Ok(if summary.violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
