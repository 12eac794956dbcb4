//! `spotq demo`: a real run through preemptions on this machine.
//!
//! It must not be able to lie: it says only what it computed from what the run left behind.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use crate::error::ExpectedError;
use crate::out::Out;

#[derive(Debug, Clone, Args)]
pub struct DemoArgs {
    /// Seeds the market and the faults; the final model is the same for all seeds.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Preempt at least so often.
    #[arg(long, default_value_t = 5, value_name = "N")]
    pub preemptions: u32,
    /// Keep models, segments and events in this directory.
    #[arg(long, value_name = "DIR")]
    pub keep: Option<PathBuf>,
}

/// Runs the demo.
pub fn run(_args: &DemoArgs, _out: &Out) -> Result<ExitCode, ExpectedError> {
    Err(ExpectedError::Internal("this build has no demo".into()))
}
