//! Learns how a job writes its checkpoints: aside and then renamed, or in place under the final name.
//!
//! A saver that renames is whole at every moment, so an unknown one need not be quiet for long once it has shown that
//! it does. Reads the kernel's notes about names only; without them the habit stays unknown, which is the safe side.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};

use crate::ids::Instant;

/// Room for the notes of one read; the kernel keeps the rest for the next.
const BUFFER_BYTES: usize = 4096;
/// Notes taken at one look, so that a saver that never stops making names cannot hold us.
const NOTES_MAX: usize = 10_000;
/// Names that were created and not renamed away yet; more than this and the habit counts as in place.
const NAMES_MAX: usize = 10_000;

/// A temporary file whose writer has closed it is renamed at once; one that is left for this long is final.
const STAYS: Duration = Duration::from_secs(2);

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
    /// Made under this name, when, and still there: temporary if it is renamed away or removed, in place if it stays.
    made: BTreeMap<CString, Instant>,
}

impl Renames {
    /// # Errors
    /// Where the system has no more watches to give, or `dir` is not there.
    pub fn watch(dir: &Path) -> io::Result<Renames> {
        let notes = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
        let names = WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::MOVED_FROM | WatchFlags::MOVED_TO;
        let flags = names | WatchFlags::CLOSE_WRITE;
        inotify::add_watch(&notes, dir, flags | WatchFlags::ONLYDIR)?;
        Ok(Renames { notes, habit: Habit::Unknown, made: BTreeMap::new() })
    }

    /// The habit as of now. `writers` says whether a process still has a file below the directory open for writing; it is
    /// asked only when something that was made stays, since it is dear.
    pub fn look(&mut self, writers: impl FnOnce() -> bool) -> Habit {
        let mut buffer = [MaybeUninit::uninit(); BUFFER_BYTES];
        let mut news = Vec::new();
        let mut reader = Reader::new(&self.notes, &mut buffer);
        // An error means that there is nothing more to read now.
        while news.len() < NOTES_MAX
            && let Ok(note) = reader.next()
        {
            news.push((note.events(), note.file_name().map(CString::from)));
        }
        let mut moved_in = false;
        for (flags, name) in news {
            match name {
                Some(name) => moved_in |= self.note(flags, name),
                // The kernel lost some: what they were is not known any more.
                None if flags.contains(ReadFlags::QUEUE_OVERFLOW) => self.habit = Habit::InPlace,
                None => {}
            }
        }
        if moved_in && self.habit == Habit::Unknown {
            self.habit = Habit::Renames;
        }
        let stays = |since: &Instant| since.elapsed() >= STAYS;
        if self.habit != Habit::InPlace && self.made.values().any(stays) && !writers() {
            self.habit = Habit::InPlace;
        }
        self.habit
    }

    /// Whether something was made that may still be renamed: a save is under way.
    #[must_use]
    pub fn is_saving(&self) -> bool {
        self.habit != Habit::InPlace && !self.made.is_empty()
    }

    /// Takes one note; true if something came to its name by a rename.
    fn note(&mut self, flags: ReadFlags, name: CString) -> bool {
        if flags.contains(ReadFlags::CREATE) {
            if self.made.len() >= NAMES_MAX {
                self.habit = Habit::InPlace;
            } else {
                self.made.insert(name, Instant::now());
            }
        } else if flags.intersects(ReadFlags::MOVED_FROM | ReadFlags::DELETE) {
            self.made.remove(&name);
        } else if flags.contains(ReadFlags::MOVED_TO) {
            self.made.remove(&name);
            return true;
        } else if flags.contains(ReadFlags::CLOSE_WRITE) && !self.made.contains_key(&name) {
            // It had this name before it was written.
            self.habit = Habit::InPlace;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn nobody() -> bool {
        false
    }

    /// As if everything had been made long ago.
    fn age(renames: &mut Renames) {
        for since in renames.made.values_mut() {
            *since = since.checked_sub(STAYS).unwrap();
        }
    }

    #[test]
    fn a_saver_that_renames_is_known_after_its_first_save() {
        let dir = tempfile::tempdir().unwrap();
        let mut renames = Renames::watch(dir.path()).unwrap();
        assert_eq!(renames.look(nobody), Habit::Unknown);
        fs::write(dir.path().join("whatever.new"), "1").unwrap();
        assert_eq!(renames.look(nobody), Habit::Unknown);
        fs::rename(dir.path().join("whatever.new"), dir.path().join("model")).unwrap();
        age(&mut renames);
        assert_eq!(renames.look(nobody), Habit::Renames);
    }

    #[test]
    fn a_file_from_another_directory_and_a_whole_directory_count_as_renamed() {
        let (dir, aside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut renames = Renames::watch(dir.path()).unwrap();
        fs::create_dir(aside.path().join("step-1")).unwrap();
        fs::rename(aside.path().join("step-1"), dir.path().join("step-1")).unwrap();
        assert_eq!(renames.look(nobody), Habit::Renames);
    }

    #[test]
    fn what_stays_under_the_name_it_was_made_with_is_in_place_for_good() {
        let dir = tempfile::tempdir().unwrap();
        let mut renames = Renames::watch(dir.path()).unwrap();
        fs::write(dir.path().join("model.bin"), "1").unwrap();
        renames.look(nobody);
        age(&mut renames);
        assert_eq!(renames.look(|| true), Habit::Unknown, "still being written: it may be renamed yet");
        assert_eq!(renames.look(nobody), Habit::InPlace);
        fs::write(dir.path().join("x.tmp"), "1").unwrap();
        fs::rename(dir.path().join("x.tmp"), dir.path().join("x")).unwrap();
        assert_eq!(renames.look(nobody), Habit::InPlace, "one good save does not excuse the other");
    }

    #[test]
    fn writing_over_what_was_there_is_in_place() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("model"), "1").unwrap();
        let mut renames = Renames::watch(dir.path()).unwrap();
        fs::write(dir.path().join("x.tmp"), "1").unwrap();
        assert_eq!((renames.look(nobody), renames.is_saving()), (Habit::Unknown, true));
        fs::rename(dir.path().join("x.tmp"), dir.path().join("x")).unwrap();
        assert_eq!((renames.look(nobody), renames.is_saving()), (Habit::Renames, false));
        fs::write(dir.path().join("model"), "2").unwrap();
        assert_eq!(renames.look(nobody), Habit::InPlace);
    }

    #[test]
    fn more_names_than_one_look_reads_are_read_whole() {
        let dir = tempfile::tempdir().unwrap();
        let mut renames = Renames::watch(dir.path()).unwrap();
        for n in 0..4000 {
            fs::write(dir.path().join("t"), "1").unwrap();
            fs::rename(dir.path().join("t"), dir.path().join(format!("step-{n}"))).unwrap();
        }
        for _ in 0..50 {
            renames.look(nobody);
        }
        age(&mut renames);
        assert_eq!(renames.look(nobody), Habit::Renames);
    }
}
