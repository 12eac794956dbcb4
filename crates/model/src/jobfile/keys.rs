//! The keys of a job file: those that are honoured, those of SkyPilot that are known and are not, and the nearest
//! one to a key that nobody knows.

use super::error::{Fault, FaultKind, Place, shown};

/// At the top of a job file.
pub(super) const TOP: &[&str] = &[
    "name",
    "workdir",
    "setup",
    "run",
    "envs",
    "resources",
    "checkpoint",
    "policy",
    "budget",
    "project",
    "tags",
    "time_limit",
    "retry",
    "priority",
    "begin",
    "hold",
    "outputs",
    "num_nodes",
    "array",
    "dependencies",
    "deadline",
    "work",
    "inputs",
];

/// Below `resources:`.
pub(super) const RESOURCES: &[&str] = &[
    "accelerators",
    "gpus",
    "any_of",
    "ordered",
    "cpus",
    "memory",
    "infra",
    "cloud",
    "region",
    "zone",
    "use_spot",
    "max_hourly_cost",
    "instance_type",
];

/// Below `checkpoint:`.
pub(super) const CHECKPOINT: &[&str] =
    &["dir", "interval", "signal", "signal_target", "grace", "profile", "complete_when", "keep"];

/// Below `retry:`.
pub(super) const RETRY: &[&str] = &["preemptions", "failures", "exit_codes"];

/// Keys at the top of a SkyPilot task that have no effect here, and what stands in for them.
const FOREIGN_TOP: &[(&str, &str)] = &[
    ("service", "spotq runs jobs, not services"),
    ("config", "spotqd is configured by its own file"),
    ("pool", "nodes are reused across jobs without it"),
    ("volumes", "nothing is mounted"),
    ("file_mounts", "nothing is copied or mounted: fetch the files in `setup`"),
    ("storage_mounts", "nothing is copied or mounted: fetch the files in `setup`"),
    ("secrets", "the job does not see them"),
    ("experimental", ""),
    ("event_callback", "use `spotq wait`"),
];

/// Keys below SkyPilot's `resources:` that have no effect here.
const FOREIGN_RESOURCES: &[(&str, &str)] = &[
    ("image_id", "the job runs on the image that spotqd is configured with"),
    ("ports", "no port is opened"),
    ("disk_size", "the node has the disk that spotqd is configured with"),
    ("disk_tier", "the node has the disk that spotqd is configured with"),
    ("local_disk", "the node has the disk that spotqd is configured with"),
    ("network_tier", ""),
    ("labels", "use `tags` at the top of the file"),
    ("job_recovery", "use `retry` at the top of the file"),
    ("spot_recovery", "use `retry` at the top of the file"),
    ("accelerator_args", ""),
    ("autostop", "idle nodes are ended by themselves"),
    ("priority", "use `priority` at the top of the file"),
];

/// Keys that are spotq's own, and beyond this version; and what to do instead.
const NOT_YET: &[(&str, &str)] = &[
    ("num_nodes", "remove it, or set it to 1: a job runs on one node"),
    ("array", "submit each member as a job of its own, for example as documents of one file"),
    ("dependencies", "submit the second job after `spotq wait JOB` has returned"),
    ("deadline", "remove it; `policy: on-demand` avoids interruptions, `time_limit` bounds the running time"),
    ("work", "remove it; progress is read from `SPOTQ_PROGRESS_FILE`"),
    ("inputs", "remove it, and fetch the data in `setup` or `run`"),
];

/// Warnings for keys of our own that are kept with the job and have no effect yet.
pub(super) const INTERVAL_UNUSED: &str = "`checkpoint.interval` is kept with the job and not used by this version: spotq \
                                          triggers no saves by itself, so let the program save at this interval";
pub(super) const KEEP_UNUSED: &str =
    "`checkpoint.keep` is kept with the job and not used by this version: all checkpoints are kept";
pub(super) const PROJECT_UNUSED: &str =
    "`project` is kept with the job and not used by this version: reports cannot be grouped by it yet";
pub(super) const TAGS_UNUSED: &str =
    "`tags` are kept with the job and not used by this version: reports cannot be grouped by them yet";

/// The warning for a key of SkyPilot that has no effect, at the top or below `resources:`.
pub(super) fn foreign(parent: &str, key: &str) -> Option<String> {
    let table = match parent {
        "" => FOREIGN_TOP,
        "resources" => FOREIGN_RESOURCES,
        _ => return None,
    };
    let (name, instead) = table.iter().find(|(name, _)| *name == key)?;
    let path = join(parent, name);
    Some(if instead.is_empty() {
        format!("`{path}` is not honoured by this version")
    } else {
        format!("`{path}` is not honoured by this version: {instead}")
    })
}

/// The error for a key of spotq's that this version cannot serve.
pub(super) fn not_yet(key: &str, at: Place) -> Option<Fault> {
    let (name, hint) = NOT_YET.iter().find(|(name, _)| *name == key)?;
    Some(Fault::new(FaultKind::Unsupported, at, format!("`{name}` is not supported by this version"), *hint))
}

/// The error for a key that nobody knows.
pub(super) fn unknown(parent: &str, key: &str, at: Place) -> Fault {
    let known = match parent {
        "" => TOP,
        "resources" => RESOURCES,
        "checkpoint" => CHECKPOINT,
        _ => RETRY,
    };
    let hint = if let Some(near) = nearest(key, known.iter().copied()) {
        format!("did you mean `{near}`?")
    } else if let Some(home) = home_of(parent, key) {
        format!("`{key}` belongs {home}")
    } else {
        format!("known keys here: {}", known.join(", "))
    };
    let place = if parent.is_empty() { String::new() } else { format!(" below `{parent}`") };
    Fault::invalid(at, format!("unknown key {}{place}", shown(key)), hint)
}

/// The known word that is nearest to `word`, if one is near enough to be what was meant.
pub(super) fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    // The distance of long words is costly and never small.
    const WORD_MAX: usize = 64;
    if word.len() > WORD_MAX {
        return None;
    }
    let plain = |s: &str| s.to_lowercase().replace(['-', ' '], "_");
    let word = plain(word);
    known
        .map(|k| (strsim::damerau_levenshtein(&plain(k), &word), k))
        .min_by_key(|(distance, _)| *distance)
        // One slip in three letters is still a slip; more is another word.
        .filter(|(distance, k)| *distance <= (k.len().max(3) / 3).min(3))
        .map(|(_, k)| k)
}

pub(super) fn join(parent: &str, key: &str) -> String {
    if parent.is_empty() { key.to_owned() } else { format!("{parent}.{key}") }
}

/// Where a key that stands in the wrong group belongs.
fn home_of(parent: &str, key: &str) -> Option<String> {
    let groups = [("resources", RESOURCES), ("checkpoint", CHECKPOINT), ("retry", RETRY)];
    if !parent.is_empty() && TOP.contains(&key) {
        return Some("at the top of the file".into());
    }
    groups
        .into_iter()
        .find(|(group, keys)| *group != parent && keys.contains(&key))
        .map(|(group, _)| format!("below `{group}:`"))
}
