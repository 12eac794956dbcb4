//! Which worker may speak for a node: a join secret that counts once, then a short-lived identity.
//!
//! The first worker that shows a node's join secret binds the node to its own key, durably and before it is welcomed;
//! whoever shows the secret later without that key is refused. Everything else is derived from the cluster's secret,
//! so a restart of the scheduler forgets nothing.

use std::fmt;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use spotq_model::{NodeId, Span, Timestamp};
use spotq_proto::v1;

use crate::config::ClusterSecret;

/// How long an identity counts. It is renewed at half of it, so only a worker cut off for longer needs its key.
pub(crate) const IDENTITY_TTL: Span = Span::secs(3600);
/// Every identity begins so, which lets scanners of leaked secrets find it.
const IDENTITY_PREFIX: &str = "spotqw_";
/// A worker's key is 32 random bytes in hex; a shorter one could be guessed.
const WORKER_KEY_MIN: usize = 32;
const WORKER_KEY_MAX: usize = 256;

/// What a worker shows in its first message.
#[derive(Clone)]
pub(crate) struct Shown {
    pub join_secret: String,
    pub worker_key: String,
    pub identity: String,
}

impl fmt::Debug for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Shown(…)")
    }
}

/// A worker that may speak for its node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Admission {
    /// Bound to this lease: only the worker that joined first has its key.
    Bound { lease: String },
    /// A worker of an older version, which has no key.
    Unbound,
}

/// Whether workers without a key are taken, as those of an older version are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unbound {
    Taken,
    Refused,
}

/// Why a worker may not join.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refused {
    #[error("the join secret does not fit the node")]
    WrongSecret,
    #[error("the join secret of this node was used already, by another worker")]
    Used,
    #[error("the identity does not fit the node, or its worker's key does not")]
    WrongIdentity,
    #[error("this worker shows no key of its own; update it")]
    TooOld,
    #[error("noting which worker joined: {0}")]
    Disk(#[from] io::Error),
}

/// Which worker has joined for which node.
#[derive(Clone)]
pub(crate) struct Joins {
    dir: PathBuf,
    secret: ClusterSecret,
    unbound: Unbound,
}

impl fmt::Debug for Joins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Joins")
            .field("dir", &self.dir)
            .field("unbound", &self.unbound)
            .finish_non_exhaustive()
    }
}

impl Joins {
    pub(crate) fn new(data: &Path, secret: &ClusterSecret, unbound: Unbound) -> Self {
        Joins { dir: data.join("joins"), secret: secret.clone(), unbound }
    }

    /// Whether the worker is the one that may speak for `node`. Blocks on the disk at a node's first join.
    pub(crate) fn admit(&self, node: NodeId, shown: &Shown, now: Timestamp) -> Result<Admission, Refused> {
        let bound = self.bound(node)?;
        if !shown.identity.is_empty()
            && let Some(bound) = &bound
            && let Some(expires) = self.identity_expiry(node, bound, &shown.identity)
        {
            // One that has expired still says which worker it was given to, and the key that it is that one.
            let fresh = now < expires || self.fits(node, bound, &shown.worker_key);
            return if fresh { Ok(lease(bound)) } else { Err(Refused::WrongIdentity) };
        }
        if !self.secret.may_join(node, &shown.join_secret) {
            let known = shown.join_secret.is_empty() && !shown.identity.is_empty();
            return Err(if known { Refused::WrongIdentity } else { Refused::WrongSecret });
        }
        match bound {
            // Its welcome was lost, or its identity ran out while we were away.
            Some(bound) if self.fits(node, &bound, &shown.worker_key) => Ok(lease(&bound)),
            Some(_) => Err(Refused::Used),
            None if !(WORKER_KEY_MIN..=WORKER_KEY_MAX).contains(&shown.worker_key.len()) => {
                match self.unbound {
                    Unbound::Taken => Ok(Admission::Unbound),
                    Unbound::Refused => Err(Refused::TooOld),
                }
            }
            None => self.bind(node, &shown.worker_key),
        }
    }

    /// A new identity for the worker of this lease.
    pub(crate) fn identity(&self, node: NodeId, lease: &str, now: Timestamp, ca_pem: String) -> v1::Identity {
        let expires = now + IDENTITY_TTL;
        let mac = self.mac(node, lease, expires).to_hex();
        v1::Identity {
            token: format!("{IDENTITY_PREFIX}{node}.{}.{mac}", expires.0),
            expires_ms: expires.0,
            ca_pem,
        }
    }

    /// Forgets the nodes that are gone.
    pub(crate) fn forget(&self, is_live: impl Fn(NodeId) -> bool) {
        let Ok(entries) = std::fs::read_dir(&self.dir) else { return };
        for entry in entries.flatten() {
            let node = entry.file_name().to_str().and_then(|name| name.parse().ok()).map(NodeId);
            if node.is_none_or(|node| !is_live(node)) {
                // One that stays costs a few bytes, and its node cannot join any more.
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }

    /// When the identity runs out; `None` if it was not given to this lease of this node.
    fn identity_expiry(&self, node: NodeId, lease: &str, token: &str) -> Option<Timestamp> {
        let mut parts = token.strip_prefix(IDENTITY_PREFIX)?.splitn(3, '.');
        let (said, expires, mac) = (parts.next()?, parts.next()?, parts.next()?);
        let expires = Timestamp(expires.parse().ok()?);
        let mac = blake3::Hash::from_hex(mac).ok()?;
        // `==` of hashes takes the same time wherever they differ.
        (said == node.to_string() && mac == self.mac(node, lease, expires)).then_some(expires)
    }

    fn mac(&self, node: NodeId, lease: &str, expires: Timestamp) -> blake3::Hash {
        let text = format!("{node}:{lease}:{}", expires.0);
        blake3::keyed_hash(&self.secret.purpose("worker identity"), text.as_bytes())
    }

    fn fits(&self, node: NodeId, bound: &str, key: &str) -> bool {
        blake3::Hash::from_hex(bound).is_ok_and(|bound| bound == self.binding(node, key))
    }

    fn binding(&self, node: NodeId, key: &str) -> blake3::Hash {
        let text = format!("{node}:{key}");
        blake3::keyed_hash(&self.secret.purpose("worker key"), text.as_bytes())
    }

    fn path(&self, node: NodeId) -> PathBuf {
        self.dir.join(node.to_string())
    }

    fn bound(&self, node: NodeId) -> io::Result<Option<String>> {
        match std::fs::read_to_string(self.path(node)) {
            Ok(text) => Ok(Some(text.trim().to_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Binds in one step: of two workers that come at once, one wins.
    fn bind(&self, node: NodeId, key: &str) -> Result<Admission, Refused> {
        use std::io::Write as _;
        std::fs::create_dir_all(&self.dir)?;
        let binding = self.binding(node, key).to_hex().to_string();
        let temporary = self.dir.join(format!("{node}.{}", uuid::Uuid::new_v4()));
        let mut file =
            std::fs::OpenOptions::new().create_new(true).write(true).mode(0o600).open(&temporary)?;
        file.write_all(binding.as_bytes())?;
        file.sync_all()?;
        let linked = std::fs::hard_link(&temporary, self.path(node));
        std::fs::remove_file(&temporary)?;
        match linked {
            Ok(()) => {
                std::fs::File::open(&self.dir)?.sync_all()?;
                Ok(lease(&binding))
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => match self.bound(node)? {
                Some(bound) if bound == binding => Ok(lease(&bound)),
                _ => Err(Refused::Used),
            },
            Err(error) => Err(error.into()),
        }
    }
}

fn lease(bound: &str) -> Admission {
    Admission::Bound { lease: bound.to_owned() }
}

#[cfg(test)]
mod tests {
    use spotq_testkit::TempDir;

    use super::*;

    const NODE: NodeId = NodeId(7);
    const NOW: Timestamp = Timestamp(1_000_000);

    fn joins(dir: &TempDir) -> Joins {
        Joins::new(dir.path(), &ClusterSecret::new([3; 32]), Unbound::Refused)
    }

    fn key(letter: &str) -> String {
        letter.repeat(64)
    }

    fn first(joins: &Joins, key: String) -> Shown {
        Shown { join_secret: joins.secret.join_secret(NODE), worker_key: key, identity: String::new() }
    }

    fn lease_of(admission: Admission) -> String {
        match admission {
            Admission::Bound { lease } => lease,
            Admission::Unbound => panic!("not bound"),
        }
    }

    #[test]
    fn a_join_secret_counts_once_even_after_a_restart() {
        let dir = TempDir::new("joins");
        let all = joins(&dir);
        let mine = first(&all, key("a"));
        all.admit(NODE, &mine, NOW).unwrap();
        // Its welcome was lost: the same worker comes again.
        all.admit(NODE, &mine, NOW).unwrap();
        let again = joins(&dir);
        for other in [key("b"), String::new()] {
            let refused = again.admit(NODE, &first(&all, other), NOW);
            assert!(matches!(refused, Err(Refused::Used)), "{refused:?}");
        }
        again.admit(NODE, &mine, NOW).unwrap();
        again.forget(|_| false);
        assert!(std::fs::read_dir(dir.join("joins")).unwrap().next().is_none());
    }

    #[test]
    fn an_identity_is_of_one_node_and_lease_and_runs_out() {
        let dir = TempDir::new("identity");
        let all = joins(&dir);
        let lease = lease_of(all.admit(NODE, &first(&all, key("a")), NOW).unwrap());
        let given = all.identity(NODE, &lease, NOW, String::new());
        let shown = |key: &str, identity: &str| Shown {
            join_secret: String::new(),
            worker_key: key.into(),
            identity: identity.into(),
        };
        let late = NOW + IDENTITY_TTL;
        assert!(all.admit(NODE, &shown("", &given.token), NOW).is_ok());
        assert!(all.admit(NODE, &shown("", &given.token), late).is_err(), "it has run out");
        assert!(
            all.admit(NODE, &shown(&key("a"), &given.token), late).is_ok(),
            "but the key is the worker's"
        );
        assert!(all.admit(NODE, &shown(&key("b"), &given.token), late).is_err());
        assert!(all.admit(NodeId(8), &shown(&key("a"), &given.token), NOW).is_err(), "another node");
        let of_other_lease = all.identity(NODE, "another lease", NOW, String::new());
        assert!(all.admit(NODE, &shown(&key("a"), &of_other_lease.token), NOW).is_err());
        let mut longer = given.token.clone();
        longer = longer.replace(&given.expires_ms.to_string(), &(given.expires_ms + 1).to_string());
        assert!(all.admit(NODE, &shown(&key("a"), &longer), NOW).is_err());
        for bad in ["", "spotqw_", "spotqw_7", "spotqw_7.1", "spotqw_7.1.zz", "spotqw_7.x.00"] {
            assert!(all.admit(NODE, &shown(&key("a"), bad), NOW).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_wrong_secret_binds_nothing_and_a_worker_without_a_key_is_taken_only_where_it_may_be() {
        let dir = TempDir::new("unbound");
        let all = joins(&dir);
        let wrong = Shown { join_secret: "guess".into(), worker_key: key("a"), identity: String::new() };
        assert!(matches!(all.admit(NODE, &wrong, NOW), Err(Refused::WrongSecret)));
        assert!(!dir.join("joins/7").exists());
        assert!(matches!(all.admit(NODE, &first(&all, String::new()), NOW), Err(Refused::TooOld)));
        let open = Joins { unbound: Unbound::Taken, ..all };
        assert_eq!(open.admit(NODE, &first(&open, String::new()), NOW).unwrap(), Admission::Unbound);
        let lease = lease_of(open.admit(NODE, &first(&open, key("a")), NOW).unwrap());
        assert!(!lease.is_empty());
        assert!(matches!(open.admit(NODE, &first(&open, String::new()), NOW), Err(Refused::Used)));
    }
}
