//! The seeds that once found something.

#![expect(clippy::unwrap_used, reason = "a seed file that cannot be read fails the test")]

use std::path::{Path, PathBuf};

use spotq_chaos::cli::{Command, read_seed_file};

/// What each file in `regressions/` runs, in order of their names.
pub fn regressions() -> Vec<(PathBuf, Command)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("regressions");
    let mut seeds: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    seeds.retain(|path| path.extension().is_some_and(|extension| extension == "seed"));
    seeds.sort();
    assert!(!seeds.is_empty(), "the seeds were moved; this test must go with them");
    seeds.into_iter().map(|path| (path.clone(), read_seed_file(&path).unwrap())).collect()
}
