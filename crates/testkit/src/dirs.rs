//! Directories of one test each, gone when the test ends.

use std::path::{Path, PathBuf};

/// Set to keep the directories of a failed or successful run for a look; their paths are printed.
const KEEP: &str = "SPOTQ_TEST_KEEP";

/// A directory with the test's name in its path, removed on drop unless `SPOTQ_TEST_KEEP` is set.
#[derive(Debug)]
pub struct TempDir {
    path: PathBuf,
    guard: Option<tempfile::TempDir>,
}

impl TempDir {
    /// Makes a fresh, empty directory; `name` appears in its path, so that leftovers tell whose they are.
    ///
    /// # Panics
    /// When the system's temporary directory cannot be written: no test can run then.
    #[must_use]
    #[expect(clippy::print_stderr, reason = "a person who keeps directories needs their paths")]
    pub fn new(name: &str) -> TempDir {
        let clean: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let guard = tempfile::Builder::new()
            .prefix(&format!("spotq-{clean}-"))
            .tempdir()
            .expect("the system's temporary directory must be writable for tests");
        let path = guard.path().to_path_buf();
        if std::env::var_os(KEEP).is_none() {
            return TempDir { path, guard: Some(guard) };
        }
        let path_kept = guard.keep();
        eprintln!("kept test directory {}", path_kept.display());
        TempDir { path, guard: None }
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of an entry, which need not exist.
    #[must_use]
    pub fn join(&self, entry: impl AsRef<Path>) -> PathBuf {
        self.path.join(entry)
    }

    /// Writes a file, with the directories above it, and returns its path.
    ///
    /// # Panics
    /// When the file cannot be written.
    pub fn write(&self, entry: impl AsRef<Path>, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.join(entry);
        let parent = path.parent().expect("an entry of a directory has a parent");
        std::fs::create_dir_all(parent).expect("the test's own directory is writable");
        std::fs::write(&path, content).expect("the test's own directory is writable");
        path
    }

    /// Whether the directory goes away with this value.
    #[must_use]
    pub fn is_removed_on_drop(&self) -> bool {
        self.guard.is_some()
    }
}

impl AsRef<Path> for TempDir {
    fn as_ref(&self) -> &Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_carries_its_name_and_goes_away() {
        let dir = TempDir::new("my test/1");
        let path = dir.path().to_path_buf();
        let file = dir.write("a/b.txt", "content");
        assert!(path.file_name().unwrap().to_str().unwrap().starts_with("spotq-my-test-1-"));
        assert_eq!(std::fs::read(file).unwrap(), b"content");
        let removed = dir.is_removed_on_drop();
        drop(dir);
        assert_eq!(path.exists(), !removed);
    }

    #[test]
    fn two_directories_of_one_name_are_two() {
        let (a, b) = (TempDir::new("same"), TempDir::new("same"));
        assert_ne!(a.path(), b.path());
    }
}
