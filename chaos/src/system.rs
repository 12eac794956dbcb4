//! One scheduler with its directory, its simulated cloud and the command line that talks to it.
//!
//! Everything is done as a user does it: by the programs. What is started here is ended here, by its own pid.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde::Deserialize;
use spotq_provider_local::{CloudConfig, MarketConfig};
use spotq_testkit::{Child, Mark, Server, processes};

/// A scheduler that is not ready by then, on a busy machine with a few hundred jobs to read, will not be.
const READY_LIMIT: Duration = Duration::from_secs(60);
/// It ends its cloud, and that its nodes, each with its grace.
const STOP_LIMIT: Duration = Duration::from_secs(60);
/// Tags what the cloud runs for this scheduler.
pub(crate) const CLUSTER: &str = "chaos";
/// Steps of one job, and how long each takes at least: three seconds, mostly asleep, so that several jobs train side by
/// side on two cores.
const STEPS: u64 = 150;
const STEP_MS: u64 = 20;
/// Several times a second, so that a kill falls now before, now into, now after a save.
const SAVE_EVERY: u64 = 10;
/// The market takes nodes back after a few jobs' time.
const MEAN_LIFETIME_S: u64 = 20;
/// Prices and capacity change several times in a run.
const PRICE_STEP_S: u64 = 5;
const CAPACITY_WINDOW_S: u64 = 10;

/// The programs and the directory of one run.
#[derive(Debug)]
pub(crate) struct System {
    root: PathBuf,
    programs: PathBuf,
    seed: u64,
    mark: Mark,
    address: String,
    server: Option<Server>,
}

/// `spotq`, with the address of the scheduler.
#[derive(Debug, Clone)]
pub(crate) struct Spotq {
    program: PathBuf,
    address: String,
    job_file: PathBuf,
}

/// What `spotq queue -o json` says of a job, as far as it matters here.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct JobLine {
    pub job_id: u32,
    pub name: String,
    pub phase: String,
    pub outcome: Option<String>,
    pub outcome_text: String,
}

#[derive(Debug, Deserialize)]
struct Acknowledged {
    job_id: u32,
}

impl System {
    /// Starts the scheduler in `root`, which must exist and be absolute.
    pub(crate) fn start(root: &Path, programs: &Path, seed: u64) -> anyhow::Result<System> {
        let cloud = CloudConfig {
            market: MarketConfig {
                mean_lifetime_s: MEAN_LIFETIME_S,
                price_step_s: PRICE_STEP_S,
                capacity_window_s: CAPACITY_WINDOW_S,
                ..MarketConfig::default()
            },
            ..CloudConfig::default()
        };
        let settings = serde_json::json!({ "cluster": CLUSTER, "local": { "cloud": cloud } });
        // JSON is YAML.
        write(&root.join("spotqd.yaml"), &settings.to_string())?;
        let trainer = programs.join("spotq-train");
        let job = serde_json::json!({
            "run": format!("exec '{}' {}", trainer.display(), trainer_args().join(" ")),
            "checkpoint": { "signal": "USR1", "profile": "rename" },
            "outputs": ["model.bin"],
        });
        write(&root.join("job.yaml"), &job.to_string())?;
        let mut system = System {
            root: root.to_path_buf(),
            programs: programs.to_path_buf(),
            seed,
            mark: Mark::new(),
            address: "127.0.0.1:0".into(),
            server: None,
        };
        system.restart()?;
        Ok(system)
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    /// `host:port`, the same for the whole run.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    pub(crate) fn cloud_dir(&self) -> PathBuf {
        self.root.join("data").join("cloud")
    }

    pub(crate) fn daemon(&self) -> PathBuf {
        self.programs.join("spotqd")
    }

    pub(crate) fn spotq(&self) -> Spotq {
        Spotq {
            program: self.programs.join("spotq"),
            address: self.address.clone(),
            job_file: self.root.join("job.yaml"),
        }
    }

    /// Starts the scheduler at its old address and waits until it is ready.
    pub(crate) fn restart(&mut self) -> anyhow::Result<()> {
        let server = Server::start("spotqd", &self.root, self.command(), "listening on ", READY_LIMIT)?;
        self.address = server.ready().to_owned();
        self.server = Some(server);
        Ok(())
    }

    /// `kill -9` of the scheduler.
    pub(crate) fn kill(&mut self) {
        // Dropping it kills it, by its own pid, and waits for it.
        self.server = None;
    }

    /// Starts the scheduler and kills it after `life`, wherever it is by then.
    pub(crate) fn start_and_kill(&mut self, life: Duration) -> anyhow::Result<()> {
        let mut child = Child::start("spotqd", &self.root, self.command())?;
        let early = child.wait(life).ok();
        child.kill();
        match early {
            Some(status) => {
                bail!("the scheduler ended by itself while it started, with {status}: {}", self.log_end())
            }
            None => Ok(()),
        }
    }

    /// Asks the scheduler to end; with no work left it ends its cloud, too.
    pub(crate) fn stop(&mut self) -> anyhow::Result<()> {
        let Some(mut server) = self.server.take() else { return Ok(()) };
        processes::signal(server.pid(), rustix::process::Signal::TERM)?;
        let status = server.child().wait(STOP_LIMIT)?;
        if !status.success() {
            bail!("the scheduler ended with {status}: {}", self.log_end());
        }
        self.mark.wait_gone(STOP_LIMIT)?;
        Ok(())
    }

    /// What the scheduler logged over all its lives.
    pub(crate) fn log(&self) -> String {
        let bytes = std::fs::read(self.root.join("spotqd.err")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn log_end(&self) -> String {
        self.log().lines().next_back().unwrap_or("it said nothing").to_owned()
    }

    fn command(&self) -> Command {
        let mut command = Command::new(self.daemon());
        command.arg("--data").arg(self.root.join("data")).args(["--listen", &self.address, "--local"]);
        command.args(["--seed", &self.seed.to_string()]).arg("--config").arg(self.root.join("spotqd.yaml"));
        command.env_remove("SPOTQ_CHECKPOINT_DIR").env("NO_COLOR", "1");
        self.mark.put_on(&mut command);
        command
    }
}

impl Drop for System {
    fn drop(&mut self) {
        self.server = None;
        // After a failure nodes may be left that the mark does not reach: their environment is a machine's own.
        for process in crate::victims::on_nodes(&self.root) {
            // One that ended meanwhile is what we want.
            let _ = processes::signal(process.pid, rustix::process::Signal::KILL);
        }
    }
}

impl Spotq {
    /// Submits the job under `key`, which is its name too. `None`: it was not acknowledged, and may or may not exist.
    pub(crate) fn submit(&self, key: &str) -> anyhow::Result<Option<u32>> {
        let file = self.job_file.display().to_string();
        let output = self.run(&["submit", &file, "--client-key", key, "--name", key, "-o", "json"])?;
        if !output.status.success() {
            return Ok(None);
        }
        let answer: Acknowledged =
            serde_json::from_slice(&output.stdout).context("the answer to a submit")?;
        Ok(Some(answer.job_id))
    }

    /// Jobs that are not done, or all. `None`: the scheduler is away.
    pub(crate) fn queue(&self, which: &[&str]) -> anyhow::Result<Option<Vec<JobLine>>> {
        let output = self.run(&[&["queue", "-n", "1000000", "-o", "json"], which].concat())?;
        if !output.status.success() {
            return Ok(None);
        }
        Ok(Some(serde_json::from_slice(&output.stdout).context("the queue")?))
    }

    /// Fetches a job's outputs into `dir`.
    pub(crate) fn pull(&self, job: u32, dir: &Path) -> anyhow::Result<()> {
        self.say(&["pull", &job.to_string(), &dir.display().to_string(), "-q"]).map(drop)
    }

    /// Why a job is where it is, for a person.
    pub(crate) fn explain(&self, job: u32) -> String {
        self.say(&["explain", &job.to_string()]).unwrap_or_else(|error| error.to_string())
    }

    /// The nodes that are paid for, as JSON.
    pub(crate) fn nodes(&self) -> anyhow::Result<Vec<serde_json::Value>> {
        serde_json::from_str(&self.say(&["nodes", "-o", "json"])?).context("the nodes")
    }

    fn say(&self, args: &[&str]) -> anyhow::Result<String> {
        let output = self.run(args)?;
        if !output.status.success() {
            bail!(
                "`spotq {}` ended with {}: {}",
                args.join(" "),
                output.status,
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn run(&self, args: &[&str]) -> anyhow::Result<Output> {
        let mut command = Command::new(&self.program);
        command.args(args).args(["--server", &format!("http://{}", self.address)]);
        command.output().with_context(|| format!("cannot run {}", self.program.display()))
    }
}

/// What the trainer is told, in the job and in the undisturbed run alike.
pub(crate) fn trainer_args() -> Vec<String> {
    let (steps, ms, save) = (STEPS.to_string(), STEP_MS.to_string(), SAVE_EVERY.to_string());
    ["--steps", &steps, "--step-ms", &ms, "--save-every", &save, "--out", "model.bin"]
        .map(str::to_owned)
        .to_vec()
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
