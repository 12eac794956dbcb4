//! Runs trainers as processes and interrupts them. It waits for lines of their output, never for time alone.

use std::{
    io::{BufRead, BufReader, Read},
    os::unix::process::ExitStatusExt,
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    thread,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use spotq_examples::trainer::math::Rng;

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

/// Runs attempts of `command` that end after a random number of steps, `interruptions` times, then one to the end.
/// The command prints a line `step N/...` for each step. Gives how many attempts were interrupted.
pub fn run_interrupted(
    command: impl Fn(u32) -> Command,
    seed: u64,
    interruptions: u32,
    most_steps: u64,
) -> u32 {
    println!("kill points are drawn from seed {seed}");
    let mut rng = Rng::seeded(seed);
    let mut interrupted = 0;
    for attempt in 1..=interruptions {
        let mut trainer = Trainer::start(&mut command(attempt));
        let steps = 1 + rng.below(most_steps);
        let reached = (0..steps).all(|_| trainer.next_line("step ").is_some());
        if !reached {
            break;
        }
        let kind = rng.below(3);
        match kind {
            0 => trainer.signal(Signal::KILL),
            1 => trainer.signal(Signal::TERM),
            _ => {
                trainer.signal(Signal::USR1);
                let saved = trainer.next_line("saved step ");
                println!("attempt {attempt}: on USR1: {saved:?}");
                trainer.signal(Signal::KILL);
            }
        }
        let (status, lines) = trainer.finish();
        println!("attempt {attempt}: interrupted after {steps} lines: {status}");
        if status.success() {
            break;
        }
        let expected = if kind == 1 { status.code() == Some(143) } else { status.signal() == Some(9) };
        assert!(expected, "attempt {attempt} ended with {status}: {lines:#?}");
        interrupted += 1;
    }
    run_whole(&mut command(interruptions + 1));
    interrupted
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
