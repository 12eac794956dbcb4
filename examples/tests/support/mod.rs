//! Runs trainers as processes and interrupts them. It waits for lines of their output, never for time alone.

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    thread,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};

/// Longer than a trainer is ever silent, also on a machine busy with other tests.
const PATIENCE: Duration = Duration::from_secs(120);

/// A running trainer, killed when dropped.
pub struct Trainer {
    child: Child,
    lines: Receiver<String>,
    seen: Vec<String>,
}

impl Trainer {
    pub fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        let (sender, lines) = mpsc::channel();
        forward(child.stdout.take().unwrap(), sender.clone());
        forward(child.stderr.take().unwrap(), sender);
        Trainer { child, lines, seen: Vec::new() }
    }

    /// The next line with `part` in it, or `None` if the output ends before one comes.
    pub fn next_line(&mut self, part: &str) -> Option<String> {
        loop {
            let line = self.receive()?;
            if line.contains(part) {
                return Some(line);
            }
        }
    }

    /// The next line with `part` in it; the trainer must print one.
    pub fn expect_line(&mut self, part: &str) -> String {
        self.next_line(part).unwrap_or_else(|| panic!("no line with {part:?}: {:#?}", self.seen))
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().cast_signed()).unwrap();
        // It may have ended by itself in the same moment; whoever cares looks at its status.
        let _ = kill_process(pid, signal);
    }

    /// Waits for the end, without waiting for the output to close.
    pub fn wait(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }

    /// Waits for the end of the output and of the process; gives its status and all lines.
    pub fn finish(mut self) -> (ExitStatus, Vec<String>) {
        while self.receive().is_some() {}
        (self.wait(), std::mem::take(&mut self.seen))
    }

    fn receive(&mut self) -> Option<String> {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => {
                self.seen.push(line.clone());
                Some(line)
            }
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("silent for {PATIENCE:?}: {:#?}", self.seen),
        }
    }
}

impl Drop for Trainer {
    fn drop(&mut self) {
        // Both fail if it has ended and been waited for, which is what is wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs `command` to its end; it must end well.
pub fn run_whole(command: &mut Command) -> Vec<String> {
    let (status, lines) = Trainer::start(command).finish();
    assert!(status.success(), "{status}: {lines:#?}");
    lines
}

fn forward(output: impl Read + Send + 'static, sender: Sender<String>) {
    thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
}
