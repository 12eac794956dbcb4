//! A simulated cloud on one machine, so that everything above it runs without an account and without a bill.
//!
//! The cloud is a process of its own (`cloud_main`), because a real cloud outlives a killed scheduler. Its nodes
//! are child processes, its prices come from a seeded market, and each node can ask its own metadata service in
//! the protocol of the cloud that it pretends to be. `LocalCloud` is the client that implements `CloudProvider`.
//! It listens on loopback only, and must never leave a process of a node behind when the node is gone.

mod catalog;
mod client;
mod cloud;
mod config;
mod control;
mod error;
mod market;
mod metadata;
mod node;
mod process;
mod record;
mod tree;

pub use client::LocalCloud;
pub use config::{CloudConfig, MarketConfig};
pub use error::LocalError;
pub use market::{Fate, Market};
pub use process::{CLOUD_ARGV0, CloudArgs, CloudCommand, ExecInArgs, ServeArgs, WORKER_ARGV0, cloud_main};
