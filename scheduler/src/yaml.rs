//! Reads YAML, and says what is wrong with it in one line: `FILE:LINE:COLUMN: what was expected; what to do`.

use std::path::Path;

use serde::de::DeserializeOwned;
use serde_saphyr::{Error, MessageFormatter as _, UserMessageFormatter};

/// Reads `text` of `path`; the error is the whole message.
pub(crate) fn parse<T: DeserializeOwned>(path: &Path, text: &str) -> Result<T, String> {
    serde_saphyr::from_str(text).map_err(|error| {
        let at = error.location().map(|at| (at.line(), at.column()));
        at_place(path, at, &said(error.without_snippet()))
    })
}

/// `what` about the key `name` of a file that could be read: its place is where that key is first.
pub(crate) fn at_key(path: &Path, text: &str, name: &str, what: &str) -> String {
    at_place(path, place_of(text, name), what)
}

/// Text of the file as part of a message: no line break or escape sequence of it gets to a terminal.
pub(crate) fn one_line(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}

fn at_place(path: &Path, at: Option<(u64, u64)>, what: &str) -> String {
    match at.filter(|(line, _)| *line > 0) {
        Some((line, column)) => format!("{}:{line}:{column}: {what}", path.display()),
        None => format!("{}: {what}", path.display()),
    }
}

/// The mistake in our words; those of the library where there are none.
fn said(error: &Error) -> String {
    match error {
        Error::SerdeUnknownField { field, expected, .. } => {
            format!("unknown key `{}`: expected {}; correct or remove it", one_line(field), one_of(expected))
        }
        Error::SerdeUnknownVariant { variant, expected, .. } => {
            format!("`{}`: expected {}; correct it", one_line(variant), one_of(expected))
        }
        Error::SerdeMissingField { field, .. } => format!("expected the key `{field}`; add it"),
        Error::DuplicateMappingKey { key, .. } => {
            let key = key.as_deref().map_or_else(String::new, |key| format!(" `{}`", one_line(key)));
            format!("the key{key} is here a second time: expected each key once; keep one of them")
        }
        Error::InvalidScalar { ty, .. } => format!("expected {}; correct the value", kind(ty)),
        Error::Unexpected { expected, .. } => format!("expected {}; correct the value", kind(expected)),
        Error::SerdeInvalidType { unexpected, expected, .. }
        | Error::SerdeInvalidValue { unexpected, expected, .. } => {
            format!("{}: expected {}; correct the value", one_line(unexpected), one_line(expected))
        }
        other => {
            let text = UserMessageFormatter.format_message(other);
            format!("{}: expected YAML; correct this line", one_line(&text))
        }
    }
}

fn one_of(names: &[&str]) -> String {
    match names {
        [] => "no key at all".to_owned(),
        [one] => format!("`{one}`"),
        several => format!("one of {}", several.join(", ")),
    }
}

fn kind(ty: &str) -> String {
    match ty {
        "u8" | "u16" | "u32" | "u64" | "u128" => "a whole number, not below 0",
        "i8" | "i16" | "i32" | "i64" | "i128" => "a whole number",
        "boolean" | "bool" => "true or false",
        "floating point" | "f32" | "f64" => "a number",
        "mapping start" => "keys with values, such as `key: value`",
        "sequence start" => "a list",
        "string scalar" => "text",
        other => other,
    }
    .to_owned()
}

/// Line and column, from 1, of the first key with this name.
fn place_of(text: &str, name: &str) -> Option<(u64, u64)> {
    let key = format!("{name}:");
    (1..).zip(text.lines()).find_map(|(line, content)| {
        let code = content.split('#').next().unwrap_or_default();
        let found = code.match_indices(&key).find(|(at, _)| {
            !code[..*at].ends_with(|c: char| c.is_alphanumeric() || matches!(c, '_' | '-'))
        })?;
        Some((line, code[..found.0].chars().count() as u64 + 1))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_found_where_it_stands_alone() {
        let text = "# node_ttl: 1\nmy_node_ttl: 2\nè: {node_ttl: 3}\n";
        assert_eq!(place_of(text, "node_ttl"), Some((3, 5)));
        assert_eq!(place_of(text, "ttl"), None);
    }
}
