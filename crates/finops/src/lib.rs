//! What was paid, what it would have cost on demand, and what was wasted: read from the ledger, never guessed.
//!
//! Each attempt's node time falls into parts: boot, restore, useful, redone, drain, idle. *Useful* is the time whose
//! work was kept: from the start of the command to the checkpoint that the next attempt resumed from, or to the end of
//! a command that completed. Savings are net: the useful time at on-demand prices, less everything that was billed.

mod report;

pub use report::{Cause, JobCost, JobReport, WasteLine, job_cost, job_report};
