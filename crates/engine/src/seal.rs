//! Secrets at rest: sealed with a key that is no part of what is sealed, so that a copied data directory says nothing.
//!
//! Never prints what it opens. The key is a file for its owner alone, wherever `SPOTQ_MASTER_KEY_FILE` says; without
//! that it lies in the data directory, which guards against a stray file but not against a copy of the whole.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use aws_lc_rs::aead::{AES_256_GCM, Aad, NONCE_LEN, Nonce, RandomizedNonceKey};

use crate::auth::replace;

/// Names the key file.
pub const MASTER_KEY_VARIABLE: &str = "SPOTQ_MASTER_KEY_FILE";
/// The key in the data directory, where no other is named.
const MASTER_KEY: &str = "master.key";
/// Shorter is no key. 32 random bytes, or 64 hex digits, are usual.
const MASTER_KEY_MIN: usize = 32;
/// A longer file is no key either.
const MASTER_KEY_MAX: usize = 64 * 1024;
const MAGIC: &[u8] = b"spotq-sealed-1\n";

/// Why something cannot be sealed or opened.
#[derive(Debug, thiserror::Error)]
pub enum SealError {
    #[error("key file {path}: {detail}", path = path.display())]
    Key { path: PathBuf, detail: String },
    #[error(
        "{path} cannot be opened with this key: it was sealed with another, or is damaged; set {MASTER_KEY_VARIABLE} to the right key file, or restore it from a backup",
        path = path.display()
    )]
    Wrong { path: PathBuf },
    #[error("{path}: {source}", path = path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("the system gives no random bytes")]
    Random,
}

/// Seals and opens the files of one data directory.
#[derive(Clone)]
pub struct Sealer {
    key: [u8; 32],
}

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sealer(…)")
    }
}

impl Sealer {
    /// Reads the key that the environment names, or the data directory's own, which is made if it is not there.
    ///
    /// # Errors
    /// The key file cannot be read, is none, or may be read by others.
    pub fn open(data: &Path) -> Result<Self, SealError> {
        match std::env::var_os(MASTER_KEY_VARIABLE).filter(|path| !path.is_empty()) {
            Some(path) => Sealer::from_file(Path::new(&path)),
            None => {
                let path = data.join(MASTER_KEY);
                if !path.try_exists().map_err(|source| SealError::File { path: path.clone(), source })? {
                    replace(&path, hex(&random()?).as_bytes())
                        .map_err(|source| SealError::File { path: path.clone(), source })?;
                }
                Sealer::from_file(&path)
            }
        }
    }

    fn from_file(path: &Path) -> Result<Self, SealError> {
        use std::os::unix::fs::PermissionsExt as _;
        let fail = |detail: String| SealError::Key { path: path.to_owned(), detail };
        let bytes = std::fs::read(path).map_err(|error| fail(error.to_string()))?;
        if !(MASTER_KEY_MIN..=MASTER_KEY_MAX).contains(&bytes.len()) {
            let size = bytes.len();
            return Err(fail(format!(
                "has {size} bytes, expected {MASTER_KEY_MIN} or more, such as from `openssl rand -hex 32`"
            )));
        }
        let mode = std::fs::metadata(path).map_err(|error| fail(error.to_string()))?.permissions().mode();
        if mode & 0o077 != 0 {
            return Err(fail(format!("may be used by others (mode {:o}); chmod 600 it", mode & 0o777)));
        }
        Ok(Sealer { key: blake3::derive_key("spotq 2026 master key of a data directory", &bytes) })
    }

    /// Writes `secret` sealed, for its owner alone, in one step.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path, secret: &[u8]) -> Result<(), SealError> {
        let sealed = self.seal(path, secret)?;
        replace(path, &sealed).map_err(|source| SealError::File { path: path.to_owned(), source })
    }

    /// Reads what [`Sealer::write`] has written; `Ok(Err(bytes))` is a file that was never sealed.
    ///
    /// # Errors
    /// The file cannot be read, or not with this key.
    pub fn read(&self, path: &Path) -> Result<Result<Vec<u8>, Vec<u8>>, SealError> {
        let bytes =
            std::fs::read(path).map_err(|source| SealError::File { path: path.to_owned(), source })?;
        let Some(sealed) = bytes.strip_prefix(MAGIC) else { return Ok(Err(bytes)) };
        let wrong = || SealError::Wrong { path: path.to_owned() };
        let (nonce, sealed) = sealed.split_first_chunk::<NONCE_LEN>().ok_or_else(wrong)?;
        let mut sealed = sealed.to_vec();
        let key = self.aead()?;
        let opened = key
            .open_in_place(Nonce::assume_unique_for_key(*nonce), Aad::from(name(path)), &mut sealed)
            .map_err(|_| wrong())?;
        Ok(Ok(opened.to_vec()))
    }

    fn seal(&self, path: &Path, secret: &[u8]) -> Result<Vec<u8>, SealError> {
        let mut sealed = secret.to_vec();
        let nonce = self
            .aead()?
            .seal_in_place_append_tag(Aad::from(name(path)), &mut sealed)
            .map_err(|_| SealError::Random)?;
        Ok([MAGIC, nonce.as_ref(), &sealed].concat())
    }

    fn aead(&self) -> Result<RandomizedNonceKey, SealError> {
        RandomizedNonceKey::new(&AES_256_GCM, &self.key).map_err(|_| SealError::Random)
    }
}

/// 32 bytes from the system.
///
/// # Errors
/// The system has none.
pub fn random() -> Result<[u8; 32], SealError> {
    let mut bytes = [0; 32];
    aws_lc_rs::rand::fill(&mut bytes).map_err(|_| SealError::Random)?;
    Ok(bytes)
}

#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Sealed in with the content, so that one sealed file cannot take another's place.
fn name(path: &Path) -> Vec<u8> {
    path.file_name().map(|name| name.as_encoded_bytes().to_vec()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use spotq_testkit::TempDir;

    use super::*;

    #[test]
    fn what_is_sealed_opens_with_its_key_and_name_alone() {
        let dir = TempDir::new("seal");
        let sealer = Sealer { key: [1; 32] };
        let path = dir.join("secret");
        sealer.write(&path, b"sesame").unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert!(!bytes.windows(6).any(|part| part == b"sesame"));
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(sealer.read(&path).unwrap(), Ok(b"sesame".to_vec()));
        assert!(matches!(Sealer { key: [2; 32] }.read(&path), Err(SealError::Wrong { .. })));
        std::fs::copy(&path, dir.join("other")).unwrap();
        assert!(matches!(sealer.read(&dir.join("other")), Err(SealError::Wrong { .. })));
        for at in [MAGIC.len(), bytes.len() - 1] {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            std::fs::write(&path, changed).unwrap();
            assert!(matches!(sealer.read(&path), Err(SealError::Wrong { .. })));
        }
        std::fs::write(&path, b"never sealed").unwrap();
        assert_eq!(sealer.read(&path).unwrap(), Err(b"never sealed".to_vec()));
    }

    #[test]
    fn a_key_is_long_enough_and_its_owners_alone() {
        let dir = TempDir::new("seal-key");
        let short = dir.write("short", "abc");
        assert!(matches!(Sealer::from_file(&short), Err(SealError::Key { .. })));
        let open = dir.write("open", "x".repeat(64));
        std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o644)).unwrap();
        let error = Sealer::from_file(&open).unwrap_err().to_string();
        assert!(error.contains("chmod 600"), "{error}");
        std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert!(Sealer::from_file(&open).is_ok());
    }
}
