//! The uploads of one attempt: one push of the checkpoint directory, and the last pushes after the command's end.
//!
//! Tells how each of them ended. When to push and when to give up is decided elsewhere.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use spotq_checkpoint::CheckpointError;
use spotq_model::Timestamp;
use spotq_proto::v1;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::attempt::Told;
use crate::ids::{AttemptId, now};
use crate::logs::LogWriter;
use crate::observe::{self, SharedSeen, lock};
use crate::saves::Pace;
use crate::supervise::{Input, Pushed};
use crate::uploads::{Held, Uploads};

/// A failed push is tried again after this, then twice as long, up to the maximum.
pub const PAUSE: Duration = Duration::from_millis(300);
pub const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Where an attempt's reports go.
#[derive(Debug, Clone)]
pub struct Reporter {
    pub id: AttemptId,
    pub tell: mpsc::Sender<Told>,
}

/// Uploads of the checkpoint directory.
#[derive(Debug, Clone)]
pub struct Push {
    pub uploads: Arc<Uploads>,
    pub dir: PathBuf,
    pub seen: SharedSeen,
    pub reporter: Reporter,
}

/// The uploads after the command's end: its last checkpoint and its outputs.
#[derive(Debug)]
pub struct LastPushes {
    pub push: Push,
    /// Of the outputs.
    pub cwd: PathBuf,
    pub pace: Pace,
    /// When the command ended. What was left alone until then was not being written; how long it has been left alone
    /// since says nothing, however long earlier pushes take.
    pub ended_at: Timestamp,
    pub log: LogWriter,
    /// The command ended well, and by itself.
    pub succeeded: bool,
    /// Pushes under way; the last ones begin after them.
    pub earlier: Vec<JoinHandle<()>>,
}

/// What is to be held after the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Checkpoint,
    Outputs,
}

impl Push {
    pub async fn once(&self) -> (Pushed, Option<spotq_model::Span>) {
        let looker = lock(&self.seen).saves.looker();
        let may = |look: &_| lock(&self.seen).saves.may_push(look);
        match self.uploads.push(&self.dir, looker, may, |at| observe::step_at(&self.seen, at)).await {
            Ok(Some(held)) => {
                let estimate = held.estimate;
                (self.tell_held(held).await, Some(estimate))
            }
            Ok(None) => (Pushed::Failed, None),
            Err(CheckpointError::Superseded { by }) => (Pushed::Superseded { by: by.0 }, None),
            Err(error) => {
                tracing::info!(%error, "checkpoint was not uploaded; trying again");
                (Pushed::Failed, None)
            }
        }
    }

    /// After the end: what is complete and not held yet.
    async fn last(&self, pace: Pace, ended_at: Timestamp) -> Result<(), CheckpointError> {
        let looker = lock(&self.seen).saves.looker();
        let (looking, dir) = (looker.clone(), self.dir.clone());
        let Ok(look) = spotq_host::blocking(move || looking.look(&dir)).await else { return Ok(()) };
        {
            let mut seen = lock(&self.seen);
            seen.progress.look(now());
            // A look that was announced but failed to upload is looked at again; the store says if it holds it.
            seen.saves.forget_failed();
            if seen.saves.judge(ended_at, pace, &look, || false).is_none() {
                return Ok(());
            }
        }
        let held =
            self.uploads.push(&self.dir, looker, |_| true, |at| observe::step_at(&self.seen, at)).await?;
        if let Some(held) = held {
            self.tell_held(held).await;
        }
        Ok(())
    }

    async fn tell_held(&self, held: Held) -> Pushed {
        if let Some(committed) = held.committed {
            let what = v1::report::What::Committed(committed);
            let _ = self.reporter.tell.send(Told { id: self.reporter.id, at: now(), what }).await;
        }
        lock(&self.seen).saves.mark_held(held.fingerprint);
        Pushed::Held { saved_at: held.saved_at }
    }
}

impl LastPushes {
    /// Pushes until everything is held or it is known that it never will be. Ends with the attempt, whose supervision
    /// knows how long this may take.
    pub async fn run(mut self, inputs: mpsc::Sender<Input>) {
        for earlier in std::mem::take(&mut self.earlier) {
            let _ = earlier.await;
        }
        let mut missing = vec![Part::Checkpoint, Part::Outputs];
        let mut pause = PAUSE;
        loop {
            let (mut problems, mut hopeless) = (Vec::new(), true);
            for part in std::mem::take(&mut missing) {
                match self.push(part).await {
                    Ok(()) => {}
                    Err(CheckpointError::Superseded { by }) => {
                        let _ = inputs.send(Input::Pushed(Pushed::Superseded { by: by.0 })).await;
                        return;
                    }
                    Err(error) => {
                        hopeless &= is_lasting(&error);
                        problems.push(part.problem(&error));
                        missing.push(part);
                    }
                }
            }
            let problem = (!problems.is_empty()).then(|| problems.join("; "));
            let Some(problem) = problem.clone().filter(|_| !hopeless) else {
                self.tell_missing_outputs().await;
                let _ = inputs.send(Input::FinalDone { problem }).await;
                return;
            };
            if pause == PAUSE {
                self.log.note(&format!("{problem}; trying again"));
            }
            let _ = inputs.send(Input::FinalFailed { problem }).await;
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    async fn tell_missing_outputs(&self) {
        if !self.succeeded {
            return;
        }
        for glob in self.push.uploads.outputs_without_files(&self.cwd).await {
            self.log.note(&format!("`outputs: {glob}` matches no file of the working directory"));
        }
    }

    async fn push(&self, part: Part) -> Result<(), CheckpointError> {
        match part {
            Part::Checkpoint => self.push.last(self.pace, self.ended_at).await,
            Part::Outputs => self.push.uploads.push_outputs(&self.cwd).await,
        }
    }
}

impl Part {
    fn problem(self, error: &CheckpointError) -> String {
        let what = match self {
            Part::Checkpoint => "the last checkpoint was",
            Part::Outputs => "outputs were",
        };
        let cause = std::error::Error::source(error).map_or_else(String::new, |e| format!(" ({e})"));
        format!("{what} not uploaded: {error}{cause}")
    }
}

/// Whether trying again cannot help. Space may be freed, and what changed under our hands comes to rest.
fn is_lasting(error: &CheckpointError) -> bool {
    match error {
        CheckpointError::Superseded { .. }
        | CheckpointError::Refused { .. }
        | CheckpointError::Corrupt { .. }
        | CheckpointError::Denied { .. }
        | CheckpointError::Invalid { .. } => true,
        CheckpointError::Changed { .. }
        | CheckpointError::NoSpace { .. }
        | CheckpointError::Unavailable { .. } => false,
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::sync::Mutex;
    use std::time::UNIX_EPOCH;

    use spotq_checkpoint::JobKey;
    use spotq_model::{CheckpointSpec, Generation, JobId, Profile, Span, TaskId};

    use super::*;
    use crate::progress::Progress;
    use crate::saves::{Quiet, Saves};
    use crate::surroundings::Node;
    use crate::uploads::StoreAddress;

    #[tokio::test]
    async fn how_long_a_cut_off_save_lies_there_after_its_commands_end_says_nothing() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("ckpt");
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(dir.join("model"), "half of it").unwrap();
        let hour_ago = Timestamp(now().0 - 3_600_000);
        for path in [dir.join("model"), dir.clone()] {
            let times = UNIX_EPOCH + Duration::from_millis(hour_ago.0);
            File::open(path).unwrap().set_modified(times).unwrap();
        }
        let address = StoreAddress {
            url: format!("file://{}", root.path().join("store").display()),
            key: JobKey([7; 32]),
            newest_step: None,
            given: Arc::default(),
        };
        let spec = CheckpointSpec::default();
        let uploads = Uploads::open(&Node, &address, Generation(1), &spec, &[], &|_| {}).await.unwrap();
        let saves = Saves::new(Profile::Generic, Quiet::default(), None).unwrap();
        let progress = Progress::new(&root.path().join("progress"));
        let id = AttemptId { task: TaskId::only(JobId(1)), generation: Generation(1) };
        let (tell, mut told) = mpsc::channel(4);
        let push = Push {
            uploads: Arc::new(uploads),
            dir,
            seen: Arc::new(Mutex::new(observe::Seen { saves, progress, not_before: None })),
            reporter: Reporter { id, tell },
        };
        push.last(Pace::Broken, hour_ago + Span::millis(50)).await.unwrap();
        assert!(told.try_recv().is_err(), "it was killed while it wrote");
        push.last(Pace::Broken, hour_ago + Span::secs(5)).await.unwrap();
        assert!(matches!(told.try_recv().unwrap().what, v1::report::What::Committed(_)), "it was at rest");
    }

    #[test]
    fn what_trying_again_cannot_mend_is_told_from_what_may_pass() {
        let text = || "x".to_owned();
        let lasting = [
            CheckpointError::Denied { what: text() },
            CheckpointError::Invalid { what: text(), why: text() },
            CheckpointError::Refused { store: text(), why: text() },
            CheckpointError::Corrupt { object: text(), why: text() },
        ];
        assert!(lasting.iter().all(is_lasting));
        let passing = [
            CheckpointError::Unavailable { what: text(), source: "the network".into() },
            CheckpointError::NoSpace { what: text() },
            CheckpointError::Changed { path: "x".into() },
        ];
        assert!(!passing.iter().any(is_lasting));
        let told = Part::Checkpoint.problem(&passing[0]);
        assert!(
            told.starts_with("the last checkpoint was not uploaded: ") && told.ends_with("(the network)")
        );
    }
}
