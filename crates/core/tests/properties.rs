//! The invariants in a world of random faults, and that everything ends well once the faults stop.

mod common;

use common::steps::{Step, User, steps};
use common::world::World;
use proptest::prelude::*;

/// Enough to take several jobs through several nodes each.
const STEPS_MAX: usize = 120;

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

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
