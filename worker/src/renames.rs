//! Learns how a job writes its checkpoints: aside and then renamed, or in place under the final name.
//!
//! A saver that renames is whole at every moment, so an unknown one need not be quiet for long once it has shown that
//! it does. Reads the kernel's notes about names only; without them the habit stays unknown, which is the safe side.

use std::collections::BTreeSet;
use std::ffi::{CString, OsString};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt as _;
use std::path::Path;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};

/// Room for the notes of one read; the kernel keeps the rest for the next.
const BUFFER_BYTES: usize = 4096;
/// Reads at one look: a saver that makes more names than this fit into in a tenth of a second is no checkpoint saver.
const READS_MAX: usize = 64;
/// Names that were created and not renamed away yet; more than this and the habit counts as in place.
const NAMES_MAX: usize = 10_000;

/// How the job writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Habit {
    /// Nothing was seen yet, or it cannot be seen.
    #[default]
    Unknown,
    /// Whatever appeared under a name that stayed came there by a rename.
    Renames,
    /// Something was made under the name that it kept.
    InPlace,
}

/// Listens to what happens to the names in one directory.
#[derive(Debug)]
pub struct Renames {
    notes: OwnedFd,
    habit: Habit,
    /// Made under this name and still there: temporary if it is renamed away or removed, in place if it stays.
    made: BTreeSet<CString>,
}

impl Renames {
    /// # Errors
    /// Where the system has no more watches to give, or `dir` is not there.
    pub fn watch(dir: &Path) -> io::Result<Renames> {
        let notes = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
        let flags = WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::MOVED_FROM | WatchFlags::MOVED_TO;
        inotify::add_watch(&notes, dir, flags | WatchFlags::ONLYDIR)?;
        Ok(Renames { notes, habit: Habit::Unknown, made: BTreeSet::new() })
    }

    /// The habit as of now. A name that was made and is still there counts as made in place only when the caller sees
    /// no writer any more: see [`Renames::settle`].
    pub fn look(&mut self) -> Habit {
        let mut buffer = [MaybeUninit::uninit(); BUFFER_BYTES];
        let mut moved_in = false;
        for _ in 0..READS_MAX {
            let mut reader = Reader::new(&self.notes, &mut buffer);
            let Ok(note) = reader.next() else { break };
            let mut note = Some(note);
            while let Some(current) = note.take() {
                let (flags, name) = (current.events(), current.file_name().map(CString::from));
                if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
                    self.habit = Habit::InPlace;
                } else if let Some(name) = name {
                    moved_in |= self.note(flags, name);
                }
                if !reader.is_buffer_empty() {
                    note = reader.next().ok();
                }
            }
        }
        if moved_in && self.habit == Habit::Unknown {
            self.habit = Habit::Renames;
        }
        self.habit
    }

    /// Called when no process writes below the directory: what was made and is still there was made in place.
    pub fn settle(&mut self) -> Habit {
        if !self.made.is_empty() {
            self.habit = Habit::InPlace;
        }
        self.habit
    }

    /// Takes one note; true if something came to its name by a rename.
    fn note(&mut self, flags: ReadFlags, name: CString) -> bool {
        if flags.contains(ReadFlags::CREATE) {
            if self.made.len() >= NAMES_MAX {
                self.habit = Habit::InPlace;
            } else {
                self.made.insert(name);
            }
        } else if flags.intersects(ReadFlags::MOVED_FROM | ReadFlags::DELETE) {
            self.made.remove(&name);
        } else if flags.contains(ReadFlags::MOVED_TO) {
            self.made.remove(&name);
            return true;
        }
        false
    }

    /// Names that were made and may still be temporary.
    #[must_use]
    pub fn unfinished(&self) -> Vec<OsString> {
        self.made.iter().map(|name| OsString::from_vec(name.as_bytes().to_vec())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_saver_that_renames_is_known_after_its_first_save() {
        let dir = tempfile::tempdir().unwrap();
        let mut renames = Renames::watch(dir.path()).unwrap();
        assert_eq!(renames.look(), Habit::Unknown);
        fs::write(dir.path().join("whatever.new"), "1").unwrap();
        assert_eq!(renames.look(), Habit::Unknown);
        assert_eq!(renames.unfinished(), ["whatever.new"]);
        fs::rename(dir.path().join("whatever.new"), dir.path().join("model")).unwrap();
        assert_eq!(renames.look(), Habit::Renames);
        assert_eq!(renames.settle(), Habit::Renames);
    }

    #[test]
    fn a_file_from_another_directory_and_a_whole_directory_count_as_renamed() {
        let (dir, aside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut renames = Renames::watch(dir.path()).unwrap();
        fs::create_dir(aside.path().join("step-1")).unwrap();
        fs::rename(aside.path().join("step-1"), dir.path().join("step-1")).unwrap();
        assert_eq!(renames.look(), Habit::Renames);
    }

    #[test]
    fn what_is_made_under_its_final_name_is_in_place_and_stays_so() {
        let dir = tempfile::tempdir().unwrap();
        let mut renames = Renames::watch(dir.path()).unwrap();
        fs::write(dir.path().join("model.bin"), "1").unwrap();
        renames.look();
        assert_eq!(renames.settle(), Habit::InPlace);
        fs::write(dir.path().join("x.tmp"), "1").unwrap();
        fs::rename(dir.path().join("x.tmp"), dir.path().join("x")).unwrap();
        assert_eq!(renames.look(), Habit::InPlace, "one good save does not excuse the other");
    }

    #[test]
    fn thousands_of_names_are_read_whole() {
        let dir = tempfile::tempdir().unwrap();
        let mut renames = Renames::watch(dir.path()).unwrap();
        for n in 0..2000 {
            fs::write(dir.path().join("t"), "1").unwrap();
            fs::rename(dir.path().join("t"), dir.path().join(format!("step-{n}"))).unwrap();
        }
        while renames.look() == Habit::Unknown {}
        for _ in 0..20 {
            renames.look();
        }
        assert_eq!(renames.settle(), Habit::Renames);
    }
}
