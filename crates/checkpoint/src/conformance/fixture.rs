//! Directories and requests for the suite.
//!
//! For tests only.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use object_store::ObjectStore;
use spotq_model::{Generation, Profile};

use crate::{JobKey, Options, PushRequest, Repository, Selection};

/// Small, so that a file of some kilobytes has several chunks.
const TEST_CHUNK_BYTES: usize = 1024;

/// What a directory holds, in full: two equal trees are the same checkpoint, bit for bit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tree(BTreeMap<Vec<u8>, Item>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Item {
    File { bytes: Vec<u8>, mode: u32, mtime: (i64, i64) },
    Dir { mode: u32 },
    Link { target: Vec<u8> },
}

impl Tree {
    /// Reads a directory; an absent one has no items.
    ///
    /// # Panics
    /// If it cannot be read.
    #[must_use]
    pub fn read(dir: &Path) -> Self {
        let mut items = BTreeMap::new();
        if dir.exists() {
            read_into(dir, dir, &mut items);
        }
        Self(items)
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

fn read_into(root: &Path, dir: &Path, items: &mut BTreeMap<Vec<u8>, Item>) {
    use std::os::unix::ffi::OsStrExt;
    for item in fs::read_dir(dir).expect("test directory is readable") {
        let path = item.expect("test directory is readable").path();
        let meta = fs::symlink_metadata(&path).expect("test file can be looked at");
        let relative = path.strip_prefix(root).expect("found below the root").as_os_str().as_bytes().to_vec();
        let mode = meta.mode() & 0o7777;
        if meta.is_dir() {
            items.insert(relative, Item::Dir { mode });
            read_into(root, &path, items);
        } else if meta.is_symlink() {
            let target = fs::read_link(&path).expect("test link is readable").as_os_str().as_bytes().to_vec();
            items.insert(relative, Item::Link { target });
        } else {
            let bytes = fs::read(&path).expect("test file is readable");
            items.insert(relative, Item::File { bytes, mode, mtime: (meta.mtime(), meta.mtime_nsec()) });
        }
    }
}

/// A repository with small chunks and the suite's key.
#[must_use]
pub fn repository(store: Arc<dyn ObjectStore>, prefix: &object_store::path::Path) -> Repository {
    let options = Options { chunk_bytes: TEST_CHUNK_BYTES, ..Options::default() };
    Repository::open(store, prefix.clone(), JobKey([7; 32]), options)
}

/// A request to push everything.
#[must_use]
pub fn request(generation: u64, step: u64) -> PushRequest {
    PushRequest {
        generation: Generation(generation),
        step: Some(step),
        profile: Profile::Generic,
        created_at_ms: 1,
        selection: Selection::default(),
    }
}

/// Bytes that look random and repeat nowhere, from a seed.
pub(super) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut out);
    out
}

/// A checkpoint of two files, one of several chunks.
pub(super) fn write_state(dir: &Path, seed: u64) {
    fs::create_dir_all(dir.join("shards")).expect("test directory is writable");
    fs::write(dir.join("model.bin"), noise(seed, 5000)).expect("test file is writable");
    fs::write(dir.join("shards/optim.bin"), noise(seed + 1000, 700)).expect("test file is writable");
}
