//! A cgroup for each attempt, below the worker's own: one write kills everything in it, double forks included.
//!
//! Where cgroups are not permitted there is none, and `tree` finds the processes by their mark. Never touches a
//! cgroup that it did not make.

use std::fs;
use std::path::{Path, PathBuf};

/// Places where the version 2 hierarchy is mounted: alone, or beside version 1.
const MOUNTS_V2: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
/// Begins the name of each cgroup of ours.
const NAME: &str = "spotq-";
const FREEZER_V1: &str = "/sys/fs/cgroup/freezer";

/// Makes the cgroups for an attempt. Empty if that is not permitted.
#[must_use]
pub fn make(name: &str) -> Vec<PathBuf> {
    home().and_then(|home| make_below(&home, name)).into_iter().collect()
}

/// Removes the empty cgroups that a killed worker of this node left.
pub fn remove_leftovers(prefix: &str) {
    let Some(entries) = home().and_then(|home| fs::read_dir(home).ok()) else { return };
    let wanted = format!("{NAME}{prefix}");
    for entry in entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(&wanted)) {
        let _ = fs::remove_dir(entry.path());
    }
}

/// Files with counters of processes that the kernel killed for lack of memory.
#[must_use]
pub fn memory_files(cgroups: &[PathBuf]) -> Vec<PathBuf> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mut files: Vec<PathBuf> = cgroups.iter().map(|dir| dir.join("memory.events")).collect();
    if let Some(path) = own_path(&own, "") {
        files.extend(MOUNTS_V2.iter().map(|mount| join(Path::new(mount), path).join("memory.events")));
    }
    if let Some(path) = own_path(&own, "memory") {
        files.push(join(Path::new("/sys/fs/cgroup/memory"), path).join("memory.oom_control"));
        files.push(PathBuf::from("/sys/fs/cgroup/memory/memory.oom_control"));
    }
    files.retain(|file| file.exists());
    files
}

/// How many processes these files say were killed for lack of memory.
#[must_use]
pub fn kills_for_memory(files: &[PathBuf]) -> u64 {
    files.iter().map(|file| parse_oom_kills(&fs::read_to_string(file).unwrap_or_default())).sum()
}

fn parse_oom_kills(text: &str) -> u64 {
    text.lines()
        .find_map(|line| line.strip_prefix("oom_kill "))
        .and_then(|count| count.trim().parse().ok())
        .unwrap_or(0)
}

/// The worker's own cgroup, where its attempts' are made.
fn home() -> Option<PathBuf> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let v2 =
        MOUNTS_V2.iter().map(Path::new).find(|mount| mount.join("cgroup.procs").exists() && is_v2(mount));
    match (v2, own_path(&own, "")) {
        (Some(mount), Some(path)) => Some(join(mount, path)),
        _ => own_path(&own, "freezer").map(|path| join(Path::new(FREEZER_V1), path)),
    }
}

fn is_v2(mount: &Path) -> bool {
    // A version 1 hierarchy has no such file.
    mount.join("cgroup.controllers").exists() || mount.join("cgroup.subtree_control").exists()
}

/// The worker's path in a hierarchy; the empty controller is version 2.
fn own_path<'a>(text: &'a str, controller: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        controllers.split(',').any(|c| c == controller).then_some(path)
    })
}

fn join(mount: &Path, path: &str) -> PathBuf {
    mount.join(path.trim_start_matches('/'))
}

fn make_below(home: &Path, name: &str) -> Option<PathBuf> {
    let dir = home.join(format!("{NAME}{name}"));
    match fs::create_dir(&dir) {
        Ok(()) => Some(dir),
        // Left by a worker that was killed; its processes are gone by now.
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Some(dir),
        Err(error) => {
            tracing::debug!(dir = %dir.display(), %error, "no cgroup; the process tree is tracked by its mark");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_path_is_found_in_both_hierarchies() {
        let text = "9:name=systemd:/\n6:freezer:/a\n5:cpu,cpuacct:/b\n0::/c/d\n";
        assert_eq!(own_path(text, ""), Some("/c/d"));
        assert_eq!(own_path(text, "freezer"), Some("/a"));
        assert_eq!(own_path(text, "cpuacct"), Some("/b"));
        assert_eq!(own_path(text, "memory"), None);
    }

    #[test]
    fn kills_for_memory_are_read_from_both_versions() {
        assert_eq!(parse_oom_kills("low 0\noom 2\noom_kill 3\noom_group_kill 0\n"), 3);
        assert_eq!(parse_oom_kills("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"), 1);
        assert_eq!(parse_oom_kills("garbage"), 0);
    }
}
