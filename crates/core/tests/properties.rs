//! The invariants in a world of random faults, and that everything ends well once the faults stop.
#![expect(clippy::unwrap_used, reason = "a test, helpers included, ends at the first surprise")]

mod common;

use std::collections::BTreeSet;

use common::steps::{Step, User, steps};
use common::world::World;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use spotq_model::Fact;

/// Enough to take several jobs through several nodes each.
const STEPS_MAX: usize = 120;

/// A task that never ends makes every try long; a larger example in time beats a minimal one never.
const SHRINK_MS_MAX: u32 = 60_000;

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, max_shrink_time: SHRINK_MS_MAX, ..ProptestConfig::default() })]

    /// INV-02, 03, 04, 06, 09, 11 after every step, and the same state from a replay.
    #[test]
    fn no_fault_breaks_an_invariant(steps in steps(STEPS_MAX)) {
        let mut world = World::new();
        for step in &steps {
            world.step(step);
        }
        world.core.check_replay();
        world.check_ends();
    }

    #[test]
    fn when_faults_stop_every_task_ends_and_no_node_stays(steps in steps(STEPS_MAX / 2)) {
        let mut world = World::new();
        for step in &steps {
            world.step(step);
        }
        world.calm();
        world.check_ends();
    }
}

/// The properties are worth what their steps reach: every fact, every end and every outcome comes up.
#[test]
fn random_steps_reach_every_fact_end_and_outcome() {
    let mut runner = TestRunner::deterministic();
    let (mut facts, mut ends, mut outcomes) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for _ in 0..300 {
        let steps = steps(STEPS_MAX).new_tree(&mut runner).unwrap().current();
        let mut world = World::new();
        steps.iter().for_each(|step| world.step(step));
        for event in &world.core.log {
            let name = serde_json::to_value(&event.fact).unwrap()["fact"].as_str().unwrap().to_owned();
            facts.insert(name);
            match &event.fact {
                Fact::AttemptEnded { end, .. } => drop(ends.insert(end.name())),
                Fact::TaskDone { outcome, .. } => drop(outcomes.insert(outcome.name())),
                _ => {}
            }
        }
    }
    assert_eq!(facts.len(), 27, "only {facts:?}");
    assert_eq!(ends.len(), 10, "only {ends:?}");
    // A node failure needs twenty losses in a row, which has a test of its own.
    assert_eq!(outcomes.len(), 8, "only {outcomes:?}");
}

#[test]
fn an_honest_world_completes_every_kind_of_job() {
    let mut world = World::new();
    (0..6).for_each(|key| world.step(&Step::Submit { kind: 20 + key, key }));
    (0..3).for_each(|_| world.round());
    world.step(&Step::User { what: User::Drill, job: 0 });
    world.calm();
    world.check_ends();
    assert!(world.core.cluster.jobs.len() == 6 && world.core.log.len() > 60, "the world did not do much");
}
