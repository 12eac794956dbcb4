//! The command line, which is also the format of `regressions/*.seed`: one line of arguments. Only describes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::{Parser, Subcommand};

use crate::Kills;

#[derive(Debug, Clone, Parser)]
#[command(name = "spotq-chaos", about = "Seeded faults against the whole product", version)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// kill -9 of the scheduler, of workers and of trainers at random moments, in a market that preempts
    Kills(KillsArgs),
    /// the shipped core in a simulated world of faults: virtual time, thousands of seeds
    Sim(SimArgs),
    /// the real engine and the real worker over real gRPC in a simulated world of faults: virtual time, hundreds of seeds
    EngineSim(SimArgs),
    /// deliberate bugs, one at a time: the simulations must find each of them
    Mutations(MutationsArgs),
}

#[derive(Debug, Clone, clap::Args)]
pub struct MutationsArgs {
    /// Only those whose names contain this
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,
    /// Seeds within which a bug must be found [default: 2000 of the core simulation, 500 of the engine simulation]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub seeds: Option<u64>,
    /// The workspace whose sources are copied [default: the one that this program was built in]
    #[arg(long, value_name = "DIR")]
    pub root: Option<PathBuf>,
}

#[derive(Debug, Clone, clap::Args)]
pub struct SimArgs {
    /// How many seeds [default: 10000 of `sim`, 500 of `engine-sim`]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub seeds: Option<u64>,
    /// The first seed
    #[arg(long, default_value_t = 0, value_name = "SEED")]
    pub from: u64,
    /// This seed alone
    #[arg(long, conflicts_with_all = ["seeds", "from"])]
    pub seed: Option<u64>,
    /// Jobs that are submitted in each run [default: 50 of `sim`, 8 of `engine-sim`]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub jobs: Option<u32>,
    /// Threads that make runs [default: as many as there are cores]
    #[arg(long)]
    pub threads: Option<usize>,
    /// Print everything that happens; for one seed
    #[arg(short, long, requires = "seed")]
    pub verbose: bool,
    /// How to print the summary
    #[arg(short, long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Output {
    #[default]
    Table,
    Json,
}

#[derive(Debug, Clone, clap::Args)]
pub struct KillsArgs {
    /// How many kills
    #[arg(long, default_value_t = 200)]
    pub rounds: u32,
    /// Fixes every draw and the market
    #[arg(long)]
    pub seed: u64,
    /// Begin with this round of the seed
    #[arg(long, default_value_t = 0, value_name = "ROUND")]
    pub from: u32,
    /// Jobs under way at any time
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub jobs: u32,
    /// Where `spotq`, `spotqd` and `spotq-train` lie [default: beside this program]
    #[arg(long, value_name = "DIR")]
    pub programs: Option<PathBuf>,
    /// Keep everything in this directory, which must not exist [default: kept only after a violation]
    #[arg(long, value_name = "DIR")]
    pub keep: Option<PathBuf>,
}

/// How long the jobs may take to be done after the last kill. Two cores train three of them in seconds; the rest is
/// for back-offs and for other work on the machine.
const CALM: Duration = Duration::from_secs(240);

impl KillsArgs {
    /// What to run.
    ///
    /// # Errors
    /// When this program's own place cannot be found.
    pub fn to_kills(&self) -> anyhow::Result<Kills> {
        let programs = match &self.programs {
            Some(dir) => dir.clone(),
            None => {
                let own = std::env::current_exe().context("cannot find this program; name --programs DIR")?;
                own.parent().context("this program lies in no directory")?.to_path_buf()
            }
        };
        Ok(Kills {
            rounds: self.rounds,
            seed: self.seed,
            from: self.from,
            jobs: self.jobs,
            programs,
            keep: self.keep.clone(),
            calm: CALM,
        })
    }
}

/// The arguments in a `.seed` file: its one line that is neither empty nor a comment (`#`).
///
/// # Errors
/// When the file cannot be read, or holds anything but one line of arguments.
pub fn read_seed_file(path: &Path) -> anyhow::Result<Command> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let lines: Vec<&str> =
        text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    let [line] = lines.as_slice() else {
        bail!("{}: expected one line of arguments, found {}", path.display(), lines.len());
    };
    let cli = Cli::try_parse_from(std::iter::once("spotq-chaos").chain(line.split_whitespace()));
    Ok(cli.with_context(|| format!("{}: `{line}`", path.display()))?.command)
}
