//! `spotq-chaos`: prints what was done and what broke; ends with 1 and the command to repeat it if anything did.

use std::process::ExitCode;

use clap::Parser as _;
use spotq_chaos::cli::{Cli, Command, Output, SimArgs};
use spotq_chaos::mutations;
use spotq_chaos::sim::{self, Simulation};

/// The simulation makes and drops small things all the time; with glibc's allocator it takes half as long again.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[expect(clippy::print_stdout, reason = "a command-line tool: the summary is its output")]
fn main() -> anyhow::Result<ExitCode> {
    let whole = match Cli::parse().command {
        Command::Kills(args) => {
            let summary = spotq_chaos::run(&args.to_kills()?)?;
            print!("{summary}");
            summary.violations.is_empty()
        }
        Command::Sim(args) => simulate(Simulation::Core, &args),
        Command::EngineSim(args) => simulate(Simulation::Engine, &args),
        Command::Mutations(args) => {
            let found = mutations::run(&args, |verdict| println!("{verdict}"))?;
            println!(
                "{} of {} mutations are found",
                found.iter().filter(|v| v.is_found()).count(),
                found.len()
            );
            found.iter().all(mutations::Verdict::is_found)
        }
    };
    Ok(if whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Says whether every promise was kept.
#[expect(clippy::print_stdout, reason = "a command-line tool: the summary is its output")]
fn simulate(simulation: Simulation, args: &SimArgs) -> bool {
    let summary = sim::run(simulation, args);
    match args.output {
        Output::Table => print!("{summary}"),
        Output::Json => println!("{}", summary.to_json()),
    }
    summary.failures.is_empty()
}
