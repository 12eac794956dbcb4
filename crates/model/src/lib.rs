//! The words of spotq: ids, units, money, job spec, offers, inputs, events and effects.
//!
//! Plain data with its own invariants. This crate does no I/O, reads no clock and draws no random number.

pub mod event;
pub mod ids;
pub mod input;
pub mod jobfile;
pub mod offer;
pub mod outcome;
pub mod spec;
pub mod units;

pub use event::*;
pub use ids::*;
pub use input::*;
pub use offer::*;
pub use outcome::*;
pub use spec::*;
pub use units::*;
