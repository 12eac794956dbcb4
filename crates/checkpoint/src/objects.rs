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
