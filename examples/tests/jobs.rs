//! The job files: all of them are understood without a warning, and the plain shell job resumes.

#![expect(clippy::unwrap_used, reason = "these are tests, helpers included")]

mod support;

use std::{fs, path::Path, process::Command};

use rustix::process::Signal;
use spotq_model::{
    CheckpointSpec, JobSpec, PlacementPolicy, Timestamp,
    jobfile::{Context, load},
};
use support::{Trainer, run_whole};

fn jobs(file: &Path) -> Vec<JobSpec> {
    let context = Context { user: "someone".into(), now: Timestamp(0) };
    let parsed = load(&fs::read(file).unwrap(), &file.display().to_string(), &[], &context)
        .unwrap_or_else(|error| panic!("{error}"));
    assert!(parsed.warnings.is_empty(), "{}: {:#?}", file.display(), parsed.warnings);
    parsed.jobs
}

fn job_files() -> Vec<std::path::PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("jobs");
    let mut files: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn every_job_file_is_understood_and_says_what_to_keep() {
    let files = job_files();
    assert_eq!(files.len(), 6, "{files:?}");
    for file in files {
        for job in jobs(&file) {
            assert!(!job.outputs.is_empty(), "{}", file.display());
            assert_ne!(job.checkpoint, CheckpointSpec::default(), "{}", file.display());
        }
    }
}

#[test]
fn the_script_carries_what_its_spotq_lines_say() {
    let [job] = &jobs(&Path::new(env!("CARGO_MANIFEST_DIR")).join("jobs/train.sh"))[..] else {
        panic!("one job");
    };
    assert_eq!((job.name.as_str(), job.policy), ("char-lm-script", PlacementPolicy::SpotFirst));
    assert_eq!(job.retry.failures, 1);
    assert!(job.budget.is_some() && job.time_limit.is_some() && job.checkpoint.signal.is_some());
}

#[test]
fn the_shell_job_goes_on_from_its_file_after_a_kill() {
    let [job] = &jobs(&Path::new(env!("CARGO_MANIFEST_DIR")).join("jobs/shell.yaml"))[..] else {
        panic!("one job");
    };
    let spotq_model::Command::Shell { text } = &job.command else {
        panic!("a shell command");
    };
    let dir = tempfile::tempdir().unwrap();
    let command = || {
        let mut command = Command::new("bash");
        command.args(["-c", text]).current_dir(dir.path()).envs(&job.env).env("PAUSE", "0");
        command.env("SPOTQ_CHECKPOINT_DIR", dir.path());
        command
    };
    let mut first = Trainer::start(&mut command());
    first.expect_line("step 20/");
    first.signal(Signal::KILL);
    assert!(!first.finish().0.success());
    let lines = run_whole(&mut command());
    let start: u32 = lines[0].rsplit(' ').nth(2).unwrap().parse().unwrap();
    assert!((19..200).contains(&start), "{lines:#?}");
    let squares: u32 = (1..=200).map(|i| i * i).sum();
    assert_eq!(fs::read_to_string(dir.path().join("result.txt")).unwrap().trim(), squares.to_string());
}
