//! Rules on the text of any file: blanks at line ends, invisible characters, paths of one machine, postponed work.

use std::path::Path;

use crate::Violation;

/// Words that say "later" in code. Work that is left is an issue, not a comment. Split, so that this file passes.
const POSTPONED: &[&str] =
    &[concat!("FIX", "ME"), concat!("TO", "DO"), concat!("for ", "now"), concat!("XX", "X:")];

/// Paths that exist on one machine only.
const MACHINE_PATHS: &[&str] = &[concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/")];

/// Kinds of files whose comments are ours; prose may say those words.
const CODE: &[&str] = &["rs", "py", "sh", "toml", "proto", "yml", "yaml"];

/// Checks one text file.
pub fn check(path: &str, content: &str) -> Vec<Violation> {
    let extension = Path::new(path).extension().and_then(|e| e.to_str()).unwrap_or_default();
    let is_code = CODE.contains(&extension);
    let mut violations = Vec::new();
    for (index, line) in content.split('\n').enumerate() {
        let mut complain = |rule: &'static str, message: String| {
            violations.push(Violation { place: path.to_owned(), line: index + 1, rule, message });
        };
        // A patch marks an empty line of its context by a blank.
        if line.ends_with([' ', '\t']) && extension != "patch" {
            complain("trailing-blank", "ends with blanks; remove them".into());
        }
        if let Some(bad) = line.chars().find(|c| is_invisible(*c)) {
            complain(
                "invisible",
                format!("has the invisible character U+{:04X}; write it as an escape", u32::from(bad)),
            );
        }
        if let Some(found) = MACHINE_PATHS.iter().find(|found| has_absolute(line, found)) {
            complain(
                "machine-path",
                format!("names `{found}`, a path of one machine; take it from the environment"),
            );
        }
        if is_code && let Some(word) = POSTPONED.iter().find(|word| has_word(line, word)) {
            complain("postponed", format!("says `{word}`; do it, or file an issue and drop the comment"));
        }
    }
    if !content.is_empty() && !content.ends_with('\n') {
        let line = content.lines().count();
        let message = "does not end with a line feed; add one".into();
        violations.push(Violation { place: path.to_owned(), line, rule: "last-line", message });
    }
    violations
}

/// Control characters, and those that reorder or hide text. A joiner (U+200D) is part of emoji and may stay.
fn is_invisible(c: char) -> bool {
    let hidden =
        ['\u{200b}', '\u{200e}', '\u{200f}', '\u{2028}', '\u{2029}', '\u{2060}', '\u{feff}', '\u{ad}'];
    let reordering = matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    (c.is_control() && c != '\t') || reordering || hidden.contains(&c)
}

/// Whether `path` stands in the line as the start of an absolute path.
fn has_absolute(line: &str, path: &str) -> bool {
    line.match_indices(path).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        before.is_none_or(|c| !c.is_alphanumeric() && !"._-~}/".contains(c))
    })
}

/// Whether the words stand in the line by themselves; the capitals of `word` matter only if it has any.
fn has_word(line: &str, word: &str) -> bool {
    let line = if word.chars().any(char::is_uppercase) { line.to_owned() } else { line.to_lowercase() };
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + word.len()..].chars().next();
        let part_of_word = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
        !part_of_word(before) && !part_of_word(after)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(path: &str, content: &str) -> Vec<(usize, &'static str)> {
        check(path, content).into_iter().map(|v| (v.line, v.rule)).collect()
    }

    #[test]
    fn blanks_at_the_end_of_a_line_are_found() {
        assert_eq!(rules("a.md", "fine\nbad \nbad\t\n"), [(2, "trailing-blank"), (3, "trailing-blank")]);
        assert_eq!(rules("a.patch", " \n"), []);
    }

    #[test]
    fn a_missing_last_line_feed_is_found() {
        assert_eq!(rules("a.md", "one\ntwo"), [(2, "last-line")]);
        assert_eq!(rules("empty", ""), []);
    }

    #[test]
    fn control_and_reordering_characters_are_found() {
        for bad in ['\u{7}', '\r', '\u{85}', '\u{202e}', '\u{feff}', '\u{200b}'] {
            assert_eq!(rules("a.rs", &format!("let a{bad}b;\n")), [(1, "invisible")], "{bad:?}");
        }
        assert_eq!(rules("a.rs", "\tlet a = \"é 👩\u{200d}💻\";\n"), []);
    }

    #[test]
    fn paths_of_one_machine_are_found_and_relative_ones_are_not() {
        for path in MACHINE_PATHS {
            assert_eq!(rules("a.sh", &format!("cd {path}x\n")), [(1, "machine-path")]);
            assert_eq!(rules("a.sh", &format!("cd \"{path}x\"\n")), [(1, "machine-path")]);
            assert_eq!(rules("a.sh", &format!("cd a{path}x $A.{path} ~{path}\n")), []);
        }
    }

    #[test]
    fn postponed_work_is_found_in_code_and_not_in_prose() {
        for word in POSTPONED {
            assert_eq!(rules("a.rs", &format!("// {word} later\n")), [(1, "postponed")], "{word}");
            assert_eq!(rules("a.md", &format!("{word} later\n")), []);
        }
        let capital = concat!("For ", "now, this.\n");
        assert_eq!(rules("a.py", capital), [(1, "postponed")]);
        let inside = format!("// x{}y and {}here\n", POSTPONED[0], POSTPONED[2]);
        assert_eq!(rules("a.rs", &inside), []);
    }
}
