//! A node: the real worker on a simulated host, and what it finds around itself there.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use spotq_checkpoint::{CheckpointError, JobKey, Options, Repository};
use spotq_model::{Cloud, Span, Timestamp};
use spotq_proto::tls::{TlsError, Trust};
use spotq_provider::InstanceState;
use spotq_worker::simulation::{
    Bootstrap, CloudSays, Config, Launch, Processes, Quiet, Started, Surroundings, WatchConfig, run_in,
};
use tokio::sync::{mpsc, watch};
use tonic::transport::{Channel, Endpoint};

use crate::counts::Count;
use crate::draw::START;
use crate::faults::Ev;
use crate::net::{self, Dial};
use crate::objects::SimObjects;
use crate::trainer::{self, Nobody};
use crate::world::World;

/// How often the worker asks for notices.
const POLL: Duration = Duration::from_millis(500);
/// Requests to shut down that may wait.
const TERMINATE_MAX: usize = 4;
/// A node whose worker has left powers itself off.
const POWER_OFF_MS: u64 = 500;

/// A host that nodes come to, one after the other.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    /// The instance that it is now.
    pub inst: Option<usize>,
    /// Asks its worker to end.
    pub terminate: Option<mpsc::Sender<()>>,
    /// Its worker's process runs.
    pub runs: bool,
}

/// What runs on the host: the worker of the instance that it is now, if it is one.
pub(crate) async fn run(world: World, slot: usize) -> turmoil::Result {
    let (terminate, terminated) = mpsc::channel(TERMINATE_MAX);
    let started = {
        let inner = &mut *world.lock();
        let Some(inst) = inner.slots[slot].inst else { return Ok(()) };
        if inner.cloud.insts[inst].state != InstanceState::Running {
            return Ok(());
        }
        inner.slots[slot].terminate = Some(terminate);
        let dir = inner.dir.join(format!("node-{inst}"));
        let node = &mut inner.cloud.insts[inst];
        node.starts += 1;
        // What is handed over at a node's first boot may not be there at the second.
        let known = node.starts == 1 || inner.rng.percent(50);
        let node = &inner.cloud.insts[inst];
        let bootstrap = match known {
            true => Bootstrap {
                join_secret: node.bootstrap.join_secret.expose().to_owned(),
                env: node.bootstrap.env.clone(),
            },
            false => Bootstrap::default(),
        };
        (inst, dir, config(node, bootstrap))
    };
    let (inst, dir, mut config) = started;
    std::fs::create_dir_all(&dir)?;
    config.dir = dir;
    let around = Arc::new(Around { world: world.clone(), inst });
    let departure = run_in(config, around, terminated).await;
    {
        let inner = &mut *world.lock();
        match departure {
            Ok(departure) => {
                inner.count(Count::WorkerLeft);
                inner.say(|| format!("worker of i-{inst} leaves: {departure:?}"));
            }
            Err(error) => inner.violated("INV-12", format!("the worker of i-{inst} cannot begin: {error}")),
        }
        inner.cloud.insts[inst].touched = true;
        inner.after(POWER_OFF_MS, Ev::Gone { inst, cause: spotq_model::GoneCause::Crashed });
    }
    // The process is gone; its host goes on until it is switched off.
    drop(world);
    std::future::pending().await
}

fn config(node: &crate::cloud::Inst, bootstrap: Bootstrap) -> Config {
    let instance = node.id.0.clone();
    Config {
        server: net::server_url(),
        node: node.node.0,
        instance: instance.clone(),
        dir: PathBuf::new(),
        bootstrap,
        watch: Some(WatchConfig::new(Cloud::Aws, None, &instance)),
        quiet: Quiet { calm: Span::millis(900), hurried: Span::millis(300) },
        no_cgroups: true,
        exe: PathBuf::from("/usr/bin/spotq-worker"),
    }
}

/// The surroundings of one worker.
#[derive(Debug)]
struct Around {
    world: World,
    inst: usize,
}

impl Surroundings for Around {
    fn start(&self, launch: &Launch<'_>) -> Result<Started, String> {
        trainer::start(&self.world, self.inst, launch)
    }

    fn nobody(&self, _: &str) -> Arc<dyn Processes> {
        Arc::new(Nobody)
    }

    fn clean(&self, _: String) -> BoxFuture<'static, Option<String>> {
        // The commands of a worker that crashed were ended with it.
        async { None }.boxed()
    }

    fn dial(&self, endpoint: Endpoint, _: Trust) -> BoxFuture<'static, Result<Channel, TlsError>> {
        async move { Ok(endpoint.connect_with_connector(Dial).await?) }.boxed()
    }

    fn open_store(
        &self,
        url: &str,
        key: JobKey,
        _: &BTreeMap<String, String>,
    ) -> Result<Repository, CheckpointError> {
        let prefix = url.split_once("://").map_or(url, |(_, prefix)| prefix);
        let store = SimObjects::new(&self.world, self.inst);
        Ok(Repository::open(store, object_store::path::Path::from(prefix), key, Options::default()))
    }

    fn watch(
        &self,
        _: WatchConfig,
        tell: mpsc::Sender<CloudSays>,
        _: watch::Receiver<bool>,
    ) -> BoxFuture<'static, ()> {
        let (world, inst) = (self.world.clone(), self.inst);
        async move {
            let mut told = None;
            loop {
                let notice = world.lock().cloud.insts[inst].notice;
                if notice != told {
                    told = notice;
                    let says = match notice {
                        Some(at) => CloudSays::Notice {
                            deadline: Timestamp(START + at),
                            source: "simulated".to_owned(),
                        },
                        None => CloudSays::Withdrawn,
                    };
                    if tell.send(says).await.is_err() {
                        return;
                    }
                }
                tokio::time::sleep(POLL).await;
            }
        }
        .boxed()
    }
}

/// Where a command finds its things, by the environment that it was given.
pub(crate) fn place(launch: &Launch<'_>, variable: &str) -> PathBuf {
    launch.env.get(std::ffi::OsStr::new(variable)).map(|text| Path::new(text).to_owned()).unwrap_or_default()
}
