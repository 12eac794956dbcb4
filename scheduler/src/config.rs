//! The settings of `spotqd`, from a YAML file. Every field has a default; an unknown one is an error.

use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use spotq_core::Policies;
use spotq_model::Span;
use spotq_provider_local::CloudConfig;

use crate::error::DaemonError;

/// The whole file.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Name of this cluster; tags everything that it launches. Drawn from the cluster's secret if absent.
    pub cluster: Option<String>,
    /// Root of the checkpoint store, `file:///…` or `s3://bucket/prefix`; `checkpoints` in the data directory if absent.
    pub checkpoint_store: Option<String>,
    /// Limits and times, in milliseconds where they are times. See `spotq_core::Policies`.
    pub policies: Option<Policies>,
    pub local: LocalConfig,
}

/// Settings of `--local`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LocalConfig {
    pub cloud: CloudConfig,
}

impl Config {
    /// Reads `path`. Errors name the file, the line and what was expected.
    pub fn read(path: &Path) -> Result<Self, DaemonError> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| DaemonError::Config(format!("read {}: {error}", path.display())))?;
        if text.trim().is_empty() {
            return Ok(Config::default());
        }
        serde_saphyr::from_str(&text)
            .map_err(|error| DaemonError::Config(format!("{}: {error}", path.display())))
    }

    /// The policies for the simulated clouds, whose nodes boot in a fraction of a second.
    #[must_use]
    pub fn local_policies(&self) -> Policies {
        self.policies.clone().unwrap_or_else(|| Policies {
            lease_ttl: Span::secs(10),
            launch_timeout: Span::secs(30),
            list_lag: Span::secs(3),
            boot_timeout: Span::secs(30),
            settle: Span::secs(1),
            idle_ttl: Span::secs(2),
            drain_grace: Span::secs(3),
            preempted_cool_down: Span::secs(5),
            back_off: Span::millis(250),
            back_off_max: Span::secs(30),
            progress_every: Span::millis(250),
            restart_overhead: Span::secs(5),
            ..Policies::default()
        })
    }
}

/// How often the simulated clouds are asked. A real cloud would throttle this.
pub(crate) const LOCAL_POLL: Duration = Duration::from_secs(1);
/// Workers on this machine show this often that they live.
pub(crate) const LOCAL_HEARTBEAT: Duration = Duration::from_secs(1);
/// A worker that has heard nothing for this long ends its node: nobody will come back to a forgotten experiment.
pub(crate) const DEAD_MAN: Duration = Duration::from_secs(600);
