//! A version that the store surely reached, in a file beside sled.
//!
//! sled takes damage at the end of its log for a torn write and drops what comes after it, without a word. The version
//! here is written after each commit was acknowledged as durable, so when it is ahead of the log, the log lost
//! something. It is not synced: an old value only notices less. It must never be written before the commit is durable.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use spotq_store::Result;

use crate::failure::io_error;

const FILE: &str = "acked";
const BYTES: usize = 12;

#[derive(Debug)]
pub(crate) struct Watermark(File);

impl Watermark {
    /// Opens the file in `dir`, and returns the version in it (0 when there is none that can be trusted).
    pub(crate) fn open(dir: &Path) -> Result<(Self, u64)> {
        let path = dir.join(FILE);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(|error| io_error(&path, "open", &error))?;
        let mut bytes = [0; BYTES];
        let version = match file.read_exact_at(&mut bytes, 0) {
            Ok(()) => decode(&bytes).unwrap_or(0),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => 0,
            Err(error) => return Err(io_error(&path, "read", &error)),
        };
        Ok((Self(file), version))
    }

    /// Whether a store was ever opened in `dir`.
    pub(crate) fn exists(dir: &Path) -> bool {
        dir.join(FILE).exists()
    }

    /// Notes that everything before `version` is durable.
    pub(crate) fn raise(&self, version: u64) {
        // The store keeps its promises without this file, so a full disk must not fail a commit that is durable.
        self.0.write_all_at(&encode(version), 0).ok();
    }
}

fn encode(version: u64) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    bytes[..8].copy_from_slice(&version.to_le_bytes());
    let checksum = crc32c::crc32c(&bytes[..8]);
    bytes[8..].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

fn decode(bytes: &[u8; BYTES]) -> Option<u64> {
    let (version, _) = bytes.split_first_chunk()?;
    let version = u64::from_le_bytes(*version);
    (encode(version) == *bytes).then_some(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_and_damaged_bytes_are_not_trusted() {
        assert_eq!(decode(&[0; BYTES]), None);
        assert_eq!(decode(&encode(u64::MAX)), Some(u64::MAX));
        for bit in 0..BYTES * 8 {
            let mut bytes = encode(123_456);
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(&bytes), None, "bit {bit}");
        }
    }
}
