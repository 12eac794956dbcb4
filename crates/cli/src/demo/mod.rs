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
    CheckpointSpec, Command, JobId, JobSpec, PlacementPolicy, Profile, Resources, Retry, TaskId,
};
use spotq_proto::v1;
use tokio::process::Child;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::error::{ExpectedError, codes};
use crate::out::{Format, Out};
use daemon::Daemon;
use story::Story;

#[derive(Debug, Clone, Args)]
pub struct DemoArgs {
    /// Seeds the market and the faults; the final model is the same for all seeds.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Preempt so often, from 2 to 100 times.
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = preemptions)]
    pub preemptions: u32,
    /// Keep models, segments and events in this directory.
    #[arg(long, value_name = "DIR")]
    pub keep: Option<PathBuf>,
}

/// One without notice and one with a dead scheduler, at least.
const PREEMPTIONS: std::ops::RangeInclusive<u32> = 2..=100;
/// Steps of training without preemptions beyond the usual five: about ten seconds on one core.
const STEPS_MIN: u64 = 3000;
/// Each preemption needs some steps to happen in.
const STEPS_PER_PREEMPTION: u64 = 300;
/// A demo that takes longer than this is stuck; it says so instead of hanging.
const LIMIT: Duration = Duration::from_secs(600);
/// How long the undisturbed training may go on after the job is done.
const UNDISTURBED_LIMIT: Duration = Duration::from_secs(300);

fn preemptions(text: &str) -> Result<u32, String> {
    let wrong = || format!("expected a number from {} to {}", PREEMPTIONS.start(), PREEMPTIONS.end());
    text.parse().ok().filter(|n| PREEMPTIONS.contains(n)).ok_or_else(wrong)
}

/// Runs the demo; ends with 0 only if the job completed and both models are the same.
pub fn run(args: &DemoArgs, out: &Out) -> Result<ExitCode, ExpectedError> {
    let place = Place::new(args.keep.as_deref())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| ExpectedError::Internal(format!("cannot start the runtime: {e}")))?;
    let proof = match runtime.block_on(demo(args, &place, out)) {
        Ok(Some(proof)) => proof,
        Ok(None) => {
            out.say("spotq: stopped; nothing is left running");
            return Ok(ExitCode::from(codes::INTERRUPTED));
        }
        Err(error) => return Err(error),
    };
    proof.print(out, args.keep.as_deref())?;
    Ok(if proof.holds() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// `None` if it was stopped by a signal. However it ends, nothing of it is left running.
async fn demo(args: &DemoArgs, place: &Place, out: &Out) -> Result<Option<proof::Proof>, ExpectedError> {
    let mut stop = Stop::new()?;
    let mut daemon = Daemon::start(&place.data, args.seed).await?;
    let ended = tokio::select! {
        ended = tokio::time::timeout(LIMIT, train(&mut daemon, args, place, out)) => ended,
        () = stop.asked() => {
            daemon.abandon().await;
            return Ok(None);
        }
    };
    let failed = match ended {
        Ok(Ok(proof)) => return Ok(Some(proof)),
        Ok(Err(error)) => error,
        Err(_) => ExpectedError::Internal(format!(
            "the demo did not end within {} s; `--keep DIR` leaves its logs",
            LIMIT.as_secs()
        )),
    };
    daemon.abandon().await;
    Err(failed)
}

async fn train(
    daemon: &mut Daemon,
    args: &DemoArgs,
    place: &Place,
    out: &Out,
) -> Result<proof::Proof, ExpectedError> {
    let steps = STEPS_MIN.max(STEPS_PER_PREEMPTION * u64::from(args.preemptions + 1));
    let story = Story::new(out);
    story.say(&format!(
        "training a character model for {steps} steps twice: undisturbed, and on spot capacity"
    ));
    let mut undisturbed = undisturbed(&place.uninterrupted, steps)?;
    let client = daemon.client().await?;
    let submitted = client
        .submit(v1::SubmitRequest { client_key: "demo".into(), spec: Some((&job(steps)?).into()) })
        .await?;
    let task = TaskId::only(JobId(submitted.job_id));
    let plan = faults::Plan::new(args.seed, args.preemptions, steps);
    let story = faults::run(daemon, &client, task, plan, story).await?;
    story.say("waiting for the undisturbed training to end");
    let ended = tokio::time::timeout(UNDISTURBED_LIMIT, undisturbed.wait()).await;
    if !matches!(ended, Ok(Ok(status)) if status.success()) {
        return Err(ExpectedError::Internal(format!("the undisturbed training did not end well: {ended:?}")));
    }
    let evidence = proof::gather(&client, task, place).await?;
    daemon.stop().await?;
    story.end();
    Ok(proof::Proof::new(args.seed, args.preemptions, daemon.restarts(), evidence))
}

/// Ctrl-C, or being told to end.
struct Stop {
    term: Signal,
    int: Signal,
    hup: Signal,
}

impl Stop {
    fn new() -> Result<Self, ExpectedError> {
        let on = |kind| {
            signal(kind).map_err(|e| ExpectedError::Internal(format!("cannot listen to signals: {e}")))
        };
        Ok(Stop {
            term: on(SignalKind::terminate())?,
            int: on(SignalKind::interrupt())?,
            hup: on(SignalKind::hangup())?,
        })
    }

    async fn asked(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.int.recv() => {}
            _ = self.hup.recv() => {}
        }
    }
}

/// Says that a directory is a demo's; without it nothing in it is touched.
const MARKER: &str = ".spotq-demo";

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
        make_dir(&root)?;
        let root = root.canonicalize().map_err(|e| ExpectedError::reading(&root, &e))?;
        let place = Place {
            data: root.join("data"),
            uninterrupted: root.join("uninterrupted"),
            final_dir: root.join("final"),
            temporary: keep.is_none(),
            root,
        };
        claim(&place.root)?;
        // What an earlier demo left in the same directory must not be taken for this one's.
        for dir in [&place.data, &place.uninterrupted, &place.final_dir] {
            if dir.exists() {
                std::fs::remove_dir_all(dir).map_err(|e| ExpectedError::writing(dir, &e))?;
            }
        }
        for file in ["segments.json", "events.jsonl"] {
            match std::fs::remove_file(place.root.join(file)) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                    return Err(ExpectedError::writing(&place.root.join(file), &e));
                }
                Ok(()) | Err(_) => {}
            }
        }
        for dir in [&place.data, &place.uninterrupted] {
            make_dir(dir)?;
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

/// As `spotqd` makes its own: what is below is its owner's alone. A directory that is there stays as it is.
fn make_dir(path: &Path) -> Result<(), ExpectedError> {
    use std::os::unix::fs::DirBuilderExt as _;
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(|e| ExpectedError::writing(path, &e))
}

/// Takes an empty directory, or one that an earlier demo took. Anything else is somebody's.
fn claim(root: &Path) -> Result<(), ExpectedError> {
    let marker = root.join(MARKER);
    let mut entries = std::fs::read_dir(root).map_err(|e| ExpectedError::reading(root, &e))?;
    if !marker.exists() && entries.next().is_some() {
        return Err(ExpectedError::CannotWrite(format!(
            "{} is not empty and no demo made it\n  hint: name a directory that is new or empty",
            root.display()
        )));
    }
    std::fs::write(&marker, "made by `spotq demo --keep`; the next one may overwrite what it left here\n")
        .map_err(|e| ExpectedError::writing(&marker, &e))
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
            signal: Some(spotq_model::Signal::Usr1),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_with_somebodys_files_is_not_touched() {
        let dir = tempfile::tempdir().unwrap();
        let precious = dir.path().join("data/train.csv");
        std::fs::create_dir_all(dir.path().join("data")).unwrap();
        std::fs::write(&precious, "1").unwrap();
        let refused = Place::new(Some(dir.path())).unwrap_err();
        assert!(refused.to_string().contains("not empty"), "{refused}");
        assert!(precious.exists());
    }

    #[test]
    fn a_directory_of_an_earlier_demo_is_used_again_without_what_it_left() {
        let dir = tempfile::tempdir().unwrap();
        let keep = dir.path().join("keep");
        drop(Place::new(Some(&keep)).unwrap());
        std::fs::write(keep.join("events.jsonl"), "old").unwrap();
        let place = Place::new(Some(&keep)).unwrap();
        assert!(!place.root.join("events.jsonl").exists() && place.data.exists());
        for dir in [&place.root, &place.data, &place.uninterrupted] {
            use std::os::unix::fs::PermissionsExt as _;
            assert_eq!(std::fs::metadata(dir).unwrap().permissions().mode() & 0o777, 0o700, "{dir:?}");
        }
    }
}
