//! Keeps sled's files as they were found while a store is opened.
//!
//! sled takes damage for a torn write: as it opens, it drops what comes after the damaged bytes and rewrites its file.
//! So it gets the only copy of the records never: until the store was found sound, the files as they were found lie in
//! a directory beside it. This module must never replace such a directory while nobody knows whether the store is
//! sound, and never remove one that belongs to a damaged store.
//!
//! | directory | what it is |
//! |---|---|
//! | `sled-before-opening.tmp` | half made, or to be removed |
//! | `sled-before-opening` | whole; the opening that made it did not come to an end |
//! | `sled-found-damaged` | whole; the store was found damaged and was not found sound since |

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use spotq_store::{Result, StoreError};

use crate::failure::{io_error, sync_dir};

const TEMPORARY: &str = "sled-before-opening.tmp";
const WHOLE: &str = "sled-before-opening";
const DAMAGED: &str = "sled-found-damaged";

/// The most that is copied byte by byte, so that a start does not wait for minutes. Snapshots keep a store below a
/// tenth of this; one that is larger holds a large archive, and its file system can share blocks or it goes without.
const MAX_COPIED_BYTES: u64 = 1024 * 1024 * 1024;

/// What must stay free behind a copy: sled itself writes a few segments of 512 KiB as it opens, and cannot go on when it
/// finds no room.
const ROOM_FOR_SLED: u64 = 16 * 1024 * 1024;

const BUFFER_BYTES: usize = 256 * 1024;

/// sled's files as they were found.
#[derive(Debug)]
pub(crate) struct Original {
    dir: PathBuf,
    kept: Kept,
}

#[derive(Debug)]
enum Kept {
    /// By this opening, or by one that did not come to an end.
    Whole,
    /// By an opening that found the store damaged.
    Damaged,
    /// The reason.
    No(String),
}

/// How files may be copied.
#[derive(Debug, Clone, Copy)]
struct Means {
    /// Whether to let both files share their blocks where the file system can.
    share: bool,
    max_copied_bytes: u64,
    room_left: u64,
}

/// Why there is no copy.
#[derive(Debug)]
enum NoCopy {
    /// sled's files cannot be read. It would take that for damage, so it must not open them.
    Unreadable(StoreError),
    /// The store is opened without one.
    Skipped(String),
}

impl Original {
    /// Keeps the files in `sled_dir` in `dir`. The caller holds the locks of both, so nobody writes to them.
    pub(crate) fn keep(dir: &Path, sled_dir: &Path) -> Result<Self> {
        let means = Means { share: true, max_copied_bytes: MAX_COPIED_BYTES, room_left: ROOM_FOR_SLED };
        Self::keep_by(dir, sled_dir, means)
    }

    fn keep_by(dir: &Path, sled_dir: &Path, means: Means) -> Result<Self> {
        let with = |kept| Ok(Self { dir: dir.to_owned(), kept });
        // What sled left behind of a store since then is worth less than what it was given.
        if dir.join(DAMAGED).exists() {
            return with(Kept::Damaged);
        }
        if dir.join(WHOLE).exists() {
            return with(Kept::Whole);
        }
        match make(dir, sled_dir, means) {
            Ok(()) => with(Kept::Whole),
            Err(NoCopy::Unreadable(error)) => Err(error),
            // A full disk must not keep a scheduler from starting: its tasks run on and cost money, and only together
            // with damage, which is rare, is the copy of use.
            Err(NoCopy::Skipped(reason)) => {
                remove_temporary(dir);
                tracing::warn!(
                    store = %dir.display(),
                    reason,
                    "opening the store without a copy of its files; if they are damaged, that may not be undone"
                );
                with(Kept::No(reason))
            }
        }
    }

    /// The store was found sound. The copy is kept when sled's summary had to be `rebuilt`: nobody can say then that
    /// nothing was dropped with the old one, only that no acknowledged record is known to be missing.
    pub(crate) fn sound(self, rebuilt: bool, set_aside: impl FnOnce(&Path) -> Result<PathBuf>) -> Result<()> {
        let name = match self.kept {
            Kept::Whole if !rebuilt => return self.discard(),
            Kept::Whole => WHOLE,
            // Somebody repaired the store or put a backup in its place, which may have less in it.
            Kept::Damaged => DAMAGED,
            Kept::No(_) => return Ok(()),
        };
        let aside = set_aside(&self.dir.join(name))?;
        tracing::warn!(
            aside = %aside.display(),
            "the store is sound again; its files as they were found damaged are kept until somebody removes them"
        );
        Ok(())
    }

    /// The store could not be opened. Returns the error with what must be known of the copy.
    pub(crate) fn failed(self, error: StoreError) -> StoreError {
        match error {
            StoreError::Corrupt { path, what } => {
                let what = match self.keep_damaged() {
                    Ok(place) => {
                        format!(
                            "{what}; a copy of sled's files from before it was opened is in {}",
                            place.display()
                        )
                    }
                    Err(reason) => format!("{what}; there is no copy from before it was opened ({reason})"),
                };
                StoreError::Corrupt { path, what }
            }
            // Whether the store is sound is for the next opening to say.
            other => other,
        }
    }

    fn keep_damaged(self) -> Result<PathBuf, String> {
        let (whole, damaged) = (self.dir.join(WHOLE), self.dir.join(DAMAGED));
        match self.kept {
            Kept::Whole => match fs::rename(&whole, &damaged) {
                Ok(()) => sync_dir(&self.dir).map(|()| damaged).map_err(|error| error.to_string()),
                Err(error) => {
                    tracing::warn!(%error, copy = %whole.display(), "could not rename the copy of a damaged store");
                    Ok(whole)
                }
            },
            Kept::Damaged => Ok(damaged),
            Kept::No(reason) => Err(reason),
        }
    }

    /// Removes the copy. Its name goes first and durably: after the first write to the store it would be an old copy,
    /// which the next opening must not take for the better one.
    fn discard(&self) -> Result<()> {
        let whole = self.dir.join(WHOLE);
        fs::rename(&whole, self.dir.join(TEMPORARY)).map_err(|error| io_error(&whole, "rename", &error))?;
        sync_dir(&self.dir)?;
        remove_temporary(&self.dir);
        Ok(())
    }
}

/// A failure only costs space until the next start.
fn remove_temporary(dir: &Path) {
    let path = dir.join(TEMPORARY);
    if let Err(error) = fs::remove_dir_all(&path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "could not remove an old copy of the store");
    }
}

/// Copies all of `sled_dir` to `WHOLE`. It gets that name once everything is on the device, so that it is whole after a
/// power cut too.
fn make(dir: &Path, sled_dir: &Path, means: Means) -> Result<(), NoCopy> {
    let temporary = dir.join(TEMPORARY);
    remove_temporary(dir);
    let unreadable = |error: io::Error| NoCopy::Unreadable(io_error(sled_dir, "read", &error));
    let (dirs, files) = list(sled_dir).map_err(unreadable)?;
    let size = files.iter().map(|(_, size)| size).sum();
    let skipped = |error: io::Error| NoCopy::Skipped(format!("{}: {error}", temporary.display()));
    for below in &dirs {
        fs::create_dir(temporary.join(below)).map_err(skipped)?;
    }
    let mut checked = false;
    for (name, _) in &files {
        let from_path = sled_dir.join(name);
        let from = File::open(&from_path).map_err(unreadable)?;
        let to = File::create_new(temporary.join(name)).map_err(skipped)?;
        if !(means.share && rustix::fs::ioctl_ficlone(&to, &from).is_ok()) {
            if !checked {
                check_cost(dir, size, means)?;
                checked = true;
            }
            copy(&from, &from_path, &to, &temporary)?;
        }
        to.sync_all().map_err(skipped)?;
    }
    for below in dirs.iter().rev() {
        File::open(temporary.join(below)).and_then(|dir| dir.sync_all()).map_err(skipped)?;
    }
    fs::rename(&temporary, dir.join(WHOLE)).map_err(skipped)?;
    sync_dir(dir).map_err(NoCopy::Unreadable)
}

/// Directories, parents first, and files with their sizes, both relative to `dir`.
type Listed = (Vec<PathBuf>, Vec<(PathBuf, u64)>);

fn list(dir: &Path) -> io::Result<Listed> {
    let mut dirs = vec![PathBuf::new()];
    let mut files = Vec::new();
    let mut next = 0;
    // sled has one directory in its own. A link is neither kind, so this comes to an end.
    while let Some(below) = dirs.get(next).cloned() {
        next += 1;
        for entry in fs::read_dir(dir.join(&below))? {
            let entry = entry?;
            let metadata = entry.metadata()?;
            let name = below.join(entry.file_name());
            if metadata.is_dir() {
                dirs.push(name);
            } else if metadata.is_file() {
                files.push((name, metadata.len()));
            }
        }
    }
    Ok((dirs, files))
}

/// Whether `size` bytes may be written.
fn check_cost(dir: &Path, size: u64, means: Means) -> Result<(), NoCopy> {
    if size > means.max_copied_bytes {
        let limit = means.max_copied_bytes;
        return Err(NoCopy::Skipped(format!(
            "it has {size} bytes, at most {limit} are copied where the file system cannot share blocks"
        )));
    }
    let disk = rustix::fs::statvfs(dir)
        .map_err(|error| NoCopy::Skipped(format!("free space of {}: {error}", dir.display())))?;
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    let needed = size.saturating_add(means.room_left);
    if free < needed {
        return Err(NoCopy::Skipped(format!("the disk has {free} bytes free, the copy needs {needed}")));
    }
    Ok(())
}

/// Copies the bytes, and tells a file that cannot be read from one that cannot be written.
fn copy(mut from: &File, from_path: &Path, mut to: &File, to_dir: &Path) -> Result<(), NoCopy> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let read = match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(NoCopy::Unreadable(io_error(from_path, "read", &error))),
        };
        to.write_all(&buffer[..read])
            .map_err(|error| NoCopy::Skipped(format!("{}: {error}", to_dir.display())))?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Means = Means { share: false, max_copied_bytes: 1 << 20, room_left: 0 };

    fn sample() -> (tempfile::TempDir, PathBuf) {
        let temporary = tempfile::tempdir().unwrap();
        let sled_dir = temporary.path().join("sled");
        fs::create_dir_all(sled_dir.join("blobs")).unwrap();
        fs::write(sled_dir.join("db"), vec![7; 300_000]).unwrap();
        fs::write(sled_dir.join("blobs/1"), b"blob").unwrap();
        (temporary, sled_dir)
    }

    fn not_moved(_: &Path) -> Result<PathBuf> {
        panic!("nothing to set aside")
    }

    #[test]
    fn a_copy_is_whole_and_goes_when_the_store_is_sound() {
        let (temporary, sled_dir) = sample();
        for share in [false, true] {
            let original = Original::keep_by(temporary.path(), &sled_dir, Means { share, ..PLAIN }).unwrap();
            let copy = temporary.path().join(WHOLE);
            assert_eq!(fs::read(copy.join("db")).unwrap(), vec![7; 300_000]);
            assert_eq!(fs::read(copy.join("blobs/1")).unwrap(), b"blob");
            original.sound(false, not_moved).unwrap();
            assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 1, "only sled's own is left");
        }
    }

    #[test]
    fn a_half_made_copy_is_made_again_and_a_whole_one_is_kept() {
        let (temporary, sled_dir) = sample();
        fs::create_dir(temporary.path().join(TEMPORARY)).unwrap();
        fs::write(temporary.path().join(TEMPORARY).join("db"), b"half").unwrap();
        drop(Original::keep_by(temporary.path(), &sled_dir, PLAIN).unwrap());
        let copied = temporary.path().join(WHOLE).join("db");
        assert_eq!(fs::metadata(&copied).unwrap().len(), 300_000);
        fs::write(sled_dir.join("db"), b"rewritten").unwrap();
        drop(Original::keep_by(temporary.path(), &sled_dir, PLAIN).unwrap());
        assert_eq!(fs::metadata(&copied).unwrap().len(), 300_000);
    }

    #[test]
    fn a_store_that_is_too_large_or_has_no_room_goes_without_and_says_so() {
        let (temporary, sled_dir) = sample();
        for (means, words) in [
            (Means { max_copied_bytes: 300_003, ..PLAIN }, "it has 300004 bytes, at most 300003"),
            (Means { room_left: u64::MAX, ..PLAIN }, "bytes free, the copy needs"),
        ] {
            let original = Original::keep_by(temporary.path(), &sled_dir, means).unwrap();
            assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 1, "nothing half made is left");
            let error = original.failed(StoreError::Corrupt { path: sled_dir.clone(), what: "bad".into() });
            let said = error.to_string();
            assert!(said.contains("bad; there is no copy") && said.contains(words), "{said}");
        }
    }

    #[test]
    fn only_an_opening_that_came_to_no_end_or_found_damage_leaves_its_copy() {
        let (temporary, sled_dir) = sample();
        let dir = temporary.path();
        let fail = |error: StoreError| Original::keep_by(dir, &sled_dir, PLAIN).unwrap().failed(error);
        fail(StoreError::DiskFull { path: dir.to_owned(), needed: 0 });
        assert!(dir.join(WHOLE).exists());
        for _ in 0..2 {
            let said = fail(StoreError::Corrupt { path: dir.to_owned(), what: "bad".into() }).to_string();
            assert!(said.contains(&dir.join(DAMAGED).display().to_string()), "{said}");
            assert!(dir.join(DAMAGED).join("db").exists() && !dir.join(WHOLE).exists());
        }
        let aside = dir.join("aside");
        let moved =
            |path: &Path| fs::rename(path, &aside).map(|()| aside.clone()).map_err(|_| StoreError::Stopped);
        Original::keep_by(dir, &sled_dir, PLAIN).unwrap().sound(false, moved).unwrap();
        assert!(aside.join("db").exists() && !dir.join(DAMAGED).exists());
    }
}
