//! The real engine and the real worker in a simulated world of faults: their own code over their own gRPC, with hosts,
//! network and time by turmoil, and with stores, clouds, training commands and users as models, from one seed.
//!
//! A run has a safety phase with faults and then a liveness phase without, at whose end everything must be done and
//! nobody pays. What must hold is looked at from outside, by the ids of the invariants. This crate decides nothing that
//! the engine, the core or the worker decides.

pub mod counts;
