//! A store in memory, for tests and simulation. Clones share one log, so a clone that outlives a crashed scheduler is
//! its disk. It must never be offered to users: it is gone with the process.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use async_trait::async_trait;
use spotq_model::{Epoch, Version};

use crate::{
    Appending, ArchiveEntry, Recovered, Result, Snapshot, Store, StoreError, check_archive, check_records,
};

/// See the module.
#[derive(Debug, Clone, Default)]
pub struct MemStore(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    epoch: Epoch,
    snapshot: Option<Snapshot>,
    /// The records after the snapshot.
    records: Vec<Vec<u8>>,
    archive: BTreeMap<String, Vec<u8>>,
    appends_to_fail: usize,
    appends: u64,
}

impl MemStore {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the next `count` appends fail as a broken disk would, without writing anything.
    pub fn fail_next_appends(&self, count: usize) {
        self.state().appends_to_fail = count;
    }

    /// How many appends succeeded so far.
    #[must_use]
    pub fn appends(&self) -> u64 {
        self.state().appends
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing below panics half-way through a change, so a poisoned lock still guards a whole state.
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[async_trait]
impl Store for MemStore {
    async fn take_leadership(&self) -> Result<Epoch> {
        let mut state = self.state();
        state.epoch = state.epoch.next();
        Ok(state.epoch)
    }

    fn append(&self, epoch: Epoch, expected: Version, records: Vec<Vec<u8>>) -> Appending {
        Appending::ready(self.state().append(epoch, expected, records))
    }

    async fn recover(&self) -> Result<Recovered> {
        let state = self.state();
        Ok(Recovered { snapshot: state.snapshot.clone(), records: state.records.clone() })
    }

    async fn snapshot(&self, epoch: Epoch, version: Version, bytes: Vec<u8>) -> Result<()> {
        let mut state = self.state();
        state.check_epoch(epoch)?;
        let actual = state.version();
        if version > actual {
            return Err(StoreError::Conflict { expected: version, actual });
        }
        let first = state.first_version();
        if state.snapshot.is_none() || version > first {
            // Records that are not in memory could not have been counted, so the difference fits.
            state.records.drain(..(version.0 - first.0) as usize);
            state.snapshot = Some(Snapshot { version, bytes });
        }
        Ok(())
    }

    async fn archive(&self, entries: Vec<ArchiveEntry>) -> Result<()> {
        check_archive(&entries)?;
        self.state().archive.extend(entries.into_iter().map(|e| (e.key, e.value)));
        Ok(())
    }

    async fn archived(&self, from_key: &str, limit: usize) -> Result<Vec<ArchiveEntry>> {
        let state = self.state();
        let found = state.archive.range(from_key.to_owned()..).take(limit);
        Ok(found.map(|(key, value)| ArchiveEntry { key: key.clone(), value: value.clone() }).collect())
    }
}

impl State {
    fn append(&mut self, epoch: Epoch, expected: Version, records: Vec<Vec<u8>>) -> Result<Version> {
        check_records(&records)?;
        self.check_epoch(epoch)?;
        let actual = self.version();
        if expected != actual {
            return Err(StoreError::Conflict { expected, actual });
        }
        if self.appends_to_fail > 0 {
            self.appends_to_fail -= 1;
            return Err(StoreError::Failed {
                operation: "append".into(),
                reason: "injected by a test".into(),
            });
        }
        self.appends += 1;
        self.records.extend(records);
        Ok(self.version())
    }

    fn check_epoch(&self, epoch: Epoch) -> Result<()> {
        if epoch == self.epoch { Ok(()) } else { Err(StoreError::Fenced { epoch, by: self.epoch }) }
    }

    fn first_version(&self) -> Version {
        self.snapshot.as_ref().map_or(Version(0), |s| s.version)
    }

    fn version(&self) -> Version {
        Version(self.first_version().0 + self.records.len() as u64)
    }
}
