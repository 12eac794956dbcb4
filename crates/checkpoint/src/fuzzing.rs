//! Ways in for the fuzz targets: what reads bytes that a stranger may have written. Panics when a promise is broken.

use std::path::{Component, Path};

use serde_json::value::RawValue;
use spotq_model::Generation;

use crate::key::{JobKey, Keys, Purpose};
use crate::log::{Action, LogEntry, fold};
use crate::manifest::Manifest;
use crate::path::{LinkTarget, RelPath};
use crate::repo::LogView;

/// Opens `body` as a manifest, as it stands and signed with the job's key.
pub fn manifest(body: &[u8]) {
    let keys = keys();
    check_manifest(&keys, body);
    if let Some(sealed) = sealed(&keys, Purpose::Manifest, body) {
        check_manifest(&keys, &sealed);
    }
}

fn check_manifest(keys: &Keys, bytes: &[u8]) {
    let Ok(manifest) = Manifest::open(keys, bytes) else { return };
    for entry in &manifest.entries {
        assert!(is_below(entry.path.as_path()), "{} leads out", entry.path);
    }
    let (_, _, again) = manifest.seal(keys).expect("what was read can be written");
    assert!(Manifest::open(keys, &again).is_ok(), "what was read is written so that it can be read");
}

/// Takes each line for the body of the next entry of a commit log.
pub fn commit_log(lines: &str) {
    let keys = keys();
    let mut view = LogView::empty();
    for line in lines.lines() {
        let bytes =
            sealed(&keys, Purpose::LogEntry, line.as_bytes()).unwrap_or_else(|| line.as_bytes().to_vec());
        // Refused entries end nothing here: the next line may be the right one.
        let _ = view.push(&keys, &bytes);
    }
    let entries: Vec<LogEntry> = lines.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let state = fold(&entries);
    let mut fence = Generation(0);
    for entry in &entries {
        let void = entry.generation < fence;
        if let (Action::Quarantine { checkpoint, .. } | Action::Retire { checkpoint }, false) =
            (&entry.action, void)
        {
            assert!(state.heads.iter().all(|head| head.checkpoint != *checkpoint), "{checkpoint} came back");
        }
        if let Action::Commit { checkpoint, .. } = &entry.action {
            assert!(
                state.next_checkpoint > *checkpoint || checkpoint.0 == u64::MAX,
                "{checkpoint} is given again"
            );
        }
        if matches!(entry.action, Action::Fence) {
            fence = fence.max(entry.generation);
        }
    }
    assert!(state.fence == fence && state.newest_generation >= fence);
}

/// Takes `path` for an entry's name and `target` for that of a link there.
pub fn paths(path: &[u8], target: &[u8]) {
    let Ok(path) = RelPath::new(path) else { return };
    assert!(is_below(path.as_path()), "{path} leads out");
    let Ok(target) = LinkTarget::new(target, path.depth()) else { return };
    let resolved = path.as_path().parent().unwrap_or(Path::new("")).join(target.as_path());
    let mut depth = 0_i64;
    for component in resolved.components() {
        depth += match component {
            Component::Normal(_) => 1,
            Component::ParentDir => -1,
            Component::CurDir => 0,
            Component::RootDir | Component::Prefix(_) => panic!("{path} leads to the root"),
        };
        assert!(depth >= 0, "the link {path} leads out");
    }
}

fn is_below(path: &Path) -> bool {
    path.components().all(|component| matches!(component, Component::Normal(_)))
}

fn keys() -> Keys {
    Keys::derive(&JobKey([7; 32]))
}

/// `body`, if it is JSON, as who has the job's key would sign it.
fn sealed(keys: &Keys, purpose: Purpose, body: &[u8]) -> Option<Vec<u8>> {
    let body: &RawValue = serde_json::from_slice(body).ok()?;
    keys.seal(purpose, &body).ok()
}
