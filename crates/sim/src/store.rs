//! The store as its contract says: appends of one epoch, in call order, all of a batch or nothing. It keeps what it
//! acknowledged for ever; of what was in the air at a crash it may have any beginning.

use std::collections::BTreeMap;

use spotq_core::Cluster;
use spotq_model::{Epoch, Event};

use crate::counts::Count;
use crate::oracle::Oracle;
use crate::world::{Ev, World};

/// From the disk to the scheduler that waits for it.
const RESULT_MS: u64 = 2;

/// The disk of the cluster, shared by all schedulers.
#[derive(Debug, Default)]
pub(crate) struct Store {
    pub epoch: Epoch,
    pub log: Vec<Event>,
    /// The newest one that can be read.
    pub snapshot: Option<(u64, Cluster)>,
    /// Appends in the air, by their number, which is their order.
    pending: BTreeMap<u64, Pending>,
    next: u64,
}

#[derive(Debug)]
struct Pending {
    proc: usize,
    inc: u32,
    epoch: Epoch,
    expected: u64,
    events: Vec<Event>,
    /// When the store writes it.
    at: u64,
}

impl Store {
    /// With room for so many events.
    pub(crate) fn new(events: usize) -> Store {
        Store { log: Vec::with_capacity(events), ..Store::default() }
    }
}

/// Why an append was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    Fenced,
    Conflict,
    Failed,
}

impl World {
    /// Takes its place in the queue now; the result comes as [`Ev::Appended`].
    pub(crate) fn store_append(
        &mut self,
        (proc, inc): (usize, u32),
        epoch: Epoch,
        expected: u64,
        events: Vec<Event>,
    ) {
        let slow = !self.calm && self.rng.chance(self.d.faults.slow_store_ppm);
        let delay = if slow { self.rng.within(500, 3000) } else { self.rng.within(1, 15) };
        let own = self.store.pending.values().filter(|p| p.proc == proc && p.inc == inc);
        let at = own.map(|p| p.at).max().unwrap_or(0).max(self.t + delay);
        let id = self.store.next;
        self.store.next += 1;
        self.store.pending.insert(id, Pending { proc, inc, epoch, expected, events, at });
        self.at(at, Ev::Write { id });
    }

    /// The store comes to an append; it may have been lost with its scheduler.
    pub(crate) fn store_write(&mut self, id: u64) {
        let Some(pending) = self.store.pending.remove(&id) else { return };
        let (proc, inc) = (pending.proc, pending.inc);
        let result = self.commit(pending);
        // Results come in the order of the appends.
        self.after(RESULT_MS, Ev::Appended { proc, inc, result });
    }

    fn commit(&mut self, pending: Pending) -> Result<u64, Refused> {
        if pending.epoch != self.store.epoch {
            self.counts.add(Count::AppendFenced);
            return Err(Refused::Fenced);
        }
        if pending.expected != self.store.log.len() as u64 {
            self.counts.add(Count::AppendConflict);
            return Err(Refused::Conflict);
        }
        if !self.calm && self.rng.chance(self.d.faults.store_fail_ppm) {
            // Nothing was written. Its scheduler ends, and what it had built on this is refused for its version.
            self.counts.add(Count::AppendFailed);
            return Err(Refused::Failed);
        }
        for event in pending.events {
            self.counts.add(Count::Event);
            self.trace.event(self.t, &event);
            Oracle::committed(self, &event);
            self.store.log.push(event);
        }
        Oracle::appended(self);
        Ok(self.store.log.len() as u64)
    }

    /// What becomes of the appends of a scheduler that died: a beginning of them is on disk, one may be torn and is
    /// then dropped whole, the rest never arrives; or they are on their way still and meet the fence of the next leader.
    pub(crate) fn store_lost_writer(&mut self, proc: usize, inc: u32) {
        let ids: Vec<u64> = self
            .store
            .pending
            .iter()
            .filter(|(_, p)| p.proc == proc && p.inc == inc)
            .map(|(id, _)| *id)
            .collect();
        if ids.is_empty() || self.rng.percent(30) {
            return;
        }
        let kept = self.rng.below(ids.len() as u64 + 1) as usize;
        for (n, id) in ids.into_iter().enumerate() {
            let Some(pending) = self.store.pending.remove(&id) else { continue };
            if n < kept {
                self.counts.add(Count::AppendKept);
                // Its writer is gone: nobody hears the result.
                let _ = self.commit(pending);
            } else {
                // Both are gone; which of the two it was makes no difference to what follows.
                let torn = n == kept && id.is_multiple_of(2);
                self.counts.add(if torn { Count::AppendTorn } else { Count::AppendLost });
            }
        }
    }
}
