//! `wait`, `run` and `logs -f`: one loop over what the streams bring.
//!
//! They survive a scheduler that is killed and started again; only a scheduler that stays away ends them.

use std::time::Duration;

use spotq_model::TaskId;
use spotq_proto::v1;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::client::{Client, job_request};
use crate::error::{ExpectedError, codes};
use crate::json;
use crate::narrate::{Bill, Narrator, status};
use crate::out::{Format, Out};
use crate::screen::{DRAW_EVERY, Screen, Stream};
use crate::stream::{self, Event, QUEUE_MAX};
use crate::{views, words};

/// How long the last output may take to arrive after the job is done.
const LAST_OUTPUT_MAX: Duration = Duration::from_secs(10);
/// How long the final bill is waited for: a node is kept a moment for the next job, and nobody wants to wait longer
/// for a figure that `report` has, too.
const BILL_MAX: Duration = Duration::from_secs(3);
const BILL_EVERY: Duration = Duration::from_millis(200);

/// Waits for jobs; gives the exit code of the first that did not complete, else 0.
pub async fn wait(client: &Client, tasks: &[TaskId], out: &Out) -> Result<u8, ExpectedError> {
    let (tx, rx) = mpsc::channel(QUEUE_MAX);
    for (index, task) in tasks.iter().enumerate() {
        tokio::spawn(stream::watch(client.clone(), index, *task, tx.clone()));
    }
    tokio::spawn(stream::interrupts(tx));
    let mut follow = Follow::new(client, tasks, out, Logs::No, OnInterrupt::Leave);
    let code = follow.until_done(rx).await?;
    follow.print_jobs(code)
}

/// Follows a job's output and progress; gives its exit code. The first Ctrl-C cancels the job, the second leaves.
pub async fn run(client: &Client, task: TaskId, out: &Out) -> Result<u8, ExpectedError> {
    let (tx, rx) = mpsc::channel(QUEUE_MAX);
    let request =
        v1::LogsRequest { job_id: task.job.0, task_index: task.index, follow: true, generation: None };
    tokio::spawn(stream::watch(client.clone(), 0, task, tx.clone()));
    tokio::spawn(stream::logs(client.clone(), request, tx.clone()));
    tokio::spawn(stream::interrupts(tx));
    let mut follow = Follow::new(client, &[task], out, Logs::Yes, OnInterrupt::Cancel);
    match follow.until_done(rx).await {
        Ok(code) => follow.print_jobs(code),
        // 0 would say that the job completed.
        Err(ExpectedError::ClosedPipe) => {
            crate::out::talk(&format!("spotq: nobody reads the output any more; job {task} goes on"));
            Ok(codes::OUTPUT_CLOSED)
        }
        Err(error) => Err(error),
    }
}

/// Prints a job's output.
pub async fn logs(client: &Client, request: v1::LogsRequest, out: &Out) -> Result<(), ExpectedError> {
    let (tx, mut rx) = mpsc::channel(QUEUE_MAX);
    tokio::spawn(stream::logs(client.clone(), request, tx));
    // No line moves here: output goes through as it is.
    let mut screen = Screen::new(Out { live: false, ..*out });
    let mut away = false;
    while let Some(event) = rx.recv().await {
        match event {
            Event::Log(chunk) => show(&mut screen, &chunk)?,
            Event::Away(why) => say_away(&screen, &mut away, &why),
            Event::Back => say_back(&screen, &mut away),
            Event::Failed(error) => return Err(error),
            Event::LogsEnd => return Ok(()),
            Event::View(..) | Event::Interrupt => {}
        }
    }
    Ok(())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Logs {
    Yes,
    No,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OnInterrupt {
    /// The job goes on without us.
    Leave,
    /// The job is cancelled and waited for; another one leaves.
    Cancel,
}

/// What a waiting command knows.
#[derive(Debug)]
struct Follow {
    client: Client,
    tasks: Vec<TaskId>,
    views: Vec<Option<Box<v1::JobView>>>,
    narrators: Vec<Narrator>,
    screen: Screen,
    out: Out,
    on_interrupt: OnInterrupt,
    interrupted: bool,
    logs_open: bool,
    away: bool,
    /// No output is waited for after this.
    patience: Option<Instant>,
}

impl Follow {
    fn new(client: &Client, tasks: &[TaskId], out: &Out, logs: Logs, on_interrupt: OnInterrupt) -> Self {
        let narrator = match on_interrupt {
            OnInterrupt::Leave => Narrator::default,
            OnInterrupt::Cancel => Narrator::from_the_start,
        };
        Follow {
            client: client.clone(),
            tasks: tasks.to_vec(),
            views: tasks.iter().map(|_| None).collect(),
            narrators: tasks.iter().map(|_| narrator()).collect(),
            screen: Screen::new(*out),
            out: *out,
            on_interrupt,
            interrupted: false,
            logs_open: logs == Logs::Yes,
            away: false,
            patience: None,
        }
    }

    async fn until_done(&mut self, mut rx: mpsc::Receiver<Event>) -> Result<u8, ExpectedError> {
        let mut draw = tokio::time::interval(DRAW_EVERY);
        draw.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while !self.is_over() {
            let ended = tokio::select! {
                event = rx.recv() => match event {
                    Some(event) => self.take(event)?,
                    None => return Err(ExpectedError::Internal("the streams ended before the job".into())),
                },
                _ = draw.tick() => { self.draw(); None }
            };
            if let Some(code) = ended {
                self.screen.finish()?;
                return Ok(code);
            }
        }
        self.settle(&mut rx).await;
        self.screen.finish()?;
        self.tell_ends();
        Ok(self
            .views
            .iter()
            .flatten()
            .map(|view| words::exit_code(view))
            .find(|code| *code != 0)
            .unwrap_or(0))
    }

    /// Takes an event; gives an exit code if this ends the command early.
    fn take(&mut self, event: Event) -> Result<Option<u8>, ExpectedError> {
        match event {
            Event::View(index, view) => self.view(index, view),
            // The narrator tells of attempts, and earlier.
            Event::Log(chunk) if is_of_an_attempt(&chunk) => {}
            Event::Log(chunk) => self.output(&chunk)?,
            Event::LogsEnd => self.logs_open = false,
            Event::Away(why) => say_away(&self.screen, &mut self.away, &why),
            Event::Back => say_back(&self.screen, &mut self.away),
            Event::Interrupt => return Ok(self.interrupt()),
            Event::Failed(error) => {
                self.screen.finish()?;
                return Err(error);
            }
        }
        Ok(None)
    }

    fn view(&mut self, index: usize, view: Box<v1::JobView>) {
        let (Some(slot), Some(narrator)) = (self.views.get_mut(index), self.narrators.get_mut(index)) else {
            return;
        };
        // The end is told after the last output.
        if words::is_done(&view) {
            self.patience.get_or_insert_with(|| Instant::now() + LAST_OUTPUT_MAX);
        } else {
            for line in narrator.tell(&view, words::now()) {
                self.screen.say(&named(&self.tasks, index, line));
            }
        }
        *slot = Some(view);
        self.draw();
    }

    fn tell_ends(&mut self) {
        for (index, (view, narrator)) in self.views.iter().zip(&mut self.narrators).enumerate() {
            for line in view.iter().flat_map(|view| narrator.tell(view, words::now())) {
                self.screen.say(&named(&self.tasks, index, line));
            }
        }
    }

    /// Passes output of the job on. Where stdout is a document for a program, the job's own goes to stderr.
    fn output(&mut self, chunk: &v1::LogsReply) -> Result<(), ExpectedError> {
        if self.is_for_program() && chunk.stream() == v1::LogStream::Stdout {
            return self.screen.output(Stream::Stderr, &chunk.data);
        }
        show(&mut self.screen, chunk)
    }

    fn is_for_program(&self) -> bool {
        matches!(self.out.format, Format::Json | Format::Csv)
    }

    /// The jobs as they are now, for programs. A reader that has left changes nothing about how the jobs ended.
    fn print_jobs(&self, code: u8) -> Result<u8, ExpectedError> {
        let out = self.out;
        let views = || self.views.iter().flatten().map(|view| &**view);
        let printed = match (out.format, self.tasks.as_slice()) {
            (Format::Table | Format::Wide, _) => Ok(()),
            (Format::Csv, _) => {
                let views: Vec<v1::JobView> = views().cloned().collect();
                out.grid(&views::queue(&views, words::now(), &out), || ())
            }
            // Left before it was seen: there is nothing to print.
            (Format::Json, [_]) => views().next().map_or(Ok(()), |view| out.json(&json::Job::from(view))),
            (Format::Json, _) => out.json(&views().map(json::Job::from).collect::<Vec<_>>()),
        };
        match printed {
            Ok(()) | Err(ExpectedError::ClosedPipe) => Ok(code),
            Err(error) => Err(error),
        }
    }

    /// Waits a moment until the bills are final: the nodes of jobs that are done cost until they are returned.
    async fn settle(&mut self, rx: &mut mpsc::Receiver<Event>) {
        // Whoever wants no talk wants no wait for its sake: the next job may take the node that is free now.
        if self.out.quiet {
            return;
        }
        let end = Instant::now() + BILL_MAX;
        let mut open: Vec<usize> = (0..self.tasks.len()).collect();
        loop {
            let mut still = Vec::new();
            for index in open {
                match tokio::time::timeout_at(end, self.final_view(self.tasks[index])).await {
                    Ok(Some(view)) => self.views[index] = Some(Box::new(view)),
                    Ok(None) | Err(_) => still.push(index),
                }
            }
            open = still;
            if open.is_empty() || Instant::now() + BILL_EVERY > end {
                break;
            }
            self.screen.status("done; waiting until the node is returned, so that the bill is final");
            tokio::select! {
                () = tokio::time::sleep(BILL_EVERY) => {}
                event = rx.recv() => if matches!(event, None | Some(Event::Interrupt)) { break },
            }
        }
        for index in open {
            if let Some(narrator) = self.narrators.get_mut(index) {
                narrator.bill(Bill::Open);
            }
        }
    }

    /// The job once every segment of it is closed. A scheduler that does not answer cannot say so.
    async fn final_view(&self, task: TaskId) -> Option<v1::JobView> {
        let request = v1::ReportRequest { job_id: Some(task.job.0) };
        let report = self.client.reports().report(request).await.ok()?.into_inner();
        if report.segments.iter().any(|segment| segment.end_ms.is_none()) {
            return None;
        }
        self.client.get(task).await.ok().filter(words::is_done)
    }

    fn is_over(&self) -> bool {
        let all_done = self.views.iter().all(|view| view.as_ref().is_some_and(|view| words::is_done(view)));
        all_done && (!self.logs_open || self.patience.is_some_and(|end| Instant::now() > end))
    }

    fn draw(&mut self) {
        let now = words::now();
        let open = self.views.iter().flatten().find(|view| !words::is_done(view));
        let Some(view) = open else { return };
        let mut line = status(view, now);
        if self.tasks.len() > 1 {
            let done = self.views.iter().flatten().filter(|view| words::is_done(view)).count();
            line = format!("{done} of {} done · {line}", self.tasks.len());
        }
        if self.away {
            line.push_str(" · scheduler away");
        }
        self.screen.status(&line);
    }

    fn interrupt(&mut self) -> Option<u8> {
        let task = self.tasks.first().copied();
        match (self.on_interrupt, task) {
            (OnInterrupt::Cancel, Some(task)) if !self.interrupted => {
                self.interrupted = true;
                self.screen.say(&format!("cancelling job {task}; Ctrl-C again leaves without waiting"));
                tokio::spawn(cancel(self.client.clone(), task));
                None
            }
            (_, Some(task)) => {
                let more = if self.interrupted { "being cancelled" } else { "not touched" };
                self.screen.say(&format!("leaving; job {task} is {more}, `spotq show {task}` has it"));
                Some(codes::INTERRUPTED)
            }
            (_, None) => Some(codes::INTERRUPTED),
        }
    }
}

/// `line`, which names its job where there are several.
fn named(tasks: &[TaskId], index: usize, line: String) -> String {
    match tasks.get(index) {
        Some(task) if tasks.len() > 1 && !line.starts_with(&format!("job {task} ")) => {
            format!("job {task}: {line}")
        }
        Some(_) | None => line,
    }
}

/// Asks until the scheduler took it; the watch shows the rest.
async fn cancel(client: Client, task: TaskId) {
    /// The person can leave at any time; this only bounds a scheduler that refuses for ever.
    const TRIES_MAX: u32 = 100;
    let mut pause = crate::client::PAUSE_MIN;
    for _ in 0..TRIES_MAX {
        match client.jobs().cancel(job_request(task)).await {
            Err(status) if crate::error::may_pass_later(&status) => {
                tokio::time::sleep(pause).await;
                pause = crate::client::next_pause(pause);
            }
            Ok(_) | Err(_) => return,
        }
    }
}

/// Whether it is the scheduler's note about the beginning or the end of an attempt.
fn is_of_an_attempt(chunk: &v1::LogsReply) -> bool {
    chunk.stream() == v1::LogStream::Note
        && chunk.data.starts_with(format!("attempt {} ", chunk.generation).as_bytes())
}

fn show(screen: &mut Screen, chunk: &v1::LogsReply) -> Result<(), ExpectedError> {
    match chunk.stream() {
        v1::LogStream::Stdout => screen.output(Stream::Stdout, &chunk.data),
        v1::LogStream::Stderr => screen.output(Stream::Stderr, &chunk.data),
        v1::LogStream::Note => {
            screen.note(&String::from_utf8_lossy(&chunk.data));
            Ok(())
        }
        // A stream that this version does not know is not the job's output.
        v1::LogStream::Unspecified => Ok(()),
    }
}

fn say_away(screen: &Screen, away: &mut bool, why: &str) {
    if !*away {
        *away = true;
        screen.say(&format!("scheduler away, retrying ({why})"));
    }
}

fn say_back(screen: &Screen, away: &mut bool) {
    if std::mem::take(away) {
        screen.say("scheduler is back");
    }
}
