//! A scheduler with its simulated clouds in a directory of one test, and the `spotq` command against it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use spotq_testkit::{Child, Server, TempDir, program, wait_for};

use crate::leftovers;

/// Longer than anything here takes on a machine busy with other work. Nothing waits for it unless it fails.
pub const DEADLINE: Duration = Duration::from_secs(90);
/// Nodes that boot at once, live for ever and are always to be had: what happens is what the test does.
const CALM: &str = "local:\n  cloud:\n    boot_ms: 50\n    terminate_grace_ms: 1000\n    market: {mean_lifetime_s: 0, \
                    capacity_errors_spot_pct: 0, capacity_errors_on_demand_pct: 0}\n";

/// A running scheduler. Dropping it ends every process of its directory.
#[derive(Debug)]
pub struct Cluster {
    dir: TempDir,
    server: Option<Server>,
    address: String,
    environment: Vec<(String, String)>,
    /// Variables of `spotq`: where the scheduler is, and who we are there.
    client: Vec<(String, String)>,
}

impl Cluster {
    /// A scheduler on a free port, with a calm market.
    pub fn start(name: &str) -> Cluster {
        Cluster::start_with(name, CALM, &[])
    }

    /// As [`Cluster::start`], with lines after the calm configuration and variables in the scheduler's environment.
    pub fn start_with_settings(name: &str, settings: &str, environment: &[(&str, &str)]) -> Cluster {
        Cluster::start_with(name, &format!("{CALM}{settings}"), environment)
    }

    fn start_with(name: &str, config: &str, environment: &[(&str, &str)]) -> Cluster {
        let dir = TempDir::new(name);
        dir.write("spotqd.yaml", config);
        let environment = environment.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let mut cluster =
            Cluster { dir, server: None, address: "127.0.0.1:0".into(), environment, client: vec![] };
        cluster.start_again();
        cluster
    }

    /// As [`Cluster::start`], with identities and TLS; commands are an admin's. Gives the admin's token, too.
    pub fn start_secured(name: &str, environment: &[(&str, &str)]) -> (Cluster, String) {
        let dir = TempDir::new(name);
        dir.write("spotqd.yaml", CALM);
        let mut init = daemon();
        init.args(["init", "--data", text(&dir.join("data"))]);
        let token = Ran::of(init).ok().stdout.trim().to_owned();
        let environment = environment.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let ca = text(&dir.join("data/tls/ca.pem")).to_owned();
        let client = vec![("SPOTQ_CA".to_owned(), ca), ("SPOTQ_TOKEN".to_owned(), token.clone())];
        let mut cluster = Cluster { dir, server: None, address: "127.0.0.1:0".into(), environment, client };
        cluster.start_again();
        (cluster, token)
    }

    /// Where clients reach it.
    pub fn url(&self) -> String {
        let scheme = if self.client.is_empty() { "http" } else { "https" };
        format!("{scheme}://{}", self.address)
    }

    /// `spotqd` with one of its commands on this cluster's directory.
    pub fn manage(&self, args: &[&str]) -> Ran {
        let mut command = daemon();
        command.args(args).arg("--data").arg(self.data()).current_dir(self.dir.path());
        Ran::of(command)
    }

    /// Starts the scheduler on the directory and address that it had before.
    pub fn start_again(&mut self) {
        let mut command = self.daemon_command();
        command.args(["--listen", &self.address]);
        let server = Server::start("spotqd", self.dir.path(), command, "listening on ", DEADLINE)
            .unwrap_or_else(|e| panic!("{e}"));
        self.address = server.ready().to_owned();
        self.server = Some(server);
    }

    /// `spotqd` with this cluster's directory and configuration, but no address.
    pub fn daemon_command(&self) -> Command {
        let mut command = daemon();
        command.arg("--data").arg(self.data()).arg("--config").arg(self.dir.join("spotqd.yaml"));
        command.args(["--local", "--seed", "1"]);
        command.envs(self.environment.iter().map(|(k, v)| (k, v)));
        command
    }

    pub fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    pub fn dir(&self) -> &TempDir {
        &self.dir
    }

    /// Kill -9 of the scheduler alone.
    pub fn kill(&mut self) {
        self.server.take().unwrap().child().kill();
    }

    /// SIGTERM; the scheduler must end with 0.
    pub fn stop(&mut self) {
        let mut server = self.server.take().unwrap();
        server.child().signal(Signal::TERM).unwrap();
        let status = server.child().wait(DEADLINE).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(status.code(), Some(0), "{}", server.child().stderr());
    }

    /// Stops the scheduler, which has no work: nothing of it may stay, and its log has no panic.
    pub fn end(mut self) {
        self.stop();
        leftovers::wait_gone(self.dir.path(), DEADLINE);
        assert_no_panic(&self.daemon_log());
    }

    /// Everything that schedulers of this directory have logged.
    pub fn daemon_log(&self) -> String {
        let bytes = std::fs::read(self.dir.join("spotqd.err")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// `spotq` against this scheduler, in this directory.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = spotq(args);
        command.env("SPOTQ_SERVER", self.url()).current_dir(self.dir.path());
        command.envs(self.client.iter().map(|(k, v)| (k, v)));
        command
    }

    pub fn run(&self, args: &[&str]) -> Ran {
        Ran::of(self.command(args))
    }

    /// Starts a command that goes on beside the test, with its output in files.
    pub fn beside(&self, name: &str, args: &[&str]) -> Child {
        Child::start(name, self.dir.path(), self.command(args)).unwrap_or_else(|e| panic!("{e}"))
    }

    /// The JSON of a command that must end well.
    pub fn json(&self, args: &[&str]) -> Value {
        self.run(&[args, &["-o", "json"]].concat()).json()
    }

    /// Submits and gives the job's number.
    pub fn submit(&self, args: &[&str]) -> String {
        let value = Ran::of(self.command(&[&["submit", "-o", "json"], args].concat())).json();
        value["job_id"].as_u64().unwrap().to_string()
    }

    pub fn show(&self, job: &str) -> Value {
        self.json(&["show", job])
    }

    /// Waits until what `show` says is `wanted`, and gives it.
    pub fn wait_until(&self, job: &str, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let mut last = Value::Null;
        let found = wait_for(
            DEADLINE,
            || {
                // The scheduler may be away on purpose.
                let ran = self.run(&["show", job, "-o", "json"]);
                last = serde_json::from_str(&ran.stdout).ok()?;
                wanted(&last).then(|| last.clone())
            },
            what,
        );
        found.unwrap_or_else(|e| panic!("{e}: {last:#}\n{}", self.daemon_log()))
    }

    pub fn wait_phase(&self, job: &str, phase: &str) -> Value {
        self.wait_until(job, phase, |seen| seen["phase"] == phase)
    }

    pub fn wait_step(&self, job: &str, step: u64) -> Value {
        self.wait_until(job, &format!("step {step}"), |seen| {
            step_of(seen) >= step && seen["phase"] == "running"
        })
    }

    /// Waits for the job's end; gives the exit code of `wait` and what it prints.
    pub fn wait(&self, job: &str) -> (i32, Value) {
        let ran = self.run(&["wait", job, "-q", "-o", "json"]);
        let value = serde_json::from_str(&ran.stdout).unwrap_or_else(|e| panic!("{e}: {ran:?}"));
        (ran.code, value)
    }

    /// Waits for the job, which must complete.
    pub fn completed(&self, job: &str) -> Value {
        let (code, value) = self.wait(job);
        assert_eq!((code, &value["outcome"]), (0, &"completed".into()), "{value:#}\n{}", self.daemon_log());
        value
    }

    /// Asks for a preemption and waits until the attempt that runs has ended.
    pub fn preempt(&self, job: &str, notice: &str) {
        let before = self.show(job)["generation"].as_u64().unwrap();
        self.run(&["preempt", job, "--notice", notice]).ok();
        self.wait_until(job, "the next attempt", |seen| seen["generation"].as_u64() > Some(before));
    }

    /// The job's output as `spotq logs` prints it.
    pub fn logs(&self, job: &str) -> Ran {
        self.run(&["logs", job])
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        drop(self.server.take());
        leftovers::kill(self.dir.path());
    }
}

/// A command that has ended.
#[derive(Debug, Clone)]
pub struct Ran {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    /// Runs it; a crash of a Rust program fails the test wherever it happens.
    pub fn of(mut command: Command) -> Ran {
        let output = command.stdin(Stdio::null()).output().unwrap();
        Ran::from(&output)
    }

    pub fn from(output: &Output) -> Ran {
        let ran = Ran {
            code: output.status.code().unwrap_or_else(|| panic!("ended by a signal: {output:?}")),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        };
        assert_no_panic(&ran.stderr);
        ran
    }

    pub fn ok(self) -> Ran {
        assert_eq!(self.code, 0, "{self:#?}");
        self
    }

    pub fn json(self) -> Value {
        let ran = self.ok();
        serde_json::from_str(&ran.stdout).unwrap_or_else(|e| panic!("{e}: {ran:#?}"))
    }

    /// Ends with `code` and exactly one message on stderr, which names all `parts`; nothing else is printed.
    pub fn refuses(self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, code, "{self:#?}");
        assert!(!self.stderr.trim().is_empty(), "no message: {self:#?}");
        for part in parts {
            assert!(self.stderr.contains(part), "no `{part}` in {:#?}", self.stderr);
        }
        assert!(!self.stderr.contains('\u{1b}'), "colours to a file: {:?}", self.stderr);
    }
}

/// `spotq` without a scheduler's address, and nothing of this process's configuration.
pub fn spotq(args: &[&str]) -> Command {
    let mut command = clean("spotq");
    command.args(args);
    command
}

/// `spotqd` and nothing else.
pub fn daemon() -> Command {
    clean("spotqd")
}

pub fn binary(name: &str) -> PathBuf {
    program(name).unwrap_or_else(|e| panic!("{e}"))
}

pub fn step_of(job: &Value) -> u64 {
    job["progress"]["step"].as_u64().unwrap_or(0)
}

pub fn assert_no_panic(text: &str) {
    for word in ["panicked at", "RUST_BACKTRACE", "stack backtrace"] {
        assert!(!text.contains(word), "{text}");
    }
}

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn clean(name: &str) -> Command {
    let mut command = Command::new(binary(name));
    command.env_clear();
    command.env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command.env("USER", "ada").env("XDG_CONFIG_HOME", "/nonexistent").env("RUST_BACKTRACE", "1");
    command
}
