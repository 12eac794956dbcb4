//! The framework trainers, preempted and not: the final parameters must be the same file.
//!
//! Where an interpreter or a module is absent the test says so and passes: the frameworks are large, and `./test`
//! installs them.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "these are tests, helpers included")]

#[path = "support/interrupted.rs"]
mod interrupted;
mod support;

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use interrupted::run_interrupted;
use support::{Trainer, run_whole};

const PACKAGE: &str = env!("CARGO_MANIFEST_DIR");

/// A framework trainer: which interpreter runs it and which modules it needs.
struct Script {
    python: PathBuf,
    imports: &'static str,
    file: &'static str,
}

impl Script {
    /// Why the script cannot run here, if it cannot.
    fn missing(&self) -> Option<String> {
        let tried = Command::new(&self.python)
            .args(["-c", self.imports])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        match tried {
            Err(error) => Some(format!("{} does not start: {error}", self.python.display())),
            Ok(status) if !status.success() => {
                Some(format!("{} cannot run `{}`", self.python.display(), self.imports))
            }
            Ok(_) => None,
        }
    }

    fn command(&self, dir: &Path, args: &[&str]) -> Command {
        let mut command = Command::new(&self.python);
        command
            .env("SPOTQ_CHECKPOINT_DIR", dir.join("ckpt"))
            .env("SPOTQ_PROGRESS_FILE", dir.join("progress"))
            .env("JAX_PLATFORMS", "cpu")
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .arg(Path::new(PACKAGE).join("python").join(self.file))
            .args(["--log-every", "1", "--out"])
            .arg(dir.join("final.npz"))
            .args(args);
        command
    }

    /// Trains uninterrupted and interrupted, and compares.
    fn compare(&self, seed: u64, interruptions: u32, args: &[&str]) {
        if let Some(reason) = self.missing() {
            println!("skipped {}: {reason}", self.file);
            return;
        }
        let (plain, cut) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        run_whole(self.command(plain.path(), args).env_remove("SPOTQ_CHECKPOINT_DIR"));
        let interrupted = run_interrupted(|_| self.command(cut.path(), args), seed, interruptions, 30);
        assert!(interrupted >= 2, "only {interrupted} interruptions");
        let model = |dir: &Path| fs::read(dir.join("final.npz")).unwrap();
        assert!(
            model(plain.path()) == model(cut.path()),
            "interruptions changed the result of {}",
            self.file
        );
        let progress = fs::read_to_string(cut.path().join("progress")).unwrap();
        let last: serde_json::Value = serde_json::from_str(progress.lines().last().unwrap()).unwrap();
        assert_eq!(last["step"], last["total"]);
    }
}

fn jax() -> Script {
    let python = env::var_os("SPOTQ_TEST_JAX_PYTHON")
        .map_or_else(|| Path::new(PACKAGE).join("../target/py/jax/bin/python"), PathBuf::from);
    Script { python, imports: "import jax, orbax.checkpoint", file: "train_jax_orbax.py" }
}

fn torch() -> Script {
    Script { python: "/usr/bin/python3".into(), imports: "import torch", file: "train_torch.py" }
}

#[test]
fn jax_with_orbax_ends_the_same_when_interrupted() {
    jax().compare(5, 3, &["--steps", "120", "--save-every", "17"]);
}

#[test]
fn torch_ends_the_same_when_interrupted() {
    torch().compare(6, 4, &["--steps", "120", "--save-every", "17"]);
}

#[test]
fn torch_falls_back_from_a_damaged_checkpoint_to_the_one_before() {
    let script = torch();
    if let Some(reason) = script.missing() {
        println!("skipped {}: {reason}", script.file);
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    run_whole(&mut script.command(dir.path(), &["--steps", "40", "--save-every", "20"]));
    let whole = fs::read(dir.path().join("final.npz")).unwrap();
    let newest = dir.path().join("ckpt/step-40.pt");
    let bytes = fs::read(&newest).unwrap();
    fs::write(&newest, &bytes[..bytes.len() / 2]).unwrap();
    let mut again = Trainer::start(&mut script.command(dir.path(), &["--steps", "40", "--save-every", "20"]));
    again.expect_line("starting at step 20 of 40");
    let (status, lines) = again.finish();
    assert!(status.success(), "{status}: {lines:#?}");
    assert_eq!(whole, fs::read(dir.path().join("final.npz")).unwrap());
}
