//! Seeded faults against the whole product, driven from outside with its own programs, and what must hold after them.
//!
//! A seed fixes every draw, not the timing of a busy machine: a replay makes the same plan, not the same interleaving.
//! This crate never reaches into a process that it tests, and never ends one that it did not cause.

pub mod cli;
mod kills;
pub mod mutations;
mod plan;
pub mod sim;
mod system;
mod verify;
mod victims;

pub use kills::{Kills, Summary, run};
