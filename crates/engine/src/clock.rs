//! The one place where the scheduler asks what time it is.

use spotq_model::Timestamp;

/// Wall-clock time. It may jump; the core never lets time run backwards.
#[must_use]
pub fn now() -> Timestamp {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    Timestamp(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
