//! JAX with Orbax and PyTorch through the scheduler, from the example job files: preempted twice, with and without a
//! notice, they end with the parameters of an undisturbed run.
//!
//! Where a framework is absent the test says so and passes; `./test` installs them.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use spotq_testkit::Child;

use crate::cluster::{Cluster, DEADLINE, assert_no_panic, step_of, text};

const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples");

#[test]
fn jax_with_orbax_ends_as_undisturbed() {
    let python = std::env::var_os("SPOTQ_TEST_JAX_PYTHON")
        .map_or_else(|| Path::new(EXAMPLES).join("../target/py/jax/bin/python"), PathBuf::from);
    compare(
        "jax-orbax.yaml",
        &python,
        ".venv/bin/python",
        "import jax, orbax.checkpoint",
        "train_jax_orbax.py",
    );
}

#[test]
fn torch_ends_as_undisturbed() {
    let python = Path::new("/usr/bin/python3");
    compare("torch.yaml", python, "/usr/bin/python3", "import torch", "train_torch.py");
}

fn compare(file: &str, python: &Path, interpreter: &str, imports: &str, script: &str) {
    if let Some(reason) = missing(python, imports) {
        #[expect(clippy::print_stderr, reason = "a skipped test says why")]
        {
            eprintln!("skipped {file}: {reason}");
        }
        return;
    }
    let cluster = Cluster::start(script);
    let (work, plain) = (cluster.dir().join("work"), cluster.dir().join("plain.npz"));
    std::fs::create_dir(&work).unwrap();
    let script = Path::new(EXAMPLES).join("python").join(script);
    let job = submit(
        &cluster,
        file,
        &work,
        &[(interpreter, text(python)), (script.file_name().unwrap().to_str().unwrap(), text(&script))],
    );
    // Beside the job, so that it does not wait until the job is nearly done.
    let mut command = Command::new(python);
    command.env("JAX_PLATFORMS", "cpu");
    command.args(["-B", text(&script), "--steps", "240", "--save-every", "0", "--out", text(&plain)]);
    let mut whole = Child::start("plain", cluster.dir().path(), command).unwrap();
    let reach = |step: u64| {
        cluster.wait_until(&job, &format!("step {step}"), |seen| {
            step_of(seen) >= step && seen["phase"] != "draining"
        });
    };
    reach(20);
    cluster.preempt(&job, "20s");
    cluster.wait_until(&job, "attempt 2", |seen| {
        seen["attempts"][1]["last_step"].as_u64() >= Some(45)
            && seen["checkpoint"]["step"].as_u64() >= Some(40)
    });
    cluster.preempt(&job, "0s");
    let seen = cluster.completed(&job);
    assert_eq!((&seen["preemptions"], &seen["failures"]), (&2.into(), &0.into()), "{seen:#}");
    let resumed: Vec<_> = (0..3).map(|n| seen["attempts"][n]["resumed_step"].as_u64()).collect();
    assert!(resumed[1] >= Some(20) && resumed[2] >= Some(40), "{seen:#}");
    let status = whole.wait(DEADLINE).unwrap();
    assert!(status.success(), "{status}: {}", whole.stderr());
    let (model, wanted) = (std::fs::read(work.join("model.npz")).unwrap(), std::fs::read(&plain).unwrap());
    assert!(model == wanted, "{file}: preemptions changed the result");
    assert_no_panic(&cluster.logs(&job).stderr);
    cluster.end();
}

/// The example as it is, but for the places of this machine and fewer, slower steps.
fn submit(cluster: &Cluster, file: &str, work: &Path, replace: &[(&str, &str)]) -> String {
    let mut job = std::fs::read_to_string(Path::new(EXAMPLES).join("jobs").join(file)).unwrap();
    // The packages are there already.
    if let (Some(from), Some(to)) = (job.find("setup: |"), job.find("# `exec` makes")) {
        job.replace_range(from..to, "");
    }
    let fixed = [
        ("--steps 300 --save-every 50", "--steps 240 --save-every 20 --step-ms 40"),
        ("workdir: examples/python\n", ""),
    ];
    for (from, to) in fixed.iter().chain(replace) {
        assert!(job.contains(from), "{file} has no `{from}`; this test has to follow it");
        job = job.replace(from, to);
    }
    let path = cluster.dir().write(file, job);
    cluster.submit(&[text(&path), "--workdir", text(work)])
}

fn missing(python: &Path, imports: &str) -> Option<String> {
    let tried = Command::new(python).args(["-c", imports]).stdin(Stdio::null()).output();
    match tried {
        Err(error) => Some(format!("{} does not start: {error}", python.display())),
        Ok(output) if !output.status.success() => {
            Some(format!("{} cannot run `{imports}`", python.display()))
        }
        Ok(_) => None,
    }
}
