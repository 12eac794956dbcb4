//! `spotqd`: configuration and wiring. The only place that picks a store and a provider; it decides nothing.

mod args;
mod config;
mod daemon;
mod error;
mod names;
mod yaml;

pub use args::DaemonArgs;
pub use config::{Config, LocalConfig};
pub use daemon::{daemon_main, run};
pub use error::DaemonError;
pub use names::{DAEMON_ARGV0, by_name};
