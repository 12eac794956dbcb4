//! The terminal while something is waited for: a job's output, sentences, and one line that moves.
//!
//! Output of the job goes through unchanged where nobody watches. Where the line moves, it never mixes with output:
//! a line of output that is not complete is held back until it is.

use std::io::Write as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokio::time::Instant;

use crate::error::ExpectedError;
use crate::out::{Out, talk, write_stdout};

/// Where nobody sees a line move, it is printed at most so often.
const PLAIN_EVERY: Duration = Duration::from_secs(10);
/// How often the moving line is drawn anew; also how stale "in 12s" may be.
pub const DRAW_EVERY: Duration = Duration::from_millis(250);
/// A line of output that is longer is shown in parts.
const HELD_MAX: usize = 16 * 1024;

/// Which of our streams bytes belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    Stdout,
    Stderr,
}

/// Owns stdout and stderr while a command waits.
#[derive(Debug)]
pub struct Screen {
    out: Out,
    bar: Option<ProgressBar>,
    plain_next: Instant,
    plain_last: String,
    held: [Vec<u8>; 2],
}

impl Screen {
    #[must_use]
    pub fn new(out: Out) -> Self {
        let bar = out.live.then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg}") {
                bar.set_style(style);
            }
            bar
        });
        Screen {
            out,
            bar,
            plain_next: Instant::now() + PLAIN_EVERY,
            plain_last: String::new(),
            held: [Vec::new(), Vec::new()],
        }
    }

    /// Says a sentence.
    pub fn say(&self, text: &str) {
        if !self.out.quiet {
            self.above(|| talk(&format!("spotq: {text}")));
        }
    }

    /// Shows what a note of the job's log says, dimmed on a terminal.
    pub fn note(&self, text: &str) {
        if self.out.quiet {
            return;
        }
        let text = crate::out::plain(text.trim_end());
        let line = if self.out.live && self.out.colour { format!("\u{1b}[2m{text}\u{1b}[0m") } else { text };
        self.above(|| talk(&line));
    }

    /// Says how it stands: in place on a terminal, else as a line now and then.
    pub fn status(&mut self, text: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(text.to_owned());
            bar.tick();
            return;
        }
        let now = Instant::now();
        if self.out.quiet || now < self.plain_next {
            return;
        }
        self.plain_next = now + PLAIN_EVERY;
        if text != self.plain_last {
            text.clone_into(&mut self.plain_last);
            talk(&format!("spotq: {text}"));
        }
    }

    /// Passes output of the job on.
    pub fn output(&mut self, stream: Stream, bytes: &[u8]) -> Result<(), ExpectedError> {
        if self.bar.is_none() {
            return write(stream, bytes);
        }
        let held = &mut self.held[stream as usize];
        held.extend_from_slice(bytes);
        let whole = match held.iter().rposition(|b| *b == b'\n') {
            Some(newline) => newline + 1,
            None if held.len() > HELD_MAX => held.len(),
            None => return Ok(()),
        };
        let ready: Vec<u8> = held.drain(..whole).collect();
        self.above(|| write(stream, &ready))
    }

    /// Shows what was held back and takes the moving line away.
    pub fn finish(&mut self) -> Result<(), ExpectedError> {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
        for stream in [Stream::Stdout, Stream::Stderr] {
            let rest = std::mem::take(&mut self.held[stream as usize]);
            if !rest.is_empty() {
                write(stream, &rest)?;
                // The next line of ours, or the prompt, begins a line of its own.
                write(stream, b"\n")?;
            }
        }
        Ok(())
    }

    fn above<R>(&self, print: impl FnOnce() -> R) -> R {
        match &self.bar {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }
}

fn write(stream: Stream, bytes: &[u8]) -> Result<(), ExpectedError> {
    match stream {
        Stream::Stdout => write_stdout(bytes),
        Stream::Stderr => {
            let mut stderr = std::io::stderr().lock();
            stderr.write_all(bytes).and_then(|()| stderr.flush()).map_err(|e| ExpectedError::output(&e))
        }
    }
}
