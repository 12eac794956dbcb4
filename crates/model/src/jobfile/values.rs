//! Single values of a job file: each reads a node or a text, checks its type and range, and says what it expected.

use crate::{PlacementPolicy, Profile, Signal, SignalTarget, Span, Timestamp, Usd};

use super::error::{Fault, FaultKind, Place, shown};
use super::keys::nearest;
use super::yaml::{Kind, Node};

/// A signal by name, with or without `SIG`.
///
/// # Errors
/// If it is not one of the signals a job may ask for; the text names them.
pub fn parse_signal(text: &str) -> Result<Signal, String> {
    let upper = text.trim().to_ascii_uppercase();
    match upper.strip_prefix("SIG").unwrap_or(&upper) {
        "USR1" => Ok(Signal::Usr1),
        "USR2" => Ok(Signal::Usr2),
        "TERM" => Ok(Signal::Term),
        "INT" => Ok(Signal::Int),
        "HUP" => Ok(Signal::Hup),
        _ => Err(format!("expected a signal: USR1, USR2, TERM, INT or HUP, found {}", shown(text))),
    }
}

/// A placement policy by name.
///
/// # Errors
/// If there is no such policy; the text names them.
pub fn parse_policy(text: &str) -> Result<PlacementPolicy, String> {
    match text.trim().to_ascii_lowercase().replace('_', "-").as_str() {
        "spot-first" => Ok(PlacementPolicy::SpotFirst),
        "spot-only" => Ok(PlacementPolicy::SpotOnly),
        "on-demand" => Ok(PlacementPolicy::OnDemand),
        _ => Err(format!("expected spot-first, spot-only or on-demand, found {}", shown(text))),
    }
}

/// A time as Slurm writes it: `MIN`, `MIN:SEC`, `H:M:S`, `D-H`, `D-H:M`, `D-H:M:S`; `None` for no limit
/// (`0`, `UNLIMITED`, `INFINITE`).
///
/// # Errors
/// If it has another form, or a part of more than eight digits.
pub fn parse_slurm_time(text: &str) -> Result<Option<Span>, String> {
    let bad = || format!("expected a time such as 30, 90:00, 12:00:00 or 2-12:00:00, found {}", shown(text));
    let text = text.trim();
    if matches!(text.to_ascii_uppercase().as_str(), "0" | "UNLIMITED" | "INFINITE") {
        return Ok(None);
    }
    let (days, rest) = match text.split_once('-') {
        Some((days, rest)) => (Some(digits(days).ok_or_else(bad)?), rest),
        None => (None, text),
    };
    let parts = rest.split(':').map(digits).collect::<Option<Vec<u64>>>().ok_or_else(bad)?;
    let (h, m, s) = match (days.is_some(), parts.as_slice()) {
        (true, [h]) => (*h, 0, 0),
        (true, [h, m]) => (*h, *m, 0),
        (false, [m]) => (0, *m, 0),
        (false, [m, s]) => (0, *m, *s),
        (_, [h, m, s]) => (*h, *m, *s),
        _ => return Err(bad()),
    };
    // Each part has at most eight digits, so that none of this can overflow.
    let secs = days.unwrap_or(0) * 86_400 + h * 3600 + m * 60 + s;
    Ok(if secs == 0 { None } else { Some(Span::secs(secs)) })
}

/// A moment: RFC 3339 with an offset, `now`, or a length of time from now such as `+2h` or `now+2h`.
///
/// # Errors
/// If it has another form or lies before 1970.
pub fn parse_moment(text: &str, now: Timestamp) -> Result<Timestamp, String> {
    let trimmed = text.trim();
    let later = trimmed.strip_prefix("now").unwrap_or(trimmed);
    if later.is_empty() && !trimmed.is_empty() {
        return Ok(now);
    }
    if let Some(span) = later.strip_prefix('+') {
        return span.parse::<Span>().map(|span| now + span);
    }
    trimmed
        .parse::<jiff::Timestamp>()
        .ok()
        .and_then(|t| u64::try_from(t.as_millisecond()).ok())
        .map(Timestamp)
        .ok_or_else(|| {
            format!("expected a moment such as 2027-01-31T18:00:00Z or now+2h, found {}", shown(text))
        })
}

/// A number of CPUs, or of GiB of memory, as a lower bound: `4`, `4+`; memory also `16GB`, `16GiB`, `512MB`, `1TB`.
/// A fraction is rounded up.
pub(super) fn parse_at_least(text: &str, units: &[(&str, f64)]) -> Option<u32> {
    // Beyond any node; keeps the arithmetic in range.
    const MOST: f64 = 1_000_000.0;
    let lower = text.trim().to_ascii_lowercase();
    let number = lower.strip_suffix('+').unwrap_or(&lower).trim_end();
    let digits = number.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(number.len());
    let unit = number[digits..].trim();
    let factor = if unit.is_empty() { 1.0 } else { units.iter().find(|(name, _)| *name == unit)?.1 };
    let value = number[..digits].parse::<f64>().ok()? * factor;
    (value > 0.0 && value <= MOST).then(|| value.ceil() as u32)
}

/// Units of `memory`, in GiB. As in SkyPilot, `GB` is taken as GiB.
pub(super) const MEMORY_UNITS: &[(&str, f64)] = &[
    ("g", 1.0),
    ("gb", 1.0),
    ("gib", 1.0),
    ("m", 1.0 / 1024.0),
    ("mb", 1.0 / 1024.0),
    ("mib", 1.0 / 1024.0),
    ("t", 1024.0),
    ("tb", 1024.0),
    ("tib", 1024.0),
];

/// Any scalar as text. NUL is refused: no command line, variable or path can carry it.
pub(super) fn text<'n>(path: &str, node: &'n Node) -> Result<&'n str, Fault> {
    match &node.kind {
        Kind::Scalar { text, .. } if text.contains('\0') => Err(Fault::invalid(
            node.at,
            format!("`{path}`: the text holds a NUL character"),
            "remove it: a command, a variable or a path cannot carry it",
        )),
        Kind::Scalar { text, .. } => Ok(text),
        Kind::Seq(_) | Kind::Map(_) => Err(expected(path, "text", node)),
    }
}

/// Text of one line, not empty, of at most `max` characters, without control characters.
pub(super) fn line<'n>(path: &str, node: &'n Node, max: usize) -> Result<&'n str, Fault> {
    let value = text(path, node)?;
    let problem =
        |what: String| Fault::invalid(node.at, format!("`{path}` {what}"), "use a short text of one line");
    let count = value.chars().count();
    if value.trim().is_empty() {
        return Err(problem("is empty".into()));
    }
    if count > max {
        return Err(problem(format!("has {count} characters, more than {max}")));
    }
    // U+2028 and U+2029 break lines as well, in many terminals and in JavaScript.
    match value.chars().find(|c| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}')) {
        Some(c) => {
            Err(problem(format!("holds the control character {}: {}", c.escape_default(), shown(value))))
        }
        None => Ok(value),
    }
}

/// Parses text with a function that says what it expected.
pub(super) fn parsed<T>(
    path: &str,
    node: &Node,
    parse: impl FnOnce(&str) -> Result<T, String>,
) -> Result<T, Fault> {
    parse(text(path, node)?).map_err(|why| Fault::invalid(node.at, format!("`{path}`: {why}"), ""))
}

/// A whole number within a range.
pub(super) fn whole<T: TryFrom<i64>>(path: &str, node: &Node, least: i64, most: i64) -> Result<T, Fault> {
    let wanted = || expected(path, &format!("a whole number from {least} to {most}"), node);
    let value = text(path, node)?.trim().replace('_', "").parse::<i64>().map_err(|_| wanted())?;
    if !(least..=most).contains(&value) {
        return Err(wanted());
    }
    T::try_from(value).map_err(|_| wanted())
}

/// `true` or `false`, also in YAML 1.1's spellings, which SkyPilot's files use.
pub(super) fn truth(path: &str, node: &Node) -> Result<bool, Fault> {
    match text(path, node)?.to_ascii_lowercase().as_str() {
        "true" | "yes" | "on" => Ok(true),
        "false" | "no" | "off" => Ok(false),
        _ => Err(expected(path, "true or false", node)),
    }
}

/// A length of time that is not zero.
pub(super) fn span(path: &str, node: &Node) -> Result<Span, Fault> {
    match text(path, node)?.parse::<Span>() {
        Ok(span) if span > Span::ZERO => Ok(span),
        Ok(_) => Err(expected(path, "a length of time above zero", node)),
        Err(_) => Err(expected(path, "a length of time such as 30s, 10m, 2h, 1h30m or 0.5h", node)),
    }
}

/// An amount of money above zero.
pub(super) fn money(path: &str, node: &Node) -> Result<Usd, Fault> {
    match text(path, node)?.parse::<Usd>() {
        Ok(amount) if amount > Usd::ZERO => Ok(amount),
        _ => Err(expected(path, "an amount of US dollars above zero, such as 25 or 0.9731", node)),
    }
}

pub(super) fn policy(path: &str, node: &Node) -> Result<PlacementPolicy, Fault> {
    const NAMES: [&str; 3] = ["spot-first", "spot-only", "on-demand"];
    let word = text(path, node)?;
    if word == "deadline" {
        return Err(Fault::new(
            FaultKind::Unsupported,
            node.at,
            format!("`{path}: deadline` is not supported by this version"),
            "use spot-first, spot-only, or on-demand where an interruption would cost the deadline",
        ));
    }
    parse_policy(word)
        .map_err(|why| Fault::invalid(node.at, format!("`{path}`: {why}"), did_you_mean(word, &NAMES)))
}

pub(super) fn signal_target(path: &str, node: &Node) -> Result<SignalTarget, Fault> {
    match text(path, node)? {
        "ranks" => Ok(SignalTarget::Ranks),
        "launcher" => Ok(SignalTarget::Launcher),
        "all" => Ok(SignalTarget::All),
        _ => Err(expected(path, "ranks, launcher or all", node)),
    }
}

pub(super) fn profile(path: &str, node: &Node) -> Result<Profile, Fault> {
    match text(path, node)? {
        "generic" => Ok(Profile::Generic),
        "rename" => Ok(Profile::Rename),
        "orbax" => Ok(Profile::Orbax),
        _ => Err(expected(path, "generic, rename or orbax", node)),
    }
}

/// The items of a list; a single scalar is a list of one.
pub(super) fn items<'n>(path: &str, node: &'n Node, max: usize) -> Result<&'n [Node], Fault> {
    let list = match &node.kind {
        Kind::Seq(list) => list.as_slice(),
        Kind::Scalar { .. } => std::slice::from_ref(node),
        Kind::Map(_) => return Err(expected(path, "a list", node)),
    };
    if list.len() > max {
        return Err(Fault::invalid(
            node.at,
            format!("`{path}` has {} items, more than {max}", list.len()),
            "make the list shorter",
        ));
    }
    Ok(list)
}

/// A path or glob that stays below a directory.
pub(super) fn relative<'n>(path: &str, node: &'n Node) -> Result<&'n str, Fault> {
    // The longest path that Linux takes.
    const PATH_MAX: usize = 4096;
    let value = line(path, node, PATH_MAX)?;
    if value.starts_with(['/', '~']) || value.split('/').any(|part| part == "..") || value.contains("://") {
        return Err(Fault::invalid(
            node.at,
            format!("`{path}`: expected a path below its directory, found {}", shown(value)),
            "write it relative, without `..`",
        ));
    }
    Ok(value)
}

/// The error for a value of another type or range.
pub(super) fn expected(path: &str, what: &str, node: &Node) -> Fault {
    let hint = match &node.kind {
        Kind::Seq(_) | Kind::Map(_) if what == "text" => format!("write one value after `{}:`", last(path)),
        Kind::Scalar { .. } if what.starts_with("keys") => {
            format!("put the keys on the lines below `{}:`, indented", last(path))
        }
        _ => String::new(),
    };
    Fault::invalid(node.at, format!("`{path}`: expected {what}, found {}", node.what()), hint)
}

pub(super) fn did_you_mean(word: &str, known: &[&str]) -> String {
    nearest(word, known.iter().copied()).map(|near| format!("did you mean `{near}`?")).unwrap_or_default()
}

/// The error for a text above a limit.
pub(super) fn too_long(at: Place, what: &str, bytes: usize, limit: usize, hint: &str) -> Fault {
    Fault::invalid(at, format!("{what} has {bytes} bytes, more than the limit of {limit}"), hint)
}

fn last(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

/// Up to eight digits.
fn digits(text: &str) -> Option<u64> {
    const DIGITS_MAX: usize = 8;
    let plain = !text.is_empty() && text.len() <= DIGITS_MAX && text.bytes().all(|b| b.is_ascii_digit());
    plain.then(|| text.parse().ok()).flatten()
}
