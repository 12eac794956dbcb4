//! Attempts of a trainer that are ended at random steps, as preemptions do.

use std::{os::unix::process::ExitStatusExt, process::Command};

use rustix::process::Signal;
use spotq_examples::trainer::math::Rng;

use crate::support::{Trainer, run_whole};

/// Runs attempts of `command` that end after a random number of steps, `interruptions` times, then one to the end.
/// The command prints a line `step N/...` for each step. Gives how many attempts were interrupted.
pub fn run_interrupted(
    command: impl Fn(u32) -> Command,
    seed: u64,
    interruptions: u32,
    most_steps: u64,
) -> u32 {
    println!("kill points are drawn from seed {seed}");
    let mut rng = Rng::seeded(seed);
    let mut interrupted = 0;
    for attempt in 1..=interruptions {
        let mut trainer = Trainer::start(&mut command(attempt));
        let steps = 1 + rng.below(most_steps);
        let reached = (0..steps).all(|_| trainer.next_line("step ").is_some());
        if !reached {
            break;
        }
        let kind = rng.below(3);
        match kind {
            0 => trainer.signal(Signal::KILL),
            1 => trainer.signal(Signal::TERM),
            _ => {
                trainer.signal(Signal::USR1);
                let saved = trainer.next_line("saved step ");
                println!("attempt {attempt}: on USR1: {saved:?}");
                trainer.signal(Signal::KILL);
            }
        }
        let (status, lines) = trainer.finish();
        println!("attempt {attempt}: interrupted after {steps} lines: {status}");
        if status.success() {
            break;
        }
        let expected = if kind == 1 { status.code() == Some(143) } else { status.signal() == Some(9) };
        assert!(expected, "attempt {attempt} ended with {status}: {lines:#?}");
        interrupted += 1;
    }
    run_whole(&mut command(interruptions + 1));
    interrupted
}
