//! The scheduler's disk: a [`MemStore`] that outlives its process, behind which appends are slow, fail, are kept though
//! nobody hears of it, and at a crash are lost from any point on.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::FutureExt as _;
use spotq_model::{Epoch, Version};
use spotq_store::{Appender, Appending, ArchiveEntry, MemStore, Recovered, Result, Store, StoreError};
use tokio::sync::Notify;

use crate::counts::Count;
use crate::oracle::Oracle;
use crate::world::{Inner, World};

/// What is there whatever happens to the process.
#[derive(Debug, Default)]
pub(crate) struct Disk {
    mem: MemStore,
    /// Appends in the air, in the order of their calls.
    queue: VecDeque<Write>,
    /// How often it was opened: an older process has no say any more.
    opened: u64,
    /// It has failed and must be opened again.
    pub broken: bool,
}

#[derive(Debug)]
struct Write {
    epoch: Epoch,
    expected: Version,
    records: Vec<Vec<u8>>,
    answer: Appender,
    delay: u64,
    fate: Fate,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Good,
    Fails,
    KeptUnheard,
}

/// The disk as one process of the scheduler has opened it.
#[derive(Debug)]
pub(crate) struct SimStore {
    world: World,
    opened: u64,
    more: Arc<Notify>,
}

impl SimStore {
    /// Opens the disk; to be called on the scheduler's host.
    pub(crate) fn open(world: &World) -> Arc<SimStore> {
        let opened = {
            let disk = &mut world.lock().disk;
            disk.opened += 1;
            disk.broken = false;
            disk.opened
        };
        let store = Arc::new(SimStore { world: world.clone(), opened, more: Arc::default() });
        tokio::spawn(write(world.clone(), opened, store.more.clone()));
        store
    }

    fn check(&self) -> Result<()> {
        let disk = &self.world.lock().disk;
        if disk.broken || disk.opened != self.opened { Err(StoreError::Stopped) } else { Ok(()) }
    }

    fn mem(&self) -> MemStore {
        self.world.lock().disk.mem.clone()
    }
}

#[async_trait]
impl Store for SimStore {
    async fn take_leadership(&self) -> Result<Epoch> {
        self.check()?;
        self.mem().take_leadership().await
    }

    fn append(&self, epoch: Epoch, expected: Version, records: Vec<Vec<u8>>) -> Appending {
        if let Err(stopped) = self.check() {
            return Appending::ready(Err(stopped));
        }
        let inner = &mut *self.world.lock();
        let (slow, fails) = (inner.d.faults.store_slow_ppm, inner.d.faults.store_fail_ppm);
        let mut delay = 0;
        if inner.fault(slow) {
            inner.count(Count::AppendSlow);
            delay = inner.rng.within(1, 1500);
        } else if inner.rng.percent(50) {
            delay = inner.rng.within(1, 15);
        }
        let fate = match inner.fault(fails) {
            true => *inner.rng.pick(&[Fate::Fails, Fate::KeptUnheard]),
            false => Fate::Good,
        };
        let (answer, appending) = Appending::pair();
        let write = Write { epoch, expected, records, answer, delay, fate };
        if delay == 0 && inner.disk.queue.is_empty() {
            commit(inner, write);
        } else {
            inner.disk.queue.push_back(write);
            self.more.notify_one();
        }
        appending
    }

    async fn recover(&self) -> Result<Recovered> {
        self.check()?;
        self.mem().recover().await
    }

    async fn snapshot(&self, epoch: Epoch, version: Version, bytes: Vec<u8>) -> Result<()> {
        self.check()?;
        self.world.lock().count(Count::Snapshot);
        self.mem().snapshot(epoch, version, bytes).await
    }

    async fn archive(&self, entries: Vec<ArchiveEntry>) -> Result<()> {
        self.check()?;
        self.mem().archive(entries).await
    }

    async fn archived(&self, from_key: &str, limit: usize) -> Result<Vec<ArchiveEntry>> {
        self.check()?;
        self.mem().archived(from_key, limit).await
    }
}

/// The process is dead: of what was in the air some is on the disk, from the oldest on, and the rest never will be.
pub(crate) fn crash(inner: &mut Inner) {
    let kept = inner.rng.below(inner.disk.queue.len() as u64 + 1);
    for n in 0.. {
        let Some(write) = inner.disk.queue.pop_front() else { break };
        if n < kept && write.fate != Fate::Fails {
            inner.count(Count::AppendKept);
            commit(inner, write);
        } else {
            inner.count(Count::AppendLost);
            inner.disk.queue.clear();
        }
    }
    inner.disk.broken = true;
}

/// Makes appends durable, one after the other.
async fn write(world: World, opened: u64, more: Arc<Notify>) {
    loop {
        let delay = {
            let disk = &world.lock().disk;
            if disk.opened != opened {
                return;
            }
            disk.queue.front().map(|write| write.delay)
        };
        let Some(delay) = delay else {
            more.notified().await;
            continue;
        };
        tokio::time::sleep(Duration::from_millis(delay)).await;
        let inner = &mut *world.lock();
        if let Some(write) = inner.disk.queue.pop_front() {
            commit(inner, write);
        }
    }
}

fn commit(inner: &mut Inner, write: Write) {
    let Write { epoch, expected, records, answer, fate, .. } = write;
    if inner.disk.broken {
        return answer.answer(Err(StoreError::Stopped));
    }
    let failed = || StoreError::Failed { operation: "append".into(), reason: "the disk is gone".into() };
    if fate == Fate::Fails {
        inner.count(Count::AppendFailed);
        inner.disk.broken = true;
        return answer.answer(Err(failed()));
    }
    let appended = inner.disk.mem.append(epoch, expected, records.clone()).now_or_never();
    let appended = appended.unwrap_or(Err(StoreError::Stopped));
    if appended.is_ok() {
        Oracle::durable(inner, &records);
    }
    if fate == Fate::KeptUnheard {
        inner.count(Count::AppendUnheard);
        inner.disk.broken = true;
        return answer.answer(Err(failed()));
    }
    answer.answer(appended);
}
