//! What an engine is made of.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use spotq_core::Policies;
use spotq_model::NodeId;
use spotq_provider::CloudProvider;
use spotq_store::Store;

/// The parts and settings of an engine. The caller picks the implementations.
#[derive(Clone)]
pub struct EngineConfig {
    pub policies: Policies,
    pub store: Arc<dyn Store>,
    pub provider: Arc<dyn CloudProvider>,
    /// Where logs of attempts are kept.
    pub data_dir: PathBuf,
    /// Root of the checkpoint store, such as `file:///var/lib/spotq/checkpoints` or `s3://bucket/spotq`.
    pub checkpoint_root: String,
    pub secret: ClusterSecret,
    /// How workers reach this scheduler.
    pub server_url: String,
    /// Given to workers on their nodes, besides what the provider sets.
    pub worker_env: std::collections::BTreeMap<String, String>,
    /// How often the cloud is asked for its instances and prices.
    pub poll_every: Duration,
    /// How often workers show that they live.
    pub heartbeat: Duration,
    /// A worker without a scheduler for this long saves and ends its node.
    pub dead_man: Duration,
    /// Events after which a snapshot is taken, so that recovery stays short; see [`EngineConfig::SNAPSHOT_EVERY`].
    pub snapshot_every: u64,
}

impl EngineConfig {
    /// Some seconds of replay at most, and a snapshot that is seldom enough not to be felt.
    pub const SNAPSHOT_EVERY: u64 = 50_000;

    /// The prefix of one job in the checkpoint store.
    #[must_use]
    pub fn checkpoint_url(&self, uuid: &str) -> String {
        format!("{}/v1/default/{uuid}", self.checkpoint_root.trim_end_matches('/'))
    }
}

/// The environment of the workers may hold the keys of an object store, so only its names are shown (INV-14).
impl fmt::Debug for EngineConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineConfig")
            .field("policies", &self.policies)
            .field("provider", &self.provider.name())
            .field("data_dir", &self.data_dir)
            .field("checkpoint_root", &self.checkpoint_root)
            .field("secret", &self.secret)
            .field("server_url", &self.server_url)
            .field("worker_env", &self.worker_env.keys())
            .field("poll_every", &self.poll_every)
            .field("heartbeat", &self.heartbeat)
            .field("dead_man", &self.dead_man)
            .field("snapshot_every", &self.snapshot_every)
            .finish_non_exhaustive()
    }
}

/// From which every other secret of the cluster is derived, so that none of those needs to be stored.
#[derive(Clone)]
pub struct ClusterSecret([u8; 32]);

impl ClusterSecret {
    #[must_use]
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// What the worker of this node shows when it joins.
    #[must_use]
    pub fn join_secret(&self, node: NodeId) -> String {
        self.derive(&format!("join:{node}")).to_hex().to_string()
    }

    /// Signs the manifests and names the chunks of one job.
    #[must_use]
    pub fn checkpoint_key(&self, uuid: &str) -> [u8; 32] {
        *self.derive(&format!("checkpoint:{uuid}")).as_bytes()
    }

    /// Whether `shown` is the join secret of `node`; takes the same time wherever they differ.
    #[must_use]
    pub fn may_join(&self, node: NodeId, shown: &str) -> bool {
        blake3::hash(shown.as_bytes()) == blake3::hash(self.join_secret(node).as_bytes())
    }

    /// A key for one purpose and no other.
    #[must_use]
    pub fn purpose(&self, purpose: &str) -> [u8; 32] {
        *self.derive(&format!("purpose:{purpose}")).as_bytes()
    }

    fn derive(&self, purpose: &str) -> blake3::Hash {
        blake3::keyed_hash(&self.0, purpose.as_bytes())
    }
}

impl fmt::Debug for ClusterSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterSecret(…)")
    }
}
