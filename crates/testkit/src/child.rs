//! Child processes that never outlive their test, with their output in files.

use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::Signal;

use crate::{TestkitError, processes, wait_for};

/// A started process. Dropping it kills it, by its own pid, and waits for it.
#[derive(Debug)]
pub struct Child {
    name: String,
    inner: std::process::Child,
    stdout: PathBuf,
    stderr: PathBuf,
}

/// A child that has said it is ready.
#[derive(Debug)]
pub struct Server {
    child: Child,
    ready: String,
}

impl Child {
    /// Starts `command` with its output in `dir/NAME.out` and `dir/NAME.err`, and no standard input.
    ///
    /// # Errors
    /// When a file cannot be made or the program cannot be started.
    pub fn start(name: &str, dir: &Path, mut command: Command) -> Result<Child, TestkitError> {
        let (stdout, stderr) = (dir.join(format!("{name}.out")), dir.join(format!("{name}.err")));
        command.stdin(Stdio::null()).stdout(log_file(&stdout)?).stderr(log_file(&stderr)?);
        let inner = command.spawn().map_err(|source| TestkitError::Start {
            program: command.get_program().to_string_lossy().into_owned(),
            source,
        })?;
        Ok(Child { name: name.to_owned(), inner, stdout, stderr })
    }

    #[must_use]
    pub fn pid(&self) -> u32 {
        self.inner.id()
    }

    /// What it has written to stdout so far. Output of an earlier child of the same name and directory comes first.
    #[must_use]
    pub fn stdout(&self) -> String {
        read_text(&self.stdout)
    }

    /// What it has written to stderr so far.
    #[must_use]
    pub fn stderr(&self) -> String {
        read_text(&self.stderr)
    }

    #[must_use]
    pub fn stderr_path(&self) -> &Path {
        &self.stderr
    }

    /// Sends a signal to this process alone.
    ///
    /// # Errors
    /// When it has been waited for already.
    pub fn signal(&self, signal: Signal) -> Result<(), TestkitError> {
        processes::signal(self.pid(), signal)
    }

    /// Waits until it ends.
    ///
    /// # Errors
    /// [`TestkitError::TimedOut`] when it still runs at the deadline; it then goes on running.
    pub fn wait(&mut self, deadline: Duration) -> Result<ExitStatus, TestkitError> {
        let what = format!("the end of `{}`", self.name);
        Ok(wait_for(deadline, || self.ended(), what)?)
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.inner.try_wait().ok().flatten()
    }

    /// Kills it (KILL) and waits for it. Nothing happens when it has ended.
    pub fn kill(&mut self) {
        // A kill that fails means that it has ended; `wait` then returns at once.
        let _ = self.inner.kill();
        let _ = self.inner.wait();
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Server {
    /// Starts `command` and waits until a line of its stdout or stderr begins with `ready`, such as
    /// `listening on `; the rest of that line is [`Server::ready`].
    ///
    /// # Errors
    /// When it cannot be started, ends first (with its output), or is not ready at the deadline.
    pub fn start(
        name: &str,
        dir: &Path,
        command: Command,
        ready: &str,
        deadline: Duration,
    ) -> Result<Server, TestkitError> {
        // Both files are appended to by every start of this name: only what is new can be the ready line.
        let seen =
            [format!("{name}.out"), format!("{name}.err")].map(|file| read_text(&dir.join(file)).len());
        let mut child = Child::start(name, dir, command)?;
        let what = format!("`{ready}` from `{name}`");
        let found = wait_for(
            deadline,
            || {
                let texts = [child.stdout(), child.stderr()];
                let line =
                    texts.iter().zip(seen).find_map(|(text, from)| rest_of_line(text.get(from..)?, ready));
                match line {
                    Some(line) => Some(Ok(line)),
                    None => child.ended().map(Err),
                }
            },
            what,
        )?;
        match found {
            Ok(ready) => Ok(Server { child, ready }),
            Err(status) => Err(TestkitError::EndedEarly {
                name: name.to_owned(),
                status: status.to_string(),
                output: child.stdout() + &child.stderr(),
            }),
        }
    }

    /// What followed the ready text on its line, such as the address.
    #[must_use]
    pub fn ready(&self) -> &str {
        &self.ready
    }

    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.pid()
    }
}

/// The path of one of the workspace's programs, such as `spotq`, beside the running test's own directory. That holds
/// for any target directory and profile.
///
/// # Errors
/// When it is not there: a test of another crate does not make cargo build it.
pub fn program(name: &str) -> Result<PathBuf, TestkitError> {
    let test = std::env::current_exe().map_err(|source| TestkitError::Io {
        operation: "find",
        path: PathBuf::from(name),
        source,
    })?;
    // A test runs from `target/PROFILE/deps/`, the programs lie in `target/PROFILE/`.
    let path = test.ancestors().nth(2).unwrap_or(&test).join(name);
    if path.is_file() { Ok(path) } else { Err(TestkitError::NotBuilt { path }) }
}

/// A loopback port that nobody listens on at this moment. Another process may take it before you do: prefer port 0
/// wherever the program can say which port it got.
///
/// # Panics
/// When loopback has no free port.
#[must_use]
pub fn free_port() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("loopback has a free port");
    listener.local_addr().expect("a bound listener has an address").port()
}

fn log_file(path: &Path) -> Result<File, TestkitError> {
    File::options().create(true).append(true).open(path).map_err(|source| TestkitError::Io {
        operation: "open",
        path: path.to_path_buf(),
        source,
    })
}

fn read_text(path: &Path) -> String {
    String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned()
}

/// What follows `start` on the first complete line that begins with it.
fn rest_of_line(text: &str, start: &str) -> Option<String> {
    let complete = &text[..=text.rfind('\n')?];
    complete.lines().find_map(|line| line.strip_prefix(start)).map(|rest| rest.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{TempDir, wait_until};

    const LIMIT: Duration = Duration::from_secs(10);

    fn shell(text: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", text]);
        command
    }

    #[test]
    fn a_dropped_child_is_gone() {
        let dir = TempDir::new("child-drop");
        let child = Child::start("sleeper", dir.path(), shell("exec sleep 3600")).unwrap();
        let pid = child.pid();
        assert!(processes::is_alive(pid));
        drop(child);
        assert!(!processes::is_alive(pid));
    }

    #[test]
    fn output_and_exit_code_are_kept() {
        let dir = TempDir::new("child-output");
        let mut child = Child::start("talker", dir.path(), shell("echo out; echo err >&2; exit 3")).unwrap();
        assert_eq!(child.wait(LIMIT).unwrap().code(), Some(3));
        assert_eq!((child.stdout().as_str(), child.stderr().as_str()), ("out\n", "err\n"));
    }

    #[test]
    fn a_server_is_ready_when_it_says_so_and_again_after_a_restart() {
        let dir = TempDir::new("server-ready");
        for address in ["127.0.0.1:1", "127.0.0.1:2"] {
            let command = shell(&format!("echo listening on {address}; exec sleep 3600"));
            let server = Server::start("srv", dir.path(), command, "listening on ", LIMIT).unwrap();
            assert_eq!(server.ready(), address);
        }
    }

    #[test]
    fn a_server_that_ends_first_shows_its_output() {
        let dir = TempDir::new("server-early");
        let command = shell("echo port in use >&2; exit 1");
        let error = Server::start("srv", dir.path(), command, "listening on ", LIMIT).unwrap_err();
        assert!(error.to_string().contains("port in use"), "{error}");
    }

    #[test]
    fn a_program_that_does_not_exist_is_named() {
        let dir = TempDir::new("child-missing");
        let error = Child::start("none", dir.path(), Command::new("no-such-program")).unwrap_err();
        assert!(error.to_string().contains("no-such-program"), "{error}");
    }

    #[test]
    fn a_term_reaches_the_child_alone() {
        let dir = TempDir::new("child-signal");
        let text = "trap 'echo got term; exit 0' TERM; echo up; while :; do sleep 0.01; done";
        let mut child = Child::start("trap", dir.path(), shell(text)).unwrap();
        wait_until(LIMIT, || child.stdout().contains("up"), "the trap").unwrap();
        child.signal(Signal::TERM).unwrap();
        assert_eq!(child.wait(LIMIT).unwrap().code(), Some(0));
        assert!(child.stdout().contains("got term"));
    }

    #[test]
    fn a_program_is_looked_for_beside_the_tests_and_named_when_it_is_not_built() {
        let profile_dir = std::env::current_exe().unwrap().parent().unwrap().parent().unwrap().to_path_buf();
        let error = program("no-such-spotq").unwrap_err().to_string();
        assert!(error.contains(&profile_dir.join("no-such-spotq").display().to_string()), "{error}");
        assert!(error.contains("cargo build"), "{error}");
        let made = tempfile::NamedTempFile::new_in(&profile_dir).unwrap();
        assert_eq!(program(made.path().file_name().unwrap().to_str().unwrap()).unwrap(), made.path());
    }

    #[test]
    fn a_free_port_can_be_bound() {
        assert!(TcpListener::bind(("127.0.0.1", free_port())).is_ok());
    }
}
