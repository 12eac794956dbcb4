//! Watches the cloud's metadata service for "this node will be taken".
//!
//! Only a well-formed answer that says so is a notice: errors, time-outs and garbage never are. Never decides what
//! to do about it.

mod aws;
mod azure;
mod gcp;

use std::time::Duration;

use spotq_model::{Cloud, Timestamp};
use tokio::sync::{mpsc, watch};

/// The vendors' own address of the metadata service.
const LINK_LOCAL: &str = "http://169.254.169.254";
/// How often to ask a real metadata service.
const POLL: Duration = Duration::from_secs(1);
/// A metadata service on loopback is a simulated cloud; asking it more often costs nobody anything.
const POLL_LOOPBACK: Duration = Duration::from_millis(250);
/// A metadata service answers within milliseconds; one that hangs must not delay the next poll for long.
const TIMEOUT: Duration = Duration::from_secs(1);
/// No answer that we understand is larger.
const BODY_MAX: usize = 64 * 1024;

/// How to watch.
#[derive(Debug, Clone)]
pub struct WatchConfig {
    pub cloud: Cloud,
    /// Base address of the metadata service.
    pub base: String,
    pub poll: Duration,
    /// How long a node of this cloud lives after a notice that names no time.
    pub unnamed: Duration,
    /// What the cloud calls this node, if the metadata service does not say.
    pub instance: String,
}

/// What the cloud says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CloudSays {
    Notice { deadline: Timestamp, source: String },
    Withdrawn,
}

impl WatchConfig {
    /// The vendor's address unless `metadata` names another.
    #[must_use]
    pub fn new(cloud: Cloud, metadata: Option<&str>, instance: &str) -> WatchConfig {
        let base = metadata.unwrap_or(LINK_LOCAL).trim_end_matches('/').to_owned();
        let loopback = base.starts_with("http://127.") || base.starts_with("http://localhost");
        let poll = if loopback { POLL_LOOPBACK } else { POLL };
        // Compute Engine gives 30 s after it flips its flag, and names no time.
        WatchConfig { cloud, base, poll, unnamed: Duration::from_secs(30), instance: instance.to_owned() }
    }
}

/// Watches until the receiver is dropped. When `durable` turns true, everything is saved and a cloud that waits for
/// consent may go on.
pub async fn watch(config: WatchConfig, tell: mpsc::Sender<CloudSays>, durable: watch::Receiver<bool>) {
    let client = match reqwest::Client::builder().no_proxy().timeout(TIMEOUT).build() {
        Ok(client) => client,
        Err(error) => {
            tracing::error!(%error, "cannot watch for notices: no HTTP client");
            return;
        }
    };
    match config.cloud {
        Cloud::Aws => aws::watch(&config, &client, &tell).await,
        Cloud::Gcp => gcp::watch(&config, &client, &tell).await,
        Cloud::Azure => azure::watch(&config, &client, &tell, durable).await,
    }
}

/// Turns what each poll sees into changes worth telling.
#[derive(Debug, Default)]
struct Changes {
    told: Option<Timestamp>,
}

impl Changes {
    /// `None`: the service says that nothing is planned.
    fn see(&mut self, seen: Option<(Timestamp, &str)>) -> Option<CloudSays> {
        match (self.told, seen) {
            (Some(told), Some((deadline, _))) if told == deadline => None,
            (_, Some((deadline, source))) => {
                self.told = Some(deadline);
                Some(CloudSays::Notice { deadline, source: source.to_owned() })
            }
            (Some(_), None) => {
                self.told = None;
                Some(CloudSays::Withdrawn)
            }
            (None, None) => None,
        }
    }
}

/// Sends what is new; false when nobody listens any more.
async fn tell_change(tell: &mpsc::Sender<CloudSays>, change: Option<CloudSays>) -> bool {
    match change {
        Some(change) => tell.send(change).await.is_ok(),
        None => !tell.is_closed(),
    }
}

/// The body as text, unless it is too large or no text.
async fn text_of(mut response: reqwest::Response) -> Option<String> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.ok()? {
        body.extend_from_slice(&chunk);
        if body.len() > BODY_MAX {
            return None;
        }
    }
    String::from_utf8(body).ok()
}

/// Milliseconds since the epoch, not before it.
fn to_timestamp(at: jiff::Timestamp) -> Timestamp {
    Timestamp(u64::try_from(at.as_millisecond()).unwrap_or(0))
}

/// Gives `body` to every parser of an answer.
#[cfg(feature = "fuzzing")]
pub(crate) fn understand(body: &str) {
    let _ = (aws::parse_instance_action(body), aws::parse_rebalance(body), gcp::parse_preempted(body));
    let _ = azure::parse_events(body, "vm-1");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_changes_are_told() {
        let mut changes = Changes::default();
        assert_eq!(changes.see(None), None);
        let told = changes.see(Some((Timestamp(5), "x")));
        assert_eq!(told, Some(CloudSays::Notice { deadline: Timestamp(5), source: "x".into() }));
        assert_eq!(changes.see(Some((Timestamp(5), "x"))), None);
        assert!(changes.see(Some((Timestamp(6), "x"))).is_some());
        assert_eq!(changes.see(None), Some(CloudSays::Withdrawn));
        assert_eq!(changes.see(None), None);
    }

    #[test]
    fn a_simulated_cloud_is_asked_more_often_than_a_real_one() {
        let local = WatchConfig::new(Cloud::Aws, Some("http://127.0.0.1:9/"), "i");
        assert_eq!((local.base.as_str(), local.poll), ("http://127.0.0.1:9", POLL_LOOPBACK));
        assert_eq!(WatchConfig::new(Cloud::Azure, None, "i").poll, POLL);
    }
}
