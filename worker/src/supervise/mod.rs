//! What one attempt does next: a state machine over inputs and times.
//!
//! Pure. It does no I/O, reads no clock and knows no process; `attempt` executes its actions and feeds it what
//! happened. It decides when to save, when to stop, when to kill and what to report, nothing else does.

mod types;

use spotq_model::{Signal, Span, Timestamp};

pub use types::{Action, Blame, End, Finish, Input, News, Phase, Pushed, Rules, Stop};

/// From "the process ended" to "everything is uploaded". The node has the only copy of the results, so a store that is
/// away is waited for; what is longer away than this costs more than running again from the last checkpoint.
pub const FINISH_LIMIT: Span = Span::secs(15 * 60);
/// The same for a command that was stopped: who stopped it waits for the node.
const FINISH_LIMIT_STOPPED: Span = Span::secs(60);
/// Kept free before a deadline for the kill and the last report.
const RESERVE: Span = Span::secs(1);
/// What an upload may take beyond its estimate.
const UPLOAD_MARGIN: Span = Span::millis(500);
/// A stopped command gets at least this long, also when the deadline has passed: the node may live a little longer.
const GRACE_MIN: Span = Span::millis(500);
/// The kernel stamps files with a clock that ticks every 4 ms or slower.
const STAMP_TICK: Span = Span::millis(4);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Drain {
    since: Timestamp,
    deadline: Timestamp,
}

/// One attempt.
#[derive(Debug)]
pub struct Machine {
    rules: Rules,
    phase: Phase,
    notice: Option<(Timestamp, String)>,
    drain: Option<Drain>,
    stopped: Option<Stop>,
    kill_at: Option<Timestamp>,
    /// Since when the last uploads run, and until when they may.
    finishing_since: Option<Timestamp>,
    finish_by: Option<Timestamp>,
    /// A stop that came after the command's own end.
    finish_stop: Option<Drain>,
    unstored: Option<String>,
    estimate: Span,
    save_sent: bool,
    stop_sent: bool,
    pushing: bool,
    save_waiting: bool,
    end: Option<End>,
    tree_gone: bool,
    started: bool,
    launch_error: Option<String>,
    detail: Option<String>,
}

impl Machine {
    /// A new attempt and its first actions.
    #[must_use]
    pub fn start(rules: Rules) -> (Machine, Vec<Action>) {
        let machine = Machine {
            rules,
            phase: Phase::Restoring,
            notice: None,
            drain: None,
            stopped: None,
            kill_at: None,
            finishing_since: None,
            finish_by: None,
            finish_stop: None,
            unstored: None,
            estimate: Span::ZERO,
            save_sent: false,
            stop_sent: false,
            pushing: false,
            save_waiting: false,
            end: None,
            tree_gone: false,
            started: false,
            launch_error: None,
            detail: None,
        };
        (machine, vec![Action::Report(News::Accepted), Action::Restore])
    }

    #[must_use]
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Whether the attempt is on its way out, so that a save is looked for more often.
    #[must_use]
    pub fn hurried(&self) -> bool {
        matches!(self.phase, Phase::Draining | Phase::Terminating)
    }

    /// When to feed [`Input::Tick`], if nothing else happens before.
    #[must_use]
    pub fn wake_at(&self) -> Option<Timestamp> {
        match self.phase {
            Phase::Draining => self.drain.as_ref().map(|drain| self.stop_at(drain)),
            Phase::Terminating => self.kill_at,
            Phase::Finishing => self.finish_by,
            Phase::Restoring
            | Phase::Preparing
            | Phase::Starting
            | Phase::Running
            | Phase::Sweeping
            | Phase::Done => None,
        }
    }

    /// Takes an input and says what to do. Inputs that come late or twice change nothing.
    pub fn step(&mut self, now: Timestamp, input: Input) -> Vec<Action> {
        let mut out = Vec::new();
        if self.phase == Phase::Done {
            return out;
        }
        match input {
            Input::Restored => self.on_restored(&mut out),
            Input::RestoreFailed { message, blame } => self.on_restore_failed(message, blame, &mut out),
            Input::Spawned { pid } => self.on_spawned(now, pid, &mut out),
            Input::SpawnFailed { message } => self.on_spawn_failed(now, message, &mut out),
            Input::Exited(end) => self.on_exited(now, end, &mut out),
            Input::Notice { deadline, source } => self.on_notice(now, deadline, source, &mut out),
            Input::NoticeWithdrawn => self.on_withdrawn(now, &mut out),
            Input::Stop { reason, deadline } => self.on_stop(now, reason, deadline, &mut out),
            Input::Fenced { by } | Input::Pushed(Pushed::Superseded { by }) => {
                self.on_superseded(by, &mut out);
            }
            Input::Saved { at: _ } => self.on_saved(&mut out),
            Input::Pushed(Pushed::Held { saved_at }) => self.on_pushed(now, Some(saved_at), &mut out),
            Input::Pushed(Pushed::Failed) => self.on_pushed(now, None, &mut out),
            Input::TreeEmpty => self.on_tree_empty(&mut out),
            Input::TreeGone { leftover } => self.on_tree_gone(now, leftover, &mut out),
            Input::FinalFailed { problem } => self.on_final_failed(now, problem),
            Input::FinalDone { problem } => self.on_final_done(problem, &mut out),
            Input::UploadEstimate(estimate) => self.estimate = estimate,
            Input::Tick => {}
        }
        self.on_time(now, &mut out);
        out
    }

    fn on_restored(&mut self, out: &mut Vec<Action>) {
        if self.phase != Phase::Restoring {
            return;
        }
        out.push(Action::Report(News::Restored));
        if self.rules.setup {
            self.phase = Phase::Preparing;
            out.push(Action::SpawnSetup);
        } else {
            self.spawn_command(out);
        }
    }

    fn on_restore_failed(&mut self, message: String, blame: Blame, out: &mut Vec<Action>) {
        if self.phase == Phase::Restoring {
            match blame {
                Blame::Job => self.launch_error = Some(message),
                Blame::Surroundings => self.detail = Some(message),
            }
            self.report_end(out);
        }
    }

    fn on_spawned(&mut self, now: Timestamp, pid: u32, out: &mut Vec<Action>) {
        if self.phase != Phase::Starting {
            return;
        }
        self.phase = Phase::Running;
        self.started = true;
        out.push(Action::Report(News::Started { pid }));
        // A notice or stop came while the command was being started.
        match self.stopped {
            Some(Stop::Superseded) => self.kill(out),
            Some(Stop::Cancel) => self.terminate(now, out),
            Some(_) => self.enter_drain(now, out),
            None => {}
        }
    }

    fn on_spawn_failed(&mut self, now: Timestamp, message: String, out: &mut Vec<Action>) {
        match self.phase {
            Phase::Starting => {
                self.launch_error = Some(message);
                self.report_end(out);
            }
            // It was spawned and found out only then that it cannot become the command.
            Phase::Preparing | Phase::Running | Phase::Draining | Phase::Terminating | Phase::Sweeping => {
                self.launch_error = Some(message);
                self.started = false;
                self.end = Some(End { code: None, signal: None, out_of_memory: false, at: now });
                if self.phase == Phase::Sweeping {
                    self.finish_if_gone(now, out);
                } else {
                    self.kill(out);
                }
            }
            Phase::Restoring | Phase::Finishing | Phase::Done => {}
        }
    }

    fn on_exited(&mut self, now: Timestamp, end: End, out: &mut Vec<Action>) {
        match self.phase {
            Phase::Preparing if end.code == Some(0) => self.spawn_command(out),
            Phase::Preparing => {
                self.launch_error = Some(format!("`setup:` {}", describe(end)));
                self.end = Some(end);
                self.kill(out);
            }
            // A shell dies of our signal at once, while the trainer below it still saves: wait for the rest.
            Phase::Draining | Phase::Terminating if self.stop_sent || self.save_sent => {
                self.end = Some(end);
                if self.phase == Phase::Draining {
                    self.phase = Phase::Terminating;
                    self.kill_at = Some(self.kill_limit(now));
                }
                out.push(Action::AwaitTree);
            }
            Phase::Starting | Phase::Running | Phase::Draining | Phase::Terminating => {
                self.end = Some(end);
                self.kill(out);
            }
            Phase::Sweeping => {
                self.end = self.end.or(Some(end));
                self.finish_if_gone(now, out);
            }
            Phase::Restoring | Phase::Finishing | Phase::Done => {}
        }
    }

    fn on_notice(&mut self, now: Timestamp, deadline: Timestamp, source: String, out: &mut Vec<Action>) {
        let known = self.notice.as_ref().map(|(at, _)| *at);
        if known == Some(deadline) {
            return;
        }
        self.notice = Some((deadline, source.clone()));
        out.push(Action::Report(News::Noticed { deadline, source }));
        self.stop_for(now, Stop::Notice, deadline, out);
    }

    fn on_withdrawn(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        if self.notice.take().is_none() {
            return;
        }
        self.limit_finishing(now);
        out.push(Action::Report(News::NoticeWithdrawn));
        let waiting = matches!(self.phase, Phase::Draining | Phase::Starting);
        if waiting && self.stopped == Some(Stop::Notice) {
            self.stopped = None;
            self.drain = None;
            if self.phase == Phase::Draining {
                self.phase = Phase::Running;
            }
            self.save_sent = false;
            out.push(Action::RemoveNotice);
        }
    }

    fn on_stop(&mut self, now: Timestamp, reason: Stop, deadline: Option<Timestamp>, out: &mut Vec<Action>) {
        let weaker = self.stopped.is_some_and(|earlier| earlier > reason) && reason != Stop::WorkerLeaving;
        if weaker || self.stopped == Some(reason) {
            return;
        }
        self.stop_for(now, reason, deadline.unwrap_or(now + self.rules.grace), out);
    }

    fn on_superseded(&mut self, by: u64, out: &mut Vec<Action>) {
        self.pushing = false;
        if self.stopped == Some(Stop::Superseded) {
            return;
        }
        self.stopped = Some(Stop::Superseded);
        out.push(Action::Report(News::Superseded { by }));
        self.stop_without_saving(out);
    }

    fn on_saved(&mut self, out: &mut Vec<Action>) {
        if !matches!(self.phase, Phase::Running | Phase::Draining | Phase::Terminating) {
            return;
        }
        if self.pushing {
            self.save_waiting = true;
        } else {
            self.pushing = true;
            out.push(Action::Push);
        }
    }

    fn on_pushed(&mut self, now: Timestamp, saved_at: Option<Timestamp>, out: &mut Vec<Action>) {
        self.pushing = false;
        if let (Phase::Draining, Some(drain), Some(saved_at)) = (self.phase, &self.drain, saved_at)
            && saved_at + STAMP_TICK >= drain.since
        {
            self.save_waiting = false;
            self.terminate(now, out);
        } else if std::mem::take(&mut self.save_waiting) {
            self.on_saved(out);
        }
    }

    fn on_tree_empty(&mut self, out: &mut Vec<Action>) {
        if self.phase == Phase::Terminating && self.end.is_some() {
            self.kill(out);
        }
    }

    fn on_tree_gone(&mut self, now: Timestamp, leftover: Option<String>, out: &mut Vec<Action>) {
        if self.phase == Phase::Sweeping {
            self.tree_gone = true;
            if leftover.is_some() {
                // It hangs in the kernel; its exit may never come.
                self.end = self.end.or(Some(End { code: None, signal: None, out_of_memory: false, at: now }));
            }
            self.add_detail(leftover);
            self.finish_if_gone(now, out);
        }
    }

    fn on_final_failed(&mut self, now: Timestamp, problem: String) {
        if self.phase == Phase::Finishing {
            self.unstored = Some(problem);
            let earlier = self.finish_by;
            self.limit_finishing(now);
            // One failure after the other must not win time that the first one did not have.
            self.finish_by = [earlier, self.finish_by].into_iter().flatten().min();
        }
    }

    fn on_final_done(&mut self, problem: Option<String>, out: &mut Vec<Action>) {
        if self.phase == Phase::Finishing {
            self.unstored = problem;
            self.report_end(out);
        }
    }

    fn on_time(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        if self.wake_at().is_none_or(|at| now < at) {
            return;
        }
        match self.phase {
            Phase::Draining => self.terminate(now, out),
            Phase::Terminating => self.kill(out),
            Phase::Finishing => {
                self.unstored = Some(match self.unstored.take() {
                    Some(problem) => format!("{problem}; tried again until the time was up"),
                    None => "the last upload did not end in time".to_owned(),
                });
                self.report_end(out);
            }
            Phase::Restoring
            | Phase::Preparing
            | Phase::Starting
            | Phase::Running
            | Phase::Sweeping
            | Phase::Done => {}
        }
    }

    /// Begins or hastens the stop for `reason`.
    fn stop_for(&mut self, now: Timestamp, reason: Stop, deadline: Timestamp, out: &mut Vec<Action>) {
        // A stop that comes after the command's own end is not why it ended.
        if self.end.is_none() || reason == Stop::Superseded {
            self.stopped = Some(self.stopped.map_or(reason, |earlier| earlier.max(reason)));
        }
        let earlier = self.drain.take();
        let since = earlier.as_ref().map_or(now, |drain| drain.since);
        // A notice that was moved replaces its own deadline; two different reasons keep the nearer one.
        let deadline = match earlier {
            Some(drain) if reason != Stop::Notice => drain.deadline.min(deadline),
            _ => deadline,
        };
        self.drain = Some(Drain { since, deadline });
        match (self.phase, reason) {
            (Phase::Restoring | Phase::Preparing, _) => self.stop_without_saving(out),
            (Phase::Running, Stop::Cancel) | (Phase::Draining, Stop::Cancel) => self.terminate(now, out),
            (Phase::Running | Phase::Draining | Phase::Terminating, Stop::Superseded) => self.kill(out),
            (Phase::Running, _) => self.enter_drain(now, out),
            (Phase::Draining, _) => self.announce(out),
            (Phase::Terminating, _) => self.kill_at = self.kill_at.map(|at| at.min(self.kill_limit(now))),
            (Phase::Finishing, Stop::Superseded) => self.report_end(out),
            (Phase::Finishing, Stop::Notice) => self.limit_finishing(now),
            (Phase::Sweeping | Phase::Finishing, _) if self.end.is_some() => {
                let earlier = self.finish_stop.take();
                self.finish_stop = Some(Drain {
                    since: earlier.as_ref().map_or(now, |stop| stop.since),
                    deadline: earlier.map_or(deadline, |stop| stop.deadline.min(deadline)),
                });
                self.limit_finishing(now);
            }
            (Phase::Starting | Phase::Sweeping | Phase::Finishing | Phase::Done, _) => {}
        }
    }

    fn stop_without_saving(&mut self, out: &mut Vec<Action>) {
        match self.phase {
            Phase::Restoring => {
                out.push(Action::AbandonRestore);
                self.report_end(out);
            }
            Phase::Preparing | Phase::Running | Phase::Draining | Phase::Terminating => self.kill(out),
            Phase::Finishing => self.report_end(out),
            Phase::Starting | Phase::Sweeping | Phase::Done => {}
        }
    }

    fn spawn_command(&mut self, out: &mut Vec<Action>) {
        self.phase = Phase::Starting;
        out.push(Action::SpawnCommand);
    }

    fn enter_drain(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        self.phase = Phase::Draining;
        self.announce(out);
        self.on_time(now, out);
    }

    /// The notice file for those who read it, the save signal for those who asked for one, once.
    fn announce(&mut self, out: &mut Vec<Action>) {
        let Some(drain) = &self.drain else { return };
        let source = match (&self.notice, self.stopped) {
            (Some((_, source)), Some(Stop::Notice)) => source.clone(),
            (_, reason) => format!("spotq:{}", reason.map_or("stop", Stop::name)),
        };
        out.push(Action::WriteNotice { deadline: drain.deadline, source });
        if self.rules.signal.is_some() && !self.save_sent {
            self.save_sent = true;
            out.push(Action::SendSave);
        }
    }

    fn terminate(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        self.phase = Phase::Terminating;
        self.stop_sent = true;
        self.kill_at = Some(self.kill_limit(now));
        out.push(Action::SendTerm);
    }

    fn kill(&mut self, out: &mut Vec<Action>) {
        self.phase = Phase::Sweeping;
        // After the command's own end the sweep only removes what it left behind.
        self.stop_sent |= self.end.is_none();
        out.push(Action::KillTree);
    }

    fn finish_if_gone(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        if !self.tree_gone || self.end.is_none() {
            return;
        }
        if !self.started || self.stopped == Some(Stop::Superseded) {
            self.report_end(out);
            return;
        }
        self.phase = Phase::Finishing;
        self.finishing_since = Some(now);
        self.limit_finishing(now);
        out.push(Action::FinalPush);
    }

    /// Sets until when the last uploads may take: a notice and a stop have deadlines of their own.
    fn limit_finishing(&mut self, now: Timestamp) {
        let Some(since) = self.finishing_since else { return };
        let limit = match self.stopped {
            None | Some(Stop::Notice) => since + FINISH_LIMIT,
            Some(_) => since + FINISH_LIMIT_STOPPED,
        };
        let noticed = self.notice.as_ref().map(|(deadline, _)| (*deadline - GRACE_MIN).max(now + RESERVE));
        let stopped = self.finish_stop.as_ref().map(|stop| match self.unstored {
            // What failed before is not tried any longer than the one who stopped it wants to wait.
            Some(_) => stop.deadline.max(stop.since + RESERVE),
            None => stop.deadline.max(stop.since + FINISH_LIMIT_STOPPED),
        });
        self.finish_by = [Some(limit), noticed, stopped].into_iter().flatten().min();
    }

    fn report_end(&mut self, out: &mut Vec<Action>) {
        self.phase = Phase::Done;
        let unstored = self.unstored.take();
        // The end of `setup:` is not the command's.
        let mut end = self.end.filter(|_| self.started);
        if unstored.is_some() && end.is_some_and(|end| end.code == Some(0)) {
            end = end.map(|end| End { code: None, ..end });
            self.add_detail(Some("the command ended with exit code 0".to_owned()));
        }
        self.add_detail(unstored.clone());
        out.push(Action::Report(News::Finished(Finish {
            end,
            launch_error: self.launch_error.take(),
            stopped: self.stopped,
            signalled: self.signalled(),
            unstored,
            detail: self.detail.take(),
        })));
    }

    /// Whether one of our signals may have ended the command. After a save signal even a plain exit counts if the
    /// signal is one that programs take as "stop", and so does an end that a missing handler explains.
    fn signalled(&self) -> bool {
        let Some(end) = self.end.filter(|_| self.started) else { return false };
        let ended_by_save = match self.rules.signal {
            Some(Signal::Term | Signal::Int) => true,
            Some(Signal::Usr1 | Signal::Usr2 | Signal::Hup) => end.code != Some(0),
            None => false,
        };
        self.stop_sent || (self.save_sent && ended_by_save)
    }

    /// When waiting for a save ends, so that TERM, exit and upload still fit before the deadline.
    fn stop_at(&self, drain: &Drain) -> Timestamp {
        let planned = drain.deadline - self.estimate.max(RESERVE) - UPLOAD_MARGIN;
        let half = Span(drain.deadline.since(drain.since).0 / 2);
        match self.stopped {
            // Our own stops have no node to lose: all of the time is for the save, the grace follows it.
            Some(Stop::Requeue | Stop::Budget | Stop::TimeLimit) if self.notice.is_none() => drain.deadline,
            // The job's grace is kept free, as far as half of the time allows.
            _ => (planned - self.rules.grace).max(drain.since + half),
        }
    }

    fn kill_limit(&self, now: Timestamp) -> Timestamp {
        let grace = now + self.rules.grace;
        match &self.notice {
            Some((deadline, _)) => grace.min((*deadline - RESERVE).max(now + GRACE_MIN)),
            None if self.stopped == Some(Stop::WorkerLeaving) => {
                let deadline = self.drain.as_ref().map_or(grace, |drain| drain.deadline);
                grace.min(deadline.max(now + GRACE_MIN))
            }
            None => grace,
        }
    }

    fn add_detail(&mut self, more: Option<String>) {
        if let Some(more) = more {
            self.detail = Some(match self.detail.take() {
                Some(detail) => format!("{detail}; {more}"),
                None => more,
            });
        }
    }
}

fn describe(end: End) -> String {
    match (end.code, end.signal) {
        (Some(code), _) => format!("ended with exit code {code}"),
        (None, Some(signal)) => format!("was ended by signal {signal}"),
        (None, None) => "ended without an exit code".to_owned(),
    }
}

#[cfg(test)]
mod tests;
