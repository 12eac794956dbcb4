//! Kill rounds as large as CI can bear, and every seed that once found something.
//!
//! They run the workspace's own programs, which must be built before: `cargo build --workspace --bins`.

use std::time::{Duration, Instant};

use spotq_chaos::cli::Command;
use spotq_chaos::{Kills, run};
use spotq_testkit::{Seed, program};

mod common;

use common::regressions;

/// After the last kill; a third of what a person's run has, so that a job that hangs is told in time.
const CALM: Duration = Duration::from_secs(80);

fn kills(seed: u64, rounds: u32) -> Kills {
    let daemon = program("spotqd").expect("the programs are built before the tests");
    let programs = daemon.parent().expect("a program lies in a directory").to_path_buf();
    Kills { rounds, seed, from: 0, jobs: 3, programs, keep: None, calm: CALM }
}

#[test]
fn kills_at_random_moments_lose_nothing_and_change_nothing() {
    let seed = Seed::for_test();
    let started = Instant::now();
    let summary = run(&kills(seed.value(), 25)).unwrap();
    println!("{summary}");
    assert!(summary.violations.is_empty(), "{summary}");
    assert_eq!(summary.kills.values().sum::<u32>(), 25);
    assert!(
        summary.acknowledged > 0 && summary.books.attempts > summary.books.jobs,
        "nothing was disturbed: {summary}"
    );
    println!("seed {}, {:.0} s", seed.value(), started.elapsed().as_secs_f64());
}

#[test]
fn kills_of_every_regression_seed_find_nothing_any_more() {
    for (path, command) in regressions() {
        let Command::Kills(args) = command else { continue };
        let summary =
            run(&Kills { from: args.from, jobs: args.jobs, ..kills(args.seed, args.rounds) }).unwrap();
        assert!(summary.violations.is_empty(), "{}: {summary}", path.display());
    }
}
