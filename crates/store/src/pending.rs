//! The two ends of an append that is under way. It carries one result and nothing else.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use spotq_model::Version;
use tokio::sync::oneshot;

use crate::{Result, StoreError};

/// The result of an append to come. The append goes on whether or not this is awaited.
#[derive(Debug)]
#[must_use = "an append is only known to be durable once its result was awaited"]
pub struct Appending(oneshot::Receiver<Result<Version>>);

/// The store's end of an append: answers it once.
#[derive(Debug)]
pub struct Appender(oneshot::Sender<Result<Version>>);

impl Appending {
    /// Both ends of a new append.
    pub fn pair() -> (Appender, Self) {
        let (sender, receiver) = oneshot::channel();
        (Appender(sender), Self(receiver))
    }

    /// An append whose result is known already.
    pub fn ready(result: Result<Version>) -> Self {
        let (appender, appending) = Self::pair();
        appender.answer(result);
        appending
    }
}

impl Appender {
    /// Tells the caller; does nothing when it has gone.
    pub fn answer(self, result: Result<Version>) {
        self.0.send(result).ok();
    }
}

impl Future for Appending {
    type Output = Result<Version>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        // The other end goes without an answer only when the store's writer has ended.
        Pin::new(&mut self.0).poll(context).map(|received| received.unwrap_or(Err(StoreError::Stopped)))
    }
}
