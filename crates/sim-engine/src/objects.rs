//! The checkpoint store of all jobs: in memory, shared by all nodes, with calls that fail, answers that are lost, slow
//! calls, and objects that are damaged after they were stored. Keeps its own record of every commit log.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::BoxStream;
use futures::{FutureExt as _, StreamExt as _};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt as _, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use spotq_checkpoint::{Action, LogEntry};
use spotq_model::Generation;

use crate::counts::Count;
use crate::oracle::Oracle;
use crate::world::{Inner, World};

/// What is stored, and what was seen of it.
#[derive(Debug)]
pub(crate) struct Objects {
    store: Arc<InMemory>,
    /// The commit log of each job, by its name.
    pub logs: BTreeMap<String, Vec<LogEntry>>,
    /// Jobs of which something was damaged.
    pub damaged: BTreeSet<String>,
}

impl Default for Objects {
    fn default() -> Self {
        Objects { store: Arc::new(InMemory::new()), logs: BTreeMap::new(), damaged: BTreeSet::new() }
    }
}

/// A commit that counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    pub checkpoint: u64,
    pub generation: Generation,
    pub step: Option<u64>,
}

impl Objects {
    /// The checkpoint that counts, by a second reading of the log: the newest one that no fence before it shuts out and
    /// that was not set aside.
    pub(crate) fn head(&self, uuid: &str) -> Option<Head> {
        let log = self.logs.get(uuid)?;
        let fenced = |place: usize| {
            let before = log[..place].iter().filter(|entry| entry.action == Action::Fence);
            before.map(|entry| entry.generation).max().unwrap_or_default()
        };
        let counts = |(place, entry): &(usize, &LogEntry)| entry.generation >= fenced(*place);
        let aside: BTreeSet<u64> = (0..)
            .zip(log)
            .filter(counts)
            .filter_map(|(_, entry)| match &entry.action {
                Action::Quarantine { checkpoint, .. } | Action::Retire { checkpoint } => Some(checkpoint.0),
                Action::Fence | Action::Commit { .. } => None,
            })
            .collect();
        let heads = (0..).zip(log).filter(counts).filter_map(|(_, entry)| match &entry.action {
            Action::Commit { checkpoint, step, .. } if !aside.contains(&checkpoint.0) => {
                Some(Head { checkpoint: checkpoint.0, generation: entry.generation, step: *step })
            }
            _ => None,
        });
        heads.last()
    }
}

/// The store as the worker of one node reaches it.
#[derive(Debug)]
pub(crate) struct SimObjects {
    world: World,
    inst: usize,
    store: Arc<InMemory>,
}

impl SimObjects {
    pub(crate) fn new(world: &World, inst: usize) -> Arc<SimObjects> {
        let store = world.lock().objects.store.clone();
        Arc::new(SimObjects { world: world.clone(), inst, store })
    }

    /// A call is on its way; it may be slow, and it may fail.
    async fn enter(&self, fails: impl Fn(&Inner) -> u32, count: Count) -> Result<()> {
        let (delay, failed) = {
            let inner = &mut *self.world.lock();
            let slow = inner.d.faults.objects_slow_ppm;
            let mut delay = inner.rng.within(0, 20);
            if inner.fault(slow) {
                self.trouble(inner, Count::StoreSlow);
                delay = inner.rng.within(100, 2500);
            }
            let ppm = fails(inner);
            (delay, inner.fault(ppm))
        };
        if delay > 0 {
            tokio::time::sleep(Duration::from_millis(delay)).await;
        }
        if failed {
            self.trouble(&mut self.world.lock(), count);
            return Err(injected("the call was lost"));
        }
        Ok(())
    }

    fn trouble(&self, inner: &mut Inner, what: Count) {
        inner.count(what);
        let t = inner.t;
        inner.cloud.insts[self.inst].store_trouble_at = t;
    }
}

/// Damages a chunk of the job's newest checkpoint, or any other object that is no log entry.
pub(crate) fn corrupt(inner: &mut Inner, uuid: &str) {
    let store = inner.objects.store.clone();
    let listed = store.list(None).filter_map(async |meta| Some(meta.ok()?.location)).collect::<Vec<_>>();
    let Some(mut paths) = listed.now_or_never() else { return };
    let wanted = |path: &Path| {
        let text = path.to_string();
        text.contains(uuid) && (text.contains("/chk/") || text.contains("/man/"))
    };
    paths.retain(wanted);
    if paths.is_empty() {
        return;
    }
    let path = inner.rng.pick(&paths).clone();
    let read = async { store.get(&path).await?.bytes().await }.now_or_never();
    let Some(Ok(bytes)) = read else { return };
    let mut bytes = bytes.to_vec();
    if bytes.is_empty() {
        return;
    }
    let at = inner.rng.below(bytes.len() as u64) as usize;
    if inner.rng.percent(50) {
        bytes[at] ^= 0x40;
    } else {
        bytes.truncate(at);
    }
    let put = store.put(&path, PutPayload::from(bytes)).now_or_never();
    if matches!(put, Some(Ok(_))) {
        inner.count(Count::Corrupted);
        inner.objects.damaged.insert(uuid.to_owned());
        inner.say(|| format!("damaged: {path}"));
    }
}

fn injected(why: &'static str) -> object_store::Error {
    object_store::Error::Generic { store: "simulated", source: why.into() }
}

/// What a stored object says, if it is an entry of a job's commit log: the job's name and the entry.
fn log_entry(path: &Path, bytes: &[u8]) -> Option<(String, LogEntry)> {
    let parts: Vec<String> = path.parts().map(|part| part.as_ref().to_owned()).collect();
    let [.., uuid, log, _] = parts.as_slice() else { return None };
    if log != "log" {
        return None;
    }
    let sealed: serde_json::Value = serde_json::from_slice(bytes).ok()?;
    Some((uuid.clone(), serde_json::from_value(sealed.get("body")?.clone()).ok()?))
}

impl fmt::Display for SimObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("simulated")
    }
}

#[async_trait::async_trait]
impl ObjectStore for SimObjects {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        self.enter(|inner| inner.d.faults.put_fail_ppm, Count::PutFailed).await?;
        let conditional = opts.mode == PutMode::Create;
        let bytes: Vec<u8> = payload.iter().flat_map(|piece| piece.iter().copied()).collect();
        let result = self.store.put_opts(location, payload, opts).await;
        let inner = &mut *self.world.lock();
        if let (true, true, Some((uuid, entry))) = (result.is_ok(), conditional, log_entry(location, &bytes))
        {
            Oracle::logged(inner, &uuid, &entry);
            inner.objects.logs.entry(uuid).or_default().push(entry);
        }
        let unheard = inner.d.faults.put_fail_ppm;
        if inner.fault(unheard) {
            self.trouble(inner, Count::PutUnheard);
            return Err(injected("the answer was lost"));
        }
        result
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.store.put_multipart_opts(location, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.enter(|inner| inner.d.faults.get_fail_ppm, Count::GetFailed).await?;
        self.store.get_opts(location, options).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.store.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let fails = {
            let inner = &mut *self.world.lock();
            let ppm = inner.d.faults.get_fail_ppm;
            inner.fault(ppm)
        };
        if fails {
            self.trouble(&mut self.world.lock(), Count::GetFailed);
            return futures::future::ready(Err(injected("the list was lost"))).into_stream().boxed();
        }
        self.store.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.enter(|inner| inner.d.faults.get_fail_ppm, Count::GetFailed).await?;
        self.store.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.store.copy_opts(from, to, options).await
    }
}
