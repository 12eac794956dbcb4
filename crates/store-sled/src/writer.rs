//! The one thread that writes. It drains the queue into a group, commits it with one batch, one flush and one
//! `fdatasync`, and only then answers. After a failed write it must never write again.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use spotq_model::{Epoch, Version};
use spotq_store::{Appender, ArchiveEntry, Recovered, Result, StoreError};
use tokio::sync::{mpsc, oneshot};

use crate::answers::AnswerDesk;
use crate::blobs::{BlobDir, Staged};
use crate::failure::{die, io_error, sled_error, sync_data};
use crate::group::Group;
use crate::layout::{self, INLINE_BYTES, Pair};
use crate::opening::Opened;
use crate::scan::{self, Contents, PackInfo};
use crate::watermark::Watermark;
use crate::{SledOptions, SyncMode};

/// How much room a commit must find per byte that it writes. sled rewrites a leaf a few times while it fills.
const WRITE_AMPLIFICATION: u64 = 4;

/// Archive entries are written in batches of about this many bytes, so that appends get their turn at the disk.
const ARCHIVE_BATCH_BYTES: usize = 1024 * 1024;

/// What the writer is asked.
#[derive(Debug)]
pub(crate) enum Command {
    Append(Append),
    Lead(oneshot::Sender<Result<Epoch>>),
    Recover(oneshot::Sender<Result<Recovered>>),
    Snapshot { epoch: Epoch, version: Version, staged: Staged, done: oneshot::Sender<Result<()>> },
    Archive { entries: Vec<ArchiveEntry>, done: oneshot::Sender<Result<()>> },
}

/// An append in the queue. `bytes` is the sum of its records.
#[derive(Debug)]
pub(crate) struct Append {
    pub(crate) epoch: Epoch,
    pub(crate) expected: Version,
    pub(crate) records: Vec<Vec<u8>>,
    pub(crate) bytes: usize,
    pub(crate) appender: Appender,
}

/// Starts the thread. It ends when all senders are gone.
pub(crate) fn start(
    opened: Opened,
    options: SledOptions,
    queue: mpsc::Receiver<Command>,
    queued_bytes: Arc<AtomicUsize>,
    answers: AnswerDesk,
) -> Result<JoinHandle<()>> {
    let dir = opened.dir.clone();
    let writer = Writer {
        dir: opened.dir,
        db: opened.db,
        sled_file: opened.sled_file,
        sled_path: opened.sled_path,
        blobs: opened.blobs,
        watermark: opened.watermark,
        contents: opened.contents,
        options,
        queued_bytes,
        answers,
        failed: None,
        _lock: opened.lock,
    };
    std::thread::Builder::new()
        .name("spotq-store".into())
        .spawn(move || writer.run(queue))
        .map_err(|error| io_error(&dir, "start of the writer", &error))
}

/// The field order is the order of dropping: the lock goes last.
struct Writer {
    dir: PathBuf,
    db: sled::Db,
    sled_file: File,
    sled_path: PathBuf,
    blobs: BlobDir,
    watermark: Watermark,
    contents: Contents,
    options: SledOptions,
    queued_bytes: Arc<AtomicUsize>,
    answers: AnswerDesk,
    /// Set by the first failed write.
    failed: Option<StoreError>,
    _lock: File,
}

impl Writer {
    fn run(mut self, mut queue: mpsc::Receiver<Command>) {
        while let Some(first) = queue.blocking_recv() {
            let mut group = self.new_group();
            let mut next = Some(first);
            while let Some(command) = next {
                match command {
                    Command::Append(append) => group.add(append, &self.blobs),
                    other => {
                        // Every command sees all appends that were called before it.
                        self.commit(group);
                        self.execute(other);
                        group = self.new_group();
                    }
                }
                next = if group.is_full() { None } else { queue.try_recv().ok() };
            }
            self.commit(group);
        }
    }

    fn new_group(&self) -> Group {
        Group::new(self.contents.epoch, self.contents.head)
    }

    fn execute(&mut self, command: Command) {
        // Whoever does not wait for the answer does not need it.
        match command {
            Command::Append(append) => {
                let mut group = self.new_group();
                group.add(append, &self.blobs);
                self.commit(group);
            }
            Command::Lead(done) => done.send(self.lead()).map_or_else(drop, |()| ()),
            Command::Recover(done) => done.send(self.recover()).map_or_else(drop, |()| ()),
            Command::Snapshot { epoch, version, staged, done } => self.snapshot(epoch, version, staged, done),
            Command::Archive { entries, done } => done.send(self.archive(entries)).map_or_else(drop, |()| ()),
        }
    }

    fn commit(&mut self, group: Group) {
        if group.is_empty() {
            return;
        }
        self.queued_bytes.fetch_sub(group.bytes(), Ordering::Relaxed);
        let pairs = group.pairs();
        let written = if pairs.is_empty() {
            self.failed.clone().map_or(Ok(()), Err)
        } else {
            self.ensure_room(&pairs).and_then(|()| self.write("append", pairs, &[]))
        };
        match written {
            Ok(()) => {
                for pack in group.packs() {
                    self.contents.use_blobs(&pack.blobs);
                    let info = PackInfo {
                        count: pack.count,
                        parts: pack.part_count() as u16,
                        blobs: pack.blobs.clone(),
                    };
                    self.contents.packs.insert(pack.first, info);
                }
                self.contents.head = group.next();
                self.watermark.raise(group.next());
                self.answers.answer(group.committed());
            }
            Err(error) => self.answers.answer(group.failed(&error)),
        }
    }

    fn lead(&mut self) -> Result<Epoch> {
        let epoch = self.contents.epoch.next();
        self.write("take leadership", vec![layout::epoch_pair(epoch.0)], &[])?;
        self.contents.epoch = epoch;
        Ok(epoch)
    }

    fn recover(&mut self) -> Result<Recovered> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        scan::recover(&self.db, &self.blobs, &self.dir, &self.contents)
    }

    fn snapshot(
        &mut self,
        epoch: Epoch,
        version: Version,
        staged: Staged,
        done: oneshot::Sender<Result<()>>,
    ) {
        let newest = self.contents.snapshots.last_key_value().map(|(&version, _)| version);
        let leader = self.contents.epoch;
        let head = Version(self.contents.head);
        let result = if epoch != leader {
            Err(StoreError::Fenced { epoch, by: leader })
        } else if version > head {
            Err(StoreError::Conflict { expected: version, actual: head })
        } else if newest.is_some_and(|newest| version.0 <= newest) {
            Ok(())
        } else {
            self.keep_snapshot(version.0, &staged)
        };
        let kept = result.is_ok();
        done.send(result).ok();
        if kept && let Err(error) = self.drop_unneeded() {
            tracing::warn!(dir = %self.dir.display(), %error, "could not drop old records");
        }
    }

    fn keep_snapshot(&mut self, version: u64, staged: &Staged) -> Result<()> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let blob = self.blobs.publish(staged)?;
        self.write("snapshot", vec![layout::snapshot_pair(version, &blob)], &[])?;
        self.contents.use_blobs(&[blob.hash]);
        // A snapshot of this version that could not be read is replaced by this one.
        if let Some(bad) = self.contents.bad_snapshots.remove(&version) {
            self.release(&[bad.hash]);
        }
        self.contents.snapshots.insert(version, blob);
        Ok(())
    }

    /// Removes snapshots before the last two, and the packs that only those needed. Files go after the references to
    /// them are gone from the device.
    fn drop_unneeded(&mut self) -> Result<()> {
        let mut old = std::mem::take(&mut self.contents.bad_snapshots);
        while self.contents.snapshots.len() > 2 {
            old.extend(self.contents.snapshots.pop_first());
        }
        let needed_from = self.contents.needed_from();
        let mut keys: Vec<_> = old.keys().map(|&version| layout::snapshot_key(version)).collect();
        let mut blobs: Vec<_> = old.values().map(|blob| blob.hash).collect();
        while let Some(pack) = self.contents.packs.first_entry()
            && pack.key() + u64::from(pack.get().count) <= needed_from
        {
            let (first, info) = pack.remove_entry();
            keys.extend((0..info.parts).map(|part| layout::record_key(first, part)));
            blobs.extend(info.blobs);
        }
        if !keys.is_empty() {
            self.write("drop of old records", Vec::new(), &keys)?;
        }
        self.release(&blobs);
        Ok(())
    }

    fn release(&mut self, hashes: &[[u8; 32]]) {
        for hash in hashes {
            if self.contents.release_blob(hash) {
                self.blobs.remove(hash);
            }
        }
    }

    fn archive(&mut self, entries: Vec<ArchiveEntry>) -> Result<()> {
        let mut pairs = Vec::new();
        let mut bytes = 0;
        for ArchiveEntry { key, value } in entries {
            bytes += key.len() + value.len().min(INLINE_BYTES);
            if value.len() <= INLINE_BYTES {
                pairs.extend(layout::archive_pairs(&key, &value));
            } else {
                let blob = self.blobs.put(&value)?;
                // Before anything else can release it.
                self.contents.archive_blobs.insert(blob.hash);
                pairs.push(layout::archive_blob_marker(&blob));
                pairs.push(layout::archive_blob_pair(&key, &blob));
            }
            if bytes >= ARCHIVE_BATCH_BYTES {
                self.write_archive(std::mem::take(&mut pairs))?;
                bytes = 0;
            }
        }
        self.write_archive(pairs)
    }

    fn write_archive(&mut self, pairs: Vec<Pair>) -> Result<()> {
        if pairs.is_empty() {
            return self.failed.clone().map_or(Ok(()), Err);
        }
        self.ensure_room(&pairs)?;
        self.write("archive", pairs, &[])
    }

    /// Refuses to begin what the disk has no room for: sled cannot go on after it ran out of space in the middle.
    fn ensure_room(&self, pairs: &[Pair]) -> Result<()> {
        if self.options.min_free_bytes == 0 {
            return Ok(());
        }
        let bytes: u64 = pairs.iter().map(|(key, value)| (key.len() + value.len()) as u64).sum();
        let needed = self.options.min_free_bytes + WRITE_AMPLIFICATION * bytes;
        let disk = rustix::fs::fstatvfs(&self.sled_file)
            .map_err(|error| io_error(&self.sled_path, "look at the free space", &error.into()))?;
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        if free >= needed {
            return Ok(());
        }
        Err(StoreError::DiskFull { path: self.dir.clone(), needed: needed - free })
    }

    /// Writes one batch durably. A failure is final.
    fn write(&mut self, operation: &str, pairs: Vec<Pair>, removed: &[Vec<u8>]) -> Result<()> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        if let Some(recorder) = &self.options.recorder
            && !pairs.is_empty()
        {
            recorder.record(&pairs);
        }
        let mut batch = sled::Batch::default();
        for (key, value) in pairs {
            batch.insert(key, value);
        }
        for key in removed {
            batch.remove(key.as_slice());
        }
        let written = self.db.apply_batch(batch).and_then(|()| self.db.flush());
        if let Err(error) = written {
            let io_failed = matches!(error, sled::Error::Io(_));
            let error = sled_error(&self.dir, operation, &error);
            // sled's flush waits for the device as well, so an I/O error other than "no room" is a failed sync.
            if io_failed && !matches!(error, StoreError::DiskFull { .. }) {
                die(&self.sled_path, operation, &error.to_string());
            }
            self.failed = Some(error.clone());
            return Err(error);
        }
        match self.options.sync {
            SyncMode::Device => sync_data(&self.sled_file, &self.sled_path),
            SyncMode::FlushOnly => {}
        }
        Ok(())
    }
}
