//! The durable memory of the scheduler: a log of opaque records, snapshots of what they add up to, and an archive
//! of finished tasks.
//!
//! A store deals in bytes. It must never look inside a record, never acknowledge what a power cut could take back,
//! and never accept a write of an older [`Epoch`] once a newer one was taken (INV-01, INV-12).
//!
//! Every implementation passes [`conformance::run`].

pub mod conformance;
mod error;
mod mem;
mod pending;

use std::fmt::Debug;

use async_trait::async_trait;
use spotq_model::{Epoch, Version};

pub use error::{Result, StoreError};
pub use mem::MemStore;
pub use pending::{Appender, Appending};

/// The largest record that a store takes. A job with a 1 MB script and a 500 KB environment fits many times over;
/// what is larger than this is a mistake, and would hold up every other writer.
pub const MAX_RECORD_BYTES: usize = 64 * 1024 * 1024;

/// The most records in one append; an array job of 100 000 members is one append with room to spare.
pub const MAX_APPEND_RECORDS: usize = 1 << 20;

/// The longest archive key in bytes. Keys are made of ids and times; embedded stores keep keys in memory.
pub const MAX_ARCHIVE_KEY_BYTES: usize = 512;

/// A log of records, numbered from 0 without gaps, with one writer at a time.
///
/// The version of a store is how many records were ever appended, so record `n` is the one that took the store from
/// version `n` to `n + 1`. Dropping old records behind a snapshot does not change any number.
#[async_trait]
pub trait Store: Send + Sync + Debug {
    /// Begins a new term: returns an epoch above every earlier one, durable when it returns. From then on appends and
    /// snapshots of an older epoch are refused with [`StoreError::Fenced`].
    async fn take_leadership(&self) -> Result<Epoch>;

    /// Appends `records` after version `expected`: all of them or none, durable when the result is there. The result
    /// is the version after the last of them.
    ///
    /// The append takes its place in the queue *when this is called*, not when the result is awaited, so a caller may
    /// start the next one (with the version that it expects by then) before this one is done: they are committed in
    /// call order, and when one fails, those that were built on it fail too. Dropping the result does not undo the
    /// append. No records is a valid append: it checks `epoch` and `expected`.
    ///
    /// Errors: [`StoreError::Conflict`] when the store is not at `expected`, [`StoreError::Fenced`] when a newer epoch
    /// was taken, [`StoreError::Busy`] when too much is queued already, [`StoreError::DiskFull`] when the store refused
    /// before writing; in these cases nothing was written. After [`StoreError::Failed`] or [`StoreError::Stopped`] the
    /// outcome is unknown until the store was opened again and [`Store::recover`] was asked.
    fn append(&self, epoch: Epoch, expected: Version, records: Vec<Vec<u8>>) -> Appending;

    /// Reads everything that is needed to go on: the newest good snapshot and all records after it, in order. It sees
    /// every append that was called before it.
    async fn recover(&self) -> Result<Recovered>;

    /// Keeps `bytes` as the sum of the first `version` records; durable when it returns. Records that no kept snapshot
    /// needs may be dropped after that, never before. A snapshot that is not newer than the kept one changes nothing.
    async fn snapshot(&self, epoch: Epoch, version: Version, bytes: Vec<u8>) -> Result<()>;

    /// Adds entries to the archive of finished tasks; durable when it returns. An entry with the key of an earlier
    /// one replaces it, so doing it twice is harmless.
    async fn archive(&self, entries: Vec<ArchiveEntry>) -> Result<()>;

    /// At most `limit` archive entries in the order of their keys (byte order), the first at or after `from_key`.
    async fn archived(&self, from_key: &str, limit: usize) -> Result<Vec<ArchiveEntry>>;
}

/// What [`Store::recover`] found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Recovered {
    /// The newest snapshot that could be read back.
    pub snapshot: Option<Snapshot>,
    /// The records after the snapshot (or all of them when there is none), oldest first.
    pub records: Vec<Vec<u8>>,
}

/// The sum of the first `version` records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    pub version: Version,
    pub bytes: Vec<u8>,
}

/// One finished task in the archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArchiveEntry {
    pub key: String,
    pub value: Vec<u8>,
}

impl Recovered {
    /// The number of the first of `records`.
    #[must_use]
    pub fn first_version(&self) -> Version {
        self.snapshot.as_ref().map_or(Version(0), |s| s.version)
    }

    /// The version of the store: what the next append must expect.
    #[must_use]
    pub fn version(&self) -> Version {
        Version(self.first_version().0 + self.records.len() as u64)
    }
}

/// Refuses what no store takes, so that all of them refuse the same. Errors: [`StoreError::TooLarge`].
pub fn check_records(records: &[Vec<u8>]) -> Result<()> {
    if records.len() > MAX_APPEND_RECORDS {
        return Err(StoreError::TooLarge {
            what: "append (records)",
            size: records.len() as u64,
            limit: MAX_APPEND_RECORDS as u64,
        });
    }
    match records.iter().map(Vec::len).max() {
        Some(size) if size > MAX_RECORD_BYTES => Err(StoreError::TooLarge {
            what: "record (bytes)",
            size: size as u64,
            limit: MAX_RECORD_BYTES as u64,
        }),
        _ => Ok(()),
    }
}

/// The same for archive entries. Errors: [`StoreError::TooLarge`].
pub fn check_archive(entries: &[ArchiveEntry]) -> Result<()> {
    for entry in entries {
        if entry.key.len() > MAX_ARCHIVE_KEY_BYTES {
            return Err(StoreError::TooLarge {
                what: "archive key (bytes)",
                size: entry.key.len() as u64,
                limit: MAX_ARCHIVE_KEY_BYTES as u64,
            });
        }
        if entry.value.len() > MAX_RECORD_BYTES {
            return Err(StoreError::TooLarge {
                what: "archive entry (bytes)",
                size: entry.value.len() as u64,
                limit: MAX_RECORD_BYTES as u64,
            });
        }
    }
    Ok(())
}
