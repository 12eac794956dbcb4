//! Verify: reads all of the newest checkpoint and every log entry, and reports what is wrong.
//!
//! Must never write: it is run by people on stores that they may only read.

use std::collections::BTreeSet;

use futures::StreamExt as _;

use crate::error::CheckpointError;
use crate::key::Digest;
use crate::log::{Head, LogSeq, fold};
use crate::manifest::{Entry, Node};
use crate::objects::blocking;
use crate::repo::{LogView, Repository};

/// More findings than this say nothing new; it bounds the report on a store that lost everything.
const MAX_FINDINGS: usize = 1000;

/// What was read, and what is wrong with it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VerifyReport {
    pub log_entries: u64,
    /// The checkpoint whose bytes were read.
    pub head: Option<Head>,
    pub files: u64,
    pub bytes: u64,
    pub findings: Vec<Finding>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub object: String,
    pub why: String,
}

impl VerifyReport {
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.findings.is_empty()
    }

    fn note(&mut self, object: impl Into<String>, why: impl Into<String>) {
        if self.findings.len() < MAX_FINDINGS {
            self.findings.push(Finding { object: object.into(), why: why.into() });
        }
    }
}

impl Repository {
    /// Reads every log entry anew, the manifests of all restorable checkpoints, and every byte of the newest.
    ///
    /// # Errors
    /// Only what keeps it from looking, such as `Unavailable`; damage is in the report.
    pub async fn verify(&self) -> Result<VerifyReport, CheckpointError> {
        let mut report = VerifyReport::default();
        let view = self.verify_log(&mut report).await?;
        let state = fold(&view.entries);
        for head in &state.heads {
            match self.read_manifest(head).await {
                Ok(_) => {}
                Err(CheckpointError::Corrupt { object, why }) => report.note(object, why),
                Err(e) => return Err(e),
            }
        }
        if let Some(head) = state.head() {
            self.verify_bytes(head, &mut report).await?;
            report.head = Some(head.clone());
        }
        Ok(report)
    }

    /// The log up to the first entry that is unsound: what comes after it hangs on nothing.
    async fn verify_log(&self, report: &mut VerifyReport) -> Result<LogView, CheckpointError> {
        let (last, foreign) = self.list_log().await?;
        for name in foreign {
            report.note(name, "it is not a log entry and does not belong here");
        }
        let mut view = LogView::empty();
        for seq in (1..=last.map_or(0, |seq| seq.0)).map(LogSeq) {
            let pushed = match self.read_entry(seq).await {
                Ok(Some(bytes)) => view.push(&self.objects.keys, &bytes),
                Ok(None) => {
                    Err(CheckpointError::corrupt(seq.object(), "it is missing but later entries exist"))
                }
                Err(e) => Err(e),
            };
            match pushed {
                Ok(()) => report.log_entries += 1,
                Err(CheckpointError::Corrupt { object, why }) => {
                    report.note(object, why);
                    break;
                }
                Err(e) => return Err(e),
            }
        }
        Ok(view)
    }

    async fn verify_bytes(&self, head: &Head, report: &mut VerifyReport) -> Result<(), CheckpointError> {
        let manifest = match self.read_manifest(head).await {
            Ok(manifest) => manifest,
            // Noted above, with all other manifests.
            Err(CheckpointError::Corrupt { .. }) => return Ok(()),
            Err(e) => return Err(e),
        };
        // A chunk may be part of several files; it is reported once.
        let mut damaged = BTreeSet::new();
        for entry in &manifest.entries {
            let Node::File { hash, size, .. } = &entry.node else { continue };
            let problems = self.verify_file(entry, *hash).await?;
            if problems.is_empty() {
                report.files += 1;
                report.bytes += size;
            }
            for (object, why) in problems {
                if damaged.insert(object.clone()) {
                    report.note(object, format!("{why} (part of {})", entry.path));
                }
            }
        }
        Ok(())
    }

    /// Reads all chunks of a file, also after a damaged one, and returns what is wrong.
    async fn verify_file(
        &self,
        entry: &Entry,
        hash: Digest,
    ) -> Result<Vec<(String, String)>, CheckpointError> {
        let mut problems = Vec::new();
        let mut hasher = blake3::Hasher::new();
        let mut pieces = self.pieces_of(entry.chunks().to_vec());
        while let Some(piece) = pieces.next().await {
            let (bytes, permit) = match piece {
                Ok(piece) => piece,
                Err(CheckpointError::Corrupt { object, why }) => {
                    problems.push((object, why));
                    continue;
                }
                Err(e) => return Err(e),
            };
            hasher = blocking(move || {
                hasher.update(&bytes);
                Ok(hasher)
            })
            .await?;
            drop(permit);
        }
        if problems.is_empty() && Digest(*hasher.finalize().as_bytes()) != hash {
            let why = "its chunks are sound but do not make the file that the manifest describes";
            problems.push((format!("file {}", entry.path), why.to_owned()));
        }
        Ok(problems)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use object_store::memory::InMemory;
    use spotq_model::Generation;

    use super::*;
    use crate::conformance::{repository, request};
    use crate::manifest::root_of;
    use crate::{Pushed, Restore};

    #[test]
    fn a_report_has_a_bounded_number_of_findings() {
        let mut report = VerifyReport::default();
        assert!(report.is_sound());
        (0..=MAX_FINDINGS).for_each(|n| report.note(n.to_string(), "gone"));
        assert!(!report.is_sound());
        assert_eq!(report.findings.len(), MAX_FINDINGS);
        assert_eq!(report.findings[MAX_FINDINGS - 1].object, (MAX_FINDINGS - 1).to_string());
    }

    /// INV-05: what a bad machine wrote down wrongly is signed all the same.
    #[tokio::test(start_paused = true)]
    async fn sound_chunks_that_do_not_make_the_signed_file_are_damage() {
        let work = tempfile::tempdir().unwrap();
        let (source, target) = (work.path().join("source"), work.path().join("target"));
        std::fs::create_dir(&source).unwrap();
        std::fs::write(source.join("model"), b"state").unwrap();
        let repo = repository(Arc::new(InMemory::new()), &"job".into());
        let Ok(Pushed::Committed(good)) = repo.push(&source, &request(1, 1), &|_| {}).await else {
            panic!("the first push commits");
        };
        let head = repo.head().await.unwrap().unwrap();
        let mut wrong = (*repo.manifest(&head).await.unwrap()).clone();
        let Node::File { hash, .. } = &mut wrong.entries[0].node else { panic!("a file") };
        *hash = Digest::of(b"another state");
        wrong.root = root_of(&wrong.entries);
        repo.commit(wrong, 0, 0).await.unwrap();
        let report = repo.verify().await.unwrap();
        assert_eq!(report.findings.len(), 1, "{report:?}");
        assert!(report.findings[0].object == "file model" && report.files == 0, "{report:?}");
        match repo.restore(&target, Generation(1)).await.unwrap() {
            Restore::Restored(restored) => assert_eq!(restored.checkpoint, good.checkpoint),
            other => panic!("{other:?}"),
        }
        assert_eq!(std::fs::read(target.join("model")).unwrap(), b"state");
    }
}
