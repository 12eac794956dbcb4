//! The example trainer as a job, and the model that it must end with.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::cluster::{Cluster, Ran, binary, text};

/// The trainer saves when asked to, and replaces files whole.
pub const SAVES: [&str; 4] = ["--save-signal", "USR1", "--checkpoint-profile", "rename"];

/// A training of so many steps, in its own directory, with flags of `spotq` and flags of the trainer.
#[derive(Debug)]
pub struct Training {
    dir: PathBuf,
    steps: u64,
    pub job: String,
}

impl Training {
    /// Submits it as a job that saves on USR1.
    pub fn submit(cluster: &Cluster, steps: u64, trainer: &[&str]) -> Training {
        Training::submit_with(cluster, steps, &SAVES, trainer)
    }

    pub fn submit_with(cluster: &Cluster, steps: u64, flags: &[&str], trainer: &[&str]) -> Training {
        let name = format!("work-{}", std::fs::read_dir(cluster.dir().path()).unwrap().count());
        let dir = cluster.dir().join(name);
        std::fs::create_dir(&dir).unwrap();
        let (program, count) = (binary("spotq-train"), steps.to_string());
        let command = [&["--", text(&program), "--steps", &count, "--out", "model.bin"], trainer].concat();
        let own = ["--workdir", text(&dir), "--outputs", "model.bin"];
        let job = cluster.submit(&[&own, flags, &command].concat());
        Training { dir, steps, job }
    }

    /// The model that the job left in its working directory.
    pub fn model(&self) -> Vec<u8> {
        std::fs::read(self.dir.join("model.bin")).unwrap()
    }

    /// The job completes, and its model is that of an undisturbed run, to the bit; `pull` fetches the same.
    pub fn ends_as_undisturbed(&self, cluster: &Cluster) {
        self.ends_as_undisturbed_with(cluster, &[]);
    }

    /// As [`Training::ends_as_undisturbed`], with variables that `pull` needs to reach the store.
    pub fn ends_as_undisturbed_with(&self, cluster: &Cluster, environment: &[(&str, &str)]) {
        cluster.completed(&self.job);
        let wanted = undisturbed(&cluster.dir().join("undisturbed"), self.steps);
        assert!(self.model() == wanted, "job {}: the model differs from an undisturbed run's", self.job);
        let pulled = cluster.dir().join(format!("pulled-{}", self.job));
        let mut pull = cluster.command(&["pull", &self.job, text(&pulled), "-o", "json"]);
        pull.envs(environment.iter().copied());
        let said = Ran::of(pull).json();
        assert_eq!(said["files"]["model.bin"].as_u64(), Some(wanted.len() as u64), "{said}");
        assert!(std::fs::read(pulled.join("model.bin")).unwrap() == wanted, "pull gave another model");
    }
}

/// The model of a run without a scheduler, of `steps` steps; trained once for each number of steps of a test.
pub fn undisturbed(dir: &Path, steps: u64) -> Vec<u8> {
    let path = dir.join(format!("{steps}.bin"));
    if !path.exists() {
        std::fs::create_dir_all(dir).unwrap();
        let mut command = Command::new(binary("spotq-train"));
        command.env_clear().stdin(Stdio::null()).current_dir(dir);
        command.args(["--save-every", "0", "--steps", &steps.to_string(), "--out", text(&path)]);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }
    std::fs::read(path).unwrap()
}
