//! Rounds of kill -9 on a scheduler that always has jobs, and the summary of what came of it.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use spotq_testkit::{processes, wait_for};

use crate::plan::{self, Round, Victim};
use crate::system::{Spotq, System};
use crate::verify::{self, Books};
use crate::victims;

/// How often the submitter looks whether enough jobs are under way.
const SUBMIT_EVERY: Duration = Duration::from_millis(100);
/// With jobs in the queue, something must run again within this: a boot, a market without capacity for a few windows,
/// and the back-off after several losses in a row.
const IDLE_MAX: Duration = Duration::from_secs(60);
/// Progress is said after so many rounds.
const SAY_EVERY: usize = 20;

/// What to do.
#[derive(Debug, Clone)]
pub struct Kills {
    pub rounds: u32,
    pub seed: u64,
    /// The first round of the seed that is done.
    pub from: u32,
    /// Jobs under way at any time.
    pub jobs: u32,
    /// Directory of the programs.
    pub programs: PathBuf,
    /// Made, filled and kept; a temporary directory, kept after a violation only, if absent.
    pub keep: Option<PathBuf>,
    /// How long the jobs may take to be done after the last kill.
    pub calm: Duration,
}

/// What came of it.
#[derive(Debug, Clone, Default)]
pub struct Summary {
    pub kills: BTreeMap<&'static str, u32>,
    /// Starts of the scheduler beyond the first.
    pub restarts: u32,
    pub acknowledged: usize,
    pub books: Books,
    pub violations: Vec<String>,
    pub took: Duration,
    /// The command that does it again.
    pub replay: String,
    /// Where everything lies, if it was kept.
    pub kept: Option<PathBuf>,
}

/// Runs the rounds, waits for the jobs and checks everything.
///
/// # Errors
/// When the run itself is not possible: a program is missing, a directory cannot be made. What is wrong with the product
/// is in [`Summary::violations`].
pub fn run(kills: &Kills) -> anyhow::Result<Summary> {
    let started = Instant::now();
    let root = make_root(kills)?;
    let mut summary = Summary { replay: replay(kills), ..Summary::default() };
    match chaos(kills, &root, &mut summary) {
        Ok(()) => {}
        Err(error) => summary.violations.push(format!("the run could not go on: {error:#}")),
    }
    summary.took = started.elapsed();
    if summary.violations.is_empty() && kills.keep.is_none() {
        std::fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))?;
    } else {
        summary.kept = Some(root);
    }
    Ok(summary)
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kills: Vec<String> =
            self.kills.iter().map(|(victim, count)| format!("{count} {victim}")).collect();
        writeln!(f, "kills        {}", kills.join(", "))?;
        writeln!(f, "restarts     {} of the scheduler", self.restarts)?;
        writeln!(f, "jobs         {} acknowledged, {} in the books", self.acknowledged, self.books.jobs)?;
        writeln!(f, "attempts     {}", self.books.attempts)?;
        for (end, count) in &self.books.ends {
            writeln!(f, "  {end:<24} {count}")?;
        }
        writeln!(
            f,
            "nodes        {}, {} segments, {} compared with the cloud",
            self.books.nodes, self.books.segments, self.books.bills_compared
        )?;
        writeln!(f, "billed       ${}, wasted ${}", self.books.billed, self.books.wasted)?;
        writeln!(f, "took         {:.0} s", self.took.as_secs_f64())?;
        writeln!(f, "violations   {}", self.violations.len())?;
        for violation in &self.violations {
            writeln!(f, "  {violation}")?;
        }
        if !self.violations.is_empty() {
            writeln!(f, "run again    {}", self.replay)?;
        }
        match &self.kept {
            Some(dir) => writeln!(f, "kept in      {}", dir.display()),
            None => Ok(()),
        }
    }
}

fn chaos(kills: &Kills, root: &Path, summary: &mut Summary) -> anyhow::Result<()> {
    let undisturbed = verify::undisturbed_model(root, &kills.programs)?;
    let mut system = System::start(root, &kills.programs, kills.seed)?;
    let submitter = Submitter::start(system.spotq(), kills);
    let plan = plan::rounds(kills.seed).skip(kills.from as usize).take(kills.rounds as usize);
    for (index, round) in plan.enumerate() {
        if let Err(error) = one_round(&mut system, round, summary) {
            summary.violations.push(format!("round {}: {error:#}", kills.from as usize + index));
            break;
        }
        if (index + 1) % SAY_EVERY == 0 {
            say(&format!("{} of {} kills", index + 1, kills.rounds));
        }
    }
    let acknowledged = submitter.stop();
    summary.acknowledged = acknowledged.len();
    say(&format!("{} jobs were acknowledged; waiting until all are done", acknowledged.len()));
    let found = verify::verify(&mut system, &acknowledged, &undisturbed, kills.calm);
    summary.violations.extend(found.violations);
    summary.books = found.books;
    Ok(())
}

fn one_round(system: &mut System, round: Round, summary: &mut Summary) -> anyhow::Result<()> {
    wait_for(IDLE_MAX, || something_runs(system), "anything to run, with jobs in the queue")
        .with_context(|| explain(&system.spotq()))?;
    let victim = match round.victim {
        Victim::Scheduler => {
            pause(round.moment);
            system.kill();
            if let Some(life) = round.again {
                pause(round.away);
                system.start_and_kill(life)?;
                summary.restarts += 1;
            }
            pause(round.away);
            system.restart()?;
            summary.restarts += 1;
            Victim::Scheduler
        }
        Victim::Worker => kill_one(round, || victims::workers(system.root()))?,
        Victim::Trainer => kill_one(round, || victims::trainers(system.root()))?,
    };
    *summary.kills.entry(victim.name()).or_default() += 1;
    Ok(())
}

/// Kills one of those that are there at the moment, or the first that comes after it.
fn kill_one(round: Round, find: impl Fn() -> Vec<processes::Process>) -> anyhow::Result<Victim> {
    pause(round.moment);
    let what = format!("a {} to kill", round.victim.name());
    let killed = || {
        let found = find();
        let index = usize::try_from(round.which % (found.len().max(1) as u64)).ok()?;
        // It may have ended since it was found; then the next one is taken.
        processes::signal(found.get(index)?.pid, rustix::process::Signal::KILL).ok()
    };
    wait_for(IDLE_MAX, killed, what)?;
    Ok(round.victim)
}

/// What the scheduler says about the jobs that do not run.
fn explain(spotq: &Spotq) -> String {
    match spotq.queue(&[]) {
        Ok(Some(jobs)) => {
            jobs.iter().map(|job| format!("job {}: {}", job.job_id, spotq.explain(job.job_id))).collect()
        }
        Ok(None) => "the scheduler does not answer".into(),
        Err(error) => format!("{error:#}"),
    }
}

fn something_runs(system: &System) -> Option<()> {
    (!victims::on_nodes(system.root()).is_empty()).then_some(())
}

/// Keeps so many jobs under way, and remembers which were acknowledged.
struct Submitter {
    stop: mpsc::Sender<()>,
    thread: std::thread::JoinHandle<BTreeMap<String, u32>>,
}

impl Submitter {
    fn start(spotq: Spotq, kills: &Kills) -> Submitter {
        let (stop, stopped) = mpsc::channel();
        let (seed, jobs) = (kills.seed, kills.jobs as usize);
        let thread = std::thread::spawn(move || {
            let mut acknowledged = BTreeMap::new();
            // The pause is the wait for the end.
            while stopped.recv_timeout(SUBMIT_EVERY) == Err(mpsc::RecvTimeoutError::Timeout) {
                // No answer: the scheduler is away just now.
                let Ok(Some(open)) = spotq.queue(&[]) else { continue };
                if open.len() < jobs {
                    // Until it is acknowledged, the same key again: that must be the same job.
                    let key = format!("chaos-{seed}-{}", acknowledged.len());
                    if let Ok(Some(job)) = spotq.submit(&key) {
                        acknowledged.insert(key, job);
                    }
                }
            }
            acknowledged
        });
        Submitter { stop, thread }
    }

    /// The acknowledged jobs by key.
    fn stop(self) -> BTreeMap<String, u32> {
        // The thread may have ended by a panic, which is told by its join.
        let _ = self.stop.send(());
        self.thread.join().expect("the submitter has nothing to panic about")
    }
}

fn make_root(kills: &Kills) -> anyhow::Result<PathBuf> {
    let root = match &kills.keep {
        Some(dir) => dir.clone(),
        None => std::env::temp_dir().join(format!("spotq-chaos-{}-{}", kills.seed, std::process::id())),
    };
    std::fs::create_dir(&root).with_context(|| format!("cannot make the directory {}", root.display()))?;
    root.canonicalize().with_context(|| format!("cannot find {}", root.display()))
}

fn replay(kills: &Kills) -> String {
    let from = if kills.from > 0 { format!(" --from {}", kills.from) } else { String::new() };
    format!(
        "cargo run --release -p spotq-chaos -- kills --rounds {} --seed {}{from} --jobs {}",
        kills.rounds, kills.seed, kills.jobs
    )
}

#[expect(clippy::disallowed_methods, reason = "the moment of a fault is drawn, not waited for")]
fn pause(time: Duration) {
    std::thread::sleep(time);
}

#[expect(clippy::print_stderr, reason = "a run takes minutes; whoever waits wants to see it move")]
fn say(text: &str) {
    eprintln!("chaos: {text}");
}
