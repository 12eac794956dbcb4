//! The processes of an attempt: found in `/proc`, signalled, killed to the last one, reaped.
//!
//! Must never touch a process that is not marked, in the attempt's cgroup or below its launcher, with one exception: an
//! orphan that came to this worker and can be of no other attempt.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions};

/// The variable that every process of an attempt inherits.
pub const MARK: &str = "SPOTQ_ATTEMPT_ID";
/// Kill rounds: each takes what the one before missed because it forked meanwhile. A tree that survives this many is
/// stuck in the kernel, and that is reported.
const ROUNDS_MAX: u32 = 200;
const ROUND_PAUSE: Duration = Duration::from_millis(10);

/// Where to look for an attempt's processes.
#[derive(Debug, Clone, Default)]
pub struct Tree {
    /// Value of [`MARK`].
    pub mark: String,
    pub launcher: Option<u32>,
    /// cgroups made for it.
    pub cgroups: Vec<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Effort {
    Quick,
    Thorough,
}

/// A line of `/proc/PID/stat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    pub pid: u32,
    pub parent: u32,
    /// A zombie has ended and waits to be reaped.
    pub zombie: bool,
    /// In ticks since the machine's start.
    pub began: u64,
}

/// Every process that can be read now.
#[must_use]
pub fn processes() -> Vec<Stat> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries.flatten().filter_map(|entry| stat_of(entry.file_name().to_str()?.parse().ok()?)).collect()
}

impl Tree {
    /// Live processes of the attempt: all of them, at the price of reading every environment on the node.
    #[must_use]
    pub fn members(&self) -> BTreeSet<u32> {
        self.find(Effort::Thorough)
    }

    /// Live processes of the attempt, cheaply where it has a cgroup. One that left its cgroup by itself is missed.
    #[must_use]
    pub fn members_quickly(&self) -> BTreeSet<u32> {
        self.find(if self.cgroups.is_empty() { Effort::Thorough } else { Effort::Quick })
    }

    fn find(&self, effort: Effort) -> BTreeSet<u32> {
        let all = processes();
        let own = std::process::id();
        let mut found: BTreeSet<u32> = self.launcher.map(|root| below(&all, root)).unwrap_or_default();
        for dir in &self.cgroups {
            let text = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
            found.extend(text.lines().filter_map(|line| line.parse::<u32>().ok()));
        }
        if effort == Effort::Thorough && !self.mark.is_empty() {
            let entry = format!("{MARK}={}", self.mark);
            let marked =
                all.iter().map(|p| p.pid).filter(|pid| !found.contains(pid) && has_entry(*pid, &entry));
            let marked: Vec<u32> = marked.collect();
            found.extend(marked);
            for stray in self.strays(&all) {
                found.extend(below(&all, stray));
            }
        }
        let live: BTreeSet<u32> = all.iter().filter(|p| !p.zombie).map(|p| p.pid).collect();
        found.into_iter().filter(|pid| *pid != own && live.contains(pid)).collect()
    }

    /// Orphans without a mark that can only be this attempt's or an ended one's. The kernel hands all orphans to this
    /// worker, so one that shed its environment and its session is still its child; what it does not say is whose it was.
    fn strays(&self, all: &[Stat]) -> Vec<u32> {
        if !matches!(rustix::process::child_subreaper(), Ok(Some(_))) {
            return Vec::new();
        }
        let (own, ours) = (std::process::id(), launched());
        let window = lock_running().window(&self.mark);
        let orphans = all.iter().filter(|p| p.parent == own && !p.zombie && !ours.contains(&p.pid));
        let any_mark = format!("{MARK}=");
        orphans
            .filter(|p| window.contains(&p.began) && !has_entry_prefix(p.pid, &any_mark))
            .map(|p| p.pid)
            .collect()
    }

    /// The processes that train. Those are the topmost ones with a handler for `signal`: below them are loaders of data
    /// and the like, which would die of it; above them are shells. Where nobody has a handler, the leaves of the tree.
    #[must_use]
    pub fn ranks(&self, signal: Signal) -> BTreeSet<u32> {
        let members = self.members_quickly();
        let parent_of: BTreeMap<u32, u32> = processes().iter().map(|p| (p.pid, p.parent)).collect();
        let catching: BTreeSet<u32> = members.iter().copied().filter(|pid| catches(*pid, signal)).collect();
        let is_below_another = |pid: &u32| {
            let mut above = parent_of.get(pid);
            // The depth of a process tree is bounded by its size.
            for _ in 0..parent_of.len() {
                match above {
                    Some(parent) if catching.contains(parent) => return true,
                    Some(parent) if members.contains(parent) => above = parent_of.get(parent),
                    Some(_) | None => return false,
                }
            }
            false
        };
        let top: BTreeSet<u32> = catching.iter().copied().filter(|pid| !is_below_another(pid)).collect();
        if top.is_empty() { self.leaves(members) } else { top }
    }

    fn leaves(&self, members: BTreeSet<u32>) -> BTreeSet<u32> {
        let parents: BTreeSet<u32> =
            processes().iter().filter(|p| !p.zombie && members.contains(&p.pid)).map(|p| p.parent).collect();
        members.into_iter().filter(|pid| !parents.contains(pid)).collect()
    }

    /// Sends `signal` to each of `pids`; one that is gone already is no error.
    pub fn signal(pids: impl IntoIterator<Item = u32>, signal: Signal) {
        for pid in pids {
            if let Some(pid) = to_pid(pid) {
                let _ = rustix::process::kill_process(pid, signal);
            }
        }
    }

    /// Kills until nothing is left. Says what survived, if anything did.
    pub async fn kill(&self) -> Option<String> {
        for _ in 0..ROUNDS_MAX {
            for dir in &self.cgroups {
                let _ = fs::write(dir.join("cgroup.kill"), "1");
            }
            let members = self.members();
            reap_orphans();
            if members.is_empty() {
                for dir in &self.cgroups {
                    let _ = fs::remove_dir(dir);
                }
                is_over(&self.mark);
                return None;
            }
            Tree::signal(members, Signal::KILL);
            tokio::time::sleep(ROUND_PAUSE).await;
        }
        let left: Vec<String> = self.members().iter().map(u32::to_string).collect();
        Some(format!("processes {} could not be killed", left.join(", ")))
    }
}

/// Whether the process has a handler of its own for `signal`, as the kernel tells.
fn catches(pid: u32, signal: Signal) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let mask = mask.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
    u32::try_from(signal.as_raw() - 1)
        .is_ok_and(|bit| mask.checked_shr(bit).is_some_and(|rest| rest & 1 == 1))
}

/// Kills what earlier workers of this node left behind: every process whose mark starts with `prefix`.
pub async fn kill_leftovers(prefix: &str) -> Option<String> {
    let entry = format!("{MARK}={prefix}");
    let own = std::process::id();
    for _ in 0..ROUNDS_MAX {
        let left: Vec<u32> = processes()
            .into_iter()
            .filter(|p| !p.zombie && p.pid != own && has_entry_prefix(p.pid, &entry))
            .map(|p| p.pid)
            .collect();
        reap_orphans();
        if left.is_empty() {
            return None;
        }
        Tree::signal(left, Signal::KILL);
        tokio::time::sleep(ROUND_PAUSE).await;
    }
    Some("processes of an earlier attempt could not be killed".to_owned())
}

/// Collects ended processes that were handed to us because their own parents ended. The command that we started
/// ourselves carries no parent in its own tree and is collected by whoever started it: it is in `ours`.
pub fn reap_orphans() {
    let own = std::process::id();
    let ours = launched();
    for process in processes() {
        let adopted = process.zombie && process.parent == own && !ours.contains(&process.pid);
        if let Some(pid) = to_pid(process.pid).filter(|_| adopted) {
            let _ = rustix::process::waitpid(Some(pid), WaitOptions::NOHANG);
        }
    }
}

/// Says that `pid` was started by us for the attempt with this mark, and is waited for elsewhere.
pub fn keep_for_waiter(pid: u32, mark: &str) {
    lock_launched().insert(pid);
    // What cannot be read counts as begun before everything: then no stray is taken for another attempt's.
    let began = stat_of(pid).map_or(0, |stat| stat.began);
    lock_running().began(mark, began);
}

/// Says that nothing of the attempt with this mark runs any more.
pub fn is_over(mark: &str) {
    lock_running().since.remove(mark);
}

/// Says that `pid` was collected.
pub fn was_collected(pid: u32) {
    lock_launched().remove(&pid);
}

/// Whether a process of the attempt has a file under `dir` open for writing, or mapped shared and writable.
#[must_use]
pub fn has_writer(pids: &BTreeSet<u32>, dir: &Path) -> bool {
    pids.iter().any(|pid| writes_below(*pid, dir) || maps_below(*pid, dir))
}

static LAUNCHED: std::sync::Mutex<BTreeSet<u32>> = std::sync::Mutex::new(BTreeSet::new());

/// When the first process of each running attempt began.
#[derive(Debug)]
struct Running {
    /// Of all attempts of this worker: older children of ours are no attempt's.
    first: Option<u64>,
    since: BTreeMap<String, u64>,
}

impl Running {
    fn began(&mut self, mark: &str, began: u64) {
        self.first.get_or_insert(began);
        self.since.entry(mark.to_owned()).or_insert(began);
    }

    /// When a process that cannot be of another running attempt than this one's has begun.
    fn window(&self, mark: &str) -> std::ops::Range<u64> {
        let others = self.since.iter().filter(|(other, _)| *other != mark).map(|(_, began)| *began).min();
        self.first.map_or(0..0, |first| first..others.unwrap_or(u64::MAX))
    }
}

static RUNNING: std::sync::Mutex<Running> =
    std::sync::Mutex::new(Running { first: None, since: BTreeMap::new() });

fn lock_running() -> std::sync::MutexGuard<'static, Running> {
    RUNNING.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn lock_launched() -> std::sync::MutexGuard<'static, BTreeSet<u32>> {
    LAUNCHED.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn launched() -> BTreeSet<u32> {
    lock_launched().clone()
}

fn below(all: &[Stat], root: u32) -> BTreeSet<u32> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for process in all {
        children.entry(process.parent).or_default().push(process.pid);
    }
    let mut found = BTreeSet::new();
    let mut next = vec![root];
    while let Some(pid) = next.pop() {
        if found.insert(pid) {
            next.extend(children.get(&pid).into_iter().flatten());
        }
    }
    found
}

fn stat_of(pid: u32) -> Option<Stat> {
    let text = fs::read(format!("/proc/{pid}/stat")).ok()?;
    let text = String::from_utf8_lossy(&text);
    // The name in brackets may hold anything; the fields follow the last bracket.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    // The start is field 22 of the line, the parent is field 4.
    let began = fields.nth(17)?.parse().ok()?;
    Some(Stat { pid, parent, zombie: matches!(state, "Z" | "X"), began })
}

fn has_entry(pid: u32, entry: &str) -> bool {
    environ(pid).split(|b| *b == 0).any(|found| found == entry.as_bytes())
}

fn has_entry_prefix(pid: u32, entry: &str) -> bool {
    environ(pid).split(|b| *b == 0).any(|found| found.starts_with(entry.as_bytes()))
}

fn environ(pid: u32) -> Vec<u8> {
    fs::read(format!("/proc/{pid}/environ")).unwrap_or_default()
}

fn writes_below(pid: u32, dir: &Path) -> bool {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    entries.flatten().any(|entry| {
        let below = fs::read_link(entry.path()).is_ok_and(|target| target.starts_with(dir));
        below && is_writable(pid, &entry.file_name().to_string_lossy())
    })
}

fn is_writable(pid: u32, fd: &str) -> bool {
    let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}")).unwrap_or_default();
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    // Octal; the two lowest bits are the access mode, 0 means read only.
    flags.and_then(|text| u32::from_str_radix(text.trim(), 8).ok()).is_some_and(|flags| flags & 3 != 0)
}

fn maps_below(pid: u32, dir: &Path) -> bool {
    let maps = fs::read(format!("/proc/{pid}/maps")).unwrap_or_default();
    let dir = dir.as_os_str().as_bytes();
    maps.split(|b| *b == b'\n').any(|line| {
        let mode = line.split(|b| *b == b' ').nth(1).unwrap_or_default();
        mode.get(1) == Some(&b'w') && mode.get(3) == Some(&b's') && line.windows(dir.len()).any(|w| w == dir)
    })
}

fn to_pid(pid: u32) -> Option<Pid> {
    i32::try_from(pid).ok().filter(|raw| *raw > 1).and_then(Pid::from_raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descendants_are_found_through_any_depth() {
        let stat = |pid, parent| Stat { pid, parent, zombie: false, began: 0 };
        let all = [stat(2, 1), stat(3, 2), stat(4, 3), stat(9, 1)];
        assert_eq!(below(&all, 2), BTreeSet::from([2, 3, 4]));
    }

    #[test]
    fn an_orphan_is_taken_only_if_no_other_running_attempt_can_have_made_it() {
        let mut running = Running { first: None, since: BTreeMap::new() };
        assert!(!running.window("a").contains(&5), "nothing was started: it is not ours");
        running.began("a", 5);
        assert!(!running.window("a").contains(&4) && running.window("a").contains(&5));
        running.began("b", 7);
        running.began("b", 9);
        assert!(running.window("a").contains(&6), "the other one had not begun");
        assert!(!running.window("a").contains(&7), "the clock is coarse");
        assert!(!running.window("b").contains(&8), "it may be the first one's");
        running.since.remove("a");
        assert!(running.window("b").contains(&6), "of one that has ended");
        assert!(!running.window("b").contains(&4));
    }

    #[test]
    fn a_file_open_for_writing_is_a_writer_and_one_open_for_reading_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().canonicalize().unwrap();
        let me = BTreeSet::from([std::process::id()]);
        let file = fs::File::create(path.join("a")).unwrap();
        assert!(has_writer(&me, &path));
        drop(file);
        let reader = fs::File::open(path.join("a")).unwrap();
        assert!(!has_writer(&me, &path));
        drop(reader);
    }

    #[test]
    fn this_process_is_listed_with_its_parent() {
        let me = stat_of(std::process::id()).unwrap();
        assert!(!me.zombie && me.parent > 0 && me.began > 0);
        assert!(to_pid(0).is_none() && to_pid(1).is_none() && to_pid(u32::MAX).is_none());
    }
}
