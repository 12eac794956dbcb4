//! What users ask for.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use spotq_core::Task;
use spotq_model::{AttemptEnd, Generation, Input, JobId, JobSpec, Span, TaskId, Timestamp};
use spotq_proto::v1;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use crate::auth::Caller;
use crate::handle::{Seen, Shared};
use crate::logs::{self, Reader};
use crate::view;

/// Views of one job that may wait for a slow reader.
const VIEWS_AHEAD: usize = 8;
/// Pieces of log that may wait for a slow reader.
const FRAMES_AHEAD: usize = 64;
/// A watched job is shown at most this often, and at least each `WATCH_AT_LEAST`, since its cost moves all the time.
const WATCH_AT_MOST: Duration = Duration::from_millis(100);
const WATCH_AT_LEAST: Duration = Duration::from_secs(1);
/// How often a follower looks for more log.
const FOLLOW_EVERY: Duration = Duration::from_millis(100);
/// In place of a value that its caller may not see.
const HIDDEN: &str = "(hidden)";
/// Jobs in a list whose caller sets no limit.
const LIST_LIMIT: usize = 1000;

#[derive(Debug)]
pub(super) struct Jobs {
    shared: Shared,
}

impl Jobs {
    pub(super) fn new(shared: Shared) -> Self {
        Self { shared }
    }

    /// Decides `input` about a job and answers with the job as it is then.
    async fn change(
        &self,
        request: Request<v1::JobRequest>,
        input: impl FnOnce(JobId) -> Input,
    ) -> Result<Response<v1::JobReply>, Status> {
        let id = self.task(&request).await?;
        self.decide(id, input(id.job)).await
    }

    async fn decide(&self, id: TaskId, input: Input) -> Result<Response<v1::JobReply>, Status> {
        let config = self.shared.config.clone();
        let job = self.shared.handle.ask(Some(input), move |seen| view::job(&config, seen, id)).await?;
        Ok(Response::new(v1::JobReply { job: Some(job.ok_or_else(|| super::no_such_job(id))?) }))
    }

    /// The task that a request names, which its caller may name.
    async fn task(&self, request: &Request<v1::JobRequest>) -> Result<TaskId, Status> {
        let named = request.get_ref();
        Caller::of(request)?.task(&self.shared, named.job_id, named.task_index).await
    }

    /// Refuses an order that can change nothing in the job's phase: whoever gave it would wait for it in vain.
    async fn only_in(
        &self,
        request: &Request<v1::JobRequest>,
        phases: &[&str],
        hint: &str,
    ) -> Result<(), Status> {
        let id = self.task(request).await?;
        let phase = self.view(id).await?.phase;
        if phases.contains(&phase.as_str()) {
            return Ok(());
        }
        Err(Status::failed_precondition(format!("job {id} is {phase}: {hint}")))
    }

    async fn view(&self, id: TaskId) -> Result<v1::JobView, Status> {
        let config = self.shared.config.clone();
        let job = self.shared.handle.query(move |seen| view::job(&config, seen, id)).await?;
        job.ok_or_else(|| super::no_such_job(id))
    }
}

const NOT_DONE: &[&str] =
    &["held", "pending", "provisioning", "restoring", "running", "draining", "completing"];

type Views = Pin<Box<dyn Stream<Item = Result<v1::JobView, Status>> + Send>>;
type Pieces = Pin<Box<dyn Stream<Item = Result<v1::LogsReply, Status>> + Send>>;

#[tonic::async_trait]
impl v1::jobs_server::Jobs for Jobs {
    async fn submit(&self, request: Request<v1::SubmitRequest>) -> Result<Response<v1::SubmitReply>, Status> {
        let caller = Caller::of(&request)?;
        let request = request.into_inner();
        let spec = request.spec.ok_or_else(|| Status::invalid_argument("the request has no job"))?;
        let size = prost::Message::encoded_len(&spec);
        if size > super::JOB_BYTES_MAX {
            let text = format!(
                "the job has {size} bytes, the most is {}; keep large files out of the script and the environment",
                super::JOB_BYTES_MAX
            );
            return Err(Status::invalid_argument(text));
        }
        let mut spec =
            JobSpec::try_from(spec).map_err(|error| Status::invalid_argument(error.to_string()))?;
        if request.client_key.is_empty() || request.client_key.len() > 256 {
            return Err(Status::invalid_argument("client_key must have 1 to 256 bytes"));
        }
        let mut key = request.client_key;
        if let Some(name) = caller.who().name() {
            // Whose job it is, is known here and is nothing to ask for. The same for the key: another's would name
            // another's job.
            key = format!("{name}/{key}");
            name.clone_into(&mut spec.user);
        }
        let submitted = self.shared.handle.submit(key, spec).await?;
        caller.note(submitted.job.0.into());
        Ok(Response::new(v1::SubmitReply {
            job_id: submitted.job.0,
            checkpoint_url: self.shared.config.checkpoint_url(&submitted.uuid),
            job_uuid: submitted.uuid,
            created: submitted.created,
        }))
    }

    async fn cancel(&self, request: Request<v1::JobRequest>) -> Result<Response<v1::JobReply>, Status> {
        self.change(request, |job| Input::Cancel { job }).await
    }

    async fn hold(&self, request: Request<v1::JobRequest>) -> Result<Response<v1::JobReply>, Status> {
        let hint = "only a job that waits can be held; `spotq requeue` makes one that runs wait again";
        self.only_in(&request, &["pending", "held"], hint).await?;
        self.change(request, |job| Input::Hold { job }).await
    }

    async fn release(&self, request: Request<v1::JobRequest>) -> Result<Response<v1::JobReply>, Status> {
        self.only_in(&request, NOT_DONE, "submit it again to run it anew").await?;
        self.change(request, |job| Input::Release { job }).await
    }

    async fn requeue(&self, request: Request<v1::JobRequest>) -> Result<Response<v1::JobReply>, Status> {
        self.only_in(&request, NOT_DONE, "submit it again to run it anew").await?;
        self.change(request, |job| Input::Requeue { job }).await
    }

    async fn preempt(&self, request: Request<v1::PreemptRequest>) -> Result<Response<v1::JobReply>, Status> {
        let caller = Caller::of(&request)?;
        let request = request.into_inner();
        let id = caller.task(&self.shared, request.job_id, request.task_index).await?;
        let before = self.view(id).await?;
        if before.node.as_ref().is_none_or(|node| !matches!(node.state.as_str(), "booting" | "ready")) {
            let text = format!(
                "job {id} is {}: there is no node to interrupt; try again when it runs",
                before.phase
            );
            return Err(Status::failed_precondition(text));
        }
        let notice = Span(request.notice_ms);
        self.decide(id, Input::Drill { job: id.job, notice }).await
    }

    async fn get(&self, request: Request<v1::JobRequest>) -> Result<Response<v1::JobView>, Status> {
        let id = self.task(&request).await?;
        Ok(Response::new(shown(&Caller::of(&request)?, self.view(id).await?)))
    }

    async fn list(&self, request: Request<v1::ListRequest>) -> Result<Response<v1::ListReply>, Status> {
        let request = request.into_inner();
        let config = self.shared.config.clone();
        let limit = if request.limit == 0 { LIST_LIMIT } else { request.limit as usize };
        let reply = self.shared.handle.query(move |seen| {
            let wanted = |task: &&Arc<Task>| {
                let user = seen.cluster.spec(task.id).map(|spec| spec.user.as_str());
                (request.include_done || !task.is_done())
                    && (request.user.is_none() || request.user.as_deref() == user)
            };
            let tasks = seen.cluster.jobs.values().flat_map(|job| job.tasks.values()).filter(wanted);
            let total = tasks.clone().count() as u64;
            // The newest are what people look for.
            let skip = usize::try_from(total).unwrap_or(usize::MAX).saturating_sub(limit);
            let mut jobs: Vec<v1::JobView> =
                tasks.skip(skip).filter_map(|task| view::job(&config, seen, task.id)).collect();
            for job in &mut jobs {
                // A list of jobs with scripts of a megabyte each would not fit a message.
                job.spec = None;
            }
            v1::ListReply { jobs, total }
        });
        Ok(Response::new(reply.await?))
    }

    type WatchStream = Views;

    async fn watch(&self, request: Request<v1::JobRequest>) -> Result<Response<Views>, Status> {
        let caller = Caller::of(&request)?;
        let request = request.into_inner();
        let id = caller.task(&self.shared, request.job_id, request.task_index).await?;
        self.view(id).await?;
        let (tx, rx) = mpsc::channel(VIEWS_AHEAD);
        tokio::spawn(watch(self.shared.clone(), id, caller, tx));
        Ok(Response::new(Box::pin(ReceiverStream::new(rx))))
    }

    async fn explain(&self, request: Request<v1::JobRequest>) -> Result<Response<v1::ExplainReply>, Status> {
        let id = self.task(&request).await?;
        let explained = self.shared.handle.query(move |seen| view::explanation(seen, id)).await?;
        Ok(Response::new(explained.ok_or_else(|| super::no_such_job(id))?))
    }

    type LogsStream = Pieces;

    async fn logs(&self, request: Request<v1::LogsRequest>) -> Result<Response<Pieces>, Status> {
        let caller = Caller::of(&request)?;
        let request = request.into_inner();
        let id = caller.task(&self.shared, request.job_id, request.task_index).await?;
        self.view(id).await?;
        let (tx, rx) = mpsc::channel(FRAMES_AHEAD);
        let only = request.generation.map(Generation);
        tokio::spawn(follow(self.shared.clone(), id, only, request.follow, tx));
        Ok(Response::new(Box::pin(ReceiverStream::new(rx))))
    }

    async fn offers(&self, request: Request<v1::OffersRequest>) -> Result<Response<v1::OffersReply>, Status> {
        let request = request.into_inner();
        let offers = self.shared.handle.query(move |seen| {
            let wanted = seen.offers.iter().filter(|offer| {
                request.accelerator.is_none()
                    || (request.accelerator == offer.shape.accelerator
                        && offer.shape.accelerator_count >= request.accelerator_count)
            });
            let mut offers: Vec<v1::OfferView> = wanted.map(|offer| view::offer(seen, offer)).collect();
            offers.sort_by_key(|offer| offer.price_nano_usd_h);
            offers
        });
        Ok(Response::new(v1::OffersReply { offers: offers.await? }))
    }

    async fn outputs(&self, request: Request<v1::JobRequest>) -> Result<Response<v1::OutputsReply>, Status> {
        let id = self.task(&request).await?;
        let job = self.view(id).await?;
        Ok(Response::new(v1::OutputsReply {
            url: format!("{}/outputs", job.checkpoint_url),
            read_key: self.shared.config.secret.checkpoint_key(&job.job_uuid).to_vec(),
            globs: job.spec.map(|spec| spec.outputs).unwrap_or_default(),
        }))
    }
}

/// A job as its caller may see it. The environment of another's job may hold that other's secrets.
fn shown(caller: &Caller, mut view: v1::JobView) -> v1::JobView {
    if let Some(spec) = view.spec.as_mut().filter(|spec| !caller.sees_all_of(&spec.user)) {
        spec.env.values_mut().for_each(|value| HIDDEN.clone_into(value));
    }
    view
}

/// Sends the job now, on changes, and a last time when it is done. The spec never changes and may be large, so only
/// the first view has it.
async fn watch(shared: Shared, id: TaskId, caller: Caller, tx: mpsc::Sender<Result<v1::JobView, Status>>) {
    let mut handle = shared.handle.clone();
    for view_number in 0_u64.. {
        let config = shared.config.clone();
        let Ok(Some(view)) = handle.query(move |seen| view::job(&config, seen, id)).await else { return };
        let mut view = shown(&caller, view);
        if view_number > 0 {
            view.spec = None;
        }
        let done = view.outcome.is_some();
        if tx.send(Ok(view)).await.is_err() || done {
            return;
        }
        tokio::time::sleep(WATCH_AT_MOST).await;
        tokio::select! {
            biased;
            changed = handle.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(WATCH_AT_LEAST) => {}
            () = tx.closed() => return,
        }
    }
}

/// One attempt as a follower of logs needs it.
struct LogPart {
    generation: Generation,
    note: (Timestamp, String),
    end: Option<(Timestamp, String)>,
}

/// Sends the logs of all attempts in order, and goes on while `more` may come.
async fn follow(
    shared: Shared,
    id: TaskId,
    only: Option<Generation>,
    more: bool,
    tx: mpsc::Sender<Result<v1::LogsReply, Status>>,
) {
    let mut next = Generation(0);
    loop {
        let asked = shared.handle.query(move |seen| log_parts(seen, id)).await;
        let Ok((parts, done)) = asked else { return };
        let part = parts.into_iter().find(|p| p.generation > next && only.is_none_or(|g| g == p.generation));
        match part {
            Some(part) => {
                next = part.generation;
                if follow_part(&shared, id, part, more, &tx).await.is_none() {
                    return;
                }
            }
            None if done || !more || only.is_some_and(|g| next >= g) => return,
            None => tokio::select! {
                biased;
                () = tokio::time::sleep(FOLLOW_EVERY) => {}
                () = tx.closed() => return,
            },
        }
    }
}

/// Sends one attempt's log; `None` when nobody listens any more.
async fn follow_part(
    shared: &Shared,
    id: TaskId,
    part: LogPart,
    more: bool,
    tx: &mpsc::Sender<Result<v1::LogsReply, Status>>,
) -> Option<()> {
    let generation = part.generation;
    send_note(tx, generation, part.note).await?;
    let path = logs::path(&shared.config.data_dir, id, generation);
    let mut reader = Reader::default();
    let mut end = part.end;
    loop {
        let ended = end.is_some();
        let (file, mut reading) = (path.clone(), reader);
        let read = move || {
            let frames = reading.read(&file);
            (reading, frames)
        };
        let (back, frames) = spotq_host::blocking(read).await.ok()?;
        reader = back;
        let frames = match frames {
            Ok(frames) => frames,
            Err(error) => {
                let text = format!("log of attempt {generation}: {error}");
                tx.send(Err(Status::data_loss(text))).await.ok()?;
                return None;
            }
        };
        let nothing_new = frames.is_empty();
        for frame in frames {
            let (stream, at_ms, data) = (frame.stream.into(), frame.at_ms, frame.data);
            tx.send(Ok(v1::LogsReply { generation: generation.0, stream, at_ms, data })).await.ok()?;
        }
        if nothing_new && (ended || !more) {
            break;
        }
        if nothing_new {
            tokio::select! {
                biased;
                () = tokio::time::sleep(FOLLOW_EVERY) => {}
                () = tx.closed() => return None,
            }
            let asked = shared.handle.query(move |seen| log_parts(seen, id)).await.ok()?;
            end = asked.0.into_iter().find(|p| p.generation == generation).and_then(|p| p.end);
        }
    }
    if let Some(note) = end {
        send_note(tx, generation, note).await?;
    }
    Some(())
}

async fn send_note(
    tx: &mpsc::Sender<Result<v1::LogsReply, Status>>,
    generation: Generation,
    (at, text): (Timestamp, String),
) -> Option<()> {
    let reply = v1::LogsReply {
        generation: generation.0,
        stream: v1::LogStream::Note.into(),
        at_ms: at.0,
        data: text.into_bytes(),
    };
    tx.send(Ok(reply)).await.ok()
}

/// The attempts that ran, with spotq's own words about each, and whether no more will come.
fn log_parts(seen: &Seen<'_>, id: TaskId) -> (Vec<LogPart>, bool) {
    let Some(task) = seen.cluster.task(id) else { return (Vec::new(), true) };
    let ran = task.attempts.iter().filter(|a| a.accepted_at.is_some());
    let parts = ran.map(|a| {
        let from = match a.resumed.as_ref().map(|from| from.step) {
            Some(Some(step)) => format!(", resumed at step {step}"),
            Some(None) => ", resumed".to_owned(),
            None => String::new(),
        };
        let end = a.end.as_ref().zip(a.ended_at).map(|(end, at)| (at, end_words(a.generation, end)));
        LogPart {
            generation: a.generation,
            note: (a.placed_at, format!("attempt {} on {}{from}", a.generation, a.pool)),
            end,
        }
    });
    (parts.collect(), task.is_done())
}

fn end_words(generation: Generation, end: &AttemptEnd) -> String {
    match end {
        AttemptEnd::Preempted { noticed: true } => format!("attempt {generation} preempted after a notice"),
        AttemptEnd::Preempted { noticed: false } => format!("attempt {generation} preempted without notice"),
        AttemptEnd::NodeLost { detail } => format!("attempt {generation} lost: {detail}"),
        AttemptEnd::LaunchFailed { message } => format!("attempt {generation} could not start: {message}"),
        AttemptEnd::Failed { exit_code } => format!("attempt {generation} failed with exit code {exit_code}"),
        AttemptEnd::Completed
        | AttemptEnd::Cancelled
        | AttemptEnd::Timeout
        | AttemptEnd::BudgetExhausted
        | AttemptEnd::OutOfMemory
        | AttemptEnd::Requeued => format!("attempt {generation} {}", end.name().replace('_', " ")),
    }
}
