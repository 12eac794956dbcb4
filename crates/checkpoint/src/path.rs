//! Names inside a checkpoint: relative, made of any bytes that Unix allows, and never leading out of it.
//!
//! Must never touch the file system: these are checks of names alone, used alike on push and on restore.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Linux's PATH_MAX: a longer path could not be created on restore.
pub const MAX_PATH_BYTES: usize = 4096;
/// Linux's NAME_MAX.
pub const MAX_NAME_BYTES: usize = 255;
/// Deeper trees than this are a mistake or an attack; frameworks use fewer than ten levels.
pub const MAX_DEPTH: usize = 64;

/// A relative path of one or more plain names. In JSON a string, or `{"base64": …}` if it is not UTF-8.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RelPath(Vec<u8>);

/// The target of a symbolic link, checked not to lead out of the checkpoint. In JSON like [`RelPath`].
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkTarget(Vec<u8>);

impl RelPath {
    /// Checks a relative path.
    ///
    /// # Errors
    /// Says what is wrong with an absolute, empty, too long or too deep path, or one with `.`, `..`, an empty
    /// name or a NUL byte in it.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self, String> {
        let bytes = bytes.into();
        check_length(&bytes)?;
        if bytes.starts_with(b"/") {
            return Err("it is absolute".to_owned());
        }
        let mut depth = 0;
        for name in bytes.split(|b| *b == b'/') {
            match name {
                b"" | b"." | b".." => return Err("it has an empty, `.` or `..` part".to_owned()),
                _ if name.len() > MAX_NAME_BYTES => {
                    return Err("a part of it is longer than 255 bytes".to_owned());
                }
                _ => depth += 1,
            }
        }
        if depth > MAX_DEPTH {
            return Err(format!("it is more than {MAX_DEPTH} levels deep"));
        }
        Ok(Self(bytes))
    }

    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    #[must_use]
    pub fn as_path(&self) -> &Path {
        Path::new(OsStr::from_bytes(&self.0))
    }

    /// The directory it is in; `None` at the top.
    #[must_use]
    pub fn parent(&self) -> Option<&[u8]> {
        self.0.iter().rposition(|b| *b == b'/').map(|at| &self.0[..at])
    }

    /// How many directories it is in.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.0.iter().filter(|b| **b == b'/').count()
    }
}

impl LinkTarget {
    /// Checks the target of a link that lies `depth` directories below the top of the checkpoint.
    ///
    /// `..` is allowed only at the start. After a name it could climb out through another link, which a check
    /// of the text alone cannot see.
    ///
    /// # Errors
    /// Says why a target is refused.
    pub fn new(bytes: impl Into<Vec<u8>>, depth: usize) -> Result<Self, String> {
        let target = Self::unchecked(bytes.into())?;
        target.check(depth)?;
        Ok(target)
    }

    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    #[must_use]
    pub fn as_path(&self) -> &Path {
        Path::new(OsStr::from_bytes(&self.0))
    }

    /// Says whether the target stays inside for a link at `depth`.
    pub(crate) fn check(&self, depth: usize) -> Result<(), String> {
        if self.0.starts_with(b"/") {
            return Err("it is a link to an absolute path; make it relative".to_owned());
        }
        let (mut ups, mut named) = (0, false);
        for name in self.0.split(|b| *b == b'/') {
            match name {
                b"" | b"." => {}
                b".." if named => {
                    return Err("it is a link with `..` after a name; write it without".to_owned());
                }
                b".." => ups += 1,
                _ => named = true,
            }
        }
        if ups > depth {
            return Err("it is a link that leads out of the directory".to_owned());
        }
        Ok(())
    }

    fn unchecked(bytes: Vec<u8>) -> Result<Self, String> {
        check_length(&bytes)?;
        Ok(Self(bytes))
    }
}

fn check_length(bytes: &[u8]) -> Result<(), String> {
    if bytes.is_empty() {
        return Err("it is empty".to_owned());
    }
    if bytes.len() > MAX_PATH_BYTES {
        return Err(format!("it is longer than {MAX_PATH_BYTES} bytes"));
    }
    if bytes.contains(&0) {
        return Err("it has a NUL byte in it".to_owned());
    }
    Ok(())
}

/// Prints without control characters, so that a hostile name cannot repaint a terminal.
fn show(bytes: &[u8], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    for c in String::from_utf8_lossy(bytes).chars() {
        if c.is_control() {
            write!(f, "{}", c.escape_default())?;
        } else {
            write!(f, "{c}")?;
        }
    }
    Ok(())
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Encoded {
    Text(String),
    #[serde(rename_all = "lowercase")]
    Bytes {
        base64: String,
    },
}

impl Encoded {
    fn of(bytes: &[u8]) -> Self {
        match std::str::from_utf8(bytes) {
            Ok(text) => Self::Text(text.to_owned()),
            Err(_) => Self::Bytes { base64: BASE64.encode(bytes) },
        }
    }

    fn bytes(self) -> Result<Vec<u8>, String> {
        match self {
            Self::Text(text) => Ok(text.into_bytes()),
            Self::Bytes { base64 } => BASE64.decode(base64).map_err(|e| format!("a name is not base64: {e}")),
        }
    }
}

impl fmt::Display for RelPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show(&self.0, f)
    }
}

impl fmt::Debug for RelPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show(&self.0, f)
    }
}

impl fmt::Debug for LinkTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show(&self.0, f)
    }
}

impl Serialize for RelPath {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        Encoded::of(&self.0).serialize(s)
    }
}

impl<'de> Deserialize<'de> for RelPath {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let bytes = Encoded::deserialize(d)?.bytes().map_err(serde::de::Error::custom)?;
        RelPath::new(bytes).map_err(|why| serde::de::Error::custom(format!("a path is refused: {why}")))
    }
}

impl Serialize for LinkTarget {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        Encoded::of(&self.0).serialize(s)
    }
}

impl<'de> Deserialize<'de> for LinkTarget {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let bytes = Encoded::deserialize(d)?.bytes().map_err(serde::de::Error::custom)?;
        LinkTarget::unchecked(bytes)
            .map_err(|why| serde::de::Error::custom(format!("a link is refused: {why}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_lead_out_are_refused() {
        for bad in ["", "/", "/etc/passwd", "..", "a/..", "a/../b", "./a", "a//b", "a/", "a/.", "a\0b"] {
            assert!(RelPath::new(bad).is_err(), "{bad:?}");
        }
        assert!(RelPath::new("x".repeat(256)).is_err());
        assert!(RelPath::new("x/".repeat(64) + "x").is_err());
        for good in ["a", "a/b", "...", "..a", "a b", "\u{e9}", "a\nb"] {
            assert!(RelPath::new(good).is_ok(), "{good:?}");
        }
    }

    #[test]
    fn links_that_lead_out_are_refused() {
        for (target, depth) in
            [("/etc", 3), ("..", 0), ("../../x", 1), ("a/..", 5), ("a/../../x", 2), ("", 1)]
        {
            assert!(LinkTarget::new(target, depth).is_err(), "{target:?} at depth {depth}");
        }
        for (target, depth) in
            [("a", 0), ("..", 1), ("../b/c", 1), ("./a//b", 0), ("./..//x", 1), ("../../x", 2)]
        {
            assert!(LinkTarget::new(target, depth).is_ok(), "{target:?} at depth {depth}");
        }
    }

    #[test]
    fn a_name_of_any_bytes_prints_in_one_line_without_control_characters() {
        let (path, target) = (RelPath::new("a\n\x1b[2J\u{e9}").unwrap(), LinkTarget::new("b\r", 0).unwrap());
        assert_eq!(format!("{path} {path:?} {target:?}"), "a\\n\\u{1b}[2J\u{e9} a\\n\\u{1b}[2J\u{e9} b\\r");
    }

    #[test]
    fn a_path_has_at_most_as_many_bytes_as_linux_takes() {
        assert!(LinkTarget::new("x".repeat(MAX_PATH_BYTES), 0).is_ok());
        assert!(LinkTarget::new("x".repeat(MAX_PATH_BYTES + 1), 0).is_err());
        assert!(RelPath::new("x".repeat(MAX_NAME_BYTES)).is_ok());
        assert!(RelPath::new("x/".repeat(MAX_DEPTH - 1) + "x").is_ok());
    }

    #[test]
    fn any_bytes_survive_json() {
        for bytes in [b"plain".to_vec(), b"\xff\xfe/\x80".to_vec(), b"base64:eA==".to_vec()] {
            let path = RelPath::new(bytes).unwrap();
            let json = serde_json::to_string(&path).unwrap();
            assert_eq!(serde_json::from_str::<RelPath>(&json).unwrap(), path);
        }
        assert!(serde_json::from_str::<RelPath>("\"../x\"").is_err());
        assert!(serde_json::from_str::<RelPath>("{\"base64\":\"Li4=\"}").is_err());
    }
}
