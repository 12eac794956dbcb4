//! What the tests of every crate need: waits with a deadline, named directories, a seeded generator, child
//! processes that never outlive their test, a relay that breaks connections, and values of the model.
//!
//! Used by tests alone; no product crate may depend on it outside `[dev-dependencies]`. Nothing here sleeps for a
//! fixed time and hopes, and nothing here ends a process that it did not start.

pub mod child;
pub mod dirs;
pub mod logs;
pub mod processes;
pub mod relay;
pub mod seed;
pub mod values;
pub mod wait;

pub use child::{Child, Server, free_port, program};
pub use dirs::TempDir;
pub use logs::LogChecker;
pub use processes::Mark;
pub use relay::Relay;
pub use seed::{Rng, Seed};
pub use values::{FACT_KINDS, OfferBuilder, checkpoint, exit, fact_kind, job, offer};
pub use wait::{TimedOut, wait_for, wait_until, wait_until_async};

use std::path::PathBuf;

/// What a helper could not do for a test. The caller shows it and fails.
#[derive(Debug, thiserror::Error)]
pub enum TestkitError {
    #[error("{0}")]
    TimedOut(#[from] TimedOut),
    #[error("{0}")]
    UnexpectedLog(#[from] logs::Unexpected),
    #[error("cannot start `{program}`: {source}; build it first, or check the path")]
    Start { program: String, source: std::io::Error },
    #[error("there is no program {path}; run `cargo build --workspace --bins --tests` first", path = path.display())]
    NotBuilt { path: PathBuf },
    #[error("`{name}` ended with {status} before it was ready; its output was:\n{output}")]
    EndedEarly { name: String, status: String, output: String },
    #[error("cannot {operation} {path}: {source}", path = path.display())]
    Io { operation: &'static str, path: PathBuf, source: std::io::Error },
    #[error("cannot {operation} process {pid}: {source}")]
    Process { operation: &'static str, pid: u32, source: std::io::Error },
}
