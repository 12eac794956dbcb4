//! What a launch needs and what it answers.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use spotq_model::{EffectKey, InstanceId, NodeId, Pool, Quote, Timestamp};

/// Tag that names the cluster an instance belongs to; `list_owned` filters by it.
pub const TAG_CLUSTER: &str = "spotq-cluster";
/// Tag that carries our node number, so that an instance whose launch answer was lost is found again.
pub const TAG_NODE: &str = "spotq-node";

/// A node to be started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchRequest {
    /// Becomes the cloud's client token.
    pub key: EffectKey,
    pub node: NodeId,
    pub pool: Pool,
    /// Put on everything the launch creates; holds `TAG_CLUSTER` and `TAG_NODE`.
    pub tags: BTreeMap<String, String>,
    /// The cloud ends the node at this moment if nobody has, so that a lost scheduler leaves no bill behind.
    pub expires_at: Timestamp,
    pub bootstrap: Bootstrap,
}

/// What the worker on the new node needs to join.
#[derive(Clone, PartialEq, Eq)]
pub struct Bootstrap {
    /// URL that the worker dials.
    pub server: String,
    /// Single use, bound to this launch.
    pub join_secret: Secret,
    /// More environment for the worker.
    pub env: BTreeMap<String, String>,
}

/// Of the environment only the names are shown: the values may be credentials (INV-14).
impl fmt::Debug for Bootstrap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bootstrap")
            .field("server", &self.server)
            .field("join_secret", &self.join_secret)
            .field("env", &self.env.keys())
            .finish()
    }
}

/// A launch that the cloud accepted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launched {
    pub instance: InstanceId,
    /// The price at which it was launched.
    pub quote: Quote,
    /// Billing starts here.
    pub launched_at: Timestamp,
}

/// Text that never prints: neither `Debug` nor serialization shows it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Secret(text.into())
    }

    /// The text itself, for the one place that hands it over.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_of_a_worker_shows_names_only() {
        let bootstrap = Bootstrap {
            server: "http://127.0.0.1:1".into(),
            join_secret: Secret::new("hush"),
            env: BTreeMap::from([("AWS_SECRET_ACCESS_KEY".into(), "hush".into())]),
        };
        let shown = format!("{bootstrap:?}");
        assert!(shown.contains("AWS_SECRET_ACCESS_KEY") && !shown.contains("hush"), "{shown}");
    }

    #[test]
    fn a_secret_does_not_print() {
        let bootstrap = Bootstrap {
            server: "http://127.0.0.1:1".into(),
            join_secret: Secret::new("open sesame"),
            env: BTreeMap::new(),
        };
        assert!(!format!("{bootstrap:?}").contains("sesame"));
        assert_eq!(bootstrap.join_secret.expose(), "open sesame");
    }
}
