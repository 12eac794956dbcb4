//! A store in memory whose appends can be held back, slowed and failed, and that keeps every record it ever took.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use spotq_model::{Epoch, Event, Version};
use spotq_store::{Appender, Appending, ArchiveEntry, MemStore, Recovered, Result, Store};
use tokio::sync::{mpsc, watch};

#[derive(Debug, Clone)]
pub struct TestStore {
    pub mem: MemStore,
    queue: mpsc::UnboundedSender<(Appender, Epoch, Version, Vec<Vec<u8>>)>,
    open: watch::Sender<bool>,
    waiting: Arc<AtomicUsize>,
    delay_ms: Arc<AtomicU64>,
    log: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl TestStore {
    pub fn new() -> TestStore {
        let (queue, mut held) = mpsc::unbounded_channel::<(Appender, Epoch, Version, Vec<Vec<u8>>)>();
        let store = TestStore {
            mem: MemStore::new(),
            queue,
            open: watch::Sender::new(true),
            waiting: Arc::default(),
            delay_ms: Arc::default(),
            log: Arc::default(),
        };
        let (mem, mut open) = (store.mem.clone(), store.open.subscribe());
        let (waiting, delay, log) = (store.waiting.clone(), store.delay_ms.clone(), store.log.clone());
        tokio::spawn(async move {
            while let Some((appender, epoch, version, records)) = held.recv().await {
                if open.wait_for(|open| *open).await.is_err() {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(delay.load(Ordering::SeqCst))).await;
                let result = mem.append(epoch, version, records.clone()).await;
                if result.is_ok() {
                    log.lock().unwrap().extend(records);
                }
                waiting.fetch_sub(1, Ordering::SeqCst);
                appender.answer(result);
            }
        });
        store
    }

    /// Appends from now on wait.
    pub fn hold(&self) {
        self.open.send_replace(false);
    }

    /// Appends go on.
    pub fn release(&self) {
        self.open.send_replace(true);
    }

    /// Each append takes this long.
    pub fn slow(&self, delay: Duration) {
        self.delay_ms.store(delay.as_millis() as u64, Ordering::SeqCst);
    }

    /// How many appends were asked for and are not durable.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }

    /// Every record that became durable, whatever snapshots were taken since.
    pub fn log(&self) -> Vec<Vec<u8>> {
        self.log.lock().unwrap().clone()
    }

    /// The same, read.
    pub fn events(&self) -> Vec<Event> {
        (0..)
            .zip(self.log())
            .map(|(version, record)| spotq_engine::decode_record(version, &record).unwrap())
            .collect()
    }
}

#[async_trait]
impl Store for TestStore {
    async fn take_leadership(&self) -> Result<Epoch> {
        self.mem.take_leadership().await
    }

    fn append(&self, epoch: Epoch, expected: Version, records: Vec<Vec<u8>>) -> Appending {
        let (appender, appending) = Appending::pair();
        self.waiting.fetch_add(1, Ordering::SeqCst);
        self.queue.send((appender, epoch, expected, records)).unwrap();
        appending
    }

    async fn recover(&self) -> Result<Recovered> {
        self.mem.recover().await
    }

    async fn snapshot(&self, epoch: Epoch, version: Version, bytes: Vec<u8>) -> Result<()> {
        self.mem.snapshot(epoch, version, bytes).await
    }

    async fn archive(&self, entries: Vec<ArchiveEntry>) -> Result<()> {
        self.mem.archive(entries).await
    }

    async fn archived(&self, from_key: &str, limit: usize) -> Result<Vec<ArchiveEntry>> {
        self.mem.archived(from_key, limit).await
    }
}
