//! The checkpoint store of each job: a log written with put-if-absent only, and the objects behind it. What the log
//! means is asked of the shipped `fold`.

use spotq_checkpoint::{Action, CheckpointSeq, Digest, Head, LogEntry, LogSeq, LogState, fold};
use spotq_model::Generation;
use uuid::Uuid;

/// What is under the prefix of one job.
#[derive(Debug, Default)]
pub(crate) struct Objects {
    pub log: Vec<LogEntry>,
    saved: Vec<Saved>,
}

/// The bytes of a checkpoint, as far as they matter here.
#[derive(Debug, Clone, Copy)]
struct Saved {
    checkpoint: u64,
    step: u64,
    corrupt: bool,
}

impl Objects {
    /// The log as its readers see it.
    pub(crate) fn state(&self) -> LogState {
        fold(&self.log)
    }

    /// Writes the entry with the number after `seen`, if nobody has.
    pub(crate) fn put(&mut self, seen: usize, generation: Generation, action: Action) -> bool {
        if self.log.len() != seen {
            return false;
        }
        self.log.push(LogEntry {
            seq: LogSeq(seen as u64 + 1),
            generation,
            writer_nonce: Uuid::nil(),
            prev_hash: Digest::ZERO,
            action,
        });
        true
    }

    /// The bytes of a checkpoint; `None` if they are not what was saved.
    pub(crate) fn read(&self, checkpoint: CheckpointSeq) -> Option<u64> {
        let found = self.saved.iter().find(|saved| saved.checkpoint == checkpoint.0)?;
        (!found.corrupt).then_some(found.step)
    }

    /// Writes an object; one that is there already stays as it is.
    pub(crate) fn save(&mut self, checkpoint: CheckpointSeq, step: u64) {
        if !self.saved.iter().any(|saved| saved.checkpoint == checkpoint.0) {
            self.saved.push(Saved { checkpoint: checkpoint.0, step, corrupt: false });
        }
    }

    /// Damages the newest checkpoint that is whole; says whether there was one.
    pub(crate) fn corrupt(&mut self) -> bool {
        match self.saved.iter_mut().rev().find(|saved| !saved.corrupt) {
            Some(saved) => {
                saved.corrupt = true;
                true
            }
            None => false,
        }
    }

    /// How many checkpoints above this one were found damaged, by whichever attempt.
    pub(crate) fn set_aside_above(&self, checkpoint: u64) -> u32 {
        let above = self.log.iter().enumerate().filter(|(at, e)| {
            let it = matches!(&e.action, Action::Quarantine { checkpoint: c, .. } if c.0 > checkpoint);
            it && !self.shut_out(e.generation, *at)
        });
        above.count() as u32
    }

    /// Whether a fence before its entry shut the writer of this checkpoint out.
    pub(crate) fn is_void(&self, checkpoint: u64) -> bool {
        let commits =
            |e: &LogEntry| matches!(&e.action, Action::Commit { checkpoint: c, .. } if c.0 == checkpoint);
        self.log.iter().position(commits).is_some_and(|at| self.shut_out(self.log[at].generation, at))
    }

    fn shut_out(&self, writer: Generation, before: usize) -> bool {
        self.log[..before].iter().any(|e| matches!(e.action, Action::Fence) && e.generation > writer)
    }

    /// What counts, told from the log without the shipped `fold`: the newest commit of a generation that no fence
    /// before it shut out, and that nobody found damaged.
    pub(crate) fn head_by_hand(&self) -> Option<(u64, u64)> {
        let mut best = None;
        for (at, entry) in self.log.iter().enumerate() {
            let Action::Commit { checkpoint, step, .. } = &entry.action else { continue };
            let damaged = self.log.iter().enumerate().any(|(n, e)| {
                let it = matches!(&e.action, Action::Quarantine { checkpoint: c, .. } if c == checkpoint);
                it && !self.shut_out(e.generation, n)
            });
            if !self.shut_out(entry.generation, at) && !damaged {
                best = Some((checkpoint.0, step.unwrap_or(0)));
            }
        }
        best
    }
}

/// The action that commits a checkpoint.
pub(crate) fn commit(checkpoint: CheckpointSeq, step: u64) -> Action {
    Action::Commit {
        checkpoint,
        manifest: String::new(),
        manifest_hash: Digest::ZERO,
        bytes: 1000,
        step: Some(step),
    }
}

/// A head as it is reported.
pub(crate) fn reported(head: &Head, saved_at: u64) -> spotq_model::Checkpoint {
    spotq_model::Checkpoint {
        sequence: head.checkpoint.0,
        log_sequence: head.log_seq.0,
        generation: head.generation,
        step: head.step,
        bytes_total: head.bytes,
        bytes_uploaded: head.bytes,
        saved_at: spotq_model::Timestamp(saved_at),
        manifest_hash: String::new(),
    }
}
