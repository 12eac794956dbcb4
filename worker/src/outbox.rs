//! What the scheduler has still to hear: reports in order until acknowledged, and log bytes from where it has them.
//!
//! Owns the journal. Never drops a report that matters, and never lets progress pile up: of each attempt at most one
//! progress report waits, with the newest numbers.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use spotq_model::{Generation, TaskId};
use spotq_proto::v1;
use v1::report::What;

use crate::ids::{AttemptId, Instant, now};
use crate::journal::{Journal, Recovered};
use crate::logs::LogReader;
use crate::words;

/// Log bytes on the way per attempt: enough for a fast link, bounded for a slow scheduler.
const LOG_WINDOW: u64 = 1 << 20;
/// The end of an attempt waits this long for its last log bytes to go out first, since its node may be ended on it.
const LOGS_FIRST: Duration = Duration::from_secs(2);

/// Everything on its way out.
#[derive(Debug)]
pub struct Outbox {
    journal: Journal,
    queue: VecDeque<Queued>,
    /// Of the queue, how many were sent on this connection.
    sent: usize,
    lanes: BTreeMap<AttemptId, Lane>,
    newest: BTreeMap<TaskId, Generation>,
}

#[derive(Debug)]
struct Queued {
    report: v1::Report,
    since: Instant,
}

/// One attempt's log and the state of its reports.
#[derive(Debug)]
struct Lane {
    log: LogReader,
    /// Its end is queued.
    finished: bool,
    /// Its end is acknowledged.
    acked: bool,
    progress: Option<v1::Progress>,
}

impl Outbox {
    /// Goes on where an earlier worker in the same directory stopped.
    #[must_use]
    pub fn recover(journal: Journal, recovered: Recovered, log_of: impl Fn(AttemptId) -> PathBuf) -> Outbox {
        let mut outbox = Outbox {
            journal,
            queue: VecDeque::new(),
            sent: 0,
            lanes: BTreeMap::new(),
            newest: recovered.newest,
        };
        for report in recovered.reports {
            if let Some(id) = report.grant.and_then(AttemptId::from_wire) {
                let finished = matches!(report.what, Some(What::Finished(_)));
                outbox.lane(id, log_of(id)).finished |= finished;
            }
            outbox.queue.push_back(Queued { report, since: Instant::now() });
        }
        for id in recovered.unfinished {
            outbox.lane(id, log_of(id));
            let lost = words::lost("the worker restarted; what it ran was ended".to_owned());
            if let Err(error) = outbox.report(id, now().0, lost) {
                tracing::error!(%error, "what was lost is reported, but not noted; is the node's disk full?");
            }
        }
        outbox
    }

    /// Whether a grant is news.
    #[must_use]
    pub fn judge(&self, id: AttemptId) -> Novelty {
        match self.newest.get(&id.task) {
            Some(newest) if *newest > id.generation => Novelty::Old { newest: *newest },
            Some(newest) if *newest == id.generation => Novelty::Known,
            _ => Novelty::New,
        }
    }

    /// Takes a grant durably. It is known from here on, also if that fails.
    ///
    /// # Errors
    /// It is not on disk and must not be acted on; its end must be reported.
    pub fn granted(&mut self, id: AttemptId, log: PathBuf) -> io::Result<()> {
        self.newest.insert(id.task, id.generation);
        self.lane(id, log);
        self.journal.granted(id)
    }

    /// Queues a report. Progress replaces progress that waits.
    ///
    /// # Errors
    /// It is not in the journal yet; it is queued all the same.
    pub fn report(&mut self, id: AttemptId, at_ms: u64, what: What) -> io::Result<()> {
        if let What::Progress(point) = &what
            && self.queue.iter().any(|queued| is_progress_of(&queued.report, id))
        {
            if let Some(lane) = self.lanes.get_mut(&id) {
                lane.progress = Some(*point);
            }
            return Ok(());
        }
        let lasting = !matches!(what, What::Progress(_));
        if let (What::Finished(_), Some(lane)) = (&what, self.lanes.get_mut(&id)) {
            lane.finished = true;
        }
        let number = self.journal.next_report_id();
        let report = v1::Report { id: number, grant: Some(id.to_wire()), at_ms, what: Some(what) };
        let kept = if lasting { self.journal.report(&report) } else { Ok(()) };
        self.queue.push_back(Queued { report, since: Instant::now() });
        kept
    }

    /// The scheduler has the report. Says which attempt is over for good by it.
    ///
    /// # Errors
    /// The journal could not note it; the report may be sent once more after a restart.
    pub fn acked(&mut self, number: u64) -> io::Result<()> {
        let Some(at) = self.queue.iter().position(|queued| queued.report.id == number) else { return Ok(()) };
        let Some(queued) = self.queue.remove(at) else { return Ok(()) };
        if at < self.sent {
            self.sent -= 1;
        }
        let id = queued.report.grant.and_then(AttemptId::from_wire);
        let mut noted = match queued.report.what {
            Some(What::Progress(_)) => Ok(()),
            _ => self.journal.acked(number),
        };
        if let Some((id, lane)) = id.and_then(|id| Some((id, self.lanes.get_mut(&id)?))) {
            lane.acked |= matches!(queued.report.what, Some(What::Finished(_)));
            if let Some(point) = lane.progress.take() {
                noted = noted.and(self.report(id, now().0, What::Progress(point)));
            }
        }
        noted
    }

    /// The scheduler has the log up to `offset`.
    pub fn log_acked(&mut self, id: AttemptId, offset: u64) {
        if let Some(lane) = self.lanes.get_mut(&id) {
            lane.log.ack(offset);
        }
    }

    /// The scheduler says, at the start of a connection, that it has the log up to `offset`.
    pub fn log_restart(&mut self, id: AttemptId, offset: u64) {
        if let Some(lane) = self.lanes.get_mut(&id) {
            lane.log.restart(offset);
        }
    }

    /// A new connection: everything unacknowledged goes out again.
    pub fn rewind(&mut self) {
        self.sent = 0;
        self.lanes.values_mut().for_each(|lane| lane.log.rewind());
    }

    /// The next message to send, if there is one.
    pub fn next_message(&mut self) -> Option<v1::worker_message::Kind> {
        if let Some(queued) = self.queue.get(self.sent) {
            let report = queued.report.clone();
            let patient = queued.since.elapsed() < LOGS_FIRST;
            let id = report.grant.and_then(AttemptId::from_wire);
            if let (Some(What::Finished(_)), Some(id), true) = (&report.what, id, patient)
                && let Some(chunk) = self.log_chunk(id)
            {
                return Some(chunk);
            }
            self.sent += 1;
            return Some(v1::worker_message::Kind::Report(report));
        }
        let ids: Vec<AttemptId> = self.lanes.keys().copied().collect();
        ids.into_iter().find_map(|id| self.log_chunk(id))
    }

    /// What this worker still runs or has to report about.
    #[must_use]
    pub fn held(&self) -> Vec<v1::Grant> {
        self.lanes.iter().filter(|(_, lane)| !lane.acked).map(|(id, _)| id.to_wire()).collect()
    }

    /// Attempts whose end and log are all with the scheduler; they are forgotten here.
    pub fn take_settled(&mut self) -> Vec<AttemptId> {
        let settled: Vec<AttemptId> = self
            .lanes
            .iter()
            .filter(|(id, lane)| {
                lane.acked && lane.log.acked >= lane.log.size() && !self.has_reports_of(**id)
            })
            .map(|(id, _)| *id)
            .collect();
        for id in &settled {
            self.lanes.remove(id);
        }
        settled
    }

    /// Whether anything waits for the scheduler.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.lanes.is_empty()
    }

    fn lane(&mut self, id: AttemptId, log: PathBuf) -> &mut Lane {
        self.lanes.entry(id).or_insert_with(|| Lane {
            log: LogReader::new(log),
            finished: false,
            acked: false,
            progress: None,
        })
    }

    fn log_chunk(&mut self, id: AttemptId) -> Option<v1::worker_message::Kind> {
        let lane = self.lanes.get_mut(&id)?;
        if lane.log.in_flight() >= LOG_WINDOW {
            return None;
        }
        let (offset, data) = lane.log.next_chunk()?;
        Some(v1::worker_message::Kind::Log(v1::LogChunk { grant: Some(id.to_wire()), offset, data }))
    }

    fn has_reports_of(&self, id: AttemptId) -> bool {
        self.queue.iter().any(|queued| queued.report.grant.and_then(AttemptId::from_wire) == Some(id))
    }
}

/// What a grant is to this worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Novelty {
    New,
    Known,
    /// A newer one was granted before: refused.
    Old {
        newest: Generation,
    },
}

fn is_progress_of(report: &v1::Report, id: AttemptId) -> bool {
    matches!(report.what, Some(What::Progress(_))) && report.grant.and_then(AttemptId::from_wire) == Some(id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::full_disk;
    use spotq_model::JobId;
    use v1::worker_message::Kind;

    fn id(job: u32, generation: u64) -> AttemptId {
        AttemptId { task: TaskId::only(JobId(job)), generation: Generation(generation) }
    }

    fn outbox(dir: &std::path::Path) -> Outbox {
        let (journal, recovered) = Journal::open(dir).unwrap();
        Outbox::recover(journal, recovered, |id| dir.join(id.to_string()))
    }

    fn step(step: u64) -> What {
        What::Progress(v1::Progress { step, total: None })
    }

    fn next_report(outbox: &mut Outbox) -> v1::Report {
        match outbox.next_message() {
            Some(Kind::Report(report)) => report,
            other => panic!("expected a report, got {other:?}"),
        }
    }

    #[test]
    fn reports_go_out_in_order_and_again_after_a_reconnect_until_acknowledged() {
        let dir = tempfile::tempdir().unwrap();
        let mut outbox = outbox(dir.path());
        outbox.granted(id(1, 1), dir.path().join("log")).unwrap();
        outbox.report(id(1, 1), 1, What::Accepted(v1::Accepted {})).unwrap();
        outbox.report(id(1, 1), 2, What::Started(v1::Started { pid: 3 })).unwrap();
        let (a, b) = (next_report(&mut outbox), next_report(&mut outbox));
        assert_eq!((b.id, outbox.next_message()), (a.id + 1, None));
        outbox.acked(a.id).unwrap();
        outbox.rewind();
        assert_eq!((next_report(&mut outbox).id, outbox.next_message()), (b.id, None));
    }

    #[test]
    fn progress_does_not_pile_up_and_its_newest_number_arrives() {
        let dir = tempfile::tempdir().unwrap();
        let mut outbox = outbox(dir.path());
        outbox.granted(id(1, 1), dir.path().join("log")).unwrap();
        for n in 1..100 {
            outbox.report(id(1, 1), n, step(n)).unwrap();
        }
        let first = next_report(&mut outbox);
        assert_eq!((first.what, outbox.next_message()), (Some(step(1)), None));
        outbox.acked(first.id).unwrap();
        assert_eq!(next_report(&mut outbox).what, Some(step(99)));
    }

    #[test]
    fn the_end_goes_out_after_the_log_and_both_settle_the_attempt() {
        let dir = tempfile::tempdir().unwrap();
        let mut outbox = outbox(dir.path());
        let log = dir.path().join("log");
        std::fs::write(&log, "0123456789").unwrap();
        outbox.granted(id(1, 1), log).unwrap();
        outbox.report(id(1, 1), 1, What::Finished(v1::Finished::default())).unwrap();
        assert!(matches!(outbox.next_message(), Some(Kind::Log(chunk)) if chunk.data.len() == 10));
        let end = next_report(&mut outbox);
        outbox.acked(end.id).unwrap();
        assert_eq!((outbox.take_settled(), outbox.is_empty()), (vec![], false));
        outbox.log_acked(id(1, 1), 10);
        assert_eq!((outbox.take_settled(), outbox.is_empty()), (vec![id(1, 1)], true));
    }

    #[test]
    fn a_restart_reports_what_it_lost_and_remembers_generations() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = outbox(dir.path());
        first.granted(id(1, 4), dir.path().join("log")).unwrap();
        drop(first);
        let mut second = outbox(dir.path());
        let report = next_report(&mut second);
        assert!(
            matches!(report.what, Some(What::Finished(end)) if end.detail.clone().unwrap().contains("restarted"))
        );
        assert_eq!(second.judge(id(1, 3)), Novelty::Old { newest: Generation(4) });
        assert_eq!((second.judge(id(1, 4)), second.judge(id(1, 5))), (Novelty::Known, Novelty::New));
        drop(second);
        assert_eq!(
            outbox(dir.path()).held(),
            vec![id(1, 4).to_wire()],
            "reported once, kept until acknowledged"
        );
    }

    #[test]
    fn a_full_disk_holds_no_report_back_and_a_crash_after_it_finds_them() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = outbox(dir.path());
        first.granted(id(1, 1), dir.path().join("log")).unwrap();
        full_disk::set_room(Some(30));
        assert!(first.report(id(1, 1), 1, What::Accepted(v1::Accepted {})).is_err());
        let end = What::Finished(v1::Finished { exit_code: Some(0), ..Default::default() });
        assert!(first.report(id(1, 1), 2, end.clone()).is_err());
        let accepted = next_report(&mut first);
        let finished = next_report(&mut first);
        assert_eq!(
            (accepted.what, finished.what),
            (Some(What::Accepted(v1::Accepted {})), Some(end.clone()))
        );
        assert!(accepted.id < finished.id);
        full_disk::set_room(None);
        first.acked(accepted.id).unwrap();
        drop(first);
        let mut second = outbox(dir.path());
        assert_eq!(next_report(&mut second).what, Some(end));
        assert_eq!(second.next_message(), None, "its end was known, so nothing else was lost");
    }

    #[test]
    fn what_a_restart_lost_is_reported_on_a_full_disk_too() {
        let dir = tempfile::tempdir().unwrap();
        outbox(dir.path()).granted(id(1, 1), dir.path().join("log")).unwrap();
        full_disk::set_room(Some(0));
        let mut second = outbox(dir.path());
        full_disk::set_room(None);
        assert!(matches!(next_report(&mut second).what, Some(What::Finished(_))));
    }
}
