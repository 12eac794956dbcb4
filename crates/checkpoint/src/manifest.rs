//! The manifest: which files a checkpoint has and of which chunks they are made.
//!
//! What is read from a store is checked in full here, before anything acts on it. No I/O.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};
use spotq_model::{Generation, Profile};

use crate::key::{Digest, Keys, Purpose};
use crate::log::CheckpointSeq;
use crate::path::{LinkTarget, RelPath};

/// The layout of manifests that this code writes, and the newest that it reads.
pub const SCHEMA: u32 = 1;
/// Length of all chunks of a file but the last: one PUT, far below every store's limit, and large enough that
/// requests cost little beside bytes.
pub const CHUNK_BYTES: usize = 32 << 20;
/// A longer chunk is refused on reading, so that a bad manifest cannot make us buffer without bound.
pub const MAX_CHUNK_BYTES: u64 = 64 << 20;
/// More files, directories and links than this are refused; sharded checkpoints have a few thousand.
pub const MAX_ENTRIES: usize = 200_000;
/// 16 TiB, the size limit of a file on ext4.
pub const MAX_FILE_BYTES: u64 = 16 << 40;
/// The manifest of the largest allowed checkpoint fits; a larger object is not one of ours.
pub const MAX_MANIFEST_BYTES: u64 = 128 << 20;

/// A checkpoint, as signed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    pub schema: u32,
    pub checkpoint: CheckpointSeq,
    pub generation: Generation,
    /// How the worker decided that the checkpoint was complete.
    pub profile: Profile,
    pub step: Option<u64>,
    /// Milliseconds since the Unix epoch, by the writer's clock. For people; order comes from the log.
    pub created_at_ms: u64,
    /// The checkpoint whose chunks this one may share.
    pub parent: Option<CheckpointSeq>,
    pub total_bytes: u64,
    /// Hash of the entries without their modification times: equal roots hold equal data.
    pub root: Digest,
    /// In ascending order of their paths' bytes; each directory comes before what is in it.
    pub entries: Vec<Entry>,
}

/// One file, directory or link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    pub path: RelPath,
    /// Permission bits, without set-uid, set-gid and sticky.
    pub mode: u32,
    pub mtime_ns: i64,
    #[serde(flatten)]
    pub node: Node,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Node {
    File {
        size: u64,
        /// Plain BLAKE3 of the whole file, as `b3sum` prints it.
        hash: Digest,
        chunks: Vec<ChunkRef>,
    },
    Dir,
    Symlink {
        target: LinkTarget,
    },
}

/// A piece of a file: `len` bytes at `at` in the chunk object with this name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChunkRef {
    /// Keyed BLAKE3 of the whole chunk object.
    pub name: Digest,
    pub len: u64,
    /// Not 0 only where several small files share one chunk object.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub at: u64,
}

/// Why a manifest is not used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Unusable {
    /// Written by a newer spotq: nothing is wrong with it.
    Newer(u32),
    Damaged(String),
}

impl ChunkRef {
    /// Object name, relative to the job's prefix. The first byte spreads chunks over key ranges.
    #[must_use]
    pub fn object(&self) -> String {
        let name = self.name.to_string();
        format!("chk/{}/{name}", &name[..2])
    }
}

impl Manifest {
    /// Names of all chunks.
    #[must_use]
    pub fn chunk_names(&self) -> BTreeSet<Digest> {
        self.entries.iter().flat_map(Entry::chunks).map(|chunk| chunk.name).collect()
    }

    /// The signed object and its name. Named by its own hash, so that writing it twice is harmless.
    pub(crate) fn seal(&self, keys: &Keys) -> Result<(String, Digest, Vec<u8>), serde_json::Error> {
        let bytes = keys.seal(Purpose::Manifest, self)?;
        let hash = Digest::of(&bytes);
        Ok((format!("man/{:012}-{hash}.json", self.checkpoint.0), hash, bytes))
    }

    /// Checks signature, layout, root and every name. Does not check that the chunks exist.
    pub(crate) fn open(keys: &Keys, bytes: &[u8]) -> Result<Self, Unusable> {
        let body = keys.open_raw(Purpose::Manifest, bytes).map_err(Unusable::Damaged)?;
        let bad = |e: serde_json::Error| Unusable::Damaged(format!("unexpected contents: {e}"));
        let probe: SchemaOnly = serde_json::from_str(body.get()).map_err(bad)?;
        if probe.schema > SCHEMA {
            return Err(Unusable::Newer(probe.schema));
        }
        let manifest: Manifest = serde_json::from_str(body.get()).map_err(bad)?;
        manifest.check().map_err(Unusable::Damaged)?;
        Ok(manifest)
    }

    /// What any reader may rely on. Also run on what we are about to write.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.entries.len() > MAX_ENTRIES {
            return Err(format!("it has more than {MAX_ENTRIES} entries"));
        }
        let mut dirs = BTreeSet::new();
        let mut previous: Option<&RelPath> = None;
        let mut total: u64 = 0;
        for entry in &self.entries {
            if previous.is_some_and(|p| *p >= entry.path) {
                return Err(format!("{} is out of order or there twice", entry.path));
            }
            // A parent that is a link would let an entry be written anywhere.
            if entry.path.parent().is_some_and(|parent| !dirs.contains(parent)) {
                return Err(format!("{} is not in a directory of the checkpoint", entry.path));
            }
            total = total.checked_add(entry.check()?).ok_or("its size overflows")?;
            if matches!(entry.node, Node::Dir) {
                dirs.insert(entry.path.as_bytes());
            }
            previous = Some(&entry.path);
        }
        if total != self.total_bytes {
            return Err("its total size is not the sum of its files".to_owned());
        }
        if root_of(&self.entries) != self.root {
            return Err("its root hash does not fit its entries".to_owned());
        }
        Ok(())
    }
}

impl Entry {
    /// The chunks of a file, in order; none for anything else.
    #[must_use]
    pub fn chunks(&self) -> &[ChunkRef] {
        match &self.node {
            Node::File { chunks, .. } => chunks,
            Node::Dir | Node::Symlink { .. } => &[],
        }
    }

    /// Checks one entry by itself and returns its size.
    fn check(&self) -> Result<u64, String> {
        if self.mode & !0o777 != 0 {
            return Err(format!("{} has mode {:o}", self.path, self.mode));
        }
        match &self.node {
            Node::Dir => Ok(0),
            Node::Symlink { target } => {
                target.check(self.path.depth()).map_err(|why| format!("{}: {why}", self.path))?;
                Ok(0)
            }
            Node::File { size, chunks, .. } => {
                let mut sum: u64 = 0;
                for chunk in chunks {
                    let end = chunk.at.checked_add(chunk.len);
                    if chunk.len == 0 || end.is_none_or(|end| end > MAX_CHUNK_BYTES) {
                        return Err(format!("{} has a chunk of {} bytes", self.path, chunk.len));
                    }
                    sum = sum.checked_add(chunk.len).ok_or("its size overflows")?;
                }
                if sum != *size || sum > MAX_FILE_BYTES {
                    return Err(format!("{} has {size} bytes but {sum} in chunks", self.path));
                }
                Ok(*size)
            }
        }
    }
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Newer(schema) => {
                write!(f, "it has layout {schema}, this spotq knows {SCHEMA}; use a newer spotq")
            }
            Self::Damaged(why) => f.write_str(why),
        }
    }
}

/// Hash of what the entries hold. Every field has a fixed length or its length before it, so that no two
/// different lists encode alike.
pub(crate) fn root_of(entries: &[Entry]) -> Digest {
    let mut hasher = blake3::Hasher::new_derive_key("spotq checkpoint v1: root of entries");
    let mut field = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    for entry in entries {
        field(entry.path.as_bytes());
        field(&entry.mode.to_le_bytes());
        match &entry.node {
            Node::Dir => field(b"dir"),
            Node::Symlink { target } => {
                field(b"symlink");
                field(target.as_bytes());
            }
            // The chunks follow from the contents, the chunk length and the packing; the data is the hash.
            Node::File { size, hash, .. } => {
                field(b"file");
                field(&size.to_le_bytes());
                field(&hash.0);
            }
        }
    }
    Digest(*hasher.finalize().as_bytes())
}

#[derive(Deserialize)]
struct SchemaOnly {
    schema: u32,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::JobKey;

    fn keys() -> Keys {
        Keys::derive(&JobKey([3; 32]))
    }

    fn file(path: &str, data: &[u8]) -> Entry {
        let chunk = ChunkRef { name: keys().chunk_name(data), len: data.len() as u64, at: 0 };
        Entry {
            path: RelPath::new(path).unwrap(),
            mode: 0o644,
            mtime_ns: 1,
            node: Node::File { size: data.len() as u64, hash: Digest::of(data), chunks: vec![chunk] },
        }
    }

    fn dir(path: &str) -> Entry {
        Entry { path: RelPath::new(path).unwrap(), mode: 0o755, mtime_ns: 1, node: Node::Dir }
    }

    /// Not checked: a hostile manifest may say anything.
    fn link(path: &str, target: &str) -> Entry {
        let target = serde_json::from_str(&format!("\"{target}\"")).unwrap();
        Entry { path: RelPath::new(path).unwrap(), mode: 0o777, mtime_ns: 0, node: Node::Symlink { target } }
    }

    fn manifest(entries: Vec<Entry>) -> Manifest {
        let size = |e: &Entry| e.chunks().iter().map(|c| c.len).sum::<u64>();
        Manifest {
            schema: SCHEMA,
            checkpoint: CheckpointSeq(1),
            generation: Generation(1),
            profile: Profile::Generic,
            step: Some(5),
            created_at_ms: 1,
            parent: None,
            total_bytes: entries.iter().map(size).sum(),
            root: root_of(&entries),
            entries,
        }
    }

    #[test]
    fn a_manifest_survives_sealing_and_refuses_every_flipped_byte() {
        let original = manifest(vec![dir("a"), file("a/b", b"data")]);
        let (name, hash, bytes) = original.seal(&keys()).unwrap();
        assert_eq!(name, format!("man/000000000001-{hash}.json"));
        assert_eq!(Manifest::open(&keys(), &bytes), Ok(original));
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 1;
            assert!(Manifest::open(&keys(), &bad).is_err(), "byte {at} flipped");
            assert!(Manifest::open(&keys(), &bytes[..at]).is_err(), "truncated to {at}");
        }
    }

    #[test]
    fn a_signed_manifest_with_bad_structure_is_refused() {
        let mut setuid = file("a", b"x");
        setuid.mode = 0o4755;
        let mut huge = file("a", b"x");
        if let Node::File { size, chunks, .. } = &mut huge.node {
            *size = MAX_CHUNK_BYTES + 1;
            chunks[0].len = MAX_CHUNK_BYTES + 1;
        }
        let mut empty_chunk = file("a", b"");
        assert_eq!(empty_chunk.chunks()[0].len, 0);
        let mut odd_size = file("a", b"xy");
        if let (Node::File { size, .. }, Node::File { size: empty, .. }) =
            (&mut odd_size.node, &mut empty_chunk.node)
        {
            (*size, *empty) = (1, 0);
        }
        let cases = [
            ("no parent", vec![file("a/b", b"x")]),
            ("parent is a link", vec![link("a", "b"), file("a/b", b"x")]),
            ("parent is a file", vec![file("a", b"x"), file("a/b", b"x")]),
            ("twice", vec![file("a", b"x"), file("a", b"y")]),
            ("unsorted", vec![file("b", b"x"), file("a", b"y")]),
            ("absolute link", vec![link("a", "/etc")]),
            ("escaping link", vec![link("a", "../x")]),
            ("set-uid", vec![setuid]),
            ("huge chunk", vec![huge]),
            ("empty chunk", vec![empty_chunk]),
            ("size is not that of the chunks", vec![odd_size]),
        ];
        for (name, entries) in cases {
            let (_, _, bytes) = manifest(entries).seal(&keys()).unwrap();
            assert!(matches!(Manifest::open(&keys(), &bytes), Err(Unusable::Damaged(_))), "{name}");
        }
        let mut wrong_total = manifest(vec![file("a", b"x")]);
        wrong_total.total_bytes = 2;
        assert!(wrong_total.check().is_err());
        let mut wrong_root = manifest(vec![file("a", b"x")]);
        wrong_root.root = Digest::ZERO;
        assert!(wrong_root.check().is_err());
    }

    #[test]
    fn a_newer_layout_is_not_taken_for_damage() {
        let mut newer = manifest(vec![]);
        newer.schema = SCHEMA + 1;
        let (_, _, bytes) = newer.seal(&keys()).unwrap();
        let unusable = Manifest::open(&keys(), &bytes).unwrap_err();
        assert_eq!(unusable, Unusable::Newer(SCHEMA + 1));
        assert!(unusable.to_string().contains("use a newer spotq"), "{unusable}");
    }

    #[test]
    fn limits_include_themselves() {
        let mut largest = file("a", b"x");
        let whole = ChunkRef { name: Digest::ZERO, len: MAX_CHUNK_BYTES, at: 0 };
        if let Node::File { size, chunks, .. } = &mut largest.node {
            *chunks = vec![whole.clone(); usize::try_from(MAX_FILE_BYTES / MAX_CHUNK_BYTES).unwrap()];
            *size = MAX_FILE_BYTES;
        }
        assert_eq!(largest.check(), Ok(MAX_FILE_BYTES), "chunks and a file of the full length");
        if let Node::File { size, chunks, .. } = &mut largest.node {
            chunks.push(ChunkRef { len: 1, ..whole });
            *size += 1;
        }
        assert!(largest.check().is_err(), "a file that is a byte too long");

        let mut full = manifest((0..MAX_ENTRIES).map(|n| dir(&format!("{n:06}"))).collect());
        assert_eq!(full.check(), Ok(()));
        full.entries.push(dir("x"));
        full.root = root_of(&full.entries);
        assert!(full.check().unwrap_err().contains("entries"), "one entry too many");
    }

    /// The words in the store are the format: a change here is a change of the format.
    #[test]
    fn chunks_are_cut_and_written_as_documented() {
        assert_eq!(CHUNK_BYTES, 33_554_432);
        let chunk = ChunkRef { name: Digest::ZERO, len: 5, at: 0 };
        let zero = "0".repeat(64);
        assert_eq!(chunk.object(), format!("chk/00/{zero}"));
        for (chunk, json) in [
            (chunk.clone(), serde_json::json!({"name": zero, "len": 5})),
            (ChunkRef { at: 7, ..chunk }, serde_json::json!({"name": zero, "len": 5, "at": 7})),
        ] {
            assert_eq!(serde_json::to_value(&chunk).unwrap(), json);
            assert_eq!(serde_json::from_value::<ChunkRef>(json).unwrap(), chunk);
        }
    }

    #[test]
    fn the_root_sees_contents_and_modes_but_not_times() {
        let base = vec![file("a", b"x")];
        let mut touched = base.clone();
        touched[0].mtime_ns = 99;
        assert_eq!(root_of(&base), root_of(&touched));
        let mut private = base.clone();
        private[0].mode = 0o600;
        assert_ne!(root_of(&base), root_of(&private));
        assert_ne!(root_of(&base), root_of(&[file("a", b"y")]));
        assert_ne!(root_of(&base), root_of(&[file("b", b"x")]));
        assert_ne!(root_of(&[link("l", "a")]), root_of(&[link("l", "b")]));
    }
}
