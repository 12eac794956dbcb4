//! The scheduler of the demo: a process of its own, so that it can be killed like any other.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use spotq_provider_local::{CloudConfig, LocalCloud, MarketConfig};
use spotq_scheduler::DAEMON_ARGV0;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

use crate::client::Client;
use crate::error::ExpectedError;

/// A scheduler that is not ready by then will not be.
const READY_LIMIT: Duration = Duration::from_secs(60);
const STOP_LIMIT: Duration = Duration::from_secs(60);
/// The market moves this often, so that prices change while one watches.
const PRICE_STEP_S: u64 = 5;

#[derive(Debug)]
pub(super) struct Daemon {
    data: PathBuf,
    seed: u64,
    config: PathBuf,
    child: Child,
    address: String,
    restarts: u32,
    cloud: LocalCloud,
}

impl Daemon {
    pub(super) async fn start(data: &Path, seed: u64) -> Result<Self, ExpectedError> {
        let config = data.join("spotqd.yaml");
        let cloud = cloud_config();
        // Nothing comes after this job, so its last node need not wait for more work.
        let settings = serde_json::json!({ "local": { "cloud": cloud }, "policies": { "idle_ttl": 0 } });
        // JSON is YAML.
        std::fs::write(&config, settings.to_string()).map_err(|e| ExpectedError::writing(&config, &e))?;
        let (child, address) = spawn(data, seed, &config, "127.0.0.1:0").await?;
        // The same cloud that the scheduler uses: the demo takes nodes away behind the scheduler's back.
        let exe = super::program()?;
        let cloud = LocalCloud::connect_or_start(&data.join("cloud"), seed, &cloud, &exe)
            .await
            .map_err(|e| ExpectedError::Internal(format!("cannot reach the simulated clouds: {e}")))?;
        Ok(Daemon { data: data.to_owned(), seed, config, child, address, restarts: 0, cloud })
    }

    pub(super) async fn client(&self) -> Result<Client, ExpectedError> {
        Client::connect(&format!("http://{}", self.address)).await
    }

    pub(super) fn cloud(&self) -> &LocalCloud {
        &self.cloud
    }

    pub(super) fn restarts(&self) -> u32 {
        self.restarts
    }

    /// `kill -9`, at whatever the scheduler is doing.
    pub(super) async fn kill(&mut self) -> Result<(), ExpectedError> {
        self.child
            .kill()
            .await
            .map_err(|e| ExpectedError::Internal(format!("cannot kill the scheduler: {e}")))
    }

    pub(super) async fn restart(&mut self) -> Result<(), ExpectedError> {
        let (child, _) = spawn(&self.data, self.seed, &self.config, &self.address).await?;
        self.child = child;
        self.restarts += 1;
        Ok(())
    }

    /// Ends the scheduler and its cloud, whatever they are doing.
    pub(super) async fn abandon(&mut self) {
        // It may have ended by itself; what counts is that nothing is left.
        let _ = self.child.kill().await;
        let _ = self.cloud.shutdown().await;
    }

    /// Asks it to end; with no work left it ends its cloud, too.
    pub(super) async fn stop(&mut self) -> Result<(), ExpectedError> {
        let pid = self.child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        if let Some(pid) = pid {
            // It may have ended by itself just now, which is what is wanted.
            let _ = kill_process(pid, Signal::TERM);
        }
        match tokio::time::timeout(STOP_LIMIT, self.child.wait()).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(ExpectedError::Internal(format!("cannot end the scheduler: {error}"))),
            Err(_) => Err(ExpectedError::Internal("the scheduler did not end when it was told to".into())),
        }
    }
}

/// The demo decides when nodes are taken away, so the market does not.
fn cloud_config() -> CloudConfig {
    CloudConfig {
        market: MarketConfig { mean_lifetime_s: 0, price_step_s: PRICE_STEP_S, ..MarketConfig::default() },
        ..CloudConfig::default()
    }
}

async fn spawn(
    data: &Path,
    seed: u64,
    config: &Path,
    listen: &str,
) -> Result<(Child, String), ExpectedError> {
    let log = data.join("spotqd.log");
    let log = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(&log)
        .map_err(|e| ExpectedError::writing(&log, &e))?;
    let mut command = std::process::Command::new(super::program()?);
    command.arg0(DAEMON_ARGV0).arg("--data").arg(data).args(["--listen", listen, "--local"]);
    command.args(["--seed", &seed.to_string()]).arg("--config").arg(config);
    // A session of its own: Ctrl-C is for the demo, which then ends it in order.
    let mut child = Command::from(command)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(|e| super::cannot_start("the scheduler", &e))?;
    let stdout =
        child.stdout.take().ok_or_else(|| ExpectedError::Internal("the scheduler has no stdout".into()))?;
    let ready = async {
        let mut lines = BufReader::new(stdout).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            if let Some(address) = line.strip_prefix("listening on ") {
                return Some(address.to_owned());
            }
        }
        None
    };
    match tokio::time::timeout(READY_LIMIT, ready).await {
        Ok(Some(address)) => Ok((child, address)),
        Ok(None) | Err(_) => {
            let said = std::fs::read_to_string(data.join("spotqd.log")).unwrap_or_default();
            let last = said.lines().last().unwrap_or("it said nothing").to_owned();
            Err(ExpectedError::Internal(format!("the scheduler did not start: {last}")))
        }
    }
}
