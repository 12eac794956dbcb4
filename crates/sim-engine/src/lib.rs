//! The real engine and the real worker in a simulated world of faults: their own code over their own gRPC, with hosts,
//! network and time by turmoil, and with stores, clouds, training commands and users as models, from one seed.
//!
//! A run has a safety phase with faults and then a liveness phase without, at whose end everything must be done and
//! nobody pays. What must hold is looked at from outside, by the ids of the invariants. This crate decides nothing that
//! the engine, the core or the worker decides.

mod cloud;
mod counts;
mod draw;
mod driver;
mod faults;
mod logs;
mod net;
mod node;
mod objects;
mod oracle;
mod scheduler;
mod store;
mod trace;
mod trainer;
mod users;
mod world;

pub use counts::{Count, Counts};
pub use spotq_sim::{TraceLevel, Violation};

/// How a run is made.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Jobs that users submit.
    pub jobs: u32,
    pub trace: TraceLevel,
}

impl Default for Options {
    fn default() -> Self {
        Options { jobs: 8, trace: TraceLevel::Hash }
    }
}

/// What a run did.
#[derive(Debug, Clone)]
pub struct Run {
    pub seed: u64,
    /// The first one; the run ends with it.
    pub violation: Option<Violation>,
    pub counts: Counts,
    pub virtual_ms: u64,
    /// The same for the same seed.
    pub hash: u64,
    pub trace: Vec<String>,
}

/// Makes one run.
#[must_use]
pub fn run(seed: u64, options: &Options) -> Run {
    driver::run(seed, options)
}
