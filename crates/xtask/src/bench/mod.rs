//! `xtask bench`: the speed of the product beside what this machine could do at best, measured in the same run.
//!
//! It prints ratios and never passes or fails: a figure of a busy machine is no fault of the code.

mod footprint;
mod local;
mod submits;
mod trust;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, ensure};
use clap::{Args, ValueEnum};
use serde::Serialize;

#[derive(Debug, Args)]
pub struct BenchArgs {
    /// What to measure [default: all]
    #[arg(value_enum)]
    what: Vec<What>,
    /// For people or for programs
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
    /// Measure the programs in this directory [default: built anew, beside this one]
    #[arg(long, value_name = "DIR")]
    programs: Option<PathBuf>,
    /// Be the trainer of a measurement, and write moments to this file
    #[arg(long, hide = true, value_name = "FILE")]
    as_trainer: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    /// Durable submits, in the process and over gRPC
    Submits,
    /// Notice to signal, and loss of a node to its replacement
    Preemption,
    /// What TLS costs a submit, and how long a worker takes to join
    Trust,
    /// CPU time and memory of what idles, and the start of the command line
    Footprint,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum Output {
    #[default]
    Table,
    Json,
}

/// One measured figure.
#[derive(Debug, Clone, Serialize)]
struct Figure {
    name: String,
    value: f64,
    unit: &'static str,
    /// What is wanted, in words; empty for a figure that is only told.
    wanted: String,
    /// Whether it is as wanted; absent if nothing is.
    good: Option<bool>,
    /// What it was computed from.
    from: String,
}

/// Which way a figure is better.
#[derive(Debug, Clone, Copy)]
enum Wanted {
    AtLeast(f64),
    AtMost(f64),
    Nothing,
}

impl Figure {
    fn new(
        name: impl Into<String>,
        value: f64,
        unit: &'static str,
        wanted: Wanted,
        from: impl Into<String>,
    ) -> Figure {
        let (words, good) = match wanted {
            Wanted::AtLeast(limit) => (format!("at least {limit}"), Some(value >= limit)),
            Wanted::AtMost(limit) => (format!("at most {limit}"), Some(value <= limit)),
            Wanted::Nothing => (String::new(), None),
        };
        Figure { name: name.into(), value, unit, wanted: words, good, from: from.into() }
    }
}

pub fn run(root: &Path, args: &BenchArgs) -> anyhow::Result<ExitCode> {
    if let Some(file) = &args.as_trainer {
        return local::trainer(file);
    }
    let all = [What::Submits, What::Trust, What::Preemption, What::Footprint];
    let what = if args.what.is_empty() { &all[..] } else { &args.what };
    // On the disk of the repository: a temporary directory may be memory, which has no fdatasync to speak of.
    let dir = root.join("target").join(format!("bench-{}", std::process::id()));
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let mut figures = Vec::new();
    for what in what {
        figures.extend(match what {
            What::Submits => submits::measure(&dir)?,
            What::Trust => trust::measure(&dir)?,
            What::Preemption => local::measure(&dir, &programs(root, args)?)?,
            What::Footprint => footprint::measure(&dir, &programs(root, args)?)?,
        });
    }
    std::fs::remove_dir_all(&dir).with_context(|| format!("cannot remove {}", dir.display()))?;
    print(&figures, args.output)?;
    Ok(ExitCode::SUCCESS)
}

fn print(figures: &[Figure], output: Output) -> anyhow::Result<()> {
    if output == Output::Json {
        println!("{}", serde_json::to_string_pretty(figures)?);
        return Ok(());
    }
    for figure in figures {
        let verdict = match figure.good {
            Some(true) => format!("{} — yes", figure.wanted),
            Some(false) => format!("{} — NO", figure.wanted),
            None => String::new(),
        };
        println!(
            "{:<52} {:>10.2} {:<7} {verdict:<24} {}",
            figure.name, figure.value, figure.unit, figure.from
        );
    }
    Ok(())
}

/// The directory of the product's release programs, which are built first.
fn programs(root: &Path, args: &BenchArgs) -> anyhow::Result<PathBuf> {
    if let Some(dir) = &args.programs {
        return dir.canonicalize().with_context(|| format!("cannot find {}", dir.display()));
    }
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    build.current_dir(root).args([
        "build",
        "--quiet",
        "--release",
        "-p",
        "spotq-cli",
        "-p",
        "spotq-scheduler",
    ]);
    let status = build.status().context("cannot run cargo")?;
    ensure!(status.success(), "the programs to measure could not be built");
    let own = std::env::current_exe().context("cannot find this program")?;
    let dir = own.parent().context("this program lies in no directory")?.to_path_buf();
    ensure!(dir.ends_with("release"), "a debug build measures nothing; add --release");
    Ok(dir)
}

/// The middle one; the mean of the two in the middle.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        odd if odd % 2 == 1 => values[half],
        _ => f64::midpoint(values[half - 1], values[half]),
    }
}

/// What is going on, for who waits; not part of the result.
#[expect(clippy::print_stderr, reason = "a bench takes minutes; whoever waits wants to see it move")]
fn say(text: &str) {
    eprintln!("bench: {text}");
}
