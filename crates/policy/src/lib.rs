//! Which pool a task should go to: eligibility, and a score whose order is the policy.
//!
//! Pure functions. No I/O, no clock, no randomness, and no floating point where money is compared.

mod placement;

pub use placement::{Score, WhyNot, eligible, score};
