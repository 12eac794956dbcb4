//! The attempt's side of the checkpoint store: restore before the start, push while it runs, outputs beside.
//!
//! Whether and when to push is decided elsewhere; whether a commit counts is decided by the store.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use spotq_checkpoint::{Action, CheckpointError, JobKey, PushRequest, Repository, Restore, Selection};
use spotq_model::{CheckpointSpec, Generation, Profile, Span, Timestamp};
use spotq_proto::v1;

use crate::ids::{Instant, now};
use crate::saves::{Looker, step_in, temporary_names};
use crate::supervise::Blame;
use crate::surroundings::Surroundings;

/// A store that is away when an attempt starts is tried this often before the attempt gives up, about three minutes.
const RESTORE_TRIES: u32 = 12;
const RESTORE_PAUSE: Duration = Duration::from_millis(250);
const RESTORE_PAUSE_MAX: Duration = Duration::from_secs(20);
/// Outputs are pushed again at each commit; at the end a few changes under our hands are no reason to give up.
const OUTPUT_TRIES: u32 = 3;
/// Uploads vary; the next one is expected to take this much of the last one, in per cent.
const ESTIMATE_PERCENT: u64 = 125;

/// What a grant says about the store.
#[derive(Clone)]
pub struct StoreAddress {
    pub url: String,
    pub key: JobKey,
    /// INV-06: the last committed step that the scheduler knows of.
    pub newest_step: Option<u64>,
    /// Variables for the store's client alone, such as its keys.
    pub given: std::sync::Arc<std::collections::BTreeMap<String, String>>,
}

impl std::fmt::Debug for StoreAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoreAddress").field("url", &self.url).finish_non_exhaustive()
    }
}

/// The opened stores of one attempt.
#[derive(Debug)]
pub struct Uploads {
    repository: Repository,
    outputs: Option<Outputs>,
    generation: Generation,
    everything: Selection,
    /// Without names that savers give to what is not complete yet.
    finished: Selection,
    spec: CheckpointSpec,
    /// Place in the log of the newest commit that was reported.
    reported: AtomicU64,
}

/// What a restore did.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RestoredFrom {
    pub checkpoint: Option<v1::Checkpoint>,
    pub fell_back: u32,
    /// What is wrong with each newer one that was found damaged now, for people.
    pub damaged: Vec<String>,
}

/// The declared outputs of a job.
#[derive(Debug)]
struct Outputs {
    repository: Repository,
    chosen: Selection,
    /// Each glob as it was written, and what it alone takes.
    each: Vec<(String, Selection)>,
}

/// Why an attempt cannot go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    Superseded { by: u64 },
    Failed { message: String, blame: Blame },
}

/// A push that worked.
#[derive(Debug, Clone, PartialEq)]
pub struct Held {
    /// Of the look that was pushed.
    pub fingerprint: u64,
    pub saved_at: Timestamp,
    /// Absent if an earlier push already holds these files.
    pub committed: Option<v1::Checkpoint>,
    /// What the next one is expected to take.
    pub estimate: Span,
}

impl Uploads {
    /// Opens the job's checkpoints, and its outputs if it declares any. Waits for a store that is away.
    ///
    /// # Errors
    /// See [`Refusal`].
    pub async fn open(
        around: &dyn Surroundings,
        address: &StoreAddress,
        generation: Generation,
        spec: &CheckpointSpec,
        outputs: &[String],
        away: &(dyn Fn(&str) + Sync),
    ) -> Result<Uploads, Refusal> {
        let mut patience = Patience::new(away);
        loop {
            let error = match Self::open_once(around, address, generation, spec, outputs) {
                Ok(uploads) => return Ok(uploads),
                Err(error) => error,
            };
            let waited = patience.after(error).await;
            waited
                .map_err(|error| refusal("cannot open the checkpoint store", &error, address.newest_step))?;
        }
    }

    fn open_once(
        around: &dyn Surroundings,
        address: &StoreAddress,
        generation: Generation,
        spec: &CheckpointSpec,
        outputs: &[String],
    ) -> Result<Uploads, CheckpointError> {
        let open = |url: &str| around.open_store(url, address.key.clone(), &address.given);
        let temporary: Vec<String> =
            temporary_names(Profile::Rename).iter().map(|glob| (*glob).to_owned()).collect();
        let everything = Selection::new(&[], &[])?;
        let finished = Selection::new(&[], &temporary)?;
        let outputs = if outputs.is_empty() {
            None
        } else {
            let alone = |glob: &String| Ok((glob.clone(), Selection::new(std::slice::from_ref(glob), &[])?));
            let each = outputs.iter().map(alone).collect::<Result<_, CheckpointError>>()?;
            let chosen = Selection::new(outputs, &[])?;
            Some(Outputs { repository: open(&outputs_url(&address.url))?, chosen, each })
        };
        let repository = open(&address.url)?;
        Ok(Uploads {
            repository,
            outputs,
            generation,
            everything,
            finished,
            spec: spec.clone(),
            reported: AtomicU64::new(0),
        })
    }

    /// Fences older attempts out, then makes `dir` hold the newest sound checkpoint.
    ///
    /// # Errors
    /// See [`Refusal`].
    pub async fn restore(
        &self,
        dir: &Path,
        newest_step: Option<u64>,
        away: &(dyn Fn(&str) + Sync),
    ) -> Result<RestoredFrom, Refusal> {
        let mut patience = Patience::new(away);
        loop {
            let error = match self.restore_once(dir, newest_step).await {
                Ok(restored) => return Ok(restored),
                Err(error) => error,
            };
            let waited = patience.after(error).await;
            waited.map_err(|error| refusal("cannot restore", &error, newest_step))?;
        }
    }

    /// Brings back what earlier attempts left as outputs; problems are only told.
    pub async fn restore_outputs(&self, work: &Path) {
        if let Some(outputs) = &self.outputs
            && let Err(error) = outputs.repository.pull(work, &|_| {}).await
        {
            tracing::warn!(%error, "outputs of earlier attempts were not brought back");
        }
    }

    /// Pushes what `looker` takes of `dir` now, if `may` still allows it. `step_at` knows the step at a time.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn push(
        &self,
        dir: &Path,
        looker: Looker,
        may: impl FnOnce(&crate::saves::Look) -> bool,
        step_at: impl FnOnce(Timestamp) -> Option<u64>,
    ) -> Result<Option<Held>, CheckpointError> {
        let started = Instant::now();
        let (profile, wanted) = (looker.profile(), dir.to_owned());
        let Ok(look) = spotq_host::blocking(move || looker.look(&wanted)).await else {
            return Ok(None);
        };
        if look.files == 0 || !may(&look) {
            return Ok(None);
        }
        let step = step_in(&look.newest_path).or_else(|| step_at(look.newest));
        let request = PushRequest {
            generation: self.generation,
            step,
            profile,
            created_at_ms: look.newest.0,
            selection: match profile {
                Profile::Generic => self.everything.clone(),
                Profile::Rename | Profile::Orbax => self.finished.clone(),
            },
        };
        let pushed = self.repository.push(dir, &request, &|_| {}).await?;
        let committed = self.news_of(pushed, look.newest);
        let took = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        Ok(Some(Held {
            fingerprint: look.fingerprint,
            saved_at: look.newest,
            committed,
            estimate: Span(took.saturating_mul(ESTIMATE_PERCENT) / 100),
        }))
    }

    /// Pushes the declared outputs of the working directory.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn push_outputs(&self, work: &Path) -> Result<(), CheckpointError> {
        // A command may remove its own directory: then it has no outputs.
        let Some(Outputs { repository, chosen: selection, .. }) =
            self.outputs.as_ref().filter(|_| work.is_dir())
        else {
            return Ok(());
        };
        let request = PushRequest {
            generation: self.generation,
            step: None,
            profile: self.spec.profile,
            created_at_ms: now().0,
            selection: selection.clone(),
        };
        for attempt in 1.. {
            let candidate = repository.scan(work, selection).await?;
            if candidate.is_empty() {
                return Ok(());
            }
            match repository.push_candidate(candidate, &request, &|_| {}).await {
                Ok(_) => return Ok(()),
                Err(CheckpointError::Changed { .. }) if attempt < OUTPUT_TRIES => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The globs of `outputs:` that take nothing of the working directory.
    pub async fn outputs_without_files(&self, work: &Path) -> Vec<String> {
        let Some(outputs) = self.outputs.as_ref() else { return Vec::new() };
        let mut without = Vec::new();
        for (glob, alone) in &outputs.each {
            let found =
                if work.is_dir() { outputs.repository.scan(work, alone).await } else { return Vec::new() };
            // A directory that cannot be read is told by the upload itself.
            if found.is_ok_and(|found| found.is_empty()) {
                without.push(glob.clone());
            }
        }
        without
    }

    #[must_use]
    pub fn has_outputs(&self) -> bool {
        self.outputs.is_some()
    }

    /// The commit to report. One whose answer was lost shows up as "unchanged" in the next push: it is reported then.
    fn news_of(&self, pushed: spotq_checkpoint::Pushed, saved_at: Timestamp) -> Option<v1::Checkpoint> {
        let committed = match pushed {
            spotq_checkpoint::Pushed::Committed(done) => v1::Checkpoint {
                sequence: done.checkpoint.0,
                log_sequence: done.log_seq.0,
                generation: self.generation.0,
                step: done.step,
                bytes_total: done.bytes_total,
                bytes_uploaded: done.bytes_uploaded,
                saved_at_ms: saved_at.0,
                manifest_hash: done.manifest_hash.to_string(),
            },
            spotq_checkpoint::Pushed::Unchanged(head) => v1::Checkpoint {
                sequence: head.checkpoint.0,
                log_sequence: head.log_seq.0,
                generation: head.generation.0,
                step: head.step,
                bytes_total: head.bytes,
                bytes_uploaded: 0,
                saved_at_ms: saved_at.0,
                manifest_hash: head.manifest_hash.to_string(),
            },
        };
        let newest = self.reported.fetch_max(committed.log_sequence, Ordering::Relaxed);
        (committed.generation == self.generation.0 && committed.log_sequence > newest).then_some(committed)
    }

    /// How many checkpoints above this number the log has in quarantine.
    async fn set_aside_above(&self, sequence: u64) -> Result<usize, CheckpointError> {
        let entries = self.repository.entries().await?;
        let newer = entries.iter().filter(
            |entry| matches!(&entry.action, Action::Quarantine { checkpoint, .. } if checkpoint.0 > sequence),
        );
        Ok(newer.count())
    }

    async fn restore_once(
        &self,
        dir: &Path,
        newest_step: Option<u64>,
    ) -> Result<RestoredFrom, CheckpointError> {
        self.repository.fence(self.generation).await?;
        let restored = self.repository.restore(dir, self.generation).await?;
        let (checkpoint, fell_back) = match restored {
            Restore::Nothing { fell_back, .. } => (None, fell_back),
            Restore::Restored(found) => {
                let checkpoint = v1::Checkpoint {
                    sequence: found.checkpoint.0,
                    log_sequence: found.log_seq.0,
                    generation: found.generation.0,
                    step: found.step,
                    bytes_total: found.bytes,
                    bytes_uploaded: 0,
                    saved_at_ms: found.created_at_ms,
                    manifest_hash: found.manifest_hash.to_string(),
                };
                (Some(checkpoint), found.fell_back)
            }
        };
        let from = checkpoint.as_ref().map_or(0, |found| found.sequence);
        // An attempt may have died between setting a damaged checkpoint aside and telling the scheduler: what the log
        // says about newer ones counts as well.
        let passed_over = fell_back.len().max(self.set_aside_above(from).await?);
        let step = checkpoint.as_ref().and_then(|found| found.step);
        let behind =
            newest_step.is_some_and(|newest| checkpoint.is_none() || step.is_some_and(|step| step < newest));
        if behind && passed_over == 0 {
            return Err(CheckpointError::Invalid {
                what: "the checkpoint store".to_owned(),
                why: format!(
                    "it holds {}, but step {} was committed; is it the same store?",
                    step.map_or("nothing".to_owned(), |step| format!("step {step}")),
                    newest_step.unwrap_or_default()
                ),
            });
        }
        let damaged = fell_back.iter().map(|passed| format!("{} {}", passed.object, passed.why)).collect();
        let fell_back = u32::try_from(passed_over).unwrap_or(u32::MAX);
        Ok(RestoredFrom { checkpoint, fell_back, damaged })
    }
}

/// Waits while the store is away, between [`RESTORE_TRIES`] tries; says so once.
struct Patience<'a> {
    tries: u32,
    pause: Duration,
    away: &'a (dyn Fn(&str) + Sync),
}

impl<'a> Patience<'a> {
    fn new(away: &'a (dyn Fn(&str) + Sync)) -> Self {
        Patience { tries: 1, pause: RESTORE_PAUSE, away }
    }

    /// Returns when it is time to try again.
    ///
    /// # Errors
    /// The error that it was given, if trying again would not help or was done often enough.
    async fn after(&mut self, error: CheckpointError) -> Result<(), CheckpointError> {
        if !matches!(error, CheckpointError::Unavailable { .. }) || self.tries >= RESTORE_TRIES {
            return Err(error);
        }
        tracing::warn!(%error, self.tries, "the checkpoint store is away; trying again");
        if self.tries == 1 {
            (self.away)(&error.to_string());
        }
        tokio::time::sleep(self.pause).await;
        self.pause = (self.pause * 2).min(RESTORE_PAUSE_MAX);
        self.tries += 1;
        Ok(())
    }
}

/// A job whose work was committed before had the right address, key and permissions then: whatever is wrong with its
/// store now is no reason to end it. A job that never committed anything learns at once that it asks for the impossible.
fn refusal(what: &str, error: &CheckpointError, newest_step: Option<u64>) -> Refusal {
    let blame = match error {
        CheckpointError::Superseded { by } => return Refusal::Superseded { by: by.0 },
        CheckpointError::Unavailable { .. } | CheckpointError::NoSpace { .. } => Blame::Surroundings,
        CheckpointError::Changed { .. }
        | CheckpointError::Refused { .. }
        | CheckpointError::Corrupt { .. }
        | CheckpointError::Denied { .. }
        | CheckpointError::Invalid { .. } => {
            if newest_step.is_some() {
                Blame::Surroundings
            } else {
                Blame::Job
            }
        }
    };
    let cause = std::error::Error::source(error).map_or_else(String::new, |e| format!(": {e}"));
    Refusal::Failed { message: format!("{what}: {error}{cause}"), blame }
}

/// Outputs have a repository of their own below the job's prefix.
#[must_use]
pub fn outputs_url(job_url: &str) -> String {
    format!("{}/outputs", job_url.trim_end_matches('/'))
}

/// What a link that is not ours to replace points to. Ours are those of the same job's earlier attempts, and those whose
/// target is gone: the node that they led to has ended.
fn in_use(link: &Path, target: &Path) -> Option<PathBuf> {
    let leads_to = std::fs::read_link(link).ok()?;
    let job_of = |path: &Path| {
        let attempt = path.parent()?.file_name()?.to_str()?;
        attempt.rsplit_once('-').map(|(job, _generation)| job.to_owned())
    };
    let same_job = job_of(&leads_to).is_some() && job_of(&leads_to) == job_of(target);
    (link.exists() && leads_to != target && !same_job).then_some(leads_to)
}

/// Makes `link` (relative to `cwd`) a link to the checkpoint directory, for a job that knows only that name.
///
/// # Errors
/// Text for people: something else is there, or it cannot be made.
pub fn link_directory(cwd: &Path, link: &str, target: &Path) -> Result<(), String> {
    let path: PathBuf = cwd.join(link);
    let say = |why: String| format!("checkpoint.dir `{link}`: {why}");
    match std::fs::symlink_metadata(&path) {
        Ok(meta) if meta.is_symlink() => {
            if let Some(other) = in_use(&path, target) {
                return Err(say(format!("is a link to {}; use another name, or remove it", other.display())));
            }
            std::fs::remove_file(&path).map_err(|e| say(format!("cannot replace the old link: {e}")))?;
        }
        Ok(meta) if meta.is_dir() => {
            // Only an empty directory is given up for the link.
            std::fs::remove_dir(&path).map_err(|_| {
                say("is a directory with content; use another name, or move it away".to_owned())
            })?;
        }
        Ok(_) => return Err(say("is a file; use another name, or move it away".to_owned())),
        Err(_) => {
            if let Some(parent) = path.parent() {
                std::fs::create_dir_all(parent).map_err(|e| say(format!("cannot make its parent: {e}")))?;
            }
        }
    }
    std::os::unix::fs::symlink(target, &path).map_err(|e| say(format!("cannot make the link: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::surroundings::Node;

    #[test]
    fn a_job_finds_its_checkpoints_under_its_own_name() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("t");
        std::fs::create_dir(&target).unwrap();
        link_directory(dir.path(), "out/ckpt", &target).unwrap();
        link_directory(dir.path(), "out/ckpt", &target).unwrap();
        assert_eq!(std::fs::read_link(dir.path().join("out/ckpt")).unwrap(), target);
        std::fs::create_dir_all(dir.path().join("full/x")).unwrap();
        assert!(link_directory(dir.path(), "full", &target).unwrap_err().contains("content"));
        std::fs::write(dir.path().join("file"), "").unwrap();
        assert!(link_directory(dir.path(), "file", &target).is_err());
    }

    /// The checkpoint was set aside by an attempt that died before it could say so; the scheduler still knows it as
    /// the newest, and the next attempt must not take the store for the wrong one.
    #[test]
    fn a_checkpoint_that_a_dead_attempt_set_aside_counts_as_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let address = StoreAddress {
            url: format!("file://{}", dir.path().join("store").display()),
            key: JobKey([7; 32]),
            newest_step: Some(2),
            given: std::sync::Arc::default(),
        };
        let spec = CheckpointSpec { profile: Profile::Rename, ..CheckpointSpec::default() };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let files = dir.path().join("files");
            std::fs::create_dir(&files).unwrap();
            let first = Uploads::open(&Node, &address, Generation(1), &spec, &[], &|_| {}).await.unwrap();
            let looker =
                crate::saves::Saves::new(Profile::Rename, Default::default(), None).unwrap().looker();
            for step in [1, 2] {
                std::fs::write(files.join(format!("step-{step}")), "x").unwrap();
                let held = first.push(&files, looker.clone(), |_| true, |_| None).await.unwrap().unwrap();
                assert_eq!(held.committed.unwrap().step, Some(step));
            }
            let dead = Uploads::open(&Node, &address, Generation(2), &spec, &[], &|_| {}).await.unwrap();
            let newest = dead.repository.head().await.unwrap().unwrap().checkpoint;
            dead.repository.quarantine(Generation(2), newest, "damaged").await.unwrap();
            let next = Uploads::open(&Node, &address, Generation(3), &spec, &[], &|_| {}).await.unwrap();
            let restored =
                next.restore(&dir.path().join("restored"), address.newest_step, &|_| {}).await.unwrap();
            assert_eq!((restored.checkpoint.unwrap().step, restored.fell_back), (Some(1), 1));
        });
    }

    #[test]
    fn the_link_of_another_job_or_of_the_user_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let place = |attempt: &str| {
            let path = dir.path().join(attempt).join("ckpt");
            std::fs::create_dir_all(&path).unwrap();
            path
        };
        let (first, second, other) = (place("7-1"), place("7-2"), place("8-1"));
        link_directory(dir.path(), "out", &first).unwrap();
        link_directory(dir.path(), "out", &second).unwrap();
        assert!(link_directory(dir.path(), "out", &other).unwrap_err().contains("is a link to"));
        std::fs::remove_dir_all(dir.path().join("7-2")).unwrap();
        link_directory(dir.path(), "out", &other).unwrap();
    }

    #[test]
    fn outputs_live_below_the_jobs_prefix() {
        assert_eq!(outputs_url("s3://b/p/"), "s3://b/p/outputs");
    }
}
