//! The workers and the checkpoint stores. A worker takes grants, restores the newest checkpoint, works, commits,
//! finishes, and stops when it is told to.

use std::collections::BTreeMap;

use spotq_model::{Checkpoint, Exit, Generation, NodeId, Report, TaskId, Timestamp};

/// How many rounds a command works before it is done.
const ROUNDS: u32 = 3;

#[derive(Debug, Default)]
pub struct Workers {
    pub grants: BTreeMap<(NodeId, TaskId, Generation), Stage>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    Granted,
    Restored,
    Working(u32),
    /// Told to stop; the command is being ended.
    Stopping,
}

/// The checkpoints of one task, newest last.
#[derive(Debug, Default)]
pub struct CheckpointStore {
    pub log: Vec<Checkpoint>,
    written: u64,
}

impl CheckpointStore {
    pub fn commit(&mut self, generation: Generation, now: Timestamp) -> Checkpoint {
        self.written += 1;
        let checkpoint = Checkpoint {
            sequence: self.written,
            log_sequence: self.written * 2,
            generation,
            step: Some(self.written * 100),
            bytes_total: 1000,
            bytes_uploaded: 10,
            saved_at: now,
            manifest_hash: format!("{:04x}", self.written),
        };
        self.log.push(checkpoint.clone());
        checkpoint
    }

    /// The newest checkpoint after passing over `damaged` newer ones, which are quarantined for good: nobody after this
    /// one is told of them again.
    pub fn restore(&mut self, damaged: usize) -> (Option<Checkpoint>, u32) {
        let passed_over = damaged.min(self.log.len());
        self.log.truncate(self.log.len() - passed_over);
        (self.log.last().cloned(), u32::try_from(passed_over).unwrap())
    }
}

impl Workers {
    pub fn held(&self, node: NodeId) -> Vec<(TaskId, Generation)> {
        self.grants
            .keys()
            .filter(|(on, _, _)| *on == node)
            .map(|(_, task, generation)| (*task, *generation))
            .collect()
    }

    /// A grant that is held already is accepted again and goes on where it was.
    pub fn grant(&mut self, node: NodeId, task: TaskId, generation: Generation) -> Report {
        self.grants.entry((node, task, generation)).or_insert(Stage::Granted);
        Report::Accepted
    }

    pub fn stop(&mut self, node: NodeId, task: TaskId, generation: Generation) {
        self.grants.insert((node, task, generation), Stage::Stopping);
    }

    /// One round of honest work: what the worker says next about this grant. A finished grant is forgotten.
    pub fn work(
        &mut self,
        grant: (NodeId, TaskId, Generation),
        store: &mut CheckpointStore,
        exit_code: i32,
        now: Timestamp,
    ) -> Option<Report> {
        let (next, report) = match self.grants.get(&grant)? {
            Stage::Granted => {
                let (from, fell_back) = store.restore(0);
                (Some(Stage::Restored), Report::Restored { from, fell_back })
            }
            Stage::Restored => (Some(Stage::Working(0)), Report::Started),
            Stage::Working(rounds) if *rounds < ROUNDS => (
                Some(Stage::Working(rounds + 1)),
                Report::Committed { checkpoint: store.commit(grant.2, now) },
            ),
            Stage::Working(_) => (None, Report::Finished { exit: exited(exit_code, now) }),
            Stage::Stopping => (None, Report::Finished { exit: terminated(now) }),
        };
        match next {
            Some(stage) => self.grants.insert(grant, stage),
            None => self.grants.remove(&grant),
        };
        Some(report)
    }
}

pub fn exited(exit_code: i32, stopped_at: Timestamp) -> Exit {
    Exit {
        exit_code: Some(exit_code),
        signal: None,
        out_of_memory: false,
        launch_error: None,
        signalled: false,
        worker_leaving: false,
        stopped_at,
        last_progress: None,
        detail: None,
    }
}

pub fn terminated(stopped_at: Timestamp) -> Exit {
    Exit { exit_code: None, signal: Some(15), signalled: true, ..exited(0, stopped_at) }
}
