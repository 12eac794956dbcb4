//! What is used by what does nothing: CPU time of an idle scheduler, memory of a worker beside a training job, and the
//! time of `spotq --help`.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use spotq_model::{CheckpointSpec, JobSpec, Profile, Signal};
use spotq_testkit::processes;

use super::local::Local;
use super::{Figure, Wanted, median, say};

/// How long the idle scheduler is watched; one tick of its CPU clock is then 0.05 % of a core.
const WATCHED: Duration = Duration::from_secs(20);
/// After its start it still settles.
const SETTLE: Duration = Duration::from_secs(5);
const IDLE_WANTED_PCT: f64 = 1.0;
const WORKER_WANTED_MB: f64 = 30.0;
const HELP_WANTED_MS: f64 = 20.0;
const HELPS: usize = 21;
/// Ticks of `/proc/PID/stat` in a second; the same on every Linux that we run on.
const TICKS_PER_S: f64 = 100.0;
/// The worker is looked at this often while the job trains, saves and ends.
const LOOK_EVERY: Duration = Duration::from_millis(50);
const JOB_LIMIT: Duration = Duration::from_secs(120);

pub fn measure(dir: &Path, programs: &Path) -> anyhow::Result<Vec<Figure>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut figures = runtime.block_on(async {
        let local = Local::start(&dir.join("footprint"), programs).await?;
        let figures = [idle(&local).await?, worker(&local, programs).await?];
        local.stop().await?;
        anyhow::Ok(figures.to_vec())
    })?;
    figures.push(help(programs)?);
    Ok(figures)
}

async fn idle(local: &Local) -> anyhow::Result<Figure> {
    say("watching the idle scheduler");
    tokio::time::sleep(SETTLE).await;
    let pid = local.server.pid();
    let before = cpu_ticks(pid)?;
    let started = Instant::now();
    tokio::time::sleep(WATCHED).await;
    let ticks = cpu_ticks(pid)?.saturating_sub(before);
    let percent = ticks as f64 / TICKS_PER_S / started.elapsed().as_secs_f64() * 100.0;
    let from = format!(
        "{ticks} ticks of 10 ms in {:.1} s, {:.1} MB resident",
        started.elapsed().as_secs_f64(),
        memory(pid)?.0
    );
    Ok(Figure::new("idle scheduler, of one core", percent, "%", Wanted::AtMost(IDLE_WANTED_PCT), from))
}

/// The most that the worker holds while a job of small state trains, saves and ends.
async fn worker(local: &Local, programs: &Path) -> anyhow::Result<Figure> {
    say("watching a worker beside a job");
    let trainer = programs.join("spotq").display().to_string();
    let argv =
        [&trainer, "train", "--steps", "300", "--step-ms", "20", "--save-every", "50", "--out", "model.bin"];
    let spec = JobSpec {
        command: spotq_model::Command::Argv { argv: argv.map(str::to_owned).to_vec() },
        checkpoint: CheckpointSpec {
            signal: Some(Signal::Usr1),
            profile: Profile::Rename,
            ..CheckpointSpec::default()
        },
        outputs: vec!["model.bin".into()],
        ..spotq_testkit::job("footprint")
    };
    let job = local.submit("footprint", spec).await?;
    let started = Instant::now();
    let (mut resident, mut anonymous) = (0.0_f64, 0.0_f64);
    loop {
        let view = local.job(job).await?;
        // By its first word: the program changes into it when the node has booted.
        let workers = processes::with_env("SPOTQ_NODE", None)
            .into_iter()
            .filter(|p| p.command.starts_with("spotq-worker "));
        let of_ours = |instance: &str| workers.clone().find(|p| p.command.contains(instance)).map(|p| p.pid);
        let pid = view
            .node
            .as_ref()
            .filter(|node| !node.instance_id.is_empty())
            .and_then(|node| of_ours(&node.instance_id));
        if let Some((all, own)) = pid.and_then(|pid| memory(pid).ok()) {
            (resident, anonymous) = (resident.max(all), anonymous.max(own));
        }
        if let Some(outcome) = view.outcome {
            ensure!(outcome == "completed", "the job to watch is {outcome}");
            break;
        }
        ensure!(started.elapsed() < JOB_LIMIT, "the job to watch does not end");
        tokio::time::sleep(LOOK_EVERY).await;
    }
    let from = format!("{anonymous:.1} MB of it its own, the rest pages of the program");
    Ok(Figure::new("worker, resident at most", resident, "MB", Wanted::AtMost(WORKER_WANTED_MB), from))
}

fn help(programs: &Path) -> anyhow::Result<Figure> {
    let program = programs.join("spotq");
    let mut times = Vec::new();
    for _ in 0..HELPS {
        let started = Instant::now();
        let status = Command::new(&program).arg("--help").stdout(Stdio::null()).status();
        ensure!(
            status.with_context(|| format!("cannot run {}", program.display()))?.success(),
            "--help failed"
        );
        times.push(started.elapsed().as_secs_f64() * 1000.0);
    }
    let from = format!("median of {HELPS}");
    Ok(Figure::new("spotq --help", median(&mut times), "ms", Wanted::AtMost(HELP_WANTED_MS), from))
}

/// User and system time so far.
fn cpu_ticks(pid: u32) -> anyhow::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).context("the scheduler is gone")?;
    // The name in parentheses may hold anything; what follows the last one is regular.
    let fields: Vec<&str> =
        stat.rsplit_once(')').context("/proc is not as expected")?.1.split_whitespace().collect();
    let field = |index: usize| fields.get(index).and_then(|text| text.parse::<u64>().ok());
    field(11).zip(field(12)).map(|(user, system)| user + system).context("/proc is not as expected")
}

/// Resident memory, and the part of it that is no file, in MB.
fn memory(pid: u32) -> anyhow::Result<(f64, f64)> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let kib = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').trim().trim_end_matches(" kB").parse::<f64>().ok()
    };
    let mb = |kib: f64| kib * 1024.0 / 1e6;
    kib("VmRSS").zip(kib("RssAnon")).map(|(all, own)| (mb(all), mb(own))).context("/proc is not as expected")
}
