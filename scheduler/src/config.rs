//! The settings of `spotqd`, from a YAML file. Every field has a default; an unknown one is an error.

use std::collections::BTreeMap;
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
    /// Limits and times, in milliseconds where they are times; what is not named keeps its default. See
    /// `spotq_core::Policies`.
    pub policies: BTreeMap<String, serde_json::Value>,
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
        let bad = |error: serde_saphyr::Error| DaemonError::Config(format!("{}: {error}", path.display()));
        // Read as what they are, since a mistake in a map of anything has no line.
        let PoliciesAlone { policies: _ } = serde_saphyr::from_str(&text).map_err(bad)?;
        let config: Config = serde_saphyr::from_str(&text).map_err(bad)?;
        config.check().map_err(|what| DaemonError::Config(format!("{}: {what}", path.display())))?;
        Ok(config)
    }

    /// The policies for the simulated clouds, whose nodes boot in a fraction of a second, with what the file changes.
    pub fn local_policies(&self) -> Result<Policies, DaemonError> {
        let bad = |error: serde_json::Error| DaemonError::Config(format!("policies: {error}"));
        let mut all = serde_json::to_value(local_defaults()).map_err(bad)?;
        if let Some(all) = all.as_object_mut() {
            all.extend(self.policies.clone());
        }
        let policies: Policies = serde_json::from_value(all).map_err(bad)?;
        if policies.node_ttl <= policies.node_ttl_margin {
            // Every node would be too old as soon as it is up.
            let text = format!(
                "policies: `node_ttl` is {}; expected more than `node_ttl_margin`",
                policies.node_ttl
            );
            return Err(DaemonError::Config(format!("{text}, which is {}", policies.node_ttl_margin)));
        }
        Ok(policies)
    }

    /// What the types alone cannot tell.
    fn check(&self) -> Result<(), String> {
        if let Some(store) = self.checkpoint_store.as_ref().filter(|url| !is_store(url)) {
            return Err(format!(
                "checkpoint_store: `{store}` is no store; expected file:///DIR or s3://BUCKET/PREFIX"
            ));
        }
        self.local.cloud.market.check().map_err(|what| format!("local.cloud: {what}"))
    }
}

fn is_store(url: &str) -> bool {
    url.starts_with("file:///") || url.strip_prefix("s3://").is_some_and(|rest| !rest.is_empty())
}

/// The part of the file that is merged into defaults later, checked against its own type.
#[derive(Deserialize)]
struct PoliciesAlone {
    #[serde(default)]
    #[expect(dead_code, reason = "reading it is the check")]
    policies: Option<Policies>,
}

fn local_defaults() -> Policies {
    Policies {
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
    }
}

/// How often the simulated clouds are asked. A real cloud would throttle this.
pub(crate) const LOCAL_POLL: Duration = Duration::from_secs(1);
/// Workers on this machine show this often that they live.
pub(crate) const LOCAL_HEARTBEAT: Duration = Duration::from_secs(1);
/// A worker that has heard nothing for this long ends its node: nobody will come back to a forgotten experiment.
pub(crate) const DEAD_MAN: Duration = Duration::from_secs(600);

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Config, String> {
        let dir = std::env::temp_dir().join(format!("spotqd-config-{}", uuid::Uuid::new_v4()));
        std::fs::write(&dir, text).unwrap();
        let config = Config::read(&dir).map_err(|error| error.to_string());
        std::fs::remove_file(dir).unwrap();
        config
    }

    #[test]
    fn an_empty_file_is_the_default_and_a_changed_policy_leaves_the_others() {
        assert_eq!(read("\n"), Ok(Config::default()));
        let policies = read("policies:\n  idle_ttl: 0\n").unwrap().local_policies().unwrap();
        assert_eq!(policies, Policies { idle_ttl: Span::ZERO, ..local_defaults() });
    }

    #[test]
    fn a_store_that_is_none_and_a_market_that_cannot_be_are_named() {
        let store = read("checkpoint_store: ftp://host/dir\n").unwrap_err();
        assert!(store.contains("ftp://host/dir") && store.contains("s3://"), "{store}");
        let market = read("local: {cloud: {market: {no_notice_pct: 101}}}\n").unwrap_err();
        assert!(market.contains("no_notice_pct"), "{market}");
        let young = read("policies: {node_ttl: 1000}\n").unwrap().local_policies().unwrap_err().to_string();
        assert!(young.contains("node_ttl_margin"), "{young}");
    }

    #[test]
    fn a_bad_file_is_named_with_the_place_and_what_was_expected() {
        let unknown = read("cluster: a\nclustre: b\n").unwrap_err();
        assert!(unknown.contains("clustre") && unknown.contains("line 2"), "{unknown}");
        let policy = read("cluster: a\npolicies:\n  idle_tll: 3\n").unwrap_err();
        assert!(policy.contains("idle_tll") && policy.contains("line 3"), "{policy}");
        let value = read("policies: {nodes_max: many}").unwrap_err();
        assert!(value.contains("line 1"), "{value}");
        assert!(read("[1").is_err());
    }
}
