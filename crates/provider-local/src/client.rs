//! The client of the simulated cloud: a `CloudProvider` that starts the cloud when there is none.
//!
//! It keeps working when the cloud's process is replaced by another one. It must never hold the only copy of
//! anything: what it knows it reads from the cloud again.

use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use serde::Serialize;
use serde::de::DeserializeOwned;
use spotq_model::{Cloud, InstanceId, Offer, Refusal, RefusalKind, Scope, Span, Usd};
use spotq_provider::{
    Billable, CHANGES_KEPT, CloudProvider, Instance, InstanceChange, LaunchRequest, Launched, TerminateState,
};
use tokio::sync::broadcast;
use tokio::task::AbortHandle;

use crate::control::{
    ChangesQuery, ChangesReply, ControlFile, Hello, InstanceBody, InterruptBody, LONG_POLL, LaunchBody,
    ListBody, MarketBody,
};
use crate::process::{CLOUD_ARGV0, CONTROL_FILE, LOG_FILE};
use crate::record::write_whole;
use crate::{CloudConfig, LocalError, MarketConfig};

/// How long a cloud may take to come up; it waits for an old one to end first.
const START_PATIENCE: Duration = Duration::from_secs(15);
const START_POLL: Duration = Duration::from_millis(10);
/// A started cloud that is not up by then may have met an old one that was just ending.
const ASK_AGAIN: Duration = Duration::from_secs(3);
/// Longest of any call but the wait for changes and the shutdown; each is answered from memory.
const CALL_LIMIT: Duration = Duration::from_secs(10);
/// A shutdown waits for every node's grace.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(60);
/// A call is tried this often; between tries the cloud is looked up, or started, again.
const TRIES: u32 = 3;
/// Between attempts to reach a cloud that is away, for news only.
const NEWS_PAUSE: Duration = Duration::from_millis(200);
/// When a call that did not get through may be tried again.
const UNREACHABLE_COOL_DOWN: Span = Span::secs(1);

/// A simulated cloud that runs in a directory. Clones are the same cloud.
#[derive(Debug, Clone)]
pub struct LocalCloud {
    link: Arc<Link>,
    _news: Arc<AbortOnDrop>,
}

#[derive(Debug)]
struct Link {
    dir: PathBuf,
    seed: u64,
    config: CloudConfig,
    /// The program that becomes the cloud and its workers, by the name it is given.
    exe: PathBuf,
    http: reqwest::Client,
    control: Mutex<ControlFile>,
    changes: broadcast::Sender<InstanceChange>,
    /// After a shutdown nothing is started again.
    closed: AtomicBool,
}

#[derive(Debug)]
struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl LocalCloud {
    /// Connects to the cloud that runs in `dir`, or starts one there, detached. `exe` must run `cloud_main` when
    /// its name is `CLOUD_ARGV0`, and be a worker when its name is `WORKER_ARGV0`. The settings are those of the
    /// cloud that is started; one that runs keeps its own.
    ///
    /// # Errors
    /// What is wrong with the directory, the settings or the program; a cloud with another seed.
    pub async fn connect_or_start(
        dir: &Path,
        seed: u64,
        config: &CloudConfig,
        exe: &Path,
    ) -> Result<Self, LocalError> {
        config
            .market
            .check()
            .map_err(|detail| LocalError::Config { path: dir.join("config.json"), detail })?;
        fs::create_dir_all(dir).map_err(LocalError::io("create", dir))?;
        let dir = dir.canonicalize().map_err(LocalError::io("find", dir))?;
        // Proxies of the environment are for the network; this is loopback.
        let http = reqwest::Client::builder().no_proxy().build().map_err(|e| LocalError::NotUp {
            dir: dir.clone(),
            detail: e.to_string(),
            log: dir.join(LOG_FILE),
        })?;
        let link = Arc::new(Link {
            dir,
            seed,
            config: config.clone(),
            exe: exe.into(),
            http,
            control: Mutex::new(ControlFile { pid: 0, url: String::new(), token: String::new() }),
            changes: broadcast::Sender::new(CHANGES_KEPT),
            closed: AtomicBool::new(false),
        });
        link.revive().await?;
        // Asked for before anything is launched, so that nothing is missed.
        let position = link.news(None).await.ok().map(|reply| (reply.run, reply.next));
        let news = tokio::spawn(follow(link.clone(), position)).abort_handle();
        Ok(LocalCloud { link, _news: Arc::new(AbortOnDrop(news)) })
    }

    /// Ends every node and the cloud itself.
    ///
    /// # Errors
    /// When the cloud runs but does not answer.
    pub async fn shutdown(&self) -> Result<(), Refusal> {
        self.link.closed.store(true, Ordering::SeqCst);
        let sent = self.link.send::<_, Result<(), Refusal>>("shutdown", &(), SHUTDOWN_LIMIT).await;
        match sent {
            Ok(answer) => answer,
            // Nobody there is what was wanted.
            Err(error) if error.is_connect() => Ok(()),
            Err(error) => Err(unreachable(Cloud::Aws, &error.to_string())),
        }
    }

    /// Takes back the notice of an instance, as clouds sometimes do.
    ///
    /// # Errors
    /// `NotFound` if there is no such instance.
    pub async fn withdraw(&self, instance: &InstanceId) -> Result<(), Refusal> {
        self.link.call("withdraw", &InstanceBody { instance: instance.clone() }, Cloud::Aws).await
    }

    /// The next launch that the refusal's scope covers is refused with it.
    ///
    /// # Errors
    /// When the cloud does not answer.
    pub async fn refuse_next(&self, refusal: Refusal) -> Result<(), Refusal> {
        let body = MarketBody { refuse_next: vec![refusal], ..MarketBody::default() };
        self.link.call("market", &body, Cloud::Aws).await
    }

    /// Changes the market from now on; the lives of nodes that run already stay as drawn.
    ///
    /// # Errors
    /// When the settings cannot be or the cloud does not answer.
    pub async fn set_market(&self, market: MarketConfig) -> Result<(), Refusal> {
        self.link
            .call("market", &MarketBody { market: Some(market), ..MarketBody::default() }, Cloud::Aws)
            .await
    }

    /// Changes how long nodes take to boot from now on.
    ///
    /// # Errors
    /// When the cloud does not answer.
    pub async fn set_boot_time(&self, boot: Span) -> Result<(), Refusal> {
        self.link
            .call("market", &MarketBody { boot_ms: Some(boot.0), ..MarketBody::default() }, Cloud::Aws)
            .await
    }

    /// The process number of the cloud, for tests that kill it.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.link.control().pid
    }

    /// Where the nodes of this cloud keep their records and logs.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.link.dir
    }
}

#[async_trait]
impl CloudProvider for LocalCloud {
    fn name(&self) -> &str {
        "local"
    }

    async fn offers(&self) -> Result<Vec<Offer>, Refusal> {
        self.link.call("offers", &(), Cloud::Aws).await
    }

    async fn launch(&self, request: LaunchRequest) -> Result<Launched, Refusal> {
        let cloud = request.pool.cloud;
        let body = LaunchBody {
            key: request.key,
            node: request.node,
            pool: request.pool,
            tags: request.tags,
            expires_at: request.expires_at,
            server: request.bootstrap.server,
            join_secret: request.bootstrap.join_secret.expose().to_owned(),
            env: request.bootstrap.env,
        };
        self.link.call("launch", &body, cloud).await
    }

    async fn list_owned(&self, cluster: &str) -> Result<Vec<Instance>, Refusal> {
        self.link.call("list", &ListBody { cluster: cluster.into() }, Cloud::Aws).await
    }

    async fn terminate(&self, instance: &InstanceId) -> Result<TerminateState, Refusal> {
        self.link.call("terminate", &InstanceBody { instance: instance.clone() }, Cloud::Aws).await
    }

    async fn simulate_interruption(&self, instance: &InstanceId, notice: Span) -> Result<(), Refusal> {
        let body = InterruptBody { instance: instance.clone(), notice_ms: notice.0 };
        self.link.call("interrupt", &body, Cloud::Aws).await
    }

    fn changes(&self) -> broadcast::Receiver<InstanceChange> {
        self.link.changes.subscribe()
    }

    /// Price times time; the simulated clouds have no minimum and no free first hour.
    fn billed(&self, stretch: &Billable) -> Usd {
        stretch.quote.price.cost(stretch.end.since(stretch.start))
    }
}

impl Link {
    /// Calls the cloud, starting it if it is away. `cloud` is the scope of the fault if nobody answers.
    async fn call<B: Serialize + Sync, A: DeserializeOwned>(
        &self,
        path: &str,
        body: &B,
        cloud: Cloud,
    ) -> Result<A, Refusal> {
        let mut fault = String::new();
        for attempt in 0..TRIES {
            if attempt > 0
                && let Err(error) = self.revive().await
            {
                fault = error.to_string();
                continue;
            }
            match self.send::<B, Result<A, Refusal>>(path, body, CALL_LIMIT).await {
                Ok(answer) => return answer,
                Err(error) => fault = format!("local cloud, {path}: {error}"),
            }
        }
        Err(unreachable(cloud, &fault))
    }

    async fn send<B: Serialize + Sync, A: DeserializeOwned>(
        &self,
        path: &str,
        body: &B,
        limit: Duration,
    ) -> reqwest::Result<A> {
        let control = self.control();
        let request = self.http.post(format!("{}/v1/{path}", control.url)).bearer_auth(&control.token);
        request.timeout(limit).json(body).send().await?.error_for_status()?.json().await
    }

    async fn news(&self, position: Option<&(String, u64)>) -> reqwest::Result<ChangesReply> {
        let control = self.control();
        let query = ChangesQuery {
            run: position.map(|(run, _)| run.clone()),
            since: position.map_or(0, |(_, next)| *next),
        };
        let mut url = format!("{}/v1/changes?since={}", control.url, query.since);
        if let Some(run) = query.run {
            url = format!("{url}&run={run}");
        }
        let request = self.http.get(url).bearer_auth(&control.token).timeout(LONG_POLL + CALL_LIMIT);
        request.send().await?.error_for_status()?.json().await
    }

    /// Finds the cloud that runs in the directory, or starts one.
    async fn revive(&self) -> Result<(), LocalError> {
        let started = Instant::now();
        let mut detail = "nobody answers".to_owned();
        // Held from before the last look until the cloud is up, so that one caller at a time starts one cloud.
        let turn = self.starting_turn()?;
        let (mut our_turn, mut asked) = (false, None::<Instant>);
        while started.elapsed() < START_PATIENCE {
            match self.look_up().await {
                Ok(hello) if hello.seed == self.seed => return Ok(()),
                Ok(hello) => {
                    let dir = self.dir.clone();
                    return Err(LocalError::OtherSeed { dir, running: hello.seed, wanted: self.seed });
                }
                Err(error) => detail = error,
            }
            if self.closed.load(Ordering::SeqCst) {
                detail = "it was shut down".into();
                break;
            }
            if !our_turn {
                our_turn = turn.try_lock().is_ok();
            } else if asked.is_none_or(|at| at.elapsed() >= ASK_AGAIN) {
                self.start().await?;
                asked = Some(Instant::now());
            }
            tokio::time::sleep(START_POLL).await;
        }
        Err(LocalError::NotUp { dir: self.dir.clone(), detail, log: self.dir.join(LOG_FILE) })
    }

    fn starting_turn(&self) -> Result<fs::File, LocalError> {
        let path = self.dir.join("start.lock");
        let open = fs::File::options().create(true).truncate(false).write(true).open(&path);
        open.map_err(LocalError::io("open", &path))
    }

    /// Reads where the cloud listens and whether it does.
    async fn look_up(&self) -> Result<Hello, String> {
        let path = self.dir.join(CONTROL_FILE);
        let bytes = fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let control: ControlFile =
            serde_json::from_slice(&bytes).map_err(|e| format!("{}: {e}", path.display()))?;
        let request = self.http.get(format!("{}/v1/hello", control.url)).bearer_auth(&control.token);
        let hello =
            async { request.timeout(CALL_LIMIT).send().await?.error_for_status()?.json::<Hello>().await };
        let hello = hello.await.map_err(|e| e.to_string())?;
        *self.control.lock().unwrap_or_else(PoisonError::into_inner) = control;
        Ok(hello)
    }

    async fn start(&self) -> Result<(), LocalError> {
        let config = self.dir.join("config.json");
        let text = serde_json::to_vec_pretty(&self.config).map_err(io::Error::other);
        text.and_then(|text| write_whole(&config, &text)).map_err(LocalError::io("write", &config))?;
        let log = self.dir.join(LOG_FILE);
        let open = fs::File::options().create(true).append(true).open(&log);
        let out = open.map_err(LocalError::io("open", &log))?;
        let mut command = Command::new(&self.exe);
        command
            .arg0(CLOUD_ARGV0)
            .args(["serve", "--detach", "--seed", &self.seed.to_string()])
            .arg("--dir")
            .arg(&self.dir)
            .arg("--config")
            .arg(&config)
            .arg("--worker")
            .arg(&self.exe)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(out);
        let exe = self.exe.clone();
        // The started program only starts another one and ends, so this takes milliseconds.
        let ran = tokio::task::spawn_blocking(move || command.status()).await;
        let status = ran.map_err(io::Error::other).flatten().map_err(LocalError::io("run", &exe))?;
        if status.success() {
            return Ok(());
        }
        Err(LocalError::NotUp { dir: self.dir.clone(), detail: format!("it ended with {status}"), log })
    }

    fn control(&self) -> ControlFile {
        self.control.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Passes on what the cloud tells, for as long as anyone holds the client.
async fn follow(link: Arc<Link>, mut position: Option<(String, u64)>) {
    loop {
        match link.news(position.as_ref()).await {
            Ok(reply) => {
                for change in reply.changes {
                    // Nobody listening is fine: changes are lossy by contract.
                    let _ = link.changes.send(change);
                }
                position = Some((reply.run, reply.next));
            }
            Err(_) if link.closed.load(Ordering::SeqCst) => return,
            Err(error) => {
                tracing::debug!(%error, "no news from the local cloud");
                tokio::time::sleep(NEWS_PAUSE).await;
                // Only looks: starting the cloud is left to a caller that needs it.
                if let Err(error) = link.look_up().await {
                    tracing::debug!(%error, "the local cloud is away");
                }
            }
        }
    }
}

fn unreachable(cloud: Cloud, message: &str) -> Refusal {
    Refusal {
        kind: RefusalKind::Transient,
        scope: Scope::Cloud { cloud },
        cool_down: UNREACHABLE_COOL_DOWN,
        message: message.into(),
    }
}
