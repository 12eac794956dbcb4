//! The settings of `spotqd`, from a YAML file. Every field has a default; an unknown one is an error.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use spotq_core::Policies;
use spotq_model::Span;
use spotq_provider_local::CloudConfig;

use crate::error::DaemonError;
use crate::yaml;

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
        let text =
            std::fs::read_to_string(path).map_err(|error| DaemonError::Config(unreadable(path, &error)))?;
        if text.trim().is_empty() {
            return Ok(Config::default());
        }
        // Read as what they are, since a mistake in a map of anything has no line.
        let PoliciesAlone { policies: _ } = yaml::parse(path, &text).map_err(DaemonError::Config)?;
        let config: Config = yaml::parse(path, &text).map_err(DaemonError::Config)?;
        let placed = |wrong: Wrong| DaemonError::Config(yaml::at_key(path, &text, &wrong.key, &wrong.what));
        config.check().map_err(placed)?;
        Ok(config)
    }

    /// The policies for the simulated clouds, whose nodes boot in a fraction of a second, with what the file changes.
    pub fn local_policies(&self) -> Result<Policies, DaemonError> {
        let bad = |error: serde_json::Error| DaemonError::Config(format!("policies: {error}"));
        let policies = self.local_policies_unchecked().map_err(bad)?;
        check_policies(&policies).map_err(|wrong| DaemonError::Config(wrong.what))?;
        Ok(policies)
    }

    fn local_policies_unchecked(&self) -> Result<Policies, serde_json::Error> {
        let mut all = serde_json::to_value(local_defaults())?;
        if let Some(all) = all.as_object_mut() {
            all.extend(self.policies.clone());
        }
        serde_json::from_value(all)
    }

    /// What the types alone cannot tell.
    fn check(&self) -> Result<(), Wrong> {
        if let Some(store) = self.checkpoint_store.as_ref().filter(|url| !is_store(url)) {
            return Err(Wrong::new(
                "checkpoint_store",
                format!(
                    "`checkpoint_store`: `{}` is no store: expected file:///DIR or s3://BUCKET/PREFIX; name one",
                    yaml::one_line(store)
                ),
            ));
        }
        self.local.cloud.market.check().map_err(|what| {
            // The message begins with the name of the key, as in `market.steps`.
            let key = what.split('`').nth(1).and_then(|name| name.rsplit('.').next()).unwrap_or("market");
            Wrong::new(key, format!("local.cloud: {what}; correct it"))
        })?;
        match self.local_policies_unchecked() {
            Ok(policies) => check_policies(&policies),
            Err(error) => Err(Wrong::new("policies", format!("policies: {error}; correct the value"))),
        }
    }
}

/// What is wrong with the value of a key.
#[derive(Debug)]
struct Wrong {
    key: String,
    what: String,
}

impl Wrong {
    fn new(key: &str, what: String) -> Self {
        Wrong { key: key.to_owned(), what }
    }
}

fn check_policies(policies: &Policies) -> Result<(), Wrong> {
    if policies.node_ttl > policies.node_ttl_margin {
        return Ok(());
    }
    // Every node would be too old as soon as it is up.
    Err(Wrong::new(
        "node_ttl",
        format!(
            "policies: `node_ttl` is {}: expected more than `node_ttl_margin`, which is {}; raise it (in milliseconds)",
            policies.node_ttl, policies.node_ttl_margin
        ),
    ))
}

fn unreadable(path: &Path, error: &std::io::Error) -> String {
    let why = match error.kind() {
        std::io::ErrorKind::NotFound => "there is no such file; name another with --config".to_owned(),
        std::io::ErrorKind::IsADirectory => "it is a directory; name a file with --config".to_owned(),
        std::io::ErrorKind::PermissionDenied => "it may not be read; change its permissions".to_owned(),
        std::io::ErrorKind::InvalidData => {
            "it is not text in UTF-8: expected YAML; save it as UTF-8".to_owned()
        }
        _ => error.to_string().to_lowercase(),
    };
    format!("{}: {why}", path.display())
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
        assert!(market.contains(":1:26: ") && market.contains("no_notice_pct"), "{market}");
        let young = read("policies:\n  node_ttl: 1000\n").unwrap_err();
        assert!(
            young.contains(":2:3: policies: `node_ttl` is 1s") && young.contains("node_ttl_margin"),
            "{young}"
        );
    }

    #[test]
    fn a_bad_file_is_named_once_with_the_place_what_was_expected_and_what_to_do() {
        for (text, said) in [
            (
                "cluster: a\nclustre: b\n",
                ":2:1: unknown key `clustre`: expected one of cluster, checkpoint_store, policies, local; correct or \
                 remove it",
            ),
            ("cluster: a\npolicies:\n  idle_tll: 3\n", ":3:3: unknown key `idle_tll`: expected one of "),
            ("policies: {nodes_max: many}", ":1:23: expected a whole number, not below 0; correct the value"),
            (
                "local:\n  cloud: 3\n",
                ":2:10: expected keys with values, such as `key: value`; correct the value",
            ),
            (
                "cluster: a\ncluster: b\n",
                ":2:1: the key `cluster` is here a second time: expected each key once; ",
            ),
            ("cluster: [1\n", ":1:10: unclosed bracket '[': expected YAML; correct this line"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(said), "`{said}` is not in\n{error}");
            assert!(!error.contains("<input>"), "{error}");
            assert_eq!(error.lines().count(), 1, "{error}");
        }
        assert!(read("[1").is_err());
    }
}
