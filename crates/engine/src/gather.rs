//! How long messages, decided as they come, are gathered before they are made durable together.
//!
//! A commit costs the processor and the disk the same for one caller as for a hundred. A caller who was just answered
//! often comes back at once, so with many of them it pays to wait for a good part of the rest; a caller alone never
//! waits. It must never hold a message longer than [`WINDOW_MAX`].

use std::time::Duration;

use tokio::time::Instant;

/// The most messages that are appended together: enough for a thousand callers, few enough to answer soon.
pub(crate) const BATCH_MAX: usize = 512;
/// A disk that takes longer than this to commit is waited for anyway, and a person does not notice it.
const WINDOW_MAX: Duration = Duration::from_millis(5);
/// The time in which a hundred callers on a busy machine come back.
const WINDOW_MIN: Duration = Duration::from_millis(2);

/// When to stop gathering.
#[derive(Debug, Default)]
pub(crate) struct Gather {
    /// Callers who were answered and have not come back yet.
    away: usize,
    /// When the first message of the batch came.
    since: Option<Instant>,
    /// As long as the last commit took, within limits: waiting at most doubles the time to an answer.
    window: Duration,
}

impl Gather {
    /// `count` more messages are in the batch.
    pub(crate) fn arrived(&mut self, count: usize) {
        self.away = self.away.saturating_sub(count);
        self.since.get_or_insert_with(Instant::now);
    }

    /// `count` callers got their answers after a commit that took `took`.
    pub(crate) fn answered(&mut self, count: usize, took: Duration) {
        self.away = count;
        self.window = took.clamp(WINDOW_MIN, WINDOW_MAX);
    }

    /// The batch is being appended.
    pub(crate) fn taken(&mut self) {
        self.since = None;
    }

    /// For how long a batch of `gathered` messages should still grow while `waiting` callers have messages that are
    /// being made durable. Zero for a batch that is to be appended now.
    pub(crate) fn pause(&self, gathered: usize, waiting: usize) -> Duration {
        let Some(since) = self.since else { return Duration::ZERO };
        // Half of all callers: while one half is being written, the other gathers.
        let enough = gathered >= BATCH_MAX || gathered >= (gathered + waiting + self.away).div_ceil(2);
        if enough { Duration::ZERO } else { self.window.saturating_sub(since.elapsed()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(answered: usize, arrived: usize) -> Gather {
        let mut gather = Gather::default();
        gather.answered(answered, WINDOW_MIN);
        gather.arrived(arrived);
        gather
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_alone_never_waits() {
        assert_eq!(after(0, 1).pause(1, 0), Duration::ZERO, "the first of all");
        assert_eq!(after(1, 1).pause(1, 0), Duration::ZERO, "it came back");
    }

    #[tokio::test(start_paused = true)]
    async fn half_of_all_callers_is_enough_and_less_waits_for_the_window_at_most() {
        assert_eq!(after(64, 63).pause(63, 64), WINDOW_MIN, "63 here, 64 being written, one away");
        assert_eq!(after(64, 64).pause(64, 64), Duration::ZERO);
        let few = after(64, 3);
        assert_eq!(few.pause(3, 0), WINDOW_MIN);
        tokio::time::advance(WINDOW_MIN).await;
        assert_eq!(few.pause(3, 0), Duration::ZERO, "the others did not come back");
    }

    #[tokio::test(start_paused = true)]
    async fn the_window_follows_the_disk_within_limits() {
        for (took, window) in [(0, WINDOW_MIN), (3, Duration::from_millis(3)), (900, WINDOW_MAX)] {
            let mut gather = Gather::default();
            gather.answered(64, Duration::from_millis(took));
            gather.arrived(1);
            assert_eq!(gather.pause(1, 0), window);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_batch_is_appended_however_many_callers_there_are() {
        assert_eq!(after(5000, BATCH_MAX).pause(BATCH_MAX, 5000), Duration::ZERO);
    }
}
