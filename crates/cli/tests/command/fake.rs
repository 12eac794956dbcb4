//! A scheduler of the tests: real gRPC on loopback, jobs that do what a test says, and a kill that drops every
//! connection, as `kill -9` does.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};

use spotq_proto::v1;
use spotq_proto::v1::admin_server::{Admin, AdminServer};
use spotq_proto::v1::jobs_server::{Jobs, JobsServer};
use spotq_proto::v1::reports_server::{Reports, ReportsServer};
use tokio::sync::watch;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status};

type Streamed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// What the scheduler knows; it outlives a kill, as a disk does.
#[derive(Debug)]
pub struct Disk {
    pub jobs: BTreeMap<u32, v1::JobView>,
    pub keys: BTreeMap<String, u32>,
    pub specs: Vec<v1::JobSpec>,
    pub logs: Vec<v1::LogsReply>,
    /// Of the report.
    pub segments: Vec<v1::SegmentView>,
    pub reports_asked: u32,
    /// Of `explain`, instead of the usual one.
    pub pools: Vec<v1::PoolVerdict>,
    pub outputs: v1::OutputsReply,
    /// So many submits are stored and their answers lost.
    pub lose_answers: u32,
    pub cancelled: Vec<u32>,
    /// Jobs take their time to end after a cancel.
    pub slow_to_cancel: bool,
    pub log_requests: Vec<v1::LogsRequest>,
    pub preempted: Option<v1::PreemptRequest>,
    pub offers_asked: Option<v1::OffersRequest>,
    pub logs_opened: u32,
    pub watches_opened: u32,
}

/// A running scheduler; `kill` and `start` again at the same address.
pub struct Fake {
    shared: Shared,
    address: SocketAddr,
    runtime: Option<tokio::runtime::Runtime>,
}

#[derive(Clone)]
struct Shared {
    disk: Arc<Mutex<Disk>>,
    /// Goes up with each change, for streams.
    changed: Arc<watch::Sender<u64>>,
}

impl Fake {
    pub fn start() -> Fake {
        let disk = Disk {
            jobs: BTreeMap::new(),
            keys: BTreeMap::new(),
            specs: Vec::new(),
            logs: Vec::new(),
            segments: Vec::new(),
            reports_asked: 0,
            pools: Vec::new(),
            outputs: v1::OutputsReply::default(),
            lose_answers: 0,
            cancelled: Vec::new(),
            slow_to_cancel: false,
            log_requests: Vec::new(),
            preempted: None,
            offers_asked: None,
            logs_opened: 0,
            watches_opened: 0,
        };
        let shared = Shared { disk: Arc::new(Mutex::new(disk)), changed: Arc::new(watch::channel(0).0) };
        let mut fake = Fake { shared, address: SocketAddr::from(([127, 0, 0, 1], 0)), runtime: None };
        fake.restart();
        fake
    }

    pub fn server(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Every connection breaks at once.
    pub fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Returns when the listener is closed, so that the address is free.
            runtime.shutdown_timeout(std::time::Duration::from_secs(10));
        }
    }

    /// Listens at the same address as before.
    pub fn restart(&mut self) {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let shared = self.shared.clone();
        let listener = runtime.block_on(tokio::net::TcpListener::bind(self.address)).unwrap();
        self.address = listener.local_addr().unwrap();
        runtime.spawn(async move {
            let incoming = tonic::transport::server::TcpIncoming::from(listener);
            tonic::transport::Server::builder()
                .add_service(JobsServer::new(shared.clone()))
                .add_service(ReportsServer::new(shared.clone()))
                .add_service(AdminServer::new(shared))
                .serve_with_incoming(incoming)
                .await
                .unwrap();
        });
        self.runtime = Some(runtime);
    }

    /// Looks at or changes what the scheduler knows; streams see the change.
    pub fn disk<R>(&self, change: impl FnOnce(&mut Disk) -> R) -> R {
        let result = change(&mut self.shared.lock());
        self.shared.changed.send_modify(|n| *n += 1);
        result
    }

    pub fn job(&self, job: v1::JobView) {
        self.disk(|disk| disk.jobs.insert(job.job_id, job));
    }

    pub fn log(&self, stream: v1::LogStream, text: &str) {
        let chunk =
            v1::LogsReply { generation: 1, stream: stream.into(), at_ms: 1, data: text.as_bytes().to_vec() };
        self.disk(|disk| disk.logs.push(chunk));
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A job in `phase`.
pub fn job(id: u32, phase: &str) -> v1::JobView {
    v1::JobView {
        job_id: id,
        name: format!("job-{id}"),
        user: "ada".into(),
        phase: phase.into(),
        submitted_ms: 1_700_000_000_000,
        generation: 1,
        ..Default::default()
    }
}

/// A job that ended.
pub fn done(id: u32, outcome: &str, exit_code: i32) -> v1::JobView {
    v1::JobView {
        outcome: Some(outcome.into()),
        outcome_text: outcome.replace('_', " "),
        exit_code: Some(exit_code),
        ended_ms: Some(1_700_000_060_000),
        ..job(id, "done")
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Disk> {
        self.disk.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn find(&self, id: u32) -> Result<v1::JobView, Status> {
        self.lock().jobs.get(&id).cloned().ok_or_else(|| Status::not_found(format!("there is no job {id}")))
    }

    fn set_phase(&self, id: u32, phase: &str) -> Result<Response<v1::JobReply>, Status> {
        let mut job = self.find(id)?;
        if job.phase == "done" {
            return Err(Status::failed_precondition(format!("job {id} is done")));
        }
        job.phase = phase.into();
        self.lock().jobs.insert(id, job.clone());
        self.changed.send_modify(|n| *n += 1);
        Ok(Response::new(v1::JobReply { job: Some(job) }))
    }
}

#[tonic::async_trait]
impl Jobs for Shared {
    async fn submit(&self, request: Request<v1::SubmitRequest>) -> Result<Response<v1::SubmitReply>, Status> {
        let request = request.into_inner();
        let spec = request.spec.ok_or_else(|| Status::invalid_argument("no spec"))?;
        let mut disk = self.lock();
        let known = disk.keys.get(&request.client_key).copied();
        let id = known.unwrap_or_else(|| {
            let id = u32::try_from(disk.keys.len()).unwrap() + 1;
            disk.keys.insert(request.client_key, id);
            disk.jobs.entry(id).or_insert_with(|| job(id, "pending"));
            disk.specs.push(spec);
            id
        });
        if disk.lose_answers > 0 {
            disk.lose_answers -= 1;
            return Err(Status::unavailable("the connection broke"));
        }
        Ok(Response::new(v1::SubmitReply {
            job_id: id,
            job_uuid: "9d2c".into(),
            created: known.is_none(),
            checkpoint_url: "file:///c".into(),
        }))
    }

    async fn cancel(&self, request: Request<v1::JobRequest>) -> Result<Response<v1::JobReply>, Status> {
        let id = request.into_inner().job_id;
        let reply = self.set_phase(id, "completing")?;
        let mut disk = self.lock();
        disk.cancelled.push(id);
        if !disk.slow_to_cancel {
            disk.jobs.insert(id, done(id, "cancelled", 0));
        }
        drop(disk);
        self.changed.send_modify(|n| *n += 1);
        Ok(reply)
    }

    async fn hold(&self, request: Request<v1::JobRequest>) -> Result<Response<v1::JobReply>, Status> {
        self.set_phase(request.into_inner().job_id, "held")
    }

    async fn release(&self, request: Request<v1::JobRequest>) -> Result<Response<v1::JobReply>, Status> {
        self.set_phase(request.into_inner().job_id, "pending")
    }

    async fn requeue(&self, request: Request<v1::JobRequest>) -> Result<Response<v1::JobReply>, Status> {
        self.set_phase(request.into_inner().job_id, "pending")
    }

    async fn preempt(&self, request: Request<v1::PreemptRequest>) -> Result<Response<v1::JobReply>, Status> {
        let request = request.into_inner();
        self.lock().preempted = Some(request);
        self.set_phase(request.job_id, "draining")
    }

    async fn get(&self, request: Request<v1::JobRequest>) -> Result<Response<v1::JobView>, Status> {
        self.find(request.into_inner().job_id).map(Response::new)
    }

    async fn list(&self, request: Request<v1::ListRequest>) -> Result<Response<v1::ListReply>, Status> {
        let all = request.into_inner().include_done;
        let disk = self.lock();
        let jobs: Vec<_> = disk.jobs.values().filter(|job| all || job.phase != "done").cloned().collect();
        Ok(Response::new(v1::ListReply { total: jobs.len() as u64, jobs }))
    }

    type WatchStream = Streamed<v1::JobView>;

    async fn watch(&self, request: Request<v1::JobRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let id = request.into_inner().job_id;
        self.find(id)?;
        self.lock().watches_opened += 1;
        let shared = self.clone();
        let changes = tokio_stream::wrappers::WatchStream::new(self.changed.subscribe());
        Ok(Response::new(Box::pin(changes.map(move |_| shared.find(id)))))
    }

    async fn explain(&self, request: Request<v1::JobRequest>) -> Result<Response<v1::ExplainReply>, Status> {
        self.find(request.into_inner().job_id)?;
        let pools = self.lock().pools.clone();
        if !pools.is_empty() {
            return Ok(Response::new(v1::ExplainReply {
                headline: "waits: no pool".into(),
                next: String::new(),
                pools,
            }));
        }
        Ok(Response::new(v1::ExplainReply {
            headline: "job 1 waits: all 1 matching pools refused lately".into(),
            next: "the first cool-down ends in 12s".into(),
            pools: vec![v1::PoolVerdict {
                pool: "aws/us-east-1/us-east-1a/g5.xlarge/spot".into(),
                price_nano_usd_h: 310_000_000,
                on_demand_nano_usd_h: 1_006_000_000,
                why: "insufficient capacity".into(),
                ..Default::default()
            }],
        }))
    }

    type LogsStream = Streamed<v1::LogsReply>;

    async fn logs(&self, request: Request<v1::LogsRequest>) -> Result<Response<Self::LogsStream>, Status> {
        let request = request.into_inner();
        self.find(request.job_id)?;
        let shared = self.clone();
        {
            let mut disk = self.lock();
            disk.log_requests.push(request);
            disk.logs_opened += 1;
        }
        let (tx, rx) = tokio::sync::mpsc::channel(8);
        let mut changes = self.changed.subscribe();
        tokio::spawn(async move {
            let mut sent = 0;
            loop {
                let (fresh, over) = {
                    let disk = shared.lock();
                    let over = disk.jobs.get(&request.job_id).is_none_or(|job| job.phase == "done");
                    (disk.logs[sent..].to_vec(), over)
                };
                sent += fresh.len();
                for chunk in fresh {
                    if tx.send(Ok(chunk)).await.is_err() {
                        return;
                    }
                }
                if over || !request.follow || changes.changed().await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(tokio_stream::wrappers::ReceiverStream::new(rx))))
    }

    async fn offers(&self, request: Request<v1::OffersRequest>) -> Result<Response<v1::OffersReply>, Status> {
        self.lock().offers_asked = Some(request.into_inner());
        let offer = v1::OfferView {
            cloud: "aws".into(),
            zone: "us-east-1a".into(),
            instance_type: "p4de".into(),
            market: "spot".into(),
            price_nano_usd_h: 310_000_000,
            on_demand_nano_usd_h: 1_000_000_000,
            ..Default::default()
        };
        Ok(Response::new(v1::OffersReply { offers: vec![offer] }))
    }

    async fn outputs(&self, request: Request<v1::JobRequest>) -> Result<Response<v1::OutputsReply>, Status> {
        self.find(request.into_inner().job_id)?;
        Ok(Response::new(self.lock().outputs.clone()))
    }
}

#[tonic::async_trait]
impl Reports for Shared {
    async fn report(&self, _: Request<v1::ReportRequest>) -> Result<Response<v1::ReportReply>, Status> {
        let job =
            v1::JobReport { job_id: 1, name: "train".into(), phase: "running".into(), ..Default::default() };
        let mut disk = self.lock();
        disk.reports_asked += 1;
        let segments = disk.segments.clone();
        Ok(Response::new(v1::ReportReply { jobs: vec![job], segments, as_of_ms: 1_700_000_000_000 }))
    }

    type EventsStream = Streamed<v1::EventLine>;

    async fn events(&self, _: Request<v1::EventsRequest>) -> Result<Response<Self::EventsStream>, Status> {
        Err(Status::unimplemented("no test asks for events"))
    }
}

#[tonic::async_trait]
impl Admin for Shared {
    async fn info(&self, _: Request<v1::InfoRequest>) -> Result<Response<v1::InfoReply>, Status> {
        Ok(Response::new(v1::InfoReply { version: "0.1.0".into(), epoch: 3, ..Default::default() }))
    }

    async fn nodes(&self, _: Request<v1::NodesRequest>) -> Result<Response<v1::NodesReply>, Status> {
        Ok(Response::new(v1::NodesReply { nodes: vec![v1::NodeView { node_id: 4, ..Default::default() }] }))
    }

    async fn who_am_i(&self, _: Request<v1::WhoAmIRequest>) -> Result<Response<v1::UserView>, Status> {
        Ok(Response::new(v1::UserView { name: String::new(), role: "admin".into() }))
    }

    async fn users(&self, _: Request<v1::UsersRequest>) -> Result<Response<v1::UsersReply>, Status> {
        Err(Status::unimplemented("no test asks for users"))
    }
}
