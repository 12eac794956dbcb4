//! Objects of one job in one store: names under a prefix, size limits, retries, and which chunk is good.
//!
//! Must never delete, rename, or overwrite anything whose name is not the hash of its contents.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt as _, PutMode, PutOptions, PutPayload};
use tokio::task::JoinHandle;

use crate::error::CheckpointError;
use crate::key::Keys;
use crate::manifest::{ChunkRef, MAX_CHUNK_BYTES};

/// How often an object is read before it counts as damaged or missing, or the store as unavailable. A store
/// that lost a byte on the way gives the right one on the second try; three also rides out one restart.
pub(crate) const READ_TRIES: u32 = 3;
/// Wait before the second try; doubled before each one after.
pub(crate) const FIRST_BACKOFF: Duration = Duration::from_millis(50);

/// The store, the prefix and the keys of one job.
#[derive(Debug, Clone)]
pub(crate) struct Objects {
    pub(crate) store: Arc<dyn ObjectStore>,
    pub(crate) prefix: Path,
    pub(crate) keys: Keys,
}

impl Objects {
    pub(crate) fn path(&self, object: &str) -> Path {
        object.split('/').fold(self.prefix.clone(), |path, part| path.join(part))
    }

    /// The object's bytes; `None` if there is none. An object longer than `limit` is damaged: it is not read.
    pub(crate) async fn get(&self, object: &str, limit: u64) -> Result<Option<Bytes>, CheckpointError> {
        let result = match self.store.get(&self.path(object)).await {
            Ok(result) => result,
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(e) => return Err(CheckpointError::store("read", object, e)),
        };
        if result.meta.size > limit {
            let why = format!("it has {} bytes, more than the {limit} allowed", result.meta.size);
            return Err(CheckpointError::corrupt(object, why));
        }
        result.bytes().await.map(Some).map_err(|e| CheckpointError::store("read", object, e))
    }

    /// Reads an object until `check` accepts it, at most [`READ_TRIES`] times.
    ///
    /// # Errors
    /// `Corrupt` if the store answered each time and never with good bytes; the store's own error otherwise.
    pub(crate) async fn get_checked<T>(
        &self,
        object: &str,
        limit: u64,
        check: impl Fn(Bytes) -> Result<T, CheckpointError>,
    ) -> Result<T, CheckpointError> {
        let mut backoff = FIRST_BACKOFF;
        for tries_left in (0..READ_TRIES).rev() {
            let outcome = match self.get(object, limit).await {
                Ok(Some(bytes)) => check(bytes),
                Ok(None) => Err(CheckpointError::corrupt(object, "it is missing")),
                Err(e) => Err(e),
            };
            match outcome {
                Err(CheckpointError::Corrupt { .. } | CheckpointError::Unavailable { .. })
                    if tries_left > 0 =>
                {
                    tokio::time::sleep(backoff).await;
                    backoff *= 2;
                }
                settled => return settled,
            }
        }
        Err(CheckpointError::corrupt(object, "it was never read"))
    }

    /// The bytes that `chunk` names, checked against the name.
    pub(crate) async fn chunk(&self, chunk: &ChunkRef) -> Result<Bytes, CheckpointError> {
        let object = chunk.object();
        let check = |bytes: Bytes| {
            if self.keys.chunk_name(&bytes) != chunk.name {
                return Err(CheckpointError::corrupt(&object, "its contents do not fit its name"));
            }
            let range = usize::try_from(chunk.at).ok().zip(usize::try_from(chunk.at + chunk.len).ok());
            match range {
                Some((start, end)) if end <= bytes.len() => Ok(bytes.slice(start..end)),
                _ => Err(CheckpointError::corrupt(&object, "it is shorter than the manifest says")),
            }
        };
        self.get_checked(&object, MAX_CHUNK_BYTES, check).await
    }

    /// Writes an object whose name is the hash of its contents: writing it twice is harmless.
    pub(crate) async fn put_addressed(&self, object: &str, bytes: Bytes) -> Result<(), CheckpointError> {
        let path = self.path(object);
        let put = self.store.put_opts(&path, bytes.into(), PutMode::Overwrite.into());
        put.await.map(|_| ()).map_err(|e| CheckpointError::store("write", object, e))
    }

    /// Writes an object only if there is none with this name.
    pub(crate) async fn put_new(&self, object: &str, bytes: Bytes) -> Result<(), object_store::Error> {
        let options = PutOptions::from(PutMode::Create);
        self.store.put_opts(&self.path(object), PutPayload::from(bytes), options).await.map(|_| ())
    }
}

/// A spawned task that ends with its owner, so that a dropped push or restore leaves no transfer behind.
#[derive(Debug)]
pub(crate) struct Task<T>(JoinHandle<Result<T, CheckpointError>>);

impl<T: Send + 'static> Task<T> {
    pub(crate) fn spawn(work: impl Future<Output = Result<T, CheckpointError>> + Send + 'static) -> Self {
        Self(tokio::spawn(work))
    }
}

impl<T> Future for Task<T> {
    type Output = Result<T, CheckpointError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(cx).map(|joined| joined.map_err(CheckpointError::join)?)
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Runs file work on the blocking pool, off the runtime's own thread.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, CheckpointError> + Send + 'static,
) -> Result<T, CheckpointError> {
    spotq_host::blocking(work).await.map_err(CheckpointError::join)?
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use object_store::memory::InMemory;

    use super::*;
    use crate::key::JobKey;

    fn objects() -> Objects {
        let keys = Keys::derive(&JobKey([7; 32]));
        Objects { store: Arc::new(InMemory::new()), prefix: "job".into(), keys }
    }

    #[tokio::test]
    async fn an_object_is_read_up_to_its_limit_and_no_longer_one() {
        let objects = objects();
        objects.put_addressed("a", Bytes::from_static(b"123")).await.unwrap();
        assert_eq!(objects.get("a", 3).await.unwrap().unwrap(), "123");
        assert!(matches!(objects.get("a", 2).await, Err(CheckpointError::Corrupt { .. })));
        assert_eq!(objects.get("b", 3).await.unwrap(), None);
    }

    /// Reads an object that is good from the given try on. Returns the outcome, the tries and the time it took.
    async fn read(
        good_from: u32,
        bad: fn() -> CheckpointError,
    ) -> (Result<Bytes, CheckpointError>, u32, Duration) {
        let objects = objects();
        objects.put_addressed("a", Bytes::from_static(b"x")).await.unwrap();
        let (tries, began) = (Cell::new(0), tokio::time::Instant::now());
        let check = |bytes| {
            tries.set(tries.get() + 1);
            if tries.get() >= good_from { Ok(bytes) } else { Err(bad()) }
        };
        let outcome = objects.get_checked("a", 9, check).await;
        (outcome, tries.get(), began.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn what_may_be_better_the_next_time_is_read_three_times_with_doubled_pauses() {
        let damaged = || CheckpointError::corrupt("a", "flipped");
        for (good_from, tries, pauses) in [(1, 1, 0), (2, 2, 50), (3, 3, 150), (4, 3, 150)] {
            let (outcome, tried, took) = read(good_from, damaged).await;
            assert_eq!((outcome.is_ok(), tried), (good_from <= READ_TRIES, tries), "good from {good_from}");
            assert_eq!(took, Duration::from_millis(pauses), "good from {good_from}");
            let why = outcome.map_or_else(|e| e.to_string(), |_| "flipped".to_owned());
            assert!(why.contains("flipped"), "the last answer counts: {why}");
        }
        let refused = || CheckpointError::Denied { what: "read a".into() };
        assert_eq!(read(2, refused).await.1, 1, "what a person must fix is not tried again");
    }

    #[tokio::test(start_paused = true)]
    async fn a_chunk_is_what_its_name_its_place_and_its_length_say() {
        let objects = objects();
        let bytes = Bytes::from_static(b"0123456789");
        let chunk = |len, at| ChunkRef { name: objects.keys.chunk_name(b"0123456789"), len, at };
        objects.put_addressed(&chunk(1, 0).object(), bytes).await.unwrap();
        for (len, at, found) in [(10, 0, "0123456789"), (3, 2, "234"), (8, 2, "23456789")] {
            assert_eq!(objects.chunk(&chunk(len, at)).await.unwrap(), found);
        }
        for (len, at) in [(11, 0), (9, 2), (1, 10)] {
            let outcome = objects.chunk(&chunk(len, at)).await;
            assert!(matches!(outcome, Err(CheckpointError::Corrupt { .. })), "{len} at {at}: {outcome:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_transfer_ends_with_its_owner() {
        let (done, seen) = tokio::sync::oneshot::channel();
        let task = Task::spawn(async move {
            tokio::time::sleep(Duration::from_secs(1)).await;
            done.send(()).ok();
            Ok(())
        });
        tokio::task::yield_now().await;
        drop(task);
        assert!(seen.await.is_err(), "it went on without its owner");
    }
}
