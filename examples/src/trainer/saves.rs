//! The directory of checkpoints: whole files under their final names, the newest two kept.
//!
//! A file is written aside, synced and renamed, so that its final name never shows part of it; only the variant
//! that tears files on purpose does otherwise.

use std::{
    fs::{self, File},
    io::{self, BufReader, BufWriter, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context;

use super::{data::Data, model::TrainState, pause, state};

/// One to resume from, and one more in case that one turns out damaged.
const KEEP: usize = 2;
/// A torn save takes this many pieces and pauses: half a second, long enough for a kill to land inside.
const TORN_PIECES: usize = 20;
const TORN_PAUSE: Duration = Duration::from_millis(25);

/// How a checkpoint is put into its directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaveStyle {
    /// Aside, synced, renamed.
    Rename,
    /// Slowly, in place: wrong on purpose.
    Torn,
}

/// A directory with `step-<n>.ckpt` files.
#[derive(Debug)]
pub struct SaveDir {
    dir: PathBuf,
    style: SaveStyle,
    /// The step of the newest checkpoint that this process saved or resumed from.
    pub last_step: Option<u64>,
}

/// What resuming found.
#[derive(Debug)]
pub struct Found {
    pub state: Option<TrainState>,
    /// A line for each file that could not be used.
    pub skipped: Vec<String>,
}

impl SaveDir {
    /// Makes the directory, and removes what a killed save left aside.
    ///
    /// # Errors
    /// The directory cannot be made or read.
    pub fn open(dir: &Path, style: SaveStyle) -> anyhow::Result<Self> {
        let cannot = |what: &str| format!("cannot {what} the checkpoint directory {}", dir.display());
        fs::create_dir_all(dir).with_context(|| cannot("make"))?;
        for entry in fs::read_dir(dir).with_context(|| cannot("read"))? {
            let name = entry.with_context(|| cannot("read"))?.file_name();
            let name = name.to_string_lossy();
            if name.starts_with(".step-") && name.ends_with(".ckpt.tmp") {
                fs::remove_file(dir.join(&*name)).with_context(|| cannot("clean"))?;
            }
        }
        Ok(SaveDir { dir: dir.to_owned(), style, last_step: None })
    }

    /// The newest checkpoint that is whole and belongs to this run.
    ///
    /// # Errors
    /// The directory cannot be read. A bad file is not an error: it is skipped, and said so.
    pub fn newest(&mut self, data: &Data, state_mb: u32) -> anyhow::Result<Found> {
        let mut skipped = Vec::new();
        for step in self.steps()? {
            let path = self.path(step);
            let loaded = File::open(&path)
                .map_err(state::StateError::from)
                .and_then(|file| state::read_checkpoint(BufReader::new(file), data, state_mb));
            match loaded {
                Ok(state) if state.step == step => {
                    self.last_step = Some(step);
                    return Ok(Found { state: Some(state), skipped });
                }
                Ok(state) => {
                    skipped.push(format!("skipping {}: it holds step {}", path.display(), state.step));
                }
                Err(error) => skipped.push(format!("skipping {}: {error}", path.display())),
            }
        }
        Ok(Found { state: None, skipped })
    }

    /// Saves `state`, unless that very step is there from the last save, then removes all but the newest files.
    ///
    /// # Errors
    /// The file cannot be written, for example for want of space.
    pub fn save(&mut self, state: &TrainState, data: &Data) -> anyhow::Result<()> {
        let path = self.path(state.step);
        if self.last_step == Some(state.step) && path.exists() {
            return Ok(());
        }
        let write = |out: &mut dyn Write| state::write_checkpoint(state, data, out);
        match self.style {
            SaveStyle::Rename => replace_file(&path, write),
            SaveStyle::Torn => write_torn(&path, write),
        }
        .with_context(|| {
            format!("cannot save the checkpoint {}; is there space, and may it be written?", path.display())
        })?;
        self.last_step = Some(state.step);
        for old in self.steps()?.into_iter().skip(KEEP) {
            let old = self.path(old);
            fs::remove_file(&old)
                .with_context(|| format!("cannot remove the old checkpoint {}", old.display()))?;
        }
        Ok(())
    }

    fn path(&self, step: u64) -> PathBuf {
        self.dir.join(format!("step-{step}.ckpt"))
    }

    /// The steps that have a file, newest first.
    fn steps(&self) -> anyhow::Result<Vec<u64>> {
        let cannot = || format!("cannot read the checkpoint directory {}", self.dir.display());
        let mut steps: Vec<u64> = Vec::new();
        for entry in fs::read_dir(&self.dir).with_context(cannot)? {
            let name = entry.with_context(cannot)?.file_name();
            steps.extend(name.to_str().and_then(step_of));
        }
        steps.sort_unstable_by(|a, b| b.cmp(a));
        Ok(steps)
    }
}

fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix("step-")?.strip_suffix(".ckpt")?.parse().ok()
}

/// Writes a file so that its name shows either the old content or all of the new, also after a power cut.
///
/// # Errors
/// Those of the file system; the file beside it may be left behind.
pub fn replace_file(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let name = path
        .file_name()
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the path names no file"))?;
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let temporary = dir.join(format!(".{}.tmp", name.to_string_lossy()));
    let mut out = BufWriter::new(File::create(&temporary)?);
    write(&mut out)?;
    out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
    fs::rename(&temporary, path)?;
    File::open(dir)?.sync_all()
}

fn write_torn(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let mut bytes = Vec::new();
    write(&mut bytes)?;
    let mut file = File::create(path)?;
    for piece in bytes.chunks(bytes.len().div_ceil(TORN_PIECES)) {
        file.write_all(piece)?;
        pause(TORN_PAUSE);
    }
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trainer::model::Workspace;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Saves after each of `steps` steps.
    fn saved(dir: &Path, data: &Data, steps: u64) -> TrainState {
        let mut saves = SaveDir::open(dir, SaveStyle::Rename).unwrap();
        let (mut state, mut work) =
            (TrainState::new(data.alphabet.len(), 0), Workspace::new(data.alphabet.len()));
        for _ in 0..steps {
            state.train_step(data, &mut work);
            saves.save(&state, data).unwrap();
        }
        state
    }

    #[test]
    fn the_newest_two_checkpoints_stay_and_the_newest_is_resumed() {
        let (dir, data) = (tempfile::tempdir().unwrap(), Data::load(None).unwrap());
        let state = saved(dir.path(), &data, 11);
        assert_eq!(names(dir.path()), ["step-10.ckpt", "step-11.ckpt"]);
        let found = SaveDir::open(dir.path(), SaveStyle::Rename).unwrap().newest(&data, 0).unwrap();
        assert!(found.state == Some(state) && found.skipped.is_empty());
    }

    #[test]
    fn a_damaged_newest_checkpoint_is_skipped_for_the_older_one() {
        let (dir, data) = (tempfile::tempdir().unwrap(), Data::load(None).unwrap());
        saved(dir.path(), &data, 3);
        let newest = dir.path().join("step-3.ckpt");
        let bytes = fs::read(&newest).unwrap();
        fs::write(&newest, &bytes[..bytes.len() / 2]).unwrap();
        fs::copy(dir.path().join("step-2.ckpt"), dir.path().join("step-99.ckpt")).unwrap();
        let found = SaveDir::open(dir.path(), SaveStyle::Rename).unwrap().newest(&data, 0).unwrap();
        assert_eq!(found.state.unwrap().step, 2);
        assert!(found.skipped[0].contains("step-99.ckpt: it holds step 2"), "{:?}", found.skipped);
        assert!(found.skipped[1].contains("step-3.ckpt: it is incomplete or damaged"), "{:?}", found.skipped);
    }

    #[test]
    fn what_a_killed_save_left_aside_is_removed_and_other_files_are_not() {
        let (dir, data) = (tempfile::tempdir().unwrap(), Data::load(None).unwrap());
        fs::write(dir.path().join(".step-7.ckpt.tmp"), "part").unwrap();
        fs::write(dir.path().join("notes.txt"), "mine").unwrap();
        let found = SaveDir::open(dir.path(), SaveStyle::Rename).unwrap().newest(&data, 0).unwrap();
        assert!(found.state.is_none() && found.skipped.is_empty());
        assert_eq!(names(dir.path()), ["notes.txt"]);
    }

    #[test]
    fn a_save_replaces_a_file_and_never_writes_into_it() {
        let (dir, data) = (tempfile::tempdir().unwrap(), Data::load(None).unwrap());
        let mut saves = SaveDir::open(dir.path(), SaveStyle::Rename).unwrap();
        let path = dir.path().join("step-0.ckpt");
        fs::write(&path, "old").unwrap();
        let old = File::open(&path).unwrap();
        saves.save(&TrainState::new(data.alphabet.len(), 0), &data).unwrap();
        assert_eq!(io::read_to_string(old).unwrap(), "old");
        let failed = replace_file(&path, |out| {
            out.write_all(b"half")?;
            Err(io::Error::other("the disk is full"))
        });
        assert!(failed.is_err());
        assert!(
            saves.newest(&data, 0).unwrap().state.is_some(),
            "a failed save hurt the file it was to replace"
        );
    }

    #[test]
    fn a_failed_save_names_the_file() {
        let (dir, data) = (tempfile::tempdir().unwrap(), Data::load(None).unwrap());
        let mut saves = SaveDir::open(dir.path(), SaveStyle::Rename).unwrap();
        fs::remove_dir(dir.path()).unwrap();
        let error = saves.save(&TrainState::new(data.alphabet.len(), 0), &data).unwrap_err();
        assert!(error.to_string().contains("step-0.ckpt"), "{error}");
    }
}
