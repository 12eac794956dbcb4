//! What the writer program appends and what the crash tests expect to find: a record is a function of its number.

/// What a writer writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// Records of all sizes, snapshots and an archive that grows.
    Mixed,
    /// Small records, and archive entries that are written over and over so that sled frees and reuses its segments.
    /// Nothing is written to files of its own: a sync of such a file would also save what sled did not sync.
    Small,
}

impl Load {
    pub fn name(self) -> &'static str {
        match self {
            Self::Mixed => "mixed",
            Self::Small => "small",
        }
    }

    /// The record with this number. Most are as small as a submit; some are cut into parts or go to files.
    pub fn record(self, version: u64) -> Vec<u8> {
        let size = match (self, version % 97) {
            (Self::Mixed, 13) => 20_000,
            (Self::Mixed, 29) => 9_000,
            (_, 41) => 0,
            (_, n) => 40 + 6 * n as usize,
        };
        noise(version, size)
    }

    /// The archive entry with this number.
    pub fn archived(self, number: u64) -> (String, Vec<u8>) {
        let size = if self == Self::Mixed && number.is_multiple_of(31) { 18_000 } else { 700 };
        (format!("{number:012}"), noise(number.rotate_left(32), size))
    }
}

/// The snapshot of this version.
pub fn snapshot(version: u64) -> Vec<u8> {
    noise(!version, 50_000)
}

fn noise(seed: u64, size: usize) -> Vec<u8> {
    let mut state = seed ^ 0x9e37_79b9_7f4a_7c15;
    let mut bytes = Vec::with_capacity(size + 8);
    while bytes.len() < size {
        // Knuth's MMIX generator; the seed is mixed in again so that neighbours differ from the first byte on.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407 ^ seed);
        bytes.extend((state ^ (state >> 29)).to_le_bytes());
    }
    bytes.truncate(size);
    bytes
}
