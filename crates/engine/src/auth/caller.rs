//! The caller of one request, as handlers see it: they get a task's id only after it was checked against its owner.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use spotq_model::{JobId, TaskId};
use spotq_proto::Method;
use tonic::{Request, Status};

use super::Who;
use super::table::{Rule, rule};
use super::users::Role;
use crate::handle::Shared;

/// Put into every request by the layer, and nowhere else.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    who: Who,
    method: Method,
    /// Which job or node the request was about, for the audit log; 0 is none.
    about: Arc<AtomicU64>,
}

impl Caller {
    pub(super) fn new(who: Who, method: Method, about: Arc<AtomicU64>) -> Self {
        Caller { who, method, about }
    }

    /// Who sent this request. One without a caller did not come through the layer.
    pub(crate) fn of<T>(request: &Request<T>) -> Result<Caller, Status> {
        let found = request.extensions().get::<Caller>().cloned();
        found.ok_or_else(|| Status::permission_denied("this request has no caller"))
    }

    pub(crate) fn who(&self) -> &Who {
        &self.who
    }

    /// Notes what the request is about.
    pub(crate) fn note(&self, about: u64) {
        self.about.store(about, Ordering::Relaxed);
    }

    /// The task that a request names, if its rule allows this caller to name it.
    pub(crate) async fn task(&self, shared: &Shared, job_id: u32, task_index: u32) -> Result<TaskId, Status> {
        self.note(job_id.into());
        let id = TaskId { job: JobId(job_id), index: task_index };
        match rule(self.method) {
            // The layer has checked the role.
            Rule::AtLeast(_) => Ok(id),
            Rule::Worker => Err(self.denied("it is for workers")),
            Rule::OwnJob => match &self.who {
                Who::Local => Ok(id),
                Who::User { role: Role::Operator | Role::Admin, .. } => Ok(id),
                Who::User { role: Role::User, name } => {
                    let name = name.clone();
                    let owned = shared
                        .handle
                        .query(move |seen| seen.cluster.jobs.get(&id.job).map(|job| job.spec.user == name));
                    match owned.await? {
                        Some(true) => Ok(id),
                        Some(false) => Err(self.denied(&format!("job {id} is another user's"))),
                        None => Err(crate::grpc::no_such_job(id)),
                    }
                }
                Who::User { role: Role::Viewer, .. } | Who::Nobody => Err(self.denied("it changes jobs")),
            },
        }
    }

    /// Whether this caller sees all of a job of `owner`, its environment among it.
    pub(crate) fn sees_all_of(&self, owner: &str) -> bool {
        match &self.who {
            Who::Local => true,
            Who::User { role: Role::Operator | Role::Admin, .. } => true,
            Who::User { role: Role::User | Role::Viewer, name } => name == owner,
            Who::Nobody => false,
        }
    }

    fn denied(&self, why: &str) -> Status {
        let who = self.who.name().unwrap_or("nobody");
        Status::permission_denied(format!("{who} may not call {}: {why}", self.method.path()))
    }
}
