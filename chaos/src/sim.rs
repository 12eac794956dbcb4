//! Many seeds of a simulation, on all cores, and what they exercised. A failing seed is run once more for its last
//! events, and comes with the one command that replays it.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use indicatif::ProgressBar;
use rustix::time::{ClockId, clock_gettime};
use spotq_sim::{TraceLevel, Violation};

use crate::cli::SimArgs;

/// After so many failing seeds no more are looked for: one is enough to work on.
const FAILURES_MAX: usize = 5;

/// Which of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Simulation {
    /// The shipped core.
    Core,
    /// The real engine and the real worker.
    Engine,
}

/// What a run did.
#[derive(Debug, Clone)]
pub struct Run {
    pub seed: u64,
    /// The first one; the run ends with it.
    pub violation: Option<Violation>,
    pub counts: Vec<(&'static str, u64)>,
    pub virtual_ms: u64,
    pub hash: u64,
    pub trace: Vec<String>,
}

/// What many seeds gave.
#[derive(Debug)]
pub struct Summary {
    pub simulation: Simulation,
    pub seeds: u64,
    pub jobs: u32,
    /// Processor time of all threads.
    pub cpu: Duration,
    pub virtual_ms: u64,
    pub counts: Vec<(&'static str, u64)>,
    pub failures: Vec<Run>,
    /// The whole trace of the only seed, if it was asked for.
    pub trace: Vec<String>,
    /// Of all runs, whatever their order: the same for the same seeds.
    pub hash: u64,
}

/// Runs the seeds.
#[must_use]
pub fn run(simulation: Simulation, args: &SimArgs) -> Summary {
    let seeds = args.seeds.unwrap_or(simulation.usual_seeds());
    let (from, seeds) = args.seed.map_or((args.from, seeds), |seed| (seed, 1));
    let level = if args.verbose { TraceLevel::Whole } else { TraceLevel::Hash };
    let jobs = args.jobs.unwrap_or(simulation.usual_jobs());
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let threads = args.threads.unwrap_or_else(cores).clamp(1, 256);
    let next = AtomicU64::new(0);
    let total = Mutex::new(Summary::new(simulation, jobs));
    let bar = if seeds > 1 { ProgressBar::new(seeds) } else { ProgressBar::hidden() };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut mine = Summary::new(simulation, jobs);
                loop {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    if n >= seeds {
                        break;
                    }
                    if mine.add(simulation.run(from + n, jobs, level), level) && mine.is_enough() {
                        next.store(seeds, Ordering::Relaxed);
                    }
                    bar.inc(1);
                }
                mine.cpu = thread_cpu();
                total.lock().expect("no thread panics with the lock held").merge(mine);
            });
        }
    });
    bar.finish_and_clear();
    let mut total = total.into_inner().expect("no thread panics with the lock held");
    total.failures.sort_by_key(|run| run.seed);
    total
}

impl Simulation {
    /// Makes one run.
    #[must_use]
    pub fn run(self, seed: u64, jobs: u32, trace: TraceLevel) -> Run {
        match self {
            Simulation::Core => {
                let run = spotq_sim::run(seed, &spotq_sim::Options { jobs, trace });
                let counts = run.counts.iter().collect();
                let spotq_sim::Run { violation, virtual_ms, hash, trace, .. } = run;
                Run { seed, violation, counts, virtual_ms, hash, trace }
            }
            Simulation::Engine => {
                let run = spotq_sim_engine::run(seed, &spotq_sim_engine::Options { jobs, trace });
                let counts = run.counts.iter().collect();
                let spotq_sim_engine::Run { violation, virtual_ms, hash, trace, .. } = run;
                Run { seed, violation, counts, virtual_ms, hash, trace }
            }
        }
    }

    fn command(self) -> &'static str {
        match self {
            Simulation::Core => "sim",
            Simulation::Engine => "engine-sim",
        }
    }

    fn usual_seeds(self) -> u64 {
        match self {
            Simulation::Core => 10_000,
            Simulation::Engine => 500,
        }
    }

    fn usual_jobs(self) -> u32 {
        match self {
            Simulation::Core => spotq_sim::Options::default().jobs,
            Simulation::Engine => spotq_sim_engine::Options::default().jobs,
        }
    }
}

impl Summary {
    fn new(simulation: Simulation, jobs: u32) -> Summary {
        Summary {
            simulation,
            seeds: 0,
            jobs,
            cpu: Duration::ZERO,
            virtual_ms: 0,
            counts: Vec::new(),
            failures: Vec::new(),
            trace: Vec::new(),
            hash: 0,
        }
    }

    /// How often something happened, by its name.
    #[must_use]
    pub fn count(&self, name: &str) -> u64 {
        self.counts.iter().find(|(known, _)| *known == name).map_or(0, |(_, n)| *n)
    }

    fn count_all(&mut self, more: &[(&'static str, u64)]) {
        if self.counts.is_empty() {
            self.counts = more.to_vec();
        } else {
            self.counts.iter_mut().zip(more).for_each(|(mine, (_, n))| mine.1 += n);
        }
    }

    /// Takes a run over; says whether it failed.
    fn add(&mut self, run: Run, level: TraceLevel) -> bool {
        self.seeds += 1;
        self.virtual_ms += run.virtual_ms;
        self.count_all(&run.counts);
        self.hash ^= run.hash;
        if run.violation.is_none() {
            if level == TraceLevel::Whole {
                self.trace = run.trace;
            }
            return false;
        }
        // The whole trace of a run that fails is its own account of it.
        let told = if level == TraceLevel::Whole {
            run
        } else {
            self.simulation.run(run.seed, self.jobs, TraceLevel::Last)
        };
        self.failures.push(told);
        true
    }

    fn is_enough(&self) -> bool {
        self.failures.len() >= FAILURES_MAX
    }

    fn merge(&mut self, other: Summary) {
        self.seeds += other.seeds;
        self.cpu += other.cpu;
        self.virtual_ms += other.virtual_ms;
        self.count_all(&other.counts);
        self.failures.extend(other.failures);
        self.trace.extend(other.trace);
        self.hash ^= other.hash;
    }

    /// Seeds in a second of one core.
    #[must_use]
    pub fn seeds_per_second_core(&self) -> f64 {
        self.seeds as f64 / self.cpu.as_secs_f64().max(1e-9)
    }

    /// The command that makes a run again.
    #[must_use]
    pub fn replay(&self, seed: u64) -> String {
        let usual = self.jobs == self.simulation.usual_jobs();
        let jobs = if usual { String::new() } else { format!(" --jobs {}", self.jobs) };
        format!("cargo run --release -p spotq-chaos -- {} --seed {seed}{jobs} -v", self.simulation.command())
    }

    /// The summary as one JSON object.
    #[must_use]
    pub fn to_json(&self) -> String {
        let counts: serde_json::Map<String, serde_json::Value> =
            self.counts.iter().map(|(name, n)| ((*name).to_owned(), (*n).into())).collect();
        let failures: Vec<serde_json::Value> = self
            .failures
            .iter()
            .filter_map(|run| {
                let broken = run.violation.as_ref()?;
                Some(serde_json::json!({
                    "seed": run.seed,
                    "invariant": broken.id,
                    "text": broken.text,
                    "last_events": run.trace,
                    "replay": self.replay(run.seed),
                }))
            })
            .collect();
        serde_json::json!({
            "seeds": self.seeds,
            "jobs": self.jobs,
            "seeds_per_second_core": self.seeds_per_second_core(),
            "virtual_hours": self.virtual_ms as f64 / 3_600_000.0,
            "hash": format!("{:016x}", self.hash),
            "counts": counts,
            "failures": failures,
        })
        .to_string()
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.trace.iter().try_for_each(|line| writeln!(f, "{line}"))?;
        writeln!(
            f,
            "{} seeds of {} jobs, {:.1} hours of virtual time, {:.1} s of processor time: {:.1} seeds per second-core (hash {:016x})",
            self.seeds,
            self.jobs,
            self.virtual_ms as f64 / 3_600_000.0,
            self.cpu.as_secs_f64(),
            self.seeds_per_second_core(),
            self.hash,
        )?;
        for (name, n) in &self.counts {
            writeln!(f, "{n:>12}  {name}")?;
        }
        for run in &self.failures {
            let Some(broken) = &run.violation else { continue };
            run.trace.iter().try_for_each(|line| writeln!(f, "    {line}"))?;
            writeln!(f, "seed {} breaks {}: {}", run.seed, broken.id, broken.text)?;
            writeln!(f, "replay: {}", self.replay(run.seed))?;
        }
        match self.failures.as_slice() {
            [] => writeln!(f, "no invariant is broken"),
            some => writeln!(f, "{} seeds break an invariant", some.len()),
        }
    }
}

fn thread_cpu() -> Duration {
    let spent = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(spent.tv_sec.unsigned_abs(), u32::try_from(spent.tv_nsec).unwrap_or(0))
}
