//! Durable submits: through the engine in this process beside a bare sled group commit of the same bytes, and over gRPC
//! beside an empty unary call to the same server.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use spotq_core::Policies;
use spotq_engine::{ClusterSecret, EngineConfig, Handle, Running};
use spotq_model::JobSpec;
use spotq_proto::v1::SubmitRequest;
use spotq_proto::v1::jobs_client::JobsClient;
use spotq_provider::FakeProvider;
use spotq_store_sled::{BatchRecorder, SledOptions, SledStore, bare_group_commit};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use super::{Figure, Wanted, median, say};

/// The number of callers that the targets are for.
const CALLERS: usize = 128;
/// And those of the curve.
const CURVE: [usize; 5] = [1, 8, 32, 128, 512];
/// Disks and neighbours are moody; the median of so many rounds is not.
const ROUNDS: usize = 5;
/// Submits of one round: a second or so.
const SUBMITS: usize = 8_000;
/// Of one point of the curve; a single caller waits for the device each time.
const SUBMITS_CURVE: usize = 4_000;
const SUBMITS_ALONE: usize = 500;
/// Connections that the callers of gRPC share where they have none of their own.
const CONNECTIONS: usize = 8;
/// Both sides of 60 per cent that are wanted.
const RATIO_WANTED: f64 = 0.6;

pub fn measure(dir: &Path) -> anyhow::Result<Vec<Figure>> {
    let mut figures = in_process(dir)?;
    figures.extend(over_grpc(dir)?);
    Ok(figures)
}

fn in_process(dir: &Path) -> anyhow::Result<Vec<Figure>> {
    let mut ratios = Vec::new();
    let mut seen = String::new();
    for round in 0..ROUNDS {
        let pair = engine_beside_bare(&dir.join(format!("engine-{round}")), CALLERS, SUBMITS)?;
        seen = format!("{:.0}/s, bare {:.0}/s in {} commits", pair.ours, pair.best, pair.commits);
        say(&format!("{CALLERS} callers in the process: {seen}"));
        ratios.push(pair.ours / pair.best);
    }
    let name = format!("durable submits, {CALLERS} callers, of a bare group commit");
    let mut figures = vec![Figure::new(name, median(&mut ratios), "", Wanted::AtLeast(RATIO_WANTED), seen)];
    for callers in CURVE {
        let submits = if callers == 1 { SUBMITS_ALONE } else { SUBMITS_CURVE };
        let pair = engine_beside_bare(&dir.join(format!("curve-{callers}")), callers, submits)?;
        let from = format!("bare {:.0}/s, ratio {:.2}", pair.best, pair.ours / pair.best);
        figures.push(Figure::new(
            format!("durable submits, {callers} callers"),
            pair.ours,
            "/s",
            Wanted::Nothing,
            from,
        ));
    }
    Ok(figures)
}

struct Pair {
    ours: f64,
    best: f64,
    commits: usize,
}

/// Submits through the engine, then writes the very same group commits with nothing round them.
fn engine_beside_bare(dir: &Path, callers: usize, submits: usize) -> anyhow::Result<Pair> {
    let (store_dir, bare_dir) = (dir.join("store"), dir.join("bare"));
    std::fs::create_dir_all(&bare_dir)?;
    let recorder = BatchRecorder::default();
    let options = SledOptions { recorder: Some(recorder.clone()), ..SledOptions::default() };
    let cache_bytes = options.cache_bytes;
    let store = SledStore::open(&store_dir, options)?;
    let runtime = multi_thread("bench-engine")?;
    let pace = runtime.block_on(async {
        let engine = start(dir, store).await?;
        // What it wrote to become the leader is not part of it.
        drop(recorder.take());
        let pace = drive(callers, submits, |caller| {
            let handle = engine.handle.clone();
            Box::new(move |number| submit(handle.clone(), format!("{caller}-{number}")))
        })
        .await?;
        engine.stop().await?;
        anyhow::Ok(pace)
    })?;
    drop(runtime);
    let batches = recorder.take();
    let bare = bare_group_commit(&bare_dir, &batches, cache_bytes)?;
    std::fs::remove_dir_all(dir)?;
    let best = submits as f64 / bare.as_secs_f64();
    Ok(Pair { ours: pace.rate(), best, commits: batches.len() })
}

fn over_grpc(dir: &Path) -> anyhow::Result<Vec<Figure>> {
    let alone = Served::start(&dir.join("alone"))?;
    let mut figures = vec![alone.rounds(CALLERS, "each with a connection of its own")?];
    figures.extend(alone.curve()?);
    alone.stop()?;
    let shared = Served::start(&dir.join("shared"))?;
    figures.push(shared.rounds(CONNECTIONS, &format!("on {CONNECTIONS} connections"))?);
    shared.stop()?;
    Ok(figures)
}

/// A scheduler that is served in this process. It has threads of its own, as it would in a process of its own.
struct Served {
    server: Runtime,
    clients: Runtime,
    engine: Running,
    address: String,
    commits: BatchRecorder,
    serving: tokio::task::JoinHandle<Result<(), tonic::transport::Error>>,
}

impl Served {
    fn start(dir: &Path) -> anyhow::Result<Served> {
        let commits = BatchRecorder::default();
        let options = SledOptions { recorder: Some(commits.clone()), ..SledOptions::default() };
        let store = SledStore::open(&dir.join("store"), options)?;
        let (server, clients) = (multi_thread("bench-server")?, multi_thread("bench-clients")?);
        let engine = server.block_on(start(dir, store))?;
        let listener = server.block_on(TcpListener::bind("127.0.0.1:0"))?;
        let address = format!("http://{}", listener.local_addr()?);
        let serving = server.spawn(spotq_engine::serve(&engine, listener, std::future::pending()));
        Ok(Served { server, clients, engine, address, commits, serving })
    }

    fn stop(self) -> anyhow::Result<()> {
        self.serving.abort();
        self.server.block_on(self.engine.stop())?;
        Ok(())
    }

    async fn connect(&self, connections: usize) -> anyhow::Result<Vec<Channel>> {
        let mut channels = Vec::new();
        for _ in 0..connections {
            channels.push(Endpoint::from_shared(self.address.clone())?.tcp_nodelay(true).connect().await?);
        }
        // The first calls of a connection set it up.
        call_empty(&channels, connections, SUBMITS_ALONE).await?;
        Ok(channels)
    }

    fn rounds(&self, connections: usize, how: &str) -> anyhow::Result<Figure> {
        let mut ratios = Vec::new();
        let mut seen = String::new();
        let channels = self.clients.block_on(self.connect(connections))?;
        for round in 0..ROUNDS {
            drop(self.commits.take());
            let empty = self.clients.block_on(call_empty(&channels, CALLERS, SUBMITS))?;
            let ours = self.clients.block_on(call_submit(&channels, CALLERS, SUBMITS, round))?;
            seen = format!("{ours} in {} commits, empty calls {empty}", self.commits.take().len());
            say(&format!("{CALLERS} callers over gRPC, {how}: {seen}"));
            ratios.push(ours.rate() / empty.rate());
        }
        let name = format!("submits over gRPC of an empty call, {CALLERS} callers, {how}");
        Ok(Figure::new(name, median(&mut ratios), "", Wanted::AtLeast(RATIO_WANTED), seen))
    }

    fn curve(&self) -> anyhow::Result<Vec<Figure>> {
        let mut figures = Vec::new();
        for callers in CURVE {
            let calls = if callers == 1 { SUBMITS_ALONE } else { SUBMITS_CURVE };
            let channels = self.clients.block_on(self.connect(callers))?;
            let empty = self.clients.block_on(call_empty(&channels, callers, calls))?;
            let ours = self.clients.block_on(call_submit(&channels, callers, calls, 1000 + callers))?;
            let from = format!("empty calls {empty}, ratio {:.2}", ours.rate() / empty.rate());
            let name = format!("submits over gRPC, {callers} callers");
            figures.push(Figure::new(name, ours.rate(), "/s", Wanted::Nothing, from));
        }
        Ok(figures)
    }
}

async fn call_empty(channels: &[Channel], callers: usize, calls: usize) -> anyhow::Result<Pace> {
    drive(callers, calls, |caller| {
        let client = HealthClient::new(channels[caller % channels.len()].clone());
        Box::new(move |_| {
            let mut client = client.clone();
            async move {
                client.check(HealthCheckRequest::default()).await?;
                Ok(())
            }
        })
    })
    .await
}

async fn call_submit(
    channels: &[Channel],
    callers: usize,
    calls: usize,
    round: usize,
) -> anyhow::Result<Pace> {
    let spec = spotq_proto::v1::JobSpec::from(&job());
    drive(callers, calls, |caller| {
        let spec = spec.clone();
        let client = JobsClient::new(channels[caller % channels.len()].clone());
        Box::new(move |number| {
            let mut client = client.clone();
            let client_key = format!("{round}-{caller}-{number}");
            let spec = spec.clone();
            async move {
                client.submit(SubmitRequest { client_key, spec: Some(spec) }).await?;
                Ok(())
            }
        })
    })
    .await
}

/// So many callers, each of which waits for its answer before it takes the next call: all are busy until the end.
async fn drive<Call: Future<Output = anyhow::Result<()>> + Send + 'static>(
    callers: usize,
    calls: usize,
    caller: impl Fn(usize) -> Box<dyn Fn(usize) -> Call + Send + Sync>,
) -> anyhow::Result<Pace> {
    let next = Arc::new(AtomicUsize::new(0));
    let (started, cpu_before) = (Instant::now(), cpu_time());
    let tasks: Vec<_> = (0..callers)
        .map(|number| {
            let (call, next) = (caller(number), Arc::clone(&next));
            tokio::spawn(async move {
                while let index = next.fetch_add(1, Ordering::Relaxed)
                    && index < calls
                {
                    call(index).await?;
                }
                anyhow::Ok(())
            })
        })
        .collect();
    for task in tasks {
        task.await.context("a caller panicked")??;
    }
    Ok(Pace { calls, took: started.elapsed(), cpu: cpu_time().saturating_sub(cpu_before) })
}

/// How fast calls were.
struct Pace {
    calls: usize,
    took: Duration,
    /// Of this process, which is both sides and the disk's threads.
    cpu: Duration,
}

impl Pace {
    /// Calls in a second.
    fn rate(&self) -> f64 {
        self.calls as f64 / self.took.as_secs_f64()
    }
}

impl std::fmt::Display for Pace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let cpu_us = self.cpu.as_secs_f64() * 1e6 / self.calls as f64;
        write!(f, "{:.0}/s ({cpu_us:.0} µs of CPU each)", self.rate())
    }
}

fn cpu_time() -> Duration {
    let spent = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(spent.tv_sec.unsigned_abs(), u32::try_from(spent.tv_nsec).unwrap_or(0))
}

async fn submit(handle: Handle, key: String) -> anyhow::Result<()> {
    handle.submit(key, job()).await?;
    Ok(())
}

pub(super) fn job() -> JobSpec {
    spotq_testkit::job("bench")
}

pub(super) async fn start(dir: &Path, store: SledStore) -> anyhow::Result<Running> {
    let config = EngineConfig {
        policies: Policies::default(),
        store: Arc::new(store),
        // It sells nothing, so that the planner, which is not measured here, has nothing to do.
        provider: Arc::new(FakeProvider::new(Vec::new())),
        data_dir: dir.to_path_buf(),
        checkpoint_root: format!("file://{}", dir.join("checkpoints").display()),
        secret: ClusterSecret::new([7; 32]),
        server_url: "http://127.0.0.1:1".into(),
        worker_env: std::collections::BTreeMap::default(),
        poll_every: Duration::from_secs(1),
        heartbeat: Duration::from_secs(1),
        dead_man: Duration::from_secs(600),
        snapshot_every: EngineConfig::SNAPSHOT_EVERY,
    };
    Ok(spotq_engine::start(config).await?)
}

/// The name of its threads is what a profiler shows.
pub(super) fn multi_thread(name: &str) -> anyhow::Result<Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.thread_name(name).enable_all().build().context("cannot start a runtime")
}
