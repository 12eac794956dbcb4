//! Users: names, roles, and what proves who they are. Tokens are kept as keyed hashes only.

use std::fmt;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::config::ClusterSecret;

/// Every token begins so, which lets scanners of leaked secrets find it.
pub const TOKEN_PREFIX: &str = "spotq_";
/// More are no users of one cluster, and each request looks at all.
const USERS_MAX: usize = 10_000;

/// What a user may do; each may do what those before it may.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Sees states and money.
    Viewer,
    /// Submits, and acts on jobs of the same name.
    User,
    /// Acts on every job.
    Operator,
    /// Sees who may do what, too.
    Admin,
}

impl Role {
    pub const ALL: [Role; 4] = [Role::Viewer, Role::User, Role::Operator, Role::Admin];

    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Viewer => "viewer",
            Role::User => "user",
            Role::Operator => "operator",
            Role::Admin => "admin",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Role {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Role::ALL
            .into_iter()
            .find(|role| role.as_str() == text)
            .ok_or_else(|| format!("`{text}` is no role: expected viewer, user, operator or admin"))
    }
}

/// One user. Holds no secret: a token is here as its hash.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct User {
    pub name: String,
    pub role: Role,
    /// Keyed hash of the token, in hex.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    /// Hash of the client certificate, in hex.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<String>,
}

/// Why the users cannot be used or changed.
#[derive(Debug, thiserror::Error)]
pub enum UserError {
    #[error("{path}: {detail}; restore it from a backup, or correct it", path = path.display())]
    File { path: PathBuf, detail: String },
    #[error("a user named `{0}` exists; remove it first with `spotqd user remove {0}`")]
    Exists(String),
    #[error("there is no user `{0}`; `spotqd user list` lists all")]
    Unknown(String),
    #[error("`{0}` is the last admin; add another first with `spotqd user add NAME --role admin`")]
    LastAdmin(String),
    #[error("`{0}` is no user name: expected 1 to 64 of a-z A-Z 0-9 . _ - @")]
    Name(String),
    #[error("there are {USERS_MAX} users, which is the most; remove some")]
    TooMany,
}

/// All users of a cluster.
#[derive(Clone)]
pub struct Users {
    all: Vec<User>,
    key: [u8; 32],
}

/// Only names: hashes are of no use in a log.
impl fmt::Debug for Users {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.all.iter().map(|user| &user.name)).finish()
    }
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OnDisk {
    users: Vec<User>,
}

impl Users {
    /// Nobody.
    #[must_use]
    pub fn none(secret: &ClusterSecret) -> Self {
        Users { all: Vec::new(), key: secret.purpose("user tokens") }
    }

    /// Where the users of a data directory are.
    #[must_use]
    pub fn path(data: &Path) -> PathBuf {
        data.join("users.json")
    }

    /// Reads the users; none if there is no file.
    ///
    /// # Errors
    /// The file cannot be read or understood.
    pub fn load(data: &Path, secret: &ClusterSecret) -> Result<Self, UserError> {
        let path = Users::path(data);
        let fail = |detail: String| UserError::File { path: path.clone(), detail };
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Users::none(secret)),
            Err(error) => return Err(fail(error.to_string())),
        };
        let disk: OnDisk = serde_json::from_slice(&text).map_err(|e| fail(e.to_string()))?;
        Ok(Users { all: disk.users, ..Users::none(secret) })
    }

    /// Writes all, so that a crash leaves either the old file or the new one.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self, data: &Path) -> Result<(), UserError> {
        let path = Users::path(data);
        let fail = |error: std::io::Error| UserError::File { path: path.clone(), detail: error.to_string() };
        let text = serde_json::to_vec_pretty(&OnDisk { users: self.all.clone() })
            .map_err(|e| UserError::File { path: path.clone(), detail: e.to_string() })?;
        replace(&path, &text).map_err(fail)
    }

    #[must_use]
    pub fn all(&self) -> &[User] {
        &self.all
    }

    /// Adds a user with what proves who it is.
    ///
    /// # Errors
    /// The name is taken or none.
    pub fn add(
        &mut self,
        name: &str,
        role: Role,
        token: Option<&str>,
        certificate: Option<&[u8]>,
    ) -> Result<(), UserError> {
        let good = |c: char| c.is_ascii_alphanumeric() || ".-_@".contains(c);
        if name.is_empty() || name.len() > 64 || !name.chars().all(good) {
            return Err(UserError::Name(name.escape_debug().take(80).collect()));
        }
        if self.all.iter().any(|user| user.name == name) {
            return Err(UserError::Exists(name.to_owned()));
        }
        if self.all.len() >= USERS_MAX {
            return Err(UserError::TooMany);
        }
        self.all.push(User {
            name: name.to_owned(),
            role,
            token: token.map(|token| self.hash(token.as_bytes()).to_hex().to_string()),
            certificate: certificate.map(|der| self.hash(der).to_hex().to_string()),
        });
        Ok(())
    }

    /// Removes a user; its token and certificate are worth nothing from then on.
    ///
    /// # Errors
    /// There is none, or nobody could manage the cluster afterwards.
    pub fn remove(&mut self, name: &str) -> Result<(), UserError> {
        let at = self.all.iter().position(|user| user.name == name);
        let at = at.ok_or_else(|| UserError::Unknown(name.escape_debug().take(80).collect()))?;
        let admins = self.all.iter().filter(|user| user.role == Role::Admin).count();
        if self.all[at].role == Role::Admin && admins == 1 {
            return Err(UserError::LastAdmin(name.to_owned()));
        }
        self.all.remove(at);
        Ok(())
    }

    /// The user of this name.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<&User> {
        self.all.iter().find(|user| user.name == name)
    }

    /// Whose token this is. Looks at all users, so that the time says nothing about who exists.
    #[must_use]
    pub fn by_token(&self, token: &str) -> Option<&User> {
        self.find(self.hash(token.as_bytes()), |user| user.token.as_deref())
    }

    /// Whose certificate this is, in DER. That it is signed by our CA was checked in the handshake.
    #[must_use]
    pub fn by_certificate(&self, der: &[u8]) -> Option<&User> {
        self.find(self.hash(der), |user| user.certificate.as_deref())
    }

    fn find(&self, shown: blake3::Hash, kept: impl Fn(&User) -> Option<&str>) -> Option<&User> {
        let mut found = None;
        for user in &self.all {
            // `==` of hashes takes the same time wherever they differ.
            if kept(user).and_then(|hex| blake3::Hash::from_hex(hex).ok()).is_some_and(|hash| hash == shown) {
                found = Some(user);
            }
        }
        found
    }

    fn hash(&self, shown: &[u8]) -> blake3::Hash {
        blake3::keyed_hash(&self.key, shown)
    }
}

/// Writes a file for its owner alone in one step.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let new = path.with_extension("new");
    let mut file =
        std::fs::OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&new, path)?;
    match path.parent() {
        Some(dir) => std::fs::File::open(dir)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn users() -> Users {
        Users::none(&ClusterSecret::new([1; 32]))
    }

    #[test]
    fn a_token_finds_its_user_and_no_other_does() {
        let mut users = users();
        users.add("ada", Role::Admin, Some("spotq_a"), None).unwrap();
        users.add("bob", Role::User, Some("spotq_b"), Some(b"der")).unwrap();
        assert_eq!(users.by_token("spotq_b").map(|user| user.name.as_str()), Some("bob"));
        assert_eq!(users.by_certificate(b"der").map(|user| user.name.as_str()), Some("bob"));
        assert_eq!(users.by_token(""), None);
        assert_eq!(users.by_token("spotq_c"), None);
        assert_eq!(users.by_certificate(b"other"), None);
        // A hash is no token.
        let kept = users.all()[1].token.clone().unwrap();
        assert_eq!(users.by_token(&kept), None);
        // Another cluster's hashes are of no use here.
        let other = Users { key: [9; 32], ..users };
        assert_eq!(other.by_token("spotq_b"), None);
    }

    #[test]
    fn names_are_unique_and_the_last_admin_stays() {
        let mut users = users();
        users.add("ada", Role::Admin, None, None).unwrap();
        assert!(matches!(users.add("ada", Role::User, None, None), Err(UserError::Exists(_))));
        for bad in ["", "a b", "ä", "a\n", &"x".repeat(65)] {
            assert!(matches!(users.add(bad, Role::User, None, None), Err(UserError::Name(_))), "{bad}");
        }
        assert!(matches!(users.remove("ada"), Err(UserError::LastAdmin(_))));
        assert!(matches!(users.remove("bob"), Err(UserError::Unknown(_))));
        users.add("bob", Role::Admin, None, None).unwrap();
        users.remove("ada").unwrap();
        assert_eq!(users.all().len(), 1);
    }
}
