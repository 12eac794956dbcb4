//! Many seeds of the simulation, on all cores, and what they exercised. A failing seed is run once more for its last
//! events, and comes with the one command that replays it.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use indicatif::ProgressBar;
use rustix::time::{ClockId, clock_gettime};
use spotq_sim::{Counts, Options, Run, TraceLevel};

use crate::cli::SimArgs;

/// After so many failing seeds no more are looked for: one is enough to work on.
const FAILURES_MAX: usize = 5;

/// What many seeds gave.
#[derive(Debug, Default)]
pub struct Summary {
    pub seeds: u64,
    pub jobs: u32,
    /// Processor time of all threads.
    pub cpu: Duration,
    pub virtual_ms: u64,
    pub counts: Counts,
    pub failures: Vec<Run>,
    /// The whole trace of the only seed, if it was asked for.
    pub trace: Vec<String>,
    /// Of all runs, whatever their order: the same for the same seeds.
    pub hash: u64,
}

/// Runs the seeds.
#[must_use]
pub fn run(args: &SimArgs) -> Summary {
    let (from, seeds) = args.seed.map_or((args.from, args.seeds), |seed| (seed, 1));
    let level = if args.verbose { TraceLevel::Whole } else { TraceLevel::Hash };
    let options = Options { jobs: args.jobs, trace: level };
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let threads = args.threads.unwrap_or_else(cores).clamp(1, 256);
    let next = AtomicU64::new(0);
    let total = Mutex::new(Summary { jobs: args.jobs, ..Summary::default() });
    let bar = if seeds > 1 { ProgressBar::new(seeds) } else { ProgressBar::hidden() };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut mine = Summary::default();
                loop {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    if n >= seeds {
                        break;
                    }
                    if mine.add(spotq_sim::run(from + n, &options), &options) && mine.is_enough() {
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

impl Summary {
    /// Takes a run over; says whether it failed.
    fn add(&mut self, run: Run, options: &Options) -> bool {
        self.seeds += 1;
        self.virtual_ms += run.virtual_ms;
        self.counts.merge(&run.counts);
        self.hash ^= run.hash;
        if options.trace == TraceLevel::Whole {
            self.trace = run.trace;
        }
        if run.violation.is_none() {
            return false;
        }
        let again = Options { trace: TraceLevel::Last, ..*options };
        self.failures.push(spotq_sim::run(run.seed, &again));
        true
    }

    fn is_enough(&self) -> bool {
        self.failures.len() >= FAILURES_MAX
    }

    fn merge(&mut self, other: Summary) {
        self.seeds += other.seeds;
        self.cpu += other.cpu;
        self.virtual_ms += other.virtual_ms;
        self.counts.merge(&other.counts);
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
        let jobs = if self.jobs == 50 { String::new() } else { format!(" --jobs {}", self.jobs) };
        format!("cargo run --release -p spotq-chaos -- sim --seed {seed}{jobs} -v")
    }

    /// The summary as one JSON object.
    #[must_use]
    pub fn to_json(&self) -> String {
        let counts: serde_json::Map<String, serde_json::Value> =
            self.counts.iter().map(|(name, n)| (name.to_owned(), n.into())).collect();
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
            "{} seeds of {} jobs, {:.0} hours of virtual time, {:.1} s of processor time: {:.0} seeds per second-core (hash {:016x})",
            self.seeds,
            self.jobs,
            self.virtual_ms as f64 / 3_600_000.0,
            self.cpu.as_secs_f64(),
            self.seeds_per_second_core(),
            self.hash,
        )?;
        for (name, n) in self.counts.iter() {
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
