//! Content-addressed files for what is too large for sled: `blobs/<first two digits>/<blake3 of the content>`.
//!
//! A file gets its name only after its content is on the device, and never changes after that. This module must never
//! return bytes that do not match the name they were asked by.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use spotq_store::{MAX_RECORD_BYTES, Result, StoreError};

use crate::failure::{corrupt, io_error, sync_dir};

/// The longest blob that is read back, so that a damaged length cannot ask for all memory. Snapshots are the largest
/// blobs; the engine's state of a million tasks stays below this by far.
pub(crate) const MAX_BLOB_BYTES: u64 = 16 * 1024 * 1024 * 1024;

const TEMPORARY_PREFIX: &str = "tmp-";

/// How to repair one damaged file. A name is given once, so all backups that have it have the same bytes.
const REPAIR: &str =
    "only this file must be replaced: any backup with a file of this name has the right bytes";

/// The name of a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct BlobRef {
    pub(crate) hash: [u8; 32],
    pub(crate) len: u64,
}

/// A blob that is on the device but has no name yet. It goes away when it is not published.
#[derive(Debug)]
pub(crate) struct Staged {
    pub(crate) blob: BlobRef,
    path: PathBuf,
}

#[derive(Debug, Clone)]
pub(crate) struct BlobDir {
    dir: PathBuf,
    next_temporary: Arc<AtomicU64>,
}

impl BlobDir {
    /// `dir` exists.
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self { dir, next_temporary: Arc::default() }
    }

    pub(crate) fn path(&self, hash: &[u8; 32]) -> PathBuf {
        let name = blake3::Hash::from_bytes(*hash).to_hex();
        self.dir.join(&name.as_str()[..2]).join(name.as_str())
    }

    /// Writes `bytes` to a file without a lasting name and syncs it.
    pub(crate) fn stage(&self, bytes: &[u8]) -> Result<Staged> {
        if bytes.len() as u64 > MAX_BLOB_BYTES {
            let size = bytes.len() as u64;
            return Err(StoreError::TooLarge { what: "snapshot (bytes)", size, limit: MAX_BLOB_BYTES });
        }
        let blob = BlobRef { hash: *blake3::hash(bytes).as_bytes(), len: bytes.len() as u64 };
        let number = self.next_temporary.fetch_add(1, Ordering::Relaxed);
        let path = self.dir.join(format!("{TEMPORARY_PREFIX}{number}"));
        // From here on dropping `staged` removes the file.
        let staged = Staged { blob, path };
        let written = File::create(&staged.path).and_then(|mut file| {
            file.write_all(bytes)?;
            // This file was never promised to anyone, so its failed sync can be reported instead of ending the process.
            file.sync_all()
        });
        written.map_err(|error| io_error(&staged.path, "write", &error))?;
        Ok(staged)
    }

    /// Gives a staged blob its name, durably.
    pub(crate) fn publish(&self, staged: &Staged) -> Result<BlobRef> {
        let path = self.path(&staged.blob.hash);
        let parent = path.parent().unwrap_or(&self.dir);
        match fs::create_dir(parent) {
            Ok(()) => sync_dir(&self.dir)?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(io_error(parent, "create", &error)),
        }
        fs::rename(&staged.path, &path).map_err(|error| io_error(&path, "rename", &error))?;
        sync_dir(parent)?;
        Ok(staged.blob)
    }

    /// Writes a blob durably.
    pub(crate) fn put(&self, bytes: &[u8]) -> Result<BlobRef> {
        self.publish(&self.stage(bytes)?)
    }

    /// Reads a blob and checks it against its name.
    pub(crate) fn get(&self, blob: &BlobRef) -> Result<Vec<u8>> {
        let path = self.path(&blob.hash);
        let metadata = fs::metadata(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => corrupt(&path, format!("the file is missing; {REPAIR}")),
            _ => io_error(&path, "read", &error),
        })?;
        if metadata.len() != blob.len {
            let what = format!("the file has {} bytes instead of {}; {REPAIR}", metadata.len(), blob.len);
            return Err(corrupt(&path, what));
        }
        let bytes = fs::read(&path).map_err(|error| io_error(&path, "read", &error))?;
        if *blake3::hash(&bytes).as_bytes() != blob.hash {
            return Err(corrupt(&path, format!("the content does not match the name of the file; {REPAIR}")));
        }
        Ok(bytes)
    }

    /// Removes a blob that nothing refers to any more. A failure only costs space until the next start.
    pub(crate) fn remove(&self, hash: &[u8; 32]) {
        let path = self.path(hash);
        if let Err(error) = fs::remove_file(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %path.display(), %error, "could not remove an old blob");
        }
    }

    /// Removes what a crash left behind: temporary files, and blobs that are not `referenced`.
    pub(crate) fn sweep(&self, referenced: &HashSet<[u8; 32]>) -> Result<()> {
        for entry in list(&self.dir)? {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.starts_with(TEMPORARY_PREFIX) {
                fs::remove_file(entry.path()).map_err(|error| io_error(&entry.path(), "remove", &error))?;
            } else if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                for blob in list(&entry.path())? {
                    let name = blob.file_name();
                    // Only names that we gave are ours to remove.
                    if let Ok(hash) = blake3::Hash::from_hex(name.as_encoded_bytes())
                        && !referenced.contains(hash.as_bytes())
                    {
                        self.remove(hash.as_bytes());
                    }
                }
            }
        }
        Ok(())
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // After publishing there is nothing at this path; before, the file is of no use to anyone.
        fs::remove_file(&self.path).ok();
    }
}

impl BlobRef {
    pub(crate) const ENCODED_BYTES: usize = 40;

    pub(crate) fn encode(&self) -> [u8; Self::ENCODED_BYTES] {
        let mut bytes = [0; Self::ENCODED_BYTES];
        bytes[..32].copy_from_slice(&self.hash);
        bytes[32..].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (hash, len) = bytes.split_at_checked(32)?;
        let len = u64::from_le_bytes(len.try_into().ok()?);
        if len > MAX_BLOB_BYTES.max(MAX_RECORD_BYTES as u64) {
            return None;
        }
        Some(Self { hash: hash.try_into().ok()?, len })
    }
}

fn list(dir: &Path) -> Result<Vec<fs::DirEntry>> {
    fs::read_dir(dir)
        .and_then(Iterator::collect::<io::Result<Vec<_>>>)
        .map_err(|error| io_error(dir, "list", &error))
}
