//! Starts the parts in order, says when it is ready, and ends them on a signal.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write as _;
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser as _;
use spotq_engine::seal::Sealer;
use spotq_engine::{CA_VARIABLE, ClusterSecret, EngineConfig, Running, Security};
use spotq_provider_local::LocalCloud;
use spotq_store_sled::{SledOptions, SledStore};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::args::DaemonArgs;
use crate::config::{Config, DEAD_MAN, LOCAL_HEARTBEAT, LOCAL_POLL};
use crate::error::DaemonError;

/// Open streams of workers and watchers never end by themselves; they get this long to hear the goodbye.
const GOODBYE: Duration = Duration::from_millis(300);
/// What workers need of our environment to reach an object store.
const STORE_VARIABLES: &str = "AWS_";

/// The whole daemon. `args` begins with the program's name.
#[must_use]
pub fn daemon_main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.into_iter().collect();
    if crate::manage::is_meant(&args) {
        return crate::manage::main(args);
    }
    let args = match DaemonArgs::try_parse_from(args) {
        Ok(args) => args,
        Err(error) => {
            // Help goes to stdout, wrong usage to stderr; a closed pipe leaves nobody to tell.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
        }
    };
    start_logging();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return say(&DaemonError::Running(format!("start the runtime: {error}"))),
    };
    let outcome = runtime.block_on(run(args));
    runtime.shutdown_timeout(GOODBYE);
    outcome.map_or_else(|error| say(&error), |()| ExitCode::SUCCESS)
}

/// Serves until SIGTERM or SIGINT.
pub async fn run(args: DaemonArgs) -> Result<(), DaemonError> {
    let config = args.config.as_deref().map_or(Ok(Config::default()), Config::read)?;
    if !args.local {
        let text = "no cloud is configured: this version has the simulated clouds only; add --local";
        return Err(DaemonError::Config(text.into()));
    }
    let data = data_dir(&args.data)?;
    let sealer = Sealer::open(&data).map_err(|error| data_error(&data, &error))?;
    let secret = crate::secrets::cluster_secret(&data, &sealer)?;
    let security = security(&data, &ClusterSecret::new(secret), sealer)?;
    let listener = listen(&args.listen, security.as_deref()).await?;
    let address = listener.local_addr().map_err(|e| listen_error(&args.listen, &e))?;
    let store = open_store(data.join("store")).await?;
    let exe = std::env::current_exe().map_err(|e| DaemonError::Running(format!("find this program: {e}")))?;
    let cloud =
        LocalCloud::connect_or_start(&data.join("cloud"), args.seed, &config.local.cloud, &exe).await?;
    let engine = EngineConfig {
        policies: spotq_core::Policies {
            cluster: cluster_name(&config, &secret),
            ..config.local_policies()?
        },
        store: Arc::new(store),
        provider: Arc::new(cloud.clone()),
        checkpoint_root: config
            .checkpoint_store
            .clone()
            .map_or_else(|| directory_url(&data.join("checkpoints")), Ok)?,
        data_dir: data.clone(),
        secret: ClusterSecret::new(secret),
        server_url: server_url(address, security.is_some()),
        worker_env: worker_variables(security.as_deref()),
        poll_every: LOCAL_POLL,
        heartbeat: LOCAL_HEARTBEAT,
        dead_man: DEAD_MAN,
        snapshot_every: EngineConfig::SNAPSHOT_EVERY,
    };
    let mut engine = spotq_engine::start(engine).await.map_err(|e| data_error(&data, &e))?;
    announce(address);
    let ended = serve(&mut engine, listener, security).await;
    farewell(engine, &cloud).await;
    ended
}

/// Serves until a signal, or until the store fails.
async fn serve(
    engine: &mut Running,
    listener: TcpListener,
    security: Option<Arc<Security>>,
) -> Result<(), DaemonError> {
    let mut term = signal(SignalKind::terminate()).map_err(|e| DaemonError::Running(e.to_string()))?;
    let mut int = signal(SignalKind::interrupt()).map_err(|e| DaemonError::Running(e.to_string()))?;
    let mut hup = signal(SignalKind::hangup()).map_err(|e| DaemonError::Running(e.to_string()))?;
    let reloads = security.clone();
    let reload = async move {
        while hup.recv().await.is_some() {
            if let Some(Err(error)) = reloads.as_ref().map(|security| security.reload()) {
                tracing::error!(%error, "users and certificates stay as they were");
            }
        }
        std::future::pending::<()>().await;
    };
    let server = match security {
        Some(security) => {
            let forever = std::future::pending();
            tokio::spawn(spotq_engine::serve_secured(engine, listener, security, forever))
        }
        None => tokio::spawn(spotq_engine::serve(engine, listener, std::future::pending())),
    };
    let ended = tokio::select! {
        () = reload => Ok(()),
        _ = term.recv() => Ok(()),
        _ = int.recv() => Ok(()),
        failed = engine.failed() => match failed {
            Ok(()) => Err(DaemonError::Running("the engine ended".into())),
            Err(error) => Err(DaemonError::Running(format!("the store failed: {error}"))),
        },
    };
    server.abort();
    ended
}

/// Nodes that work go on without us and wait for the next scheduler; without any, nothing is left running.
async fn farewell(engine: Running, cloud: &LocalCloud) {
    // An engine that failed cannot say; then its nodes are left alone for the next one.
    let busy = engine.handle.query(|seen| seen.cluster.active.len()).await.ok();
    // What was acknowledged is durable; an error here was reported when it happened.
    let _ = engine.stop().await;
    if busy == Some(0) {
        if let Err(refusal) = cloud.shutdown().await {
            tracing::warn!(refusal.message, "the local cloud did not end");
        }
    } else {
        tracing::info!(
            "jobs that run keep their nodes; start spotqd again with this data directory within {} minutes",
            DEAD_MAN.as_secs() / 60
        );
    }
}

fn announce(address: SocketAddr) {
    let mut stdout = std::io::stdout().lock();
    // A closed stdout is no reason not to serve.
    let _ = writeln!(stdout, "listening on {address}").and_then(|()| stdout.flush());
}

/// Without identities only loopback is served; with them, only what the certificate is for.
async fn listen(address: &str, security: Option<&Security>) -> Result<TcpListener, DaemonError> {
    let resolved: Vec<SocketAddr> =
        tokio::net::lookup_host(address).await.map_err(|e| listen_error(address, &e))?.collect();
    let beyond = resolved.iter().copied().find(|a| !a.ip().is_loopback());
    if let (Some(address), None) = (beyond, security) {
        return Err(DaemonError::NotLoopback { address });
    }
    TcpListener::bind(resolved.as_slice()).await.map_err(|e| listen_error(address, &e))
}

/// Identities and certificates, if `spotqd init` has made them.
fn security(
    data: &Path,
    secret: &ClusterSecret,
    sealer: Sealer,
) -> Result<Option<Arc<Security>>, DaemonError> {
    let made = Security::directory(data).try_exists().map_err(|error| data_error(data, &error))?;
    if !made {
        return Ok(None);
    }
    let security = Security::open(data, secret, sealer).map_err(|error| data_error(data, &error))?;
    Ok(Some(Arc::new(security)))
}

/// How workers of this machine reach us.
fn server_url(address: SocketAddr, secured: bool) -> String {
    let scheme = if secured { "https" } else { "http" };
    let ip = match address.ip() {
        ip if !ip.is_unspecified() => ip,
        std::net::IpAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
        std::net::IpAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
    };
    format!("{scheme}://{}", SocketAddr::new(ip, address.port()))
}

fn listen_error(address: &str, error: &std::io::Error) -> DaemonError {
    let detail = match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            "the port is in use by another process; end it or choose another port with --listen".to_owned()
        }
        std::io::ErrorKind::PermissionDenied => "not permitted; choose a port above 1023".to_owned(),
        std::io::ErrorKind::InvalidInput => "expected HOST:PORT, such as 127.0.0.1:7470".to_owned(),
        _ => error.to_string(),
    };
    DaemonError::Listen { address: address.to_owned(), detail }
}

pub(crate) fn data_dir(path: &Path) -> Result<PathBuf, DaemonError> {
    // Jobs' outputs and checkpoints are their owner's alone. A directory that is there already stays as it is.
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.and_then(|()| path.canonicalize()).map_err(|error| {
        let hint = match error.kind() {
            std::io::ErrorKind::AlreadyExists | std::io::ErrorKind::NotADirectory => {
                "it is not a directory; choose another with --data".to_owned()
            }
            std::io::ErrorKind::ReadOnlyFilesystem => "the file system is read-only".to_owned(),
            std::io::ErrorKind::StorageFull => "the disk is full".to_owned(),
            _ => error.to_string(),
        };
        DaemonError::Data { path: path.to_owned(), detail: hint }
    })
}

/// Opening reads and checks everything, so it runs beside the runtime.
async fn open_store(path: PathBuf) -> Result<SledStore, DaemonError> {
    let at = path.clone();
    let opened = tokio::task::spawn_blocking(move || SledStore::open(&path, SledOptions::default())).await;
    opened.map_err(|error| DaemonError::Running(error.to_string()))?.map_err(|error| data_error(&at, &error))
}

/// A directory as a URL: a `#` or `%` in its name must not mean something else.
fn directory_url(path: &Path) -> Result<String, DaemonError> {
    let url = url::Url::from_file_path(path);
    url.map(String::from).map_err(|()| data_error(path, &"its name cannot be part of a URL"))
}

fn data_error(path: &Path, error: &dyn std::fmt::Display) -> DaemonError {
    DaemonError::Data { path: path.to_owned(), detail: error.to_string() }
}

fn cluster_name(config: &Config, secret: &[u8; 32]) -> String {
    let drawn = || format!("local-{}", &blake3::keyed_hash(secret, b"cluster name").to_hex()[..8]);
    config.cluster.clone().unwrap_or_else(drawn)
}

fn worker_variables(security: Option<&Security>) -> BTreeMap<String, String> {
    let ours = std::env::vars().filter(|(name, _)| name.starts_with(STORE_VARIABLES));
    let store = ours.map(|(name, value)| (format!("{}{name}", spotq_worker::STORE_PREFIX), value));
    let ca = security.map(|security| (CA_VARIABLE.to_owned(), security.ca_pem().to_string()));
    store.chain(ca).collect()
}

pub(crate) fn start_logging() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("SPOTQ_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    // Somebody else's subscriber stays: this may be a library in a larger program.
    let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let log =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colours);
    let _ = log.try_init();
}

#[expect(clippy::print_stderr, reason = "the last word of a daemon that cannot go on")]
pub(crate) fn say(error: &DaemonError) -> ExitCode {
    eprintln!("spotqd: {error}");
    ExitCode::from(error.exit_code())
}
