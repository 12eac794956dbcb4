//! Reads the progress file that a trainer may write: JSON lines such as `{"step": 12, "total": 100}`.
//!
//! Bad and half-written lines are skipped; a trainer never suffers from what it writes here.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use spotq_model::Timestamp;

/// Read at most this much at a time: a trainer that writes faster is read in several looks.
const READ_MAX: u64 = 1 << 20;
/// A longer line is no progress line.
const LINE_MAX: usize = 64 * 1024;
/// Steps remembered with the time they were seen, to tell which step a checkpoint holds.
const HISTORY_MAX: usize = 4096;

/// A point of progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct Point {
    pub step: u64,
    pub total: Option<u64>,
}

/// Follows one progress file.
#[derive(Debug)]
pub struct Progress {
    path: PathBuf,
    offset: u64,
    rest: Vec<u8>,
    latest: Option<Point>,
    told: Option<Point>,
    history: std::collections::VecDeque<(Timestamp, u64)>,
}

impl Progress {
    #[must_use]
    pub fn new(path: &Path) -> Progress {
        Progress {
            path: path.to_owned(),
            offset: 0,
            rest: Vec::new(),
            latest: None,
            told: None,
            history: Default::default(),
        }
    }

    /// Reads what is new. Returns the latest point if it changed.
    pub fn look(&mut self, now: Timestamp) -> Option<Point> {
        let before = self.latest;
        let bytes = self.read_new();
        self.feed(now, &bytes);
        self.latest.filter(|_| self.latest != before)
    }

    /// The latest point if it was not told yet.
    #[must_use]
    pub fn untold(&self) -> Option<Point> {
        self.latest.filter(|_| self.latest != self.told)
    }

    /// The latest point was passed on.
    pub fn mark_told(&mut self) {
        self.told = self.latest;
    }

    #[must_use]
    pub fn latest(&self) -> Option<Point> {
        self.latest
    }

    /// The newest step seen at or before `at`.
    #[must_use]
    pub fn step_at(&self, at: Timestamp) -> Option<u64> {
        self.history.iter().rev().find(|(seen, _)| *seen <= at).map(|(_, step)| *step)
    }

    fn feed(&mut self, now: Timestamp, bytes: &[u8]) {
        self.rest.extend_from_slice(bytes);
        while let Some(end) = self.rest.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = self.rest.drain(..=end).collect();
            if let Ok(point) = serde_json::from_slice::<Point>(&line) {
                self.latest = Some(point);
                self.history.push_back((now, point.step));
                if self.history.len() > HISTORY_MAX {
                    self.history.pop_front();
                }
            }
        }
        if self.rest.len() > LINE_MAX {
            self.rest.clear();
        }
    }

    fn read_new(&mut self) -> Vec<u8> {
        let mut data = Vec::new();
        let Ok(mut file) = File::open(&self.path) else { return data };
        let len = file.metadata().map_or(0, |meta| meta.len());
        if len < self.offset {
            // The trainer began the file anew.
            self.offset = 0;
            self.rest.clear();
        }
        if len > self.offset && file.seek(SeekFrom::Start(self.offset)).is_ok() {
            let _ = file.take(READ_MAX).read_to_end(&mut data);
            self.offset += data.len() as u64;
        }
        data
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn partial_bad_and_huge_lines_are_tolerated() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p");
        let mut progress = Progress::new(&path);
        assert_eq!(progress.look(Timestamp(1)), None);
        let mut file = File::create(&path).unwrap();
        file.write_all(b"{\"step\":1}\nnonsense\n{\"step\":-4}\n{\"st").unwrap();
        assert_eq!(progress.look(Timestamp(2)), Some(Point { step: 1, total: None }));
        file.write_all(b"ep\":2,\"total\":9,\"loss\":0.5}\n").unwrap();
        assert_eq!(progress.look(Timestamp(3)), Some(Point { step: 2, total: Some(9) }));
        assert_eq!(progress.look(Timestamp(4)), None);
        file.write_all(&vec![b'x'; LINE_MAX * 2]).unwrap();
        file.write_all(b"\n{\"step\":3}\n").unwrap();
        assert_eq!(progress.look(Timestamp(5)).map(|p| p.step), Some(3));
        assert_eq!((progress.step_at(Timestamp(4)), progress.step_at(Timestamp(1))), (Some(2), None));
    }

    #[test]
    fn a_file_that_begins_anew_is_read_from_its_start() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p");
        let mut progress = Progress::new(&path);
        std::fs::write(&path, "{\"step\":100}\n").unwrap();
        progress.look(Timestamp(1));
        std::fs::write(&path, "{\"step\":1}\n").unwrap();
        assert_eq!(progress.look(Timestamp(2)).map(|p| p.step), Some(1));
    }
}
