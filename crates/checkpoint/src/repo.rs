//! A job's checkpoints in one store: reading the log, fencing, and appending to it.
//!
//! All order comes from put-if-absent on `log/<seq>`. Must never delete an object or overwrite a log entry.

use std::fmt;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _};
use object_store::ObjectStore;
use object_store::path::Path;
use spotq_model::Generation;
use uuid::Uuid;

use crate::error::CheckpointError;
use crate::key::{Digest, JobKey, Keys, Purpose};
use crate::log::{Action, CheckpointSeq, Head, LogEntry, LogSeq, LogState, fold};
use crate::manifest::{CHUNK_BYTES, MAX_CHUNK_BYTES, MAX_MANIFEST_BYTES, Manifest, Unusable};
use crate::objects::{FIRST_BACKOFF, Objects};

/// An entry has a few hundred bytes; a quarantine's reason may have some thousand.
const MAX_LOG_ENTRY_BYTES: u64 = 64 << 10;
/// A commit a minute for a year is half of this. It bounds what a hostile store can make us read.
const MAX_LOG_ENTRIES: u64 = 1_000_000;
/// Log entries read at once when a log is read from its start.
const LOG_READS: usize = 16;
/// Two writes answer the question; the rest is for answers that get lost.
const PROBE_TRIES: u32 = 4;
/// How often one entry is offered under one number before the store counts as unavailable.
const APPEND_TRIES: u32 = 5;
/// How often an append moves on to the next number. Each loss means that another writer succeeded, so a loser
/// needs more rounds than there can be writers of one job at a time.
pub(crate) const MAX_LOST_RACES: u32 = 64;
/// A quarantine's reason is cut to this, so that the entry stays small whatever an error message says.
const MAX_REASON_CHARS: usize = 1000;

/// How a repository uses memory and requests. The format does not depend on it.
#[derive(Debug, Clone)]
pub struct Options {
    /// Bytes in flight, in full chunks: a push or restore buffers at most this many times `chunk_bytes`.
    pub chunks_in_flight: usize,
    /// Length of the chunks that a push cuts. Smaller ones cost requests; readers take any length.
    pub chunk_bytes: usize,
    /// Requests at once, for small files.
    pub requests_in_flight: usize,
}

/// The checkpoints of one job, or its outputs, in one store.
pub struct Repository {
    pub(crate) objects: Objects,
    pub(crate) options: Options,
    probed: AtomicBool,
    /// The log as last read; entries never change, so only newer ones are read again.
    view: Mutex<Arc<LogView>>,
    /// The manifest read or written last: the parent of the next push.
    parent: Mutex<Option<(String, Arc<Manifest>)>>,
}

/// A log up to some entry.
#[derive(Debug, Clone)]
pub(crate) struct LogView {
    pub(crate) entries: Vec<LogEntry>,
    last_hash: Digest,
    pub(crate) state: LogState,
}

/// Outcome of offering an entry under one number.
#[derive(Debug)]
pub(crate) enum Offer {
    Won(LogSeq),
    /// Another writer has this number.
    Lost,
}

impl Default for Options {
    fn default() -> Self {
        Self { chunks_in_flight: 2, chunk_bytes: CHUNK_BYTES, requests_in_flight: 16 }
    }
}

impl Repository {
    /// A repository under `prefix` of `store`. Does no I/O.
    #[must_use]
    pub fn open(store: Arc<dyn ObjectStore>, prefix: Path, key: JobKey, options: Options) -> Self {
        let options = Options {
            chunks_in_flight: options.chunks_in_flight.max(1),
            chunk_bytes: options.chunk_bytes.clamp(1, usize::try_from(MAX_CHUNK_BYTES).unwrap_or(usize::MAX)),
            requests_in_flight: options.requests_in_flight.max(1),
        };
        Self {
            objects: Objects { store, prefix, keys: Keys::derive(&key) },
            options,
            probed: AtomicBool::new(false),
            view: Mutex::new(Arc::new(LogView::empty())),
            parent: Mutex::new(None),
        }
    }

    /// The store, for tools and tests that look at it directly.
    #[must_use]
    pub fn store(&self) -> Arc<dyn ObjectStore> {
        Arc::clone(&self.objects.store)
    }

    /// Checks that the store refuses to overwrite under put-if-absent. Leaves one small object, `probe`.
    ///
    /// # Errors
    /// `Refused`, with the store's name, if it overwrites: two writers could not be told apart there.
    pub async fn probe_put_if_absent(&self) -> Result<(), CheckpointError> {
        let mut written = 0;
        let mut backoff = FIRST_BACKOFF;
        let mut last = None;
        for _ in 0..PROBE_TRIES {
            match self
                .objects
                .put_new("probe", Bytes::from_static(b"spotq: is put-if-absent honoured?"))
                .await
            {
                // The probe of an earlier attempt is refused at once, which is the answer.
                Err(object_store::Error::AlreadyExists { .. }) => {
                    self.probed.store(true, Ordering::Relaxed);
                    return Ok(());
                }
                Ok(()) if written > 0 => {
                    return Err(self.refused("a second write under the same name succeeded".to_owned()));
                }
                Ok(()) => written += 1,
                Err(e) => match CheckpointError::store("write", "probe", e) {
                    CheckpointError::Refused { why, .. } => return Err(self.refused(why)),
                    passing @ CheckpointError::Unavailable { .. } => {
                        last = Some(passing);
                        tokio::time::sleep(backoff).await;
                        backoff *= 2;
                    }
                    definite => return Err(definite),
                },
            }
        }
        Err(last.unwrap_or_else(|| self.refused("it gave no clear answer".to_owned())))
    }

    /// Makes entries of generations before `generation` void and returns the checkpoint that counts. Idempotent.
    /// Probes the store first, once.
    ///
    /// # Errors
    /// `Superseded` if a higher generation has written: the caller stops its job.
    pub async fn fence(&self, generation: Generation) -> Result<Option<Head>, CheckpointError> {
        let view = self.fenced(generation).await?;
        Ok(view.state.head().cloned())
    }

    /// The checkpoint that counts, if there is one.
    ///
    /// # Errors
    /// `Corrupt`, with the object's name, for a log entry that is unreadable or out of the chain.
    pub async fn head(&self) -> Result<Option<Head>, CheckpointError> {
        Ok(self.refresh().await?.state.head().cloned())
    }

    /// All that the log says: restorable checkpoints, fence, next number.
    ///
    /// # Errors
    /// As [`Repository::head`].
    pub async fn state(&self) -> Result<LogState, CheckpointError> {
        Ok(self.refresh().await?.state.clone())
    }

    /// Every log entry, oldest first.
    ///
    /// # Errors
    /// As [`Repository::head`].
    pub async fn entries(&self) -> Result<Vec<LogEntry>, CheckpointError> {
        Ok(self.refresh().await?.entries.clone())
    }

    /// The manifest of a checkpoint, checked.
    ///
    /// # Errors
    /// `Corrupt` if it is missing or damaged, `Invalid` if a newer spotq wrote it.
    pub async fn manifest(&self, head: &Head) -> Result<Arc<Manifest>, CheckpointError> {
        if let Some((name, manifest)) = &*self.parent.lock().expect("no holder of this lock panics")
            && *name == head.manifest
        {
            return Ok(Arc::clone(manifest));
        }
        self.read_manifest(head).await
    }

    /// The manifest as it is in the store now, whatever this process remembers.
    pub(crate) async fn read_manifest(&self, head: &Head) -> Result<Arc<Manifest>, CheckpointError> {
        let manifest = Arc::new(self.fetch_manifest(head).await?);
        self.remember(&head.manifest, &manifest);
        Ok(manifest)
    }

    /// Marks a checkpoint as damaged, so that nobody restores it again.
    ///
    /// # Errors
    /// `Superseded` if a higher generation has written.
    pub async fn quarantine(
        &self,
        generation: Generation,
        checkpoint: CheckpointSeq,
        reason: &str,
    ) -> Result<(), CheckpointError> {
        let reason: String = reason.chars().take(MAX_REASON_CHARS).collect();
        for _ in 0..MAX_LOST_RACES {
            let view = self.fenced(generation).await?;
            if !view.state.heads.iter().any(|head| head.checkpoint == checkpoint) {
                return Ok(());
            }
            let action = Action::Quarantine { checkpoint, reason: reason.clone() };
            if let Offer::Won(_) = self.offer(&view, generation, action).await? {
                return Ok(());
            }
        }
        Err(lost_too_often("quarantine"))
    }

    /// The log, with a fence of this generation in it.
    pub(crate) async fn fenced(&self, generation: Generation) -> Result<Arc<LogView>, CheckpointError> {
        if !self.probed.load(Ordering::Relaxed) {
            self.probe_put_if_absent().await?;
        }
        for _ in 0..MAX_LOST_RACES {
            let view = self.refresh().await?;
            if view.state.newest_generation > generation {
                return Err(CheckpointError::Superseded { by: view.state.newest_generation });
            }
            if view.state.fence == generation {
                return Ok(view);
            }
            self.offer(&view, generation, Action::Fence).await?;
        }
        Err(lost_too_often("fence"))
    }

    /// Offers an entry under the number after the last one in `view`.
    ///
    /// An error answer is ambiguous: object stores retry a conditional write on their own, so "already exists"
    /// may be our own earlier success, and a timeout may have been one. What is stored there settles it.
    pub(crate) async fn offer(
        &self,
        view: &LogView,
        generation: Generation,
        action: Action,
    ) -> Result<Offer, CheckpointError> {
        let seq = view.next_seq();
        let object = seq.object();
        let entry =
            LogEntry { seq, generation, writer_nonce: Uuid::new_v4(), prev_hash: view.last_hash, action };
        let sealed = self.objects.keys.seal(Purpose::LogEntry, &entry);
        let bytes = Bytes::from(sealed.map_err(|e| CheckpointError::invalid(&object, e.to_string()))?);
        let mut backoff = FIRST_BACKOFF;
        let mut last = None;
        for tries_left in (0..APPEND_TRIES).rev() {
            let error = match self.objects.put_new(&object, bytes.clone()).await {
                Ok(()) => return Ok(Offer::Won(seq)),
                Err(e) => CheckpointError::store("append", &object, e),
            };
            match self.objects.get(&object, MAX_LOG_ENTRY_BYTES).await {
                Ok(Some(found)) => return Ok(self.whose(&found, &entry, seq)),
                // Nobody has the number: the same bytes are offered again. Should the first offer still be on
                // its way, either of the two wins and both are ours.
                Ok(None) => match error {
                    e @ CheckpointError::Unavailable { .. } => last = Some(e),
                    definite => return Err(definite),
                },
                Err(e) => last = Some(e),
            }
            if tries_left > 0 {
                tokio::time::sleep(backoff).await;
                backoff *= 2;
            }
        }
        Err(last.unwrap_or_else(|| lost_too_often("append")))
    }

    /// Reads what was appended since the log was last read.
    pub(crate) async fn refresh(&self) -> Result<Arc<LogView>, CheckpointError> {
        let known = Arc::clone(&self.view.lock().expect("no holder of this lock panics"));
        let mut view = (*known).clone();
        if view.entries.is_empty() {
            self.read_listed(&mut view).await?;
        } else {
            while let Some(bytes) = self.read_entry(view.next_seq()).await? {
                view.push(&self.objects.keys, &bytes)?;
            }
        }
        if view.entries.len() == known.entries.len() {
            return Ok(known);
        }
        view.state = fold(&view.entries);
        let view = Arc::new(view);
        *self.view.lock().expect("no holder of this lock panics") = Arc::clone(&view);
        Ok(view)
    }

    /// Keeps a manifest as the likely parent of the next push.
    pub(crate) fn remember(&self, name: &str, manifest: &Arc<Manifest>) {
        *self.parent.lock().expect("no holder of this lock panics") =
            Some((name.to_owned(), Arc::clone(manifest)));
    }

    /// Lists the numbers of all entries and the names of objects among them that are not entries.
    pub(crate) async fn list_log(&self) -> Result<(Option<LogSeq>, Vec<String>), CheckpointError> {
        let prefix = self.objects.path("log");
        let mut listing = self.objects.store.list(Some(&prefix));
        let (mut last, mut foreign) = (None, Vec::new());
        while let Some(meta) = listing.next().await {
            let meta = meta.map_err(|e| CheckpointError::store("list", "log/", e))?;
            match meta.location.filename().and_then(LogSeq::from_file_name) {
                Some(seq) => last = last.max(Some(seq)),
                None => foreign.push(meta.location.to_string()),
            }
        }
        match last {
            Some(seq) if seq.0 > MAX_LOG_ENTRIES => Err(CheckpointError::corrupt(
                seq.object(),
                format!("a log has at most {MAX_LOG_ENTRIES} entries"),
            )),
            _ => Ok((last, foreign)),
        }
    }

    pub(crate) async fn read_entry(&self, seq: LogSeq) -> Result<Option<Bytes>, CheckpointError> {
        self.objects.get(&seq.object(), MAX_LOG_ENTRY_BYTES).await
    }

    /// Reads a whole log: by number up to the highest one listed, because a listing may miss an older entry
    /// that appeared while it ran.
    async fn read_listed(&self, view: &mut LogView) -> Result<(), CheckpointError> {
        let (Some(last), foreign) = self.list_log().await? else { return Ok(()) };
        if let Some(name) = foreign.first() {
            tracing::warn!(object = %name, "an object among the log entries is not one; it is ignored");
        }
        let reads = (view.next_seq().0..=last.0).map(|n| async move {
            let seq = LogSeq(n);
            let bytes = self.read_entry(seq).await?;
            bytes.ok_or_else(|| {
                CheckpointError::corrupt(seq.object(), "it is missing but later entries exist")
            })
        });
        let mut reads = std::pin::pin!(futures::stream::iter(reads).buffered(LOG_READS));
        while let Some(bytes) = reads.try_next().await? {
            view.push(&self.objects.keys, &bytes)?;
        }
        Ok(())
    }

    async fn fetch_manifest(&self, head: &Head) -> Result<Manifest, CheckpointError> {
        let object = &head.manifest;
        let check = |bytes: Bytes| {
            if Digest::of(&bytes) != head.manifest_hash {
                return Err(CheckpointError::corrupt(object, "its hash is not the one in the commit log"));
            }
            let manifest = Manifest::open(&self.objects.keys, &bytes).map_err(|unusable| match unusable {
                Unusable::Newer(_) => CheckpointError::invalid(object, unusable.to_string()),
                Unusable::Damaged(why) => CheckpointError::corrupt(object, why),
            })?;
            if manifest.checkpoint != head.checkpoint || manifest.total_bytes != head.bytes {
                return Err(CheckpointError::corrupt(object, "it is the manifest of another checkpoint"));
            }
            Ok(manifest)
        };
        self.objects.get_checked(object, MAX_MANIFEST_BYTES, check).await
    }

    /// Whether an entry found under our number is the one we wrote.
    fn whose(&self, found: &[u8], ours: &LogEntry, seq: LogSeq) -> Offer {
        let found = self.objects.keys.open::<LogEntry>(Purpose::LogEntry, found);
        match found {
            Ok(entry) if entry.writer_nonce == ours.writer_nonce => Offer::Won(seq),
            // A damaged entry is not ours either; reading the log again names it.
            Ok(_) | Err(_) => Offer::Lost,
        }
    }

    fn refused(&self, why: String) -> CheckpointError {
        CheckpointError::Refused { store: self.objects.store.to_string(), why }
    }
}

impl fmt::Debug for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Repository")
            .field("store", &self.objects.store.to_string())
            .field("prefix", &self.objects.prefix)
            .finish_non_exhaustive()
    }
}

impl LogView {
    pub(crate) fn empty() -> Self {
        Self { entries: Vec::new(), last_hash: Digest::ZERO, state: fold(&[]) }
    }

    pub(crate) fn next_seq(&self) -> LogSeq {
        self.entries.last().map_or(LogSeq(1), |entry| entry.seq.next())
    }

    /// Checks and adds the object of the next entry. `state` is left as it was.
    pub(crate) fn push(&mut self, keys: &Keys, bytes: &[u8]) -> Result<(), CheckpointError> {
        let seq = self.next_seq();
        let corrupt = |why: String| CheckpointError::corrupt(seq.object(), why);
        let entry: LogEntry = keys.open(Purpose::LogEntry, bytes).map_err(corrupt)?;
        if entry.seq != seq {
            return Err(corrupt(format!("it says that it is entry {}", entry.seq)));
        }
        if entry.prev_hash != self.last_hash {
            return Err(corrupt("it does not follow the entry before it (broken hash chain)".to_owned()));
        }
        self.last_hash = Digest::of(bytes);
        self.entries.push(entry);
        Ok(())
    }
}

pub(crate) fn lost_too_often(operation: &str) -> CheckpointError {
    CheckpointError::Unavailable {
        what: operation.to_owned(),
        source: format!("other writers were first {MAX_LOST_RACES} times").into(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use object_store::memory::InMemory;
    use object_store::{ObjectStoreExt as _, PutPayload};

    use super::*;
    use crate::conformance::{Fault, Faulty, Overwriting, repository, request};
    use crate::{Progress, Pushed};

    /// A directory of so many files of so many bytes, no two alike.
    fn files(count: u8, bytes: usize) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a temporary directory");
        for n in 0..count {
            let content: Vec<u8> = (0..bytes).map(|at| n ^ u8::try_from(at % 251).expect("a byte")).collect();
            std::fs::write(dir.path().join(n.to_string()), content).expect("test file");
        }
        dir
    }

    async fn push(repo: &Repository, dir: &std::path::Path, step: u64) -> Head {
        let pushed = repo.push(dir, &request(1, step), &|_| {}).await.expect("a push");
        assert!(matches!(pushed, Pushed::Committed(_)), "{pushed:?}");
        repo.head().await.expect("a sound log").expect("a head")
    }

    /// How long an operation on a store that dies after so many calls tries, in milliseconds.
    async fn tries_for(
        calls: u64,
        operation: impl AsyncFn(&Repository) -> Result<(), CheckpointError>,
    ) -> u128 {
        let dying = Faulty::new(Arc::new(InMemory::new()), Fault::DeadFrom(calls));
        let began = tokio::time::Instant::now();
        let outcome = operation(&repository(dying, &"job".into())).await;
        assert!(matches!(outcome, Err(CheckpointError::Unavailable { .. })), "{outcome:?}");
        began.elapsed().as_millis()
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_is_away_is_asked_again_with_doubled_pauses() {
        let probing = tries_for(0, async |repo| repo.probe_put_if_absent().await).await;
        assert_eq!(probing, 50 + 100 + 200 + 400, "each probe");
        // The probe takes two calls, reading the empty log one.
        let appending = tries_for(3, async |repo| repo.fence(Generation(1)).await.map(|_| ())).await;
        assert_eq!(appending, 50 + 100 + 200 + 400, "between five tries to append");
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_overwrites_is_found_out_by_its_second_write() {
        let counted = Faulty::new(Arc::new(InMemory::new()), Fault::None);
        let overwriting = Overwriting(Arc::clone(&counted) as Arc<dyn ObjectStore>);
        let error = repository(Arc::new(overwriting), &"job".into()).probe_put_if_absent().await.unwrap_err();
        assert!(error.to_string().contains("a second write"), "{error}");
        assert_eq!(counted.calls(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn pushes_and_reads_keep_as_many_requests_and_chunks_under_way_as_allowed_and_no_more() {
        let slow = Faulty::new(Arc::new(InMemory::new()), Fault::Slow(Duration::from_millis(10)));
        let options =
            |requests_in_flight| Options { chunk_bytes: 1024, requests_in_flight, chunks_in_flight: 2 };
        let open = |name: &str, requests| {
            let store = Arc::clone(&slow) as Arc<dyn ObjectStore>;
            Repository::open(store, name.into(), JobKey([7; 32]), options(requests))
        };
        for (name, count, bytes, requests, at_once) in
            [("small", 12, 4, 3, 3), ("one at a time", 3, 4, 1, 1), ("large", 6, 1024, 16, 2)]
        {
            let (repo, dir) = (open(name, requests), files(count, bytes));
            push(&repo, dir.path(), 1).await;
            assert_eq!(slow.most_at_once(), at_once, "push of {name} files");
            let restored = dir.path().join("restored");
            let reader = open(name, requests);
            reader.head().await.unwrap();
            assert!(slow.most_at_once() > 0, "the log is read at once, which has a bound of its own");
            reader.pull(&restored, &|_| {}).await.unwrap();
            assert_eq!(slow.most_at_once(), at_once, "restore of {name} files");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn progress_goes_up_to_the_whole_and_tells_what_was_transferred() {
        let (dir, seen) = (files(3, 3000), Mutex::new(Vec::new()));
        let repo = repository(Arc::new(InMemory::new()), &"job".into());
        let note = |progress: Progress| seen.lock().expect("no panic").push(progress);
        let end =
            |transferred| Progress { bytes_total: 9000, bytes_done: 9000, bytes_transferred: transferred };
        let check = |transferred| {
            let seen = std::mem::take(&mut *seen.lock().expect("no panic"));
            assert!(
                seen.len() > 8 && seen.is_sorted_by_key(|progress: &Progress| progress.bytes_done),
                "{seen:?}"
            );
            assert_eq!(seen.last(), Some(&end(transferred)));
        };
        repo.push(dir.path(), &request(1, 1), &note).await.unwrap();
        check(9000);
        std::fs::write(dir.path().join("0"), [9; 3000]).unwrap();
        repo.push(dir.path(), &request(1, 2), &note).await.unwrap();
        // Its three chunks are two: the first two are alike.
        check(1024 + 952);
        repo.restore_with(&dir.path().join("restored"), Generation(1), &note).await.unwrap();
        check(9000);
    }

    #[tokio::test(start_paused = true)]
    async fn a_push_that_changes_nothing_asks_for_the_next_log_entry_alone() {
        let (dir, counted) = (files(1, 4), Faulty::new(Arc::new(InMemory::new()), Fault::None));
        let repo = repository(Arc::clone(&counted) as Arc<dyn ObjectStore>, &"job".into());
        push(&repo, dir.path(), 1).await;
        let before = counted.calls();
        let again = repo.push(dir.path(), &request(1, 2), &|_| {}).await.unwrap();
        assert!(matches!(again, Pushed::Unchanged(_)), "{again:?}");
        assert_eq!(counted.calls() - before, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_manifest_is_that_of_the_checkpoint_that_was_asked_for() {
        let (dir, store) = (files(1, 4), Arc::new(InMemory::new()));
        let repo = repository(store.clone(), &"job".into());
        let first = push(&repo, dir.path(), 1).await;
        std::fs::write(dir.path().join("0"), b"a longer state").unwrap();
        let second = push(&repo, dir.path(), 2).await;
        for head in [&first, &second, &first] {
            let manifest = repo.manifest(head).await.unwrap();
            assert_eq!((manifest.checkpoint, manifest.total_bytes), (head.checkpoint, head.bytes));
        }
        // A log that takes one checkpoint's manifest for another's is damaged.
        let [number, size] =
            [Head { checkpoint: second.checkpoint, ..first.clone() }, Head { bytes: 5, ..first.clone() }];
        for head in [number, size] {
            let outcome = repository(store.clone(), &"job".into()).manifest(&head).await;
            assert!(matches!(outcome, Err(CheckpointError::Corrupt { .. })), "{outcome:?}");
        }
        let state = repo.state().await.unwrap();
        assert_eq!((state.heads, state.next_checkpoint), (vec![first, second], CheckpointSeq(3)));
    }

    /// INV-02: one number has one winner, and the other one knows that it lost.
    #[tokio::test(start_paused = true)]
    async fn of_two_writers_with_the_same_view_the_second_has_lost() {
        let store = Arc::new(InMemory::new());
        let [first, second] = [(); 2].map(|()| repository(store.clone(), &"job".into()));
        let (ours, theirs) =
            (first.fenced(Generation(1)).await.unwrap(), second.fenced(Generation(1)).await.unwrap());
        let action = || Action::Retire { checkpoint: CheckpointSeq(1) };
        let won = first.offer(&ours, Generation(1), action()).await.unwrap();
        assert!(matches!(won, Offer::Won(LogSeq(2))), "{won:?}");
        let lost = second.offer(&theirs, Generation(1), action()).await.unwrap();
        assert!(matches!(lost, Offer::Lost), "{lost:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_gone_already_is_not_quarantined_again() {
        let dir = files(1, 4);
        let repo = repository(Arc::new(InMemory::new()), &"job".into());
        let head = push(&repo, dir.path(), 1).await;
        for checkpoint in [CheckpointSeq(9), head.checkpoint, head.checkpoint] {
            repo.quarantine(Generation(1), checkpoint, "damaged").await.unwrap();
        }
        assert_eq!(repo.entries().await.unwrap().len(), 3, "a fence, a commit, a quarantine");
    }

    #[tokio::test]
    async fn a_log_with_an_absurd_number_is_not_read() {
        for (number, why) in [(MAX_LOG_ENTRIES, "missing"), (MAX_LOG_ENTRIES + 1, "at most")] {
            let store = InMemory::new();
            let object = LogSeq(number).object();
            store.put(&Path::from(format!("job/{object}")), PutPayload::from("x")).await.unwrap();
            let error = repository(Arc::new(store), &"job".into()).head().await.unwrap_err();
            assert!(
                matches!(error, CheckpointError::Corrupt { .. }) && error.to_string().contains(why),
                "{error}"
            );
        }
    }
}
