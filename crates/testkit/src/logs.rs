//! Reads the logs of a test's processes and fails on warnings that the test did not expect.

use std::fmt;
use std::path::Path;

use crate::TestkitError;

/// How many lines a failure shows; the rest is counted. One broken loop must not flood a test's output.
const SHOWN: usize = 20;

/// Lines that no test may log unless it allows them: warnings, errors and panics.
#[derive(Debug, Clone, Default)]
pub struct LogChecker {
    allowed: Vec<String>,
}

/// Lines that were not allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Unexpected {
    pub log: String,
    pub lines: Vec<String>,
}

impl LogChecker {
    #[must_use]
    pub fn new() -> LogChecker {
        LogChecker::default()
    }

    /// Allows lines that contain `part`; be specific, a part such as `error` would allow everything.
    #[must_use]
    pub fn allow(mut self, part: &str) -> LogChecker {
        self.allowed.push(part.to_owned());
        self
    }

    /// Checks a log's text; `log` names it in the failure.
    ///
    /// # Errors
    /// [`Unexpected`], with every line that was not allowed.
    pub fn check(&self, log: &str, text: &str) -> Result<(), Unexpected> {
        let lines: Vec<String> = text
            .lines()
            .map(without_colour)
            .filter(|line| is_alarming(line) && !self.allowed.iter().any(|part| line.contains(part)))
            .collect();
        if lines.is_empty() { Ok(()) } else { Err(Unexpected { log: log.to_owned(), lines }) }
    }

    /// Checks a log file. Bytes that are not UTF-8 are replaced: a trainer may print anything.
    ///
    /// # Errors
    /// When a line was not allowed, or the file cannot be read.
    pub fn check_file(&self, path: &Path) -> Result<(), TestkitError> {
        let bytes = std::fs::read(path).map_err(|source| TestkitError::Io {
            operation: "read the log",
            path: path.to_path_buf(),
            source,
        })?;
        Ok(self.check(&path.display().to_string(), &String::from_utf8_lossy(&bytes))?)
    }
}

impl fmt::Display for Unexpected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} has {} unexpected lines:", self.log, self.lines.len())?;
        for line in self.lines.iter().take(SHOWN) {
            write!(f, "\n  {line}")?;
        }
        if self.lines.len() > SHOWN {
            write!(f, "\n  and {} more", self.lines.len() - SHOWN)?;
        }
        f.write_str("\nfix the cause, or allow the line where the test provokes it")
    }
}

/// The level stands within the first words of a line, after the time at most; later in the line it is prose.
fn is_alarming(line: &str) -> bool {
    let by_level = line.split_whitespace().take(2).any(|word| matches!(word, "WARN" | "ERROR"));
    let by_json = line.contains("\"level\":\"WARN\"") || line.contains("\"level\":\"ERROR\"");
    by_level || by_json || (line.starts_with("thread '") && line.contains("panicked at"))
}

/// Drops terminal colour sequences (`ESC [ … letter`).
fn without_colour(line: &str) -> String {
    let mut plain = String::with_capacity(line.len());
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        if c == '\u{1b}' {
            let _ = chars.by_ref().find(char::is_ascii_alphabetic);
        } else {
            plain.push(c);
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "2026-01-01T00:00:00Z  INFO spotqd: listening\n\
        \u{1b}[2m2026-01-01T00:00:01Z\u{1b}[0m \u{1b}[33m WARN\u{1b}[0m engine: node 3 is silent\n\
        2026-01-01T00:00:02Z  INFO trainer: an ERROR in prose is none\n";

    #[test]
    fn an_unexpected_warning_fails_even_in_colour() {
        let error = LogChecker::new().check("spotqd.log", LOG).unwrap_err();
        assert_eq!(error.lines.len(), 1);
        assert!(error.to_string().contains("node 3 is silent"), "{error}");
    }

    #[test]
    fn an_allowed_warning_passes() {
        assert_eq!(LogChecker::new().allow("is silent").check("spotqd.log", LOG), Ok(()));
    }

    #[test]
    fn errors_in_json_and_panics_fail() {
        let text =
            "{\"level\":\"ERROR\",\"message\":\"x\"}\nthread 'main' (1) panicked at src/main.rs:1:1:\n";
        assert_eq!(LogChecker::new().check("log", text).unwrap_err().lines.len(), 2);
    }

    #[test]
    fn a_file_is_checked_as_its_text() {
        let dir = crate::TempDir::new("logs");
        let path = dir.write("spotqd.err", LOG);
        assert!(LogChecker::new().allow("is silent").check_file(&path).is_ok());
        let error = LogChecker::new().check_file(&path).unwrap_err().to_string();
        assert!(error.contains("spotqd.err") && error.contains("node 3 is silent"), "{error}");
    }

    #[test]
    fn a_missing_log_is_named() {
        let error = LogChecker::new().check_file(Path::new("no/such.log")).unwrap_err();
        assert!(error.to_string().contains("no/such.log"), "{error}");
    }
}
