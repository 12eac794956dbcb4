//! Checks of the project on itself: `cargo run -p xtask -- tidy` and `check-deps`, and with the feature `bench` its speed.
//!
//! It reads the repository and prints what it found; it never changes a file.

#![expect(clippy::print_stdout, reason = "a command-line tool: what it found is its output")]

#[cfg(feature = "bench")]
mod bench;
mod check_deps;
mod tidy;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

// The same as `spotqd` has.
#[cfg(feature = "bench")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// One thing that breaks a rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Violation {
    /// A path in the repository, or a crate.
    place: String,
    /// Line of the file; 0 when the whole of it is meant.
    line: usize,
    rule: &'static str,
    /// What is wrong, and after a semicolon what to do.
    message: String,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.place)?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        write!(f, ": [{}] {}", self.rule, self.message)
    }
}

#[derive(Parser)]
#[command(about = "Checks of the project on itself")]
struct Args {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Sizes, headers, forbidden words and calls, manifests
    Tidy,
    /// The order of the crates, and what the pure ones and the CLI may pull in
    CheckDeps,
    /// Speed, as ratios to what the machine could do at best
    #[cfg(feature = "bench")]
    Bench(bench::BenchArgs),
}

fn main() -> anyhow::Result<ExitCode> {
    let root = root();
    let (task, mut violations) = match Args::parse().task {
        Task::Tidy => ("tidy", tidy::run(&root)?),
        Task::CheckDeps => ("check-deps", check_deps::run(&root)?),
        #[cfg(feature = "bench")]
        Task::Bench(args) => return bench::run(&root, &args),
    };
    violations.sort();
    for violation in &violations {
        println!("{violation}");
    }
    if violations.is_empty() {
        println!("{task}: nothing to complain of");
        return Ok(ExitCode::SUCCESS);
    }
    println!("{task}: {} violations", violations.len());
    Ok(ExitCode::FAILURE)
}

/// The repository, two levels above this crate; cargo says where that is, so that a moved build still finds it.
fn root() -> PathBuf {
    let crate_dir =
        std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let crate_dir = Path::new(&crate_dir);
    crate_dir.ancestors().nth(2).unwrap_or(crate_dir).to_path_buf()
}
