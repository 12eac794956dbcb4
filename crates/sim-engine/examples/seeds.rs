//! Seeds one after the other in one thread, and nothing else: `seeds [COUNT [FROM]]`. Small enough to be built with one
//! changed line of the core and nothing round it, and to be measured.
//!
//! Prints the first seed that breaks an invariant and ends with 1, or says that none did.

use std::process::ExitCode;

#[expect(clippy::print_stdout, reason = "a command-line tool: what it found is its output")]
fn main() -> ExitCode {
    let mut numbers = std::env::args().skip(1).filter_map(|arg| arg.parse::<u64>().ok());
    let (count, from) = (numbers.next().unwrap_or(100), numbers.next().unwrap_or(0));
    for seed in from..from + count {
        let run = spotq_sim_engine::run(seed, &spotq_sim_engine::Options::default());
        if let Some(broken) = run.violation {
            println!("seed {seed} breaks {}: {}", broken.id, broken.text);
            return ExitCode::FAILURE;
        }
    }
    println!("{count} seeds break nothing");
    ExitCode::SUCCESS
}
