//! The commit log: its entries, and the pure fold that says which checkpoint counts.
//!
//! The log is a total order (`log/<seq>`), written with put-if-absent only. Nothing here does I/O or reads a
//! clock: order comes from sequence numbers and never from time.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};
use spotq_model::Generation;
use uuid::Uuid;

use crate::key::Digest;

/// Numbers the checkpoints of a job, from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CheckpointSeq(pub u64);

/// Numbers the entries of a job's commit log, from 1, without gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LogSeq(pub u64);

/// One entry of the commit log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogEntry {
    pub seq: LogSeq,
    pub generation: Generation,
    /// Drawn for each append. After an unclear answer it tells the writer whether the entry that it finds is its own.
    pub writer_nonce: Uuid,
    /// Plain BLAKE3 of the object of the entry before; zero for the first.
    pub prev_hash: Digest,
    #[serde(flatten)]
    pub action: Action,
}

/// What an entry does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Action {
    /// From here on, entries of older generations are void.
    Fence,
    /// A complete checkpoint.
    Commit {
        checkpoint: CheckpointSeq,
        /// Object name of the manifest, relative to the job's prefix.
        manifest: String,
        /// Plain BLAKE3 of the manifest object.
        manifest_hash: Digest,
        bytes: u64,
        step: Option<u64>,
    },
    /// The checkpoint was found damaged: never restore it again.
    Quarantine { checkpoint: CheckpointSeq, reason: String },
    /// Retention gave the checkpoint up; its objects may be gone.
    Retire { checkpoint: CheckpointSeq },
}

/// A committed checkpoint that may be restored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    pub checkpoint: CheckpointSeq,
    pub log_seq: LogSeq,
    pub generation: Generation,
    pub manifest: String,
    pub manifest_hash: Digest,
    pub bytes: u64,
    pub step: Option<u64>,
}

/// What a log says, as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogState {
    /// Restorable checkpoints, oldest first; the last one is the head.
    pub heads: Vec<Head>,
    /// The highest generation that fenced; 0 if none did.
    pub fence: Generation,
    /// The highest generation that wrote anything; 0 if none did.
    pub newest_generation: Generation,
    /// The number that the next checkpoint gets.
    pub next_checkpoint: CheckpointSeq,
}

impl LogState {
    /// The checkpoint that counts.
    #[must_use]
    pub fn head(&self) -> Option<&Head> {
        self.heads.last()
    }
}

impl Default for LogState {
    fn default() -> Self {
        fold(&[])
    }
}

impl LogSeq {
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    /// Name of the entry's object, relative to the job's prefix.
    #[must_use]
    pub fn object(self) -> String {
        format!("log/{:020}.json", self.0)
    }

    /// Reads the last part of an entry's object name; `None` for a name that is not an entry's.
    #[must_use]
    pub fn from_file_name(name: &str) -> Option<Self> {
        let digits = name.strip_suffix(".json")?;
        let well_formed = digits.len() == 20 && digits.bytes().all(|b| b.is_ascii_digit());
        if !well_formed { None } else { digits.parse().ok().map(Self) }
    }
}

impl CheckpointSeq {
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl fmt::Display for LogSeq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for CheckpointSeq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Folds entries, in order of their sequence numbers, into what they say.
///
/// The head is the newest commit whose generation is at least every fence before it and that was neither
/// quarantined nor retired. An entry of a generation older than a fence before it is void, whatever it says: a
/// zombie that ignores its own check is ignored by every reader (INV-02).
#[must_use]
pub fn fold(entries: &[LogEntry]) -> LogState {
    let mut fence = Generation(0);
    let mut newest_generation = Generation(0);
    let mut next_checkpoint = CheckpointSeq(1);
    let mut commits = Vec::new();
    let mut gone = BTreeSet::new();
    for entry in entries {
        newest_generation = newest_generation.max(entry.generation);
        let void = entry.generation < fence;
        match &entry.action {
            Action::Fence => fence = fence.max(entry.generation),
            Action::Commit { checkpoint, manifest, manifest_hash, bytes, step } => {
                // A void commit still uses its number up, so that no two manifests share one.
                next_checkpoint = next_checkpoint.max(checkpoint.next());
                if !void {
                    commits.push(Head {
                        checkpoint: *checkpoint,
                        log_seq: entry.seq,
                        generation: entry.generation,
                        manifest: manifest.clone(),
                        manifest_hash: *manifest_hash,
                        bytes: *bytes,
                        step: *step,
                    });
                }
            }
            Action::Quarantine { checkpoint, .. } | Action::Retire { checkpoint } => {
                if !void {
                    gone.insert(*checkpoint);
                }
            }
        }
    }
    commits.retain(|head| !gone.contains(&head.checkpoint));
    LogState { heads: commits, fence, newest_generation, next_checkpoint }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What a writer tries to append, whether or not it is allowed to: zombies do not ask.
    #[derive(Debug, Clone, Copy)]
    enum Step {
        Fence,
        Commit,
        QuarantineNth(usize),
        RetireNth(usize),
    }

    fn steps() -> impl Strategy<Value = Vec<(u64, Step)>> {
        let step = prop_oneof![
            1 => Just(Step::Fence),
            4 => Just(Step::Commit),
            2 => (0..20_usize).prop_map(Step::QuarantineNth),
            1 => (0..20_usize).prop_map(Step::RetireNth),
        ];
        proptest::collection::vec((1..=2_u64, step), 0..40)
    }

    fn build(steps: &[(u64, Step)]) -> Vec<LogEntry> {
        let mut entries: Vec<LogEntry> = Vec::new();
        let mut checkpoints = 0;
        for (seq, (generation, step)) in (1..).zip(steps) {
            let checkpoint = |n: usize| CheckpointSeq(n as u64 % (checkpoints + 1));
            let action = match *step {
                Step::Fence => Action::Fence,
                Step::Commit => {
                    checkpoints += 1;
                    Action::Commit {
                        checkpoint: CheckpointSeq(checkpoints),
                        manifest: String::new(),
                        manifest_hash: Digest::ZERO,
                        bytes: 0,
                        step: Some(checkpoints * 10),
                    }
                }
                Step::QuarantineNth(n) => {
                    Action::Quarantine { checkpoint: checkpoint(n), reason: String::new() }
                }
                Step::RetireNth(n) => Action::Retire { checkpoint: checkpoint(n) },
            };
            entries.push(LogEntry {
                seq: LogSeq(seq),
                generation: Generation(*generation),
                writer_nonce: Uuid::nil(),
                prev_hash: Digest::ZERO,
                action,
            });
        }
        entries
    }

    /// The rule of the format, read off word by word.
    fn counts(entries: &[LogEntry], index: usize) -> bool {
        let fenced_out = |index: usize| {
            let before = &entries[..index];
            before.iter().any(|e| e.action == Action::Fence && e.generation > entries[index].generation)
        };
        let Action::Commit { checkpoint, .. } = &entries[index].action else { return false };
        let gone = (0..entries.len()).any(|other| match &entries[other].action {
            Action::Quarantine { checkpoint: c, .. } | Action::Retire { checkpoint: c } => {
                c == checkpoint && !fenced_out(other)
            }
            Action::Fence | Action::Commit { .. } => false,
        });
        !gone && !fenced_out(index)
    }

    proptest! {
        #[test]
        fn inv_02_06_the_head_is_the_newest_commit_that_counts(steps in steps()) {
            let entries = build(&steps);
            for len in 0..=entries.len() {
                let log = &entries[..len];
                let expected = (0..len).rev().find(|i| counts(log, *i)).map(|i| log[i].seq);
                let state = fold(log);
                prop_assert_eq!(state.head().map(|head| head.log_seq), expected);
                let next = 1 + log.iter().filter(|e| matches!(e.action, Action::Commit { .. })).count() as u64;
                prop_assert_eq!(state.next_checkpoint, CheckpointSeq(next));
            }
        }

        #[test]
        fn inv_02_no_older_generation_counts_after_a_fence(steps in steps()) {
            let entries = build(&steps);
            let state = fold(&entries);
            let fence = entries.iter().find(|e| e.action == Action::Fence && e.generation == Generation(2));
            if let Some(fence) = fence {
                let zombies = state.heads.iter().filter(|h| h.generation < Generation(2) && h.log_seq > fence.seq);
                prop_assert_eq!(zombies.count(), 0);
            }
        }

        #[test]
        fn inv_06_only_a_quarantine_or_retirement_lowers_the_restored_step(steps in steps()) {
            let entries = build(&steps);
            let step = |len: usize| fold(&entries[..len]).head().and_then(|head| head.step);
            for (len, entry) in entries.iter().enumerate() {
                let lowers = matches!(entry.action, Action::Quarantine { .. } | Action::Retire { .. });
                prop_assert!(lowers || step(len + 1) >= step(len));
            }
        }
    }

    #[test]
    fn names_sort_as_their_numbers_do() {
        assert_eq!(LogSeq(7).object(), "log/00000000000000000007.json");
        assert_eq!(LogSeq::from_file_name("00000000000000000007.json"), Some(LogSeq(7)));
        for bad in [
            "7.json",
            "0000000000000000000x.json",
            "00000000000000000007.json#1",
            "99999999999999999999.json",
        ] {
            assert_eq!(LogSeq::from_file_name(bad), None, "{bad}");
        }
        assert_eq!(format!("{} {}", LogSeq(7), CheckpointSeq(8)), "7 8", "people read plain numbers");
    }

    /// The words in the store are the format: a change here is a change of the format.
    #[test]
    fn entries_are_written_as_documented() {
        let entry = &build(&[(3, Step::Commit)])[0];
        let json = serde_json::to_value(entry).unwrap();
        let zero = "0".repeat(64);
        let expected = serde_json::json!({
            "seq": 1, "generation": 3, "writer_nonce": "00000000-0000-0000-0000-000000000000", "prev_hash": zero,
            "kind": "commit", "checkpoint": 1, "manifest": "", "manifest_hash": zero, "bytes": 0, "step": 10,
        });
        assert_eq!(json, expected);
        assert_eq!(&serde_json::from_value::<LogEntry>(json).unwrap(), entry);
    }
}
