//! The training commands: tasks of the worker's host that take steps in virtual time, write progress and checkpoints to
//! the attempt's real directory, resume from what they find there, and react to signals each in its own way.
//!
//! What a checkpoint holds says whose it is and of which step, so that a restore of anything else is noticed.

use std::collections::{BTreeSet, VecDeque};
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

use futures::FutureExt as _;
use futures::future::BoxFuture;
use spotq_proto::v1::LogStream;
use spotq_worker::simulation::{End, Ended, Launch, LogWriter, Processes, Pumps, Signal, Started};
use tokio::sync::{Notify, oneshot};

use crate::counts::Count;
use crate::draw::{self, JobPlan, OnTerm, Style};
use crate::node::place;
use crate::oracle::{Oracle, Resumed};
use crate::world::World;

/// Named checkpoints that a trainer leaves.
const KEEP: usize = 2;
/// Filling of a checkpoint, so that it is not all header.
const PADDING: usize = 700;
/// What a trainer does of a save before it looks at its signals again, at most.
const PIECE: Duration = Duration::from_millis(100);

/// The processes of an attempt that has none.
#[derive(Debug)]
pub(crate) struct Nobody;

/// A running command, as its worker sees it.
#[derive(Debug)]
struct Running {
    pid: u32,
    alive: AtomicBool,
    /// It has a file of its checkpoint directory open.
    writes: AtomicBool,
    signals: Mutex<VecDeque<Signal>>,
    signalled: Notify,
    /// A signal that ends it at once.
    fatal: Mutex<Option<i32>>,
    killed: Notify,
    dies_of_term: bool,
    world: World,
}

/// Starts the command of an attempt, or what comes before it.
pub(crate) fn start(world: &World, inst: usize, launch: &Launch<'_>) -> Result<Started, String> {
    let words: Vec<String> = launch.command.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let number = words.get(1).and_then(|word| word.parse::<usize>().ok());
    let plan = match (words.first().map(String::as_str), number) {
        (Some("train"), Some(number)) => world.lock().d.jobs.get(number).cloned(),
        _ => None,
    };
    let (done, ended) = oneshot::channel();
    let running = Arc::new(Running {
        pid: world.lock().next_pid(),
        alive: AtomicBool::new(true),
        writes: AtomicBool::new(false),
        signals: Mutex::default(),
        signalled: Notify::new(),
        fatal: Mutex::default(),
        killed: Notify::new(),
        dies_of_term: plan.as_ref().is_none_or(|plan| plan.on_term == OnTerm::Dies),
        world: world.clone(),
    });
    let me = running.clone();
    if let Some(plan) = plan {
        let command = Command {
            world: world.clone(),
            inst,
            plan,
            generation: place(launch, "SPOTQ_ATTEMPT").to_string_lossy().parse().unwrap_or(0),
            job: place(launch, "SPOTQ_JOB_ID").to_string_lossy().parse().unwrap_or(0),
            dir: place(launch, "SPOTQ_CHECKPOINT_DIR"),
            progress: place(launch, "SPOTQ_PROGRESS_FILE"),
            resumes: !place(launch, "SPOTQ_RESUME_FROM").as_os_str().is_empty(),
            log: launch.log.clone(),
            me: me.clone(),
        };
        tokio::spawn(async move {
            let how = until_killed(&me, command.run()).await;
            command.over();
            me.alive.store(false, Ordering::Relaxed);
            let _ = done.send(how);
        });
    } else {
        tokio::spawn(async move {
            let prepare = tokio::time::sleep(Duration::from_millis(300)).map(|()| How::Exit(0));
            let how = until_killed(&me, prepare).await;
            me.alive.store(false, Ordering::Relaxed);
            let _ = done.send(how);
        });
    }
    let ended = async move {
        // A host that is switched off takes the waiter along, too.
        let how = ended.await.unwrap_or(How::Signal(9));
        let at = spotq_host::now();
        match how {
            How::Exit(code) => Ended::End(End { code: Some(code), signal: None, out_of_memory: false, at }),
            How::Signal(signal) => {
                Ended::End(End { code: None, signal: Some(signal), out_of_memory: false, at })
            }
            How::OutOfMemory => Ended::End(End { code: None, signal: Some(9), out_of_memory: true, at }),
            How::NeverStarted => {
                Ended::NotStarted { message: "cannot run `train`: command not found".into() }
            }
        }
    };
    Ok(Started { pid: running.pid, processes: running, ended: ended.boxed(), pumps: Pumps::default() })
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    Exit(i32),
    Signal(i32),
    OutOfMemory,
    NeverStarted,
}

async fn until_killed(me: &Running, work: impl Future<Output = How>) -> How {
    tokio::select! {
        biased;
        () = me.killed.notified() => {
            let signal = me.fatal.lock().unwrap_or_else(PoisonError::into_inner).unwrap_or(9);
            How::Signal(signal)
        }
        how = work => how,
    }
}

/// A training command.
#[derive(Debug)]
struct Command {
    world: World,
    inst: usize,
    plan: Arc<JobPlan>,
    job: u32,
    generation: u64,
    dir: PathBuf,
    progress: PathBuf,
    resumes: bool,
    log: LogWriter,
    me: Arc<Running>,
}

impl Command {
    async fn run(&self) -> How {
        Oracle::command_starts(&mut self.world.lock(), self.inst, self.job, self.generation);
        let plan = &self.plan;
        if plan.end == draw::End::NeverStarts {
            return How::NeverStarted;
        }
        self.say("starts");
        let imports = self.world.lock().rng.within(20, 400);
        tokio::time::sleep(Duration::from_millis(imports)).await;
        let mut step = match self.resume() {
            Ok(step) => step,
            Err(why) => {
                self.world.lock().violated("INV-05", format!("job {} finds {why}", self.job));
                return How::Exit(1);
            }
        };
        let fails_at = self.fails_at();
        let mut saved = step;
        while step < plan.steps {
            let rest = tokio::time::sleep(Duration::from_millis(plan.step_ms));
            tokio::pin!(rest);
            loop {
                let signal = tokio::select! {
                    biased;
                    signal = self.signal() => signal,
                    () = &mut rest => break,
                };
                if let Some(how) = self.on_signal(signal, step).await {
                    return how;
                }
                saved = saved.max(if plan.saves_on_signal { step } else { saved });
            }
            step += 1;
            if self.tell_progress(step).is_err() {
                return How::Exit(1);
            }
            if fails_at == Some(step) {
                return self.fail();
            }
            if step >= saved + plan.save_every || step == plan.steps {
                if self.save(step).await.is_err() {
                    return How::Exit(1);
                }
                saved = step;
            }
        }
        self.say("is done");
        How::Exit(0)
    }

    fn say(&self, what: &str) {
        let (job, generation) = (self.job, self.generation);
        self.log.write(LogStream::Stdout, format!("{what}\n").as_bytes());
        self.world.lock().say(|| format!("command of job {job}, generation {generation} {what}"));
    }

    /// What is in the directory must be one whole checkpoint of this very job.
    fn resume(&self) -> Result<u64, String> {
        let found = self.read().map_err(|error| format!("a directory that it cannot read: {error}"))?;
        let found = found?;
        let resumed = Resumed {
            inst: self.inst,
            job: self.job,
            generation: self.generation,
            step: found,
            exact: self.plan.style == Style::Named,
        };
        if self.resumes != found.is_some() {
            return Err(format!("{found:?}, but is told to resume: {}", self.resumes));
        }
        Oracle::resumed(&mut self.world.lock(), &resumed);
        Ok(found.unwrap_or(0))
    }

    fn read(&self) -> io::Result<Result<Option<u64>, String>> {
        let mut steps = BTreeSet::new();
        let mut files = Vec::new();
        if self.dir.is_dir() {
            for entry in fs::read_dir(&self.dir)? {
                let entry = entry?;
                files.push((entry.file_name().to_string_lossy().into_owned(), fs::read(entry.path())?));
            }
        }
        files.sort();
        for (name, bytes) in &files {
            let Some(step) = step_of(bytes) else { return Ok(Err(format!("`{name}` of no step"))) };
            if *bytes != self.content(part_of(name), step) {
                return Ok(Err(format!("`{name}` that nobody wrote")));
            }
            if self.plan.style == Style::Named && *name != named(step) {
                return Ok(Err(format!("`{name}` of step {step}")));
            }
            steps.insert(step);
        }
        let whole = match self.plan.style {
            Style::Named => true,
            Style::OneName => files.len() <= 1,
            Style::InPlace => files.is_empty() || files.len() == 2 && steps.len() == 1,
        };
        let names: Vec<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
        Ok(if whole { Ok(steps.last().copied()) } else { Err(format!("{names:?} of steps {steps:?}")) })
    }

    fn fails_at(&self) -> Option<u64> {
        let failed = self.world.lock().jobs[self.plan.number].failed_so_far;
        let ends_badly = self.plan.end != draw::End::Well;
        (ends_badly || failed < self.plan.fails_first).then(|| (self.plan.steps * 2 / 3).max(1))
    }

    fn fail(&self) -> How {
        self.world.lock().jobs[self.plan.number].failed_so_far += 1;
        self.say("fails");
        match self.plan.end {
            draw::End::Badly(code) => How::Exit(code),
            draw::End::Signal(signal) => How::Signal(signal),
            draw::End::OutOfMemory => How::OutOfMemory,
            draw::End::Well | draw::End::NeverStarts => How::Exit(3),
        }
    }

    async fn signal(&self) -> Signal {
        loop {
            let next = self.me.signals.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            match next {
                Some(signal) => return signal,
                None => self.me.signalled.notified().await,
            }
        }
    }

    async fn on_signal(&self, signal: Signal, step: u64) -> Option<How> {
        if signal == Signal::USR1 {
            if !self.plan.saves_on_signal {
                return Some(How::Signal(10));
            }
            if step > 0 && self.save(step).await.is_err() {
                return Some(How::Exit(1));
            }
            self.say("has saved on a signal");
            let inner = &mut *self.world.lock();
            inner.count(Count::SavedOnSignal);
            Oracle::saved_on_signal(inner, self.inst, self.job, self.generation, step);
            return None;
        }
        let obeyed = match self.plan.on_term {
            OnTerm::Dies => Some(How::Signal(15)),
            OnTerm::ExitsZero => Some(How::Exit(0)),
            OnTerm::SavesAndExitsZero => {
                if step > 0 && self.save(step).await.is_err() {
                    return Some(How::Exit(1));
                }
                Some(How::Exit(0))
            }
            OnTerm::Ignores => None,
        };
        self.world.lock().count(if obeyed.is_some() { Count::TermObeyed } else { Count::TermIgnored });
        obeyed
    }

    fn tell_progress(&self, step: u64) -> io::Result<()> {
        let mut file = File::options().create(true).append(true).open(&self.progress)?;
        writeln!(file, "{{\"step\":{step},\"total\":{}}}", self.plan.steps)
    }

    /// In pieces, between which it may be killed.
    async fn save(&self, step: u64) -> io::Result<()> {
        fs::create_dir_all(&self.dir)?;
        match self.plan.style {
            Style::Named => {
                self.write(&self.dir.join(format!(".tmp-{}", named(step))), "whole", step).await?;
                fs::rename(self.dir.join(format!(".tmp-{}", named(step))), self.dir.join(named(step)))?;
                self.remove_old(step)?;
            }
            Style::OneName => {
                self.write(&self.dir.join(".tmp-model"), "whole", step).await?;
                fs::rename(self.dir.join(".tmp-model"), self.dir.join("model.ckpt"))?;
            }
            Style::InPlace => {
                self.write(&self.dir.join("model.bin"), "model.bin", step).await?;
                self.write(&self.dir.join("optim.bin"), "optim.bin", step).await?;
            }
        }
        // In virtual time, as everything of the file system here.
        File::open(&self.dir)?.set_modified(UNIX_EPOCH + Duration::from_millis(spotq_host::now().0))
    }

    async fn write(&self, path: &Path, part: &str, step: u64) -> io::Result<()> {
        self.me.writes.store(true, Ordering::Relaxed);
        let bytes = self.content(part, step);
        let mut file = File::create(path)?;
        let (head, tail) = bytes.split_at(bytes.len() / 2);
        let pieces = if self.plan.style == Style::InPlace { 2 } else { 1 };
        let pause = (Duration::from_millis(self.plan.save_ms) / 2 / pieces).min(PIECE);
        for half in [head, tail] {
            file.write_all(half)?;
            file.set_modified(UNIX_EPOCH + Duration::from_millis(spotq_host::now().0))?;
            tokio::time::sleep(pause).await;
        }
        self.me.writes.store(false, Ordering::Relaxed);
        Ok(())
    }

    fn remove_old(&self, newest: u64) -> io::Result<()> {
        let mut steps: Vec<u64> = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            let step =
                name.strip_prefix("step-").and_then(|rest| rest.strip_suffix(".ckpt")?.parse::<u64>().ok());
            steps.extend(step.filter(|step| *step <= newest));
        }
        steps.sort_unstable();
        for old in steps.iter().rev().skip(KEEP) {
            fs::remove_file(self.dir.join(named(*old)))?;
        }
        Ok(())
    }

    /// The bytes of one file of a checkpoint.
    fn content(&self, part: &str, step: u64) -> Vec<u8> {
        let head = format!("{} {part} of {}: ", step, self.plan.client_key);
        let filling = (0..PADDING as u64).map(|n| b'a' + ((n * 7 + step * 13) % 26) as u8);
        head.into_bytes().into_iter().chain(filling).collect()
    }

    fn over(&self) {
        let inner = &mut *self.world.lock();
        let gone = (self.job, self.generation);
        inner.cloud.insts[self.inst].commands.retain(|running| *running != gone);
    }
}

fn named(step: u64) -> String {
    format!("step-{step}.ckpt")
}

fn part_of(name: &str) -> &str {
    if name == "model.bin" || name == "optim.bin" { name } else { "whole" }
}

fn step_of(bytes: &[u8]) -> Option<u64> {
    let digits: String = bytes.iter().map(|b| char::from(*b)).take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

impl Processes for Running {
    fn members(&self) -> BTreeSet<u32> {
        self.alive.load(Ordering::Relaxed).then_some(self.pid).into_iter().collect()
    }

    fn ranks(&self, _: Signal) -> BTreeSet<u32> {
        self.members()
    }

    fn launcher(&self) -> Option<u32> {
        Some(self.pid)
    }

    fn signal(&self, pids: BTreeSet<u32>, signal: Signal) {
        if !pids.contains(&self.pid) || !self.alive.load(Ordering::Relaxed) {
            return;
        }
        let fatal = match signal {
            Signal::KILL => Some(9),
            Signal::TERM if self.dies_of_term => Some(15),
            _ => None,
        };
        if let Some(fatal) = fatal {
            self.world.lock().count(if fatal == 9 { Count::Killed } else { Count::TermObeyed });
            *self.fatal.lock().unwrap_or_else(PoisonError::into_inner) = Some(fatal);
            self.killed.notify_one();
        } else {
            self.signals.lock().unwrap_or_else(PoisonError::into_inner).push_back(signal);
            self.signalled.notify_one();
        }
    }

    fn has_writer(&self, _: &Path) -> bool {
        self.alive.load(Ordering::Relaxed) && self.writes.load(Ordering::Relaxed)
    }

    fn kill(&self) -> BoxFuture<'static, Option<String>> {
        self.signal(self.members(), Signal::KILL);
        // The kernel takes a moment.
        tokio::time::sleep(Duration::from_millis(10)).map(|()| None).boxed()
    }

    fn is_over(&self) {}
}

impl Processes for Nobody {
    fn members(&self) -> BTreeSet<u32> {
        BTreeSet::new()
    }

    fn ranks(&self, _: Signal) -> BTreeSet<u32> {
        BTreeSet::new()
    }

    fn launcher(&self) -> Option<u32> {
        None
    }

    fn signal(&self, _: BTreeSet<u32>, _: Signal) {}

    fn has_writer(&self, _: &Path) -> bool {
        false
    }

    fn kill(&self) -> BoxFuture<'static, Option<String>> {
        async { None }.boxed()
    }

    fn is_over(&self) {}
}
