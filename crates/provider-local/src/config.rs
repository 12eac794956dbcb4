//! Settings of the simulated cloud. Every field has a default, so `{}` is a complete file.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::LocalError;

/// The whole cloud.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CloudConfig {
    /// Time between the launch and the start of the worker.
    pub boot_ms: u64,
    /// Time between TERM and KILL when a node is terminated.
    pub terminate_grace_ms: u64,
    /// The cloud ends when it has had no live node and no caller for this long.
    pub idle_exit_ms: u64,
    /// How long the first call of Azure's scheduled events takes; up to two minutes in the real cloud.
    pub azure_first_call_ms: u64,
    /// Program of the nodes; the program that started the cloud if absent.
    pub worker: Option<PathBuf>,
    pub market: MarketConfig,
}

impl Default for CloudConfig {
    fn default() -> Self {
        CloudConfig {
            boot_ms: 300,
            terminate_grace_ms: 5_000,
            // Long enough for a scheduler to be restarted, short enough that a forgotten demo leaves nothing.
            idle_exit_ms: 30_000,
            azure_first_call_ms: 0,
            worker: None,
            market: MarketConfig::default(),
        }
    }
}

impl CloudConfig {
    /// Reads a JSON file.
    ///
    /// # Errors
    /// `LocalError::Config` with the line and column of what is wrong.
    pub fn read(path: &Path) -> Result<Self, LocalError> {
        let text = std::fs::read_to_string(path).map_err(LocalError::io("read", path))?;
        let bad = |detail: String| LocalError::Config { path: path.into(), detail };
        let config: CloudConfig = serde_json::from_str(&text).map_err(|e| bad(e.to_string()))?;
        config.market.check().map_err(bad)?;
        Ok(config)
    }
}

/// The market: prices, capacity and preemptions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MarketConfig {
    /// Mean life of a spot node; pools differ from it by up to a factor of two. 0: spot nodes live for ever.
    pub mean_lifetime_s: u64,
    /// Share of preemptions that come without any notice, in per cent.
    pub no_notice_pct: u8,
    /// Share of preemptions with a notice of only 10 s, in per cent. The rest have their cloud's own notice.
    pub short_notice_pct: u8,
    /// If set, every preemption has this notice.
    pub notice_ms: Option<u64>,
    /// Share of the time windows in which a spot pool has no capacity, in per cent.
    pub capacity_errors_spot_pct: u8,
    /// The same for on-demand pools.
    pub capacity_errors_on_demand_pct: u8,
    /// Length of such a window.
    pub capacity_window_s: u64,
    /// Bound on the cool-down that a refusal asks for. Real clouds warrant up to an hour, but here capacity is
    /// back after a window, and an hour is longer than most simulations.
    pub max_cool_down_s: u64,
    /// Prices change at multiples of this.
    pub price_step_s: u64,
}

impl Default for MarketConfig {
    fn default() -> Self {
        MarketConfig {
            mean_lifetime_s: 600,
            no_notice_pct: 20,
            short_notice_pct: 20,
            notice_ms: None,
            capacity_errors_spot_pct: 8,
            capacity_errors_on_demand_pct: 1,
            capacity_window_s: 120,
            max_cool_down_s: 60,
            price_step_s: 60,
        }
    }
}

impl MarketConfig {
    /// Says what cannot be, in the words of the file.
    ///
    /// # Errors
    /// The field and what was expected of it.
    pub fn check(&self) -> Result<(), String> {
        for (name, value) in
            [("capacity_window_s", self.capacity_window_s), ("price_step_s", self.price_step_s)]
        {
            if value == 0 {
                return Err(format!("`market.{name}` is 0; expected at least 1"));
            }
        }
        for (name, pct) in [
            ("no_notice_pct", self.no_notice_pct),
            ("short_notice_pct", self.short_notice_pct),
            ("capacity_errors_spot_pct", self.capacity_errors_spot_pct),
            ("capacity_errors_on_demand_pct", self.capacity_errors_on_demand_pct),
        ] {
            if pct > 100 {
                return Err(format!("`market.{name}` is {pct}; expected 0 to 100"));
            }
        }
        if u16::from(self.no_notice_pct) + u16::from(self.short_notice_pct) > 100 {
            return Err("`market.no_notice_pct` and `market.short_notice_pct` together are above 100".into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<CloudConfig, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        std::fs::write(&path, text).unwrap();
        CloudConfig::read(&path).map_err(|e| e.to_string())
    }

    #[test]
    fn an_empty_object_is_the_default() {
        assert_eq!(read("{}"), Ok(CloudConfig::default()));
    }

    #[test]
    fn a_bad_file_is_named_with_what_is_wrong_in_it() {
        assert!(read("{\n \"boot_s\": 1}").unwrap_err().contains("line 2"));
        assert!(read(r#"{"market":{"no_notice_pct":101}}"#).unwrap_err().contains("no_notice_pct"));
        assert!(
            read(r#"{"market":{"no_notice_pct":60,"short_notice_pct":60}}"#)
                .unwrap_err()
                .contains("together")
        );
        assert!(read(r#"{"market":{"price_step_s":0}}"#).unwrap_err().contains("price_step_s"));
        let missing = CloudConfig::read(Path::new("/does/not/exist.json")).unwrap_err().to_string();
        assert!(missing.contains("could not read /does/not/exist.json"), "{missing}");
    }
}
