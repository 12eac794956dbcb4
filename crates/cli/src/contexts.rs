//! The contexts that `spotq login` keeps: one file each, for its owner alone.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::ExpectedError;

/// A larger file is no context.
const BYTES_MAX: u64 = 1 << 20;
/// Names the context in use.
const CURRENT: &str = "current";

/// A scheduler and who we are there.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Context {
    pub server: String,
    pub ca_pem: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    /// Certificate and key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate_pem: Option<String>,
}

/// Only the address: the rest are secrets.
impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").field("server", &self.server).finish_non_exhaustive()
    }
}

/// The directory of contexts.
#[derive(Debug, Clone)]
pub struct Contexts {
    dir: PathBuf,
}

impl Contexts {
    #[must_use]
    pub fn new(dir: PathBuf) -> Self {
        Contexts { dir }
    }

    /// The name of the context in use.
    #[must_use]
    pub fn current(&self) -> Option<String> {
        let name = read(&self.dir.join(CURRENT)).ok()?;
        Some(name.trim().to_owned()).filter(|name| is_name(name))
    }

    /// The context of this name, if there is one.
    pub fn get(&self, name: &str) -> Result<Option<Context>, ExpectedError> {
        if !is_name(name) {
            return Ok(None);
        }
        let path = self.path(name);
        let text = match read(&path) {
            Ok(text) => text,
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok(None);
            }
            Err(e) => return Err(ExpectedError::reading(&path, &e)),
        };
        // The text of the error might quote the token.
        serde_json::from_str(&text).map(Some).map_err(|_| {
            ExpectedError::BadInput(format!(
                "{} is damaged\n  hint: log in again with `spotq login --name {name}`",
                path.display()
            ))
        })
    }

    /// The context of this address: that in use, or else the first by name.
    pub fn by_server(&self, server: &str) -> Result<Option<Context>, ExpectedError> {
        for name in self.current().into_iter().chain(self.names()) {
            if let Some(context) = self.get(&name)?.filter(|context| context.server == server) {
                return Ok(Some(context));
            }
        }
        Ok(None)
    }

    #[must_use]
    pub fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries
            .filter_map(|entry| Some(entry.file_name().to_str()?.strip_suffix(".json")?.to_owned()))
            .collect();
        names.sort();
        names
    }

    /// Keeps a context, in place of one of this name, and makes it the one in use.
    pub fn keep(&self, name: &str, context: &Context) -> Result<(), ExpectedError> {
        if !is_name(name) {
            return Err(ExpectedError::BadInput(format!(
                "`{}` is no name of a context\n  hint: use a-z, A-Z, 0-9, - and _",
                crate::out::plain(name)
            )));
        }
        let path = self.path(name);
        let text = serde_json::to_string(context).map_err(|e| ExpectedError::Internal(e.to_string()))?;
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir);
        made.and_then(|()| write(&path, &text)).map_err(|e| ExpectedError::writing(&path, &e))?;
        self.make_current(name)
    }

    pub fn make_current(&self, name: &str) -> Result<(), ExpectedError> {
        let path = self.dir.join(CURRENT);
        write(&path, name).map_err(|e| ExpectedError::writing(&path, &e))
    }

    /// Whether there was one.
    pub fn remove(&self, name: &str) -> Result<bool, ExpectedError> {
        let path = self.path(name);
        if !is_name(name) || !path.exists() {
            return Ok(false);
        }
        fs::remove_file(&path).map_err(|e| ExpectedError::writing(&path, &e))?;
        if self.current().as_deref() == Some(name) {
            let current = self.dir.join(CURRENT);
            fs::remove_file(&current).map_err(|e| ExpectedError::writing(&current, &e))?;
        }
        Ok(true)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.json"))
    }
}

fn is_name(name: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    !name.is_empty() && name.len() <= 64 && name.chars().all(good)
}

fn read(path: &Path) -> io::Result<String> {
    use std::io::Read as _;
    let mut text = String::new();
    fs::File::open(path)?.take(BYTES_MAX).read_to_string(&mut text)?;
    Ok(text)
}

/// In one step, for its owner alone.
fn write(path: &Path, text: &str) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut file = fs::OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&new)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&new, path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn context(server: &str) -> Context {
        Context {
            server: server.into(),
            ca_pem: "ca".into(),
            token: Some("hush".into()),
            certificate_pem: None,
        }
    }

    #[test]
    fn a_context_is_its_owners_alone_and_the_newest_is_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let contexts = Contexts::new(dir.path().join("spotq/contexts"));
        assert_eq!((contexts.current(), contexts.names()), (None, vec![]));
        contexts.keep("lab", &context("https://lab:1")).unwrap();
        contexts.keep("prod", &context("https://prod:1")).unwrap();
        assert_eq!(contexts.current().as_deref(), Some("prod"));
        assert_eq!(contexts.get("lab").unwrap(), Some(context("https://lab:1")));
        assert_eq!(contexts.by_server("https://lab:1").unwrap(), Some(context("https://lab:1")));
        assert_eq!(contexts.by_server("https://lab:2").unwrap(), None);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&contexts.path("lab")), mode(&contexts.dir)), (0o600, 0o700));
        assert!(contexts.remove("prod").unwrap());
        assert_eq!((contexts.current(), contexts.names()), (None, vec!["lab".to_owned()]));
        assert!(!contexts.remove("prod").unwrap());
    }

    #[test]
    fn names_stay_in_the_directory_and_damage_quotes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let contexts = Contexts::new(dir.path().to_owned());
        for bad in ["", "../x", "a/b", "a.b", "ä"] {
            assert!(contexts.keep(bad, &context("https://h:1")).is_err(), "{bad}");
            assert_eq!(contexts.get(bad).unwrap(), None);
        }
        fs::write(contexts.path("lab"), r#"{"server": 3, "token": "hush"}"#).unwrap();
        let error = contexts.get("lab").unwrap_err().to_string();
        assert!(error.contains("log in again") && !error.contains("hush"), "{error}");
        assert!(!format!("{:?}", context("s")).contains("hush"));
    }
}
