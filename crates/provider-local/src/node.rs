//! The life of one node: boot, run, end.
//!
//! A node ends because the market takes it, because it was asked to, because its time-to-live is over, or
//! because its worker ended. Whatever the cause, all its processes and its disk are gone before it says `Gone`.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use spotq_model::{InstanceId, Timestamp};
use spotq_provider::{GoneCause, InstanceState};

use crate::cloud::{Cloud, Handle, now};
use crate::control::LaunchBody;
use crate::metadata::Notice;
use crate::process::{CLOUD_ARGV0, WORKER_ARGV0};
use crate::record::NodeRecord;
use crate::tree::{NODE_VARIABLE, ProcessId, Watched, kill_tree};

/// Upper bound on one sleep: after it the clock is read again, in case it was set.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);

/// What a pipe takes without a reader, so that a worker that reads nothing holds nobody up.
const PIPE_BYTES: usize = 60 * 1024;

/// What a machine's environment has by itself, and the search paths of programs and libraries.
const MACHINE_VARIABLES: [&str; 14] = [
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LANGUAGE",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "RUST_BACKTRACE",
    "RUST_LOG",
];

/// How a task comes to its node.
#[derive(Debug)]
pub enum Start {
    /// A launch: the worker starts after `wait`.
    Boot { body: Box<LaunchBody>, wait: Duration },
    /// Left by an earlier process of the cloud; the worker is `None` if it is dead or was never started.
    TakenOver { worker: Option<Watched> },
}

/// Runs a node to its end.
pub async fn live(cloud: Arc<Cloud>, instance: InstanceId, start: Start) {
    let Some(mut handle) = cloud.handle(&instance) else { return };
    let worker = match start {
        Start::Boot { body, wait } => boot(&cloud, &mut handle, &body, wait).await,
        Start::TakenOver { worker } => worker,
    };
    let cause = match &worker {
        Some(worker) => run(&cloud, &mut handle, worker).await,
        None => cloud.handle(&instance).map_or(GoneCause::Crashed, |h| cause_of_death(&h.record, now())),
    };
    end(&cloud, &handle, worker, cause).await;
}

/// Waits for the boot and starts the worker; `None` if the node ended first or the worker did not start.
async fn boot(cloud: &Cloud, handle: &mut Handle, body: &LaunchBody, wait: Duration) -> Option<Watched> {
    let instance = handle.record.seen.instance.clone();
    let boot = tokio::time::sleep(wait);
    tokio::pin!(boot);
    loop {
        let record = cloud.handle(&instance)?.record;
        if due_cause(&record, now()).is_some() {
            return None;
        }
        tokio::select! {
            () = &mut boot => break,
            _ = handle.nudge.changed() => {}
            () = tokio::time::sleep(until(next_event(&record))) => {}
        }
    }
    let cgroup = cloud.cgroups.make(&instance.0);
    let record = cloud.handle(&instance)?.record;
    let pid = match start_worker(cloud, &record, body, cgroup.as_deref()) {
        Ok(pid) => pid,
        Err(error) => {
            tracing::error!(%error, %instance, program = %cloud.worker.display(), "the worker could not be started");
            return None;
        }
    };
    let process = ProcessId::look_up(pid);
    let running_since = now();
    let fate = cloud.fate(&record);
    cloud.change(&instance, |record| {
        record.cgroup = cgroup;
        record.process = process;
        record.seen.state = InstanceState::Running;
        // A drill that came during the boot stands.
        record.notice = record.notice.or_else(|| {
            let fate = fate?;
            let told_at = running_since + fate.lifetime.saturating_sub(fate.notice);
            Some(Notice { told_at, deadline: told_at + fate.notice })
        });
    });
    // A worker that is dead already leaves nothing to watch; that is a crash.
    process.and_then(Watched::open)
}

/// Watches a running node until something ends it.
async fn run(cloud: &Cloud, handle: &mut Handle, worker: &Watched) -> GoneCause {
    let instance = handle.record.seen.instance.clone();
    loop {
        let Some(record) = cloud.handle(&instance).map(|h| h.record) else { return GoneCause::Crashed };
        let moment = now();
        if let Some(cause) = due_cause(&record, moment) {
            return cause;
        }
        if let Some(notice) = record.notice.filter(|n| n.told_at <= moment) {
            handle.service.announce(notice);
        }
        tokio::select! {
            () = worker.ended() => return cause_of_death(&record, now()),
            _ = handle.nudge.changed() => {}
            () = handle.service.acknowledged() => {
                // The node said that it need not be waited for.
                cloud.change(&instance, |record| {
                    record.notice = record.notice.map(|n| Notice { deadline: n.deadline.min(now()), ..n });
                });
            }
            () = tokio::time::sleep(until(next_event(&record))) => {}
        }
    }
}

async fn end(cloud: &Cloud, handle: &Handle, worker: Option<Watched>, cause: GoneCause) {
    let instance = &handle.record.seen.instance;
    cloud.change(instance, |record| {
        record.ending = Some(cause);
        record.seen.state = InstanceState::Ending;
    });
    let asks_first = match cause {
        GoneCause::Terminated | GoneCause::Expired => true,
        GoneCause::Preempted | GoneCause::Crashed => false,
    };
    if let Some(worker) = worker.filter(|_| asks_first) {
        worker.terminate();
        // Past the grace everything is killed, whether the worker has ended or not.
        let _ = tokio::time::timeout(cloud.terminate_grace, worker.ended()).await;
    }
    let cgroup = cloud.handle(instance).and_then(|h| h.record.cgroup);
    let left = kill_tree(&instance.0, cgroup.as_deref()).await;
    if left > 0 {
        tracing::error!(%instance, left, "processes of the node cannot be killed; they are stuck in the kernel");
    }
    cloud.dirs.wipe_disk(instance);
    cloud.change(instance, |record| record.seen.state = InstanceState::Gone { cause, at: now() });
}

/// What ends the node at this moment, its worker's death aside.
fn due_cause(record: &NodeRecord, moment: Timestamp) -> Option<GoneCause> {
    if let Some(cause) = record.ending {
        return Some(cause);
    }
    if record.notice.is_some_and(|n| n.deadline <= moment) {
        return Some(GoneCause::Preempted);
    }
    (record.expires_at <= moment).then_some(GoneCause::Expired)
}

/// Why a worker that is dead has died. Under a notice it is the market's doing, however early the worker left.
fn cause_of_death(record: &NodeRecord, moment: Timestamp) -> GoneCause {
    let noticed = record.notice.is_some_and(|n| n.told_at <= moment);
    due_cause(record, moment).unwrap_or(if noticed { GoneCause::Preempted } else { GoneCause::Crashed })
}

/// The next moment at which the record alone asks for something.
fn next_event(record: &NodeRecord) -> Timestamp {
    let moment = now();
    let notice = record.notice.map(|n| if n.told_at > moment { n.told_at } else { n.deadline });
    notice.map_or(record.expires_at, |at| at.min(record.expires_at))
}

fn until(at: Timestamp) -> Duration {
    at.since(now()).as_duration().min(LONGEST_SLEEP)
}

/// Whether a variable of the cloud's own environment is one that a machine has. A node has nothing else from the
/// process that started the cloud, above all no credentials of the scheduler.
fn is_of_the_machine(name: &OsStr) -> bool {
    name.to_str().is_some_and(|name| MACHINE_VARIABLES.contains(&name) || name.starts_with("LC_"))
}

/// Starts the worker by way of our own program, which enters the cgroup and a new session first.
fn start_worker(
    cloud: &Cloud,
    record: &NodeRecord,
    body: &LaunchBody,
    cgroup: Option<&Path>,
) -> io::Result<i32> {
    let instance = &record.seen.instance;
    let disk = cloud.dirs.disk(instance);
    fs::create_dir_all(&disk)?;
    let log = fs::File::create(cloud.dirs.of(instance).join("worker.log"))?;
    // This program, even if its file was replaced since it started.
    let mut command = Command::new("/proc/self/exe");
    command.arg0(CLOUD_ARGV0).arg("exec-in").args(["--arg0", WORKER_ARGV0]);
    if let Some(cgroup) = cgroup {
        command.arg("--cgroup").arg(cgroup);
    }
    command
        .arg("--")
        .arg(&cloud.worker)
        .args(["--server", &body.server])
        .args(["--node", &body.node.to_string()])
        .args(["--instance", &instance.0])
        .arg("--dir")
        .arg(&disk)
        .args(["--cloud", record.seen.pool.cloud.as_str()])
        .args(["--metadata", &format!("http://127.0.0.1:{}", record.metadata_port)])
        .env_clear()
        .envs(std::env::vars_os().filter(|(name, _)| is_of_the_machine(name)))
        // A job of the same user can read its worker's environment, so the secrets go through a pipe.
        .args(["--bootstrap", "-"])
        .env(NODE_VARIABLE, &instance.0)
        .current_dir(&disk)
        .stdin(Stdio::piped())
        .stdout(log.try_clone()?)
        .stderr(log);
    let bootstrap = serde_json::json!({ "join_secret": body.join_secret, "env": body.env }).to_string();
    if bootstrap.len() > PIPE_BYTES {
        return Err(io::Error::other("the worker's variables are too long; shorten them"));
    }
    let mut child = command.spawn()?;
    if let Some(mut pipe) = child.stdin.take() {
        // A worker that is dead already is found to be so.
        let _ = pipe.write_all(bootstrap.as_bytes());
    }
    // Dropped without waiting: the process's reaper collects every child, also those that are not ours by birth.
    i32::try_from(child.id()).map_err(io::Error::other)
}
