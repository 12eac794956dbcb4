//! From a file, a script or a command, and flags, to job specs as the scheduler gets them.
//!
//! The rules are `spotq_model::jobfile`'s alone, those of flags too. Nothing here talks to the scheduler.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use prost::Message as _;
use spotq_model::jobfile::{self, Context, FILE_BYTES_MAX};
use spotq_model::{Command, JobSpec};
use spotq_proto::{MESSAGE_BYTES_MAX, v1};

use crate::args::{Overrides, SubmitArgs};
use crate::error::ExpectedError;
use crate::words;

/// Jobs and what there is to say about them.
#[derive(Debug, Clone, PartialEq)]
pub struct Understood {
    pub jobs: Vec<JobSpec>,
    pub warnings: Vec<String>,
}

/// What surrounds the command line, so that tests need not change it.
#[derive(Debug, Clone)]
pub struct Around {
    pub user: String,
    pub dir: PathBuf,
    pub home: Option<String>,
}

/// Room in a message for what is not the spec.
const ENVELOPE_BYTES: usize = 4096;
/// Jobs of one file; a file with more was made by a program, which can make several.
const JOBS_MAX: usize = 1000;

impl Around {
    /// Of this process.
    pub fn of_process() -> Result<Self, ExpectedError> {
        let dir = std::env::current_dir().map_err(|e| {
            ExpectedError::NotFound(format!(
                "cannot tell the current directory: {}\n  hint: it may have been deleted; change to another",
                e.to_string().to_lowercase()
            ))
        })?;
        let name = |var: &str| std::env::var(var).ok().filter(|name| !name.is_empty());
        let user = name("USER").or_else(|| name("LOGNAME"));
        let user = user.unwrap_or_else(|| format!("uid-{}", rustix::process::getuid().as_raw()));
        Ok(Around { user, dir, home: std::env::var("HOME").ok() })
    }
}

/// Reads what the arguments name and applies the flags.
pub fn understand(args: &SubmitArgs, around: &Around) -> Result<Understood, ExpectedError> {
    let ctx = Context { user: around.user.clone(), now: words::now() };
    let options = options(&args.change)?;
    let parsed = match &args.file {
        Some(path) => {
            let name = path.to_string_lossy();
            jobfile::load_with(&read(path)?, &name, &args.command, &options, &ctx)?
        }
        None if args.command.is_empty() => {
            return Err(ExpectedError::Usage(
                "nothing to submit\n  hint: name a job file or script, or write a command after `--`, as in `spotq \
                 run -- python train.py`"
                    .into(),
            ));
        }
        None => jobfile::from_command_with(&args.command, &options, &ctx)?,
    };
    if parsed.jobs.len() > JOBS_MAX {
        return Err(ExpectedError::BadInput(format!(
            "the file holds {} jobs, more than the limit of {JOBS_MAX}\n  hint: submit it in parts",
            parsed.jobs.len()
        )));
    }
    let warnings = parsed.warnings.iter().map(ToString::to_string).collect();
    let mut jobs = parsed.jobs;
    for job in &mut jobs {
        job.workdir = workdir(job, around);
        check_size(job)?;
    }
    Ok(Understood { jobs, warnings })
}

/// The key of the job at `index`: one key must not make one job of several.
#[must_use]
pub fn client_key(base: &str, index: usize) -> String {
    if index == 0 { base.to_owned() } else { format!("{base}-{index}") }
}

fn read(path: &Path) -> Result<Vec<u8>, ExpectedError> {
    // One byte more than is taken, so that a file that is too long is seen to be.
    let max = FILE_BYTES_MAX as u64 + 1;
    let mut bytes = Vec::new();
    let result = if path == Path::new("-") {
        std::io::stdin().lock().take(max).read_to_end(&mut bytes)
    } else {
        std::fs::File::open(path).and_then(|file| file.take(max).read_to_end(&mut bytes))
    };
    result.map_err(|e| ExpectedError::reading(path, &e))?;
    Ok(bytes)
}

/// The flags in the form that `jobfile` takes them in: `--name=value`, by the names of its keys.
fn options(flags: &Overrides) -> Result<Vec<String>, ExpectedError> {
    let number = |n: Option<u32>| n.map(|n| n.to_string());
    let one: [(&str, Option<String>); 20] = [
        ("name", flags.name.clone()),
        ("gpus", flags.gpus.clone()),
        ("cpus", flags.cpus.clone()),
        ("memory", flags.memory.clone()),
        ("cloud", flags.cloud.clone()),
        ("region", flags.region.clone()),
        ("zone", flags.zone.clone()),
        ("instance-type", flags.instance_type.clone()),
        ("policy", flags.policy.clone()),
        ("max-hourly-cost", flags.max_hourly_cost.clone()),
        ("budget", flags.budget.clone()),
        ("time-limit", flags.time_limit.clone()),
        ("checkpoint-dir", flags.checkpoint_dir.clone()),
        ("checkpoint-signal", flags.save_signal.clone()),
        ("checkpoint-profile", flags.checkpoint_profile.clone()),
        ("checkpoint-grace", flags.grace.clone()),
        ("retry-preemptions", number(flags.retry_preemptions)),
        ("retry-failures", number(flags.retry_failures)),
        ("priority", flags.priority.map(|n| n.to_string())),
        ("workdir", flags.workdir.clone()),
    ];
    let mut options: Vec<String> =
        one.into_iter().filter_map(|(name, value)| Some(format!("--{name}={}", value?))).collect();
    options.extend(flags.project.iter().map(|project| format!("--project={project}")));
    for pair in &flags.env {
        options.push(format!("--env={}", env_pair(pair)?));
    }
    options.extend(flags.tag.iter().map(|tag| format!("--tag={tag}")));
    options.extend(flags.outputs.iter().map(|glob| format!("--outputs={glob}")));
    if flags.hold {
        options.push("--hold".into());
    }
    Ok(options)
}

/// `NAME=VALUE`; a bare `NAME` takes the value that this process has.
fn env_pair(pair: &str) -> Result<String, ExpectedError> {
    if pair.contains('=') {
        return Ok(pair.to_owned());
    }
    match std::env::var(pair) {
        Ok(value) => Ok(format!("{pair}={value}")),
        Err(_) => Err(ExpectedError::BadInput(format!(
            "--env {0}: this shell has no variable `{0}` that is text\n  hint: write --env {0}=VALUE",
            crate::out::short(pair, 80)
        ))),
    }
}

/// Where the command starts. A command or script belongs to the directory that it was submitted from; a job file
/// says so, relative to this directory.
fn workdir(job: &JobSpec, around: &Around) -> Option<String> {
    let named = match (&job.workdir, &job.command) {
        (Some(dir), _) => dir.clone(),
        (None, Command::Shell { .. }) => return None,
        (None, Command::Argv { .. } | Command::Script { .. }) => String::new(),
    };
    let expanded = match (named.strip_prefix('~'), &around.home) {
        (Some(rest), Some(home)) if rest.is_empty() || rest.starts_with('/') => format!("{home}{rest}"),
        _ => named,
    };
    // An absolute path replaces the base; `.` components are dropped, so that two spellings look the same.
    let joined: PathBuf = around.dir.join(expanded).components().collect();
    Some(joined.to_string_lossy().into_owned())
}

fn check_size(job: &JobSpec) -> Result<(), ExpectedError> {
    let bytes = v1::JobSpec::from(job).encoded_len();
    if bytes + ENVELOPE_BYTES <= MESSAGE_BYTES_MAX {
        return Ok(());
    }
    Err(ExpectedError::BadInput(format!(
        "the job takes {} as a message, more than the limit of {}\n  hint: pass large data as a file",
        words::bytes(bytes as u64),
        words::bytes(MESSAGE_BYTES_MAX as u64)
    )))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use spotq_model::{Cloud, PlacementPolicy, Profile, Signal, Span, Usd};

    use super::*;
    use crate::args::{Cli, Command as Cmd};

    fn around(dir: &Path) -> Around {
        Around { user: "ada".into(), dir: dir.into(), home: Some("/h/ada".into()) }
    }

    fn submit(dir: &Path, words: &[&str]) -> Result<Understood, ExpectedError> {
        let cli = Cli::try_parse_from(["spotq", "submit"].iter().chain(words)).unwrap();
        let Cmd::Submit(mut args) = cli.command else { panic!("not submit") };
        args.file = args.file.map(|file| dir.join(file));
        understand(&args, &around(dir))
    }

    fn refused(words: &[&str]) -> String {
        let error = submit(Path::new("/w"), words).unwrap_err();
        assert_eq!(error.exit_code(), 64, "{error}");
        error.to_string()
    }

    #[test]
    fn a_command_starts_where_it_was_submitted() {
        let got = submit(Path::new("/w/x"), &["--", "python", "train.py", "--lr", "3"]).unwrap();
        assert_eq!(got.jobs.len(), 1);
        assert_eq!(got.jobs[0].workdir.as_deref(), Some("/w/x"));
        assert_eq!(got.jobs[0].user, "ada");
        let argv = ["python", "train.py", "--lr", "3"].map(String::from).to_vec();
        assert_eq!(got.jobs[0].command, Command::Argv { argv });
    }

    #[test]
    fn every_flag_reaches_the_spec() {
        let line = "--name big --gpus A100-80GB:8 --cpus 4 --memory 16 --cloud gcp --region us-central1 --zone \
                    us-central1-a --policy spot-only --max-hourly-cost 2.5 --budget 25 --time-limit 2h -e A=1 --env \
                    B=x=y --checkpoint-dir ckpt --save-signal USR1 --checkpoint-profile rename --grace 20s \
                    --retry-preemptions 3 --retry-failures 2 --outputs *.bin --outputs log/* --priority -5 --hold \
                    --workdir sub --project p --tag team=vision -- true";
        let got = submit(Path::new("/w"), &line.split_whitespace().collect::<Vec<_>>()).unwrap();
        let job = &got.jobs[0];
        let choice = &job.resources.any_of[0];
        assert_eq!((choice.accelerator.as_deref(), choice.accelerator_count), (Some("A100-80GB"), 8));
        assert_eq!((choice.cpus_min, choice.memory_gib_min, choice.cloud), (4, 16, Some(Cloud::Gcp)));
        assert_eq!(
            (choice.region.as_deref(), choice.zone.as_deref()),
            (Some("us-central1"), Some("us-central1-a"))
        );
        assert_eq!((job.name.as_str(), job.policy), ("big", PlacementPolicy::SpotOnly));
        assert_eq!(job.resources.max_hourly.map(|p| p.0), Some(Usd(2_500_000_000)));
        assert_eq!((job.budget, job.time_limit), (Some(Usd(25_000_000_000)), Some(Span::secs(7200))));
        assert_eq!(job.env.get("B").map(String::as_str), Some("x=y"));
        let checkpoint = &job.checkpoint;
        assert_eq!((checkpoint.dir.as_deref(), checkpoint.signal), (Some("ckpt"), Some(Signal::Usr1)));
        assert_eq!((checkpoint.profile, checkpoint.grace), (Profile::Rename, Span::secs(20)));
        assert_eq!((job.retry.preemptions, job.retry.failures), (Some(3), 2));
        assert_eq!((job.outputs.len(), job.priority, job.hold), (2, -5, true));
        assert_eq!(job.workdir.as_deref(), Some("/w/sub"));
        assert_eq!((job.project.as_deref(), job.tags["team"].as_str()), (Some("p"), "vision"));
    }

    #[test]
    fn flags_win_over_the_file_and_what_is_not_given_stays() {
        let dir = tempfile::tempdir().unwrap();
        let file = "name: a\nresources: {accelerators: T4, cpus: 2+}\nenvs: {A: '1', B: '2'}\nrun: echo\nworkdir: ~/code\n";
        std::fs::write(dir.path().join("job.yaml"), file).unwrap();
        let got = submit(dir.path(), &["job.yaml", "--gpus", "L4:2", "-e", "B=3"]).unwrap();
        let job = &got.jobs[0];
        assert_eq!(job.resources.any_of[0].accelerator.as_deref(), Some("L4"));
        assert_eq!(job.resources.any_of[0].cpus_min, 2);
        assert_eq!((job.env["A"].as_str(), job.env["B"].as_str()), ("1", "3"));
        assert_eq!(job.workdir.as_deref(), Some("/h/ada/code"));
        assert_eq!(job.name, "a");
    }

    #[test]
    fn a_script_gets_its_arguments_and_this_directory() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("t.sh"), "#!/bin/sh\necho $1\n").unwrap();
        let got = submit(dir.path(), &["t.sh", "--", "one"]).unwrap();
        let Command::Script { args, .. } = &got.jobs[0].command else { panic!("not a script") };
        assert_eq!(args, &["one"]);
        assert_eq!(got.jobs[0].workdir.as_deref(), dir.path().to_str());
    }

    #[test]
    fn bad_flags_are_refused_by_the_rules_of_job_files() {
        assert!(refused(&["--save-signal", "KILL", "--", "true"]).contains("USR1"));
        assert!(refused(&["--policy", "cheap", "--", "true"]).contains("spot-first"));
        assert!(refused(&["--budget", "lots", "--", "true"]).contains("lots"));
        assert!(refused(&["--cloud", "ibm", "--", "true"]).contains("aws"));
        assert!(refused(&["--env", "SPOTQ_X=1", "--", "true"]).contains("SPOTQ_"));
        assert!(refused(&["--env", "1A=1", "--", "true"]).contains("1A"));
        assert!(refused(&["--env", "NO_SUCH_VARIABLE_HERE", "--", "true"]).contains("no variable"));
        assert!(refused(&["--tag", "team", "--", "true"]).contains("tag"));
        assert!(refused(&["--name", "two\nlines", "--", "true"]).contains("name"));
        assert!(refused(&["--name", &"n".repeat(300), "--", "true"]).contains("300"));
        assert!(refused(&["--grace", "soon", "--", "true"]).contains("command line"));
    }

    #[test]
    fn a_file_that_is_not_there_or_is_nothing_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let missing = submit(dir.path(), &["nosuch.yaml"]).unwrap_err();
        assert_eq!(missing.exit_code(), 66);
        assert!(missing.to_string().contains("nosuch.yaml"), "{missing}");
        std::fs::create_dir(dir.path().join("d")).unwrap();
        assert!(submit(dir.path(), &["d"]).unwrap_err().to_string().contains("it is a directory"));
        assert_eq!(submit(dir.path(), &[]).unwrap_err().exit_code(), 2);
        std::fs::write(dir.path().join("big.yaml"), vec![b'#'; FILE_BYTES_MAX + 10]).unwrap();
        assert!(submit(dir.path(), &["big.yaml"]).unwrap_err().to_string().contains("4 MiB"));
    }

    #[test]
    fn jobs_of_one_file_have_keys_of_their_own() {
        assert_eq!(client_key("k", 0), "k");
        assert_eq!(client_key("k", 2), "k-2");
    }
}
