//! Object stores that misbehave on purpose.
//!
//! For tests only. They must never change what they pass on, beyond the fault they were asked for.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::stream::BoxStream;
use futures::{FutureExt as _, StreamExt as _};
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMode,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

/// When a call fails, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// From this call on (counted from 0), nothing reaches the store: the machine is gone.
    DeadFrom(u64),
    /// This one conditional write (counted from 0) succeeds, but its answer is an error.
    AnswerLost(u64),
    /// Each read and write takes so long.
    Slow(Duration),
    /// No fault: calls are counted.
    None,
}

/// Passes calls on to another store, but for its fault.
#[derive(Debug)]
pub struct Faulty {
    inner: Arc<dyn ObjectStore>,
    fault: Fault,
    calls: AtomicU64,
    conditional_writes: AtomicU64,
    under_way: AtomicU64,
    most_at_once: AtomicU64,
}

/// A store that takes put-if-absent for a plain put, as several S3 clones do.
#[derive(Debug)]
pub struct Overwriting(pub Arc<dyn ObjectStore>);

impl Faulty {
    #[must_use]
    pub fn new(inner: Arc<dyn ObjectStore>, fault: Fault) -> Arc<Self> {
        Arc::new(Self {
            inner,
            fault,
            calls: AtomicU64::new(0),
            conditional_writes: AtomicU64::new(0),
            under_way: AtomicU64::new(0),
            most_at_once: AtomicU64::new(0),
        })
    }

    /// The most slow reads and writes that there were at once, and starts to count them anew.
    #[must_use]
    pub fn most_at_once(&self) -> u64 {
        self.most_at_once.swap(0, Ordering::SeqCst)
    }

    /// Calls so far, also those that failed.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::SeqCst)
    }

    fn enter(&self) -> Result<()> {
        let call = self.calls.fetch_add(1, Ordering::SeqCst);
        match self.fault {
            Fault::DeadFrom(first) if call >= first => Err(injected("the machine is gone")),
            Fault::DeadFrom(_) | Fault::AnswerLost(_) | Fault::Slow(_) | Fault::None => Ok(()),
        }
    }

    async fn take_time(&self) {
        if let Fault::Slow(time) = self.fault {
            let at_once = self.under_way.fetch_add(1, Ordering::SeqCst) + 1;
            self.most_at_once.fetch_max(at_once, Ordering::SeqCst);
            tokio::time::sleep(time).await;
            self.under_way.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

fn injected(why: &'static str) -> object_store::Error {
    object_store::Error::Generic { store: "Faulty", source: why.into() }
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Faulty({})", self.inner)
    }
}

impl fmt::Display for Overwriting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Overwriting({})", self.0)
    }
}

#[async_trait::async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        self.enter()?;
        self.take_time().await;
        let conditional = opts.mode == PutMode::Create;
        let result = self.inner.put_opts(location, payload, opts).await;
        if conditional {
            let nth = self.conditional_writes.fetch_add(1, Ordering::SeqCst);
            if self.fault == Fault::AnswerLost(nth) {
                return Err(injected("the answer was lost"));
            }
        }
        result
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.enter()?;
        self.inner.put_multipart_opts(location, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.enter()?;
        self.take_time().await;
        self.inner.get_opts(location, options).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        match self.enter() {
            Ok(()) => self.inner.list(prefix),
            Err(e) => futures::future::ready(Err(e)).into_stream().boxed(),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.enter()?;
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.enter()?;
        self.inner.copy_opts(from, to, options).await
    }
}

#[async_trait::async_trait]
impl ObjectStore for Overwriting {
    async fn put_opts(&self, location: &Path, payload: PutPayload, _: PutOptions) -> Result<PutResult> {
        self.0.put_opts(location, payload, PutMode::Overwrite.into()).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.0.put_multipart_opts(location, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.0.get_opts(location, options).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.0.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.0.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.0.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.0.copy_opts(from, to, options).await
    }
}
