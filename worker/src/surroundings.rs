//! What a worker finds around itself: processes that it can start, a way to its scheduler, checkpoint stores, and the
//! cloud's word about the node.
//!
//! The only implementation in the product is [`Node`]: the machine that the worker runs on. A simulation has its own,
//! so that everything else of the worker is the same there. Nothing here decides anything.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use rustix::process::Signal;
use spotq_checkpoint::{CheckpointError, JobKey, Options, Repository};
use spotq_proto::tls::{self, TlsError, Trust};
use tokio::sync::{mpsc, watch};
use tonic::transport::{Channel, Endpoint};

use crate::notice::{self, CloudSays, WatchConfig};
use crate::process::{self, Ended, Launch, Pumps};
use crate::tree::{self, Tree};
use crate::{cgroup, environment};

/// See the module.
pub trait Surroundings: Send + Sync + Debug {
    /// Starts a process of an attempt, with its output going to the attempt's log.
    ///
    /// # Errors
    /// What a person can act on, such as a working directory that does not exist.
    fn start(&self, launch: &Launch<'_>) -> Result<Started, String>;

    /// The processes of an attempt that has started none yet.
    fn nobody(&self, mark: &str) -> Arc<dyn Processes>;

    /// Ends what earlier workers of this node left behind: whatever has a mark that starts with `mark_prefix`. Says what
    /// could not be ended.
    fn clean(&self, mark_prefix: String) -> BoxFuture<'static, Option<String>>;

    /// Connects to the scheduler.
    fn dial(&self, endpoint: Endpoint, trust: Trust) -> BoxFuture<'static, Result<Channel, TlsError>>;

    /// Opens a checkpoint store. `given` are variables for its client alone.
    ///
    /// # Errors
    /// Those of [`Repository::from_url`].
    fn open_store(
        &self,
        url: &str,
        key: JobKey,
        given: &BTreeMap<String, String>,
    ) -> Result<Repository, CheckpointError>;

    /// Watches for the cloud's notices until nobody listens; `durable` turns true when it may take the node.
    fn watch(
        &self,
        config: WatchConfig,
        tell: mpsc::Sender<CloudSays>,
        durable: watch::Receiver<bool>,
    ) -> BoxFuture<'static, ()>;
}

/// The processes of one attempt.
pub trait Processes: Send + Sync + Debug {
    /// Those that live.
    fn members(&self) -> BTreeSet<u32>;
    /// Those that train, and so get the save signal.
    fn ranks(&self, signal: Signal) -> BTreeSet<u32>;
    /// The one that was started.
    fn launcher(&self) -> Option<u32>;
    /// One that is gone already is no error.
    fn signal(&self, pids: BTreeSet<u32>, signal: Signal);
    /// Whether one of them has a file under `dir` open for writing.
    fn has_writer(&self, dir: &Path) -> bool;
    /// Kills until nothing is left. Says what survived, if anything did.
    fn kill(&self) -> BoxFuture<'static, Option<String>>;
    /// Nothing of the attempt runs any more.
    fn is_over(&self);
}

/// A process that was started.
pub struct Started {
    pub pid: u32,
    pub processes: Arc<dyn Processes>,
    /// Resolves when it has ended; others of its tree may still run.
    pub ended: BoxFuture<'static, Ended>,
    pub pumps: Pumps,
}

impl Debug for Started {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Started").field("pid", &self.pid).finish_non_exhaustive()
    }
}

/// The machine that this worker runs on.
#[derive(Debug, Clone, Copy)]
pub struct Node;

impl Surroundings for Node {
    fn start(&self, launch: &Launch<'_>) -> Result<Started, String> {
        let (process, pumps) = process::start(launch)?;
        let (pid, processes) = (process.pid, Arc::new(process.tree.clone()));
        Ok(Started { pid, processes, ended: process.wait().boxed(), pumps })
    }

    fn nobody(&self, mark: &str) -> Arc<dyn Processes> {
        Arc::new(Tree { mark: mark.to_owned(), launcher: None, cgroups: Vec::new() })
    }

    fn clean(&self, mark_prefix: String) -> BoxFuture<'static, Option<String>> {
        async move {
            let problem = tree::kill_leftovers(&mark_prefix).await;
            cgroup::remove_leftovers(&mark_prefix);
            problem
        }
        .boxed()
    }

    fn dial(&self, endpoint: Endpoint, trust: Trust) -> BoxFuture<'static, Result<Channel, TlsError>> {
        async move { tls::connect(endpoint, &trust).await }.boxed()
    }

    fn open_store(
        &self,
        url: &str,
        key: JobKey,
        given: &BTreeMap<String, String>,
    ) -> Result<Repository, CheckpointError> {
        let given = given.iter().map(|(name, value)| (name.into(), value.into()));
        let env = environment::of_store(std::env::vars_os().chain(given));
        Repository::from_url(url, key, env, Options::default())
    }

    fn watch(
        &self,
        config: WatchConfig,
        tell: mpsc::Sender<CloudSays>,
        durable: watch::Receiver<bool>,
    ) -> BoxFuture<'static, ()> {
        notice::watch(config, tell, durable).boxed()
    }
}

impl Processes for Tree {
    fn members(&self) -> BTreeSet<u32> {
        self.members_quickly()
    }

    fn ranks(&self, signal: Signal) -> BTreeSet<u32> {
        Tree::ranks(self, signal)
    }

    fn launcher(&self) -> Option<u32> {
        self.launcher
    }

    fn signal(&self, pids: BTreeSet<u32>, signal: Signal) {
        Tree::signal(pids, signal);
    }

    fn has_writer(&self, dir: &Path) -> bool {
        // Links in `/proc` are spelled without links on the way.
        let real = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
        tree::has_writer(&self.members_quickly(), &real)
    }

    fn kill(&self) -> BoxFuture<'static, Option<String>> {
        let tree = self.clone();
        async move { tree.kill().await }.boxed()
    }

    fn is_over(&self) {
        tree::is_over(&self.mark);
    }
}
