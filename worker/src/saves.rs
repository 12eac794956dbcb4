//! Tells when the checkpoint directory holds a complete checkpoint.
//!
//! The rules per profile are facts about how frameworks write; whether to upload is decided elsewhere. Reads names
//! and times only, never contents.

use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use globset::{GlobSet, GlobSetBuilder};
use spotq_model::{Profile, Span, Timestamp};
use walkdir::WalkDir;

use crate::renames::Habit;

/// A saver that renames is between two files for less than this.
const RENAME_QUIET: Span = Span::millis(200);
/// A saver that is never quiet this long is taken as it is: each file under its final name is complete.
const RENAME_BUSY: Span = Span::secs(2);
/// Unknown writers pause between files; this is how long they must have paused, and on notice.
const GENERIC_QUIET: Span = Span::secs(10);
const GENERIC_QUIET_HURRIED: Span = Span::secs(2);
/// An unknown saver's pauses say something about it after this many of them and this long without rest.
const PAUSES_KNOWN: u32 = 3;
const BUSY_LONG: Span = Span::secs(4);
/// Directories deeper or larger than this are not looked at beyond it; the push itself names the limit.
const ENTRIES_MAX: usize = 1_000_000;
/// Names that savers give to what is not complete yet.
///
/// A leading dot alone is no such name: PyTorch's `.metadata` is final. `tmp` and eight more is Python's `tempfile`.
const TEMPORARY: [&str; 6] =
    ["**/.*tmp*", "**/*.tmp", "**/*.tmp[.-]*", "**/tmp[.-]*", "**/tmp????????", "**/*.orbax-checkpoint-tmp*"];
/// Files that Orbax writes last.
const ORBAX_MARKERS: [&str; 4] =
    ["commit_success.txt", "_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"];

/// How long to wait for silence, where the profile waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quiet {
    pub calm: Span,
    pub hurried: Span,
}

impl Default for Quiet {
    fn default() -> Self {
        Quiet { calm: GENERIC_QUIET, hurried: GENERIC_QUIET_HURRIED }
    }
}

/// Whether the attempt is on its way out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    Calm,
    Hurried,
    /// The command has ended by itself: nothing writes any more.
    Ended,
    /// It was killed or crashed: it may have been in the middle of a save.
    Broken,
}

/// What is on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    /// Equal for two looks only if no file changed between them.
    pub fingerprint: u64,
    /// When the newest complete file was written.
    pub newest: Timestamp,
    /// When anything was last written, renamed or removed.
    pub touched: Timestamp,
    /// The newest complete file, relative to the directory.
    pub newest_path: PathBuf,
    /// Files under final names.
    pub files: usize,
    /// Something is being written aside.
    pub temporary: bool,
    /// The profile's or the user's marker is there.
    pub marked: bool,
}

/// Reads what is on disk; cheap to clone into a blocking thread.
#[derive(Debug, Clone)]
pub struct Looker {
    profile: Profile,
    complete_when: Option<GlobSet>,
    temporary: GlobSet,
}

/// Remembers what was seen, for one attempt.
#[derive(Debug)]
pub struct Saves {
    /// What the job file says; `looker` follows what was learned since.
    declared: Profile,
    looker: Looker,
    quiet: Quiet,
    /// The last look's fingerprint and since when it has been so.
    same_since: Option<(u64, Timestamp)>,
    /// When changes began that have not been announced.
    busy_since: Option<Timestamp>,
    /// Pauses between changes since then: how many, and the longest.
    pauses: u32,
    longest_pause: Span,
    announced: Option<u64>,
    /// The store holds what was announced.
    held: bool,
}

/// A complete checkpoint is on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Complete {
    pub saved_at: Timestamp,
    pub newest_path: PathBuf,
}

impl Looker {
    /// The profile that is followed.
    #[must_use]
    pub fn profile(&self) -> Profile {
        self.profile
    }

    /// Reads the directory. Blocking; an unreadable entry is skipped, the push will name it.
    #[must_use]
    pub fn look(&self, dir: &Path) -> Look {
        let mut seen = Look {
            fingerprint: 0,
            newest: Timestamp(0),
            touched: Timestamp(0),
            newest_path: PathBuf::new(),
            files: 0,
            temporary: false,
            marked: self.complete_when.is_none(),
        };
        let mut orbax_marked = false;
        let mut hasher = Fnv::default();
        let walk = WalkDir::new(dir).sort_by_file_name().into_iter().take(ENTRIES_MAX);
        for entry in walk.flatten() {
            let relative = entry.path().strip_prefix(dir).unwrap_or(entry.path());
            let Ok(meta) = entry.metadata() else { continue };
            let modified =
                meta.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
            let at = Timestamp(u64::try_from(modified.as_millis()).unwrap_or(u64::MAX));
            seen.touched = seen.touched.max(at);
            let is_temporary = relative
                .ancestors()
                .any(|part| !part.as_os_str().is_empty() && self.temporary.is_match(part));
            if is_temporary {
                // One that nobody has touched for a while is left over, not a save under way.
                seen.temporary |= crate::ids::now().since(at) < RENAME_BUSY;
                continue;
            }
            seen.marked |= self.complete_when.as_ref().is_some_and(|glob| glob.is_match(relative));
            if !meta.is_file() {
                continue;
            }
            orbax_marked |= ORBAX_MARKERS.iter().any(|marker| entry.file_name() == *marker);
            seen.files += 1;
            (relative, modified, meta.len(), std::os::unix::fs::MetadataExt::ino(&meta)).hash(&mut hasher);
            if at >= seen.newest {
                seen.newest = at;
                seen.newest_path = relative.to_owned();
            }
        }
        seen.marked &= self.profile != Profile::Orbax || orbax_marked;
        seen.fingerprint = hasher.finish();
        seen
    }
}

impl Saves {
    /// # Errors
    /// The text of what is wrong with `complete_when`.
    pub fn new(profile: Profile, quiet: Quiet, complete_when: Option<&str>) -> Result<Saves, String> {
        let complete_when = match complete_when {
            Some(glob) => {
                Some(globs([glob]).map_err(|e| format!("`complete_when: {glob}` is not a glob: {e}"))?)
            }
            None => None,
        };
        let temporary = globs(temporary_names(profile).iter().copied()).map_err(|e| e.to_string())?;
        let looker = Looker { profile, complete_when, temporary };
        Ok(Saves {
            declared: profile,
            looker,
            quiet,
            same_since: None,
            busy_since: None,
            pauses: 0,
            longest_pause: Span::ZERO,
            announced: None,
            held: false,
        })
    }

    #[must_use]
    pub fn looker(&self) -> Looker {
        self.looker.clone()
    }

    /// What was learned of how the job writes: an unknown saver that renames is treated like one that says so.
    pub fn learn(&mut self, habit: Habit) {
        let profile = match (self.declared, habit) {
            (Profile::Generic, Habit::Renames) => Profile::Rename,
            (declared, Habit::Unknown | Habit::InPlace | Habit::Renames) => declared,
        };
        if profile != self.looker.profile
            && let Ok(temporary) = globs(temporary_names(profile).iter().copied())
        {
            self.looker = Looker { profile, temporary, complete_when: self.looker.complete_when.take() };
        }
    }

    /// Whether `look` is the state that was announced last. A saver that renames may be taken at any moment; an
    /// unknown one only in the very state that was found complete.
    #[must_use]
    pub fn may_push(&self, look: &Look) -> bool {
        match self.looker.profile {
            // While something is being written aside, what is there may be half old and half new.
            Profile::Rename | Profile::Orbax => !look.temporary,
            Profile::Generic => self.announced == Some(look.fingerprint),
        }
    }

    /// What is on disk now counts as known: it was restored.
    pub fn skip(&mut self, look: &Look) {
        self.announced = Some(look.fingerprint);
        self.held = true;
    }

    /// The store holds the state with this fingerprint.
    pub fn mark_held(&mut self, fingerprint: u64) {
        // Something newer may have been announced while an older state was being pushed.
        self.held |= self.announced == Some(fingerprint);
    }

    /// What was announced and is not held is announced again.
    pub fn forget_failed(&mut self) {
        if !self.held {
            self.announced = None;
        }
    }

    /// Judges a look. `writers` is asked only when everything else fits, since it is dear.
    pub fn judge(
        &mut self,
        now: Timestamp,
        pace: Pace,
        look: &Look,
        writers: impl FnOnce() -> bool,
    ) -> Option<Complete> {
        if self.same_since.is_none_or(|(known, _)| known != look.fingerprint) {
            if let (Some((_, since)), Some(_)) = (self.same_since, self.busy_since) {
                self.pauses += 1;
                self.longest_pause = self.longest_pause.max(now.since(since));
            }
            self.same_since = Some((look.fingerprint, now));
            self.busy_since = self.busy_since.or(Some(now));
        }
        if self.announced == Some(look.fingerprint) {
            self.rest();
            return None;
        }
        if look.files == 0 || !look.marked || !self.is_settled(now, pace, look, writers) {
            return None;
        }
        self.announced = Some(look.fingerprint);
        self.held = false;
        self.rest();
        Some(Complete { saved_at: look.newest, newest_path: look.newest_path.clone() })
    }

    /// The same state is to be announced again, as after a push that failed.
    pub fn forget(&mut self) {
        self.announced = None;
    }

    fn is_settled(&self, now: Timestamp, pace: Pace, look: &Look, writers: impl FnOnce() -> bool) -> bool {
        let first_seen = self.same_since.map_or(now, |(_, since)| since);
        // A time in the future proves nothing; then only what we saw ourselves counts.
        let quiet = now.since(look.touched.min(first_seen));
        match (self.looker.profile, pace) {
            (_, Pace::Ended) => true,
            // Between two renames of one save the files may not belong together.
            (Profile::Rename | Profile::Orbax, Pace::Broken) => !look.temporary,
            (Profile::Rename | Profile::Orbax, Pace::Calm | Pace::Hurried) => {
                let busy = self.busy_since.map_or(Span::ZERO, |since| now.since(since));
                !look.temporary && (quiet >= RENAME_QUIET || busy >= RENAME_BUSY)
            }
            // A cut-off write looks like any other file: only one that had been left alone is trusted.
            (Profile::Generic, Pace::Broken) => quiet >= self.quiet.hurried,
            (Profile::Generic, Pace::Calm) => quiet >= self.wanted(now, self.quiet.calm) && !writers(),
            (Profile::Generic, Pace::Hurried) => quiet >= self.wanted(now, self.quiet.hurried) && !writers(),
        }
    }

    /// How long an unknown saver must be quiet. One that saves so often that it never is for `usual` would never be
    /// taken: then it is half of the longest pause that it did make, since pauses within a save are shorter than those
    /// between saves.
    fn wanted(&self, now: Timestamp, usual: Span) -> Span {
        let busy = self.busy_since.map_or(Span::ZERO, |since| now.since(since));
        if self.pauses >= PAUSES_KNOWN && busy >= BUSY_LONG {
            usual.min(Span(self.longest_pause.0 / 2).max(RENAME_QUIET))
        } else {
            usual
        }
    }

    /// All that is there is announced.
    fn rest(&mut self) {
        self.busy_since = None;
        self.pauses = 0;
        self.longest_pause = Span::ZERO;
    }
}

/// Globs of names that a push leaves out.
#[must_use]
pub fn temporary_names(profile: Profile) -> &'static [&'static str] {
    match profile {
        Profile::Rename | Profile::Orbax => &TEMPORARY,
        Profile::Generic => &[],
    }
}

/// The step in a name such as `step-120.ckpt`, `checkpoint_500`, `global_step7` or Orbax's `100/…`; the outermost
/// part of the path that has one counts.
#[must_use]
pub fn step_in(path: &Path) -> Option<u64> {
    path.iter().find_map(|part| step_in_name(&part.to_string_lossy()))
}

fn step_in_name(name: &str) -> Option<u64> {
    const WORDS: [&str; 6] = ["step", "ckpt", "checkpoint", "iter", "iteration", "global_step"];
    let stem = name.split_once('.').map_or(name, |(stem, _)| stem);
    let digits = stem.len() - stem.bytes().rev().take_while(u8::is_ascii_digit).count();
    let word = stem[..digits].trim_end_matches(['-', '_', '=']).to_ascii_lowercase();
    let known = word.is_empty() || WORDS.iter().any(|known| word.ends_with(known));
    if known { stem[digits..].parse().ok() } else { None }
}

fn globs<'a>(patterns: impl IntoIterator<Item = &'a str>) -> Result<GlobSet, globset::Error> {
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        set.add(globset::GlobBuilder::new(pattern).literal_separator(true).build()?);
    }
    set.build()
}

/// FNV-1a: the same in every run. For comparing, never for anything that an attacker may choose.
pub(crate) struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Fnv(0xcbf2_9ce4_8422_2325)
    }
}

impl Hasher for Fnv {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::now;

    fn saves(profile: Profile) -> Saves {
        Saves::new(profile, Quiet::default(), None).unwrap()
    }

    #[test]
    fn steps_are_read_from_names_and_not_from_sizes_of_models() {
        for (path, step) in [
            ("step-120.ckpt", Some(120)),
            ("checkpoint-500/model.bin", Some(500)),
            ("global_step7/x", Some(7)),
            ("100/_METADATA", Some(100)),
            ("iter_0000042/common.pt", Some(42)),
            ("llama-7.bin", None),
            ("model.bin", None),
            ("rank0", None),
        ] {
            assert_eq!(step_in(Path::new(path)), step, "{path}");
        }
    }

    #[test]
    fn an_unknown_saver_that_never_rests_is_taken_in_its_longest_pause() {
        let dir = tempfile::tempdir().unwrap();
        let mut saves = saves(Profile::Generic);
        let begin = now();
        let mut taken = Vec::new();
        // A save every 1.5 s: two files, 0.3 s apart, in place.
        for tick in 0..120_u64 {
            let at = begin + Span::millis(tick * 100);
            match tick % 15 {
                0 => std::fs::write(dir.path().join("a"), tick.to_string().repeat(3)).unwrap(),
                3 => std::fs::write(dir.path().join("b"), tick.to_string().repeat(3)).unwrap(),
                _ => {}
            }
            let mut look = saves.looker().look(dir.path());
            // The test runs faster than its clock: what counts is when we saw it.
            look.touched = at;
            if saves.judge(at, Pace::Calm, &look, || false).is_some() {
                taken.push(tick);
            }
        }
        assert!(!taken.is_empty(), "never taken");
        assert!(taken.iter().all(|tick| tick % 15 > 3), "taken between the files of one save: {taken:?}");
    }

    #[test]
    fn a_save_is_not_taken_while_a_part_of_it_is_written_aside() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("model"), "2").unwrap();
        std::fs::write(dir.path().join("optimizer.tmp"), "half").unwrap();
        let mut saves = saves(Profile::Rename);
        let look = saves.looker().look(dir.path());
        assert_eq!(saves.judge(now(), Pace::Calm, &look, || false), None);
        assert_eq!(saves.judge(now() + Span::secs(60), Pace::Hurried, &look, || false), None);
        assert!(!saves.may_push(&look));
    }

    #[test]
    fn an_unknown_saver_that_renames_need_not_be_quiet_for_long() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("model"), "1").unwrap();
        let mut saves = saves(Profile::Generic);
        let judge = |saves: &mut Saves, after: Span| {
            let look = saves.looker().look(dir.path());
            saves.judge(now() + after, Pace::Calm, &look, || false)
        };
        assert_eq!(judge(&mut saves, Span::millis(0)), None);
        assert_eq!(judge(&mut saves, Span::secs(3)), None, "unknown: three seconds prove nothing");
        saves.learn(Habit::Renames);
        assert!(judge(&mut saves, Span::secs(3)).is_some());
        saves.learn(Habit::InPlace);
        assert_eq!(saves.looker().profile(), Profile::Generic);
    }

    #[test]
    fn a_rename_saver_is_complete_when_no_temporary_name_is_left_and_it_is_quiet() {
        let dir = tempfile::tempdir().unwrap();
        let mut saves = saves(Profile::Rename);
        let judge = |saves: &mut Saves, after| {
            let look = saves.looker().look(dir.path());
            saves.judge(now() + Span(after), Pace::Calm, &look, || panic!("not asked"))
        };
        assert_eq!(judge(&mut saves, 5000), None, "an empty directory is no checkpoint");
        std::fs::write(dir.path().join(".step-1.ckpt.tmp"), "half").unwrap();
        assert_eq!(judge(&mut saves, 0), None);
        std::fs::rename(dir.path().join(".step-1.ckpt.tmp"), dir.path().join("step-1.ckpt")).unwrap();
        assert_eq!(judge(&mut saves, 0), None, "not quiet yet");
        let complete = judge(&mut saves, 250).unwrap();
        assert_eq!(complete.newest_path, Path::new("step-1.ckpt"));
        assert_eq!(judge(&mut saves, 900), None, "announced once");
    }

    #[test]
    fn a_rename_saver_that_never_rests_is_taken_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let mut saves = saves(Profile::Rename);
        let start = now();
        let mut found = None;
        for round in 0..25_u64 {
            std::fs::write(dir.path().join("a"), vec![0; round as usize + 1]).unwrap();
            let look = saves.looker().look(dir.path());
            found = saves.judge(start + Span(round * 100), Pace::Calm, &look, || false);
            if found.is_some() {
                break;
            }
        }
        assert_eq!(found.unwrap().newest_path, Path::new("a"));
    }

    #[test]
    fn an_unknown_saver_needs_silence_and_no_open_writer_and_its_marker() {
        let dir = tempfile::tempdir().unwrap();
        let mut saves = Saves::new(Profile::Generic, Quiet::default(), Some("*/DONE")).unwrap();
        std::fs::create_dir(dir.path().join("s")).unwrap();
        std::fs::write(dir.path().join("s/w"), "x").unwrap();
        let look = saves.looker().look(dir.path());
        assert_eq!(saves.judge(now() + Span::secs(60), Pace::Ended, &look, || false), None, "no marker");
        std::fs::write(dir.path().join("s/DONE"), "").unwrap();
        let look = saves.looker().look(dir.path());
        assert_eq!(saves.judge(now() + Span::secs(3), Pace::Calm, &look, || false), None);
        assert_eq!(saves.judge(now() + Span::secs(3), Pace::Hurried, &look, || true), None);
        assert!(saves.judge(now() + Span::secs(3), Pace::Hurried, &look, || false).is_some());
    }

    #[test]
    fn a_crash_in_the_middle_of_a_write_is_not_taken_for_a_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let mut saves = saves(Profile::Generic);
        std::fs::write(dir.path().join("w"), "ha").unwrap();
        let look = saves.looker().look(dir.path());
        assert_eq!(saves.judge(now(), Pace::Broken, &look, || false), None);
        assert!(saves.judge(now(), Pace::Ended, &look, || false).is_some());
    }

    #[test]
    fn orbax_needs_a_commit_marker() {
        let dir = tempfile::tempdir().unwrap();
        let mut saves = saves(Profile::Orbax);
        std::fs::create_dir(dir.path().join("100")).unwrap();
        std::fs::write(dir.path().join("100/data"), "x").unwrap();
        let look = saves.looker().look(dir.path());
        assert_eq!(saves.judge(now() + Span::secs(1), Pace::Calm, &look, || false), None);
        std::fs::write(dir.path().join("100/_CHECKPOINT_METADATA"), "{}").unwrap();
        let look = saves.looker().look(dir.path());
        assert!(saves.judge(now() + Span::secs(1), Pace::Calm, &look, || false).is_some());
        assert!(Saves::new(Profile::Orbax, Quiet::default(), Some("a{")).is_err());
    }
}
