//! Money and history.

use std::pin::Pin;

use futures::Stream;
use spotq_model::{Fact, JobId, TaskId};
use spotq_proto::v1;
use tonic::{Request, Response, Status};

use crate::handle::Shared;
use crate::records::decode_record;
use crate::view;

#[derive(Debug)]
pub(super) struct Reports {
    shared: Shared,
}

impl Reports {
    pub(super) fn new(shared: Shared) -> Self {
        Self { shared }
    }
}

#[tonic::async_trait]
impl v1::reports_server::Reports for Reports {
    async fn report(&self, request: Request<v1::ReportRequest>) -> Result<Response<v1::ReportReply>, Status> {
        let wanted = request.into_inner().job_id.map(JobId);
        let reply = self.shared.handle.query(move |seen| {
            let mut reply = v1::ReportReply { as_of_ms: seen.now.0, ..Default::default() };
            let jobs = seen.cluster.jobs.values().filter(|job| wanted.is_none_or(|id| id == job.id));
            for task in jobs.flat_map(|job| job.tasks.values()) {
                if let Some((job, segments)) = view::report(seen, task.id) {
                    reply.jobs.push(job);
                    reply.segments.extend(segments);
                }
            }
            reply
        });
        let reply = reply.await?;
        match wanted {
            Some(id) if reply.jobs.is_empty() => Err(super::no_such_job(TaskId::only(id))),
            Some(_) | None => Ok(Response::new(reply)),
        }
    }

    type EventsStream = Pin<Box<dyn Stream<Item = Result<v1::EventLine, Status>> + Send>>;

    /// What the store still holds: everything since its newest snapshot.
    async fn events(
        &self,
        request: Request<v1::EventsRequest>,
    ) -> Result<Response<Self::EventsStream>, Status> {
        let wanted = request.into_inner().job_id.map(JobId);
        let recovered =
            self.shared.config.store.recover().await.map_err(|e| Status::unavailable(e.to_string()))?;
        let first = recovered.first_version().0;
        let lines = (first..).zip(recovered.records).filter_map(move |(version, record)| {
            let keep = match (wanted, decode_record(version, &record)) {
                (None, Ok(_)) => true,
                (Some(job), Ok(event)) => concerns(&event.fact, job),
                (_, Err(error)) => return Some(Err(Status::data_loss(error.to_string()))),
            };
            let json = String::from_utf8_lossy(&record).into_owned();
            keep.then_some(Ok(v1::EventLine { version, json }))
        });
        Ok(Response::new(Box::pin(futures::stream::iter(lines))))
    }
}

/// Node events concern every job: who holds a node is told by the placements.
fn concerns(fact: &Fact, job: JobId) -> bool {
    fact.task().is_none_or(|task| task.job == job)
}
