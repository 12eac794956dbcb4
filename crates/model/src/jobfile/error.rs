//! What is wrong with a job file, and where: errors, warnings and the source line with a caret.
//!
//! Text of the user is shortened and its control characters are escaped before it is shown; a message never
//! carries a whole file.

use std::fmt;

/// A job file, script or command that cannot be taken, sorted by what the caller can do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JobFileError {
    /// Not a text that could be a job at all: pass another file.
    #[error("{0}")]
    Unreadable(Problem),
    /// Not YAML: mend the syntax.
    #[error("{0}")]
    Syntax(Problem),
    /// A key or a value that means nothing: mend it at the given place.
    #[error("{0}")]
    Invalid(Problem),
    /// Understood, but beyond this version: ask for something else.
    #[error("{0}")]
    Unsupported(Problem),
}

impl JobFileError {
    /// What is wrong and where.
    #[must_use]
    pub fn problem(&self) -> &Problem {
        match self {
            JobFileError::Unreadable(p)
            | JobFileError::Syntax(p)
            | JobFileError::Invalid(p)
            | JobFileError::Unsupported(p) => p,
        }
    }
}

/// One thing that is wrong. Prints as `FILE:LINE:COL: message`, the source line with a caret, and a hint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    pub file: String,
    pub place: Place,
    pub message: String,
    /// What to do about it; may be empty.
    pub hint: String,
    /// The source line with a caret below the column; empty where there is no place.
    pub snippet: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", at(&self.file, self.place), self.message)?;
        if !self.snippet.is_empty() {
            write!(f, "\n{}", self.snippet)?;
        }
        if !self.hint.is_empty() {
            write!(f, "\n  hint: {}", self.hint)?;
        }
        Ok(())
    }
}

/// A warning: something in the file that is understood and has no effect, or another one than elsewhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    pub file: String,
    pub place: Place,
    pub message: String,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", at(&self.file, self.place), self.message)
    }
}

/// Line and column in a file, both from 1; the column counts characters. Line 0: no place in particular.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Place {
    pub line: u32,
    pub column: u32,
}

impl Place {
    pub(super) const NONE: Place = Place { line: 0, column: 0 };
    /// On the command line, not in the file.
    pub(super) const OPTION: Place = Place { line: 0, column: 1 };
    pub(super) const START: Place = Place { line: 1, column: 1 };

    /// From counts that start at 1; beyond `u32` they stay at its end.
    pub(super) fn new(line: usize, column: usize) -> Place {
        let clamp = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Place { line: clamp(line), column: clamp(column) }
    }
}

/// An error before the file's name and text are put to it.
#[derive(Debug)]
pub(super) struct Fault {
    pub kind: FaultKind,
    pub at: Place,
    pub message: String,
    pub hint: String,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum FaultKind {
    Unreadable,
    Syntax,
    Invalid,
    Unsupported,
}

impl Fault {
    pub(super) fn new(
        kind: FaultKind,
        at: Place,
        message: impl Into<String>,
        hint: impl Into<String>,
    ) -> Fault {
        Fault { kind, at, message: message.into(), hint: hint.into() }
    }

    pub(super) fn invalid(at: Place, message: impl Into<String>, hint: impl Into<String>) -> Fault {
        Fault::new(FaultKind::Invalid, at, message, hint)
    }

    /// Adds the file's name and the source line.
    pub(super) fn in_file(self, file: &str, text: &str) -> JobFileError {
        let problem = Problem {
            file: if self.at == Place::OPTION { COMMAND_LINE.to_owned() } else { file_label(file) },
            place: self.at,
            message: self.message,
            hint: self.hint,
            snippet: snippet(text, self.at),
        };
        match self.kind {
            FaultKind::Unreadable => JobFileError::Unreadable(problem),
            FaultKind::Syntax => JobFileError::Syntax(problem),
            FaultKind::Invalid => JobFileError::Invalid(problem),
            FaultKind::Unsupported => JobFileError::Unsupported(problem),
        }
    }
}

/// Stands for the file's name where an option or an argument is wrong.
pub(super) const COMMAND_LINE: &str = "command line";

/// More warnings than this are counted, not listed: nobody reads the rest.
const NOTES_MAX: usize = 100;

/// Collects the warnings of one file.
#[derive(Debug)]
pub(super) struct Notes {
    file: String,
    list: Vec<Note>,
    left_out: usize,
}

impl Notes {
    pub(super) fn new(file: &str) -> Notes {
        Notes { file: file_label(file), list: Vec::new(), left_out: 0 }
    }

    pub(super) fn push(&mut self, at: Place, message: impl Into<String>) {
        if self.list.len() < NOTES_MAX {
            let file = if at == Place::OPTION { COMMAND_LINE } else { &self.file };
            self.list.push(Note { file: file.to_owned(), place: at, message: message.into() });
        } else {
            self.left_out += 1;
        }
    }

    /// As `push`, unless the file was told the same already: it may hold many jobs.
    pub(super) fn push_once(&mut self, at: Place, message: &str) {
        if !self.list.iter().any(|note| note.message == message) {
            self.push(at, message);
        }
    }

    pub(super) fn finish(mut self) -> Vec<Note> {
        self.list.sort_by_key(|note| note.place);
        if self.left_out > 0 {
            let message = format!("{} more warnings are left out", self.left_out);
            self.list.push(Note { file: self.file, place: Place::NONE, message });
        }
        self.list
    }
}

/// At most this much of a user's text is repeated in a message.
const SHOWN_MAX: usize = 60;

/// A user's text for a message: in backquotes, shortened, control characters escaped.
pub(super) fn shown(text: &str) -> String {
    let mut out = String::from("`");
    for (n, c) in text.chars().enumerate() {
        if n == SHOWN_MAX {
            out.push('…');
            break;
        }
        if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out.push('`');
    out
}

fn at(file: &str, place: Place) -> String {
    if place.line == 0 { file.to_owned() } else { format!("{file}:{}:{}", place.line, place.column) }
}

/// The file's name as shown: a name may hold any byte but `/` and NUL, and must not break the line.
fn file_label(file: &str) -> String {
    file.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}

/// So many characters of a source line are shown around the place; a line of a generated file can be a megabyte.
const SNIPPET_WIDTH: usize = 80;

fn snippet(text: &str, at: Place) -> String {
    let Some(line) = (at.line as usize).checked_sub(1).and_then(|n| text.lines().nth(n)) else {
        return String::new();
    };
    let column = (at.column as usize).saturating_sub(1);
    let skipped = column.saturating_sub(SNIPPET_WIDTH / 2);
    // A tab or a control character would move the caret away from its column.
    let window: String = line
        .chars()
        .skip(skipped)
        .take(SNIPPET_WIDTH)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    let (lead, indent) = if skipped > 0 { ("…", 1) } else { ("", 0) };
    let number = at.line.to_string();
    let blank = " ".repeat(number.len());
    let caret = " ".repeat(column - skipped + indent);
    format!("  {number} | {lead}{}\n  {blank} | {caret}^", window.trim_end())
}
