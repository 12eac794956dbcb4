//! Streams from the scheduler that outlive it: they break, wait, dial again, and go on where they were.
//!
//! Each stream is a task of its own that sends into one bounded queue. Nothing here prints.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use spotq_model::TaskId;
use spotq_proto::v1;
use tokio::sync::mpsc::Sender;
use tokio::time::Instant;
use tonic::Status;

use crate::client::{Client, PAUSE_MIN, job_request, next_pause};
use crate::error::{ExpectedError, may_pass_later};
use crate::words;

/// What the streams of one command bring.
#[derive(Debug)]
pub enum Event {
    /// A job as it is now; the number is its place in the order of the command line.
    View(usize, Box<v1::JobView>),
    Log(v1::LogsReply),
    /// The output is complete.
    LogsEnd,
    /// The scheduler does not answer; we go on trying.
    Away(String),
    /// It answers again.
    Back,
    /// It will not do any more.
    Failed(ExpectedError),
    /// Ctrl-C.
    Interrupt,
}

/// Views and chunks that wait for a terminal that is slow; then the stream waits, too.
pub const QUEUE_MAX: usize = 64;

/// A scheduler that is away for longer has to be looked after by a person.
const AWAY_MAX: Duration = Duration::from_secs(300);
/// Notes remembered to tell them apart after a reconnect; an attempt makes a handful.
const NOTES_MAX: usize = 10_000;

/// Watches a job until it is done.
pub async fn watch(client: Client, index: usize, task: TaskId, tx: Sender<Event>) {
    let mut away = Away::new(&client, format!("watch job {task}"));
    loop {
        let broken = match client.jobs().watch(job_request(task)).await {
            Err(status) => status,
            Ok(answer) => {
                let mut stream = answer.into_inner();
                loop {
                    match stream.message().await {
                        Ok(Some(view)) => {
                            away.answered(&tx).await;
                            let done = words::is_done(&view);
                            if tx.send(Event::View(index, Box::new(view))).await.is_err() || done {
                                return;
                            }
                        }
                        Ok(None) => break Status::unavailable("the stream ended before the job"),
                        Err(status) => break status,
                    }
                }
            }
        };
        if !away.wait(broken, &tx).await {
            return;
        }
    }
}

/// Brings the output of a job. With `follow` it goes on until the job is done.
pub async fn logs(client: Client, request: v1::LogsRequest, tx: Sender<Event>) {
    let task = TaskId { job: spotq_model::JobId(request.job_id), index: request.task_index };
    let mut away = Away::new(&client, format!("read the output of job {task}"));
    let mut seen = Seen::default();
    loop {
        let broken = match client.jobs().logs(request).await {
            Err(status) => status,
            Ok(answer) => {
                let mut stream = answer.into_inner();
                seen.restart();
                loop {
                    match stream.message().await {
                        Ok(Some(chunk)) => {
                            away.answered(&tx).await;
                            let Some(fresh) = seen.fresh(chunk) else { continue };
                            if tx.send(Event::Log(fresh)).await.is_err() {
                                return;
                            }
                        }
                        Ok(None) => break finished(&client, request, task).await.err(),
                        Err(status) => break Some(status),
                    }
                }
                .unwrap_or_else(|| Status::ok(""))
            }
        };
        if broken.code() == tonic::Code::Ok {
            let _ = tx.send(Event::LogsEnd).await;
            return;
        }
        if !away.wait(broken, &tx).await {
            return;
        }
    }
}

/// Sends an event for each Ctrl-C.
pub async fn interrupts(tx: Sender<Event>) {
    while tokio::signal::ctrl_c().await.is_ok() && tx.send(Event::Interrupt).await.is_ok() {}
}

/// A stream of output that ends is complete, unless it follows a job that is not done: then the scheduler left.
async fn finished(client: &Client, request: v1::LogsRequest, task: TaskId) -> Result<(), Status> {
    if !request.follow {
        return Ok(());
    }
    let view = client.jobs().get(job_request(task)).await?.into_inner();
    let attempt_over = request
        .generation
        .is_some_and(|g| view.attempts.iter().any(|a| a.generation == g && !a.end.is_empty()));
    if words::is_done(&view) || attempt_over {
        return Ok(());
    }
    Err(Status::unavailable("the stream ended before the job"))
}

/// How long the scheduler has been away, and whether that was said.
#[derive(Debug)]
struct Away {
    server: String,
    what: String,
    ever_answered: bool,
    since: Option<Instant>,
    pause: Duration,
}

impl Away {
    fn new(client: &Client, what: String) -> Self {
        Away { server: client.server.clone(), what, ever_answered: false, since: None, pause: PAUSE_MIN }
    }

    async fn answered(&mut self, tx: &Sender<Event>) {
        self.ever_answered = true;
        self.pause = PAUSE_MIN;
        if self.since.take().is_some() {
            let _ = tx.send(Event::Back).await;
        }
    }

    /// Waits before the next try; false if there is none.
    async fn wait(&mut self, status: Status, tx: &Sender<Event>) -> bool {
        let since = *self.since.get_or_insert_with(Instant::now);
        if !may_pass_later(&status) || since.elapsed() > AWAY_MAX {
            let error = ExpectedError::from_status(&self.server, &self.what, &status);
            let _ = tx.send(Event::Failed(error)).await;
            return false;
        }
        let why = ExpectedError::from_status(&self.server, &self.what, &status).to_string();
        let why = why.lines().next().unwrap_or_default().to_owned();
        if tx.send(Event::Away(why)).await.is_err() {
            return false;
        }
        tokio::time::sleep(self.pause).await;
        self.pause = next_pause(self.pause);
        true
    }
}

/// What of a job's output has been passed on. The scheduler begins at the start after each reconnect, and cuts the
/// output into chunks as it likes.
#[derive(Debug, Default)]
struct Seen {
    /// Bytes passed on, by attempt and stream.
    passed: BTreeMap<(u64, i32), u64>,
    /// Bytes that came since the last connect.
    came: BTreeMap<(u64, i32), u64>,
    notes: BTreeSet<(u64, u64, Vec<u8>)>,
}

impl Seen {
    fn restart(&mut self) {
        self.came.clear();
    }

    /// The part of `chunk` that is new.
    fn fresh(&mut self, mut chunk: v1::LogsReply) -> Option<v1::LogsReply> {
        if chunk.stream() == v1::LogStream::Note {
            // Notes are made anew from the history, so that their number says nothing; their time and first words
            // do. What follows a comma may have become known later.
            if self.notes.len() >= NOTES_MAX {
                self.notes.pop_first();
            }
            let words = chunk.data.split(|b| *b == b',').next().unwrap_or_default().to_vec();
            return self.notes.insert((chunk.generation, chunk.at_ms, words)).then_some(chunk);
        }
        let key = (chunk.generation, chunk.stream);
        let came = self.came.entry(key).or_default();
        let passed = self.passed.entry(key).or_default();
        let start = *came;
        *came += chunk.data.len() as u64;
        if *came <= *passed {
            return None;
        }
        let known = usize::try_from(passed.saturating_sub(start)).unwrap_or(usize::MAX);
        chunk.data.drain(..known.min(chunk.data.len()));
        *passed = *came;
        Some(chunk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(generation: u64, stream: v1::LogStream, data: &str) -> v1::LogsReply {
        v1::LogsReply { generation, stream: stream.into(), at_ms: 5, data: data.into() }
    }

    fn pass(seen: &mut Seen, chunks: Vec<v1::LogsReply>) -> String {
        let fresh = chunks.into_iter().filter_map(|c| seen.fresh(c));
        fresh.map(|c| String::from_utf8(c.data).unwrap()).collect::<Vec<_>>().join("|")
    }

    #[test]
    fn after_a_reconnect_only_what_is_new_is_passed_however_it_is_cut() {
        use v1::LogStream::{Note, Stderr, Stdout};
        let mut seen = Seen::default();
        let first = vec![chunk(1, Stdout, "hello "), chunk(1, Stderr, "warn"), chunk(1, Note, "attempt 1")];
        assert_eq!(pass(&mut seen, first), "hello |warn|attempt 1");
        seen.restart();
        let again = vec![
            chunk(1, Note, "attempt 1, resumed at step 3"),
            chunk(1, Stdout, "hel"),
            chunk(1, Stdout, "lo wor"),
            chunk(1, Stderr, "warning"),
            chunk(2, Stdout, "hello "),
            chunk(1, Stdout, "ld"),
        ];
        assert_eq!(pass(&mut seen, again), "wor|ing|hello |ld");
        seen.restart();
        assert_eq!(pass(&mut seen, vec![chunk(1, Stdout, "hello world!")]), "!");
    }
}
