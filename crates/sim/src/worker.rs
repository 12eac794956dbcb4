//! A node's worker: it takes each grant once, repeats reports until they are acknowledged, keeps a journal over its own
//! death, and goes on training when it hears nothing. What its commands do is in `attempt`.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use spotq_model::{Exit, Generation, GoneCause, JobSpec, Report, StopWhy, TaskId, Timestamp};

use crate::attempt::{Attempt, Phase, Work};
use crate::counts::Count;
use crate::oracle::Oracle;
use crate::scheduler::{Grant, Msg};
use crate::world::{Ev, World};

/// A worker that died is started again within this time.
const RESTART_MS: (u64, u64) = (500, 10_000);
/// How soon a worker sees what the metadata service says.
const NOTICE_SEEN_MS: (u64, u64) = (50, 5000);

#[derive(Debug, Default)]
pub(crate) struct Worker {
    up: bool,
    inc: u32,
    pub conn: Option<usize>,
    pub welcomed: bool,
    pub partitioned_until: u64,
    outbox: VecDeque<Out>,
    /// Of the outbox, how much was sent on this stream.
    sent: usize,
    next_report: u64,
    /// From the journal: the newest generation that was taken.
    newest: BTreeMap<TaskId, Generation>,
    pub attempts: Vec<Attempt>,
    /// A fault has come between the scheduler and what runs here.
    pub touched: bool,
    /// The cloud has announced an end of this node at some time.
    pub noticed: bool,
    notice: Option<u64>,
}

#[derive(Debug)]
struct Out {
    id: u64,
    grant: Grant,
    report: Report,
}

/// What a scheduler says to a worker.
#[derive(Debug)]
pub(crate) enum ToWorker {
    Welcome,
    Grant { grant: Grant, spec: Arc<JobSpec> },
    Stop { grant: Grant, why: StopWhy, deadline: u64 },
    Superseded { grant: Grant },
    Ack { id: u64 },
}

impl Worker {
    pub(crate) fn is(&self, inc: u32) -> bool {
        self.up && self.inc == inc
    }

    pub(crate) fn is_up(&self) -> bool {
        self.up
    }

    pub(crate) fn inc(&self) -> u32 {
        self.inc
    }

    /// What it runs, or has to report about.
    pub(crate) fn held(&self) -> Vec<Grant> {
        self.attempts.iter().map(|attempt| attempt.grant).collect()
    }

    pub(crate) fn attempt(&mut self, grant: Grant) -> Option<&mut Attempt> {
        self.attempts.iter_mut().find(|attempt| attempt.grant == grant)
    }

    /// A fault excuses a save that was owed, and what the scheduler thinks of this node.
    pub(crate) fn touch(&mut self) {
        self.touched = true;
        self.attempts.iter_mut().for_each(|attempt| attempt.owed = None);
    }
}

impl World {
    pub(crate) fn boot(&mut self, inst: usize) {
        let worker = &mut self.cloud.insts[inst].worker;
        worker.up = true;
        let inc = worker.inc;
        let delay = self.rng.within(10, 1000);
        self.after(delay, Ev::Dial { inst, inc });
    }

    pub(crate) fn worker_hears(&mut self, inst: usize, msg: ToWorker) {
        let worker = &mut self.cloud.insts[inst].worker;
        match msg {
            ToWorker::Welcome => {
                worker.welcomed = true;
                worker.sent = 0;
                self.flush(inst);
            }
            ToWorker::Grant { grant: (task, generation), spec } => {
                if worker.newest.get(&task).is_none_or(|newest| *newest < generation) {
                    worker.newest.insert(task, generation);
                    let deadline = worker.notice;
                    worker.attempts.push(Attempt::new((task, generation), spec));
                    self.report(inst, (task, generation), Report::Accepted);
                    let delay = self.rng.within(100, 10_000);
                    self.work_after(inst, (task, generation), delay, Work::Restore);
                    if let Some(deadline) = deadline {
                        self.attempt_noticed(inst, (task, generation), deadline);
                    }
                }
            }
            ToWorker::Stop { grant, why, deadline } => self.attempt_stop(inst, grant, why, deadline),
            ToWorker::Superseded { grant } => {
                Oracle::told_superseded(self, inst, grant);
                self.attempt_superseded(inst, grant);
            }
            ToWorker::Ack { id } => {
                let Some(at) = worker.outbox.iter().position(|out| out.id == id) else { return };
                if at < worker.sent {
                    worker.sent -= 1;
                }
                let Some(out) = worker.outbox.remove(at) else { return };
                if matches!(out.report, Report::Finished { .. }) {
                    worker.attempts.retain(|attempt| attempt.grant != out.grant);
                }
            }
        }
    }

    /// Queues a report. Of progress, only the newest waits.
    pub(crate) fn report(&mut self, inst: usize, grant: Grant, report: Report) {
        let worker = &mut self.cloud.insts[inst].worker;
        if matches!(report, Report::Progressed { .. }) {
            let sent = worker.sent;
            let waiting = worker.outbox.iter_mut().skip(sent);
            let mut same = waiting.filter(|out| out.grant == grant);
            if let Some(out) = same.find(|out| matches!(out.report, Report::Progressed { .. })) {
                out.report = report;
                return;
            }
        }
        worker.next_report += 1;
        let id = worker.next_report;
        worker.outbox.push_back(Out { id, grant, report });
        self.flush(inst);
    }

    fn flush(&mut self, inst: usize) {
        loop {
            let node = self.cloud.insts[inst].node;
            let worker = &mut self.cloud.insts[inst].worker;
            let (Some(conn), true) = (worker.conn, worker.welcomed) else { return };
            let Some(out) = worker.outbox.get(worker.sent) else { return };
            let (id, grant, report) = (out.id, out.grant, out.report.clone());
            worker.sent += 1;
            self.send_to_scheduler(conn, Msg::Report { conn, id, node, grant, report });
        }
    }

    /// The cloud shows a notice, or takes it back; the worker looks now and then.
    pub(crate) fn show_notice(&mut self, inst: usize, deadline: Option<u64>) {
        let worker = &mut self.cloud.insts[inst].worker;
        worker.noticed = true;
        // Another word than before: what was owed by the earlier one is off.
        worker.attempts.iter_mut().for_each(|attempt| attempt.owed = None);
        let delay = self.rng.within(NOTICE_SEEN_MS.0, NOTICE_SEEN_MS.1);
        let inc = self.cloud.insts[inst].worker.inc;
        self.after(delay, Ev::NoticeSeen { inst, inc, deadline });
    }

    pub(crate) fn notice_seen(&mut self, inst: usize, inc: u32, deadline: Option<u64>) {
        // It shows what the cloud says now; an older word than that is not seen any more.
        let shown = self.cloud.insts[inst].notice;
        let worker = &mut self.cloud.insts[inst].worker;
        if !worker.is(inc) || worker.notice == deadline || shown != deadline {
            return;
        }
        worker.notice = deadline;
        let grants = worker.held();
        for grant in grants {
            match deadline {
                Some(deadline) => self.attempt_noticed(inst, grant, deadline),
                None => self.attempt_unnoticed(inst, grant),
            }
        }
    }

    /// The worker's process dies. What it ran dies with it; its journal and its node stay.
    pub(crate) fn worker_crash(&mut self, inst: usize) {
        let worker = &mut self.cloud.insts[inst].worker;
        if !worker.up {
            return;
        }
        self.counts.add(Count::WorkerCrash);
        worker.touch();
        worker.inc += 1;
        worker.up = false;
        worker.notice = None;
        let conn = worker.conn.take();
        worker.outbox.retain(|out| !matches!(out.report, Report::Progressed { .. }));
        worker.sent = 0;
        worker.welcomed = false;
        if let Some(conn) = conn {
            self.conn_break(conn);
        }
        let delay = self.rng.within(RESTART_MS.0, RESTART_MS.1);
        let inc = self.cloud.insts[inst].worker.inc;
        self.after(delay, Ev::WorkerBack { inst, inc });
    }

    pub(crate) fn worker_back(&mut self, inst: usize, inc: u32) {
        let up = self.cloud.insts[inst].is_up();
        let notice = self.cloud.insts[inst].notice;
        let worker = &mut self.cloud.insts[inst].worker;
        if worker.inc != inc || !up {
            return;
        }
        worker.up = true;
        let lost: Vec<Grant> =
            worker.attempts.iter().filter(|a| a.phase != Phase::Done).map(|a| a.grant).collect();
        for grant in lost {
            if let Some(attempt) = self.cloud.insts[inst].worker.attempt(grant) {
                attempt.phase = Phase::Done;
            }
            let exit = Exit { detail: Some("the worker restarted".into()), ..exit(self.t) };
            self.report(inst, grant, Report::Finished { exit });
        }
        self.after(1, Ev::Dial { inst, inc });
        if notice.is_some() {
            self.show_notice(inst, notice);
        }
    }

    /// The instance is gone, and everything on it.
    pub(crate) fn worker_ends(&mut self, inst: usize, cause: GoneCause) {
        Oracle::instance_ends(self, inst, cause);
        let worker = &mut self.cloud.insts[inst].worker;
        worker.up = false;
        worker.inc += 1;
        worker.attempts.clear();
        worker.outbox.clear();
        worker.sent = 0;
        if let Some(conn) = worker.conn.take() {
            self.conn_break(conn);
        }
    }
}

/// An exit about which nothing is known.
pub(crate) fn exit(at: u64) -> Exit {
    Exit {
        exit_code: None,
        signal: None,
        out_of_memory: false,
        launch_error: None,
        signalled: false,
        worker_leaving: false,
        stopped_at: Timestamp(at),
        last_progress: None,
        detail: None,
    }
}
