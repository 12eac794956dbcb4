//! Gives the callers of a group their answers from inside their runtime.
//!
//! Waking a hundred tasks one by one from the writer's thread costs a system call for almost each of them, because the
//! runtime's threads fall asleep in between; a task of the runtime wakes all of them for one. An answer must never wait
//! for this: where there is no runtime, or it has no time, the writer answers itself.

use std::sync::{Arc, OnceLock};

use spotq_model::Version;
use spotq_store::{Appender, Result};
use tokio::sync::mpsc;

/// An append and its result.
pub(crate) type Answer = (Appender, Result<Version>);

/// The most groups that wait to be answered. The runtime is late by a few at most when it runs at all.
const MAX_WAITING_GROUPS: usize = 64;

/// The way to the task that answers.
#[derive(Debug, Clone, Default)]
pub(crate) struct AnswerDesk(Arc<OnceLock<mpsc::Sender<Vec<Answer>>>>);

impl AnswerDesk {
    /// Starts the task when this is called in a runtime for the first time.
    pub(crate) fn attach(&self) {
        if self.0.get().is_some() {
            return;
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        self.0.get_or_init(|| {
            let (sender, mut receiver) = mpsc::channel(MAX_WAITING_GROUPS);
            runtime.spawn(async move {
                while let Some(group) = receiver.recv().await {
                    answer_all(group);
                }
            });
            sender
        });
    }

    pub(crate) fn answer(&self, group: Vec<Answer>) {
        let unanswered = match self.0.get() {
            Some(desk) => desk.try_send(group).err().map(|error| match error {
                mpsc::error::TrySendError::Full(group) | mpsc::error::TrySendError::Closed(group) => group,
            }),
            None => Some(group),
        };
        answer_all(unanswered.into_iter().flatten());
    }
}

fn answer_all(group: impl IntoIterator<Item = Answer>) {
    for (appender, result) in group {
        appender.answer(result);
    }
}
