//! The state of the simulated cloud and what its control API does to it.
//!
//! One mutex holds all nodes; it is held for moments and never across an await. A node's life runs in a task of
//! its own (`node`), which looks at the record again whenever it is nudged. What is answered to a caller is on
//! disk first.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};
use spotq_model::{
    Cloud as CloudName, EffectKey, InstanceId, NodeId, Offer, Pool, Refusal, RefusalKind, Scope, Span,
    Timestamp,
};
use spotq_provider::{
    CHANGES_KEPT, GoneCause, Instance, InstanceChange, InstanceState, Launched, TAG_CLUSTER, TAG_NODE,
    TerminateState,
};
use tokio::sync::watch;
use uuid::Uuid;

use crate::control::{ChangesReply, LaunchBody, MarketBody};
use crate::metadata::{self, Facts, Notice, Service};
use crate::node::{self, Start};
use crate::record::{NodeDirs, NodeRecord, write_whole};
use crate::tree::{Cgroups, Watched, kill_tree};
use crate::{CloudConfig, LocalError, Market, MarketConfig};

/// More live nodes than this is a mistake on one machine; each is a process tree and a listening port.
const MAX_LIVE_NODES: usize = 256;
/// Ended nodes that are remembered, so that their keys still answer with them.
const GONE_KEPT: usize = 500;
/// Client tokens are at most this long in every cloud.
const MAX_KEY: usize = 64;
/// How soon a full disk or a full port range may be better.
const LOCAL_FAULT_COOL_DOWN: Span = Span::secs(5);

/// The simulated cloud.
#[derive(Debug)]
pub struct Cloud {
    pub seed: u64,
    /// Names this run of the process; positions in the stream of changes are of one run.
    pub run: String,
    pub dirs: NodeDirs,
    pub cgroups: Cgroups,
    /// Program of the nodes.
    pub worker: PathBuf,
    pub terminate_grace: Duration,
    azure_first_call: Duration,
    /// When the market opened.
    epoch: Timestamp,
    inner: Mutex<Inner>,
    latest: watch::Sender<u64>,
    stage: watch::Sender<Stage>,
}

/// How far the cloud's own end has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Open,
    /// Nodes are being ended; nothing is launched any more.
    Ending,
    /// Nothing is left; the process may end.
    Closed,
}

#[derive(Debug)]
struct Inner {
    nodes: BTreeMap<InstanceId, Node>,
    by_key: BTreeMap<EffectKey, InstanceId>,
    gone: VecDeque<InstanceId>,
    changes: VecDeque<(u64, InstanceChange)>,
    /// Refusals that a test ordered, for the next launches that they cover.
    ordered: Vec<Refusal>,
    market: Market,
    boot: Duration,
    last_call: Instant,
}

#[derive(Debug)]
struct Node {
    record: NodeRecord,
    nudge: watch::Sender<()>,
    service: Arc<Service>,
}

/// What a node's task works with.
#[derive(Debug, Clone)]
pub struct Handle {
    pub record: NodeRecord,
    pub nudge: watch::Receiver<()>,
    pub service: Arc<Service>,
}

#[derive(Debug, Serialize, Deserialize)]
struct MarketFile {
    seed: u64,
    epoch: Timestamp,
}

impl Cloud {
    /// Opens a cloud on its directory and takes over the nodes that an earlier process left there.
    ///
    /// # Errors
    /// When the directory cannot be read or written.
    pub fn open(
        dir: &Path,
        seed: u64,
        config: &CloudConfig,
        worker: PathBuf,
    ) -> Result<Arc<Self>, LocalError> {
        let dirs = NodeDirs::open(dir)?;
        let epoch = market_epoch(dir, seed)?;
        let name = blake3::hash(dir.as_os_str().as_encoded_bytes()).to_hex()[..12].to_owned();
        let cloud = Arc::new(Cloud {
            seed,
            run: Uuid::new_v4().simple().to_string(),
            dirs,
            cgroups: Cgroups::detect(&name),
            worker,
            terminate_grace: Duration::from_millis(config.terminate_grace_ms),
            azure_first_call: Duration::from_millis(config.azure_first_call_ms),
            epoch,
            inner: Mutex::new(Inner {
                nodes: BTreeMap::new(),
                by_key: BTreeMap::new(),
                gone: VecDeque::new(),
                changes: VecDeque::new(),
                ordered: Vec::new(),
                market: Market::new(seed, config.market.clone()),
                boot: Duration::from_millis(config.boot_ms),
                last_call: Instant::now(),
            }),
            latest: watch::Sender::new(0),
            stage: watch::Sender::new(Stage::Open),
        });
        cloud.take_over()?;
        Ok(cloud)
    }

    /// Every pool at its price of now.
    pub fn offers(&self) -> Vec<Offer> {
        self.inner().market.offers(self.epoch, self.age())
    }

    /// Starts a node, or answers with the one that the key has started.
    pub fn launch(self: &Arc<Self>, body: LaunchBody) -> Result<Launched, Refusal> {
        let mut inner = self.inner();
        if let Some(known) = inner.by_key.get(&body.key).and_then(|id| inner.nodes.get(id)) {
            return Ok(known.record.launched());
        }
        let quote = self.may_launch(&mut inner, &body)?;
        let instance = new_instance_id(body.pool.cloud);
        let seen = Instance {
            instance: instance.clone(),
            key: body.key.clone(),
            node: body.tags.get(TAG_NODE).and_then(|n| n.parse().ok()).map(NodeId),
            state: InstanceState::Pending,
            pool: body.pool.clone(),
            launched_at: now(),
        };
        let cluster = body.tags.get(TAG_CLUSTER).cloned().unwrap_or_default();
        let record = NodeRecord::new(seen, cluster, quote, body.expires_at);
        let launched = record.launched();
        let start = Start::Boot { body: Box::new(body.clone()), wait: inner.boot };
        self.insert(&mut inner, record, start).map_err(|error| local_fault(&body.pool, &error))?;
        inner.publish(&self.latest, &instance);
        Ok(launched)
    }

    /// Every node of a cluster, with those that ended lately.
    pub fn list(&self, cluster: &str) -> Vec<Instance> {
        let inner = self.inner();
        inner.nodes.values().filter(|n| n.record.cluster == cluster).map(|n| n.record.seen.clone()).collect()
    }

    /// Begins the end of a node; repeat until `Gone`.
    pub fn terminate(&self, instance: &InstanceId) -> TerminateState {
        let ask = |record: &mut NodeRecord| record.ending = record.ending.or(Some(GoneCause::Terminated));
        match self.change(instance, ask) {
            None | Some(InstanceState::Gone { .. }) => TerminateState::Gone,
            Some(InstanceState::Pending | InstanceState::Running | InstanceState::Ending) => {
                TerminateState::Ending
            }
        }
    }

    /// Announces that the node is taken away after `notice`; an earlier deadline stays.
    pub fn interrupt(&self, instance: &InstanceId, notice: Span) -> Result<(), Refusal> {
        let told_at = now();
        let deadline = told_at + notice;
        let state = self.change(instance, |record| {
            let standing = record.notice.filter(|n| n.told_at <= told_at && n.deadline <= deadline);
            let notice = standing.unwrap_or(Notice { told_at, deadline });
            record.notice = Some(notice);
        });
        self.tell_metadata(instance);
        found(state, instance)
    }

    /// Takes a notice back.
    pub fn withdraw(&self, instance: &InstanceId) -> Result<(), Refusal> {
        let state = self.change(instance, |record| record.notice = None);
        self.tell_metadata(instance);
        found(state, instance)
    }

    /// Changes the market or orders a refusal, for tests and demonstrations.
    pub fn order(&self, body: MarketBody) -> Result<(), String> {
        let mut inner = self.inner();
        if let Some(market) = body.market {
            MarketConfig::check(&market)?;
            inner.market = Market::new(self.seed, market);
        }
        if let Some(ms) = body.boot_ms {
            inner.boot = Duration::from_millis(ms);
        }
        inner.ordered.extend(body.refuse_next);
        Ok(())
    }

    /// The changes after a position, or, for a caller without one, the present position. A caller that was
    /// connected to an earlier run gets all that this run has seen.
    pub fn changes_since(&self, run: Option<&str>, position: u64) -> ChangesReply {
        let inner = self.inner();
        let next = *self.latest.borrow();
        let from = match run {
            None => next,
            Some(run) if run == self.run => position,
            Some(_) => 0,
        };
        let changes =
            inner.changes.iter().filter(|(n, _)| *n > from).map(|(_, change)| change.clone()).collect();
        ChangesReply { run: self.run.clone(), next, changes }
    }

    /// Resolves when there are changes after `position`, or when the cloud is closing.
    pub async fn wait_for_changes(&self, position: u64) {
        let (mut latest, mut stage) = (self.latest.subscribe(), self.stage.subscribe());
        tokio::select! {
            _ = latest.wait_for(|n| *n > position) => {}
            _ = stage.wait_for(|stage| *stage == Stage::Closed) => {}
        }
    }

    /// A client called; the cloud is in use.
    pub fn touch(&self) {
        self.inner().last_call = Instant::now();
    }

    /// How long nobody has called, if no node is alive and nobody waits for changes.
    pub fn idle_for(&self) -> Option<Duration> {
        let inner = self.inner();
        let idle =
            self.latest.receiver_count() == 0 && inner.nodes.values().all(|n| n.record.seen.state.is_gone());
        idle.then(|| inner.last_call.elapsed())
    }

    /// Ends every node, waits until all are gone, and lets the process end.
    pub async fn close(&self) {
        self.stage.send_replace(Stage::Ending);
        let live: Vec<InstanceId> = {
            let inner = self.inner();
            let live = inner.nodes.values().filter(|n| !n.record.seen.state.is_gone());
            live.map(|n| n.record.seen.instance.clone()).collect()
        };
        let mut latest = self.latest.subscribe();
        for instance in &live {
            self.terminate(instance);
        }
        let all_gone = || live.iter().all(|id| self.handle(id).is_none_or(|h| h.record.seen.state.is_gone()));
        // Each node's ending is bounded by itself, so this loop is as well.
        while !all_gone() {
            if latest.changed().await.is_err() {
                break;
            }
        }
        self.cgroups.remove();
        self.stage.send_replace(Stage::Closed);
    }

    /// Whether nodes can be launched.
    pub fn is_open(&self) -> bool {
        *self.stage.borrow() == Stage::Open
    }

    /// Resolves when the process may end.
    pub async fn closed(&self) {
        // The sender lives as long as `self`.
        let _ = self.stage.subscribe().wait_for(|stage| *stage == Stage::Closed).await;
    }

    /// The market's plan for a node.
    pub fn fate(&self, record: &NodeRecord) -> Option<crate::Fate> {
        self.inner().market.fate(record.seen.node.unwrap_or_default(), &record.seen.pool)
    }

    /// What a node's task works with; `None` if the node is forgotten.
    pub fn handle(&self, instance: &InstanceId) -> Option<Handle> {
        let inner = self.inner();
        let node = inner.nodes.get(instance)?;
        Some(Handle {
            record: node.record.clone(),
            nudge: node.nudge.subscribe(),
            service: node.service.clone(),
        })
    }

    /// Changes a record, saves it, tells the world if its state changed, and nudges its task. Answers the state
    /// after the change, or `None` if there is no such node. A gone node never changes.
    pub fn change(
        &self,
        instance: &InstanceId,
        change: impl FnOnce(&mut NodeRecord),
    ) -> Option<InstanceState> {
        let mut inner = self.inner();
        let node = inner.nodes.get_mut(instance)?;
        let before = node.record.seen.state;
        if before.is_gone() {
            return Some(before);
        }
        change(&mut node.record);
        let after = node.record.seen.state;
        if let Err(error) = self.dirs.save(&node.record) {
            // The node lives on in memory; a restarted cloud would see its older record and end it by that.
            tracing::error!(%error, %instance, "a node's record could not be saved; free some disk space");
        }
        node.nudge.send_replace(());
        if after != before {
            inner.publish(&self.latest, instance);
        }
        if after.is_gone() {
            self.retire(&mut inner, instance);
        }
        Some(after)
    }

    /// The quote of a launch that may happen, or why it may not.
    fn may_launch(&self, inner: &mut Inner, body: &LaunchBody) -> Result<spotq_model::Quote, Refusal> {
        let pool = &body.pool;
        let invalid = |message: String| refusal(RefusalKind::InvalidRequest, pool, Span::secs(3600), message);
        let age = self.age();
        let Some(quote) = inner.market.quote(pool, self.epoch, age) else {
            return Err(invalid(format!("no such pool: {pool}")));
        };
        if body.key.0.is_empty() || body.key.0.len() > MAX_KEY || !body.key.0.is_ascii() {
            return Err(invalid(format!("a client token has 1 to {MAX_KEY} ASCII characters")));
        }
        if body.expires_at <= now() {
            return Err(invalid("the time-to-live of the node has passed already".into()));
        }
        if !self.is_open() {
            let message = "the local cloud is shutting down".into();
            return Err(refusal(RefusalKind::Transient, pool, LOCAL_FAULT_COOL_DOWN, message));
        }
        if let Some(at) = inner.ordered.iter().position(|r| r.scope.covers(pool)) {
            return Err(inner.ordered.remove(at));
        }
        if inner.nodes.values().filter(|n| !n.record.seen.state.is_gone()).count() >= MAX_LIVE_NODES {
            let message = format!("this machine holds at most {MAX_LIVE_NODES} simulated nodes");
            let scope = Scope::Cloud { cloud: pool.cloud };
            return Err(Refusal {
                kind: RefusalKind::QuotaExceeded,
                scope,
                cool_down: Span::secs(60),
                message,
            });
        }
        inner.market.refusal(pool, age).map_or(Ok(quote), Err)
    }

    /// Makes a node known and starts its task.
    fn insert(
        self: &Arc<Self>,
        inner: &mut Inner,
        mut record: NodeRecord,
        start: Start,
    ) -> Result<(), LocalError> {
        let instance = record.seen.instance.clone();
        let service = Service::new(Facts {
            instance: instance.clone(),
            pool: record.seen.pool.clone(),
            launched_at: record.seen.launched_at,
            first_call: self.azure_first_call,
        });
        // A node that was taken over knows its service by this port; a new node takes any.
        let listener = metadata::bind(record.metadata_port).or_else(|error| {
            tracing::warn!(%error, %instance, "the node cannot reach its metadata service any more");
            metadata::bind(0)
        })?;
        let dir = self.dirs.of(&instance);
        let port =
            listener.local_addr().map_err(LocalError::io("bind the metadata service of", &dir))?.port();
        record.metadata_port = port;
        let serving =
            service.clone().serve(listener).map_err(LocalError::io("serve the metadata of", &dir))?;
        if let Err(error) = self.dirs.save(&record) {
            serving.abort();
            return Err(LocalError::io("write", &dir)(error));
        }
        inner.by_key.insert(record.seen.key.clone(), instance.clone());
        inner.nodes.insert(instance.clone(), Node { record, nudge: watch::Sender::new(()), service });
        let cloud = self.clone();
        tokio::spawn(async move {
            node::live(cloud, instance, start).await;
            serving.abort();
        });
        Ok(())
    }

    fn take_over(self: &Arc<Self>) -> Result<(), LocalError> {
        let (records, corrupt) = self.dirs.load()?;
        let mut inner = self.inner();
        for record in records {
            let instance = record.seen.instance.clone();
            if record.seen.state.is_gone() {
                inner.remember_gone(record);
                continue;
            }
            let worker = record.process.and_then(Watched::open);
            tracing::info!(%instance, alive = worker.is_some(), "a node of an earlier process is taken over");
            let expected_port = record.metadata_port;
            self.insert(&mut inner, record, Start::TakenOver { worker })?;
            tracing::debug!(%instance, expected_port, "its metadata service is back");
        }
        drop(inner);
        for instance in corrupt {
            // Nobody knows what this node was, so nobody could ever end it: it is ended now.
            let cgroup = self.cgroups.existing(&instance.0);
            tokio::spawn(async move { kill_tree(&instance.0, cgroup.as_deref()).await });
        }
        Ok(())
    }

    /// Lets the oldest of the gone nodes be forgotten.
    fn retire(&self, inner: &mut Inner, instance: &InstanceId) {
        inner.gone.push_back(instance.clone());
        while inner.gone.len() > GONE_KEPT {
            let Some(oldest) = inner.gone.pop_front() else { break };
            if let Some(node) = inner.nodes.remove(&oldest) {
                inner.by_key.remove(&node.record.seen.key);
            }
            self.dirs.forget(&oldest);
        }
    }

    /// Brings the metadata service in line with the record. An interruption without notice is never told.
    fn tell_metadata(&self, instance: &InstanceId) {
        let Some(handle) = self.handle(instance) else { return };
        match handle.record.notice.filter(|n| n.told_at <= now() && n.told_at < n.deadline) {
            Some(notice) => handle.service.announce(notice),
            None => handle.service.withdraw(),
        }
    }

    fn age(&self) -> Span {
        now().since(self.epoch)
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // Every change of the state is complete before anything in it can panic.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn publish(&mut self, latest: &watch::Sender<u64>, instance: &InstanceId) {
        let Some(node) = self.nodes.get(instance) else { return };
        let seen = &node.record.seen;
        tracing::info!(%instance, state = ?seen.state, pool = %seen.pool, "node");
        let change = InstanceChange { instance: instance.clone(), node: seen.node, state: seen.state };
        let next = *latest.borrow() + 1;
        self.changes.push_back((next, change));
        if self.changes.len() > CHANGES_KEPT {
            self.changes.pop_front();
        }
        latest.send_replace(next);
    }

    fn remember_gone(&mut self, record: NodeRecord) {
        let seen = record.seen.clone();
        let service = Service::new(Facts {
            instance: seen.instance.clone(),
            pool: seen.pool,
            launched_at: seen.launched_at,
            first_call: Duration::ZERO,
        });
        self.by_key.insert(seen.key, seen.instance.clone());
        self.gone.push_back(seen.instance.clone());
        self.nodes.insert(seen.instance, Node { record, nudge: watch::Sender::new(()), service });
    }
}

/// The time of now.
pub fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Timestamp(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

/// When the market of this directory opened; prices go on where they were after a restart.
fn market_epoch(dir: &Path, seed: u64) -> Result<Timestamp, LocalError> {
    let path = dir.join("market.json");
    let kept = std::fs::read(&path).ok().and_then(|bytes| serde_json::from_slice::<MarketFile>(&bytes).ok());
    if let Some(kept) = kept.filter(|kept| kept.seed == seed) {
        return Ok(kept.epoch);
    }
    let file = MarketFile { seed, epoch: now() };
    let bytes = serde_json::to_vec(&file).expect("two numbers always serialize");
    write_whole(&path, &bytes).map_err(LocalError::io("write", &path))?;
    Ok(file.epoch)
}

/// In the shape of the cloud's own ids, and never used twice: the id also marks the node's processes.
fn new_instance_id(cloud: CloudName) -> InstanceId {
    let unique = Uuid::new_v4().simple().to_string();
    InstanceId(match cloud {
        CloudName::Aws => format!("i-{}", &unique[..17]),
        CloudName::Gcp => format!("spotq-{}", &unique[..16]),
        CloudName::Azure => format!("spotq-vm-{}", &unique[..16]),
    })
}

fn refusal(kind: RefusalKind, pool: &Pool, cool_down: Span, message: String) -> Refusal {
    Refusal { kind, scope: Scope::Pool { pool: pool.clone() }, cool_down, message }
}

fn local_fault(pool: &Pool, error: &LocalError) -> Refusal {
    refusal(RefusalKind::Transient, pool, LOCAL_FAULT_COOL_DOWN, error.to_string())
}

fn found(state: Option<InstanceState>, instance: &InstanceId) -> Result<(), Refusal> {
    match state {
        Some(InstanceState::Pending | InstanceState::Running | InstanceState::Ending) => Ok(()),
        None | Some(InstanceState::Gone { .. }) => Err(Refusal {
            kind: RefusalKind::NotFound,
            scope: Scope::Cloud { cloud: CloudName::Aws },
            cool_down: Span::ZERO,
            message: format!("no live instance {instance}"),
        }),
    }
}
