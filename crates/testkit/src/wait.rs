//! Waiting for a condition with a deadline, so that no test sleeps for a fixed time and hopes.

use std::future::Future;
use std::time::{Duration, Instant};

/// How often a condition is looked at: short beside any deadline, long enough to leave the CPU to what is awaited.
const POLL: Duration = Duration::from_millis(5);

/// The condition did not come true in time.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("waited {waited:?} in vain for {what}")]
pub struct TimedOut {
    pub what: String,
    pub waited: Duration,
}

/// Waits until `condition` holds; looks once more when `deadline` has passed.
///
/// # Errors
/// [`TimedOut`], which names `what` was waited for.
pub fn wait_until(
    deadline: Duration,
    mut condition: impl FnMut() -> bool,
    what: impl Into<String>,
) -> Result<(), TimedOut> {
    wait_for(deadline, || condition().then_some(()), what)
}

/// Waits until `probe` has a value, and returns it.
///
/// # Errors
/// [`TimedOut`], which names `what` was waited for.
pub fn wait_for<T>(
    deadline: Duration,
    mut probe: impl FnMut() -> Option<T>,
    what: impl Into<String>,
) -> Result<T, TimedOut> {
    let start = Instant::now();
    loop {
        let last_look = start.elapsed() >= deadline;
        if let Some(value) = probe() {
            return Ok(value);
        }
        if last_look {
            return Err(TimedOut { what: what.into(), waited: start.elapsed() });
        }
        pause();
    }
}

/// As [`wait_until`], for a condition that awaits; the runtime goes on meanwhile.
///
/// # Errors
/// [`TimedOut`], which names `what` was waited for. A condition that never returns is cut off at the deadline too.
pub async fn wait_until_async<F: Future<Output = bool>>(
    deadline: Duration,
    mut condition: impl FnMut() -> F,
    what: impl Into<String>,
) -> Result<(), TimedOut> {
    let start = Instant::now();
    let poll = async {
        while !condition().await {
            tokio::time::sleep(POLL).await;
        }
    };
    tokio::time::timeout(deadline, poll)
        .await
        .map_err(|_| TimedOut { what: what.into(), waited: start.elapsed() })
}

#[expect(
    clippy::disallowed_methods,
    reason = "the one blocking pause: this is the wait that tests use instead"
)]
fn pause() {
    std::thread::sleep(POLL);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_that_comes_true_ends_the_wait() {
        let mut looks = 0;
        let value = wait_for(
            Duration::from_secs(10),
            || {
                looks += 1;
                (looks == 3).then_some("here")
            },
            "the third look",
        );
        assert_eq!(value, Ok("here"));
        assert_eq!(looks, 3);
    }

    #[test]
    fn a_condition_that_never_holds_is_named() {
        let error = wait_until(Duration::from_millis(1), || false, "the moon").unwrap_err();
        assert!(error.to_string().contains("the moon"), "{error}");
    }

    #[test]
    fn a_zero_deadline_still_looks_once() {
        assert_eq!(wait_until(Duration::ZERO, || true, "now"), Ok(()));
    }

    #[tokio::test(start_paused = true)]
    async fn an_async_condition_is_cut_off_at_the_deadline() {
        let error = wait_until_async(Duration::from_secs(60), std::future::pending::<bool>, "godot").await;
        assert_eq!(error.unwrap_err().what, "godot");
        let looks = std::cell::Cell::new(0);
        let outcome = wait_until_async(
            Duration::from_secs(1),
            || {
                looks.set(looks.get() + 1);
                std::future::ready(looks.get() == 4)
            },
            "the fourth look",
        );
        assert_eq!(outcome.await, Ok(()));
    }
}
