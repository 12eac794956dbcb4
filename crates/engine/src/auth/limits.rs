//! How often one identity may call. A client in a loop must not take the scheduler from the others.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

use tonic::Status;

use super::Who;
use crate::clock::Instant;

/// Calls per second that one user may go on making: a hundred command lines that wait, or a submit each millisecond.
const PER_SECOND: f64 = 1000.0;
/// And at once: scripts submit thousands of jobs in a burst.
const BURST: f64 = 5000.0;
/// Who does not say who it is gets as many as probes and joining workers need.
const PER_SECOND_NOBODY: f64 = 50.0;
const BURST_NOBODY: f64 = 500.0;
/// Identities that are counted at once; those that have called least lately are forgotten, which only favours them.
const COUNTED_MAX: usize = 20_000;

#[derive(Debug, Default)]
pub(crate) struct Limits {
    buckets: Mutex<HashMap<Key, Bucket>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Key {
    User(String),
    Peer(Option<IpAddr>),
}

#[derive(Debug)]
struct Bucket {
    left: f64,
    filled: Instant,
}

impl Limits {
    /// Takes one call from what this identity has left.
    pub(crate) fn take(&self, who: &Who, peer: Option<IpAddr>) -> Result<(), Status> {
        self.take_at(who, peer, Instant::now())
    }

    fn take_at(&self, who: &Who, peer: Option<IpAddr>, now: Instant) -> Result<(), Status> {
        let (key, rate, burst) = match who {
            Who::Local => return Ok(()),
            Who::User { name, .. } => (Key::User(name.clone()), PER_SECOND, BURST),
            Who::Nobody => (Key::Peer(peer), PER_SECOND_NOBODY, BURST_NOBODY),
        };
        // The map is whole after every statement.
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        if buckets.len() >= COUNTED_MAX && !buckets.contains_key(&key) {
            let oldest = buckets.iter().min_by_key(|(_, bucket)| bucket.filled).map(|(key, _)| key.clone());
            oldest.map(|key| buckets.remove(&key));
        }
        let bucket = buckets.entry(key).or_insert(Bucket { left: burst, filled: now });
        let passed = now.saturating_duration_since(bucket.filled).as_secs_f64();
        bucket.left = (bucket.left + passed * rate).min(burst);
        bucket.filled = now;
        if bucket.left < 1.0 {
            let who = who.name().unwrap_or("without an identity you");
            return Err(Status::resource_exhausted(format!(
                "{who} made more than {burst} calls at once or {rate} per second; wait a second and call less often"
            )));
        }
        bucket.left -= 1.0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::auth::Role;

    #[test]
    fn a_burst_is_taken_then_refused_then_taken_again_and_others_do_not_notice() {
        let limits = Limits::default();
        let user = |name: &str| Who::User { name: name.into(), role: Role::User };
        let start = Instant::now();
        let taken = (0..10_000).take_while(|_| limits.take_at(&user("ada"), None, start).is_ok()).count();
        assert_eq!(taken, 5000);
        let refused = limits.take_at(&user("ada"), None, start).unwrap_err();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        assert!(refused.message().contains("ada") && refused.message().contains("wait"), "{refused}");
        assert!(limits.take_at(&user("bob"), None, start).is_ok());
        assert!(limits.take_at(&user("ada"), None, start + Duration::from_millis(2)).is_ok());
        assert!((0..10_000).all(|_| limits.take_at(&Who::Local, None, start).is_ok()));
    }
}
