//! The per-job key, what is derived from it, and the sealed JSON objects that it signs.
//!
//! Must never print or store the key (INV-14).

use std::fmt;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;

/// The secret of one job. It signs manifests and log entries and names chunks, so that whoever can write to the
/// bucket can neither forge a checkpoint nor learn that two jobs hold the same bytes.
#[derive(Clone)]
pub struct JobKey(pub [u8; 32]);

/// A BLAKE3 hash, plain or keyed. Prints as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// What the first log entry names as its predecessor.
    pub const ZERO: Digest = Digest([0; 32]);

    /// The plain BLAKE3 hash of `bytes`.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// Reads 64 hexadecimal digits in lower case.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        // `from_hex` also takes upper case; one spelling per object name keeps names unique.
        let lower = text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        if !lower {
            return None;
        }
        blake3::Hash::from_hex(text).ok().map(|hash| Self(*hash.as_bytes()))
    }
}

impl fmt::Debug for JobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobKey(redacted)")
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(blake3::Hash::from_bytes(self.0).to_hex().as_str())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(d)?;
        Digest::parse(&text).ok_or_else(|| serde::de::Error::custom("expected 64 hexadecimal digits"))
    }
}

/// What is signed; a signature for one purpose is worthless for the other.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Purpose {
    LogEntry,
    Manifest,
}

/// Keys derived from a job key, one per purpose.
#[derive(Clone)]
pub(crate) struct Keys {
    log: [u8; 32],
    manifest: [u8; 32],
    chunk: [u8; 32],
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Keys(redacted)")
    }
}

impl Keys {
    pub(crate) fn derive(job: &JobKey) -> Self {
        Self {
            log: blake3::derive_key("spotq checkpoint v1: log entry signature", &job.0),
            manifest: blake3::derive_key("spotq checkpoint v1: manifest signature", &job.0),
            chunk: blake3::derive_key("spotq checkpoint v1: chunk name", &job.0),
        }
    }

    /// The name of a chunk with these bytes.
    pub(crate) fn chunk_name(&self, bytes: &[u8]) -> Digest {
        Digest(*blake3::keyed_hash(&self.chunk, bytes).as_bytes())
    }

    /// `{"body": …, "mac": …}`: the signature covers the exact bytes of the body, so no second encoder has to
    /// agree with ours on spaces, number forms or key order.
    pub(crate) fn seal<T: Serialize>(
        &self,
        purpose: Purpose,
        body: &T,
    ) -> Result<Vec<u8>, serde_json::Error> {
        let body = serde_json::value::to_raw_value(body)?;
        let mac = self.mac(purpose, body.get().as_bytes());
        serde_json::to_vec(&Sealed { body, mac: Digest(*mac.as_bytes()) })
    }

    /// Checks the signature, then decodes the body.
    pub(crate) fn open<T: DeserializeOwned>(&self, purpose: Purpose, bytes: &[u8]) -> Result<T, String> {
        let body = self.open_raw(purpose, bytes)?;
        serde_json::from_str(body.get()).map_err(|e| format!("unexpected contents: {e}"))
    }

    /// Checks the signature and hands out the body as it stands.
    pub(crate) fn open_raw(&self, purpose: Purpose, bytes: &[u8]) -> Result<Box<RawValue>, String> {
        let sealed: Sealed =
            serde_json::from_slice(bytes).map_err(|e| format!("not a sealed object: {e}"))?;
        // `blake3::Hash` compares in constant time.
        if self.mac(purpose, sealed.body.get().as_bytes()) != blake3::Hash::from_bytes(sealed.mac.0) {
            return Err("its signature does not fit this job's key".to_owned());
        }
        Ok(sealed.body)
    }

    fn mac(&self, purpose: Purpose, body: &[u8]) -> blake3::Hash {
        let key = match purpose {
            Purpose::LogEntry => &self.log,
            Purpose::Manifest => &self.manifest,
        };
        blake3::keyed_hash(key, body)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sealed {
    body: Box<RawValue>,
    mac: Digest,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_never_prints() {
        let key = JobKey([0xAB; 32]);
        let text = format!("{key:?} {:?}", Keys::derive(&key)).to_lowercase();
        assert!(!text.contains("ab, ab") && !text.contains("abab") && !text.contains("171"), "{text}");
        assert_eq!(text, "jobkey(redacted) keys(redacted)", "but that there is one is said");
    }

    #[test]
    fn a_signature_holds_for_its_purpose_its_key_and_its_bytes_only() {
        let keys = Keys::derive(&JobKey([1; 32]));
        let sealed = keys.seal(Purpose::LogEntry, &7_u32).unwrap();
        assert_eq!(keys.open::<u32>(Purpose::LogEntry, &sealed), Ok(7));
        assert!(keys.open::<u32>(Purpose::Manifest, &sealed).is_err());
        assert!(Keys::derive(&JobKey([2; 32])).open::<u32>(Purpose::LogEntry, &sealed).is_err());
        let tampered = String::from_utf8(sealed).unwrap().replace(":7,", ":8,");
        assert!(keys.open::<u32>(Purpose::LogEntry, tampered.as_bytes()).is_err());
    }

    #[test]
    fn equal_bytes_have_different_names_in_two_jobs() {
        let (a, b) = (Keys::derive(&JobKey([1; 32])), Keys::derive(&JobKey([2; 32])));
        assert_ne!(a.chunk_name(b"same"), b.chunk_name(b"same"));
    }

    #[test]
    fn digests_have_one_spelling() {
        let digest = Digest::of(b"x");
        assert_eq!(Digest::parse(&digest.to_string()), Some(digest));
        assert_eq!(Digest::parse(&digest.to_string().to_uppercase()), None);
        assert_eq!(Digest::parse("abc"), None);
        assert_eq!(format!("{digest:?}"), digest.to_string());
    }
}
