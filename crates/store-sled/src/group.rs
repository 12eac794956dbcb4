//! Collects appends that are committed together, in the order of their calls. It touches neither sled nor the writer's
//! state; large records go to their files while the group is built.

use spotq_model::{Epoch, Version};
use spotq_store::{Result, StoreError};

use crate::answers::Answer;
use crate::blobs::BlobDir;
use crate::layout::{Entry, INLINE_BYTES, Pack, Pair};
use crate::writer::Append;

/// The most appends in one commit, so that the first of them does not wait for ever.
const MAX_APPENDS: usize = 2048;

/// No append is added once a group has this many bytes; at the speed of a slow disk this is well below a second.
const MAX_BYTES: usize = 8 * 1024 * 1024;

/// What is committed next.
#[derive(Debug)]
pub(crate) struct Group {
    epoch: Epoch,
    next: u64,
    packs: Vec<Pack>,
    answers: Vec<Answer>,
    bytes: usize,
}

impl Group {
    /// An empty group after version `head`, of the leader with `epoch`.
    pub(crate) fn new(epoch: Epoch, head: u64) -> Self {
        Self { epoch, next: head, packs: Vec::new(), answers: Vec::new(), bytes: 0 }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.answers.len() >= MAX_APPENDS || self.bytes >= MAX_BYTES
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.answers.is_empty()
    }

    /// Adds an append, or notes why it is refused. Answers are given when the group is committed, because a refusal
    /// may name a version that is not durable before that.
    pub(crate) fn add(&mut self, append: Append, blobs: &BlobDir) {
        let Append { epoch, expected, records, bytes, appender } = append;
        self.bytes += bytes;
        let actual = Version(self.next);
        let result = if epoch != self.epoch {
            Err(StoreError::Fenced { epoch, by: self.epoch })
        } else if expected != actual {
            Err(StoreError::Conflict { expected, actual })
        } else {
            self.push(records, blobs)
        };
        self.answers.push((appender, result));
    }

    /// The bytes of the records, also of those that are refused.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The version after the group.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    pub(crate) fn packs(&self) -> &[Pack] {
        &self.packs
    }

    pub(crate) fn pairs(&self) -> Vec<Pair> {
        self.packs.iter().flat_map(Pack::pairs).collect()
    }

    /// What to tell the callers once the group is durable.
    pub(crate) fn committed(self) -> Vec<Answer> {
        self.answers
    }

    /// What to tell the callers when it was not written.
    pub(crate) fn failed(self, error: &StoreError) -> Vec<Answer> {
        let failed = self.answers.into_iter().map(|(appender, result)| match result {
            // A fence holds whatever the disk does; everything else depended on this commit.
            Err(fenced @ StoreError::Fenced { .. }) => (appender, Err(fenced)),
            _ => (appender, Err(error.clone())),
        });
        failed.collect()
    }

    fn push(&mut self, records: Vec<Vec<u8>>, blobs: &BlobDir) -> Result<Version> {
        // All large records are in their files before the first record is added, so that a failure adds none.
        let entries = records
            .into_iter()
            .map(|record| match record.len() {
                0..=INLINE_BYTES => Ok(Entry::Inline(record)),
                _ => blobs.put(&record).map(Entry::Blob),
            })
            .collect::<Result<Vec<_>>>()?;
        for entry in entries {
            if self.packs.last().is_none_or(Pack::is_full) {
                self.packs.push(Pack::new(self.next));
            }
            if let Some(pack) = self.packs.last_mut() {
                pack.push(&entry);
            }
            self.next += 1;
        }
        Ok(Version(self.next))
    }
}
