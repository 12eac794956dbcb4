//! A scheduler that grants what a test says and remembers what it hears, and workers as real processes.

#![expect(dead_code, reason = "each test file uses a part of this module")]

pub mod metadata;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use spotq_model::{Generation, JobId, JobSpec, TaskId};
use spotq_proto::v1;
use spotq_proto::v1::workers_server::{Workers, WorkersServer};
use spotq_testkit::wait_for;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Request, Response, Status, Streaming};
use v1::report::What;
use v1::scheduler_message::Kind;

/// Nothing in these tests takes longer unless it is broken.
pub const LIMIT: Duration = Duration::from_secs(30);
pub const SECRET: &str = "join-secret-of-the-test";

#[derive(Default)]
struct Heard {
    hellos: Vec<v1::Hello>,
    reports: Vec<v1::Report>,
    logs: BTreeMap<(u32, u64), Vec<u8>>,
    heartbeats: Vec<v1::Heartbeat>,
    out: Option<mpsc::Sender<Result<v1::SchedulerMessage, Status>>>,
    /// Reports are not acknowledged while this is set.
    deaf: bool,
    dead_man_ms: u64,
}

/// The scheduler's end. Dropping it stops listening.
pub struct Scheduler {
    pub address: SocketAddr,
    heard: Arc<Mutex<Heard>>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

struct Service(Arc<Mutex<Heard>>);

impl Scheduler {
    pub fn start() -> Scheduler {
        Scheduler::start_at("127.0.0.1:0".parse().unwrap(), Arc::default())
    }

    fn start_at(address: SocketAddr, heard: Arc<Mutex<Heard>>) -> Scheduler {
        let (stop, stopped) = oneshot::channel::<()>();
        let (tell, told) = std::sync::mpsc::channel();
        let service = WorkersServer::new(Service(Arc::clone(&heard)));
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let listener = tokio::net::TcpListener::bind(address).await.unwrap();
                tell.send(listener.local_addr().unwrap()).unwrap();
                let server = tonic::transport::Server::builder().add_service(service);
                tokio::select! {
                    served = server.serve_with_incoming(TcpListenerStream::new(listener)) => served.unwrap(),
                    _ = stopped => {}
                }
            });
        });
        let address = told.recv().unwrap();
        Scheduler { address, heard, stop: Some(stop), thread: Some(thread) }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Ends the server; what was heard stays for the one that is started again at the same address.
    pub fn restart_after(mut self, while_away: impl FnOnce()) -> Scheduler {
        let (address, heard) = (self.address, Arc::clone(&self.heard));
        self.shut();
        heard.lock().unwrap().out = None;
        while_away();
        Scheduler::start_at(address, heard)
    }

    fn shut(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }

    pub fn send(&self, kind: Kind) {
        let out = wait_for(LIMIT, || self.heard.lock().unwrap().out.clone(), "a connected worker").unwrap();
        out.blocking_send(Ok(v1::SchedulerMessage { kind: Some(kind) })).unwrap();
    }

    pub fn grant(&self, job: u32, generation: u64, spec: &JobSpec, store: &Path) -> v1::Grant {
        self.grant_from_step(job, generation, spec, store, None)
    }

    /// To a job whose newest commit had this step.
    pub fn grant_from_step(
        &self,
        job: u32,
        generation: u64,
        spec: &JobSpec,
        store: &Path,
        newest_step: Option<u64>,
    ) -> v1::Grant {
        let grant = grant(job, generation);
        self.send(Kind::Grant(v1::GrantTask {
            grant: Some(grant),
            spec: Some(spec.into()),
            checkpoint_url: format!("file://{}", store.display()),
            checkpoint_key: vec![7; 32],
            job_uuid: "u".into(),
            newest_step,
        }));
        grant
    }

    pub fn stop(&self, grant: v1::Grant, reason: v1::StopReason) {
        self.send(Kind::Stop(v1::StopTask { grant: Some(grant), reason: reason.into(), deadline_ms: 0 }));
    }

    pub fn set_deaf(&self, deaf: bool) {
        self.heard.lock().unwrap().deaf = deaf;
    }

    pub fn set_dead_man(&self, ms: u64) {
        self.heard.lock().unwrap().dead_man_ms = ms;
    }

    pub fn hellos(&self) -> Vec<v1::Hello> {
        self.heard.lock().unwrap().hellos.clone()
    }

    pub fn resident_bytes(&self) -> Option<u64> {
        self.heard.lock().unwrap().heartbeats.last().map(|beat| beat.resident_bytes)
    }

    /// Reports of an attempt, in the order of their ids, each once.
    pub fn reports(&self, grant: v1::Grant) -> Vec<v1::Report> {
        let mut reports: Vec<v1::Report> =
            self.heard.lock().unwrap().reports.iter().filter(|r| r.grant == Some(grant)).cloned().collect();
        reports.sort_by_key(|r| r.id);
        reports.dedup_by_key(|r| r.id);
        reports
    }

    pub fn wait_report<T>(
        &self,
        grant: v1::Grant,
        what: &str,
        mut find: impl FnMut(&What) -> Option<T>,
    ) -> T {
        let found = wait_for(
            LIMIT,
            || self.reports(grant).iter().filter_map(|r| r.what.as_ref()).find_map(&mut find),
            what.to_owned(),
        );
        found.unwrap_or_else(|error| {
            panic!("{error}; heard {:?}; log: {}", self.reports(grant), self.log(grant))
        })
    }

    pub fn finished(&self, grant: v1::Grant) -> v1::Finished {
        self.wait_report(grant, "the end", |what| match what {
            What::Finished(finished) => Some(finished.clone()),
            _ => None,
        })
    }

    pub fn started(&self, grant: v1::Grant) -> u32 {
        self.wait_report(grant, "the start", |what| match what {
            What::Started(started) => Some(started.pid),
            _ => None,
        })
    }

    pub fn committed(&self, grant: v1::Grant) -> Vec<v1::Checkpoint> {
        let reports = self.reports(grant).into_iter();
        reports
            .filter_map(|r| match r.what {
                Some(What::Committed(checkpoint)) => Some(checkpoint),
                _ => None,
            })
            .collect()
    }

    /// The text of an attempt's log that has arrived, all streams.
    pub fn log(&self, grant: v1::Grant) -> String {
        let heard = self.heard.lock().unwrap();
        let mut bytes =
            heard.logs.get(&(grant.job_id, grant.generation)).map(Vec::as_slice).unwrap_or_default();
        let mut text = Vec::new();
        while let Some((frame, used)) = spotq_proto::logframe::decode(bytes).unwrap() {
            text.extend(frame.data);
            bytes = &bytes[used..];
        }
        String::from_utf8_lossy(&text).into_owned()
    }

    pub fn wait_log(&self, grant: v1::Grant, part: &str) {
        spotq_testkit::wait_until(LIMIT, || self.log(grant).contains(part), format!("`{part}` in the log"))
            .unwrap_or_else(|error| panic!("{error}: {}; {:?}", self.log(grant), self.reports(grant)));
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.shut();
    }
}

#[tonic::async_trait]
impl Workers for Service {
    type SessionStream = ReceiverStream<Result<v1::SchedulerMessage, Status>>;

    async fn session(
        &self,
        request: Request<Streaming<v1::WorkerMessage>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let mut inbound = request.into_inner();
        let (out, outbound) = mpsc::channel(1000);
        let heard = Arc::clone(&self.0);
        tokio::spawn(async move {
            while let Ok(Some(message)) = inbound.message().await {
                let answer = hear(&heard, message.kind, &out);
                if let Some(kind) = answer
                    && out.send(Ok(v1::SchedulerMessage { kind: Some(kind) })).await.is_err()
                {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(outbound)))
    }
}

fn hear(
    heard: &Mutex<Heard>,
    kind: Option<v1::worker_message::Kind>,
    out: &mpsc::Sender<Result<v1::SchedulerMessage, Status>>,
) -> Option<Kind> {
    let mut heard = heard.lock().unwrap();
    match kind? {
        v1::worker_message::Kind::Hello(hello) => {
            assert_eq!(hello.join_secret, SECRET);
            let logs = heard.logs.iter().map(|((job, generation), bytes)| v1::LogAck {
                grant: Some(grant(*job, *generation)),
                offset: bytes.len() as u64,
            });
            let welcome = v1::Welcome {
                cluster: "test".into(),
                heartbeat_ms: 100,
                lease_ttl_ms: 5000,
                dead_man_ms: heard.dead_man_ms,
                logs: logs.collect(),
                identity: None,
            };
            heard.hellos.push(hello);
            heard.out = Some(out.clone());
            Some(Kind::Welcome(welcome))
        }
        v1::worker_message::Kind::Heartbeat(beat) => {
            heard.heartbeats.push(beat);
            None
        }
        v1::worker_message::Kind::Report(report) => {
            let id = report.id;
            heard.reports.push(report);
            (!heard.deaf).then_some(Kind::ReportAck(v1::ReportAck { id }))
        }
        v1::worker_message::Kind::Log(chunk) => {
            let grant = chunk.grant?;
            let log = heard.logs.entry((grant.job_id, grant.generation)).or_default();
            let at = chunk.offset as usize;
            assert!(at <= log.len(), "a gap in the log");
            log.truncate(at);
            log.extend(chunk.data);
            let offset = log.len() as u64;
            Some(Kind::LogAck(v1::LogAck { grant: Some(grant), offset }))
        }
    }
}

pub fn grant(job: u32, generation: u64) -> v1::Grant {
    (TaskId::only(JobId(job)), Generation(generation)).into()
}

/// A worker process. Dropping it kills it.
pub struct Worker {
    pub child: std::process::Child,
    pub dir: PathBuf,
}

pub struct WorkerOptions<'a> {
    pub node: u64,
    pub args: &'a [&'a str],
    pub env: &'a [(&'a str, &'a str)],
}

impl Default for WorkerOptions<'_> {
    fn default() -> Self {
        WorkerOptions { node: 1, args: &[], env: &[] }
    }
}

impl Worker {
    pub fn start(scheduler: &Scheduler, dir: &Path, options: &WorkerOptions<'_>) -> Worker {
        let mut command = Command::new(env!("CARGO_BIN_EXE_spotq-worker"));
        command
            .args(["--server", &scheduler.url(), "--node", &options.node.to_string(), "--instance", "i-1"])
            .args(["--quiet", "600ms"])
            .args(if options.args.contains(&"--quiet-hurried") {
                &[][..]
            } else {
                &["--quiet-hurried", "200ms"]
            })
            .arg("--dir")
            .arg(dir)
            .args(options.args)
            .env("SPOTQ_JOIN_SECRET", SECRET)
            .env("SPOTQ_TEST_MARK", dir)
            .envs(options.env.iter().copied())
            .stdin(Stdio::null());
        Worker { child: command.spawn().unwrap(), dir: dir.to_owned() }
    }

    /// A worker in the same directory, after this one has ended.
    pub fn start_again(&mut self, scheduler: &Scheduler) {
        let next = Worker::start(scheduler, &self.dir, &WorkerOptions::default());
        // Without `drop` of the ended one, which would end what it left behind before its successor can.
        std::mem::forget(std::mem::replace(self, next));
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        spotq_testkit::processes::signal(self.child.id(), signal).unwrap();
    }

    pub fn wait_exit(&mut self) -> std::process::ExitStatus {
        wait_for(LIMIT, || self.child.try_wait().unwrap(), "the worker's exit").unwrap()
    }

    /// Processes that this worker or its jobs left, the worker itself not counted.
    pub fn leftovers(&self) -> Vec<spotq_testkit::processes::Process> {
        let all = spotq_testkit::processes::with_env("SPOTQ_TEST_MARK", self.dir.to_str());
        all.into_iter().filter(|process| process.pid != self.child.id()).collect()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        for process in self.leftovers() {
            let _ = spotq_testkit::processes::signal(process.pid, rustix::process::Signal::KILL);
        }
    }
}

/// A job that runs shell text.
pub fn shell(text: &str) -> JobSpec {
    JobSpec { command: spotq_model::Command::Shell { text: text.into() }, ..spotq_testkit::job("train") }
}

/// A trainer in shell: resumes, counts steps to `STEPS`, saves by rename on USR1 and every `EVERY` steps.
pub const TRAINER: &str = r#"
D=$SPOTQ_CHECKPOINT_DIR
step=0
last=$(ls "$D" | grep '^step-' | sed 's/step-//' | sort -n | tail -1)
[ -n "$last" ] && step=$last
save() { echo "$step" > "$D/.step.tmp"; mv "$D/.step.tmp" "$D/step-$step"; echo "saved step $step"; }
trap save USR1
echo "starting at step $step, resume from '$SPOTQ_RESUME_FROM', attempt $SPOTQ_ATTEMPT"
while [ "$step" -lt "${STEPS:-100000}" ]; do
  step=$((step + 1))
  echo "{\"step\":$step,\"total\":${STEPS:-100000}}" >> "$SPOTQ_PROGRESS_FILE"
  [ -n "$EVERY" ] && [ $((step % EVERY)) -eq 0 ] && save
  sleep 0.02
done
echo "done at step $step"
"#;

pub fn trainer(env: &[(&str, &str)]) -> JobSpec {
    let mut spec = shell(TRAINER);
    spec.env = env.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    spec.checkpoint.profile = spotq_model::Profile::Rename;
    spec.checkpoint.signal = Some(spotq_model::Signal::Usr1);
    // The shell waits for its `sleep`, so it is not a leaf.
    spec.checkpoint.signal_target = spotq_model::SignalTarget::Launcher;
    spec
}
