//! What a program asks of its machine: the time, a thread for work that blocks, and names that nobody else has.
//!
//! Everything that the scheduler and the worker would otherwise ask the system for by themselves goes through here, so
//! that a simulation can answer in the machine's place. Nothing here decides anything, and without a simulation on the
//! same thread each answer is the system's own.

#[cfg(feature = "simulation")]
pub mod simulation;

use spotq_model::Timestamp;
use tokio::task::JoinHandle;
use uuid::Uuid;

/// A clock that only goes forward, for how long something takes.
pub use tokio::time::Instant;

/// The wall clock, in milliseconds since the Unix epoch. It may jump.
#[must_use]
pub fn now() -> Timestamp {
    #[cfg(feature = "simulation")]
    if let Some(now) = simulation::with(|machine| machine.now()) {
        return now;
    }
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    Timestamp(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

/// Does work that blocks (a disk, a long computation) off the runtime's own thread. Goes on if nobody waits for it.
pub fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    #[cfg(feature = "simulation")]
    if simulation::with(|_| ()).is_some() {
        // A second thread would make the order of things a matter of chance.
        return tokio::spawn(async move { work() });
    }
    tokio::task::spawn_blocking(work)
}

/// A name that nobody else has.
#[must_use]
pub fn uuid() -> Uuid {
    #[cfg(feature = "simulation")]
    if let Some(drawn) = simulation::with(|machine| machine.random()) {
        return uuid::Builder::from_random_bytes(drawn.to_le_bytes()).into_uuid();
    }
    Uuid::new_v4()
}
