//! Proof that the simulations find bugs: each patch in `chaos/mutations` is one deliberate bug. It is applied to a copy of
//! the sources, a simulation is built from the copy, and must break an invariant within so many seeds. Those of the
//! engine and the worker, which the core simulation cannot see, have names that begin with `engine-`.
//!
//! Never touches the sources themselves: everything happens in `target/mutations`.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};

use crate::cli::MutationsArgs;

/// What the core simulation is made of.
const CORE: [&str; 6] =
    ["crates/model", "crates/host", "crates/policy", "crates/core", "crates/checkpoint", "crates/sim"];
/// And the engine simulation beside that.
const ENGINE: [&str; 7] = [
    "proto",
    "crates/store",
    "crates/provider",
    "crates/finops",
    "crates/engine",
    "worker",
    "crates/sim-engine",
];
/// Begins the names of patches that the engine simulation is to find.
const ENGINE_PREFIX: &str = "engine-";
/// The copy is text written by hand; more than this is a mistake.
const COPY_BYTES_MAX: u64 = 8 << 20;

/// What became of one mutation.
#[derive(Debug, Clone)]
pub struct Verdict {
    pub name: String,
    /// Does it break the invariant that it is named after, and by which seed?
    pub outcome: Outcome,
}

/// See [`Verdict`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// What the simulation said.
    Found(String),
    NotFound,
    DoesNotBuild(String),
}

impl Verdict {
    #[must_use]
    pub fn is_found(&self) -> bool {
        matches!(self.outcome, Outcome::Found(_))
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.outcome {
            Outcome::Found(said) => write!(f, "found      {}: {said}", self.name),
            Outcome::NotFound => write!(f, "NOT FOUND  {}", self.name),
            Outcome::DoesNotBuild(why) => write!(f, "NOT BUILT  {}: {why}", self.name),
        }
    }
}

/// Tries each patch; `tell` hears of each as it is done.
///
/// # Errors
/// When the sources cannot be copied, a patch does not fit them, or the copy fails without any patch.
pub fn run(args: &MutationsArgs, tell: impl Fn(&Verdict)) -> anyhow::Result<Vec<Verdict>> {
    let root = args.root.clone().unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
    let root = root.canonicalize().with_context(|| format!("no workspace at {}", root.display()))?;
    let scratch = root.join("target/mutations");
    let mut patches: Vec<PathBuf> = fs::read_dir(root.join("chaos/mutations"))
        .context("cannot list chaos/mutations")?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "patch"))
        .collect();
    patches.sort();
    patches.retain(|path| args.only.as_ref().is_none_or(|text| name_of(path).contains(text)));
    if patches.is_empty() {
        bail!("no patch in chaos/mutations fits; list them and name a part of one with --only");
    }
    let mut verdicts = Vec::new();
    for path in patches {
        let which = Which::of(&path);
        let copy = scratch.join(which.copy());
        copy_sources(&root, &which.crates(), &copy)?;
        let patch = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        apply(&copy, &patch).with_context(|| format!("{} does not fit", path.display()))?;
        let seeds = args.seeds.unwrap_or(which.usual_seeds());
        let outcome = simulate(which, &copy, &scratch.join("build"), seeds)?;
        verdicts.push(Verdict { name: name_of(&path), outcome });
        verdicts.last().into_iter().for_each(&tell);
    }
    Ok(verdicts)
}

/// Which simulation a patch is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Which {
    Core,
    Engine,
}

impl Which {
    fn of(patch: &Path) -> Which {
        if name_of(patch).starts_with(ENGINE_PREFIX) { Which::Engine } else { Which::Core }
    }

    /// Where its sources are copied to.
    fn copy(self) -> &'static str {
        match self {
            Which::Core => "src",
            Which::Engine => "src-engine",
        }
    }

    fn crates(self) -> Vec<&'static str> {
        match self {
            Which::Core => CORE.to_vec(),
            Which::Engine => [&CORE[..], &ENGINE[..]].concat(),
        }
    }

    fn package(self) -> &'static str {
        match self {
            Which::Core => "spotq-sim",
            Which::Engine => "spotq-sim-engine",
        }
    }

    fn settings(self) -> &'static [&'static str] {
        match self {
            Which::Core => &[],
            Which::Engine => &["profile.release.opt-level=0", "profile.release.package.\"*\".opt-level=3"],
        }
    }

    fn usual_seeds(self) -> u64 {
        match self {
            Which::Core => 2000,
            Which::Engine => 500,
        }
    }
}

fn name_of(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// A workspace of its own with what the simulation needs and nothing else, so that it builds fast. Files that are the
/// same already stay as they are, and so does what was built from them.
fn copy_sources(root: &Path, crates: &[&str], copy: &Path) -> anyhow::Result<()> {
    let mut budget = COPY_BYTES_MAX;
    for path in crates {
        copy_tree(&root.join(path).join("src"), &copy.join(path).join("src"), &mut budget)?;
        // Beside its sources a crate may have examples, a build script and files of a wire format.
        for beside in ["examples", "spotq"] {
            if root.join(path).join(beside).is_dir() {
                copy_tree(&root.join(path).join(beside), &copy.join(path).join(beside), &mut budget)?;
            }
        }
        if root.join(path).join("build.rs").exists() {
            write_if_other(&copy.join(path).join("build.rs"), &read(&root.join(path).join("build.rs"))?)?;
        }
        let manifest = read(&root.join(path).join("Cargo.toml"))?;
        write_if_other(&copy.join(path).join("Cargo.toml"), &without_tests(&manifest))?;
    }
    let manifest = read(&root.join("Cargo.toml"))?;
    let members: Vec<String> = crates.iter().map(|path| format!("\"{path}\"")).collect();
    let lines = manifest.lines().filter(|line| !line.starts_with("default-members"));
    let lines = lines.map(|line| match line.starts_with("members") {
        true => format!("members = [{}]", members.join(", ")),
        false => line.to_owned(),
    });
    write_if_other(&copy.join("Cargo.toml"), &(lines.collect::<Vec<_>>().join("\n") + "\n"))?;
    // Cargo takes out of it what the copy does not have, so that it is never the same again.
    let (lock, whole) = (copy.join("Cargo.lock"), copy.join("Cargo.lock.whole"));
    let known = read(&root.join("Cargo.lock"))?;
    if !fs::read_to_string(&whole).is_ok_and(|before| before == known) {
        write_if_other(&lock, &known)?;
        write_if_other(&whole, &known)?;
    }
    Ok(())
}

/// Tests have dependencies that the simulation does not need.
fn without_tests(manifest: &str) -> String {
    let mut kept = String::new();
    let mut of_tests = false;
    for line in manifest.lines() {
        if line.starts_with('[') {
            of_tests = line.starts_with("[dev-dependencies") || line.starts_with("[[test");
        }
        if !of_tests {
            kept.push_str(line);
            kept.push('\n');
        }
    }
    kept
}

fn copy_tree(from: &Path, to: &Path, budget: &mut u64) -> anyhow::Result<()> {
    fs::create_dir_all(to).with_context(|| format!("cannot make {}", to.display()))?;
    for entry in fs::read_dir(from).with_context(|| format!("cannot list {}", from.display()))? {
        let (path, target) = entry.map(|entry| (entry.path(), to.join(entry.file_name())))?;
        if path.is_dir() {
            copy_tree(&path, &target, budget)?;
        } else if path.extension().is_some_and(|extension| extension == "rs" || extension == "proto") {
            let text = read(&path)?;
            *budget =
                budget.checked_sub(text.len() as u64).context("the sources are larger than they can be")?;
            write_if_other(&target, &text)?;
        }
    }
    Ok(())
}

fn read(path: &Path) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

fn write_if_other(path: &Path, text: &str) -> anyhow::Result<()> {
    if fs::read_to_string(path).is_ok_and(|known| known == text) {
        return Ok(());
    }
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Applies a unified diff. A hunk is found by its lines, not by their numbers, and must fit exactly once.
fn apply(dir: &Path, patch: &str) -> anyhow::Result<()> {
    let mut file: Option<PathBuf> = None;
    let mut hunk: Option<(String, String)> = None;
    for line in patch.lines().chain(["@@ end"]) {
        if let Some(path) = line.strip_prefix("+++ b/") {
            file = Some(dir.join(path));
        } else if line.starts_with("@@") || line.starts_with("--- ") {
            if let Some((old, new)) = hunk.take() {
                let path = file.as_ref().context("a hunk comes before its file")?;
                replace_once(path, &old, &new)?;
            }
            hunk = (line.starts_with("@@") && line != "@@ end").then(Default::default);
        } else if let Some((old, new)) = &mut hunk {
            let (mark, text) = line.split_at_checked(1).unwrap_or((" ", ""));
            if mark != "+" {
                *old += &format!("{text}\n");
            }
            if mark != "-" {
                *new += &format!("{text}\n");
            }
        }
    }
    file.map(drop).context("it names no file")
}

fn replace_once(path: &Path, old: &str, new: &str) -> anyhow::Result<()> {
    let text = read(path)?;
    match text.matches(old).count() {
        1 => write_if_other(path, &text.replacen(old, new, 1)),
        n => bail!(
            "{}: a hunk fits {n} times; make the patch again from the sources as they are",
            path.display()
        ),
    }
}

/// Builds the copy and runs its seeds.
fn simulate(which: Which, copy: &Path, build: &Path, seeds: u64) -> anyhow::Result<Outcome> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(&cargo)
        .args(["build", "--release", "--offline", "--quiet", "-p", which.package(), "--example", "seeds"])
        // Our own crates are built anew for each mutation, and run for a minute: that is not worth optimising them.
        .args(which.settings().iter().flat_map(|setting| ["--config", setting]))
        .current_dir(copy)
        .env("CARGO_TARGET_DIR", build)
        // Only one crate changes from one mutation to the next.
        .env("CARGO_INCREMENTAL", "1")
        .output()
        .context("cannot start cargo")?;
    if !built.status.success() {
        let said = String::from_utf8_lossy(&built.stderr);
        let error = said.lines().find(|line| line.starts_with("error")).unwrap_or("cargo failed");
        return Ok(Outcome::DoesNotBuild(error.to_owned()));
    }
    let run = Command::new(build.join("release/examples/seeds"))
        .arg(seeds.to_string())
        .output()
        .context("cannot start what was built")?;
    let said = String::from_utf8_lossy(&run.stdout).trim().to_owned();
    match run.status.code() {
        Some(0) => Ok(Outcome::NotFound),
        Some(1) if said.contains(" breaks ") => Ok(Outcome::Found(said)),
        // A panic in the core is found as well: nobody survives it.
        _ => Ok(Outcome::Found(String::from_utf8_lossy(&run.stderr).trim().to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mutation_fits_the_sources_as_they_are() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut count = 0;
        for entry in fs::read_dir(root.join("chaos/mutations")).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "patch") {
                let patch = read(&path).unwrap();
                let target = patch.lines().find_map(|line| line.strip_prefix("+++ b/")).unwrap();
                let copy =
                    std::env::temp_dir().join(format!("spotq-mutation-{}-{count}", std::process::id()));
                fs::create_dir_all(copy.join(target).parent().unwrap()).unwrap();
                fs::copy(root.join(target), copy.join(target)).unwrap();
                let before = read(&copy.join(target)).unwrap();
                apply(&copy, &patch).unwrap_or_else(|e| panic!("{}: {e:#}", path.display()));
                assert_ne!(before, read(&copy.join(target)).unwrap(), "{}", path.display());
                fs::remove_dir_all(&copy).unwrap();
                count += 1;
            }
        }
        assert!(count >= 11, "the mutations were moved; this test must go with them");
    }

    #[test]
    fn a_hunk_that_fits_nowhere_or_twice_is_refused() {
        let dir = std::env::temp_dir().join(format!("spotq-hunk-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("a.rs"), "one\ntwo\none\n").unwrap();
        let patch = |old: &str| format!("--- a/a.rs\n+++ b/a.rs\n@@ -1 +1 @@\n-{old}\n+three\n");
        assert!(apply(&dir, &patch("one")).is_err());
        assert!(apply(&dir, &patch("four")).is_err());
        apply(&dir, &patch("two")).unwrap();
        assert_eq!(read(&dir.join("a.rs")).unwrap(), "one\nthree\none\n");
        fs::remove_dir_all(&dir).unwrap();
    }
}
