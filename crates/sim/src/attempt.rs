//! One attempt on a worker: fence, restore, run with steps, save, upload, commit, stop. A model of the worker's contract,
//! not of its code: it keeps the rules that the scheduler and the checkpoint store may rely on, and dies when told.

use std::sync::Arc;

use spotq_checkpoint::{Action, CheckpointSeq};
use spotq_model::{Exit, Generation, JobSpec, Progress, Report, StopWhy, Timestamp};

use crate::counts::Count;
use crate::draw::End;
use crate::objects::{commit, reported};
use crate::oracle::Oracle;
use crate::scheduler::{Grant, saves_first};
use crate::worker::exit;
use crate::world::{Ev, World};

/// Kept free before a deadline, for the end of the command and the last report.
const RESERVE: u64 = 1500;
/// A save is owed only if the notice leaves this much more than save and upload take.
const OWED_MARGIN: u64 = 5000;
/// An upload that failed is made again after this.
const UPLOAD_AGAIN: u64 = 1000;
/// A command that saves on a signal sees it after this.
const SIGNAL_MS: u64 = 50;

#[derive(Debug)]
pub(crate) struct Attempt {
    pub grant: Grant,
    spec: Arc<JobSpec>,
    pub phase: Phase,
    /// The step at which it started or stopped.
    from_step: u64,
    started_at: u64,
    /// The newest complete state on the node's disk: step, and when it was written.
    saved: Option<(u64, u64)>,
    /// Up to which save the store has everything.
    stored_at: u64,
    pushing: bool,
    /// The entry of the upload that runs takes long.
    slow: bool,
    draining_since: Option<u64>,
    stop: Option<StopWhy>,
    end: Option<Exit>,
    /// A step whose save and upload fit before the deadline of a notice (INV-07).
    pub owed: Option<u64>,
    fails_here: bool,
}

/// Where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Restoring,
    Starting,
    Running,
    Terminating,
    Finishing,
    Done,
}

/// Its next step, when its time comes.
#[derive(Debug, Clone)]
pub(crate) enum Work {
    Restore,
    /// The fence is put behind a log of this length.
    PutFence(usize),
    Start,
    Save {
        periodic: bool,
    },
    Saved(u64),
    Uploaded {
        step: u64,
        saved_at: u64,
    },
    PutCommit {
        seen: usize,
        step: u64,
        saved_at: u64,
        checkpoint: CheckpointSeq,
    },
    /// The command comes to its own end.
    Over,
    Terminate(u64),
    Exited(Box<Exit>),
}

impl Attempt {
    pub(crate) fn new(grant: Grant, spec: Arc<JobSpec>) -> Attempt {
        Attempt {
            grant,
            spec,
            phase: Phase::Restoring,
            from_step: 0,
            started_at: 0,
            saved: None,
            stored_at: 0,
            pushing: false,
            slow: false,
            draining_since: None,
            stop: None,
            end: None,
            owed: None,
            fails_here: false,
        }
    }

    pub(crate) fn runs(&self) -> bool {
        self.phase == Phase::Running
    }
}

impl World {
    pub(crate) fn work_after(&mut self, inst: usize, grant: Grant, delay: u64, what: Work) {
        let inc = self.cloud.insts[inst].worker.inc();
        self.after(delay, Ev::Work { inst, inc, grant, what: Box::new(what) });
    }

    fn on(&mut self, inst: usize, grant: Grant) -> Option<&mut Attempt> {
        self.cloud.insts[inst].worker.attempt(grant).filter(|attempt| attempt.phase != Phase::Done)
    }

    /// How far the command is.
    fn step_now(&mut self, inst: usize, grant: Grant) -> u64 {
        let t = self.t;
        let plan = &self.d.jobs[self.oracle.client_of(grant.0)];
        let (steps, step_ms) = (plan.steps, plan.step_ms);
        match self.on(inst, grant) {
            Some(a) if a.phase == Phase::Running => steps.min(a.from_step + (t - a.started_at) / step_ms),
            Some(a) => a.from_step,
            None => 0,
        }
    }

    pub(crate) fn work(&mut self, inst: usize, inc: u32, grant: Grant, what: Work) {
        if !self.cloud.insts[inst].worker.is(inc) || self.on(inst, grant).is_none() {
            return;
        }
        match what {
            Work::Restore => self.restore(inst, grant),
            Work::PutFence(seen) => {
                let objects = self.oracle.objects(grant.0);
                if !objects.put(seen, grant.1, Action::Fence) {
                    self.counts.add(Count::PutLost);
                }
                self.restore(inst, grant);
            }
            Work::Start => self.start_command(inst, grant),
            Work::Save { periodic } => self.save(inst, grant, periodic),
            Work::Saved(step) => {
                let t = self.t;
                if let Some(attempt) = self.on(inst, grant) {
                    attempt.saved = Some((step, t));
                }
                self.push(inst, grant);
            }
            Work::Uploaded { step, saved_at } => self.uploaded(inst, grant, step, saved_at),
            Work::PutCommit { seen, step, saved_at, checkpoint } => {
                self.put_commit(inst, grant, (seen, step, saved_at), checkpoint);
            }
            Work::Over => self.command_over(inst, grant),
            Work::Terminate(since) => {
                // A drain that was called off does not end the command.
                if self.on(inst, grant).is_some_and(|a| a.draining_since == Some(since)) {
                    self.end_command(inst, grant);
                }
            }
            Work::Exited(exit) => self.exited(inst, grant, *exit),
        }
    }

    fn restore(&mut self, inst: usize, grant: Grant) {
        if self.on(inst, grant).is_none_or(|a| a.phase != Phase::Restoring) {
            return;
        }
        let objects = self.oracle.objects(grant.0);
        let state = objects.state();
        let seen = objects.log.len();
        if state.newest_generation > grant.1 {
            self.attempt_fenced(inst, grant, state.newest_generation);
            return;
        }
        if state.fence < grant.1 {
            let delay = self.put_delay();
            self.work_after(inst, grant, delay, Work::PutFence(seen));
            return;
        }
        let mut fell_back = 0;
        let mut found = None;
        for head in state.heads.iter().rev() {
            let objects = self.oracle.objects(grant.0);
            if let Some(step) = objects.read(head.checkpoint) {
                found = Some((head.clone(), step));
                break;
            }
            fell_back += 1;
            let damaged =
                Action::Quarantine { checkpoint: head.checkpoint, reason: "its chunks do not fit".into() };
            let seen = objects.log.len();
            objects.put(seen, grant.1, damaged);
        }
        if fell_back > 0 {
            self.counts.add(Count::FellBack);
        }
        Oracle::restores(self, grant, found.as_ref().map(|(head, step)| (head.checkpoint.0, *step)));
        if !self.calm && state.heads.len() > 1 && fell_back == 0 && self.rng.chance(self.d.faults.lie_ppm) {
            self.counts.add(Count::LyingRestore);
            self.cloud.insts[inst].worker.touch();
            found = state.heads.first().map(|head| (head.clone(), head.step.unwrap_or(0)));
        }
        let t = self.t;
        let Some(attempt) = self.on(inst, grant) else { return };
        attempt.phase = Phase::Starting;
        attempt.from_step = found.as_ref().map_or(0, |(_, step)| *step);
        let from = found.map(|(head, _)| reported(&head, t));
        let above =
            self.oracle.objects(grant.0).set_aside_above(from.as_ref().map_or(0, |from| from.sequence));
        let fell_back = above.max(fell_back);
        self.report(inst, grant, Report::Restored { from, fell_back });
        let delay = self.rng.within(100, 2000);
        self.work_after(inst, grant, delay, Work::Start);
    }

    fn start_command(&mut self, inst: usize, grant: Grant) {
        let client = self.oracle.client_of(grant.0);
        let plan = &mut self.d.jobs[client];
        let (steps, step_ms, save_every) = (plan.steps, plan.step_ms, plan.save_every);
        let fails_here = plan.fails_first > 0;
        plan.fails_first -= u32::from(fails_here);
        let never = plan.end == End::NeverStarts;
        let t = self.t;
        let Some(attempt) = self.on(inst, grant).filter(|a| a.phase == Phase::Starting) else { return };
        if never {
            let exit = Exit { launch_error: Some("no such program: train".into()), ..exit(t) };
            self.finish(inst, grant, exit);
            return;
        }
        (attempt.phase, attempt.started_at) = (Phase::Running, t);
        attempt.fails_here = fails_here;
        let left = steps.saturating_sub(attempt.from_step) * step_ms;
        let until = if fails_here { left / 2 } else { left };
        self.report(inst, grant, Report::Started);
        self.work_after(inst, grant, until.max(1), Work::Over);
        self.work_after(inst, grant, save_every, Work::Save { periodic: true });
    }

    fn save(&mut self, inst: usize, grant: Grant, periodic: bool) {
        if self.on(inst, grant).is_none_or(|a| !a.runs()) {
            return;
        }
        let step = self.step_now(inst, grant);
        let plan = &self.d.jobs[self.oracle.client_of(grant.0)];
        let (save_ms, save_every, total) = (plan.save_ms, plan.save_every, plan.steps);
        self.report(inst, grant, Report::Progressed { progress: Progress { step, total: Some(total) } });
        self.work_after(inst, grant, save_ms, Work::Saved(step));
        if periodic {
            self.work_after(inst, grant, save_every.max(save_ms + 1), Work::Save { periodic });
        }
    }

    /// Uploads the newest save, if the store does not have it and no upload runs.
    fn push(&mut self, inst: usize, grant: Grant) {
        let upload_ms = self.d.jobs[self.oracle.client_of(grant.0)].upload_ms;
        let Some(attempt) = self.on(inst, grant) else { return };
        let Some((step, saved_at)) = attempt.saved else { return };
        if attempt.pushing || saved_at <= attempt.stored_at {
            return;
        }
        attempt.pushing = true;
        self.work_after(inst, grant, upload_ms, Work::Uploaded { step, saved_at });
    }

    fn uploaded(&mut self, inst: usize, grant: Grant, step: u64, saved_at: u64) {
        if !self.calm && self.rng.chance(self.d.faults.upload_fail_ppm) {
            self.counts.add(Count::UploadFailed);
            if let Some(attempt) = self.on(inst, grant) {
                attempt.owed = None;
            }
            self.work_after(inst, grant, UPLOAD_AGAIN, Work::Uploaded { step, saved_at });
            return;
        }
        let blind = !self.calm && self.rng.chance(self.d.faults.blind_ppm);
        let objects = self.oracle.objects(grant.0);
        let state = objects.state();
        let seen = objects.log.len();
        let checkpoint = state.next_checkpoint;
        if state.newest_generation > grant.1 {
            if blind {
                // A writer that does not look: its entries are in the log, and every reader passes over them.
                if let Some(head) = state.head() {
                    let reason = "a zombie says so".into();
                    objects.put(seen, grant.1, Action::Quarantine { checkpoint: head.checkpoint, reason });
                }
                let seen = objects.log.len();
                objects.put(seen, grant.1, commit(checkpoint, step));
                objects.save(checkpoint, step);
                self.counts.add(Count::BlindCommit);
            }
            self.attempt_fenced(inst, grant, state.newest_generation);
            return;
        }
        let delay = self.put_delay();
        if delay > OWED_MARGIN / 2
            && let Some(attempt) = self.on(inst, grant)
        {
            (attempt.slow, attempt.owed) = (true, None);
        }
        self.work_after(inst, grant, delay, Work::PutCommit { seen, step, saved_at, checkpoint });
    }

    /// From the look at the log to the entry behind it: others may write in between.
    fn put_delay(&mut self) -> u64 {
        if !self.calm && self.rng.percent(8) {
            self.rng.within(1000, 20_000)
        } else {
            self.rng.within(5, 300)
        }
    }

    fn put_commit(
        &mut self,
        inst: usize,
        grant: Grant,
        (seen, step, saved_at): (usize, u64, u64),
        checkpoint: CheckpointSeq,
    ) {
        let corrupt = !self.calm && self.rng.chance(self.d.faults.corrupt_ppm);
        let objects = self.oracle.objects(grant.0);
        if !objects.put(seen, grant.1, commit(checkpoint, step)) {
            self.counts.add(Count::PutLost);
            self.uploaded(inst, grant, step, saved_at);
            return;
        }
        objects.save(checkpoint, step);
        let head = objects.state().heads.into_iter().rev().find(|head| head.checkpoint == checkpoint);
        self.counts.add(Count::Committed);
        Oracle::commits(self, grant, checkpoint, head.is_some());
        if corrupt && self.oracle.objects(grant.0).corrupt() {
            self.counts.add(Count::Corrupted);
        }
        if let Some(head) = head {
            self.report(inst, grant, Report::Committed { checkpoint: reported(&head, saved_at) });
        }
        let Some(attempt) = self.on(inst, grant) else { return };
        (attempt.pushing, attempt.slow) = (false, false);
        attempt.stored_at = saved_at;
        let paid = attempt.owed.is_some_and(|owed| step >= owed);
        if paid {
            attempt.owed = None;
        }
        let drained = attempt.runs() && attempt.draining_since.is_some_and(|since| saved_at >= since);
        let finished = attempt.phase == Phase::Finishing;
        if paid {
            self.counts.add(Count::DrainSaved);
        }
        if drained {
            self.end_command(inst, grant);
        } else if finished {
            self.finish_if_stored(inst, grant);
        } else {
            self.push(inst, grant);
        }
    }

    /// The command's own end: its last state is saved, and its results are uploaded before anybody is told.
    fn command_over(&mut self, inst: usize, grant: Grant) {
        let step = self.step_now(inst, grant);
        let t = self.t;
        let plan = &self.d.jobs[self.oracle.client_of(grant.0)];
        let (end, total) = (plan.end, plan.steps);
        let Some(attempt) = self.on(inst, grant).filter(|a| a.runs()) else { return };
        let mut how = exit(t);
        how.last_progress = Some(Progress { step, total: Some(total) });
        match end {
            _ if attempt.fails_here => how.exit_code = Some(9),
            End::Well | End::NeverStarts => {
                how.exit_code = Some(0);
                attempt.saved = Some((step, t));
            }
            End::Badly(code) => how.exit_code = Some(code),
            End::OutOfMemory => (how.signal, how.out_of_memory) = (Some(9), true),
        }
        self.exited(inst, grant, how);
    }

    /// TERM: the command goes within its grace.
    fn end_command(&mut self, inst: usize, grant: Grant) {
        let step = self.step_now(inst, grant);
        let Some(attempt) = self.on(inst, grant).filter(|a| a.runs()) else { return };
        let grace = attempt.spec.checkpoint.grace.0;
        attempt.from_step = step;
        attempt.phase = Phase::Terminating;
        let delay = self.rng.within(20, grace.clamp(100, 2000));
        let exit = Exit { signal: Some(15), signalled: true, ..exit(self.t + delay) };
        self.work_after(inst, grant, delay, Work::Exited(Box::new(exit)));
    }

    fn exited(&mut self, inst: usize, grant: Grant, exit: Exit) {
        let step = self.step_now(inst, grant);
        let Some(attempt) = self.on(inst, grant) else { return };
        if !matches!(attempt.phase, Phase::Running | Phase::Terminating) {
            return;
        }
        attempt.from_step = step;
        attempt.phase = Phase::Finishing;
        // A save that was owed can be on its way still; a command that is over owes none that it has not made.
        if attempt.saved.is_none_or(|(saved, _)| attempt.owed.is_some_and(|owed| owed > saved)) {
            attempt.owed = None;
        }
        attempt.end = Some(exit);
        self.push(inst, grant);
        self.finish_if_stored(inst, grant);
    }

    fn finish_if_stored(&mut self, inst: usize, grant: Grant) {
        let Some(attempt) = self.on(inst, grant).filter(|a| a.phase == Phase::Finishing) else { return };
        if attempt.pushing || attempt.saved.is_some_and(|(_, at)| at > attempt.stored_at) {
            self.push(inst, grant);
            return;
        }
        if let Some(exit) = attempt.end.take() {
            self.finish(inst, grant, exit);
        }
    }

    fn finish(&mut self, inst: usize, grant: Grant, exit: Exit) {
        if let Some(attempt) = self.on(inst, grant) {
            attempt.phase = Phase::Done;
            self.report(inst, grant, Report::Finished { exit });
        }
    }

    pub(crate) fn attempt_noticed(&mut self, inst: usize, grant: Grant, deadline: u64) {
        if self.on(inst, grant).is_none() {
            return;
        }
        let report = Report::Noticed { deadline: Timestamp(deadline), source: "metadata".into() };
        self.report(inst, grant, report);
        let step = self.step_now(inst, grant);
        let plan = &self.d.jobs[self.oracle.client_of(grant.0)];
        let needed = plan.save_ms + 2 * plan.upload_ms + SIGNAL_MS + OWED_MARGIN;
        let t = self.t;
        let trusted = !self.cloud.insts[inst].worker.touched;
        let Some(attempt) = self.on(inst, grant) else { return };
        let first = trusted
            && !attempt.slow
            && attempt.draining_since.is_none()
            && attempt.stop.is_none()
            && attempt.runs();
        if first && attempt.spec.checkpoint.signal.is_some() && t + needed <= deadline {
            attempt.owed = Some(step);
        }
        self.drain(inst, grant, deadline);
    }

    pub(crate) fn attempt_unnoticed(&mut self, inst: usize, grant: Grant) {
        let Some(attempt) = self.on(inst, grant) else { return };
        if attempt.stop.is_none() && attempt.runs() {
            attempt.draining_since = None;
        }
        attempt.owed = None;
        self.report(inst, grant, Report::NoticeWithdrawn);
    }

    pub(crate) fn attempt_stop(&mut self, inst: usize, grant: Grant, why: StopWhy, deadline: u64) {
        let Some(attempt) = self.on(inst, grant) else { return };
        if attempt.stop.is_some_and(|known| known == StopWhy::Cancel || known == why) {
            return;
        }
        attempt.stop = Some(why);
        attempt.owed = None;
        if saves_first(why) || !attempt.runs() {
            self.drain(inst, grant, deadline);
        } else {
            self.end_command(inst, grant);
        }
    }

    /// The command saves, if it can in time, and then ends. One that does not run yet never starts.
    fn drain(&mut self, inst: usize, grant: Grant, deadline: u64) {
        let t = self.t;
        let Some(attempt) = self.on(inst, grant) else { return };
        match attempt.phase {
            Phase::Restoring | Phase::Starting => self.finish(inst, grant, exit(t)),
            Phase::Running => {
                let again = attempt.draining_since.is_some();
                let since = *attempt.draining_since.get_or_insert(t);
                let signal = attempt.spec.checkpoint.signal.is_some();
                if signal && !again {
                    self.work_after(inst, grant, SIGNAL_MS, Work::Save { periodic: false });
                }
                let left = deadline.saturating_sub(t + RESERVE).max(500);
                self.work_after(inst, grant, left, Work::Terminate(since));
            }
            Phase::Terminating | Phase::Finishing | Phase::Done => {}
        }
    }

    /// The store says that a newer generation has written.
    fn attempt_fenced(&mut self, inst: usize, grant: Grant, by: Generation) {
        self.counts.add(Count::Superseded);
        self.report(inst, grant, Report::Superseded { by });
        self.attempt_superseded(inst, grant);
    }

    pub(crate) fn attempt_superseded(&mut self, inst: usize, grant: Grant) {
        let t = self.t;
        if self.on(inst, grant).is_some() {
            self.finish(inst, grant, Exit { signal: Some(9), signalled: true, ..exit(t) });
        }
    }

    /// Somebody on the host kills the command.
    pub(crate) fn trainer_killed(&mut self, inst: usize) {
        let grants = self.cloud.insts[inst].worker.held();
        for grant in grants {
            if self.on(inst, grant).is_some_and(|a| a.runs()) {
                self.counts.add(Count::TrainerKilled);
                self.cloud.insts[inst].worker.touch();
                let exit = Exit { signal: Some(9), ..exit(self.t) };
                self.exited(inst, grant, exit);
            }
        }
    }
}
