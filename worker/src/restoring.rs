//! What happens before the command starts: the store is opened, and the newest sound checkpoint is brought back.
//!
//! Runs beside the attempt's loop, since a store may be away for minutes. Says in the job's log what a person would
//! wonder about.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::attempt::Order;
use crate::logs::LogWriter;
use crate::observe::{SharedSeen, lock};
use crate::supervise::Input;
use crate::surroundings::Surroundings;
use crate::uploads::{Refusal, RestoredFrom, Uploads};

/// All that a restore needs of its attempt.
#[derive(Debug)]
pub struct Restoring {
    pub around: Arc<dyn Surroundings>,
    pub order: Order,
    /// Set as soon as the store is open.
    pub uploads: Arc<OnceLock<Arc<Uploads>>>,
    pub dir: PathBuf,
    /// Where earlier outputs are brought back to; none for a directory of the user's own.
    pub work: Option<PathBuf>,
    pub restored: Arc<Mutex<RestoredFrom>>,
    pub seen: SharedSeen,
    pub log: LogWriter,
}

impl Restoring {
    /// Says how it ended.
    pub async fn run(self) -> Input {
        match self.restore().await {
            Ok(()) => Input::Restored,
            Err(Refusal::Superseded { by }) => Input::Fenced { by },
            Err(Refusal::Failed { message, blame }) => {
                self.log.note(&message);
                Input::RestoreFailed { message, blame }
            }
        }
    }

    async fn restore(&self) -> Result<(), Refusal> {
        let Order { id, spec, store } = &self.order;
        let away = |problem: &str| self.log.note(&format!("{problem}; waiting for the checkpoint store"));
        let around = self.around.as_ref();
        let opened =
            Uploads::open(around, store, id.generation, &spec.checkpoint, &spec.outputs, &away).await?;
        let uploads = self.uploads.get_or_init(|| Arc::new(opened));
        let from = uploads.restore(&self.dir, store.newest_step, &away).await?;
        for damaged in &from.damaged {
            self.log.note(&format!("a newer checkpoint is passed over: {damaged}"));
        }
        if let (Some(work), true) = (&self.work, from.checkpoint.is_some()) {
            uploads.restore_outputs(work).await;
        }
        *self.restored.lock().unwrap_or_else(PoisonError::into_inner) = from;
        // What was restored is held by the store already.
        let (looker, dir) = (lock(&self.seen).saves.looker(), self.dir.clone());
        if let Ok(look) = spotq_host::blocking(move || looker.look(&dir)).await {
            lock(&self.seen).saves.skip(&look);
        }
        Ok(())
    }
}
