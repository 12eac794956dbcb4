//! The programs end to end: real `spotqd`, worker and trainer processes on loopback, driven through the `spotq` command
//! as a user drives it.
//!
//! Nothing here links the product: what these tests see is what a user sees. They never end a process that they did
//! not start, and leave none behind.

#![expect(clippy::unwrap_used, reason = "a helper of tests may panic as a test may")]

mod cluster;
mod ledger;
mod leftovers;
mod training;

mod bad_input;
mod daemon;
mod demo;
mod frameworks;
mod identities;
mod lifecycle;
mod logs;
mod preemption;
mod queueing;
mod s3;
mod variants;
