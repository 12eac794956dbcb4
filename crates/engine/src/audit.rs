//! The audit log: who called what about which job, and whether it was allowed. One JSON object a line, chained.
//!
//! Each line has a keyed hash over itself and the one before, so that no line can be changed, taken out or put in
//! without the cluster's secret. Holds no arguments, no tokens and nothing of a job's content.

use std::collections::VecDeque;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::auth::Who;
use crate::config::ClusterSecret;

/// Lines that may wait for the disk. What does not fit is counted, and the count is written.
const WAITING_MAX: usize = 65_536;
/// A file that has grown so large is followed by a new one.
const FILE_BYTES_MAX: u64 = 8 << 20;
/// Files that are kept: with the size above, some hundred thousand calls.
const FILES_MAX: usize = 16;
/// What a power cut may take of the log. Nothing is acknowledged by it.
const SYNC_EVERY: Duration = Duration::from_secs(1);
/// `,"mac":"` + 64 digits + `"}`
const MAC_BYTES: usize = 8 + 64 + 2;

/// Why the log cannot be kept or read.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    #[error("audit log {path}: {source}", path = path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("audit log {path}, line {line}: {what}; it was changed, or its cluster's secret was", path = path.display())]
    Broken { path: PathBuf, line: usize, what: &'static str },
}

/// What became of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    Allowed,
    Denied,
    /// Allowed, and then it did not work, for example since there was no such job.
    Failed,
}

/// One call.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    at_ms: u64,
    who: String,
    role: &'static str,
    peer: String,
    call: String,
    about: u64,
    outcome: Outcome,
}

impl Entry {
    pub(crate) fn new(who: &Who, peer: Option<IpAddr>, call: String, about: u64, outcome: Outcome) -> Self {
        Entry {
            at_ms: crate::clock::now().0,
            who: who.name().unwrap_or_default().to_owned(),
            role: who.role().map_or("none", crate::auth::Role::as_str),
            peer: peer.map_or_else(String::new, |peer| peer.to_string()),
            // A path is the caller's text; a long one is no method.
            call: call.chars().take(128).collect(),
            about,
            outcome,
        }
    }
}

/// Takes entries without waiting; a thread of its own writes them.
#[derive(Debug)]
pub(crate) struct AuditLog {
    tx: SyncSender<Entry>,
    lost: Arc<AtomicU64>,
}

impl AuditLog {
    pub(crate) fn open(data: &Path, secret: &ClusterSecret) -> Result<Self, AuditError> {
        let (tx, rx) = sync_channel(WAITING_MAX);
        let lost = Arc::new(AtomicU64::new(0));
        let writer = Writer::open(&directory(data), key(secret))?;
        let counter = lost.clone();
        let spawned =
            std::thread::Builder::new().name("audit".into()).spawn(move || writer.run(&rx, &counter));
        spawned.map_err(|source| AuditError::File { path: directory(data), source })?;
        Ok(AuditLog { tx, lost })
    }

    pub(crate) fn note(&self, entry: Entry) {
        if self.tx.try_send(entry).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// What a check of the whole log found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verified {
    pub lines: u64,
    /// Number of the first line that is kept; older ones were rotated away.
    pub first: u64,
    pub last: u64,
}

/// Checks every line that is kept.
///
/// # Errors
/// The first line that does not fit, or a file that cannot be read.
pub fn verify(data: &Path, secret: &ClusterSecret) -> Result<Verified, AuditError> {
    let key = key(secret);
    let mut found = Verified { lines: 0, first: 0, last: 0 };
    let mut before: Option<(u64, String)> = None;
    for (_, path) in files(&directory(data))? {
        let text = fs::read(&path).map_err(|source| AuditError::File { path: path.clone(), source })?;
        for (number, line) in (1..).zip(text.split_inclusive(|byte| *byte == b'\n')) {
            let broken = |what| AuditError::Broken { path: path.clone(), line: number, what };
            // A crash may cut the last line; the next start takes it away.
            let Some(line) = line.strip_suffix(b"\n") else { break };
            let (seq, prev, mac) = open_line(&key, line).map_err(broken)?;
            if let Some((last, mac)) = &before {
                if seq != last + 1 {
                    return Err(broken("lines before it are missing"));
                }
                if prev != *mac {
                    return Err(broken("it does not follow the line before"));
                }
            } else {
                found.first = seq;
            }
            found.last = seq;
            found.lines += 1;
            before = Some((seq, mac));
        }
    }
    Ok(found)
}

#[derive(Serialize, Deserialize)]
struct Line<'a> {
    seq: u64,
    at_ms: u64,
    who: &'a str,
    role: &'a str,
    peer: &'a str,
    call: &'a str,
    /// The job, or the node of a worker; 0 is none.
    about: u64,
    outcome: Outcome,
    prev: &'a str,
}

/// Only what the chain needs.
#[derive(Deserialize)]
struct Link {
    seq: u64,
    prev: String,
}

struct Writer {
    dir: PathBuf,
    key: [u8; 32],
    file: File,
    bytes: u64,
    seq: u64,
    prev: String,
    kept: VecDeque<PathBuf>,
}

impl fmt::Debug for Writer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writer").field("dir", &self.dir).field("seq", &self.seq).finish_non_exhaustive()
    }
}

impl Writer {
    /// Goes on after the last whole line.
    fn open(dir: &Path, key: [u8; 32]) -> Result<Self, AuditError> {
        let fail = |source| AuditError::File { path: dir.to_owned(), source };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(fail)?;
        let kept: VecDeque<PathBuf> = files(dir)?.into_iter().map(|(_, path)| path).collect();
        let Some(newest) = kept.back().cloned() else {
            let path = dir.join(file_name(1));
            let file = append(&path).map_err(fail)?;
            return Ok(Writer {
                dir: dir.to_owned(),
                key,
                file,
                bytes: 0,
                seq: 0,
                prev: String::new(),
                kept: [path].into(),
            });
        };
        let text = fs::read(&newest).map_err(fail)?;
        let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let file = append(&newest).map_err(fail)?;
        file.set_len(whole as u64).map_err(fail)?;
        let last = text[..whole].split(|byte| *byte == b'\n').rev().find(|line| !line.is_empty());
        let (seq, prev) = match last {
            Some(line) => {
                let (seq, _, mac) = open_line(&key, line).map_err(|what| AuditError::Broken {
                    path: newest.clone(),
                    line: 0,
                    what,
                })?;
                (seq, mac)
            }
            None => (number_of(&newest).unwrap_or(1) - 1, String::new()),
        };
        Ok(Writer { dir: dir.to_owned(), key, file, bytes: whole as u64, seq, prev, kept })
    }

    fn run(mut self, rx: &Receiver<Entry>, lost: &AtomicU64) {
        let mut synced = Instant::now();
        let mut dirty = false;
        loop {
            match rx.recv_timeout(SYNC_EVERY) {
                Ok(entry) => {
                    self.note(&entry);
                    dirty = true;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    let _ = self.file.sync_data();
                    return;
                }
            }
            let count = lost.swap(0, Ordering::Relaxed);
            if count > 0 {
                let call = format!("{count} calls were too many at once to be noted");
                self.note(&Entry::new(&Who::Local, None, call, 0, Outcome::Failed));
            }
            if dirty && synced.elapsed() >= SYNC_EVERY {
                if let Err(error) = self.file.sync_data() {
                    tracing::error!(%error, "the audit log is not on the disk");
                }
                (synced, dirty) = (Instant::now(), false);
            }
        }
    }

    fn note(&mut self, entry: &Entry) {
        if let Err(error) = self.write(entry) {
            tracing::error!(%error, "a call is missing in the audit log");
        }
    }

    fn write(&mut self, entry: &Entry) -> io::Result<()> {
        let line = Line {
            seq: self.seq + 1,
            at_ms: entry.at_ms,
            who: &entry.who,
            role: entry.role,
            peer: &entry.peer,
            call: &entry.call,
            about: entry.about,
            outcome: entry.outcome,
            prev: &self.prev,
        };
        let mut text = serde_json::to_string(&line)?;
        text.pop();
        let mac = blake3::keyed_hash(&self.key, text.as_bytes()).to_hex().to_string();
        text.push_str(&format!(",\"mac\":\"{mac}\"}}\n"));
        self.file.write_all(text.as_bytes())?;
        self.bytes += text.len() as u64;
        self.seq += 1;
        self.prev = mac;
        if self.bytes >= FILE_BYTES_MAX { self.rotate() } else { Ok(()) }
    }

    fn rotate(&mut self) -> io::Result<()> {
        self.file.sync_data()?;
        let path = self.dir.join(file_name(self.seq + 1));
        self.file = append(&path)?;
        self.bytes = 0;
        self.kept.push_back(path);
        while self.kept.len() > FILES_MAX {
            if let Some(oldest) = self.kept.pop_front() {
                fs::remove_file(oldest)?;
            }
        }
        Ok(())
    }
}

fn directory(data: &Path) -> PathBuf {
    data.join("audit")
}

fn key(secret: &ClusterSecret) -> [u8; 32] {
    secret.purpose("audit log")
}

fn file_name(first: u64) -> String {
    format!("audit-{first:012}.jsonl")
}

fn number_of(path: &Path) -> Option<u64> {
    path.file_name()?.to_str()?.strip_prefix("audit-")?.strip_suffix(".jsonl")?.parse().ok()
}

/// The files in order, each with the number of its first line.
fn files(dir: &Path) -> Result<Vec<(u64, PathBuf)>, AuditError> {
    let fail = |source| AuditError::File { path: dir.to_owned(), source };
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(fail(error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(fail)?.path();
        found.extend(number_of(&path).map(|number| (number, path)));
    }
    found.sort();
    Ok(found)
}

fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).mode(0o600).open(path)
}

/// Number, hash of the line before, and own hash of a line that is as it was written.
fn open_line(key: &[u8; 32], line: &[u8]) -> Result<(u64, String, String), &'static str> {
    let at = line.len().checked_sub(MAC_BYTES).ok_or("it is too short")?;
    let (text, mac) = line.split_at(at);
    let mac = mac.strip_prefix(b",\"mac\":\"").and_then(|mac| mac.strip_suffix(b"\"}"));
    let mac = mac.and_then(|mac| std::str::from_utf8(mac).ok()).ok_or("it has no hash")?;
    let shown = blake3::Hash::from_hex(mac).map_err(|_| "its hash is none")?;
    if blake3::keyed_hash(key, text) != shown {
        return Err("its hash does not fit");
    }
    let link: Link =
        serde_json::from_slice(&[text, b"}"].concat()).map_err(|_| "it is no entry of this log")?;
    Ok((link.seq, link.prev, mac.to_owned()))
}

#[cfg(test)]
mod tests {
    use spotq_testkit::TempDir;

    use super::*;
    use crate::auth::Role;

    fn secret() -> ClusterSecret {
        ClusterSecret::new([5; 32])
    }

    fn writer(dir: &TempDir) -> Writer {
        Writer::open(&directory(dir.path()), key(&secret())).unwrap()
    }

    fn entry(call: &str) -> Entry {
        let who = Who::User { name: "ada".into(), role: Role::User };
        Entry::new(&who, Some("127.0.0.1".parse().unwrap()), call.into(), 7, Outcome::Allowed)
    }

    fn only_file(dir: &TempDir) -> PathBuf {
        directory(dir.path()).join(file_name(1))
    }

    fn write_lines(dir: &TempDir, count: usize) {
        let mut writer = writer(dir);
        (0..count).for_each(|n| writer.write(&entry(&format!("/call/{n}"))).unwrap());
    }

    fn breaks(dir: &TempDir) -> bool {
        matches!(verify(dir.path(), &secret()), Err(AuditError::Broken { .. }))
    }

    #[test]
    fn the_chain_goes_on_after_a_restart_and_a_cut_line_is_taken_away() {
        let dir = TempDir::new("audit");
        write_lines(&dir, 3);
        let mut file = append(&only_file(&dir)).unwrap();
        file.write_all(b"{\"seq\":4,\"at").unwrap();
        assert_eq!(verify(dir.path(), &secret()).unwrap(), Verified { lines: 3, first: 1, last: 3 });
        write_lines(&dir, 2);
        assert_eq!(verify(dir.path(), &secret()).unwrap(), Verified { lines: 5, first: 1, last: 5 });
        let text = fs::read_to_string(only_file(&dir)).unwrap();
        for line in text.lines() {
            let value: serde_json::Value = serde_json::from_str(line).unwrap();
            assert_eq!((&value["who"], &value["about"]), (&"ada".into(), &7.into()));
        }
    }

    #[test]
    fn a_changed_removed_or_added_line_is_found() {
        let dir = TempDir::new("audit-broken");
        write_lines(&dir, 4);
        let path = only_file(&dir);
        let good = fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = good.lines().collect();
        let with = |lines: &[&str]| fs::write(&path, lines.join("\n") + "\n").unwrap();
        with(&[lines[0], &lines[1].replace("ada", "bob"), lines[2], lines[3]]);
        assert!(breaks(&dir));
        with(&[lines[0], lines[2], lines[3]]);
        assert!(breaks(&dir));
        with(&[lines[0], lines[1], lines[1], lines[2], lines[3]]);
        assert!(breaks(&dir));
        with(&[lines[0], lines[2], lines[1], lines[3]]);
        assert!(breaks(&dir));
        assert!(verify(dir.path(), &ClusterSecret::new([6; 32])).is_err(), "another cluster's");
        with(&lines);
        assert!(verify(dir.path(), &secret()).is_ok());
    }

    #[test]
    fn old_files_go_and_the_rest_is_still_one_chain() {
        let dir = TempDir::new("audit-rotate");
        let mut writer = writer(&dir);
        for n in 0..FILES_MAX + 3 {
            writer.write(&entry(&format!("/call/{n}"))).unwrap();
            writer.rotate().unwrap();
        }
        writer.write(&entry("/last")).unwrap();
        assert_eq!(files(&directory(dir.path())).unwrap().len(), FILES_MAX);
        let found = verify(dir.path(), &secret()).unwrap();
        assert_eq!((found.last, found.lines), (FILES_MAX as u64 + 4, FILES_MAX as u64));
        fs::remove_file(directory(dir.path()).join(file_name(found.first + 3))).unwrap();
        assert!(breaks(&dir));
    }
}
