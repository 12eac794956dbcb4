//! Keys and values in sled.
//!
//! | key | value |
//! |---|---|
//! | `e` | epoch |
//! | `s` version | the blob that holds this snapshot |
//! | `r` version, part | one part of a pack of records; `version` is the number of its first record |
//! | `a` key | an archive entry: its first part, or the blob that holds it |
//! | `c` length of key, key, part | a later part of an archive entry |
//! | `b` hash | nothing; says that the archive needs this blob |
//!
//! Numbers in keys are big endian, so that sled's order is ours. Each value begins with a schema byte and the CRC32C
//! of its key and of what follows, so a value that sled gives back under a wrong key is noticed as well. This module
//! must never panic on bytes from disk.

use crate::blobs::BlobRef;

/// The schema of the values.
const SCHEMA: u8 = 1;
const FRAME_BYTES: usize = 5;

/// The longest value that sled is given. A leaf of sled holds up to 16 values and is written as one fragment, and a
/// fragment of more than 128 KiB (a quarter of a segment) goes to a file that sled never syncs. 19 values (a leaf that
/// took in its neighbour) of this size with the longest keys stay below that.
pub(crate) const VALUE_BYTES: usize = 4 * 1024;
const PART_BYTES: usize = VALUE_BYTES - FRAME_BYTES;

/// Larger records go to files of their own (DESIGN §5).
pub(crate) const INLINE_BYTES: usize = 16 * 1024;

/// A pack takes no further record once it holds this much. It bounds what is read for one record, and dropping the
/// records behind a snapshot works on whole packs.
const PACK_BYTES: usize = 16 * 1024;

pub(crate) const EPOCH_KEY: &[u8] = b"e";
pub(crate) const SNAPSHOT_PREFIX: &[u8] = b"s";
pub(crate) const RECORD_PREFIX: &[u8] = b"r";
pub(crate) const ARCHIVE_PREFIX: &[u8] = b"a";
/// The first key after all archive entries.
pub(crate) const ARCHIVE_END: &[u8] = b"b";
pub(crate) const ARCHIVE_BLOB_PREFIX: &[u8] = b"b";

/// Marks a record that is in a blob, in the length in front of it.
const BLOB_BIT: u32 = 1 << 31;
/// Tag, length and checksum of an inline archive entry.
const ARCHIVE_HEAD_BYTES: usize = 9;
const INLINE_TAG: u8 = 0;
const BLOB_TAG: u8 = 1;

/// A record as it is kept in a pack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Entry {
    Inline(Vec<u8>),
    Blob(BlobRef),
}

/// The head of an archive entry.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ArchiveHead<'a> {
    /// `checksum` is that of the whole value, so that parts of two values are never mixed.
    Inline {
        len: usize,
        checksum: u32,
        first: &'a [u8],
    },
    Blob(BlobRef),
}

/// A run of records that is written together.
#[derive(Debug, Default)]
pub(crate) struct Pack {
    pub(crate) first: u64,
    pub(crate) count: u32,
    pub(crate) blobs: Vec<[u8; 32]>,
    body: Vec<u8>,
}

/// A key and its value.
pub(crate) type Pair = (Vec<u8>, Vec<u8>);

impl Pack {
    pub(crate) fn new(first: u64) -> Self {
        Self { first, ..Self::default() }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.body.len() >= PACK_BYTES
    }

    pub(crate) fn push(&mut self, entry: &Entry) {
        // A part limit of 16 bits is far away: a pack is at most PACK_BYTES and one more record.
        match entry {
            Entry::Inline(bytes) => {
                debug_assert!(bytes.len() <= INLINE_BYTES, "larger records are blobs");
                self.body.extend((bytes.len() as u32).to_le_bytes());
                self.body.extend(bytes);
            }
            Entry::Blob(blob) => {
                self.body.extend((BLOB_BIT | BlobRef::ENCODED_BYTES as u32).to_le_bytes());
                self.body.extend(blob.encode());
                self.blobs.push(blob.hash);
            }
        }
        self.count += 1;
    }

    /// The pairs to write. The first part says how many records and parts there are.
    pub(crate) fn pairs(&self) -> Vec<Pair> {
        let mut stream = Vec::with_capacity(8 + self.body.len());
        stream.extend(self.count.to_le_bytes());
        stream.extend((self.body.len() as u32).to_le_bytes());
        stream.extend(&self.body);
        let parts = stream.chunks(PART_BYTES).enumerate();
        parts.map(|(part, bytes)| framed(record_key(self.first, part as u16), bytes)).collect()
    }

    pub(crate) fn part_count(&self) -> usize {
        (8 + self.body.len()).div_ceil(PART_BYTES)
    }
}

pub(crate) fn record_key(first: u64, part: u16) -> Vec<u8> {
    let mut key = Vec::with_capacity(11);
    key.extend(RECORD_PREFIX);
    key.extend(first.to_be_bytes());
    key.extend(part.to_be_bytes());
    key
}

pub(crate) fn snapshot_key(version: u64) -> Vec<u8> {
    [SNAPSHOT_PREFIX, &version.to_be_bytes()].concat()
}

pub(crate) fn archive_key(key: &str) -> Vec<u8> {
    [ARCHIVE_PREFIX, key.as_bytes()].concat()
}

/// `part` counts from 1; part 0 is in the head.
pub(crate) fn archive_part_key(key: &str, part: usize) -> Vec<u8> {
    [b"c", (key.len() as u16).to_be_bytes().as_slice(), key.as_bytes(), &(part as u16).to_be_bytes()].concat()
}

/// The number in a snapshot key.
pub(crate) fn snapshot_version(key: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(key.strip_prefix(SNAPSHOT_PREFIX)?.try_into().ok()?))
}

/// The numbers in a record key.
pub(crate) fn record_position(key: &[u8]) -> Option<(u64, u16)> {
    let (first, part) = key.strip_prefix(RECORD_PREFIX)?.split_at_checked(8)?;
    Some((u64::from_be_bytes(first.try_into().ok()?), u16::from_be_bytes(part.try_into().ok()?)))
}

pub(crate) fn epoch_pair(epoch: u64) -> Pair {
    framed(EPOCH_KEY.to_vec(), &epoch.to_le_bytes())
}

pub(crate) fn snapshot_pair(version: u64, blob: &BlobRef) -> Pair {
    framed(snapshot_key(version), &blob.encode())
}

/// The pairs of an archive entry that is small enough for sled.
pub(crate) fn archive_pairs(key: &str, value: &[u8]) -> Vec<Pair> {
    let (first, rest) = value.split_at(value.len().min(PART_BYTES - ARCHIVE_HEAD_BYTES));
    let mut head = vec![INLINE_TAG];
    head.extend((value.len() as u32).to_le_bytes());
    head.extend(crc32c::crc32c(value).to_le_bytes());
    head.extend(first);
    let mut pairs = vec![framed(archive_key(key), &head)];
    let parts = rest.chunks(PART_BYTES).enumerate();
    pairs.extend(parts.map(|(n, bytes)| framed(archive_part_key(key, n + 1), bytes)));
    pairs
}

pub(crate) fn archive_blob_pair(key: &str, blob: &BlobRef) -> Pair {
    framed(archive_key(key), &[[BLOB_TAG].as_slice(), &blob.encode()].concat())
}

pub(crate) fn archive_blob_marker(blob: &BlobRef) -> Pair {
    framed([ARCHIVE_BLOB_PREFIX, &blob.hash].concat(), &[])
}

/// The blob that a marker names.
pub(crate) fn archive_blob(key: &[u8]) -> Option<[u8; 32]> {
    key.strip_prefix(ARCHIVE_BLOB_PREFIX)?.try_into().ok()
}

pub(crate) fn archive_head(body: &[u8]) -> Option<ArchiveHead<'_>> {
    let (&tag, rest) = body.split_first()?;
    match tag {
        INLINE_TAG => {
            let (len, rest) = rest.split_at_checked(4)?;
            let (checksum, first) = rest.split_at_checked(4)?;
            let len = u32::from_le_bytes(len.try_into().ok()?) as usize;
            let checksum = u32::from_le_bytes(checksum.try_into().ok()?);
            (len <= INLINE_BYTES && first.len() <= len).then_some(ArchiveHead::Inline {
                len,
                checksum,
                first,
            })
        }
        BLOB_TAG => BlobRef::decode(rest).map(ArchiveHead::Blob),
        _ => None,
    }
}

pub(crate) fn number(body: &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(body.try_into().ok()?))
}

/// Checks a value and returns what is in it. `Err` says what is wrong.
pub(crate) fn unframe<'a>(key: &[u8], value: &'a [u8]) -> std::result::Result<&'a [u8], String> {
    let Some((frame, body)) = value.split_at_checked(FRAME_BYTES) else {
        return Err(format!("the value of {} is cut off after {} bytes", shown(key), value.len()));
    };
    if frame[0] != SCHEMA {
        return Err(format!("the value of {} has the unknown schema {}", shown(key), frame[0]));
    }
    if frame[1..] != checksum(key, body) {
        return Err(format!("the value of {} does not match its checksum", shown(key)));
    }
    Ok(body)
}

/// Reads packs from their pairs, in order.
#[derive(Debug, Default)]
pub(crate) struct PackReader {
    first: u64,
    next_part: u16,
    stream: Vec<u8>,
}

/// A pack that was read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ReadPack {
    pub(crate) first: u64,
    pub(crate) parts: u16,
    pub(crate) entries: Vec<Entry>,
}

impl PackReader {
    /// Takes the next pair. Returns a pack when this was its last part. `Err` says what is wrong.
    pub(crate) fn push(&mut self, key: &[u8], value: &[u8]) -> std::result::Result<Option<ReadPack>, String> {
        let (first, part) =
            record_position(key).ok_or_else(|| format!("{} is not the key of a record", shown(key)))?;
        if self.next_part > 0 && first != self.first {
            return Err(self.missing_part());
        }
        if part != self.next_part {
            return Err(format!("part {} of the records from {first} on is missing", self.next_part));
        }
        self.first = first;
        self.stream.extend(unframe(key, value)?);
        self.next_part = part.checked_add(1).ok_or("a pack of records has too many parts")?;
        let header = self.stream.split_at_checked(4).and_then(|(count, rest)| {
            let (len, body) = rest.split_at_checked(4)?;
            Some((u32::from_le_bytes(count.try_into().ok()?), u32::from_le_bytes(len.try_into().ok()?), body))
        });
        let Some((count, len, body)) = header else {
            return Err(format!("the pack of records from {first} on has no header"));
        };
        match body.len().cmp(&(len as usize)) {
            std::cmp::Ordering::Less => Ok(None),
            std::cmp::Ordering::Greater => Err(format!("the pack of records from {first} on is too long")),
            std::cmp::Ordering::Equal => {
                let entries = read_entries(body, count)
                    .ok_or_else(|| format!("the pack of records from {first} on cannot be read"))?;
                let pack = ReadPack { first, parts: self.next_part, entries };
                *self = Self::default();
                Ok(Some(pack))
            }
        }
    }

    /// Says whether the last pack was whole.
    pub(crate) fn finish(self) -> std::result::Result<(), String> {
        if self.next_part == 0 { Ok(()) } else { Err(self.missing_part()) }
    }

    fn missing_part(&self) -> String {
        format!("part {} of the records from {} on is missing", self.next_part, self.first)
    }
}

fn read_entries(mut body: &[u8], count: u32) -> Option<Vec<Entry>> {
    // The count is not trusted with memory before the entries were seen.
    let mut entries = Vec::new();
    for _ in 0..count {
        let (head, rest) = body.split_at_checked(4)?;
        let head = u32::from_le_bytes(head.try_into().ok()?);
        let (bytes, rest) = rest.split_at_checked((head & !BLOB_BIT) as usize)?;
        entries.push(if head & BLOB_BIT == 0 {
            Entry::Inline(bytes.to_vec())
        } else {
            Entry::Blob(BlobRef::decode(bytes)?)
        });
        body = rest;
    }
    body.is_empty().then_some(entries)
}

fn framed(key: Vec<u8>, body: &[u8]) -> Pair {
    let mut value = Vec::with_capacity(FRAME_BYTES + body.len());
    value.push(SCHEMA);
    value.extend(checksum(&key, body));
    value.extend(body);
    debug_assert!(value.len() <= VALUE_BYTES, "values are cut into parts");
    (key, value)
}

fn checksum(key: &[u8], body: &[u8]) -> [u8; 4] {
    crc32c::crc32c_append(crc32c::crc32c(key), body).to_le_bytes()
}

/// A key for people.
fn shown(key: &[u8]) -> String {
    match (record_position(key), snapshot_version(key)) {
        (Some((first, part)), _) => format!("records from {first} on, part {part}"),
        (_, Some(version)) => format!("snapshot {version}"),
        _ => format!("key `{}`", key.escape_ascii()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[Pair]) -> std::result::Result<Vec<ReadPack>, String> {
        let mut reader = PackReader::default();
        let mut packs = Vec::new();
        for (key, value) in pairs {
            packs.extend(reader.push(key, value)?);
        }
        reader.finish().map(|()| packs)
    }

    fn sample() -> (Vec<Entry>, Pack) {
        let entries = vec![
            Entry::Inline(vec![]),
            Entry::Inline(vec![7; INLINE_BYTES]),
            Entry::Blob(BlobRef { hash: [3; 32], len: 1 << 20 }),
            Entry::Inline(b"last".to_vec()),
        ];
        let mut pack = Pack::new(41);
        entries.iter().for_each(|entry| pack.push(entry));
        (entries, pack)
    }

    #[test]
    fn a_pack_reads_back_as_written() {
        let (entries, pack) = sample();
        let pairs = pack.pairs();
        assert!(pairs.iter().all(|(_, value)| value.len() <= VALUE_BYTES));
        assert_eq!(pairs.len(), pack.part_count());
        let parts = pairs.len() as u16;
        assert_eq!(read(&pairs), Ok(vec![ReadPack { first: 41, parts, entries }]));
    }

    #[test]
    fn each_flipped_bit_and_each_missing_part_is_noticed() {
        let (_, pack) = sample();
        let pairs = pack.pairs();
        for part in 0..pairs.len() {
            let mut missing = pairs.clone();
            missing.remove(part);
            assert!(read(&missing).is_err(), "part {part} missing");
            for bit in (0..pairs[part].1.len() * 8).step_by(101) {
                let mut damaged = pairs.clone();
                damaged[part].1[bit / 8] ^= 1 << (bit % 8);
                assert!(read(&damaged).is_err(), "bit {bit} of part {part} flipped");
            }
            for len in (0..pairs[part].1.len()).step_by(97) {
                let mut cut = pairs.clone();
                cut[part].1.truncate(len);
                assert!(read(&cut).is_err(), "part {part} cut to {len} bytes");
            }
        }
        let mut moved = pairs.clone();
        moved.swap(0, 1);
        assert!(read(&moved).is_err());
    }

    #[test]
    fn a_value_under_another_key_is_noticed() {
        let (key, value) = epoch_pair(5);
        assert_eq!(unframe(&key, &value).map(number), Ok(Some(5)));
        assert!(unframe(b"f", &value).is_err());
    }

    #[test]
    fn archive_entries_of_all_sizes_stay_below_the_value_limit() {
        for size in [0, 1, PART_BYTES - 5, PART_BYTES - 4, PART_BYTES, INLINE_BYTES] {
            let pairs = archive_pairs("key", &vec![1; size]);
            assert!(pairs.iter().all(|(_, value)| value.len() <= VALUE_BYTES), "{size}");
        }
    }
}
