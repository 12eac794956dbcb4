//! The workers that are connected now. Lost with the process and built again when they dial in.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use spotq_model::NodeId;
use spotq_proto::v1::{SchedulerMessage, scheduler_message};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::clock::Instant;

/// Messages that may wait for one worker; one that reads nothing is dropped and dials in again.
pub(crate) const OUTBOX_SIZE: usize = 256;

pub(crate) type Outbox = mpsc::Sender<Result<SchedulerMessage, Status>>;

/// Who is connected, and when each node was last heard of.
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    next_id: u64,
    open: HashMap<NodeId, Session>,
    /// Not wall-clock time: a clock that is set forward must not end every lease at once.
    heard: HashMap<NodeId, Instant>,
}

#[derive(Debug)]
struct Session {
    id: u64,
    outbox: Outbox,
    /// Ends the stream, so that its worker dials in again.
    cut: CancellationToken,
}

impl Sessions {
    /// A session that replaces any older one of the node. It is to end when the token says so.
    pub(crate) fn open(&self, node: NodeId, outbox: Outbox) -> (u64, CancellationToken) {
        let mut inner = self.lock();
        inner.next_id += 1;
        let (id, cut) = (inner.next_id, CancellationToken::new());
        let older = inner.open.insert(node, Session { id, outbox, cut: cut.clone() });
        inner.heard.insert(node, Instant::now());
        if let Some(older) = older {
            older.cut.cancel();
        }
        (id, cut)
    }

    /// Ends this session, unless a newer one of the node has replaced it.
    pub(crate) fn close(&self, node: NodeId, id: u64) {
        let mut inner = self.lock();
        if inner.open.get(&node).is_some_and(|session| session.id == id) {
            inner.open.remove(&node);
        }
    }

    pub(crate) fn heard(&self, node: NodeId) {
        self.lock().heard.insert(node, Instant::now());
    }

    /// How long the node has been silent; not at all if it was never heard of in this process, so that a restart
    /// extends every lease.
    pub(crate) fn silent_for(&self, node: NodeId) -> Duration {
        self.lock().heard.entry(node).or_insert_with(Instant::now).elapsed()
    }

    pub(crate) fn forget(&self, gone: impl Fn(NodeId) -> bool) {
        self.lock().heard.retain(|node, _| !gone(*node));
    }

    /// Whether the message is on its way. A worker whose outbox is full is cut off: it will dial in again.
    pub(crate) fn send(&self, node: NodeId, kind: scheduler_message::Kind) -> bool {
        let mut inner = self.lock();
        let Some(session) = inner.open.get(&node) else { return false };
        let sent = session.outbox.try_send(Ok(SchedulerMessage { kind: Some(kind) })).is_ok();
        if !sent && let Some(session) = inner.open.remove(&node) {
            session.cut.cancel();
        }
        sent
    }

    pub(crate) fn connected(&self) -> usize {
        self.lock().open.len()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // The map is whole after every statement, so a panic elsewhere cannot have left it half changed.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
