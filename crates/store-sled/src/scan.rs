//! Reads a store: all that the writer must know at the start, what recovery returns, and pages of the archive.
//!
//! It must never write, and never pass over a gap or a value that does not match its checksum.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

use spotq_model::{Epoch, Version};
use spotq_store::{ArchiveEntry, Recovered, Result, Snapshot, StoreError};

use crate::blobs::{BlobDir, BlobRef};
use crate::failure::{corrupt, sled_error};
use crate::layout::{self, ArchiveHead, Entry, PackReader, ReadPack};

/// How often to read an archive entry again that is being replaced at the same moment.
const ARCHIVE_READ_TRIES: usize = 4;

/// How many damaged files a message names.
const MAX_NAMED_FILES: usize = 8;

/// What is in the store, without the records themselves.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    pub(crate) epoch: Epoch,
    /// The version of the store.
    pub(crate) head: u64,
    /// The kept snapshots by version, at most two: the newest and the one before it.
    pub(crate) snapshots: BTreeMap<u64, BlobRef>,
    /// Snapshots that could not be read, to be removed when there is a new one.
    pub(crate) bad_snapshots: BTreeMap<u64, BlobRef>,
    /// The packs of records by their first version.
    pub(crate) packs: BTreeMap<u64, PackInfo>,
    /// How often each blob is referred to by snapshots and packs.
    pub(crate) blob_uses: HashMap<[u8; 32], u32>,
    /// Blobs of the archive. They stay.
    pub(crate) archive_blobs: HashSet<[u8; 32]>,
}

/// What must be known of a pack to drop it.
#[derive(Debug, Default)]
pub(crate) struct PackInfo {
    pub(crate) count: u32,
    pub(crate) parts: u16,
    pub(crate) blobs: Vec<[u8; 32]>,
}

/// The damaged files of records.
#[derive(Debug, Default)]
struct DamagedFiles {
    /// The first of them: its path, what is wrong with it, and its record.
    first: Option<(PathBuf, String, u64)>,
    others: Vec<PathBuf>,
}

impl Contents {
    pub(crate) fn referenced_blobs(&self) -> HashSet<[u8; 32]> {
        self.blob_uses.keys().chain(&self.archive_blobs).copied().collect()
    }

    pub(crate) fn use_blobs(&mut self, hashes: &[[u8; 32]]) {
        for hash in hashes {
            *self.blob_uses.entry(*hash).or_default() += 1;
        }
    }

    /// Counts one use less and says whether that was the last one.
    pub(crate) fn release_blob(&mut self, hash: &[u8; 32]) -> bool {
        let Some(uses) = self.blob_uses.get_mut(hash) else { return false };
        *uses -= 1;
        if *uses > 0 {
            return false;
        }
        self.blob_uses.remove(hash);
        !self.archive_blobs.contains(hash)
    }

    /// The version below which no record is needed: that of the older kept snapshot.
    pub(crate) fn needed_from(&self) -> u64 {
        self.snapshots.keys().next().copied().unwrap_or(0)
    }
}

impl DamagedFiles {
    /// Passes on what was read, or nothing where it is damaged; [`Self::none`] must be asked before that is used.
    fn note(&mut self, version: u64, read: Result<Vec<u8>>) -> Result<Vec<u8>> {
        match read {
            Err(StoreError::Corrupt { path, what }) => {
                match &self.first {
                    None => self.first = Some((path, what, version)),
                    Some(_) => self.others.push(path),
                }
                Ok(Vec::new())
            }
            other => other,
        }
    }

    /// An error that names the files, if there are any.
    fn none(self) -> Result<()> {
        let Some((path, what, version)) = self.first else { return Ok(()) };
        let mut what = format!("{what}; record {version} is in it");
        if !self.others.is_empty() {
            let names: Vec<_> =
                self.others.iter().take(MAX_NAMED_FILES).map(|path| path.display().to_string()).collect();
            let more = if self.others.len() > names.len() { " and more" } else { "" };
            what +=
                &format!("; {} other files are damaged too: {}{more}", self.others.len(), names.join(", "));
        }
        Err(corrupt(&path, what))
    }
}

/// Reads and checks the whole log.
pub(crate) fn load(tree: &sled::Tree, blobs: &BlobDir, dir: &Path) -> Result<Contents> {
    let mut contents = Contents::default();
    if let Some(value) = tree.get(layout::EPOCH_KEY).map_err(|error| sled_error(dir, "read", &error))? {
        let body = layout::unframe(layout::EPOCH_KEY, &value).map_err(|what| corrupt(dir, what))?;
        let epoch = layout::number(body).ok_or_else(|| corrupt(dir, "the epoch cannot be read"))?;
        contents.epoch = Epoch(epoch);
    }
    for pair in tree.scan_prefix(layout::ARCHIVE_BLOB_PREFIX).keys() {
        let key = pair.map_err(|error| sled_error(dir, "read", &error))?;
        let hash =
            layout::archive_blob(&key).ok_or_else(|| corrupt(dir, "the name of a blob cannot be read"))?;
        contents.archive_blobs.insert(hash);
    }
    load_snapshots(tree, blobs, dir, &mut contents)?;
    each_pack(tree, dir, |pack| {
        let blobs: Vec<_> = pack
            .entries
            .iter()
            .filter_map(|entry| match entry {
                Entry::Blob(blob) => Some(blob.hash),
                Entry::Inline(_) => None,
            })
            .collect();
        contents.use_blobs(&blobs);
        let info = PackInfo { count: pack.entries.len() as u32, parts: pack.parts, blobs };
        contents.packs.insert(pack.first, info);
        Ok(())
    })?;
    contents.head = check_numbering(dir, &contents).map_err(|error| match error {
        StoreError::Corrupt { path, mut what } => {
            for (version, blob) in &contents.bad_snapshots {
                let file = blobs.path(&blob.hash);
                what += &format!("; snapshot {version} cannot be read from {}", file.display());
            }
            StoreError::Corrupt { path, what }
        }
        other => other,
    })?;
    Ok(contents)
}

/// What [`spotq_store::Store::recover`] returns.
pub(crate) fn recover(
    tree: &sled::Tree,
    blobs: &BlobDir,
    dir: &Path,
    contents: &Contents,
) -> Result<Recovered> {
    let snapshot = match contents.snapshots.last_key_value() {
        Some((&version, blob)) => Some(Snapshot { version: Version(version), bytes: blobs.get(blob)? }),
        None => None,
    };
    let from = snapshot.as_ref().map_or(0, |s| s.version.0);
    let mut records = Vec::new();
    let mut damaged = DamagedFiles::default();
    each_pack(tree, dir, |pack| {
        for (version, entry) in (pack.first..).zip(pack.entries) {
            if version >= from {
                records.push(match entry {
                    Entry::Inline(bytes) => bytes,
                    // All files are looked at, so that whoever restores them learns of all of them at once.
                    Entry::Blob(blob) => damaged.note(version, blobs.get(&blob))?,
                });
            }
        }
        Ok(())
    })?;
    damaged.none()?;
    let recovered = Recovered { snapshot, records };
    if recovered.version().0 != contents.head {
        let what = format!("it reads up to record {}, not {}", recovered.version(), contents.head);
        return Err(corrupt(dir, what));
    }
    Ok(recovered)
}

/// A page of the archive.
pub(crate) fn archived(
    tree: &sled::Tree,
    blobs: &BlobDir,
    dir: &Path,
    from_key: &str,
    limit: usize,
) -> Result<Vec<ArchiveEntry>> {
    let mut entries = Vec::new();
    for pair in tree.range(layout::archive_key(from_key)..layout::ARCHIVE_END.to_vec()).take(limit) {
        let (key, mut value) = pair.map_err(|error| sled_error(dir, "read", &error))?;
        let name = key.strip_prefix(layout::ARCHIVE_PREFIX).and_then(|name| std::str::from_utf8(name).ok());
        let name = name.ok_or_else(|| corrupt(dir, "the key of an archive entry is not text"))?;
        let mut tries = 0;
        let bytes = loop {
            match archived_value(tree, blobs, dir, name, &key, &value) {
                Ok(bytes) => break bytes,
                Err(error) => {
                    tries += 1;
                    let now = tree.get(&key).map_err(|error| sled_error(dir, "read", &error))?;
                    match now {
                        // It was replaced between its head and its parts.
                        Some(now) if now != value && tries < ARCHIVE_READ_TRIES => value = now,
                        _ => return Err(error),
                    }
                }
            }
        };
        entries.push(ArchiveEntry { key: name.to_owned(), value: bytes });
    }
    Ok(entries)
}

fn archived_value(
    tree: &sled::Tree,
    blobs: &BlobDir,
    dir: &Path,
    name: &str,
    key: &[u8],
    head: &[u8],
) -> Result<Vec<u8>> {
    let damaged = |what: &str| corrupt(dir, format!("archive entry `{}` {what}", name.escape_debug()));
    let body = layout::unframe(key, head).map_err(|what| corrupt(dir, what))?;
    match layout::archive_head(body).ok_or_else(|| damaged("cannot be read"))? {
        ArchiveHead::Blob(blob) => blobs.get(&blob),
        ArchiveHead::Inline { len, checksum, first } => {
            let mut bytes = first.to_vec();
            let mut part = 1;
            // Each part must add something, so a damaged entry cannot keep us here.
            while bytes.len() < len {
                let key = layout::archive_part_key(name, part);
                let value = tree.get(&key).map_err(|error| sled_error(dir, "read", &error))?;
                let value = value.ok_or_else(|| damaged("misses a part"))?;
                let body = layout::unframe(&key, &value).map_err(|what| corrupt(dir, what))?;
                if body.is_empty() {
                    return Err(damaged("has an empty part"));
                }
                bytes.extend(body);
                part += 1;
            }
            if bytes.len() != len || crc32c::crc32c(&bytes) != checksum {
                return Err(damaged("does not match its checksum"));
            }
            Ok(bytes)
        }
    }
}

fn load_snapshots(tree: &sled::Tree, blobs: &BlobDir, dir: &Path, contents: &mut Contents) -> Result<()> {
    let mut found = BTreeMap::new();
    for pair in tree.scan_prefix(layout::SNAPSHOT_PREFIX) {
        let (key, value) = pair.map_err(|error| sled_error(dir, "read", &error))?;
        let body = layout::unframe(&key, &value).map_err(|what| corrupt(dir, what))?;
        let version = layout::snapshot_version(&key).zip(BlobRef::decode(body));
        let (version, blob) = version.ok_or_else(|| corrupt(dir, "the name of a snapshot cannot be read"))?;
        contents.use_blobs(&[blob.hash]);
        found.insert(version, blob);
    }
    // Only the newest good one is needed; the one before it is read when that one turns out bad.
    while let Some((version, blob)) = found.pop_last() {
        match blobs.get(&blob) {
            Ok(_) => {
                found.insert(version, blob);
                break;
            }
            Err(error @ StoreError::Corrupt { .. }) => {
                tracing::warn!(version, %error, "a snapshot cannot be read, falling back to the one before it");
                contents.bad_snapshots.insert(version, blob);
            }
            Err(error) => return Err(error),
        }
    }
    contents.snapshots = found;
    Ok(())
}

fn each_pack(tree: &sled::Tree, dir: &Path, mut each: impl FnMut(ReadPack) -> Result<()>) -> Result<()> {
    let mut reader = PackReader::default();
    for pair in tree.scan_prefix(layout::RECORD_PREFIX) {
        let (key, value) = pair.map_err(|error| sled_error(dir, "read", &error))?;
        if let Some(pack) = reader.push(&key, &value).map_err(|what| corrupt(dir, what))? {
            each(pack)?;
        }
    }
    reader.finish().map_err(|what| corrupt(dir, what))
}

/// Checks that the packs follow on each other and on the snapshots, and returns the version of the store.
fn check_numbering(dir: &Path, contents: &Contents) -> Result<u64> {
    let newest = contents.snapshots.last_key_value().map_or(0, |(&version, _)| version);
    let known = newest.max(contents.bad_snapshots.last_key_value().map_or(0, |(&version, _)| version));
    let mut head = match contents.packs.first_key_value() {
        Some((&first, _)) if first > newest => {
            return Err(corrupt(dir, format!("records {newest} to {} are missing", first - 1)));
        }
        Some((&first, _)) => first,
        None => newest,
    };
    for (&first, pack) in &contents.packs {
        if first != head {
            return Err(corrupt(dir, format!("after record {head} comes record {first}")));
        }
        head += u64::from(pack.count);
    }
    if head < known {
        return Err(corrupt(dir, format!("records {head} to {} are missing", known - 1)));
    }
    Ok(head)
}
