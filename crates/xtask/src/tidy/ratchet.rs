//! Sizes of files and functions, held by a list of exceptions that may only shrink.
//!
//! A line of the list is `PATH LINES` for a file or `PATH::FUNCTION LINES` for a function.

use std::collections::BTreeMap;

use anyhow::bail;

use crate::Violation;

/// A function that does not fit a screen is read in pieces.
pub const MAX_FUNCTION_LINES: usize = 70;
/// A file that is longer has more than one subject.
pub const MAX_FILE_LINES: usize = 600;

/// How long something is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Size {
    pub path: String,
    /// `None` for the file itself.
    pub function: Option<String>,
    pub line: usize,
    pub lines: usize,
}

impl Size {
    fn key(&self) -> String {
        self.function.as_ref().map_or_else(|| self.path.clone(), |name| format!("{}::{name}", self.path))
    }

    fn limit(&self) -> usize {
        if self.function.is_some() { MAX_FUNCTION_LINES } else { MAX_FILE_LINES }
    }
}

/// Reads the list: blank lines and those that start with `#` do not count.
///
/// # Errors
/// When a line is not a name and a number, or a name comes twice.
pub fn parse(list: &str) -> anyhow::Result<BTreeMap<String, usize>> {
    let mut exceptions = BTreeMap::new();
    for line in list.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let entry =
            line.rsplit_once(' ').and_then(|(key, lines)| Some((key.trim(), lines.parse::<usize>().ok()?)));
        let Some((key, lines)) = entry else {
            bail!(
                "the list of exceptions has `{line}`: expected a path or path::function and a number of lines"
            );
        };
        if exceptions.insert(key.to_owned(), lines).is_some() {
            bail!("the list of exceptions names `{key}` twice: keep one line");
        }
    }
    Ok(exceptions)
}

/// Holds sizes against their limits and the list, and the list against the sizes.
pub fn check(sizes: &[Size], exceptions: &BTreeMap<String, usize>) -> Vec<Violation> {
    // Functions of one name in a file share an entry; the longest counts.
    let mut longest: BTreeMap<String, &Size> = BTreeMap::new();
    for size in sizes {
        let entry = longest.entry(size.key()).or_insert(size);
        if size.lines > entry.lines {
            *entry = size;
        }
    }
    let mut violations: Vec<Violation> =
        longest.iter().filter_map(|(key, size)| judge(size, exceptions.get(key).copied())).collect();
    for key in exceptions.keys().filter(|key| !longest.contains_key(*key)) {
        let message = "is in the list of exceptions and nowhere else; remove the line".into();
        violations.push(Violation { place: key.clone(), line: 0, rule: "ratchet", message });
    }
    violations
}

fn judge(size: &Size, listed: Option<usize>) -> Option<Violation> {
    let (lines, limit) = (size.lines, size.limit());
    let what = size.function.as_ref().map_or_else(|| "the file".to_owned(), |name| format!("`{name}`"));
    let message = match listed {
        None if lines > limit => format!("{what} has {lines} lines, over {limit}; split it"),
        Some(listed) if lines > listed && lines > limit => {
            format!(
                "{what} has grown from {listed} to {lines} lines; what is in the list of exceptions may only shrink"
            )
        }
        Some(_) if lines <= limit => {
            format!("{what} is within {limit} lines again; remove its line from the list of exceptions")
        }
        Some(listed) if lines < listed => format!(
            "{what} has shrunk to {lines} lines; write {lines} for {listed} in the list of exceptions"
        ),
        None | Some(_) => return None,
    };
    Some(Violation { place: size.path.clone(), line: size.line, rule: "size", message })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(function: Option<&str>, lines: usize) -> Size {
        Size { path: "src/a.rs".into(), function: function.map(Into::into), line: 1, lines }
    }

    fn messages(sizes: &[Size], list: &str) -> Vec<String> {
        check(sizes, &parse(list).unwrap()).into_iter().map(|v| v.message).collect()
    }

    #[test]
    fn what_is_within_its_limit_passes() {
        assert_eq!(messages(&[size(None, 600), size(Some("f"), 70)], ""), [""; 0]);
    }

    #[test]
    fn what_is_over_its_limit_is_found() {
        let found = messages(&[size(None, 601), size(Some("f"), 71), size(Some("f"), 10)], "# none\n");
        assert_eq!(found.len(), 2);
        assert!(found.iter().all(|m| m.contains("split it")), "{found:?}");
    }

    #[test]
    fn an_exception_holds_at_its_number_and_may_only_shrink() {
        assert_eq!(messages(&[size(Some("f"), 90)], "src/a.rs::f 90"), [""; 0]);
        assert!(messages(&[size(Some("f"), 91)], "src/a.rs::f 90")[0].contains("grown"));
        assert!(messages(&[size(Some("f"), 80)], "src/a.rs::f 90")[0].contains("shrunk"));
        assert!(messages(&[size(Some("f"), 70)], "src/a.rs::f 90")[0].contains("remove its line"));
        assert!(messages(&[], "src/a.rs::f 90")[0].contains("nowhere else"));
    }

    #[test]
    fn a_malformed_list_is_an_error() {
        assert!(parse("src/a.rs many").is_err());
        assert!(parse("src/a.rs").is_err());
        assert!(parse("src/a.rs 700\nsrc/a.rs 701").is_err());
    }
}
