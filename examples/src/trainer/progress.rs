//! The progress file of the trainer contract: one JSON line per report. It must never stop the training.

use std::{
    fs::{File, OpenOptions},
    io::Write,
    path::Path,
    time::{Duration, Instant},
};

use serde::Serialize;

/// A report comes after this many steps or this much time, whichever is first.
const EVERY_STEPS: u64 = 10;
const EVERY: Duration = Duration::from_millis(200);

/// The open progress file, if there is one.
#[derive(Debug)]
pub struct Progress {
    file: Option<File>,
    total: u64,
    last_step: u64,
    last_time: Instant,
}

#[derive(Serialize)]
struct Line {
    step: u64,
    total: u64,
}

impl Progress {
    /// Opens `path` and reports the step that training starts at.
    #[must_use]
    pub fn open(path: Option<&Path>, start: u64, total: u64) -> Self {
        let file = path.and_then(|path| match OpenOptions::new().create(true).append(true).open(path) {
            Ok(file) => Some(file),
            Err(error) => {
                super::talk(&format!(
                    "cannot open the progress file {}: {error}; going on without",
                    path.display()
                ));
                None
            }
        });
        let mut progress = Progress { file, total, last_step: start, last_time: Instant::now() };
        progress.write(start);
        progress
    }

    /// Reports `step` if it is time, or the last one.
    pub fn note(&mut self, step: u64) {
        let due =
            step >= self.last_step + EVERY_STEPS || self.last_time.elapsed() >= EVERY || step >= self.total;
        if due {
            self.write(step);
        }
    }

    fn write(&mut self, step: u64) {
        self.last_step = step;
        self.last_time = Instant::now();
        let Some(file) = &mut self.file else {
            return;
        };
        // One write of the whole line, so that a reader never sees two lines mixed.
        let line = serde_json::to_string(&Line { step, total: self.total }).map(|line| line + "\n");
        let written = line.map_err(std::io::Error::from).and_then(|line| file.write_all(line.as_bytes()));
        if let Err(error) = written {
            super::talk(&format!("cannot write to the progress file: {error}; going on without"));
            self.file = None;
        }
    }
}
