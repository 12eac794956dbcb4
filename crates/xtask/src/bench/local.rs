//! What a preemption costs in time, with the real scheduler, real workers and the simulated clouds: from the notice to
//! the signal in the trainer, and from the loss of a node to the command on its replacement.
//!
//! The trainer is this program itself, so that the moments are taken within it.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use spotq_model::{
    CheckpointSpec, Choice, Cloud, EventRecord, Fact, InstanceId, JobSpec, NodeId, PlacementPolicy, Profile,
    Resources, Signal, Span,
};
use spotq_proto::v1;
use spotq_proto::v1::jobs_client::JobsClient;
use spotq_proto::v1::reports_client::ReportsClient;
use spotq_provider::CloudProvider as _;
use spotq_provider_local::{CloudConfig, LocalCloud, MarketConfig};
use spotq_testkit::{Server, processes, wait_until_async};
use tokio::signal::unix::{SignalKind, signal};
use tonic::transport::{Channel, Endpoint};

use super::{Figure, Wanted, median, say};

/// Notices per cloud, and losses; spread over the workers' polls.
const NOTICES: u32 = 6;
const LOSSES: u32 = 8;
/// The pauses before faults differ by this, which no poll's period is a multiple of.
const APART: Duration = Duration::from_millis(271);
/// Anything that takes longer is broken, not slow.
const LIMIT: Duration = Duration::from_secs(60);
/// Workers look at a metadata service on loopback this often.
const POLL_MS: f64 = 250.0;
const NOTICE_EXTRA_MS: f64 = 50.0;
const LOSS_WANTED_MS: f64 = 500.0;
const NOTICE: Span = Span::secs(30);
/// Seed of the market, whose prices do not matter here.
const SEED: u64 = 1;

/// A scheduler with its simulated clouds; ended on drop.
#[derive(Debug)]
pub(super) struct Local {
    pub server: Server,
    pub channel: Channel,
    pub cloud: LocalCloud,
    dir: PathBuf,
}

impl Local {
    /// In a market that takes nothing back by itself and always has capacity.
    pub(super) async fn start(dir: &Path, programs: &Path) -> anyhow::Result<Local> {
        std::fs::create_dir_all(dir)?;
        let market = MarketConfig {
            mean_lifetime_s: 0,
            capacity_errors_spot_pct: 0,
            capacity_errors_on_demand_pct: 0,
            ..MarketConfig::default()
        };
        let cloud = CloudConfig { market, ..CloudConfig::default() };
        let config = dir.join("spotqd.yaml");
        // JSON is YAML.
        std::fs::write(&config, serde_json::json!({ "local": { "cloud": cloud } }).to_string())?;
        let mut command = Command::new(programs.join("spotqd"));
        command.arg("--data").arg(dir.join("data")).args(["--listen", "127.0.0.1:0", "--local"]);
        command.args(["--seed", &SEED.to_string()]).arg("--config").arg(&config);
        let server = Server::start("spotqd", dir, command, "listening on ", LIMIT)?;
        let channel = Endpoint::from_shared(format!("http://{}", server.ready()))?.connect().await?;
        let exe = programs.join("spotqd");
        let cloud = LocalCloud::connect_or_start(&dir.join("data").join("cloud"), SEED, &cloud, &exe).await?;
        Ok(Local { server, channel, cloud, dir: dir.to_path_buf() })
    }

    pub(super) async fn submit(&self, key: &str, spec: JobSpec) -> anyhow::Result<u32> {
        let request = v1::SubmitRequest { client_key: key.into(), spec: Some((&spec).into()) };
        Ok(JobsClient::new(self.channel.clone()).submit(request).await?.into_inner().job_id)
    }

    pub(super) async fn job(&self, job_id: u32) -> anyhow::Result<v1::JobView> {
        let request = v1::JobRequest { job_id, task_index: 0 };
        Ok(JobsClient::new(self.channel.clone()).get(request).await?.into_inner())
    }

    /// Ends the job, its node, the clouds and the scheduler.
    pub(super) async fn stop(mut self) -> anyhow::Result<()> {
        let shut = self.cloud.shutdown().await;
        processes::signal(self.server.pid(), rustix::process::Signal::TERM)?;
        self.server.child().wait(LIMIT)?;
        shut.map_err(|refusal| anyhow::anyhow!("the simulated clouds did not end: {}", refusal.message))
    }

    async fn instance(&self, job: u32) -> anyhow::Result<(NodeId, InstanceId)> {
        let node = self.job(job).await?.node.context("the job has no node")?;
        Ok((NodeId(node.node_id), InstanceId(node.instance_id)))
    }
}

pub fn measure(dir: &Path, programs: &Path) -> anyhow::Result<Vec<Figure>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let local = Local::start(&dir.join("local"), programs).await?;
        let mut figures = Vec::new();
        for cloud in [Cloud::Aws, Cloud::Gcp, Cloud::Azure] {
            figures.push(notices(&local, cloud).await?);
        }
        figures.push(losses(&local).await?);
        local.stop().await?;
        Ok(figures)
    })
}

/// Writes when it started and when it was signalled, and saves on the signal as a trainer does.
pub fn trainer(file: &Path) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (mut save, mut end) = (signal(SignalKind::user_defined1())?, signal(SignalKind::terminate())?);
        note(file, "started")?;
        let dir = PathBuf::from(std::env::var_os("SPOTQ_CHECKPOINT_DIR").context("this is no job of spotq")?);
        loop {
            tokio::select! {
                _ = save.recv() => {
                    note(file, "signalled")?;
                    std::fs::write(dir.join("state.tmp"), now_us().to_string())?;
                    std::fs::rename(dir.join("state.tmp"), dir.join("state"))?;
                }
                _ = end.recv() => return Ok(ExitCode::SUCCESS),
            }
        }
    })
}

async fn notices(local: &Local, cloud: Cloud) -> anyhow::Result<Figure> {
    let name = format!("notice-{cloud}");
    let file = local.dir.join(&name);
    let job = local.submit(&name, job(&file, Some(cloud))?).await?;
    let mut delays = Vec::new();
    for number in 0..NOTICES {
        let before = moments(&file, "signalled").len();
        wait(&file, "started", number as usize).await?;
        tokio::time::sleep(APART * number).await;
        let (_, instance) = local.instance(job).await?;
        let told = now_us();
        local
            .cloud
            .simulate_interruption(&instance, NOTICE)
            .await
            .map_err(|refusal| anyhow::anyhow!(refusal.message))?;
        let signalled = wait(&file, "signalled", before).await?;
        delays.push(ms(told, signalled));
    }
    cancel(local, job).await?;
    let all = delays.iter().map(|delay| format!("{delay:.0}")).collect::<Vec<_>>().join(" ");
    say(&format!("{cloud}: {all} ms from the notice to the signal"));
    let worst = delays.iter().copied().fold(0.0, f64::max);
    let wanted = Wanted::AtMost(POLL_MS + NOTICE_EXTRA_MS);
    Ok(Figure::new(
        format!("{cloud}: notice to signal, the worst of {NOTICES}"),
        worst,
        "ms",
        wanted,
        format!("{all} ms"),
    ))
}

async fn losses(local: &Local) -> anyhow::Result<Figure> {
    let file = local.dir.join("loss");
    let job = local.submit("loss", job(&file, None)?).await?;
    let mut delays = Vec::new();
    let mut parts = String::new();
    for number in 0..LOSSES {
        wait(&file, "started", number as usize).await?;
        tokio::time::sleep(APART * number).await;
        let (node, instance) = local.instance(job).await?;
        local
            .cloud
            .simulate_interruption(&instance, Span::ZERO)
            .await
            .map_err(|refusal| anyhow::anyhow!(refusal.message))?;
        let running = wait(&file, "started", number as usize + 1).await?;
        let loss = Loss::of(local, node, running / 1000).await?;
        parts = loss.parts();
        say(&format!("node lost, {:.0} ms without boot and restore: {parts}", loss.delay()));
        delays.push(loss.delay());
    }
    cancel(local, job).await?;
    let name = "node gone to the command on its replacement, median";
    Ok(Figure::new(name, median(&mut delays), "ms", Wanted::AtMost(LOSS_WANTED_MS), parts))
}

/// The moments of one replacement, in milliseconds since the epoch, from the scheduler's own history.
#[derive(Debug, Default)]
struct Loss {
    gone: u64,
    heard: u64,
    placed: u64,
    launched: u64,
    joined: u64,
    accepted: u64,
    restored: u64,
    running: u64,
}

impl Loss {
    async fn of(local: &Local, lost: NodeId, running: u64) -> anyhow::Result<Loss> {
        let mut reports = ReportsClient::new(local.channel.clone());
        let mut stream = reports.events(v1::EventsRequest { job_id: None }).await?.into_inner();
        let mut loss = Loss { running, ..Loss::default() };
        while let Some(line) = stream.message().await? {
            let event = serde_json::from_str::<EventRecord>(&line.json)?.event;
            let at = event.at.0;
            match event.fact {
                Fact::NodeGone { node, ended_at, .. } if node == lost => {
                    (loss.gone, loss.heard) = (ended_at.0, at);
                }
                // The newest of each is the one of the replacement.
                Fact::AttemptPlaced { .. } => loss.placed = at,
                Fact::NodeLaunched { .. } => loss.launched = at,
                Fact::NodeJoined { .. } => loss.joined = at,
                Fact::AttemptAccepted { .. } => loss.accepted = at,
                Fact::AttemptRestored { .. } => loss.restored = at,
                _ => {}
            }
        }
        if loss.gone == 0 {
            bail!("the history does not know that node {lost} is gone");
        }
        Ok(loss)
    }

    /// Without the simulated boot, and without the restore.
    fn delay(&self) -> f64 {
        let restore = self.restored.saturating_sub(self.accepted);
        let all = self.running.saturating_sub(self.gone);
        all.saturating_sub(restore + CloudConfig::default().boot_ms) as f64
    }

    fn parts(&self) -> String {
        let step = |from: u64, to: u64| to.saturating_sub(from);
        format!(
            "heard {}, placed {}, launched {}, joined {} (boot {}), granted {}, restored {}, running {}",
            step(self.gone, self.heard),
            step(self.heard, self.placed),
            step(self.placed, self.launched),
            step(self.launched, self.joined),
            CloudConfig::default().boot_ms,
            step(self.joined, self.accepted),
            step(self.accepted, self.restored),
            step(self.restored, self.running),
        )
    }
}

async fn cancel(local: &Local, job_id: u32) -> anyhow::Result<()> {
    JobsClient::new(local.channel.clone()).cancel(v1::JobRequest { job_id, task_index: 0 }).await?;
    Ok(())
}

fn job(file: &Path, cloud: Option<Cloud>) -> anyhow::Result<JobSpec> {
    let own = std::env::current_exe()?.display().to_string();
    let argv = vec![own, "bench".into(), "--as-trainer".into(), file.display().to_string()];
    let any_of = cloud.map(|cloud| Choice { cloud: Some(cloud), ..Choice::default() }).into_iter().collect();
    Ok(JobSpec {
        command: spotq_model::Command::Argv { argv },
        resources: Resources { any_of, max_hourly: None },
        checkpoint: CheckpointSpec {
            signal: Some(Signal::Usr1),
            profile: Profile::Rename,
            ..CheckpointSpec::default()
        },
        policy: PlacementPolicy::SpotFirst,
        ..spotq_testkit::job("bench")
    })
}

/// Waits for the moment after `known` of its kind, and returns it in microseconds.
async fn wait(file: &Path, kind: &str, known: usize) -> anyhow::Result<u64> {
    let come = async || moments(file, kind).len() > known;
    wait_until_async(LIMIT, come, format!("`{kind}` from the trainer")).await?;
    moments(file, kind).get(known).copied().context("a moment vanished")
}

fn moments(file: &Path, kind: &str) -> Vec<u64> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.lines().filter_map(|line| line.strip_prefix(kind)?.trim().parse().ok()).collect()
}

fn note(file: &Path, kind: &str) -> anyhow::Result<()> {
    let mut out = std::fs::File::options().create(true).append(true).open(file)?;
    Ok(out.write_all(format!("{kind} {}\n", now_us()).as_bytes())?)
}

fn now_us() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX)
}

fn ms(from_us: u64, to_us: u64) -> f64 {
    to_us.saturating_sub(from_us) as f64 / 1000.0
}
