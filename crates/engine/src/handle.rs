//! The engine's inbox, as everybody else sees it.

use std::collections::HashMap;
use std::sync::Arc;

use spotq_core::{Cluster, Policies};
use spotq_model::{Epoch, Input, JobId, JobSpec, Offer, Progress, TaskId, Timestamp};
use tokio::sync::{mpsc, oneshot, watch};

/// How many messages may wait. A caller beyond that waits for its turn, so that memory is bounded.
pub(crate) const INBOX_SIZE: usize = 4096;

/// Why an engine did not answer.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error("the scheduler is stopping; try again in a moment")]
    Stopping,
}

/// What a query sees: a state that is durable by the time the answer is out.
#[derive(Debug)]
pub struct Seen<'a> {
    pub cluster: &'a Cluster,
    pub policies: &'a Policies,
    pub offers: &'a [Offer],
    /// Newer than what is durable.
    pub progress: &'a HashMap<TaskId, Progress>,
    pub now: Timestamp,
    pub epoch: Epoch,
}

/// A job that was submitted, now or earlier with the same key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Submitted {
    pub job: JobId,
    pub uuid: String,
    pub created: bool,
}

pub(crate) type Release = Box<dyn FnOnce() + Send>;
pub(crate) type Then = Box<dyn FnOnce(&Seen<'_>) -> Release + Send>;

/// One message of the inbox.
pub(crate) enum Msg {
    /// Decide `input`; then let `then` look; its answer goes out when what it saw is durable.
    Do { input: Option<Box<Input>>, then: Option<Then> },
    /// New prices.
    Offers(Vec<Offer>),
    /// An effect's call came back, whatever it said.
    EffectOver(crate::effects::Key),
    /// A worker opened a session: its effects are due at once.
    Joined(spotq_model::NodeId),
}

/// A cheap, clonable way in.
#[derive(Debug, Clone)]
pub struct Handle {
    pub(crate) inbox: mpsc::Sender<Msg>,
    /// Counts changes; watchers look again when it moves.
    pub(crate) changes: watch::Receiver<u64>,
}

impl std::fmt::Debug for Msg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Msg::Do { .. } => "Do",
            Msg::Offers(_) => "Offers",
            Msg::EffectOver(_) => "EffectOver",
            Msg::Joined(_) => "Joined",
        })
    }
}

impl Handle {
    /// Queues a job; the answer means that it survives a power cut (INV-01). The same key twice is the same job.
    pub async fn submit(&self, client_key: String, spec: JobSpec) -> Result<Submitted, EngineError> {
        let uuid = spotq_host::uuid().to_string();
        let (key, drawn) = (client_key.clone(), uuid.clone());
        let input = Input::Submit { client_key, uuid, spec: Arc::new(spec) };
        let submitted = self.ask(Some(input), move |seen| {
            let job = seen.cluster.by_client_key.get(key.as_str()).and_then(|id| seen.cluster.jobs.get(id));
            job.map(|job| Submitted { job: job.id, uuid: job.uuid.clone(), created: job.uuid == drawn })
        });
        submitted.await?.ok_or(EngineError::Stopping)
    }

    /// Decides an input; returns when its events are durable.
    pub async fn command(&self, input: Input) -> Result<(), EngineError> {
        self.ask(Some(input), |_| ()).await
    }

    /// Reads the state.
    pub async fn query<T: Send + 'static>(
        &self,
        look: impl FnOnce(&Seen<'_>) -> T + Send + 'static,
    ) -> Result<T, EngineError> {
        self.ask(None, look).await
    }

    /// Decides an input and then reads the state that it led to.
    pub async fn ask<T: Send + 'static>(
        &self,
        input: Option<Input>,
        look: impl FnOnce(&Seen<'_>) -> T + Send + 'static,
    ) -> Result<T, EngineError> {
        let (tx, rx) = oneshot::channel();
        let then: Then = Box::new(move |seen| {
            let answer = look(seen);
            // Who asked may be gone by now; nobody else wants the answer.
            Box::new(move || drop(tx.send(answer)))
        });
        let message = Msg::Do { input: input.map(Box::new), then: Some(then) };
        self.inbox.send(message).await.map_err(|_| EngineError::Stopping)?;
        rx.await.map_err(|_| EngineError::Stopping)
    }

    /// Resolves when something changed after the last look.
    pub async fn changed(&mut self) -> Result<(), EngineError> {
        self.changes.changed().await.map_err(|_| EngineError::Stopping)
    }

    pub(crate) async fn tell(&self, message: Msg) {
        // A stopping engine needs no news.
        let _ = self.inbox.send(message).await;
    }

    pub(crate) async fn input(&self, input: Input) {
        self.tell(Msg::Do { input: Some(Box::new(input)), then: None }).await;
    }
}

/// Shared by all parts that act.
#[derive(Debug, Clone)]
pub(crate) struct Shared {
    pub config: Arc<crate::config::EngineConfig>,
    pub sessions: Arc<crate::sessions::Sessions>,
    /// Set when it is served with TLS: new workers are to trust the CA of that moment.
    pub security: Arc<std::sync::OnceLock<Arc<crate::auth::Security>>>,
    pub handle: Handle,
}
