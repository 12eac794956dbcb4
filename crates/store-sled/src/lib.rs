//! The embedded durable store: sled 0.34.7 behind one writer thread.
//!
//! sled's `flush()` is not an fsync on Linux, and it writes large page fragments to files that it never syncs. So this
//! crate must never acknowledge before `fdatasync` on sled's file, never give sled a value that could make such a
//! fragment, never hide damaged bytes, and never go on after a failed sync.
//!
//! In the directory: `lock` (one process at a time), `format`, `sled/` (sled's own files), `blobs/` (large records and
//! snapshots by content), `acked` (a version that was surely reached). While a store is opened there is also
//! `sled-before-opening`, and after it was found damaged `sled-found-damaged`: sled's files as they were found.

mod answers;
pub mod bench;
mod blobs;
mod failure;
mod group;
mod layout;
mod opening;
mod original;
mod scan;
mod watermark;
mod writer;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use async_trait::async_trait;
use spotq_model::{Epoch, Version};
use spotq_store::{
    Appending, ArchiveEntry, Recovered, Result, Store, StoreError, check_archive, check_records,
};
use tokio::sync::{mpsc, oneshot};

pub use bench::{BatchRecorder, bare_group_commit};

use crate::answers::AnswerDesk;
use crate::blobs::BlobDir;
use crate::writer::Command;

/// The most commands that wait for the writer. One group commit takes at most a quarter of them; a caller that finds
/// the queue full is far ahead of the disk and is told so.
const MAX_QUEUED_COMMANDS: usize = 8 * 1024;

/// The most bytes of records that wait for the writer, so that a slow disk cannot use up the memory.
const MAX_QUEUED_BYTES: usize = 512 * 1024 * 1024;

/// How to open a store.
#[derive(Debug, Clone)]
pub struct SledOptions {
    /// The size of sled's page cache in bytes. Everything is read once at start, so it is kept small.
    pub cache_bytes: u64,
    /// Appends are refused as [`StoreError::DiskFull`] while the disk has less than this free, because sled cannot go
    /// on after a write that found no room. 0 turns the check off.
    pub min_free_bytes: u64,
    /// Keeps a copy of each group commit for [`bare_group_commit`].
    pub recorder: Option<BatchRecorder>,
    /// What an acknowledgement waits for.
    #[doc(hidden)]
    pub sync: SyncMode,
}

/// What an acknowledgement waits for.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SyncMode {
    /// The device. The only mode that keeps the promise of the store.
    Device,
    /// sled's own `flush()`, to show that the power-cut test notices what is missing.
    FlushOnly,
}

/// A store in a directory. Dropping it waits until all that was queued is written and the directory is free again.
#[derive(Debug)]
pub struct SledStore {
    dir: PathBuf,
    /// Always there until the store is dropped.
    sender: Option<mpsc::Sender<Command>>,
    queued_bytes: Arc<AtomicUsize>,
    writer: Option<JoinHandle<()>>,
    tree: sled::Tree,
    blobs: BlobDir,
    answers: AnswerDesk,
}

impl Default for SledOptions {
    fn default() -> Self {
        Self {
            cache_bytes: 16 * 1024 * 1024,
            // Room for several of sled's segments of 512 KiB; on the smallest volumes it is not missed.
            min_free_bytes: 4 * 1024 * 1024,
            recorder: None,
            sync: SyncMode::Device,
        }
    }
}

impl SledStore {
    /// Opens the store in `dir` and creates both where they are missing. It reads what is there and checks it, so it
    /// blocks; call it before the runtime is busy.
    ///
    /// Errors: [`StoreError::InUse`], [`StoreError::NotADirectory`], [`StoreError::ReadOnly`],
    /// [`StoreError::DiskFull`], [`StoreError::UnknownFormat`], [`StoreError::Corrupt`].
    pub fn open(dir: &Path, options: SledOptions) -> Result<Self> {
        let opened = opening::open(dir, &options)?;
        let (sender, receiver) = mpsc::channel(MAX_QUEUED_COMMANDS);
        let queued_bytes = Arc::new(AtomicUsize::new(0));
        let tree = (*opened.db).clone();
        let blobs = opened.blobs.clone();
        let answers = AnswerDesk::default();
        let writer = writer::start(opened, options, receiver, Arc::clone(&queued_bytes), answers.clone())?;
        Ok(Self {
            dir: dir.to_owned(),
            sender: Some(sender),
            queued_bytes,
            writer: Some(writer),
            tree,
            blobs,
            answers,
        })
    }

    /// Where the store is.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Sends a command and waits for its answer.
    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<Result<T>>) -> Command) -> Result<T> {
        let (sender, receiver) = oneshot::channel();
        let queue = self.sender.as_ref().ok_or(StoreError::Stopped)?;
        queue.send(command(sender)).await.map_err(|_| StoreError::Stopped)?;
        receiver.await.unwrap_or(Err(StoreError::Stopped))
    }

    fn queue_append(&self, command: Command, bytes: usize) -> Result<()> {
        let queue = self.sender.as_ref().ok_or(StoreError::Stopped)?;
        let before = self.queued_bytes.fetch_add(bytes, Ordering::Relaxed);
        let room = before == 0 || before.saturating_add(bytes) <= MAX_QUEUED_BYTES;
        let sent = if room { queue.try_send(command) } else { Err(mpsc::error::TrySendError::Full(command)) };
        sent.map_err(|error| {
            self.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
            match error {
                mpsc::error::TrySendError::Full(_) => {
                    StoreError::Busy { queued: MAX_QUEUED_COMMANDS.saturating_sub(queue.capacity()) }
                }
                mpsc::error::TrySendError::Closed(_) => StoreError::Stopped,
            }
        })
    }
}

#[async_trait]
impl Store for SledStore {
    async fn take_leadership(&self) -> Result<Epoch> {
        self.ask(Command::Lead).await
    }

    fn append(&self, epoch: Epoch, expected: Version, records: Vec<Vec<u8>>) -> Appending {
        if let Err(error) = check_records(&records) {
            return Appending::ready(Err(error));
        }
        self.answers.attach();
        let bytes = records.iter().map(Vec::len).sum();
        let (appender, appending) = Appending::pair();
        let command = Command::Append(writer::Append { epoch, expected, records, bytes, appender });
        match self.queue_append(command, bytes) {
            Ok(()) => appending,
            Err(error) => Appending::ready(Err(error)),
        }
    }

    async fn recover(&self) -> Result<Recovered> {
        self.ask(Command::Recover).await
    }

    async fn snapshot(&self, epoch: Epoch, version: Version, bytes: Vec<u8>) -> Result<()> {
        // Writing and syncing a large file takes a while, so it is done beside the writer; the writer only publishes it.
        let blobs = self.blobs.clone();
        let staged = blocking(move || blobs.stage(&bytes)).await?;
        self.ask(|done| Command::Snapshot { epoch, version, staged, done }).await
    }

    async fn archive(&self, entries: Vec<ArchiveEntry>) -> Result<()> {
        check_archive(&entries)?;
        self.ask(|done| Command::Archive { entries, done }).await
    }

    async fn archived(&self, from_key: &str, limit: usize) -> Result<Vec<ArchiveEntry>> {
        let (tree, blobs, dir, from_key) =
            (self.tree.clone(), self.blobs.clone(), self.dir.clone(), from_key.to_owned());
        blocking(move || scan::archived(&tree, &blobs, &dir, &from_key, limit)).await
    }
}

impl Drop for SledStore {
    fn drop(&mut self) {
        // The writer ends when its queue is closed and empty; after that nothing holds the lock.
        self.sender = None;
        if let Some(writer) = self.writer.take()
            && writer.join().is_err()
        {
            tracing::error!(dir = %self.dir.display(), "the store's writer had panicked");
        }
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    // The task fails to join only when it panicked or when the runtime is going down.
    tokio::task::spawn_blocking(work).await.unwrap_or(Err(StoreError::Stopped))
}
