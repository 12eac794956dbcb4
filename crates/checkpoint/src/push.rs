//! Push: a directory becomes a committed checkpoint, or nothing happens that a reader can see.
//!
//! Chunks, then manifest, then one put-if-absent in the log. Must never commit files that changed meanwhile.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use spotq_model::{Generation, Profile};
use tokio::sync::Semaphore;

use crate::error::CheckpointError;
use crate::key::{Digest, Keys};
use crate::log::{Action, CheckpointSeq, Head, LogSeq};
use crate::manifest::{ChunkRef, Entry, Manifest, Node, SCHEMA, root_of};
use crate::objects::{Task, blocking};
use crate::repo::{MAX_LOST_RACES, Offer, Repository, lost_too_often};
use crate::scan::{Candidate, FileStat, ScannedEntry, ScannedNode, Selection, vanished};

/// What to write beside the files.
#[derive(Debug, Clone)]
pub struct PushRequest {
    pub generation: Generation,
    /// The training step that the files hold, if known.
    pub step: Option<u64>,
    pub profile: Profile,
    /// Milliseconds since the Unix epoch.
    pub created_at_ms: u64,
    pub selection: Selection,
}

/// How far a transfer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    pub bytes_total: u64,
    /// Of the total: on the other side, or known to be there already.
    pub bytes_done: u64,
    /// Really transferred.
    pub bytes_transferred: u64,
}

/// How a push ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pushed {
    Committed(Committed),
    /// The files are those of this checkpoint: nothing was written.
    Unchanged(Head),
}

/// A checkpoint that any later attempt can restore.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    pub checkpoint: CheckpointSeq,
    pub log_seq: LogSeq,
    pub step: Option<u64>,
    pub bytes_total: u64,
    pub bytes_uploaded: u64,
    pub manifest_hash: Digest,
    /// Left out, because a checkpoint cannot hold them: sockets, pipes, devices.
    pub skipped: usize,
}

impl Repository {
    /// Scans `dir` and pushes what `request.selection` takes of it.
    ///
    /// # Errors
    /// `Superseded`: stop the job. `Changed`: push again when the job has finished writing. After any error the
    /// old head still counts; only after `Unavailable` may the commit have succeeded all the same, which the
    /// next push finds out.
    pub async fn push(
        &self,
        dir: &Path,
        request: &PushRequest,
        progress: &(dyn Fn(Progress) + Send + Sync),
    ) -> Result<Pushed, CheckpointError> {
        let candidate = self.scan(dir, &request.selection).await?;
        self.push_candidate(candidate, request, progress).await
    }

    /// Pushes exactly what was scanned before. Any change since then is `Changed`: a single file is not simply
    /// read again, because the files of a checkpoint belong together.
    ///
    /// # Errors
    /// As [`Repository::push`].
    pub async fn push_candidate(
        &self,
        candidate: Candidate,
        request: &PushRequest,
        progress: &(dyn Fn(Progress) + Send + Sync),
    ) -> Result<Pushed, CheckpointError> {
        let view = self.fenced(request.generation).await?;
        let parent = match view.state.head() {
            Some(head) => self.parent_of(head).await?.map(|manifest| (head.clone(), manifest)),
            None => None,
        };
        let known = parent.as_ref().map(|(_, manifest)| manifest.chunk_names()).unwrap_or_default();
        let skipped = candidate.skipped.len();
        let mut upload = Upload::new(self, known, candidate.total_bytes, progress);
        let candidate = Arc::new(candidate);
        let mut entries = Vec::with_capacity(candidate.entries.len());
        for scanned in &candidate.entries {
            entries.push(upload.entry(&candidate.root, scanned).await?);
        }
        upload.drain(0).await?;
        let checked = Arc::clone(&candidate);
        blocking(move || recheck(&checked)).await?;
        let root = root_of(&entries);
        if let Some((head, _)) = parent.as_ref().filter(|(_, manifest)| manifest.root == root) {
            return Ok(Pushed::Unchanged(head.clone()));
        }
        let manifest = Manifest {
            schema: SCHEMA,
            checkpoint: view.state.next_checkpoint,
            generation: request.generation,
            profile: request.profile,
            step: request.step,
            created_at_ms: request.created_at_ms,
            parent: parent.map(|(head, _)| head.checkpoint),
            total_bytes: candidate.total_bytes,
            root,
            entries,
        };
        manifest
            .check()
            .map_err(|why| CheckpointError::invalid(candidate.root.display().to_string(), why))?;
        let bytes_uploaded = upload.transferred;
        self.commit(manifest, bytes_uploaded, skipped).await.map(Pushed::Committed)
    }

    /// Writes the manifest and its log entry. Every lost race is another writer's success; the number of the
    /// checkpoint is then drawn again, so that no two manifests share one.
    pub(crate) async fn commit(
        &self,
        mut manifest: Manifest,
        bytes_uploaded: u64,
        skipped: usize,
    ) -> Result<Committed, CheckpointError> {
        for _ in 0..MAX_LOST_RACES {
            let view = self.fenced(manifest.generation).await?;
            manifest.checkpoint = view.state.next_checkpoint;
            let sealed = manifest.seal(&self.objects.keys);
            let (name, hash, bytes) =
                sealed.map_err(|e| CheckpointError::invalid("manifest", e.to_string()))?;
            self.objects.put_addressed(&name, Bytes::from(bytes)).await?;
            let action = Action::Commit {
                checkpoint: manifest.checkpoint,
                manifest: name.clone(),
                manifest_hash: hash,
                bytes: manifest.total_bytes,
                step: manifest.step,
            };
            if let Offer::Won(log_seq) = self.offer(&view, manifest.generation, action).await? {
                let committed = Committed {
                    checkpoint: manifest.checkpoint,
                    log_seq,
                    step: manifest.step,
                    bytes_total: manifest.total_bytes,
                    bytes_uploaded,
                    manifest_hash: hash,
                    skipped,
                };
                self.remember(&name, &Arc::new(manifest));
                return Ok(committed);
            }
        }
        Err(lost_too_often("commit"))
    }

    /// The head's manifest, to share chunks with. A damaged one is no reason not to save: without it, every
    /// chunk is uploaded.
    async fn parent_of(&self, head: &Head) -> Result<Option<Arc<Manifest>>, CheckpointError> {
        match self.manifest(head).await {
            Ok(manifest) => Ok(Some(manifest)),
            Err(CheckpointError::Corrupt { object, why }) => {
                tracing::warn!(%object, %why, "the newest checkpoint's manifest is damaged; uploading everything");
                Ok(None)
            }
            Err(e) => Err(e),
        }
    }
}

/// Uploads in flight. Bytes are bounded by a semaphore, requests by their number.
struct Upload<'a> {
    repo: &'a Repository,
    /// Chunks that need no upload: the parent's, and those of this push.
    known: BTreeSet<Digest>,
    in_flight: FuturesUnordered<Task<u64>>,
    budget: Arc<Semaphore>,
    progress: &'a (dyn Fn(Progress) + Send + Sync),
    total: u64,
    done: u64,
    transferred: u64,
}

impl<'a> Upload<'a> {
    fn new(
        repo: &'a Repository,
        known: BTreeSet<Digest>,
        total: u64,
        progress: &'a (dyn Fn(Progress) + Send + Sync),
    ) -> Self {
        let budget = Arc::new(Semaphore::new(repo.options.chunks_in_flight * BUDGET_UNITS));
        Self {
            repo,
            known,
            in_flight: FuturesUnordered::new(),
            budget,
            progress,
            total,
            done: 0,
            transferred: 0,
        }
    }

    async fn entry(&mut self, root: &Path, scanned: &ScannedEntry) -> Result<Entry, CheckpointError> {
        let node = match &scanned.node {
            ScannedNode::Dir => Node::Dir,
            ScannedNode::Symlink(target) => Node::Symlink { target: target.clone() },
            ScannedNode::File => self.file(root.join(scanned.path.as_path()), scanned.stat).await?,
        };
        // Set-uid, set-gid and sticky bits have no place in a checkpoint and are not restored either.
        let mode = scanned.stat.mode & 0o777;
        Ok(Entry { path: scanned.path.clone(), mode, mtime_ns: scanned.stat.mtime_ns, node })
    }

    /// Reads a file chunk by chunk: one buffer at a time is read and hashed while others are sent.
    async fn file(&mut self, path: PathBuf, stat: FileStat) -> Result<Node, CheckpointError> {
        let keys = self.repo.objects.keys.clone();
        let mut reader =
            Reader { path, stat, file: None, hasher: blake3::Hasher::new(), left: stat.size, keys };
        let mut chunks = Vec::new();
        while reader.left > 0 {
            let len = reader.left.min(self.repo.options.chunk_bytes as u64);
            let units = budget_units(len, self.repo.options.chunk_bytes);
            self.drain(self.repo.options.requests_in_flight - 1).await?;
            let permit = loop {
                match Arc::clone(&self.budget).try_acquire_many_owned(units) {
                    Ok(permit) => break permit,
                    // Not a spin: with nothing in flight the whole budget is free.
                    Err(_) => self.drain(self.in_flight.len().saturating_sub(1)).await?,
                }
            };
            let (next, name, bytes) = blocking(move || reader.next(len)).await?;
            reader = next;
            let chunk = ChunkRef { name, len, at: 0 };
            if self.known.insert(name) {
                let (objects, object) = (self.repo.objects.clone(), chunk.object());
                self.in_flight.push(Task::spawn(async move {
                    objects.put_addressed(&object, bytes).await?;
                    drop(permit);
                    Ok(len)
                }));
            } else {
                self.advance(len, 0);
            }
            chunks.push(chunk);
        }
        Ok(Node::File { size: stat.size, hash: Digest(*reader.hasher.finalize().as_bytes()), chunks })
    }

    /// Waits until at most `most` uploads are in flight.
    async fn drain(&mut self, most: usize) -> Result<(), CheckpointError> {
        while self.in_flight.len() > most {
            match self.in_flight.next().await {
                Some(sent) => {
                    let len = sent?;
                    self.advance(len, len);
                }
                None => break,
            }
        }
        Ok(())
    }

    fn advance(&mut self, done: u64, transferred: u64) {
        self.done += done;
        self.transferred += transferred;
        let now =
            Progress { bytes_total: self.total, bytes_done: self.done, bytes_transferred: self.transferred };
        (self.progress)(now);
    }
}

/// The budget is counted in parts of a chunk, so that many small files fit where one chunk would.
pub(crate) const BUDGET_UNITS: usize = 256;

/// How much of the budget `len` bytes take: never nothing, never more than one chunk's worth.
pub(crate) fn budget_units(len: u64, chunk_bytes: usize) -> u32 {
    let unit = (chunk_bytes as u64).div_ceil(BUDGET_UNITS as u64).max(1);
    let units = len.div_ceil(unit).clamp(1, BUDGET_UNITS as u64);
    u32::try_from(units).expect("clamped to 256 above")
}

/// An open file on its way through the blocking pool.
struct Reader {
    path: PathBuf,
    stat: FileStat,
    file: Option<File>,
    hasher: blake3::Hasher,
    left: u64,
    keys: Keys,
}

impl Reader {
    fn next(mut self, len: u64) -> Result<(Self, Digest, Bytes), CheckpointError> {
        let mut file = match self.file.take() {
            Some(file) => file,
            None => open_unchanged(&self.path, &self.stat)?,
        };
        let too_long = |_| CheckpointError::invalid("push", "a chunk does not fit into memory");
        let mut buffer = vec![0; usize::try_from(len).map_err(too_long)?];
        file.read_exact(&mut buffer).map_err(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => CheckpointError::Changed { path: self.path.clone() },
            _ => CheckpointError::io("read", &self.path, e),
        })?;
        self.hasher.update(&buffer);
        let name = self.keys.chunk_name(&buffer);
        self.left -= len;
        self.file = Some(file);
        Ok((self, name, Bytes::from(buffer)))
    }
}

/// Opens the file that was scanned, and no other: not through a link put in its place, not a new one.
fn open_unchanged(path: &Path, stat: &FileStat) -> Result<File, CheckpointError> {
    let changed = || CheckpointError::Changed { path: path.to_path_buf() };
    // Without NONBLOCK, a pipe put in the file's place would hold us for ever.
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let flags = i32::try_from(flags.bits()).expect("flags of open fit an int");
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(|e| {
        let replaced = e.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error());
        if replaced { changed() } else { vanished("open", path, e) }
    })?;
    let meta = file.metadata().map_err(|e| io("stat", path, e))?;
    if FileStat::of(&meta) == *stat { Ok(file) } else { Err(changed()) }
}

/// Fails unless every file and link is still the one that was scanned. Directories may gain other files: a job
/// may already be writing the next checkpoint beside this one.
fn recheck(candidate: &Candidate) -> Result<(), CheckpointError> {
    for entry in &candidate.entries {
        let path = candidate.root.join(entry.path.as_path());
        let meta = std::fs::symlink_metadata(&path).map_err(|e| vanished("stat", &path, e))?;
        let same = match &entry.node {
            ScannedNode::Dir => meta.is_dir(),
            ScannedNode::File | ScannedNode::Symlink(_) => FileStat::of(&meta) == entry.stat,
        };
        if !same {
            return Err(CheckpointError::Changed { path });
        }
    }
    Ok(())
}

fn io(operation: &str, path: &Path, error: std::io::Error) -> CheckpointError {
    CheckpointError::io(operation, path, error)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;
    use crate::key::JobKey;
    use crate::scan::scan;

    #[test]
    fn the_budget_counts_parts_of_a_chunk_and_never_nothing() {
        for (len, units) in [(0, 1), (1, 1), (4, 1), (5, 2), (512, 128), (1024, 256), (5000, 256)] {
            assert_eq!(budget_units(len, 1024), units, "{len} bytes");
        }
        assert_eq!(budget_units(1, 1), 1, "chunks of a byte");
    }

    type Change = fn(&Path);
    /// What may become of the file `d/a` after the scan.
    const CHANGES: [(&str, Change); 6] = [
        ("removed", |dir| fs::remove_file(dir.join("d/a")).expect("test file")),
        ("its directory is a file", |dir| {
            fs::remove_dir_all(dir.join("d")).expect("test directory");
            fs::write(dir.join("d"), b"x").expect("test file");
        }),
        ("rewritten", |dir| fs::write(dir.join("d/a"), b"other").expect("test file")),
        ("replaced by an equal one", |dir| {
            fs::write(dir.join("new"), b"state").expect("test file");
            fs::rename(dir.join("new"), dir.join("d/a")).expect("test file");
        }),
        ("a link", |dir| {
            fs::rename(dir.join("d/a"), dir.join("b")).expect("test file");
            std::os::unix::fs::symlink("../b", dir.join("d/a")).expect("test link");
        }),
        // An open that waits for somebody to write into it would never end.
        ("a pipe", |dir| {
            fs::remove_file(dir.join("d/a")).expect("test file");
            mknodat(CWD, dir.join("d/a"), FileType::Fifo, Mode::RUSR, 0).expect("a pipe can be made");
        }),
    ];

    #[test]
    fn only_the_file_that_was_scanned_is_read_and_counts_in_the_end() {
        for (what, change) in CHANGES {
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir(dir.path().join("d")).unwrap();
            let path = dir.path().join("d/a");
            fs::write(&path, b"state").unwrap();
            let candidate = scan(dir.path(), &Selection::default()).unwrap();
            let stat = candidate.entries[1].stat;
            open_unchanged(&path, &stat).unwrap();
            recheck(&candidate).unwrap();
            change(dir.path());
            let opened = open_unchanged(&path, &stat);
            assert!(matches!(opened, Err(CheckpointError::Changed { .. })), "{what}: {opened:?}");
            let checked = recheck(&candidate);
            assert!(matches!(checked, Err(CheckpointError::Changed { .. })), "{what}: {checked:?}");
        }
    }

    #[test]
    fn a_file_that_becomes_shorter_while_it_is_read_has_changed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        fs::write(&path, [1; 100]).unwrap();
        let stat = FileStat::of(&fs::metadata(&path).unwrap());
        let keys = Keys::derive(&JobKey([7; 32]));
        let reader =
            Reader { path: path.clone(), stat, file: None, hasher: blake3::Hasher::new(), left: 100, keys };
        let (reader, _, bytes) = reader.next(60).unwrap();
        assert_eq!((reader.left, bytes.len()), (40, 60));
        fs::write(&path, [1; 70]).unwrap();
        let short = reader.next(40).map(|_| ());
        assert!(matches!(short, Err(CheckpointError::Changed { .. })), "{short:?}");
    }
}
