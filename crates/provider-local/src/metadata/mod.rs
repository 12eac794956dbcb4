//! The metadata service of one node, in the protocol of the cloud that it pretends to be.
//!
//! Each node has its own port on loopback. What the service says about an interruption comes from a `Signal`
//! that the node's owner sets; the service itself never decides that a node ends. The protocols are those that
//! the real watchers of the worker speak, quirks included.

mod azure;
mod gce;
mod imds;

use std::net::{Ipv4Addr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use serde::{Deserialize, Serialize};
use spotq_model::{Cloud, InstanceId, Pool, Timestamp};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use uuid::Uuid;

use crate::LocalError;

/// A warning that the node will be taken away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notice {
    /// When the node may know.
    pub told_at: Timestamp,
    /// When it is taken away.
    pub deadline: Timestamp,
}

/// What the service knows of its node.
#[derive(Debug, Clone)]
pub struct Facts {
    pub instance: InstanceId,
    pub pool: Pool,
    pub launched_at: Timestamp,
    /// Delay of the first answer of Azure's scheduled events.
    pub first_call: Duration,
}

/// What the service tells about interruptions at this moment.
#[derive(Debug, Clone, Copy, Default)]
struct Signal {
    notice: Option<Notice>,
    /// Goes up with each change, as Azure's `DocumentIncarnation`.
    incarnation: u64,
    /// Names the present notice.
    event: Uuid,
    acknowledged: bool,
}

/// The service of one node.
#[derive(Debug)]
pub struct Service {
    facts: Facts,
    signal: watch::Sender<Signal>,
    acknowledged: Notify,
    /// Signs the session tokens of IMDSv2, so that none has to be kept.
    token_key: [u8; 32],
    first_call: watch::Sender<bool>,
}

impl Service {
    #[must_use]
    pub fn new(facts: Facts) -> Arc<Self> {
        let token_key = *blake3::hash(Uuid::new_v4().as_bytes()).as_bytes();
        Arc::new(Service {
            facts,
            signal: watch::Sender::new(Signal { incarnation: 1, ..Signal::default() }),
            acknowledged: Notify::new(),
            token_key,
            first_call: watch::Sender::new(true),
        })
    }

    /// Tells the node, from now on, that it will be taken away.
    pub fn announce(&self, notice: Notice) {
        self.signal.send_modify(|signal| {
            if signal.notice != Some(notice) {
                let event = if signal.notice.is_some() { signal.event } else { Uuid::new_v4() };
                *signal =
                    Signal { notice: Some(notice), incarnation: signal.incarnation + 1, event, ..*signal };
            }
        });
    }

    /// Takes the warning back.
    pub fn withdraw(&self) {
        self.signal.send_modify(|signal| {
            if signal.notice.take().is_some() {
                signal.incarnation += 1;
                signal.acknowledged = false;
            }
        });
    }

    /// Resolves when the node says that it need not be waited for (Azure's `StartRequests`).
    pub async fn acknowledged(&self) {
        self.acknowledged.notified().await;
    }

    /// Serves on `listener` until the handle is aborted.
    ///
    /// # Errors
    /// When the runtime does not take the listener.
    pub fn serve(self: Arc<Self>, listener: TcpListener) -> std::io::Result<JoinHandle<()>> {
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let router = self.router();
        Ok(tokio::spawn(async move {
            if let Err(error) = axum::serve(listener, router).await {
                tracing::warn!(%error, "a metadata service ended");
            }
        }))
    }

    fn router(self: Arc<Self>) -> Router {
        let router = match self.facts.pool.cloud {
            Cloud::Aws => Router::new().fallback(imds::handle),
            Cloud::Gcp => Router::new().fallback(gce::handle),
            Cloud::Azure => Router::new().fallback(azure::handle),
        };
        router.with_state(self)
    }
}

/// Binds a port of loopback for a service; 0 takes any free one.
pub fn bind(port: u16) -> Result<TcpListener, LocalError> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).map_err(|source| LocalError::Listen { port, source })
}

/// `2026-04-11T22:26:58Z`, as AWS writes it.
fn rfc3339(at: Timestamp) -> String {
    format_time(at, "%Y-%m-%dT%H:%M:%SZ")
}

/// `Sat, 11 Apr 2026 22:26:58 GMT`, as Azure writes it.
fn rfc1123(at: Timestamp) -> String {
    format_time(at, "%a, %d %b %Y %H:%M:%S GMT")
}

fn format_time(at: Timestamp, format: &str) -> String {
    let ms = i64::try_from(at.0).unwrap_or(i64::MAX);
    jiff::Timestamp::from_millisecond(ms).unwrap_or(jiff::Timestamp::MAX).strftime(format).to_string()
}

/// The value of one key in a query string; metadata clients send plain words and numbers only.
fn query<'a>(query: Option<&'a str>, key: &str) -> Option<&'a str> {
    query?.split('&').find_map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (name == key).then_some(value)
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A service on a free port, with its URL.
    pub(crate) fn start(pool: &str) -> (Arc<Service>, String) {
        let service = Service::new(Facts {
            instance: InstanceId("i-0123456789abcdef0".into()),
            pool: pool.parse().unwrap(),
            launched_at: Timestamp(1_776_000_000_000),
            first_call: Duration::ZERO,
        });
        let listener = bind(0).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        service.clone().serve(listener).unwrap();
        (service, url)
    }

    pub(crate) fn client() -> reqwest::Client {
        reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(10)).build().unwrap()
    }

    /// 2026-04-11 22:26:58.7 UTC, a Saturday.
    pub(crate) const DEADLINE: Timestamp = Timestamp(1_775_946_418_700);

    pub(crate) const NOTICE: Notice = Notice { told_at: Timestamp(DEADLINE.0 - 120_000), deadline: DEADLINE };

    #[test]
    fn times_are_written_as_the_clouds_write_them() {
        assert_eq!(rfc3339(DEADLINE), "2026-04-11T22:26:58Z");
        assert_eq!(rfc1123(DEADLINE), "Sat, 11 Apr 2026 22:26:58 GMT");
    }

    #[test]
    fn a_port_in_use_is_named() {
        let taken = bind(0).unwrap();
        let port = taken.local_addr().unwrap().port();
        let error = bind(port).unwrap_err().to_string();
        assert!(error.contains(&format!("127.0.0.1:{port}")), "{error}");
    }
}
