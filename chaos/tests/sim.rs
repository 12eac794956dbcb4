//! The simulation as large as CI can bear, and every seed of it that once found something.

use spotq_chaos::cli::{Command, SimArgs};
use spotq_chaos::sim::{Simulation, Summary, run};
use spotq_sim::Options;

mod common;

use common::regressions;

fn sim(from: u64, seeds: u64) -> Summary {
    let args = SimArgs {
        seeds: Some(seeds),
        from,
        seed: None,
        jobs: None,
        threads: None,
        verbose: false,
        output: spotq_chaos::cli::Output::Table,
    };
    run(Simulation::Core, &args)
}

#[test]
fn no_fault_of_500_seeds_breaks_an_invariant() {
    let summary = sim(0, 500);
    println!("{summary}");
    assert!(summary.failures.is_empty(), "{summary}");
    // What never happens proves nothing.
    let silent: Vec<&str> = summary.counts.iter().filter(|(_, n)| *n == 0).map(|(name, _)| *name).collect();
    assert!(silent.is_empty(), "never exercised: {silent:?}");
    assert!(summary.count("jobs completed") > 500 * 25, "{summary}");
}

#[test]
fn the_same_seed_is_the_same_run() {
    for seed in 0..10 {
        let [one, two] = [(); 2].map(|()| spotq_sim::run(seed, &Options::default()));
        assert_eq!((one.hash, one.virtual_ms), (two.hash, two.virtual_ms), "seed {seed}");
        let other = spotq_sim::run(seed + 1, &Options::default());
        assert_ne!(one.hash, other.hash, "seed {seed}");
    }
}

#[test]
fn the_simulation_of_every_regression_seed_finds_nothing_any_more() {
    for (path, command) in regressions() {
        if let Command::Sim(args) = command {
            let summary = run(Simulation::Core, &args);
            assert!(summary.failures.is_empty(), "{}: {summary}", path.display());
        }
    }
}
