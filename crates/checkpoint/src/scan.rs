//! What is in a directory right now: names, kinds and the stat fields that show a change.
//!
//! Reads no file contents, never follows a link, and must never write.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

use crate::error::CheckpointError;
use crate::key::Digest;
use crate::manifest::{MAX_ENTRIES, MAX_FILE_BYTES};
use crate::objects::blocking;
use crate::path::{LinkTarget, RelPath};
use crate::repo::Repository;

/// More globs than this are a mistake; each one costs memory in the matcher.
const MAX_GLOBS: usize = 1000;

/// Which paths below a directory belong to a push. The default takes everything.
///
/// Globs are relative to the directory; `*` and `?` do not cross `/`, `**` does. A glob that matches a directory
/// takes or leaves out all that is in it. Leaving out wins.
#[derive(Debug, Clone, Default)]
pub struct Selection {
    include: Option<GlobSet>,
    exclude: GlobSet,
}

/// A directory's contents at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    pub root: PathBuf,
    /// In ascending order of their paths' bytes.
    pub entries: Vec<ScannedEntry>,
    pub total_bytes: u64,
    /// Sockets, pipes and devices: they cannot be saved and are left out.
    pub skipped: Vec<RelPath>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScannedEntry {
    pub path: RelPath,
    pub stat: FileStat,
    pub node: ScannedNode,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScannedNode {
    File,
    Dir,
    Symlink(LinkTarget),
}

/// The fields that show whether a file was written or replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileStat {
    pub dev: u64,
    pub ino: u64,
    pub size: u64,
    pub mode: u32,
    pub mtime_ns: i64,
    pub ctime_ns: i64,
}

impl Selection {
    /// Takes what matches `include` (everything, if there is none) and not `exclude`.
    ///
    /// # Errors
    /// `Invalid`, with the glob, for one that does not parse or if there are too many.
    pub fn new(include: &[String], exclude: &[String]) -> Result<Self, CheckpointError> {
        let include = if include.is_empty() { None } else { Some(glob_set(include)?) };
        Ok(Self { include, exclude: glob_set(exclude)? })
    }

    fn includes(&self, path: &RelPath) -> bool {
        self.include.as_ref().is_none_or(|set| set.is_match(path.as_path()))
    }

    fn excludes(&self, path: &RelPath) -> bool {
        self.exclude.is_match(path.as_path())
    }
}

impl Candidate {
    /// Changes whenever a file is written, replaced, added or removed, or its mode or link target changes. Two
    /// scans with one fingerprint saw the same files. Directories count by name alone: a temporary file that
    /// comes and goes beside the checkpoint and is excluded changes nothing.
    #[must_use]
    pub fn fingerprint(&self) -> Digest {
        let mut hasher = blake3::Hasher::new();
        for entry in &self.entries {
            hasher.update(&(entry.path.as_bytes().len() as u64).to_le_bytes());
            hasher.update(entry.path.as_bytes());
            hasher.update(&entry.stat.mode.to_le_bytes());
            match &entry.node {
                ScannedNode::Dir => {}
                ScannedNode::File => {
                    let stat = &entry.stat;
                    for field in [stat.dev, stat.ino, stat.size] {
                        hasher.update(&field.to_le_bytes());
                    }
                    hasher.update(&stat.mtime_ns.to_le_bytes());
                    hasher.update(&stat.ctime_ns.to_le_bytes());
                }
                ScannedNode::Symlink(target) => {
                    hasher.update(&(target.as_bytes().len() as u64).to_le_bytes());
                    hasher.update(target.as_bytes());
                }
            }
        }
        Digest(*hasher.finalize().as_bytes())
    }

    /// Whether there is nothing in it but directories.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.iter().all(|entry| entry.node == ScannedNode::Dir)
    }
}

impl FileStat {
    pub(crate) fn of(meta: &fs::Metadata) -> Self {
        let nanos = |secs: i64, nsec: i64| secs.saturating_mul(1_000_000_000).saturating_add(nsec);
        Self {
            dev: meta.dev(),
            ino: meta.ino(),
            size: meta.size(),
            mode: meta.mode(),
            mtime_ns: nanos(meta.mtime(), meta.mtime_nsec()),
            ctime_ns: nanos(meta.ctime(), meta.ctime_nsec()),
        }
    }
}

impl Repository {
    /// What `selection` takes of `dir`, off the runtime's thread.
    ///
    /// # Errors
    /// `Changed` if a file disappears meanwhile; `Invalid` for a name or link that a checkpoint cannot hold, or
    /// a directory that does not exist; `Denied` for one that cannot be read.
    pub async fn scan(&self, dir: &Path, selection: &Selection) -> Result<Candidate, CheckpointError> {
        let (root, selection) = (dir.to_path_buf(), selection.clone());
        blocking(move || scan(&root, &selection)).await
    }
}

/// Walks `root` without following links.
pub(crate) fn scan(root: &Path, selection: &Selection) -> Result<Candidate, CheckpointError> {
    match fs::metadata(root) {
        Ok(meta) if meta.is_dir() => {}
        Ok(_) => return Err(CheckpointError::invalid(shown(root), "it is not a directory")),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Err(CheckpointError::invalid(shown(root), "there is no such directory"));
        }
        Err(e) => return Err(CheckpointError::io("scan", root, e)),
    }
    let mut found =
        Candidate { root: root.to_path_buf(), entries: Vec::new(), total_bytes: 0, skipped: Vec::new() };
    // Directories still to read, and whether all that is in them is included.
    let mut to_read: Vec<(Option<RelPath>, bool)> = vec![(None, false)];
    while let Some((dir, taken)) = to_read.pop() {
        read_dir(&mut found, &mut to_read, dir.as_ref(), taken, selection)?;
    }
    found.entries.sort_by(|a, b| a.path.cmp(&b.path));
    found.skipped.sort();
    if selection.include.is_some() {
        drop_useless_dirs(&mut found, selection);
    }
    Ok(found)
}

fn read_dir(
    found: &mut Candidate,
    to_read: &mut Vec<(Option<RelPath>, bool)>,
    dir: Option<&RelPath>,
    taken: bool,
    selection: &Selection,
) -> Result<(), CheckpointError> {
    let full = dir.map_or_else(|| found.root.clone(), |dir| found.root.join(dir.as_path()));
    let wanted = taken || dir.is_none();
    let Some(listing) = unless_gone(fs::read_dir(&full), wanted, "scan", &full)? else { return Ok(()) };
    for item in listing {
        let item = item.map_err(|e| vanished("scan", &full, e))?;
        let mut bytes = dir.map_or_else(Vec::new, |dir| [dir.as_bytes(), b"/"].concat());
        bytes.extend_from_slice(item.file_name().as_bytes());
        let path = RelPath::new(bytes).map_err(|why| CheckpointError::invalid(shown(&item.path()), why))?;
        let taken = taken || selection.includes(&path);
        let is_dir = item.file_type().map_err(|e| vanished("stat", &item.path(), e))?.is_dir();
        if selection.excludes(&path) || !(taken || is_dir) {
            continue;
        }
        let Some(meta) = unless_gone(item.metadata(), taken, "stat", &item.path())? else { continue };
        let kind = meta.file_type();
        if kind.is_dir() {
            to_read.push((Some(path.clone()), taken));
        }
        let node = if kind.is_dir() {
            ScannedNode::Dir
        } else if kind.is_symlink() {
            let target = fs::read_link(item.path()).map_err(|e| vanished("read link", &item.path(), e))?;
            let target = LinkTarget::new(target.as_os_str().as_bytes(), path.depth());
            ScannedNode::Symlink(target.map_err(|why| CheckpointError::invalid(shown(&item.path()), why))?)
        } else if kind.is_file() {
            if meta.size() > MAX_FILE_BYTES {
                return Err(CheckpointError::invalid(shown(&item.path()), "a file has at most 16 TiB"));
            }
            found.total_bytes = found.total_bytes.saturating_add(meta.size());
            ScannedNode::File
        } else {
            found.skipped.push(path);
            continue;
        };
        if found.entries.len() >= MAX_ENTRIES {
            let why = format!("it holds more than {MAX_ENTRIES} files; exclude some or pack them");
            return Err(CheckpointError::invalid(shown(&found.root), why));
        }
        found.entries.push(ScannedEntry { path, stat: FileStat::of(&meta), node });
    }
    Ok(())
}

/// Keeps a directory that is included itself, or lies in one that is, or leads to something that was taken.
fn drop_useless_dirs(found: &mut Candidate, selection: &Selection) {
    let mut needed = std::collections::BTreeSet::new();
    for entry in &found.entries {
        let taken_dir = entry.node == ScannedNode::Dir && included_with_parents(&entry.path, selection);
        if entry.node == ScannedNode::Dir && !taken_dir {
            continue;
        }
        let mut path = Some(entry.path.as_bytes());
        while let Some(bytes) = path {
            needed.insert(bytes.to_vec());
            path = bytes.iter().rposition(|b| *b == b'/').map(|at| &bytes[..at]);
        }
    }
    found.entries.retain(|entry| needed.contains(entry.path.as_bytes()));
}

fn included_with_parents(path: &RelPath, selection: &Selection) -> bool {
    let is_match = |path: &Path| selection.include.as_ref().is_none_or(|set| set.is_match(path));
    path.as_path().ancestors().any(|path| !path.as_os_str().is_empty() && is_match(path))
}

fn glob_set(globs: &[String]) -> Result<GlobSet, CheckpointError> {
    if globs.len() > MAX_GLOBS {
        return Err(CheckpointError::invalid(
            "file selection",
            format!("it has more than {MAX_GLOBS} globs"),
        ));
    }
    let mut set = GlobSetBuilder::new();
    for glob in globs {
        let trimmed = glob.strip_prefix("./").unwrap_or(glob).trim_end_matches('/');
        let bad =
            |e: globset::Error| CheckpointError::invalid(format!("glob `{glob}`"), e.kind().to_string());
        set.add(GlobBuilder::new(trimmed).literal_separator(true).build().map_err(bad)?);
    }
    set.build().map_err(|e| CheckpointError::invalid("file selection", e.to_string()))
}

/// What the file system says of something that it listed before; `None` if that is gone and was not selected: a job's own
/// temporary directory is no reason to fail.
fn unless_gone<T>(
    said: io::Result<T>,
    wanted: bool,
    operation: &str,
    path: &Path,
) -> Result<Option<T>, CheckpointError> {
    match said {
        Ok(found) => Ok(Some(found)),
        Err(e) if e.kind() == io::ErrorKind::NotFound && !wanted => Ok(None),
        Err(e) => Err(vanished(operation, path, e)),
    }
}

/// A file that is gone between two looks at it means that the job is writing.
pub(crate) fn vanished(operation: &str, path: &Path, error: io::Error) -> CheckpointError {
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            CheckpointError::Changed { path: path.to_path_buf() }
        }
        _ => CheckpointError::io(operation, path, error),
    }
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    fn tree(paths: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for path in paths {
            let full = dir.path().join(path);
            fs::create_dir_all(full.parent().unwrap()).unwrap();
            if path.ends_with('/') {
                fs::create_dir_all(full).unwrap();
            } else {
                fs::write(full, b"x").unwrap();
            }
        }
        dir
    }

    fn found(dir: &Path, include: &[&str], exclude: &[&str]) -> Vec<String> {
        let own = |globs: &[&str]| globs.iter().map(|g| (*g).to_owned()).collect::<Vec<_>>();
        let selection = Selection::new(&own(include), &own(exclude)).unwrap();
        scan(dir, &selection).unwrap().entries.iter().map(|e| e.path.to_string()).collect()
    }

    #[test]
    fn globs_select_files_and_whole_directories() {
        let dir = tree(&[
            "a.csv",
            "a.tmp",
            "plots/1.png",
            "plots/deep/2.png",
            "other/x.csv",
            "empty/",
            "plots/none/",
        ]);
        let all = ["a.csv", "a.tmp", "empty", "other", "other/x.csv", "plots", "plots/1.png", "plots/deep"];
        assert_eq!(found(dir.path(), &[], &[])[..8], all);
        assert_eq!(found(dir.path(), &["*.csv"], &[]), ["a.csv"]);
        assert_eq!(found(dir.path(), &["./**/*.csv"], &[]), ["a.csv", "other", "other/x.csv"]);
        let plots = ["plots", "plots/1.png", "plots/deep", "plots/deep/2.png", "plots/none"];
        assert_eq!(found(dir.path(), &["plots/"], &[]), plots);
        assert_eq!(found(dir.path(), &["plots"], &["plots/deep", "**/none"]), ["plots", "plots/1.png"]);
        assert_eq!(found(dir.path(), &["absent/*"], &[]), [""; 0]);
    }

    #[test]
    fn a_glob_that_does_not_parse_is_named() {
        let error = Selection::new(&["a[".to_owned()], &[]).unwrap_err();
        assert!(error.to_string().contains("`a[`"), "{error}");
    }

    #[test]
    fn links_out_of_the_directory_are_refused_and_named() {
        for target in ["/etc/passwd", "..", "x/../../y"] {
            let dir = tree(&["a"]);
            symlink(target, dir.path().join("latest")).unwrap();
            let error = scan(dir.path(), &Selection::default()).unwrap_err();
            assert!(matches!(error, CheckpointError::Invalid { .. }), "{error:?}");
            assert!(error.to_string().contains("latest"), "{error}");
            let excluded = Selection::new(&[], &["latest".to_owned()]).unwrap();
            assert_eq!(scan(dir.path(), &excluded).unwrap().entries.len(), 1);
        }
    }

    #[test]
    fn what_is_gone_between_two_looks_is_a_change_if_it_was_selected() {
        let path = Path::new("/job/a");
        for (kind, wanted, error) in [
            (io::ErrorKind::NotFound, true, Some("changed")),
            (io::ErrorKind::NotFound, false, None),
            (io::ErrorKind::NotADirectory, true, Some("changed")),
            (io::ErrorKind::NotADirectory, false, Some("changed")),
            (io::ErrorKind::PermissionDenied, false, Some("not allowed")),
        ] {
            let said = unless_gone(Err::<(), _>(kind.into()), wanted, "stat", path);
            match (said, error) {
                (Ok(None), None) => {}
                (Err(e), Some(text)) => assert!(e.to_string().contains(text), "{kind:?}: {e}"),
                (said, _) => panic!("{kind:?} {wanted}: {said:?}"),
            }
        }
        assert_eq!(unless_gone(Ok(1), false, "stat", path).unwrap(), Some(1));
    }

    #[test]
    fn directories_alone_are_nothing_to_save() {
        let empty = |dir: &tempfile::TempDir| scan(dir.path(), &Selection::default()).unwrap().is_empty();
        assert!(empty(&tree(&[])) && empty(&tree(&["a/", "b/c/"])));
        assert!(!empty(&tree(&["b/c"])));
    }

    #[test]
    fn there_may_be_as_many_globs_as_the_limit_says() {
        let globs: Vec<String> = (0..=MAX_GLOBS).map(|n| format!("{n}")).collect();
        assert!(Selection::new(&globs[1..], &[]).is_ok());
        assert!(Selection::new(&globs, &[]).unwrap_err().to_string().contains("globs"));
    }

    #[test]
    fn what_cannot_be_saved_is_left_out_and_said() {
        let dir = tree(&["a"]);
        let _socket = UnixListener::bind(dir.path().join("socket")).unwrap();
        let candidate = scan(dir.path(), &Selection::default()).unwrap();
        assert_eq!(candidate.entries.len(), 1);
        assert_eq!(candidate.skipped, [RelPath::new("socket").unwrap()]);
    }

    #[test]
    fn the_fingerprint_sees_every_change_and_nothing_else() {
        let dir = tree(&["a", "d/b"]);
        let exclude = Selection::new(&[], &["*.tmp".to_owned()]).unwrap();
        let print = || scan(dir.path(), &exclude).unwrap().fingerprint();
        let first = print();
        fs::write(dir.path().join("next.tmp"), b"the next one").unwrap();
        assert_eq!(print(), first);
        fs::rename(dir.path().join("next.tmp"), dir.path().join("a")).unwrap();
        let second = print();
        assert_ne!(second, first);
        fs::remove_file(dir.path().join("d/b")).unwrap();
        let third = print();
        assert_ne!(third, second);
        symlink("a", dir.path().join("latest")).unwrap();
        let fourth = print();
        assert_ne!(fourth, third);
        fs::remove_file(dir.path().join("latest")).unwrap();
        symlink("d", dir.path().join("latest")).unwrap();
        assert_ne!(print(), fourth, "a link that points elsewhere");
    }

    #[test]
    fn a_missing_directory_is_named() {
        let dir = tree(&["a"]);
        for bad in ["absent", "a"] {
            let error = scan(&dir.path().join(bad), &Selection::default()).unwrap_err();
            assert!(matches!(error, CheckpointError::Invalid { .. }), "{error:?}");
            assert!(error.to_string().contains(bad), "{error}");
        }
        // It is there, and what is wrong with it is another thing.
        symlink("round", dir.path().join("round")).unwrap();
        let error = scan(&dir.path().join("round"), &Selection::default()).unwrap_err();
        assert!(matches!(error, CheckpointError::Unavailable { .. }), "{error:?}");
    }
}
