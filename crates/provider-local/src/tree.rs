//! The processes of a node: finding all of them and ending all of them.
//!
//! A node's processes are those in its cgroup and those whose environment names the node. The first holds what
//! changed its environment, the second holds what runs where cgroups are not permitted; children that
//! double-forked are in both. A process is killed through a pidfd after a second look, so that a reused number
//! never kills a stranger.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use tokio::io::unix::AsyncFd;

/// In the environment of every process of a node; its value is the instance id.
pub const NODE_VARIABLE: &str = "SPOTQ_NODE";

/// Rounds of killing before we give up on a tree. Each round kills all that exist at that moment, so only a
/// process stuck in the kernel or a fork bomb that outruns us is left after a thousand.
const MAX_ROUNDS: u32 = 1000;
/// Between rounds: the time a killed process takes to leave /proc.
const ROUND_PAUSE: Duration = Duration::from_millis(5);
/// A tree counts as gone when this many rounds in a row find nothing, because a child may be forked behind the
/// back of one pass over /proc.
const CLEAN_ROUNDS: u32 = 2;

/// A process, by more than its number: numbers are used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    pub pid: i32,
    /// In clock ticks since boot, as /proc tells it.
    pub start: u64,
}

impl ProcessId {
    /// The living process of this number, if there is one.
    #[must_use]
    pub fn look_up(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name in parentheses may hold anything, also parentheses; what follows the last one is regular.
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
        let state = fields.next()?;
        let start = fields.nth(18)?.parse().ok()?;
        (state != "Z" && state != "X").then_some(ProcessId { pid, start })
    }
}

/// A hold on one process that tells when it ends.
#[derive(Debug)]
pub struct Watched(AsyncFd<OwnedFd>);

impl Watched {
    /// `None` if the process has ended.
    #[must_use]
    pub fn open(process: ProcessId) -> Option<Self> {
        let fd = pidfd_open(Pid::from_raw(process.pid)?, PidfdFlags::empty()).ok()?;
        // Looked up after the hold is taken: from here on the number cannot pass to another process unseen.
        (ProcessId::look_up(process.pid)? == process).then_some(())?;
        #[expect(deprecated, reason = "the successor is unsafe; an OwnedFd keeps its promise by its type")]
        AsyncFd::new(fd).ok().map(Watched)
    }

    /// Resolves when the process has ended.
    pub async fn ended(&self) {
        // An error means that the runtime is shutting down; then nobody waits any more.
        let _ = self.0.readable().await;
    }

    /// Asks the process to end.
    pub fn terminate(&self) {
        // It may have ended in the meantime, which is what was wanted.
        let _ = pidfd_send_signal(self.0.get_ref().as_fd(), Signal::TERM);
    }
}

/// Where cgroups of nodes are made, if this process may make any.
#[derive(Debug, Clone, Default)]
pub struct Cgroups {
    /// A directory that is ours, below our own cgroup.
    home: Option<PathBuf>,
}

impl Cgroups {
    /// Looks for a hierarchy that can kill a group as a whole: v2 with `cgroup.kill`, else the v1 freezer.
    #[must_use]
    pub fn detect(name: &str) -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let (mounts, own) = (read("/proc/self/mountinfo"), read("/proc/self/cgroup"));
        let v2 = own_directory(&mounts, &own, Hierarchy::V2).filter(|dir| dir.join("cgroup.procs").exists());
        let v1 = own_directory(&mounts, &own, Hierarchy::Freezer);
        for dir in [v2, v1].into_iter().flatten() {
            let home = dir.join(format!("spotq-{name}"));
            let made = fs::create_dir(&home).or_else(|e| if home.is_dir() { Ok(()) } else { Err(e) });
            let can_kill = home.join("cgroup.kill").exists() || home.join("freezer.state").exists();
            match made {
                Ok(()) if can_kill => return Cgroups { home: Some(home) },
                Ok(()) => drop(fs::remove_dir(&home)),
                Err(error) => tracing::debug!(%error, dir = %home.display(), "no cgroup here"),
            }
        }
        tracing::info!("cgroups are not permitted here: nodes are found by their environment alone");
        Cgroups::default()
    }

    /// The cgroup of a node, made if possible.
    #[must_use]
    pub fn make(&self, instance: &str) -> Option<PathBuf> {
        let dir = self.home.as_ref()?.join(instance);
        match fs::create_dir(&dir) {
            Ok(()) => Some(dir),
            Err(error) => {
                tracing::warn!(%error, dir = %dir.display(), "a node runs without a cgroup");
                None
            }
        }
    }

    /// The cgroup that a node has, if it has one.
    #[must_use]
    pub fn existing(&self, instance: &str) -> Option<PathBuf> {
        self.home.as_ref().map(|home| home.join(instance)).filter(|dir| dir.is_dir())
    }

    /// Removes our own directory; what is still in use stays.
    pub fn remove(&self) {
        if let Some(home) = &self.home {
            drop(fs::remove_dir(home));
        }
    }
}

/// Ends every process of a node and removes its cgroup. Answers how many were left alive: 0 but for processes
/// stuck in the kernel.
pub async fn kill_tree(instance: &str, cgroup: Option<&Path>) -> usize {
    let mut clean = 0;
    let mut left = 0;
    for _ in 0..MAX_ROUNDS {
        let (name, group) = (instance.to_owned(), cgroup.map(Path::to_path_buf));
        let round = tokio::task::spawn_blocking(move || kill_once(&name, group.as_deref())).await;
        left = round.unwrap_or(left);
        clean = if left == 0 { clean + 1 } else { 0 };
        if clean >= CLEAN_ROUNDS {
            break;
        }
        tokio::time::sleep(ROUND_PAUSE).await;
    }
    if let Some(group) = cgroup {
        remove_group(group);
    }
    left
}

/// Every living process whose environment names the node.
#[must_use]
pub fn processes_of(instance: &str) -> Vec<i32> {
    let marker = format!("{NODE_VARIABLE}={instance}");
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid| is_marked(*pid, marker.as_bytes()))
        .collect()
}

/// One round; answers how many processes it found.
fn kill_once(instance: &str, cgroup: Option<&Path>) -> usize {
    let in_group = cgroup.map_or(0, kill_group);
    let marker = format!("{NODE_VARIABLE}={instance}");
    let marked = processes_of(instance);
    for pid in &marked {
        kill_if(*pid, || is_marked(*pid, marker.as_bytes()));
    }
    in_group.max(marked.len())
}

/// Kills a cgroup as a whole, with the groups below it; answers how many processes were in it.
fn kill_group(group: &Path) -> usize {
    let members = members_below(group);
    if members.is_empty() {
        return 0;
    }
    if fs::write(group.join("cgroup.kill"), "1").is_ok() {
        return members.len();
    }
    // v1: frozen, so that nothing forks while its members are killed one by one.
    let freeze = |state: &str| drop(fs::write(group.join("freezer.state"), state));
    freeze("FROZEN");
    let members = members_below(group);
    for pid in &members {
        kill_if(*pid, || members_below(group).contains(pid));
    }
    freeze("THAWED");
    members.len()
}

fn members_below(group: &Path) -> Vec<i32> {
    let mut members: Vec<i32> = fs::read_to_string(group.join("cgroup.procs"))
        .unwrap_or_default()
        .lines()
        .filter_map(|line| line.parse().ok())
        // v1 lists the dead that nobody has waited for.
        .filter(|pid| ProcessId::look_up(*pid).is_some())
        .collect();
    for child in children(group) {
        members.extend(members_below(&child));
    }
    members
}

fn remove_group(group: &Path) {
    for child in children(group) {
        remove_group(&child);
    }
    if let Err(error) = fs::remove_dir(group)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::debug!(%error, dir = %group.display(), "a cgroup stays behind");
    }
}

fn children(group: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(group) else { return Vec::new() };
    entries.flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path()).collect()
}

fn kill_if(pid: i32, still: impl Fn() -> bool) {
    let Some(raw) = Pid::from_raw(pid) else { return };
    let Ok(fd) = pidfd_open(raw, PidfdFlags::empty()) else { return };
    if still() {
        // It may have ended in the meantime, which is what was wanted.
        let _ = pidfd_send_signal(fd.as_fd(), Signal::KILL);
    }
}

/// A zombie's environment reads as empty, so the dead are never counted.
fn is_marked(pid: i32, marker: &[u8]) -> bool {
    fs::read(format!("/proc/{pid}/environ"))
        .is_ok_and(|environment| environment.split(|byte| *byte == 0).any(|variable| variable == marker))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hierarchy {
    V2,
    Freezer,
}

/// Our own cgroup in a hierarchy, from the texts of /proc/self/mountinfo and /proc/self/cgroup.
fn own_directory(mounts: &str, own: &str, wanted: Hierarchy) -> Option<PathBuf> {
    let path = own.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let found = match wanted {
            Hierarchy::V2 => controllers.is_empty(),
            Hierarchy::Freezer => controllers.split(',').any(|c| c == "freezer"),
        };
        found.then_some(path)
    })?;
    let (root, mount) = mounts.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let mut fields = before.split(' ').skip(3);
        let (root, mount) = (fields.next()?, fields.next()?);
        let (kind, options) = (after.split(' ').next()?, after.split(' ').nth(2).unwrap_or(""));
        let found = match wanted {
            Hierarchy::V2 => kind == "cgroup2",
            Hierarchy::Freezer => kind == "cgroup" && options.split(',').any(|o| o == "freezer"),
        };
        found.then_some((root, mount))
    })?;
    // In a container the mount may show only a part of the hierarchy, which starts at `root`.
    let below = Path::new(path).strip_prefix(root).unwrap_or(Path::new(path).strip_prefix("/").ok()?);
    let dir = Path::new(mount).join(below);
    if dir.is_dir() { Some(dir) } else { Some(mount.into()).filter(|mount: &PathBuf| mount.is_dir()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    const HYBRID: &str =
        "33 32 0:28 / /tmp rw - cgroup2 cgroup2 rw\n34 32 0:29 / /proc rw - cgroup cgroup rw,freezer";

    #[test]
    fn our_own_group_is_found_in_pure_and_hybrid_hierarchies() {
        let own = "6:freezer:/\n4:memory:/x\n0::/";
        assert_eq!(own_directory(HYBRID, own, Hierarchy::V2), Some("/tmp".into()));
        assert_eq!(own_directory(HYBRID, own, Hierarchy::Freezer), Some("/proc".into()));
        assert_eq!(own_directory(HYBRID, "4:memory:/x", Hierarchy::V2), None);
        assert_eq!(own_directory("", own, Hierarchy::V2), None);
        assert_eq!(own_directory("garbage\n - \n1 2 - cgroup2", own, Hierarchy::V2), None);
    }

    #[test]
    fn a_process_is_known_by_number_and_start_and_a_dead_one_is_not_found() {
        let me = ProcessId::look_up(i32::try_from(std::process::id()).unwrap()).unwrap();
        assert_eq!(ProcessId::look_up(me.pid), Some(me));
        assert!(me.start > 0);
        assert_eq!(ProcessId::look_up(i32::MAX), None);
    }

    async fn tree_dies(script: &str, cgroups: &Cgroups) {
        let instance = format!("i-test-{}", uuid::Uuid::new_v4().simple());
        let group = cgroups.make(&instance);
        let enter =
            group.as_ref().map_or(String::new(), |g| format!("echo $$ > {}/cgroup.procs; ", g.display()));
        let mut child = Command::new("sh")
            .args(["-c", &format!("{enter}{script}")])
            .env(NODE_VARIABLE, &instance)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        while processes_of(&instance).len() < 3 {
            assert!(std::time::Instant::now() < deadline, "the tree of {script} did not start");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // A round answers what it found, by which the next one knows that it is needed.
        assert!(kill_once(&instance, group.as_deref()) >= 3);
        assert_eq!(kill_tree(&instance, group.as_deref()).await, 0);
        child.wait().unwrap();
        assert_eq!(processes_of(&instance), Vec::<i32>::new());
        assert!(group.is_none_or(|g| !g.exists()), "the cgroup is removed");
    }

    #[tokio::test]
    async fn a_tree_with_a_double_fork_dies_without_cgroups() {
        tree_dies("(setsid sleep 600 & ) ; trap '' TERM; sleep 600; true", &Cgroups::default()).await;
    }

    #[tokio::test]
    async fn a_tree_with_a_double_fork_dies_with_cgroups() {
        let cgroups = Cgroups::detect(&format!("test-{}", uuid::Uuid::new_v4().simple()));
        tree_dies("(setsid sleep 600 & ) ; trap '' TERM; sleep 600; true", &cgroups).await;
        cgroups.remove();
    }

    #[tokio::test]
    async fn a_process_that_hides_its_environment_dies_with_its_cgroup() {
        let cgroups = Cgroups::detect(&format!("test-{}", uuid::Uuid::new_v4().simple()));
        let instance = "hidden";
        let Some(group) = cgroups.make(instance) else {
            println!("cgroups are not permitted here, so nothing can be checked");
            return;
        };
        let script = format!("echo $$ > {}/cgroup.procs; exec env -i sleep 600", group.display());
        let mut child = Command::new("sh").args(["-c", &script]).spawn().unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        while members_below(&group).is_empty() {
            assert!(std::time::Instant::now() < deadline);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(kill_tree(instance, Some(&group)).await, 0);
        assert!(!child.wait().unwrap().success());
        cgroups.remove();
    }
}
