//! What must survive a crash of the worker: which grants it took, and what it has not yet got acknowledged.
//!
//! An append-only file of JSON lines in the node's directory. Holds no key, no secret and no environment (INV-14):
//! an attempt that a dead worker ran is not continued, only reported.
//!
//! What cannot be written is remembered and written with the next thing that can be: a full disk costs safety against
//! a crash until then, and nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use prost::Message as _;
use serde::{Deserialize, Serialize};
use spotq_model::{Generation, JobId, TaskId};
use spotq_proto::v1;

use crate::ids::AttemptId;

/// Above this the file is written anew with what still matters.
const COMPACT_BYTES: u64 = 1 << 20;
/// Report ids are reserved in blocks, so that most reports need no sync and no id is ever used twice.
const ID_BLOCK: u64 = 1000;
/// A larger journal is not ours; reading it would only fill memory.
const JOURNAL_MAX: u64 = 64 << 20;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
enum Line {
    Granted {
        job: u32,
        index: u32,
        generation: u64,
    },
    /// The encoded report.
    Report {
        id: u64,
        report: String,
    },
    Acked {
        id: u64,
    },
    /// The end of the attempt was reported.
    Finished {
        job: u32,
        index: u32,
        generation: u64,
    },
    /// Ids below this may have been used.
    IdsBelow {
        id: u64,
    },
}

/// What the journal says.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Recovered {
    /// Granted, and its end never reported.
    pub unfinished: Vec<AttemptId>,
    /// Not acknowledged, in order.
    pub reports: Vec<v1::Report>,
    /// The newest generation ever granted here, per task.
    pub newest: BTreeMap<TaskId, Generation>,
    ids_below: u64,
}

/// The open journal.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    /// The file is whole up to here.
    bytes: u64,
    /// The file lacks something that `live` has: the next writing is of all of it.
    behind: bool,
    next_id: u64,
    /// Durably; ids above it may be in use if the disk was full.
    reserved: u64,
    live: Live,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Durable {
    Now,
    Soon,
}

/// What a compacted file must still say.
#[derive(Debug, Default)]
struct Live {
    unfinished: BTreeSet<AttemptId>,
    newest: BTreeMap<TaskId, Generation>,
    reports: BTreeMap<u64, String>,
}

impl Journal {
    /// Opens or begins the journal in `dir`, and says what an earlier worker left.
    ///
    /// # Errors
    /// The directory is read-only or full, named in the error.
    pub fn open(dir: &Path) -> io::Result<(Journal, Recovered)> {
        std::fs::create_dir_all(dir)?;
        let path = dir.join("journal");
        let text = read_bounded(&path)?;
        let recovered = replay(&text);
        let file = OpenOptions::new().create(true).append(true).open(&path)?;
        let bytes = file.metadata()?.len();
        let mut live = Live { newest: recovered.newest.clone(), ..Live::default() };
        live.unfinished.extend(&recovered.unfinished);
        live.reports.extend(recovered.reports.iter().map(|report| (report.id, encode(report))));
        let next_id = recovered.ids_below.max(1);
        let mut journal = Journal { path, file, bytes, behind: false, next_id, reserved: next_id, live };
        if !text.is_empty() && !text.ends_with(b"\n") {
            // A crash cut the last line; what follows must not be glued to it. Cutting it off needs no space.
            journal.bytes = text.iter().rposition(|b| *b == b'\n').map_or(0, |at| at as u64 + 1);
            journal.behind = true;
            journal.file.set_len(journal.bytes)?;
        }
        File::open(dir)?.sync_all()?;
        Ok((journal, recovered))
    }

    /// Takes the grant durably: from here on its end will be reported.
    ///
    /// # Errors
    /// It is not durable; the grant must not be acted on, and its end be reported.
    pub fn granted(&mut self, id: AttemptId) -> io::Result<()> {
        self.live.unfinished.insert(id);
        let newest = self.live.newest.entry(id.task).or_default();
        *newest = (*newest).max(id.generation);
        let (job, index, generation) = parts(id);
        self.put(&[Line::Granted { job, index, generation }], Durable::Now)
    }

    /// The number of the next report, never one that this process has used.
    ///
    /// It is given even if it cannot be reserved on a full disk: a report without a number could not go out at all. A
    /// later worker may then use it again, but not while a report that has it still waits, since that raises the numbers
    /// as a reservation does, and acknowledgements do not cross from one connection to the next.
    pub fn next_report_id(&mut self) -> u64 {
        if self.next_id >= self.reserved {
            let upto = self.next_id + ID_BLOCK;
            match self.put(&[Line::IdsBelow { id: upto }], Durable::Now) {
                // A compaction on the way may have reserved as many.
                Ok(()) => self.reserved = self.reserved.max(upto),
                Err(error) => tracing::warn!(%error, "numbers of reports are not reserved on disk"),
            }
        }
        self.next_id += 1;
        self.next_id - 1
    }

    /// Keeps a report until it is acknowledged.
    ///
    /// # Errors
    /// It is not on disk yet.
    pub fn report(&mut self, report: &v1::Report) -> io::Result<()> {
        let text = encode(report);
        self.live.reports.insert(report.id, text.clone());
        let kept = Line::Report { id: report.id, report: text };
        let finished = matches!(report.what, Some(v1::report::What::Finished(_)));
        if let (true, Some(id)) = (finished, report.grant.and_then(AttemptId::from_wire)) {
            self.live.unfinished.remove(&id);
            let (job, index, generation) = parts(id);
            self.put(&[kept, Line::Finished { job, index, generation }], Durable::Now)
        } else {
            self.put(&[kept], Durable::Soon)
        }
    }

    /// The scheduler has it.
    ///
    /// # Errors
    /// It may be sent once more after a restart, which is harmless.
    pub fn acked(&mut self, id: u64) -> io::Result<()> {
        if self.live.reports.remove(&id).is_some() {
            self.put(&[Line::Acked { id }], Durable::Soon)?;
        }
        if self.bytes > COMPACT_BYTES { self.compact() } else { Ok(()) }
    }

    /// Appends what `live` says already, or writes all of that if an earlier piece is missing in the file.
    fn put(&mut self, lines: &[Line], durable: Durable) -> io::Result<()> {
        let written = if self.behind { self.compact() } else { self.append(lines, durable) };
        self.behind = written.is_err();
        written
    }

    fn append(&mut self, lines: &[Line], durable: Durable) -> io::Result<()> {
        let text = to_text(lines)?;
        if let Err(error) = write_all(&mut self.file, &text) {
            // Half a line would be glued to the next one. If even this fails, the next writing replaces the file.
            let _ = self.file.set_len(self.bytes);
            return Err(error);
        }
        self.bytes += text.len() as u64;
        if durable == Durable::Now { self.file.sync_data() } else { Ok(()) }
    }

    /// Writes aside, syncs, renames.
    fn compact(&mut self) -> io::Result<()> {
        let aside = self.path.with_extension("new");
        let reserved = if self.next_id < self.reserved { self.reserved } else { self.next_id + ID_BLOCK };
        let mut lines = vec![Line::IdsBelow { id: reserved }];
        for (task, generation) in &self.live.newest {
            let id = AttemptId { task: *task, generation: *generation };
            let (job, index, generation) = parts(id);
            lines.push(Line::Granted { job, index, generation });
            if !self.live.unfinished.contains(&id) {
                lines.push(Line::Finished { job, index, generation });
            }
        }
        for id in &self.live.unfinished {
            let (job, index, generation) = parts(*id);
            lines.push(Line::Granted { job, index, generation });
        }
        lines.extend(
            self.live.reports.iter().map(|(id, report)| Line::Report { id: *id, report: report.clone() }),
        );
        let text = to_text(&lines)?;
        let file = write_aside(&aside, &text).inspect_err(|_| {
            // On a full disk the half of it is in the way of others.
            let _ = std::fs::remove_file(&aside);
        })?;
        std::fs::rename(&aside, &self.path)?;
        (self.file, self.bytes, self.reserved) = (file, text.len() as u64, reserved);
        match self.path.parent() {
            Some(dir) => File::open(dir)?.sync_all(),
            None => Ok(()),
        }
    }
}

fn to_text(lines: &[Line]) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    for line in lines {
        serde_json::to_writer(&mut text, line)?;
        text.push(b'\n');
    }
    Ok(text)
}

/// A new file at `aside` with `text`, synced and open for more.
fn write_aside(aside: &Path, text: &[u8]) -> io::Result<File> {
    match std::fs::remove_file(aside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let mut file = OpenOptions::new().append(true).create_new(true).open(aside)?;
    write_all(&mut file, text)?;
    file.sync_all()?;
    Ok(file)
}

#[cfg(not(test))]
fn write_all(file: &mut File, bytes: &[u8]) -> io::Result<()> {
    file.write_all(bytes)
}

#[cfg(test)]
use full_disk::write_all;

/// A disk that has only so much room for this thread's journal.
#[cfg(test)]
pub mod full_disk {
    use super::*;

    thread_local! {
        static ROOM: std::cell::Cell<Option<usize>> = const { std::cell::Cell::new(None) };
    }

    /// `None`: as much as there is.
    pub fn set_room(bytes: Option<usize>) {
        ROOM.set(bytes);
    }

    /// As a real one: what fits is written.
    pub fn write_all(file: &mut File, bytes: &[u8]) -> io::Result<()> {
        let fits = ROOM.get().map_or(bytes.len(), |room| room.min(bytes.len()));
        file.write_all(&bytes[..fits])?;
        ROOM.set(ROOM.get().map(|room| room - fits));
        if fits < bytes.len() { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }
}

fn parts(id: AttemptId) -> (u32, u32, u64) {
    (id.task.job.0, id.task.index, id.generation.0)
}

fn id_of(job: u32, index: u32, generation: u64) -> AttemptId {
    AttemptId { task: TaskId { job: JobId(job), index }, generation: Generation(generation) }
}

fn encode(report: &v1::Report) -> String {
    BASE64_STANDARD.encode(report.encode_to_vec())
}

fn decode(text: &str) -> Option<v1::Report> {
    v1::Report::decode(BASE64_STANDARD.decode(text).ok()?.as_slice()).ok()
}

fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    match std::fs::metadata(path) {
        Ok(meta) if meta.len() > JOURNAL_MAX => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("{} is too large to be a journal; move it away", path.display()),
        )),
        Ok(_) => std::fs::read(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// Lines that cannot be read are those that a crash cut; they were never acted on.
fn replay(text: &[u8]) -> Recovered {
    let mut found = Recovered::default();
    let mut unfinished = BTreeSet::new();
    let mut reports = BTreeMap::new();
    for line in text.split(|b| *b == b'\n').filter(|line| !line.is_empty()) {
        let Ok(line) = serde_json::from_slice::<Line>(line) else { continue };
        match line {
            Line::Granted { job, index, generation } => {
                let id = id_of(job, index, generation);
                unfinished.insert(id);
                let newest = found.newest.entry(id.task).or_default();
                *newest = (*newest).max(id.generation);
            }
            Line::Report { id, report } => {
                if let Some(report) = decode(&report) {
                    reports.insert(id, report);
                }
                found.ids_below = found.ids_below.max(id + 1);
            }
            Line::Acked { id } => {
                reports.remove(&id);
            }
            Line::Finished { job, index, generation } => {
                unfinished.remove(&id_of(job, index, generation));
            }
            Line::IdsBelow { id } => found.ids_below = found.ids_below.max(id),
        }
    }
    found.unfinished = unfinished.into_iter().collect();
    found.reports = reports.into_values().collect();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finished(id: u64, attempt: AttemptId) -> v1::Report {
        let what =
            Some(v1::report::What::Finished(v1::Finished { exit_code: Some(0), ..Default::default() }));
        v1::Report { id, grant: Some(attempt.to_wire()), at_ms: 1, what }
    }

    #[test]
    fn an_unfinished_grant_and_an_unacknowledged_end_survive_a_crash() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (id_of(1, 0, 1), id_of(2, 0, 5));
        let (mut journal, empty) = Journal::open(dir.path()).unwrap();
        assert_eq!(empty, Recovered::default());
        journal.granted(a).unwrap();
        journal.granted(b).unwrap();
        let id = journal.next_report_id();
        journal.report(&finished(id, b)).unwrap();
        drop(journal);
        let (mut journal, found) = Journal::open(dir.path()).unwrap();
        assert_eq!(found.unfinished, vec![a]);
        assert_eq!(found.reports, vec![finished(id, b)]);
        assert_eq!(found.newest[&b.task], Generation(5));
        assert!(journal.next_report_id() > id, "an id is never used twice");
        journal.acked(id).unwrap();
        drop(journal);
        assert!(Journal::open(dir.path()).unwrap().1.reports.is_empty());
    }

    #[test]
    fn a_cut_at_any_byte_is_read_without_loss_of_what_came_before() {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, _) = Journal::open(dir.path()).unwrap();
        journal.granted(id_of(1, 0, 1)).unwrap();
        journal.granted(id_of(2, 0, 1)).unwrap();
        let text = std::fs::read(dir.path().join("journal")).unwrap();
        let first = text.iter().position(|b| *b == b'\n').unwrap() + 1;
        for cut in first..text.len() {
            let crashed = tempfile::tempdir().unwrap();
            std::fs::write(crashed.path().join("journal"), &text[..cut]).unwrap();
            let (mut journal, found) = Journal::open(crashed.path()).unwrap();
            assert!(found.unfinished.contains(&id_of(1, 0, 1)), "cut at {cut}");
            journal.granted(id_of(3, 0, 1)).unwrap();
            assert!(
                Journal::open(crashed.path()).unwrap().1.unfinished.contains(&id_of(3, 0, 1)),
                "cut at {cut}"
            );
        }
    }

    #[test]
    fn the_file_stays_small_and_compaction_keeps_what_matters() {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, _) = Journal::open(dir.path()).unwrap();
        let (open, done) = (id_of(1, 0, 2), id_of(9, 0, 4));
        journal.granted(open).unwrap();
        journal.granted(done).unwrap();
        let mut last = 0;
        for _ in 0..15_000 {
            last = journal.next_report_id();
            journal
                .report(&v1::Report { id: last, grant: Some(open.to_wire()), at_ms: 0, what: None })
                .unwrap();
            journal.acked(last).unwrap();
        }
        let id = journal.next_report_id();
        journal.report(&finished(id, done)).unwrap();
        assert!(std::fs::metadata(dir.path().join("journal")).unwrap().len() < 2 * COMPACT_BYTES);
        let (mut journal, found) = Journal::open(dir.path()).unwrap();
        assert_eq!((found.unfinished, found.newest[&done.task]), (vec![open], Generation(4)));
        assert_eq!(found.reports.len(), 1);
        assert!(journal.next_report_id() > last);
    }

    fn whole_lines(dir: &Path) -> bool {
        let text = std::fs::read(dir.join("journal")).unwrap();
        text.split_inclusive(|b| *b == b'\n').all(|line| serde_json::from_slice::<Line>(line).is_ok())
            && (text.is_empty() || text.ends_with(b"\n"))
    }

    #[test]
    fn a_write_that_a_full_disk_cuts_leaves_no_half_line_whatever_fits() {
        for room in 0..150 {
            let dir = tempfile::tempdir().unwrap();
            let (mut journal, _) = Journal::open(dir.path()).unwrap();
            journal.granted(id_of(1, 0, 1)).unwrap();
            full_disk::set_room(Some(room));
            let refused = journal.granted(id_of(2, 0, 1)).is_err();
            let kept = journal.report(&finished(1, id_of(1, 0, 1))).is_ok();
            assert!(whole_lines(dir.path()), "{room}");
            full_disk::set_room(None);
            assert!(journal.granted(id_of(3, 0, 1)).is_ok() && whole_lines(dir.path()), "{room}");
            let (_, found) = Journal::open(dir.path()).unwrap();
            // What failed is there as well, by the write that worked.
            assert_eq!(found.unfinished, vec![id_of(2, 0, 1), id_of(3, 0, 1)], "{room} {refused} {kept}");
            assert_eq!(found.reports, vec![finished(1, id_of(1, 0, 1))], "{room} {refused} {kept}");
        }
    }

    #[test]
    fn numbers_of_reports_do_not_repeat_on_a_full_disk_nor_after_it() {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, _) = Journal::open(dir.path()).unwrap();
        journal.granted(id_of(1, 0, 1)).unwrap();
        full_disk::set_room(Some(0));
        let mut used: Vec<u64> = (0..3 * ID_BLOCK).map(|_| journal.next_report_id()).collect();
        full_disk::set_room(None);
        used.extend((0..3 * ID_BLOCK).map(|_| journal.next_report_id()));
        assert!(used.is_sorted_by(|a, b| a < b));
        drop(journal);
        let (mut journal, _) = Journal::open(dir.path()).unwrap();
        assert!(journal.next_report_id() > *used.last().unwrap());
    }

    #[test]
    fn an_unreserved_number_of_a_report_that_waits_is_not_given_again_after_a_crash() {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, _) = Journal::open(dir.path()).unwrap();
        full_disk::set_room(Some(0));
        let unreserved = journal.next_report_id();
        full_disk::set_room(None);
        journal.report(&finished(unreserved, id_of(1, 0, 1))).unwrap();
        drop(journal);
        let (mut journal, _) = Journal::open(dir.path()).unwrap();
        assert!(journal.next_report_id() > unreserved);
    }

    #[test]
    fn a_compaction_that_does_not_fit_leaves_the_journal_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, _) = Journal::open(dir.path()).unwrap();
        journal.granted(id_of(1, 0, 1)).unwrap();
        let before = std::fs::read(dir.path().join("journal")).unwrap();
        full_disk::set_room(Some(20));
        assert!(journal.compact().is_err());
        full_disk::set_room(None);
        assert_eq!(std::fs::read(dir.path().join("journal")).unwrap(), before);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left beside it");
        journal.compact().unwrap();
        journal.granted(id_of(2, 0, 1)).unwrap();
        assert_eq!(Journal::open(dir.path()).unwrap().1.unfinished.len(), 2);
    }
}
