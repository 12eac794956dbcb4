//! The processes of the cloud: the server, its detachment from whoever starts it, and the shim of the nodes.
//!
//! All three are one program under the name `CLOUD_ARGV0`. The server must outlive the process that started it,
//! and must never leave a process of a node behind when it ends in order.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::{Args, Parser, Subcommand};
use rustix::process::{WaitOptions, getpid, set_child_subreaper, setsid, wait};
use tokio::signal::unix::{SignalKind, signal};
use uuid::Uuid;

use crate::cloud::Cloud;
use crate::control::{self, ControlFile};
use crate::tree::{NODE_VARIABLE, ProcessId};
use crate::{CloudConfig, LocalError, metadata};

/// Name under which a program runs as the simulated cloud.
pub const CLOUD_ARGV0: &str = "spotq-localcloud";
/// Name under which a program runs as the worker of a node.
pub const WORKER_ARGV0: &str = "spotq-worker";

/// File in the cloud's directory that says where it listens.
pub(crate) const CONTROL_FILE: &str = "control.json";
/// File in the cloud's directory that its log goes to when a client starts it.
pub(crate) const LOG_FILE: &str = "cloud.log";
const LOCK_FILE: &str = "lock";

/// How long a new server waits for an old one in the same directory to end.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);
const LOCK_POLL: Duration = Duration::from_millis(20);
/// How often the server looks whether anyone still needs it.
const IDLE_CHECK: Duration = Duration::from_secs(1);
/// How long the last answers may take once everything is ended.
const LAST_ANSWERS: Duration = Duration::from_secs(2);

/// Command line of the simulated cloud.
#[derive(Debug, Parser)]
#[command(name = CLOUD_ARGV0, about = "A simulated cloud on one machine", version)]
pub struct CloudArgs {
    #[command(subcommand)]
    pub command: CloudCommand,
}

#[derive(Debug, Subcommand)]
pub enum CloudCommand {
    /// Run the cloud.
    Serve(ServeArgs),
    /// Enter a cgroup and a new session, then become another program.
    #[command(hide = true)]
    ExecIn(ExecInArgs),
}

#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Directory of the cloud; it holds one cloud at a time.
    #[arg(long)]
    pub dir: PathBuf,
    /// Seed of the market.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Settings, in JSON.
    #[arg(long)]
    pub config: Option<PathBuf>,
    /// Program of the nodes, run under the name `spotq-worker` [default: this program].
    #[arg(long)]
    pub worker: Option<PathBuf>,
    /// Leave the caller: run in a session of its own and return at once.
    #[arg(long)]
    pub detach: bool,
}

#[derive(Debug, Args)]
pub struct ExecInArgs {
    #[arg(long)]
    pub cgroup: Option<PathBuf>,
    /// Name that the program is given.
    #[arg(long)]
    pub arg0: String,
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub program: Vec<std::ffi::OsString>,
}

/// Runs as the simulated cloud, or as one of its helpers, until it ends.
///
/// # Errors
/// What is wrong with the directory, the settings or the machine.
pub fn cloud_main(args: CloudArgs) -> anyhow::Result<()> {
    match args.command {
        CloudCommand::Serve(args) if args.detach => detach(&args),
        CloudCommand::Serve(args) => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.context("could not start the local cloud's runtime")?.block_on(serve(&args))
        }
        CloudCommand::ExecIn(args) => exec_in(&args),
    }
}

/// Starts the server as a grandchild, so that it is nobody's child and no terminal's.
fn detach(args: &ServeArgs) -> anyhow::Result<()> {
    // Fails only if we lead a session already, which is just as good.
    let _ = setsid();
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0(CLOUD_ARGV0)
        .arg("serve")
        .arg("--dir")
        .arg(&args.dir)
        .args(["--seed", &args.seed.to_string()]);
    if let Some(config) = &args.config {
        command.arg("--config").arg(config);
    }
    if let Some(worker) = &args.worker {
        command.arg("--worker").arg(worker);
    }
    // The cloud is no process of a node, even if a node's process starts it.
    command.env_remove(NODE_VARIABLE).env_remove("SPOTQ_JOIN_SECRET").stdin(Stdio::null());
    command.spawn().context("could not start the local cloud")?;
    Ok(())
}

fn exec_in(args: &ExecInArgs) -> anyhow::Result<()> {
    if let Some(cgroup) = &args.cgroup {
        // 0 names the writer. Without the cgroup the node is still found by its environment.
        if let Err(error) = fs::write(cgroup.join("cgroup.procs"), "0") {
            tracing::warn!(%error, cgroup = %cgroup.display(), "could not enter the cgroup");
        }
    }
    // Fails only if we lead a session already, which is just as good.
    let _ = setsid();
    let Some((program, rest)) = args.program.split_first() else { bail!("exec-in: no program given") };
    let error = Command::new(program).arg0(&args.arg0).args(rest).exec();
    Err(error).with_context(|| format!("could not run {}", Path::new(program).display()))
}

async fn serve(args: &ServeArgs) -> anyhow::Result<()> {
    start_log();
    let dir = &args.dir;
    fs::create_dir_all(dir).map_err(LocalError::io("create", dir))?;
    let dir = &dir.canonicalize().map_err(LocalError::io("find", dir))?;
    let _lock = lock(dir).await?;
    let config = args.config.as_deref().map_or(Ok(CloudConfig::default()), CloudConfig::read)?;
    let this_program = || std::env::current_exe().context("could not find this program's own file");
    let worker = match config.worker.clone().or_else(|| args.worker.clone()) {
        Some(worker) => worker,
        None => this_program()?,
    };
    set_child_subreaper(Some(getpid())).context("could not become the parent of orphans")?;
    tokio::spawn(reap());

    let cloud = Cloud::open(dir, args.seed, &config, worker)?;
    let listener = metadata::bind(0)?;
    let url = format!("http://{}", listener.local_addr().context("could not read the own address")?);
    let token = Uuid::new_v4().simple().to_string();
    listener.set_nonblocking(true).context("could not set up the own socket")?;
    let listener = tokio::net::TcpListener::from_std(listener).context("could not set up the own socket")?;
    let control = dir.join(CONTROL_FILE);
    write_control(&control, &ControlFile { pid: std::process::id(), url: url.clone(), token: token.clone() })
        .map_err(LocalError::io("write", &control))?;
    tracing::info!(%url, seed = args.seed, dir = %dir.display(), "local cloud is up");

    let stop = {
        let cloud = cloud.clone();
        async move { cloud.closed().await }
    };
    let server = axum::serve(listener, control::router(cloud.clone(), &token)).with_graceful_shutdown(stop);
    let server = tokio::spawn(async move { server.await });
    close_when_unwanted(&cloud, Duration::from_millis(config.idle_exit_ms)).await?;
    // From here on a starter waits for the lock instead of taking this cloud for one that stays.
    fs::remove_file(&control).map_err(LocalError::io("remove", &control))?;
    // Callers that do not let go are cut off.
    let _ = tokio::time::timeout(LAST_ANSWERS, server).await;
    tracing::info!("local cloud ends");
    Ok(())
}

/// Returns when the cloud was closed by a caller, by a signal, or because nobody needs it.
async fn close_when_unwanted(cloud: &Arc<Cloud>, idle_exit: Duration) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("could not watch for signals")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("could not watch for signals")?;
    loop {
        tokio::select! {
            () = cloud.closed() => return Ok(()),
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            () = tokio::time::sleep(IDLE_CHECK.min(idle_exit)) => {
                if cloud.idle_for().is_some_and(|idle| idle >= idle_exit) {
                    tracing::info!("no node and no caller for a while");
                    break;
                }
            }
        }
    }
    cloud.close().await;
    Ok(())
}

/// Collects every child that ends, also orphans of nodes that became ours, so that none stays a zombie.
async fn reap() {
    let Ok(mut ended) = signal(SignalKind::child()) else {
        tracing::error!("cannot watch for children; dead processes of nodes will stay in the process table");
        return;
    };
    loop {
        // Signals are merged, so everything that can be collected is, each time.
        while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
        if ended.recv().await.is_none() {
            return;
        }
    }
}

/// The lock says that a cloud is running in the directory; the kernel drops it when the process ends.
async fn lock(dir: &Path) -> Result<fs::File, LocalError> {
    let path = dir.join(LOCK_FILE);
    let open = fs::File::options().create(true).truncate(false).write(true).open(&path);
    let file = open.map_err(LocalError::io("open", &path))?;
    let started = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            // One that listens will stay; one that does not is starting or ending.
            Err(fs::TryLockError::WouldBlock) if started.elapsed() < LOCK_PATIENCE && !is_listening(dir) => {
                tokio::time::sleep(LOCK_POLL).await;
            }
            Err(fs::TryLockError::WouldBlock) => return Err(LocalError::DirInUse { dir: dir.into() }),
            Err(fs::TryLockError::Error(error)) => return Err(LocalError::io("lock", &path)(error)),
        }
    }
}

/// Whether the cloud that `control.json` names is alive; after a kill the file is left behind.
fn is_listening(dir: &Path) -> bool {
    let control = fs::read(dir.join(CONTROL_FILE)).ok();
    let control = control.and_then(|bytes| serde_json::from_slice::<ControlFile>(&bytes).ok());
    let pid = control.and_then(|control| i32::try_from(control.pid).ok());
    pid.is_some_and(|pid| ProcessId::look_up(pid).is_some())
}

/// Whole or not at all, and never readable by others, because it holds the token.
fn write_control(path: &Path, control: &ControlFile) -> io::Result<()> {
    let temporary = path.with_extension("tmp");
    // A leftover might have other rights.
    drop(fs::remove_file(&temporary));
    let mut file = fs::File::options().create_new(true).write(true).mode(0o600).open(&temporary)?;
    file.write_all(&serde_json::to_vec(control)?)?;
    fs::rename(&temporary, path)
}

fn start_log() {
    let log = tracing_subscriber::fmt().with_writer(io::stderr).with_ansi(false);
    // Fails only if the program has set up its own log, which then is used.
    let _ = log.with_max_level(tracing::Level::INFO).try_init();
}
