//! Restore: the newest sound checkpoint appears in a directory, whole and verified, or not at all.
//!
//! Everything is written beside the target and swapped into place by one rename (INV-05). A damaged checkpoint
//! is quarantined and the next older one is taken (INV-06). Must never take a failing disk or network for damage.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _};
use rustix::fs::{AtFlags, CWD, RenameFlags, Timespec, Timestamps};
use spotq_model::Generation;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use uuid::Uuid;

use crate::error::CheckpointError;
use crate::key::Digest;
use crate::log::{CheckpointSeq, Head, LogSeq};
use crate::manifest::{ChunkRef, Entry, Manifest, Node};
use crate::objects::{Task, blocking};
use crate::push::{BUDGET_UNITS, Progress, budget_units};
use crate::repo::Repository;

/// Room for inodes, directories and the file system's own needs, asked for beside the files' bytes.
const SPARE_BYTES: u64 = 16 << 20;
/// What an entry takes beside its bytes: a block of its own.
const BYTES_PER_ENTRY: u64 = 4096;
/// Marks a directory that is being written.
const STAGING: &str = "spotq-restoring";
/// Marks a directory that was swapped out.
const OLD: &str = "spotq-replaced";
/// Marks content that was found where nothing could be restored.
const ASIDE: &str = "spotq-aside";

/// How a restore ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Restore {
    Restored(Restored),
    /// There is no checkpoint to restore: the directory is empty and the job starts from its beginning.
    Nothing {
        /// Checkpoints that were there and are damaged. Not empty means that work was lost.
        fell_back: Vec<FellBack>,
        /// Where the directory's earlier content was moved, if it had any.
        set_aside: Option<PathBuf>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Restored {
    pub checkpoint: CheckpointSeq,
    pub log_seq: LogSeq,
    pub generation: Generation,
    pub step: Option<u64>,
    pub bytes: u64,
    /// When its files were written, as its writer said.
    pub created_at_ms: u64,
    pub manifest_hash: Digest,
    /// Newer checkpoints that are damaged.
    pub fell_back: Vec<FellBack>,
}

/// A checkpoint that was passed over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FellBack {
    pub checkpoint: CheckpointSeq,
    pub step: Option<u64>,
    pub object: String,
    pub why: String,
}

impl Repository {
    /// Makes `dir` hold exactly the newest sound checkpoint. What was in it before is removed, or moved beside
    /// it if there is nothing to restore.
    ///
    /// # Errors
    /// `Superseded`: another attempt owns the job. `NoSpace`, `Denied`, `Unavailable`: `dir` is as it was.
    pub async fn restore(&self, dir: &Path, generation: Generation) -> Result<Restore, CheckpointError> {
        self.restore_with(dir, generation, &|_| {}).await
    }

    /// [`Repository::restore`] with progress.
    ///
    /// # Errors
    /// As [`Repository::restore`].
    pub async fn restore_with(
        &self,
        dir: &Path,
        generation: Generation,
        progress: &(dyn Fn(Progress) + Send + Sync),
    ) -> Result<Restore, CheckpointError> {
        let mut fell_back: Vec<FellBack> = Vec::new();
        loop {
            // Each round quarantines one head, so that there are no more rounds than checkpoints.
            let view = self.fenced(generation).await?;
            let Some(head) = view.state.head() else {
                let target = Target::of(dir)?;
                let set_aside = blocking(move || target.set_aside()).await?;
                return Ok(Restore::Nothing { fell_back, set_aside });
            };
            match self.materialise(head, dir, progress).await {
                Ok(manifest) => return Ok(Restore::Restored(restored(head, &manifest, fell_back))),
                Err(CheckpointError::Corrupt { object, why }) => {
                    tracing::warn!(checkpoint = %head.checkpoint, %object, %why, "damaged checkpoint; falling back");
                    self.quarantine(generation, head.checkpoint, &format!("{object}: {why}")).await?;
                    fell_back.push(FellBack { checkpoint: head.checkpoint, step: head.step, object, why });
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Reads the newest sound checkpoint into `dir` without writing to the store: for people, who have no
    /// generation.
    ///
    /// # Errors
    /// `Invalid` if `dir` has content; otherwise as [`Repository::restore`].
    pub async fn pull(
        &self,
        dir: &Path,
        progress: &(dyn Fn(Progress) + Send + Sync),
    ) -> Result<Restore, CheckpointError> {
        let wanted = dir.to_path_buf();
        blocking(move || refuse_content(&wanted)).await?;
        let view = self.refresh().await?;
        let mut fell_back = Vec::new();
        for head in view.state.heads.iter().rev() {
            match self.materialise(head, dir, progress).await {
                Ok(manifest) => return Ok(Restore::Restored(restored(head, &manifest, fell_back))),
                Err(CheckpointError::Corrupt { object, why }) => {
                    fell_back.push(FellBack { checkpoint: head.checkpoint, step: head.step, object, why });
                }
                Err(e) => return Err(e),
            }
        }
        Ok(Restore::Nothing { fell_back, set_aside: None })
    }

    async fn materialise(
        &self,
        head: &Head,
        dir: &Path,
        progress: &(dyn Fn(Progress) + Send + Sync),
    ) -> Result<Arc<Manifest>, CheckpointError> {
        let manifest = self.read_manifest(head).await?;
        let target = Target::of(dir)?;
        let (checked, needed) = (Arc::clone(&manifest), target.clone());
        let staging = blocking(move || {
            needed.clear_leftovers();
            needed.check_space(&checked)?;
            Staging::create(&needed)
        })
        .await?;
        let mut writer = Writer::new(staging.path.clone());
        let mut pieces =
            self.pieces_of(manifest.entries.iter().flat_map(|e| e.chunks().iter().cloned()).collect());
        let mut done = 0;
        for (index, entry) in manifest.entries.iter().enumerate() {
            let (begun, mut next) = (Arc::clone(&manifest), writer);
            writer = blocking(move || next.begin(&begun.entries[index]).map(|()| next)).await?;
            for chunk in entry.chunks() {
                // The stream ends early only after an error, which `try_next` hands out first.
                let Some((bytes, permit)) = pieces.try_next().await? else { break };
                let mut next = writer;
                writer = blocking(move || next.write(&bytes).map(|()| next)).await?;
                drop(permit);
                done += chunk.len;
                let total = manifest.total_bytes;
                progress(Progress { bytes_total: total, bytes_done: done, bytes_transferred: done });
            }
            let (ended, mut next) = (Arc::clone(&manifest), writer);
            writer = blocking(move || next.end(&ended.entries[index]).map(|()| next)).await?;
        }
        drop(pieces);
        let finished = Arc::clone(&manifest);
        blocking(move || {
            finish(&staging.path, &finished)?;
            target.publish(staging)
        })
        .await?;
        Ok(manifest)
    }

    /// Chunks in the order given, verified, read ahead as far as the budget allows. Permits are
    /// handed out in that same order, so that the chunk that is needed next always has one.
    pub(crate) fn pieces_of(
        &self,
        chunks: Vec<ChunkRef>,
    ) -> impl futures::Stream<Item = Result<(Bytes, OwnedSemaphorePermit), CheckpointError>> + Unpin + use<>
    {
        let budget = Arc::new(Semaphore::new(self.options.chunks_in_flight * BUDGET_UNITS));
        let objects = self.objects.clone();
        let chunk_bytes = self.options.chunk_bytes;
        let permitted = futures::stream::iter(chunks).then(move |chunk| {
            let acquire = Arc::clone(&budget).acquire_many_owned(budget_units(chunk.len, chunk_bytes));
            async move { (chunk, acquire.await) }
        });
        let reads = permitted.map(move |(chunk, permit)| {
            let objects = objects.clone();
            Task::spawn(async move {
                let permit = permit.map_err(|e| CheckpointError::Unavailable {
                    what: "restore".to_owned(),
                    source: Box::new(e),
                })?;
                Ok((objects.chunk(&chunk).await?, permit))
            })
        });
        Box::pin(reads.buffered(self.options.requests_in_flight))
    }
}

/// Where a restore goes, and the names beside it that belong to the restore.
#[derive(Debug, Clone)]
struct Target {
    dir: PathBuf,
    parent: PathBuf,
    name: std::ffi::OsString,
}

/// What a file system has left; no number of inodes where it makes them as needed.
#[derive(Debug, Clone, Copy)]
struct Room {
    bytes: u64,
    inodes: Option<u64>,
}

/// A directory that is removed unless it is published.
#[derive(Debug)]
struct Staging {
    path: PathBuf,
    published: bool,
}

impl Target {
    fn of(dir: &Path) -> Result<Self, CheckpointError> {
        // A link to a directory is followed: the job may have asked for another disk.
        let resolved = fs::canonicalize(dir).or_else(|_| std::path::absolute(dir));
        let dir = resolved.map_err(|e| CheckpointError::io("resolve", dir, e))?;
        match (dir.parent(), dir.file_name()) {
            (Some(parent), Some(name)) => {
                Ok(Self { parent: parent.to_path_buf(), name: name.to_owned(), dir })
            }
            _ => Err(CheckpointError::invalid(
                dir.display().to_string(),
                "it cannot be restored into, as it has no name of its own; name a directory below it",
            )),
        }
    }

    fn beside(&self, mark: &str) -> PathBuf {
        self.parent.join(self.prefix(mark) + &Uuid::new_v4().simple().to_string())
    }

    /// Hidden, so that no framework takes it for a checkpoint.
    fn prefix(&self, mark: &str) -> String {
        format!(".{}.{mark}-", self.name.to_string_lossy())
    }

    /// Removes what a restore that was killed left behind. Best effort: leftovers cost space, not correctness.
    fn clear_leftovers(&self) {
        let Ok(listing) = fs::read_dir(&self.parent) else { return };
        let marks = [self.prefix(STAGING), self.prefix(OLD)];
        for item in listing.flatten() {
            let name = item.file_name();
            if marks.iter().any(|mark| name.to_string_lossy().starts_with(mark)) {
                remove_tree(&item.path());
            }
        }
    }

    fn check_space(&self, manifest: &Manifest) -> Result<(), CheckpointError> {
        fs::create_dir_all(&self.parent).map_err(|e| CheckpointError::io("create", &self.parent, e))?;
        let stat = rustix::fs::statvfs(&self.parent)
            .map_err(|e| CheckpointError::io("look for space in", &self.parent, e.into()))?;
        let room = Room {
            bytes: stat.f_bavail.saturating_mul(stat.f_frsize),
            // Some file systems make inodes as needed and say that they have none at all.
            inodes: (stat.f_files > 0).then_some(stat.f_favail),
        };
        match room.lacks(manifest.total_bytes, manifest.entries.len() as u64) {
            Some(why) => Err(CheckpointError::NoSpace { what: format!("{} {why}", self.parent.display()) }),
            None => Ok(()),
        }
    }

    /// Swaps the staging directory into place in one step, then removes what was there.
    fn publish(&self, mut staging: Staging) -> Result<(), CheckpointError> {
        let failed = |e: rustix::io::Errno| CheckpointError::io("publish", &self.dir, e.into());
        let replaced = self.beside(OLD);
        match rustix::fs::renameat_with(CWD, &staging.path, CWD, &self.dir, RenameFlags::NOREPLACE) {
            Ok(()) => staging.published = true,
            Err(rustix::io::Errno::EXIST) => {
                match rustix::fs::renameat_with(CWD, &staging.path, CWD, &self.dir, RenameFlags::EXCHANGE) {
                    // The old content now has the staging name; a crash here leaves it to `clear_leftovers`.
                    Ok(()) => {}
                    Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
                        self.swap_in_two_steps(&staging.path, &replaced)?;
                        staging.published = true;
                    }
                    Err(e) => return Err(failed(e)),
                }
            }
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
                self.swap_in_two_steps(&staging.path, &replaced)?;
                staging.published = true;
            }
            Err(e) => return Err(failed(e)),
        }
        sync_dir(&self.parent)?;
        remove_tree(&replaced);
        Ok(())
    }

    /// For file systems without exchange: the directory is missing for a moment, but never partial.
    fn swap_in_two_steps(&self, staging: &Path, replaced: &Path) -> Result<(), CheckpointError> {
        match fs::rename(&self.dir, replaced) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(CheckpointError::io("move aside", &self.dir, e));
            }
            _ => {}
        }
        fs::rename(staging, &self.dir).map_err(|e| CheckpointError::io("publish", &self.dir, e))
    }

    /// Leaves an empty directory; earlier content, which no checkpoint replaces, is kept beside it.
    fn set_aside(&self) -> Result<Option<PathBuf>, CheckpointError> {
        fs::create_dir_all(&self.parent).map_err(|e| CheckpointError::io("create", &self.parent, e))?;
        self.clear_leftovers();
        let has_content = match fs::read_dir(&self.dir) {
            Ok(mut listing) => listing.next().is_some(),
            Err(e) if e.kind() == io::ErrorKind::NotFound => false,
            Err(e) => return Err(CheckpointError::io("list", &self.dir, e)),
        };
        let aside = has_content.then(|| self.beside(ASIDE));
        if let Some(aside) = &aside {
            fs::rename(&self.dir, aside).map_err(|e| CheckpointError::io("move aside", &self.dir, e))?;
        }
        fs::create_dir_all(&self.dir).map_err(|e| CheckpointError::io("create", &self.dir, e))?;
        sync_dir(&self.parent)?;
        Ok(aside)
    }
}

impl Room {
    /// What a checkpoint of so many bytes and entries would lack.
    fn lacks(self, bytes: u64, entries: u64) -> Option<String> {
        let needed =
            bytes.saturating_add(entries.saturating_mul(BYTES_PER_ENTRY)).saturating_add(SPARE_BYTES);
        let enough = self.bytes >= needed && self.inodes.is_none_or(|inodes| inodes >= entries);
        let (free, inodes) = (self.bytes, self.inodes.map_or_else(|| "any".to_owned(), |n| n.to_string()));
        (!enough).then(|| {
            format!("has {free} bytes and {inodes} inodes free, the checkpoint needs {needed} and {entries}")
        })
    }
}

impl Staging {
    fn create(target: &Target) -> Result<Self, CheckpointError> {
        let path = target.beside(STAGING);
        // Nobody else may look at a half-written checkpoint.
        let created = fs::DirBuilder::new().mode(0o700).create(&path);
        created.map_err(|e| CheckpointError::io("create", &path, e))?;
        Ok(Self { path, published: false })
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.published {
            remove_tree(&self.path);
        }
    }
}

/// The file being written, on its way through the blocking pool.
struct Writer {
    root: PathBuf,
    file: Option<(PathBuf, fs::File)>,
    hasher: blake3::Hasher,
}

impl Writer {
    fn new(root: PathBuf) -> Self {
        Self { root, file: None, hasher: blake3::Hasher::new() }
    }

    fn begin(&mut self, entry: &Entry) -> Result<(), CheckpointError> {
        let path = self.root.join(entry.path.as_path());
        match &entry.node {
            Node::Dir => {
                let created = fs::DirBuilder::new().mode(0o700).create(&path);
                created.map_err(|e| CheckpointError::io("create", &path, e))
            }
            Node::Symlink { target } => {
                symlink(target.as_path(), &path).map_err(|e| CheckpointError::io("link", &path, e))
            }
            Node::File { .. } => {
                let opened = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
                let file = opened.map_err(|e| CheckpointError::io("create", &path, e))?;
                self.hasher.reset();
                self.file = Some((path, file));
                Ok(())
            }
        }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        self.hasher.update(bytes);
        match &mut self.file {
            Some((path, file)) => file.write_all(bytes).map_err(|e| CheckpointError::io("write", path, e)),
            None => {
                Err(CheckpointError::invalid("restore", "a chunk arrived for something that is not a file"))
            }
        }
    }

    /// Checks the whole file's hash and makes it durable.
    fn end(&mut self, entry: &Entry) -> Result<(), CheckpointError> {
        let (Node::File { hash, .. }, Some((path, file))) = (&entry.node, self.file.take()) else {
            return Ok(());
        };
        if Digest(*self.hasher.finalize().as_bytes()) != *hash {
            let why = "its chunks are sound but do not make the file that the manifest describes";
            return Err(CheckpointError::corrupt(format!("file {}", entry.path), why));
        }
        file.set_permissions(fs::Permissions::from_mode(entry.mode))
            .and_then(|()| file.sync_all())
            .map_err(|e| CheckpointError::io("sync", &path, e))
    }
}

/// Sets times and directory modes, and makes directories durable. Deepest first: what happens in a directory
/// changes its time, and one without write permission takes no more entries.
fn finish(root: &Path, manifest: &Manifest) -> Result<(), CheckpointError> {
    for entry in manifest.entries.iter().rev() {
        let path = root.join(entry.path.as_path());
        if matches!(entry.node, Node::Dir) {
            sync_dir(&path)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(entry.mode))
                .map_err(|e| CheckpointError::io("set mode of", &path, e))?;
        }
        let time = Timespec {
            tv_sec: entry.mtime_ns.div_euclid(1_000_000_000),
            tv_nsec: entry.mtime_ns.rem_euclid(1_000_000_000),
        };
        let times = Timestamps { last_access: time, last_modification: time };
        rustix::fs::utimensat(CWD, &path, &times, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|e| CheckpointError::io("set time of", &path, e.into()))?;
    }
    fs::set_permissions(root, fs::Permissions::from_mode(0o755))
        .map_err(|e| CheckpointError::io("set mode of", root, e))?;
    sync_dir(root)
}

fn restored(head: &Head, manifest: &Manifest, fell_back: Vec<FellBack>) -> Restored {
    Restored {
        checkpoint: head.checkpoint,
        log_seq: head.log_seq,
        created_at_ms: manifest.created_at_ms,
        manifest_hash: head.manifest_hash,
        generation: head.generation,
        step: head.step,
        bytes: head.bytes,
        fell_back,
    }
}

fn refuse_content(dir: &Path) -> Result<(), CheckpointError> {
    match fs::read_dir(dir).map(|mut listing| listing.next().is_none()) {
        Ok(true) => Ok(()),
        Ok(false) => Err(CheckpointError::invalid(
            dir.display().to_string(),
            "it is not empty and would be replaced; name a new directory",
        )),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(CheckpointError::io("list", dir, e)),
    }
}

fn sync_dir(dir: &Path) -> Result<(), CheckpointError> {
    fs::File::open(dir).and_then(|dir| dir.sync_all()).map_err(|e| CheckpointError::io("sync", dir, e))
}

/// Removes a tree, also one with directories that forbid it. Best effort: a leftover is hidden and removed by
/// the next restore.
fn remove_tree(path: &Path) {
    if fs::remove_dir_all(path).is_ok() || !path.exists() {
        return;
    }
    let mut to_open = vec![path.to_path_buf()];
    while let Some(dir) = to_open.pop() {
        let _ = fs::set_permissions(&dir, fs::Permissions::from_mode(0o700));
        let Ok(listing) = fs::read_dir(&dir) else { continue };
        let subdirs = listing.flatten().filter(|item| item.file_type().is_ok_and(|t| t.is_dir()));
        to_open.extend(subdirs.map(|item| item.path()));
    }
    if let Err(error) = fs::remove_dir_all(path) {
        tracing::warn!(path = %path.display(), %error, "a replaced directory could not be removed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_needed_for_bytes_for_entries_and_for_inodes() {
        let needed = 1000 + 3 * 4096 + (16 << 20);
        for (bytes, inodes, lacks) in [
            (needed, Some(3), false),
            (needed, None, false),
            (needed - 1, Some(3), true),
            (needed - 1, None, true),
            (needed, Some(2), true),
            (needed, Some(0), true),
        ] {
            let lacking = Room { bytes, inodes }.lacks(1000, 3);
            assert_eq!(lacking.is_some(), lacks, "{bytes} {inodes:?}: {lacking:?}");
        }
    }

    fn target(work: &Path) -> Target {
        Target::of(&work.join("job")).expect("a target")
    }

    #[test]
    fn leftovers_of_this_target_go_and_everything_else_beside_it_stays() {
        let work = tempfile::tempdir().unwrap();
        let stay =
            ["other", ".job", ".job.spotq-aside-1", ".jobs.spotq-restoring-1", "job.spotq-restoring-1"];
        let go = [".job.spotq-restoring-1", ".job.spotq-replaced-2"];
        for name in stay.iter().chain(&go) {
            fs::create_dir(work.path().join(name)).unwrap();
            fs::write(work.path().join(name).join("file"), b"x").unwrap();
        }
        target(work.path()).clear_leftovers();
        for name in stay {
            assert!(work.path().join(name).join("file").exists(), "{name}");
        }
        for name in go {
            assert!(!work.path().join(name).exists(), "{name}");
        }
    }

    /// File systems that cannot exchange two names are rare, and none of them need be at hand for this.
    #[test]
    fn without_exchange_the_old_content_goes_aside_before_the_new_takes_its_place() {
        let work = tempfile::tempdir().unwrap();
        let (staging, replaced) = (work.path().join("staging"), work.path().join("replaced"));
        let target = target(work.path());
        for (round, before) in [(1, None), (2, Some(b"1".to_vec()))] {
            fs::create_dir(&staging).unwrap();
            fs::write(staging.join("file"), round.to_string()).unwrap();
            target.swap_in_two_steps(&staging, &replaced).unwrap();
            assert_eq!(fs::read(target.dir.join("file")).unwrap(), round.to_string().into_bytes());
            assert_eq!(fs::read(replaced.join("file")).ok(), before, "round {round}");
            assert!(!staging.exists());
        }
        fs::create_dir(&staging).unwrap();
        let stuck = target.swap_in_two_steps(&staging, &target.dir.join("file/below"));
        assert!(stuck.unwrap_err().to_string().contains("move aside"), "what cannot go aside stays");
        assert!(target.dir.join("file").exists() && staging.exists());
    }
}
