//! `spotqd`: configuration and wiring. The only place that picks a store and a provider; it decides nothing.

mod args;
mod config;
mod daemon;
mod error;
mod manage;
mod names;
mod secrets;
mod yaml;

/// Of every binary that links this crate. Jobs are many small pieces that are made on one thread and freed on another.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

pub use args::DaemonArgs;
pub use config::{Config, LocalConfig};
pub use daemon::{daemon_main, run};
pub use error::DaemonError;
pub use names::{DAEMON_ARGV0, by_name};
