//! A scheduler in this process, on port 0, over a store and a cloud that outlive it.

pub mod cloud;
pub mod store;
pub mod worker;

use std::time::Duration;

use spotq_core::{Cluster, Policies, invariants};
use spotq_engine::{ClusterSecret, EngineConfig, Running};
use spotq_model::{JobId, JobSpec, NodeId, Span, TaskId};
use spotq_proto::{MESSAGE_BYTES_MAX, v1};
use spotq_testkit::TempDir;
use tonic::transport::Channel;

pub use cloud::{LaunchFault, TestCloud};
pub use store::TestStore;
pub use worker::Worker;

/// No wait of these tests takes a second on an idle machine; a loaded one gets this much.
pub const DEADLINE: Duration = Duration::from_secs(30);
/// How often a condition is looked at.
pub const POLL: Duration = Duration::from_millis(5);
/// From which the secrets of these tests are derived.
pub const SECRET: [u8; 32] = [7; 32];

pub type JobsClient = v1::jobs_client::JobsClient<Channel>;
pub type ReportsClient = v1::reports_client::ReportsClient<Channel>;

/// What outlives a scheduler: its disk, its cloud, its settings.
pub struct World {
    pub store: TestStore,
    pub cloud: TestCloud,
    pub policies: Policies,
    pub snapshot_every: u64,
    dir: TempDir,
}

impl World {
    pub fn new(name: &str) -> World {
        let store = TestStore::new();
        let policies =
            Policies { settle: Span::millis(50), back_off: Span::millis(10), ..Policies::default() };
        World {
            cloud: TestCloud::new(&store),
            store,
            policies,
            snapshot_every: EngineConfig::SNAPSHOT_EVERY,
            dir: TempDir::new(name),
        }
    }

    pub fn config(&self) -> EngineConfig {
        EngineConfig {
            policies: self.policies.clone(),
            store: std::sync::Arc::new(self.store.clone()),
            provider: std::sync::Arc::new(self.cloud.clone()),
            data_dir: self.dir.path().to_path_buf(),
            checkpoint_root: "file:///checkpoints".into(),
            secret: ClusterSecret::new(SECRET),
            server_url: "http://127.0.0.1:1".into(),
            worker_env: [("AWS_SECRET_ACCESS_KEY".to_owned(), "worker-env-secret".to_owned())].into(),
            poll_every: Duration::from_millis(50),
            heartbeat: Duration::from_secs(1),
            dead_man: Duration::from_secs(600),
            snapshot_every: self.snapshot_every,
        }
    }

    /// A new term on the same disk and cloud.
    pub async fn start(&self) -> Served {
        let engine = spotq_engine::start(self.config()).await.unwrap();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = tokio::spawn(spotq_engine::serve(&engine, listener, std::future::pending()));
        Served { engine, url, _server: Server(server.abort_handle()) }
    }
}

impl World {
    /// A new term that serves with TLS.
    pub async fn start_secured(&self, security: std::sync::Arc<spotq_engine::Security>) -> Served {
        let engine = spotq_engine::start(self.config()).await.unwrap();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://{}", listener.local_addr().unwrap());
        let forever = std::future::pending();
        let server = tokio::spawn(spotq_engine::serve_secured(&engine, listener, security, forever));
        Served { engine, url, _server: Server(server.abort_handle()) }
    }
}

/// One term of a scheduler.
pub struct Served {
    pub engine: Running,
    pub url: String,
    _server: Server,
}

/// Serves until it is dropped; connections break then, as they do when a process ends.
struct Server(tokio::task::AbortHandle);

impl Drop for Server {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Served {
    /// Ends it as a crash does: nothing is waited for, connections break.
    pub async fn crash(self) {
        // Its store may have failed already, which is what some tests are about.
        let _ = self.engine.stop().await;
    }

    pub async fn jobs(&self) -> JobsClient {
        let client = JobsClient::new(channel(&self.url).await);
        client.max_decoding_message_size(MESSAGE_BYTES_MAX).max_encoding_message_size(4 * MESSAGE_BYTES_MAX)
    }

    pub async fn reports(&self) -> ReportsClient {
        ReportsClient::new(channel(&self.url).await)
    }

    pub async fn admin(&self) -> v1::admin_client::AdminClient<Channel> {
        v1::admin_client::AdminClient::new(channel(&self.url).await)
    }

    pub async fn submit(&self, spec: JobSpec) -> JobId {
        self.engine.handle.submit(spec.name.clone(), spec).await.unwrap().job
    }

    pub async fn cluster(&self) -> Cluster {
        self.engine.handle.query(|seen| seen.cluster.clone()).await.unwrap()
    }

    /// Waits until the state is as asked, and checks that it breaks no invariant.
    pub async fn until(&self, what: &str, holds: impl Fn(&Cluster) -> bool) -> Cluster {
        let found = async {
            loop {
                let cluster = self.cluster().await;
                if holds(&cluster) {
                    return cluster;
                }
                tokio::time::sleep(POLL).await;
            }
        };
        let found = tokio::time::timeout(DEADLINE, found).await;
        let cluster = found.unwrap_or_else(|_| panic!("waited in vain for {what}"));
        assert_eq!(invariants::check(&cluster), []);
        cluster
    }

    /// Waits until the newest attempt of the job has a node that the cloud has launched.
    pub async fn launched(&self, job: JobId) -> NodeId {
        let up = |c: &Cluster| {
            let node = c.task(TaskId::only(job))?.phase.node()?;
            c.nodes.get(&node)?.launched_at.map(|_| node)
        };
        up(&self.until("a launched node", |c| up(c).is_some()).await).unwrap()
    }

    pub async fn worker(&self, node: NodeId, held: Vec<v1::Grant>) -> Worker {
        Worker::dial(&self.url, node, secret().join_secret(node), held).await.unwrap()
    }

    /// A job of this name that runs, and its worker.
    pub async fn running(&self, name: &str) -> (JobId, Worker, v1::Grant) {
        let job = self.submit(spotq_testkit::job(name)).await;
        let node = self.launched(job).await;
        let mut worker = self.worker(node, Vec::new()).await;
        let grant = worker.start_task().await;
        (job, worker, grant)
    }
}

/// A connection of one's own.
pub async fn channel(url: &str) -> Channel {
    tonic::transport::Endpoint::from_shared(url.to_owned()).unwrap().connect().await.unwrap()
}

/// What the scheduler of these tests derives its secrets from.
pub fn secret() -> ClusterSecret {
    ClusterSecret::new(SECRET)
}

/// The phase of the job's only task, in one word.
pub fn phase(cluster: &Cluster, job: JobId) -> &'static str {
    cluster.task(TaskId::only(job)).map_or("unknown", |task| task.phase.name())
}
