//! The shipped core in a world of faults: schedulers, stores, clouds, workers, networks and users as models, in one
//! thread, under virtual time, from one seed.
//!
//! A run has a safety phase with faults and then a liveness phase without, at whose end everything must be done and
//! nobody pays. What must hold is looked at from outside, by the ids of the invariants. This crate decides nothing that
//! the core decides, reads no clock, starts no thread, and gives the same run for the same seed on every machine.

mod attempt;
mod cloud;
mod counts;
mod draw;
mod effects;
mod net;
mod objects;
mod oracle;
mod rng;
mod scheduler;
mod store;
mod trace;
mod users;
mod worker;
mod world;

pub use counts::{Count, Counts};
pub use draw::market;
pub use rng::{Ppm, Rng};

/// How a run is made.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Jobs that users submit.
    pub jobs: u32,
    pub trace: TraceLevel,
}

/// What is kept of the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TraceLevel {
    /// Nothing but a hash.
    Hash,
    /// The last lines.
    Last,
    Whole,
}

impl Default for Options {
    fn default() -> Self {
        Options { jobs: 50, trace: TraceLevel::Hash }
    }
}

/// A broken promise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    pub id: &'static str,
    pub text: String,
}

/// What a run did.
#[derive(Debug, Clone)]
pub struct Run {
    pub seed: u64,
    /// The first one; the run ends with it.
    pub violation: Option<Violation>,
    pub counts: Counts,
    pub virtual_ms: u64,
    /// The same for the same seed, always.
    pub hash: u64,
    pub trace: Vec<String>,
}

/// Makes one run.
#[must_use]
pub fn run(seed: u64, options: &Options) -> Run {
    world::World::new(seed, options).run()
}
