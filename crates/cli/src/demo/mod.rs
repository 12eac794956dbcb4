//! `spotq demo`: a real run through preemptions on this machine, with nothing installed and nothing configured.
//!
//! It starts the real scheduler, the simulated clouds and real workers, trains a real model, takes its nodes away, and
//! kills the scheduler once. Beside that it trains the same model undisturbed. It must not be able to lie: every figure
//! is computed from what the run left behind, and `--keep` leaves all of that for anyone to compute it again.

mod daemon;
mod faults;
mod proof;
mod story;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use spotq_model::{
    CheckpointSpec, Command, JobId, JobSpec, PlacementPolicy, Profile, Resources, Retry, Signal, TaskId,
};
use spotq_proto::v1;
use tokio::process::Child;

use crate::error::ExpectedError;
use crate::out::{Format, Out};
use daemon::Daemon;
use story::Story;

#[derive(Debug, Clone, Args)]
pub struct DemoArgs {
    /// Seeds the market and the faults; the final model is the same for all seeds.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Preempt so often.
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=100))]
    pub preemptions: u32,
    /// Keep models, segments and events in this directory.
    #[arg(long, value_name = "DIR")]
    pub keep: Option<PathBuf>,
}

/// Steps of training without preemptions beyond the usual five: about ten seconds on one core.
const STEPS_MIN: u64 = 3000;
/// Each preemption needs some steps to happen in.
const STEPS_PER_PREEMPTION: u64 = 300;
/// A demo that takes longer than this is stuck; it says so instead of hanging.
const LIMIT: Duration = Duration::from_secs(600);
/// How long the undisturbed training may go on after the job is done.
const UNDISTURBED_LIMIT: Duration = Duration::from_secs(300);

/// Runs the demo; ends with 0 only if the job completed and both models are the same.
pub fn run(args: &DemoArgs, out: &Out) -> Result<ExitCode, ExpectedError> {
    let place = Place::new(args.keep.as_deref())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| ExpectedError::Internal(format!("cannot start the runtime: {e}")))?;
    let result = runtime.block_on(async {
        match tokio::time::timeout(LIMIT, demo(args, &place, out)).await {
            Ok(result) => result,
            Err(_) => Err(ExpectedError::Internal(format!(
                "the demo did not end within {} s; `--keep DIR` leaves its logs",
                LIMIT.as_secs()
            ))),
        }
    });
    let proof = result?;
    proof.print(out, args.keep.as_deref())?;
    Ok(if proof.holds() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn demo(args: &DemoArgs, place: &Place, out: &Out) -> Result<proof::Proof, ExpectedError> {
    let steps = STEPS_MIN.max(STEPS_PER_PREEMPTION * u64::from(args.preemptions + 1));
    let story = Story::new(out);
    story.say(&format!(
        "training a character model for {steps} steps twice: undisturbed, and on spot capacity"
    ));
    let mut undisturbed = undisturbed(&place.uninterrupted, steps)?;
    let mut daemon = Daemon::start(&place.data, args.seed).await?;
    let client = daemon.client().await?;
    let submitted = client
        .submit(v1::SubmitRequest { client_key: "demo".into(), spec: Some((&job(steps)?).into()) })
        .await?;
    let task = TaskId::only(JobId(submitted.job_id));
    let plan = faults::Plan::new(args.seed, args.preemptions, steps);
    let story = faults::run(&mut daemon, &client, task, plan, story).await?;
    story.say("waiting for the undisturbed training to end");
    let ended = tokio::time::timeout(UNDISTURBED_LIMIT, undisturbed.wait()).await;
    if !matches!(ended, Ok(Ok(status)) if status.success()) {
        return Err(ExpectedError::Internal(format!("the undisturbed training did not end well: {ended:?}")));
    }
    let evidence = proof::gather(&client, task, place).await?;
    daemon.stop().await?;
    story.end();
    Ok(proof::Proof::new(args.seed, daemon.restarts(), evidence))
}

/// Where the demo works; removed at the end unless it is to be kept.
#[derive(Debug)]
pub(crate) struct Place {
    /// Of the scheduler.
    pub data: PathBuf,
    pub uninterrupted: PathBuf,
    pub final_dir: PathBuf,
    pub root: PathBuf,
    temporary: bool,
}

impl Place {
    fn new(keep: Option<&Path>) -> Result<Self, ExpectedError> {
        let root = match keep {
            Some(dir) => dir.to_path_buf(),
            None => std::env::temp_dir().join(format!("spotq-demo-{}", uuid::Uuid::new_v4())),
        };
        std::fs::create_dir_all(&root).map_err(|e| ExpectedError::writing(&root, &e))?;
        let root = root.canonicalize().map_err(|e| ExpectedError::reading(&root, &e))?;
        let place = Place {
            data: root.join("data"),
            uninterrupted: root.join("uninterrupted"),
            final_dir: root.join("final"),
            temporary: keep.is_none(),
            root,
        };
        // What an earlier demo left in the same directory must not be taken for this one's.
        for dir in [&place.data, &place.uninterrupted, &place.final_dir] {
            if dir.exists() {
                std::fs::remove_dir_all(dir).map_err(|e| ExpectedError::writing(dir, &e))?;
            }
        }
        for dir in [&place.data, &place.uninterrupted] {
            std::fs::create_dir_all(dir).map_err(|e| ExpectedError::writing(dir, &e))?;
        }
        Ok(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.temporary {
            // A directory that cannot be removed is in the system's temporary place anyway.
            let _ = std::fs::remove_dir_all(&self.root);
        }
    }
}

/// The same training without a scheduler, a cloud or a checkpoint.
fn undisturbed(dir: &Path, steps: u64) -> Result<Child, ExpectedError> {
    let log = dir.join("log");
    let log = std::fs::File::create(&log).map_err(|e| ExpectedError::writing(&log, &e))?;
    let mut command = tokio::process::Command::new(program()?);
    command.args(trainer_args(steps)).current_dir(dir).stdin(std::process::Stdio::null());
    for name in ["SPOTQ_CHECKPOINT_DIR", "SPOTQ_PROGRESS_FILE", "SPOTQ_NOTICE_FILE", "SPOTQ_RESUME_FROM"] {
        command.env_remove(name);
    }
    command.stdout(log).kill_on_drop(true).spawn().map_err(|e| cannot_start("the trainer", &e))
}

/// The job, as a user would write it.
fn job(steps: u64) -> Result<JobSpec, ExpectedError> {
    let program = program()?.display().to_string();
    let argv = std::iter::once(program).chain(trainer_args(steps)).collect();
    Ok(JobSpec {
        name: "demo".into(),
        user: std::env::var("USER").unwrap_or_else(|_| "you".into()),
        command: Command::Argv { argv },
        setup: None,
        workdir: None,
        env: std::collections::BTreeMap::default(),
        resources: Resources::default(),
        checkpoint: CheckpointSpec {
            signal: Some(Signal::Usr1),
            profile: Profile::Rename,
            ..CheckpointSpec::default()
        },
        policy: PlacementPolicy::SpotOnly,
        budget: None,
        project: None,
        tags: std::collections::BTreeMap::default(),
        time_limit: None,
        retry: Retry::default(),
        priority: 0,
        begin: None,
        hold: false,
        outputs: vec!["model.bin".into()],
    })
}

fn trainer_args(steps: u64) -> impl Iterator<Item = String> {
    [
        "train",
        "--steps",
        &steps.to_string(),
        "--save-every",
        "100",
        "--log-every",
        "100",
        "--out",
        "model.bin",
    ]
    .map(str::to_owned)
    .into_iter()
}

fn program() -> Result<PathBuf, ExpectedError> {
    std::env::current_exe().map_err(|e| ExpectedError::Internal(format!("cannot find this program: {e}")))
}

fn cannot_start(what: &str, error: &std::io::Error) -> ExpectedError {
    ExpectedError::Internal(format!("cannot start {what}: {error}"))
}

/// Whether data on stdout is for a program.
fn for_programs(out: &Out) -> bool {
    matches!(out.format, Format::Json | Format::Csv)
}
