//! The users: each submits a job with a key of its own, asks again until it is answered, wishes for this and that, and
//! watches until its job is done. They give up on slow answers and come back.

use std::time::Duration;

use spotq_proto::v1;
use spotq_proto::v1::jobs_client::JobsClient;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use crate::counts::Count;
use crate::draw::Wish;
use crate::net::{self, Dial};
use crate::oracle::Oracle;
use crate::world::World;

/// Until a user gives up on a call.
const PATIENCE: Duration = Duration::from_secs(4);
/// Until a user asks again.
const AGAIN: Duration = Duration::from_millis(700);
/// How often a user looks at a job.
const LOOK: Duration = Duration::from_millis(1500);
/// A wish is repeated this often; holding a job that has begun to run is refused for good.
const WISH_TRIES: u32 = 5;

/// All of them, on one host.
pub(crate) async fn run(world: World) -> turmoil::Result {
    let count = world.lock().d.jobs.len();
    for plan in 0..count {
        tokio::spawn(user(world.clone(), plan));
    }
    std::future::pending().await
}

async fn user(world: World, plan: usize) {
    let job = world.lock().d.jobs[plan].clone();
    sleep_until(&world, job.submit_at).await;
    let mut line = Line { world: world.clone(), client: None };
    let request =
        v1::SubmitRequest { client_key: job.client_key.clone(), spec: Some(job.spec.as_ref().into()) };
    let id = submit(&mut line, plan, &request).await;
    if world.lock().rng.percent(20) {
        submit(&mut line, plan, &request).await;
    }
    for (at, wish) in job.wishes.clone() {
        sleep_until(&world, at).await;
        // A job that is held must be released, however often it takes.
        let tries = if wish == Wish::Release { u32::MAX } else { WISH_TRIES };
        for _ in 0..tries {
            match line.wish(id, wish).await {
                Ok(()) => break,
                Err(status) if status.code() == Code::FailedPrecondition => break,
                Err(_) => tokio::time::sleep(AGAIN).await,
            }
        }
    }
    watch(&mut line, plan, id).await;
    world.lock().jobs[plan].user_is_done = true;
}

async fn submit(line: &mut Line, plan: usize, request: &v1::SubmitRequest) -> u32 {
    loop {
        let request = request.clone();
        let reply = line.call(async move |mut client| client.submit(request).await).await;
        if let Ok(reply) = reply {
            Oracle::told(&mut line.world.lock(), plan, reply.job_id, &reply.job_uuid);
            return reply.job_id;
        }
        tokio::time::sleep(AGAIN).await;
    }
}

/// INV-01, INV-11: the job stays known, and its end stays what it was.
async fn watch(line: &mut Line, plan: usize, id: u32) {
    let mut looks_after_end = 0;
    let mut end: Option<String> = None;
    while looks_after_end < 2 {
        let request = v1::JobRequest { job_id: id, task_index: 0 };
        match line.call(async move |mut client| client.get(request).await).await {
            Ok(view) => {
                if end.is_some() && end != view.outcome {
                    let text =
                        format!("job {id} of plan {plan} ended as {end:?}, and now {:?}", view.outcome);
                    line.world.lock().violated("INV-11", text);
                }
                looks_after_end += u32::from(view.outcome.is_some());
                end = view.outcome;
            }
            Err(status) if status.code() == Code::NotFound => {
                line.world.lock().violated("INV-01", format!("job {id} is not known any more"));
                return;
            }
            Err(_) => {}
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// A connection that is made again when it is needed.
struct Line {
    world: World,
    client: Option<JobsClient<Channel>>,
}

impl Line {
    async fn wish(&mut self, id: u32, wish: Wish) -> Result<(), Status> {
        let request = v1::JobRequest { job_id: id, task_index: 0 };
        let answered = match wish {
            Wish::Cancel => self.call(async move |mut c| c.cancel(request).await).await,
            Wish::Hold => self.call(async move |mut c| c.hold(request).await).await,
            Wish::Release => self.call(async move |mut c| c.release(request).await).await,
            Wish::Requeue => self.call(async move |mut c| c.requeue(request).await).await,
            Wish::Drill(notice_ms) => {
                let request = v1::PreemptRequest { job_id: id, task_index: 0, notice_ms };
                self.call(async move |mut c| c.preempt(request).await).await
            }
        };
        if answered.as_ref().is_err_and(|status| status.code() == Code::NotFound) {
            self.world.lock().violated("INV-01", format!("job {id} is not known any more"));
        }
        answered.map(|_| ())
    }

    /// One call, of which the answer may come too late.
    async fn call<T>(
        &mut self,
        work: impl AsyncFnOnce(JobsClient<Channel>) -> Result<tonic::Response<T>, Status>,
    ) -> Result<T, Status> {
        let patience = {
            let inner = &mut *self.world.lock();
            let impatient = inner.d.faults.impatient_ppm;
            match inner.fault(impatient) {
                true => Duration::from_millis(inner.rng.within(20, 400)),
                false => PATIENCE,
            }
        };
        let known = self.client.clone();
        let whole = async {
            let client = match known {
                Some(client) => client,
                None => dial().await?,
            };
            Ok((client.clone(), work(client).await?.into_inner()))
        };
        match tokio::time::timeout(patience, whole).await {
            Ok(Ok((client, reply))) => {
                self.client = Some(client);
                Ok(reply)
            }
            Ok(Err(status)) => {
                self.client = None;
                Err(status)
            }
            Err(_) => {
                self.world.lock().count(Count::Impatient);
                self.client = None;
                Err(Status::deadline_exceeded("given up"))
            }
        }
    }
}

async fn dial() -> Result<JobsClient<Channel>, Status> {
    let endpoint = Endpoint::from_shared(net::server_url()).map_err(|e| Status::internal(e.to_string()))?;
    let channel = endpoint.connect_with_connector(Dial).await;
    Ok(JobsClient::new(channel.map_err(|e| Status::unavailable(e.to_string()))?))
}

async fn sleep_until(world: &World, at: u64) {
    let left = at.saturating_sub(world.lock().t);
    tokio::time::sleep(Duration::from_millis(left)).await;
}
