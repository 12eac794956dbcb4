//! Opens the directory of a store: lock, format, sled, and what a crash may have left behind.
//!
//! It must never remove data that it did not understand: what stands in the way is renamed and reported. sled drops what
//! it does not understand, so it never gets the only copy (see [`crate::original`]).

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use spotq_store::{Result, StoreError};

use crate::SledOptions;
use crate::blobs::BlobDir;
use crate::failure::{corrupt, damage_in, io_error, sync_data, sync_dir};
use crate::original::Original;
use crate::scan::{self, Contents};
use crate::watermark::Watermark;

/// The name of sled's own data file.
pub(crate) const SLED_FILE: &str = "db";

const LOCK_FILE: &str = "lock";
const FORMAT_FILE: &str = "format";
const SLED_DIR: &str = "sled";
const BLOB_DIR: &str = "blobs";

/// The format of the directory. A store with a higher one is refused.
const STORE_FORMAT: u64 = 1;
const FORMAT_WORDS: &str = "spotq store, sled 0.34, format ";

/// sled's settings, which it cannot read the store without. For a store of our format they are always these bytes: sled's
/// defaults and their CRC32, little endian.
const SLED_SETTINGS_FILE: &str = "conf";
const SLED_SETTINGS: &[u8] = b"segment_size: 524288\nuse_compression: false\nversion: 0.34\n\x76\x19\x51\xc1";

/// How long to wait for sled's own file lock. We hold ours by then, so only threads of a store that this process just
/// closed can still have it.
const SLED_LOCK_PATIENCE: Duration = Duration::from_secs(10);

/// How many files of one name are set aside before something is clearly wrong with the disk.
const MAX_SET_ASIDE: usize = 1000;

/// An open directory.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) dir: PathBuf,
    pub(crate) db: sled::Db,
    /// sled's data file, for `fdatasync`.
    pub(crate) sled_file: File,
    pub(crate) sled_path: PathBuf,
    pub(crate) blobs: BlobDir,
    pub(crate) watermark: Watermark,
    pub(crate) contents: Contents,
    /// Held until the store is closed. Declared last, so that it is dropped after sled.
    pub(crate) lock: File,
}

pub(crate) fn open(dir: &Path, options: &SledOptions) -> Result<Opened> {
    create_dir_durably(dir)?;
    let lock = lock(dir)?;
    let sled_dir = dir.join(SLED_DIR);
    let blob_dir = dir.join(BLOB_DIR);
    let is_new = !check_format(dir)?;
    if is_new {
        set_unfinished_aside(dir, &sled_dir, &blob_dir)?;
    }
    for sub in [&sled_dir, &blob_dir] {
        if is_new {
            create_dir_durably(sub)?;
        } else if !sub.is_dir() {
            return Err(corrupt(sub, "the directory is missing"));
        }
    }
    let sled_path = sled_dir.join(SLED_FILE);
    match File::open(&sled_path) {
        Ok(file) => forget_what_only_the_kernel_has(&file, &sled_path)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound && is_new => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(corrupt(&sled_path, "the file is missing"));
        }
        Err(error) => return Err(io_error(&sled_path, "open", &error)),
    }
    let blobs = BlobDir::new(blob_dir);
    let (db, contents, watermark) = if is_new {
        let (db, contents, _) = open_sled(dir, &sled_dir, &blobs, 0, options)?;
        sync_tree(&sled_dir)?;
        write_format(dir)?;
        (db, contents, Watermark::open(dir)?.0)
    } else {
        open_existing(dir, &sled_dir, &blobs, options)?
    };
    let sled_file = File::open(&sled_path).map_err(|error| io_error(&sled_path, "open", &error))?;
    blobs.sweep(&contents.referenced_blobs())?;
    Ok(Opened { dir: dir.to_owned(), db, sled_file, sled_path, blobs, watermark, contents, lock })
}

pub(crate) fn sled_config(dir: &Path, cache_bytes: u64) -> sled::Config {
    // The writer flushes itself; a second flusher in the background would only get in its way.
    sled::Config::new().path(dir).mode(sled::Mode::LowSpace).cache_capacity(cache_bytes).flush_every_ms(None)
}

/// Creates `dir` and its parents, each of them durably. Errors: [`StoreError::NotADirectory`] and the like.
fn create_dir_durably(dir: &Path) -> Result<()> {
    match fs::metadata(dir) {
        Ok(metadata) if metadata.is_dir() => return Ok(()),
        Ok(_) => return Err(StoreError::NotADirectory { path: dir.to_owned() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(io_error(dir, "open", &error)),
    }
    let parent = match dir.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    create_dir_durably(parent)?;
    match fs::create_dir(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(io_error(dir, "create", &error)),
        _ => sync_dir(parent),
    }
}

/// Makes room for a new store where a first start was cut short. Nothing was acknowledged then.
fn set_unfinished_aside(dir: &Path, sled_dir: &Path, blob_dir: &Path) -> Result<()> {
    if !sled_dir.exists() {
        return Ok(());
    }
    // Both are made after the format file is durable, so that one was lost later, and this is a store.
    let has_blobs = fs::read_dir(blob_dir).is_ok_and(|mut blobs| blobs.next().is_some());
    if has_blobs || Watermark::exists(dir) {
        let what = format!(
            "the file is missing, but a store is here; if only this file was lost, it is enough to write the line \
             `{FORMAT_WORDS}{STORE_FORMAT}` to it and to start again"
        );
        return Err(corrupt(&dir.join(FORMAT_FILE), what));
    }
    let aside = set_aside(sled_dir, "unfinished")?;
    tracing::warn!(aside = %aside.display(), "an unfinished store was set aside");
    Ok(())
}

fn lock(dir: &Path) -> Result<File> {
    let path = dir.join(LOCK_FILE);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(|error| io_error(dir, "open the lock", &error))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(StoreError::InUse { path: dir.to_owned() }),
        Err(error) => Err(io_error(&path, "lock", &error.into())),
    }
}

/// Makes sure that what is read from the file is what the device has. A killed process leaves pages that only the
/// kernel has, and sled writes a summary of them to another file as it opens, so they are synced first. A process that
/// ended over a failed sync leaves pages that look written but are not, so the kernel is asked to read all of them again.
fn forget_what_only_the_kernel_has(file: &File, path: &Path) -> Result<()> {
    sync_data(file, path);
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed)
        .map_err(|error| io_error(path, "read again", &error.into()))
}

/// Whether the store was created completely, in a format that we know.
fn check_format(dir: &Path) -> Result<bool> {
    let path = dir.join(FORMAT_FILE);
    let text = match fs::read(&path) {
        Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(io_error(&path, "read", &error)),
    };
    let found = text.strip_prefix(FORMAT_WORDS).and_then(|number| number.trim_end().parse::<u64>().ok());
    match found {
        Some(found) if found > STORE_FORMAT => {
            Err(StoreError::UnknownFormat { path: dir.to_owned(), found, known: STORE_FORMAT })
        }
        Some(_) => Ok(true),
        None => Err(corrupt(&path, format!("expected `{FORMAT_WORDS}{STORE_FORMAT}`"))),
    }
}

fn write_format(dir: &Path) -> Result<()> {
    let path = dir.join(FORMAT_FILE);
    let temporary = dir.join("format.tmp");
    let written = File::create(&temporary).and_then(|mut file| {
        writeln!(file, "{FORMAT_WORDS}{STORE_FORMAT}")?;
        file.sync_all()?;
        fs::rename(&temporary, &path)
    });
    written.map_err(|error| io_error(&path, "write", &error))?;
    sync_dir(dir)
}

/// Opens a store that was there before, and does not let go of sled's files as they were before it is found sound.
fn open_existing(
    dir: &Path,
    sled_dir: &Path,
    blobs: &BlobDir,
    options: &SledOptions,
) -> Result<(sled::Db, Contents, Watermark)> {
    let original = {
        let _idle = wait_for_sled(dir, sled_dir)?;
        Original::keep(dir, sled_dir)?
    };
    let opened = Watermark::open(dir).and_then(|(watermark, acknowledged)| {
        repair_settings(sled_dir)?;
        let (db, contents, rebuilt) = open_sled(dir, sled_dir, blobs, acknowledged, options)?;
        sync_tree(sled_dir)?;
        Ok(((db, contents, watermark), rebuilt))
    });
    match opened {
        Ok((opened, rebuilt)) => {
            original.sound(rebuilt, |copy| set_aside(copy, "old"))?;
            Ok(opened)
        }
        Err(error) => Err(original.failed(error)),
    }
}

/// Sets sled's settings aside when they are damaged. There is only one thing that can have been in them, and sled writes
/// that again.
fn repair_settings(sled_dir: &Path) -> Result<()> {
    let path = sled_dir.join(SLED_SETTINGS_FILE);
    match fs::read(&path) {
        Ok(bytes) if bytes == SLED_SETTINGS => Ok(()),
        Ok(_) => {
            let aside = set_aside(&path, "corrupt")?;
            tracing::warn!(
                aside = %aside.display(),
                "sled's settings were damaged: set aside and written again; check the disk"
            );
            Ok(())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(io_error(&path, "read", &error)),
    }
}

/// Opens sled and reads all of the store. When that fails, sled's summary of its file (`snap.*`) may be to blame; it
/// can be computed again, so it is set aside once. Returns whether that was done as well.
fn open_sled(
    dir: &Path,
    sled_dir: &Path,
    blobs: &BlobDir,
    acknowledged: u64,
    options: &SledOptions,
) -> Result<(sled::Db, Contents, bool)> {
    let first = match try_open(dir, sled_dir, blobs, acknowledged, options) {
        Ok((db, contents)) => return Ok((db, contents, false)),
        Err(error) => error,
    };
    let StoreError::Corrupt { what, .. } = &first else { return Err(first) };
    let idle = wait_for_sled(dir, sled_dir)?;
    let summaries = sled_summaries(sled_dir)?;
    if summaries.is_empty() {
        return Err(first);
    }
    let mut moved = Vec::with_capacity(summaries.len());
    for path in summaries {
        let aside = set_aside(&path, "corrupt")?;
        moved.push((path, aside));
    }
    drop(idle);
    if let Ok((db, contents)) = try_open(dir, sled_dir, blobs, acknowledged, options) {
        for (_, aside) in &moved {
            tracing::warn!(aside = %aside.display(), what, "sled's summary was damaged: set aside and rebuilt");
        }
        return Ok((db, contents, true));
    }
    // They were not to blame, and what was wrong with them in place says more than what was wrong without.
    for (path, aside) in moved.iter().filter(|(path, _)| !path.exists()) {
        fs::rename(aside, path).map_err(|error| io_error(aside, "rename", &error))?;
    }
    Err(first)
}

fn try_open(
    dir: &Path,
    sled_dir: &Path,
    blobs: &BlobDir,
    acknowledged: u64,
    options: &SledOptions,
) -> Result<(sled::Db, Contents)> {
    // sled asserts what it expects of its own files, so damaged bytes can make it panic.
    catch_unwind(AssertUnwindSafe(|| {
        let db = open_when_unlocked(dir, sled_dir, options)?;
        let contents = scan::load(&db, blobs, dir)?;
        if acknowledged > contents.head {
            let what = format!("records {} to {} are missing", contents.head, acknowledged - 1);
            return Err(corrupt(dir, what));
        }
        Ok((db, contents))
    }))
    .unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
        Err(corrupt(sled_dir, format!("sled cannot read its files ({text})")))
    })
}

/// Waits until no thread of sled's writes to its files any more, and keeps it so until the file is dropped.
fn wait_for_sled(dir: &Path, sled_dir: &Path) -> Result<File> {
    let path = sled_dir.join(SLED_FILE);
    let file = File::open(&path).map_err(|error| io_error(&path, "open", &error))?;
    while_locked(dir, || match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(())),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(io_error(&path, "lock", &error.into())),
    })?;
    Ok(file)
}

fn open_when_unlocked(dir: &Path, sled_dir: &Path, options: &SledOptions) -> Result<sled::Db> {
    while_locked(dir, || match sled_config(sled_dir, options.cache_bytes).open() {
        Ok(db) => Ok(Some(db)),
        // sled has no kind of its own for this.
        Err(sled::Error::Io(error)) if error.to_string().contains("could not acquire lock") => Ok(None),
        Err(sled::Error::Io(error)) if error.kind() != io::ErrorKind::UnexpectedEof => {
            Err(io_error(sled_dir, "open", &error))
        }
        // Everything else that sled says while it opens is about the bytes it found.
        Err(error) => Err(corrupt(sled_dir, damage_in(&error))),
    })
}

/// Tries until `attempt` finds sled's lock free.
#[expect(
    clippy::disallowed_methods,
    reason = "runs at start, outside of async code, and only until a lock is free"
)]
fn while_locked<T>(dir: &Path, mut attempt: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + SLED_LOCK_PATIENCE;
    loop {
        if let Some(value) = attempt()? {
            return Ok(value);
        }
        if Instant::now() >= deadline {
            return Err(StoreError::InUse { path: dir.to_owned() });
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn sled_summaries(sled_dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(sled_dir).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    let entries = entries.map_err(|error| io_error(sled_dir, "list", &error))?;
    let named = entries.into_iter().filter(|entry| entry.file_name().to_string_lossy().starts_with("snap."));
    Ok(named.map(|entry| entry.path()).collect())
}

/// Renames `path` to `<why>-<n>-<name>` beside it, durably.
fn set_aside(path: &Path, why: &str) -> Result<PathBuf> {
    let parent = path.parent().unwrap_or(Path::new("."));
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let free =
        (1..MAX_SET_ASIDE).map(|n| parent.join(format!("{why}-{n}-{name}"))).find(|aside| !aside.exists());
    let Some(aside) = free else {
        return Err(corrupt(path, format!("it was set aside {MAX_SET_ASIDE} times already")));
    };
    fs::rename(path, &aside).map_err(|error| io_error(path, "rename", &error))?;
    sync_dir(parent)?;
    Ok(aside)
}

/// Syncs sled's files and their names.
fn sync_tree(sled_dir: &Path) -> Result<()> {
    let entries = fs::read_dir(sled_dir).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    for entry in entries.map_err(|error| io_error(sled_dir, "list", &error))? {
        let path = entry.path();
        if path.is_dir() {
            sync_dir(&path)?;
        } else {
            let file = File::open(&path).map_err(|error| io_error(&path, "open", &error))?;
            file.sync_all().map_err(|error| io_error(&path, "sync", &error))?;
        }
    }
    sync_dir(sled_dir)
}
