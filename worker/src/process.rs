//! Starts the unmodified command and tells how it ended.
//!
//! Never interprets the command's text, and never leaves a process behind that `tree` cannot find.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use spotq_model::Command;
use spotq_proto::v1::LogStream;
use tokio::task::JoinHandle;

use crate::WORKER_ARGV0;
use crate::cgroup;
use crate::ids::now;
use crate::logs::LogWriter;
use crate::shim::ShimArgs;
use crate::supervise::End;
use crate::tree::{self, Tree};

/// The kernel takes no single argument above 128 KiB; a longer shell text goes through a file.
const SHELL_TEXT_MAX: usize = 100 * 1024;
/// After the tree is gone its pipes end by themselves; this bounds the wait should one be held elsewhere.
const PUMP_LIMIT: Duration = Duration::from_secs(1);
/// Longest launch error that is passed on.
const STATUS_MAX: usize = 4096;

/// What is needed to start one process of an attempt.
#[derive(Debug)]
pub struct Launch<'a> {
    /// This program, which becomes the command.
    pub exe: &'a Path,
    pub command: Vec<OsString>,
    pub cwd: &'a Path,
    pub env: &'a BTreeMap<OsString, OsString>,
    pub status: &'a Path,
    pub mark: &'a str,
    pub no_cgroups: bool,
    pub log: &'a LogWriter,
}

/// A started process.
#[derive(Debug)]
pub struct Process {
    pub pid: u32,
    pub tree: Tree,
    child: tokio::process::Child,
    status: PathBuf,
    memory_files: Vec<PathBuf>,
    memory_kills: u64,
}

/// Copies the output of a process; ends when nobody holds the other ends any more.
#[derive(Debug, Default)]
pub struct Pumps(Vec<JoinHandle<()>>);

/// How a process ended, or why it never began.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    End(End),
    NotStarted { message: String },
}

/// The arguments that run `command`; writes a script file if one is needed.
///
/// # Errors
/// The script cannot be written; the message names the disk.
pub fn arguments(command: &Command, script: &Path) -> Result<Vec<OsString>, String> {
    match command {
        Command::Shell { text } => shell(text, script),
        Command::Argv { argv } => Ok(argv.iter().map(OsString::from).collect()),
        Command::Script { text, args } => {
            write_script(script, text)?;
            let mut out: Vec<OsString> =
                if text.starts_with("#!") { Vec::new() } else { vec![shell_name().into()] };
            out.push(script.into());
            out.extend(args.iter().map(OsString::from));
            Ok(out)
        }
    }
}

/// The arguments that run shell text.
///
/// # Errors
/// As [`arguments`].
pub fn shell(text: &str, script: &Path) -> Result<Vec<OsString>, String> {
    if text.len() <= SHELL_TEXT_MAX {
        return Ok(vec![shell_name().into(), "-c".into(), text.into()]);
    }
    write_script(script, text)?;
    Ok(vec![shell_name().into(), script.into()])
}

/// Starts the process with its output going to the log.
///
/// # Errors
/// What a person can act on, such as a working directory that does not exist.
pub fn start(launch: &Launch<'_>) -> Result<(Process, Pumps), String> {
    if launch.command.is_empty() {
        return Err("the command is empty; give a program to run".to_owned());
    }
    if !launch.cwd.is_dir() {
        return Err(format!(
            "working directory {} does not exist on the node; create it in `setup:` or drop `workdir:`",
            launch.cwd.display()
        ));
    }
    let _ = fs::remove_file(launch.status);
    let cgroups = if launch.no_cgroups { Vec::new() } else { cgroup::make(launch.mark) };
    let memory_files = cgroup::memory_files(&cgroups);
    let memory_kills = cgroup::kills_for_memory(&memory_files);
    let shim = ShimArgs {
        cgroups: cgroups.clone(),
        parent: std::process::id(),
        status: launch.status.to_owned(),
        command: launch.command.clone(),
    };
    let mut child = tokio::process::Command::new(launch.exe)
        .arg0(WORKER_ARGV0)
        .args(shim.to_args())
        .env_clear()
        .envs(launch.env)
        .current_dir(launch.cwd)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| explain_spawn(&launch.command[0], &error))?;
    let pid = child.id().unwrap_or(0);
    tree::keep_for_waiter(pid, launch.mark);
    let mut pumps = Vec::new();
    if let Some(out) = child.stdout.take() {
        pumps.push(tokio::spawn(launch.log.clone().pump(LogStream::Stdout, out)));
    }
    if let Some(err) = child.stderr.take() {
        pumps.push(tokio::spawn(launch.log.clone().pump(LogStream::Stderr, err)));
    }
    let tree = Tree { mark: launch.mark.to_owned(), launcher: Some(pid), cgroups };
    let status = launch.status.to_owned();
    Ok((Process { pid, tree, child, status, memory_files, memory_kills }, Pumps(pumps)))
}

impl Process {
    /// Waits for the end of the process that was started; others of its tree may still run.
    pub async fn wait(mut self) -> Ended {
        let status = self.child.wait().await;
        tree::was_collected(self.pid);
        if let Ok(message) = fs::read_to_string(&self.status)
            && !message.is_empty()
        {
            return Ended::NotStarted { message: message.chars().take(STATUS_MAX).collect() };
        }
        let (code, signal) = status.map_or((None, None), |status| (status.code(), status.signal()));
        let killed = signal == Some(9) || code == Some(128 + 9);
        let more_kills = cgroup::kills_for_memory(&self.memory_files) > self.memory_kills;
        Ended::End(End { code, signal, out_of_memory: killed && more_kills, at: now() })
    }
}

impl Pumps {
    /// Waits until all output is in the log, at most for a moment.
    pub async fn drain(self) {
        for mut pump in self.0 {
            if tokio::time::timeout(PUMP_LIMIT, &mut pump).await.is_err() {
                pump.abort();
            }
        }
    }
}

fn shell_name() -> &'static str {
    const BASHES: [&str; 3] = ["/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash"];
    BASHES.into_iter().find(|path| Path::new(path).exists()).unwrap_or("/bin/sh")
}

fn write_script(path: &Path, text: &str) -> Result<(), String> {
    let write = || -> io::Result<()> {
        let mut file =
            fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o700).open(path)?;
        io::Write::write_all(&mut file, text.as_bytes())?;
        file.set_permissions(fs::Permissions::from_mode(0o700))
    };
    write()
        .map_err(|error| format!("cannot write the script to the node's disk at {}: {error}", path.display()))
}

fn explain_spawn(program: &std::ffi::OsStr, error: &io::Error) -> String {
    let name = Path::new(program).display();
    if error.kind() == io::ErrorKind::ArgumentListTooLong {
        return format!(
            "cannot run `{name}`: arguments and environment are too large for the system; one variable may hold 128 KB, all together about 2 MB"
        );
    }
    if error.kind() == io::ErrorKind::InvalidInput {
        return format!("cannot run `{name}`: its arguments or environment contain a zero byte");
    }
    format!("cannot start `{name}`: {error}")
}
