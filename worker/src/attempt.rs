//! Runs one attempt: feeds the supervision machine what happens and does what it says.
//!
//! One task per attempt owns everything of it. It decides nothing itself and waits for nothing slow in its loop:
//! slow work runs beside it and comes back as an input.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use spotq_model::{JobSpec, Signal, SignalTarget, Timestamp};
use spotq_proto::v1;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinHandle;

use crate::environment::{self, Facts, Places};
use crate::ids::{AttemptId, Instant, now};
use crate::logs::{LOG_BYTES_MAX, LogWriter};
use crate::observe::{self, Seen, SharedSeen, Sight, lock};
use crate::process::{self, Ended, Launch, Pumps};
use crate::progress::Progress;
use crate::pushes::{self, LastPushes, Push, Reporter};
use crate::restoring::Restoring;
use crate::saves::{Pace, Quiet, Saves};
use crate::supervise::{Action, End, Finish, Input, Machine, News, Phase, Pushed, Rules, Stop};
use crate::surroundings::{Processes, Started, Surroundings};
use crate::uploads::{RestoredFrom, StoreAddress, Uploads, link_directory};
use crate::words;

/// Inputs on the way to one attempt. Each source has at most a few outstanding.
const INPUTS_MAX: usize = 64;
/// How often the rest of a stopped tree is looked at.
const TREE_POLL: Duration = Duration::from_millis(10);

/// What all attempts of this worker share.
#[derive(Debug, Clone)]
pub struct Setting {
    pub around: Arc<dyn Surroundings>,
    /// This program, for the shim.
    pub exe: PathBuf,
    pub attempts: PathBuf,
    /// Begins the mark of every process: `<node>-`.
    pub mark_prefix: String,
    pub quiet: Quiet,
    pub no_cgroups: bool,
    /// Told when a log has grown.
    pub grown: Arc<Notify>,
}

/// A grant, checked.
#[derive(Debug, Clone)]
pub struct Order {
    pub id: AttemptId,
    pub spec: JobSpec,
    pub store: StoreAddress,
}

/// What an attempt tells the agent.
#[derive(Debug)]
pub struct Told {
    pub id: AttemptId,
    pub at: Timestamp,
    pub what: v1::report::What,
}

/// A running attempt, as the agent sees it.
#[derive(Debug, Clone)]
pub struct Handle {
    inputs: mpsc::Sender<Input>,
}

impl Handle {
    /// Passes on a notice, a stop or a withdrawal; an attempt that has ended does not care.
    pub fn send(&self, input: Input) {
        // A full queue means that the same thing is waiting there already: the sender repeats itself.
        let _ = self.inputs.try_send(input);
    }
}

/// Starts an attempt.
pub fn begin(setting: Setting, order: Order, tell: mpsc::Sender<Told>) -> Handle {
    let (inputs, receiver) = mpsc::channel(INPUTS_MAX);
    let own = inputs.clone();
    tokio::spawn(async move {
        let id = order.id;
        let places = Places::below(&setting.attempts, id);
        match Attempt::new(setting, order, places, own, tell.clone()) {
            Ok(attempt) => attempt.run(receiver).await,
            Err(message) => {
                for what in [v1::report::What::Accepted(v1::Accepted {}), words::cannot_start(message)] {
                    let _ = tell.send(Told { id, at: now(), what }).await;
                }
            }
        }
    });
    Handle { inputs }
}

struct Attempt {
    setting: Setting,
    order: Order,
    places: Places,
    mark: String,
    cwd: PathBuf,
    log: LogWriter,
    seen: SharedSeen,
    /// Set once the store could be opened.
    uploads: Arc<OnceLock<Arc<Uploads>>>,
    restored: Arc<Mutex<RestoredFrom>>,
    inputs: mpsc::Sender<Input>,
    tell: mpsc::Sender<Told>,
    sights: (mpsc::Sender<Sight>, mpsc::Receiver<Sight>),
    pace: watch::Sender<Pace>,
    observer: Option<JoinHandle<()>>,
    processes: Arc<dyn Processes>,
    pumps: Option<Pumps>,
    restoring: Option<JoinHandle<()>>,
    push: Option<JoinHandle<()>>,
    push_pause: Arc<Mutex<Duration>>,
    outputs: Option<JoinHandle<()>>,
    end: Option<End>,
    /// We sent a signal that programs take as "stop".
    asked_to_end: bool,
}

impl Attempt {
    fn new(
        setting: Setting,
        order: Order,
        places: Places,
        inputs: mpsc::Sender<Input>,
        tell: mpsc::Sender<Told>,
    ) -> Result<Attempt, String> {
        let make = |dir: &Path| {
            std::fs::create_dir_all(dir)
                .map_err(|e| format!("cannot make {} on the node's disk: {e}", dir.display()))
        };
        make(&places.work)?;
        let log = LogWriter::open(&places.log, LOG_BYTES_MAX, Arc::clone(&setting.grown))
            .map_err(|e| format!("cannot open the log {} on the node's disk: {e}", places.log.display()))?;
        let checkpoint = &order.spec.checkpoint;
        let saves = Saves::new(checkpoint.profile, setting.quiet, checkpoint.complete_when.as_deref())?;
        let progress = Progress::new(&places.progress);
        let cwd = order.spec.workdir.as_ref().map_or_else(|| places.work.clone(), PathBuf::from);
        let mark = format!("{}{}", setting.mark_prefix, order.id);
        Ok(Attempt {
            cwd,
            log,
            seen: Arc::new(Mutex::new(Seen { saves, progress, not_before: None })),
            uploads: Arc::default(),
            restored: Arc::default(),
            inputs,
            tell,
            sights: mpsc::channel(INPUTS_MAX),
            pace: watch::channel(Pace::Calm).0,
            observer: None,
            processes: setting.around.nobody(&mark),
            mark,
            pumps: None,
            restoring: None,
            push: None,
            push_pause: Arc::new(Mutex::new(pushes::PAUSE)),
            outputs: None,
            end: None,
            asked_to_end: false,
            setting,
            order,
            places,
        })
    }

    async fn run(mut self, mut receiver: mpsc::Receiver<Input>) {
        let rules = Rules {
            signal: self.order.spec.checkpoint.signal,
            grace: self.order.spec.checkpoint.grace,
            setup: self.order.spec.setup.is_some(),
        };
        let (mut machine, actions) = Machine::start(rules);
        self.perform_all(&mut machine, actions).await;
        while machine.phase() != Phase::Done {
            let wake = machine.wake_at().map(|at| at.since(now()).as_duration());
            let input = tokio::select! {
                // In a fixed order, so that a simulation repeats itself.
                biased;
                Some(input) = receiver.recv() => input,
                Some(sight) = self.sights.1.recv() => match sight {
                    Sight::Complete(complete) => Input::Saved { at: complete.saved_at },
                    Sight::Progress(point) => {
                        self.report(v1::report::What::Progress(words::progress(point))).await;
                        continue;
                    }
                },
                () = tokio::time::sleep(wake.unwrap_or_default()), if wake.is_some() => Input::Tick,
            };
            if let Input::Exited(end) = &input {
                self.end = Some(*end);
            }
            let actions = machine.step(now(), input);
            self.perform_all(&mut machine, actions).await;
        }
        self.clean_up();
    }

    /// Performs actions, and those that follow at once from performing them.
    async fn perform_all(&mut self, machine: &mut Machine, actions: Vec<Action>) {
        let mut todo = std::collections::VecDeque::from(actions);
        while let Some(action) = todo.pop_front() {
            if let Some(input) = self.perform(action).await {
                todo.extend(machine.step(now(), input));
            }
        }
        let pace = if machine.hurried() { Pace::Hurried } else { Pace::Calm };
        self.pace.send_if_modified(|current| std::mem::replace(current, pace) != pace);
    }

    async fn perform(&mut self, action: Action) -> Option<Input> {
        match action {
            Action::Restore => self.start_restore(),
            Action::AbandonRestore => {
                if let Some(task) = self.restoring.take() {
                    task.abort();
                }
            }
            Action::SpawnSetup => {
                let setup = self.order.spec.setup.clone().unwrap_or_default();
                let command = process::shell(&setup, &self.places.script);
                return Some(match self.spawn(command) {
                    Ok(_) => return None,
                    Err(message) => Input::SpawnFailed { message: format!("`setup:` {message}") },
                });
            }
            Action::SpawnCommand => return Some(self.spawn_command()),
            Action::WriteNotice { deadline, source } => self.write_notice(deadline, &source),
            Action::RemoveNotice => {
                let _ = std::fs::remove_file(&self.places.notice);
                self.log.note("the notice was withdrawn; going on");
            }
            Action::SendSave => self.send_save(),
            Action::SendTerm => {
                self.asked_to_end = true;
                self.processes.signal(self.processes.members(), rustix::process::Signal::TERM);
            }
            Action::AwaitTree => self.await_tree(),
            Action::KillTree => self.kill_tree(),
            Action::Push => self.start_push(),
            Action::FinalPush => self.start_final_push(),
            Action::Report(news) => self.report_news(news).await,
        }
        None
    }

    fn start_restore(&mut self) {
        let restoring = Restoring {
            around: Arc::clone(&self.setting.around),
            order: self.order.clone(),
            uploads: Arc::clone(&self.uploads),
            dir: self.places.checkpoint.clone(),
            work: self.order.spec.workdir.is_none().then(|| self.places.work.clone()),
            restored: Arc::clone(&self.restored),
            seen: Arc::clone(&self.seen),
            log: self.log.clone(),
        };
        let inputs = self.inputs.clone();
        self.restoring = Some(tokio::spawn(async move {
            let _ = inputs.send(restoring.run().await).await;
        }));
    }

    fn spawn_command(&mut self) -> Input {
        let command = process::arguments(&self.order.spec.command, &self.places.script);
        let linked = match &self.order.spec.checkpoint.dir {
            Some(link) => link_directory(&self.cwd, link, &self.places.checkpoint),
            None => Ok(()),
        };
        match linked.and_then(|()| self.spawn(command)) {
            Ok(pid) => Input::Spawned { pid },
            Err(message) => Input::SpawnFailed { message },
        }
    }

    fn spawn(&mut self, command: Result<Vec<std::ffi::OsString>, String>) -> Result<u32, String> {
        let resumed = self.restored_from().checkpoint.is_some();
        let facts = Facts {
            id: self.order.id,
            spec: &self.order.spec,
            places: &self.places,
            cwd: &self.cwd,
            mark: &self.mark,
            resumed,
            port: free_port(),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            programs: self.setting.exe.parent().unwrap_or(Path::new("/")),
        };
        let env = environment::build(std::env::vars_os(), &facts);
        let Started { pid, processes, ended, pumps } = self.setting.around.start(&Launch {
            exe: &self.setting.exe,
            command: command?,
            cwd: &self.cwd,
            env: &env,
            status: &self.places.status,
            mark: &self.mark,
            no_cgroups: self.setting.no_cgroups,
            log: &self.log,
        })?;
        self.processes = processes;
        // Output of `setup:` that is still being copied goes on by itself.
        self.pumps = Some(pumps);
        if self.observer.is_none() {
            self.observer = Some(tokio::spawn(observe::observe(
                self.places.checkpoint.clone(),
                Arc::clone(&self.seen),
                Arc::clone(&self.processes),
                self.pace.subscribe(),
                self.sights.0.clone(),
            )));
        }
        let inputs = self.inputs.clone();
        tokio::spawn(async move {
            let input = match ended.await {
                Ended::End(end) => Input::Exited(end),
                Ended::NotStarted { message } => Input::SpawnFailed { message },
            };
            let _ = inputs.send(input).await;
        });
        Ok(pid)
    }

    /// Written aside and renamed: a trainer never reads half of it.
    fn write_notice(&self, deadline: Timestamp, source: &str) {
        let text = words::notice_file(deadline, source);
        let aside = self.places.notice.with_extension("tmp");
        let written =
            std::fs::write(&aside, text).and_then(|()| std::fs::rename(&aside, &self.places.notice));
        if let Err(error) = written {
            tracing::warn!(%error, "cannot write the notice file; is the node's disk full?");
        }
        self.log.note(&format!("stop ahead ({source}), {} left to save", deadline.since(now())));
    }

    fn send_save(&mut self) {
        let Some(signal) = self.order.spec.checkpoint.signal else { return };
        self.asked_to_end |= matches!(signal, Signal::Term | Signal::Int);
        let targets = match self.order.spec.checkpoint.signal_target {
            SignalTarget::Ranks => self.processes.ranks(words::unix_signal(signal)),
            SignalTarget::Launcher => self.processes.launcher().into_iter().collect(),
            SignalTarget::All => self.processes.members(),
        };
        self.processes.signal(targets, words::unix_signal(signal));
    }

    fn await_tree(&self) {
        let (processes, inputs) = (Arc::clone(&self.processes), self.inputs.clone());
        tokio::spawn(async move {
            // Ends with the attempt: its own kill empties the tree at the latest.
            while !processes.members().is_empty() && !inputs.is_closed() {
                tokio::time::sleep(TREE_POLL).await;
            }
            let _ = inputs.send(Input::TreeEmpty).await;
        });
    }

    fn kill_tree(&mut self) {
        let (killed, inputs, pumps) = (self.processes.kill(), self.inputs.clone(), self.pumps.take());
        tokio::spawn(async move {
            let leftover = killed.await;
            if let Some(pumps) = pumps {
                pumps.drain().await;
            }
            let _ = inputs.send(Input::TreeGone { leftover }).await;
        });
    }

    fn start_push(&mut self) {
        let Some(push) = self.pusher() else { return };
        let (inputs, seen, pause) =
            (self.inputs.clone(), Arc::clone(&self.seen), Arc::clone(&self.push_pause));
        self.push = Some(tokio::spawn(async move {
            let began = Instant::now();
            let (pushed, estimate) = push.once().await;
            {
                let mut pause = pause.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                // Uploads take at most half of the time while nothing presses.
                lock(&seen).not_before = Some(Instant::now() + began.elapsed());
                if pushed == Pushed::Failed {
                    forget_after(Arc::clone(&seen), *pause);
                    *pause = (*pause * 2).min(pushes::PAUSE_MAX);
                } else {
                    *pause = pushes::PAUSE;
                }
            }
            if let Some(estimate) = estimate {
                let _ = inputs.send(Input::UploadEstimate(estimate)).await;
            }
            let _ = inputs.send(Input::Pushed(pushed)).await;
        }));
        self.start_outputs();
    }

    /// Outputs follow each commit; one upload at a time, and what it misses the next one or the last one takes.
    fn start_outputs(&mut self) {
        let busy = self.outputs.as_ref().is_some_and(|task| !task.is_finished());
        let Some(uploads) = self.uploads.get().cloned().filter(|uploads| uploads.has_outputs() && !busy)
        else {
            return;
        };
        let cwd = self.cwd.clone();
        self.outputs = Some(tokio::spawn(async move {
            if let Err(error) = uploads.push_outputs(&cwd).await {
                tracing::debug!(%error, "outputs wait for the next upload");
            }
        }));
    }

    fn start_final_push(&mut self) {
        let Some(push) = self.pusher() else { return };
        if let Some(observer) = self.observer.take() {
            observer.abort();
        }
        let last = LastPushes {
            push,
            cwd: self.cwd.clone(),
            pace: pace_after(self.end, self.asked_to_end),
            ended_at: self.end.map_or_else(now, |end| end.at),
            log: self.log.clone(),
            succeeded: !self.asked_to_end && self.end.is_some_and(|end| end.code == Some(0)),
            earlier: [self.push.take(), self.outputs.take()].into_iter().flatten().collect(),
        };
        self.push = Some(tokio::spawn(last.run(self.inputs.clone())));
    }

    fn pusher(&self) -> Option<Push> {
        Some(Push {
            uploads: self.uploads.get().cloned()?,
            dir: self.places.checkpoint.clone(),
            seen: Arc::clone(&self.seen),
            reporter: Reporter { id: self.order.id, tell: self.tell.clone() },
        })
    }

    async fn report_news(&self, news: News) {
        let what = match news {
            News::Accepted => v1::report::What::Accepted(v1::Accepted {}),
            News::Restored => words::restored(&self.restored_from()),
            News::Started { pid } => v1::report::What::Started(v1::Started { pid }),
            News::Noticed { deadline, source } => words::noticed(deadline, source),
            News::NoticeWithdrawn => v1::report::What::NoticeWithdrawn(v1::NoticeWithdrawn {}),
            News::Superseded { by } => v1::report::What::Superseded(v1::Superseded { by_generation: by }),
            News::Finished(finish) => self.finished(finish),
        };
        self.report(what).await;
    }

    fn finished(&self, mut finish: Finish) -> v1::report::What {
        let last = {
            let mut seen = lock(&self.seen);
            seen.progress.look(now());
            seen.progress.latest()
        };
        // A trainer that reached its last step is done, whatever signals were on their way.
        let done = last.is_some_and(|point| point.total.is_some_and(|total| point.step >= total));
        if let Some(problem) = finish.unstored.take() {
            self.log.note(&format!("ended, but not everything that it made is stored: {problem}"));
        }
        let plain = finish.end.is_some_and(|end| end.code == Some(0));
        if done && plain && finish.stopped != Some(Stop::Cancel) {
            finish.signalled = false;
        }
        words::finished(&finish, last)
    }

    async fn report(&self, what: v1::report::What) {
        let _ = self.tell.send(Told { id: self.order.id, at: now(), what }).await;
    }

    fn restored_from(&self) -> RestoredFrom {
        self.restored.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    fn clean_up(&mut self) {
        self.processes.is_over();
        for task in [self.observer.take(), self.push.take(), self.outputs.take()].into_iter().flatten() {
            task.abort();
        }
    }
}

/// How to look at what is left on disk. An exit that the command chose: what it saved it meant to save. The exit codes
/// of an ended shell are chosen only if the command was `asked` to end; else something else ended it in the middle.
fn pace_after(end: Option<End>, asked: bool) -> Pace {
    const BY_TERM: i32 = 128 + 15;
    const BY_INT: i32 = 128 + 2;
    match end.and_then(|end| end.code) {
        Some(0) => Pace::Ended,
        Some(BY_TERM | BY_INT) if asked => Pace::Ended,
        Some(_) | None => Pace::Broken,
    }
}

fn forget_after(seen: SharedSeen, pause: Duration) {
    tokio::spawn(async move {
        tokio::time::sleep(pause).await;
        lock(&seen).saves.forget();
    });
}

/// A port that is free now; the ranks of one node meet there.
fn free_port() -> u16 {
    /// What torchrun takes by default.
    const USUAL: u16 = 29_500;
    let bound = std::net::TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0));
    bound.and_then(|listener| listener.local_addr()).map_or(USUAL, |address| address.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_codes_of_a_stop_are_chosen_only_by_who_was_asked_to_stop() {
        let end = |code| Some(End { code, signal: None, out_of_memory: false, at: now() });
        for asked in [false, true] {
            assert_eq!(pace_after(end(Some(0)), asked), Pace::Ended);
            assert_eq!(pace_after(end(Some(1)), asked), Pace::Broken);
            assert_eq!(pace_after(end(None), asked), Pace::Broken);
        }
        assert_eq!(pace_after(end(Some(143)), true), Pace::Ended);
        assert_eq!(pace_after(end(Some(130)), true), Pace::Ended);
        assert_eq!(pace_after(end(Some(143)), false), Pace::Broken);
        assert_eq!(pace_after(end(Some(130)), false), Pace::Broken);
    }
}
