//! The engine simulation as large as CI can bear, and every seed of it that once found something.

use spotq_chaos::cli::{Command, SimArgs};
use spotq_chaos::sim::{Simulation, run};
use spotq_sim_engine::Options;

mod common;

use common::regressions;

#[test]
fn no_fault_of_50_seeds_breaks_an_invariant() {
    let args = SimArgs {
        seeds: Some(50),
        from: 0,
        seed: None,
        jobs: None,
        threads: None,
        verbose: false,
        output: spotq_chaos::cli::Output::Table,
    };
    let summary = run(Simulation::Engine, &args);
    println!("{summary}");
    assert!(summary.failures.is_empty(), "{summary}");
    // What never happens proves nothing.
    let silent: Vec<&str> = summary.counts.iter().filter(|(_, n)| *n == 0).map(|(name, _)| *name).collect();
    assert!(silent.is_empty(), "never exercised: {silent:?}");
    assert!(summary.count("jobs completed") > 50 * 4, "{summary}");
}

#[test]
fn the_same_seed_is_the_same_run_also_beside_others() {
    let make = |seed| spotq_sim_engine::run(seed, &Options::default());
    for seed in 100..104 {
        let alone = make(seed);
        let beside = std::thread::scope(|scope| {
            let runs = [seed, seed, seed + 1000].map(|seed| scope.spawn(move || make(seed)));
            runs.map(|run| run.join().unwrap())
        });
        assert_eq!((alone.hash, alone.virtual_ms), (beside[0].hash, beside[0].virtual_ms), "seed {seed}");
        assert_eq!((alone.hash, alone.virtual_ms), (beside[1].hash, beside[1].virtual_ms), "seed {seed}");
        assert_ne!(alone.hash, beside[2].hash, "seed {seed}");
    }
}

#[test]
fn the_engine_simulation_of_every_regression_seed_finds_nothing_any_more() {
    for (path, command) in regressions() {
        if let Command::EngineSim(args) = command {
            let summary = run(Simulation::Engine, &args);
            assert!(summary.failures.is_empty(), "{}: {summary}", path.display());
        }
    }
}
