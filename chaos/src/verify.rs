//! What must hold after the faults, checked from outside: the jobs, their models, the processes, the clouds' own list,
//! and the books, which are computed again from the history.
//!
//! Reports everything that it finds, not the first thing alone.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use sha2::{Digest as _, Sha256};
use spotq_core::{Cluster, apply, invariants};
use spotq_model::{EventRecord, Fact, NodeId, Usd};
use spotq_proto::v1;
use spotq_proto::v1::reports_client::ReportsClient;
use spotq_provider::{CloudProvider as _, Instance, InstanceState};
use spotq_provider_local::{CloudConfig, LocalCloud};
use spotq_testkit::wait_until;
use tonic::transport::Endpoint;

use crate::system::{CLUSTER, JobLine, Spotq, System, trainer_args};
use crate::victims;

/// Nodes without work are ended after their idle time, each with its grace.
const NODES_GONE_MAX: Duration = Duration::from_secs(60);
/// Jobs of which a violation tells more than the number.
const EXPLAINED: usize = 5;
/// A violation of one kind is told so often; a broken invariant breaks again with each event.
const TOLD_OF_A_KIND: usize = 3;

/// A report on thousands of segments, each with its pool and source in words.
const REPORT_BYTES_MAX: usize = 64 * 1024 * 1024;

/// Counts over the whole history.
#[derive(Debug, Clone, Default)]
pub struct Books {
    pub jobs: usize,
    pub attempts: usize,
    /// How attempts ended.
    pub ends: BTreeMap<String, u32>,
    pub nodes: usize,
    pub segments: usize,
    /// Nodes whose bill was compared with what the cloud says of their life.
    pub bills_compared: usize,
    pub billed: Usd,
    pub wasted: Usd,
}

#[derive(Debug, Default)]
pub(crate) struct Found {
    pub violations: Vec<String>,
    pub books: Books,
}

/// The hash of the model that the same training makes without a scheduler.
pub(crate) fn undisturbed_model(root: &Path, programs: &Path) -> anyhow::Result<String> {
    let dir = root.join("undisturbed");
    std::fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let trainer = programs.join("spotq-train");
    let mut command = Command::new(&trainer);
    command.args(trainer_args()).current_dir(&dir).stdin(Stdio::null()).stdout(Stdio::null());
    for name in ["SPOTQ_CHECKPOINT_DIR", "SPOTQ_PROGRESS_FILE", "SPOTQ_NOTICE_FILE", "SPOTQ_RESUME_FROM"] {
        command.env_remove(name);
    }
    let status = command.status().with_context(|| format!("cannot run {}", trainer.display()))?;
    ensure!(status.success(), "the undisturbed training ended with {status}");
    sha256(&dir.join("model.bin"))
}

/// Waits for the jobs, then looks at everything, then ends the system.
pub(crate) fn verify(
    system: &mut System,
    acknowledged: &BTreeMap<String, u32>,
    undisturbed: &str,
    calm: Duration,
) -> Found {
    let mut found = Found::default();
    let spotq = system.spotq();
    let checks = [
        jobs_end(&spotq, calm),
        jobs_completed(&spotq, acknowledged),
        models(&spotq, system.root(), acknowledged, undisturbed),
        nodes_end(system),
        books(system, &mut found.books),
        system.stop().map(|()| Vec::new()),
        leftovers(system),
        Ok(alarms(&system.log())),
    ];
    for check in checks {
        match check {
            Ok(violations) => found.violations.extend(violations),
            Err(error) => found.violations.push(format!("{error:#}")),
        }
    }
    found
}

type Violations = anyhow::Result<Vec<String>>;

fn jobs_end(spotq: &Spotq, calm: Duration) -> Violations {
    let mut open = Vec::new();
    let waited = wait_until(
        calm,
        || {
            // Nothing kills the scheduler any more, so no answer is no end.
            open = spotq.queue(&[]).ok().flatten().unwrap_or_else(|| open.clone());
            matches!(spotq.queue(&[]), Ok(Some(jobs)) if jobs.is_empty())
        },
        "the end of all jobs",
    );
    let Err(late) = waited else { return Ok(Vec::new()) };
    let why =
        open.iter().take(EXPLAINED).map(|job| format!("job {}: {}", job.job_id, spotq.explain(job.job_id)));
    Ok(std::iter::once(format!("{late}: {} are not done", open.len())).chain(why).collect())
}

/// INV-01, INV-04: an acknowledged job is there, once, and completed; so is one whose answer was lost.
fn jobs_completed(spotq: &Spotq, acknowledged: &BTreeMap<String, u32>) -> Violations {
    let jobs = spotq.queue(&["--all"])?.context("the scheduler does not answer")?;
    let by_id: BTreeMap<u32, &JobLine> = jobs.iter().map(|job| (job.job_id, job)).collect();
    let lost = acknowledged.iter().filter_map(|(key, id)| match by_id.get(id) {
        Some(job) if job.name == *key => None,
        Some(job) => Some(format!("INV-01: job {id} was acknowledged as `{key}` and is now `{}`", job.name)),
        None => Some(format!("INV-01: job {id} (`{key}`) was acknowledged and is lost")),
    });
    let mut names = BTreeSet::new();
    let doubled = jobs.iter().filter(|job| !names.insert(&job.name));
    let doubled = doubled.map(|job| format!("INV-04: `{}` was submitted once and is there twice", job.name));
    let bad = jobs.iter().filter(|job| job.outcome.as_deref() != Some("completed"));
    let bad =
        bad.map(|job| format!("job {} is {} ({}), not completed", job.job_id, job.phase, job.outcome_text));
    Ok(lost.chain(doubled).chain(bad).collect())
}

/// INV-05: whatever happened on the way, the model is the undisturbed one to the bit.
fn models(spotq: &Spotq, root: &Path, acknowledged: &BTreeMap<String, u32>, undisturbed: &str) -> Violations {
    let models = root.join("models");
    std::fs::create_dir(&models).with_context(|| format!("cannot make {}", models.display()))?;
    let mut violations = Vec::new();
    for job in acknowledged.values() {
        let dir = models.join(job.to_string());
        let hash = spotq.pull(*job, &dir).and_then(|()| sha256(&dir.join("model.bin")));
        match hash {
            Ok(hash) if hash == undisturbed => {}
            Ok(hash) => violations
                .push(format!("INV-05: the model of job {job} is {hash}, undisturbed {undisturbed}")),
            Err(error) => violations.push(format!("job {job} has no model: {error:#}")),
        }
    }
    Ok(violations)
}

/// INV-03: no node outlives its work, neither for the scheduler, nor for the clouds, nor on the machine.
fn nodes_end(system: &System) -> Violations {
    let spotq = system.spotq();
    let none = || spotq.nodes().is_ok_and(|nodes| nodes.is_empty());
    let mut violations = Vec::new();
    if let Err(late) = wait_until(NODES_GONE_MAX, none, "the end of all nodes") {
        violations.push(format!("INV-03: {late}; left: {:?}", spotq.nodes()));
    }
    let listed = what_the_cloud_says(system)?;
    let alive = listed.iter().filter(|instance| !instance.state.is_gone());
    violations.extend(alive.map(|instance| format!("INV-03: the cloud still runs {}", instance.instance)));
    violations.extend(leftovers(system)?);
    Ok(violations)
}

/// Every instance, with those that ended lately.
fn what_the_cloud_says(system: &System) -> anyhow::Result<Vec<Instance>> {
    let (dir, config, daemon) = (system.cloud_dir(), CloudConfig::default(), system.daemon());
    runtime()?.block_on(async {
        let cloud = LocalCloud::connect_or_start(&dir, system.seed(), &config, &daemon);
        let cloud = cloud.await.context("cannot reach the simulated clouds")?;
        cloud
            .list_owned(CLUSTER)
            .await
            .map_err(|refusal| anyhow::anyhow!("the clouds refuse: {}", refusal.message))
    })
}

fn leftovers(system: &System) -> Violations {
    let left = victims::on_nodes(system.root());
    Ok(left
        .iter()
        .map(|process| format!("INV-03: still runs: {} `{}`", process.pid, process.command))
        .collect())
}

/// The history once more from its first event, with every invariant after each, and the report against it.
fn books(system: &System, books: &mut Books) -> Violations {
    let address = format!("http://{}", system.address());
    let (events, report) = runtime()?.block_on(async {
        let channel =
            Endpoint::from_shared(address)?.connect().await.context("cannot reach the scheduler")?;
        let mut reports = ReportsClient::new(channel).max_decoding_message_size(REPORT_BYTES_MAX);
        let mut stream = reports.events(v1::EventsRequest { job_id: None }).await?.into_inner();
        let mut events = Vec::new();
        while let Some(line) = stream.message().await? {
            events.push(line);
        }
        let report = reports.report(v1::ReportRequest { job_id: None }).await?.into_inner();
        anyhow::Ok((events, report))
    })?;
    let history = replay(&events)?;
    count(&history.cluster, &report, books);
    let mut violations = history.violations.clone();
    violations.extend(segments(&history, &report));
    violations.extend(bills(&history.cluster, &what_the_cloud_says(system)?, books));
    Ok(violations)
}

/// What the events add up to.
#[derive(Debug)]
struct History {
    cluster: Cluster,
    /// From when on a node is billed: what the cloud said of its launch, no earlier than it was asked for.
    billed_from: BTreeMap<NodeId, u64>,
    /// When a node ended, as the cloud said, and when that was heard.
    ended: BTreeMap<NodeId, (u64, u64)>,
    violations: Vec<String>,
}

fn replay(events: &[v1::EventLine]) -> anyhow::Result<History> {
    let mut cluster = Cluster::default();
    let (mut billed_from, mut ended) = (BTreeMap::new(), BTreeMap::new());
    let mut broken: BTreeMap<&'static str, Vec<String>> = BTreeMap::new();
    let mut done = BTreeMap::new();
    let mut keys = BTreeSet::new();
    for (line, expected) in events.iter().zip(0..) {
        if line.version != expected {
            // A history that begins later begins at a snapshot: such a run is too long to be checked.
            bail!("the history has version {} where {expected} was expected", line.version);
        }
        let record: EventRecord = serde_json::from_str(&line.json).context("an event of the history")?;
        apply(&mut cluster, &record.event).context("the history does not replay")?;
        if let Fact::NodeLaunched { node, billed_from: told, .. } = &record.event.fact {
            let (asked, heard) = (cluster.nodes[node].requested_at, record.event.at);
            let from = told.map_or(heard, |told| told.max(asked).min(heard));
            billed_from.insert(*node, from.0);
        }
        if let Fact::NodeGone { node, ended_at, .. } = &record.event.fact {
            ended.insert(*node, (ended_at.0, record.event.at.0));
        }
        if let Fact::TaskDone { task, .. } = &record.event.fact {
            *done.entry(*task).or_insert(0) += 1;
        }
        if let Fact::JobSubmitted { client_key, .. } = &record.event.fact
            && !keys.insert(client_key.clone())
        {
            broken.entry("INV-04").or_default().push(format!("`{client_key}` was submitted twice"));
        }
        for violation in invariants::check(&cluster) {
            let text = format!("{} (at version {expected})", violation.text);
            broken.entry(violation.id).or_default().push(text);
        }
    }
    for (task, count) in done.into_iter().filter(|(_, count)| *count != 1) {
        broken.entry("INV-11").or_default().push(format!("task {task} was done {count} times"));
    }
    let told = broken.into_iter().flat_map(|(id, texts)| {
        let count = texts.len();
        let more = (count > TOLD_OF_A_KIND).then(|| format!("{id}: {} more", count - TOLD_OF_A_KIND));
        texts.into_iter().take(TOLD_OF_A_KIND).map(move |text| format!("{id}: {text}")).chain(more)
    });
    Ok(History { cluster, billed_from, ended, violations: told.collect() })
}

fn count(cluster: &Cluster, report: &v1::ReportReply, books: &mut Books) {
    let tasks = cluster.jobs.values().flat_map(|job| job.tasks.values());
    for attempt in tasks.flat_map(|task| &task.attempts) {
        books.attempts += 1;
        let end = attempt.end.as_ref().map_or("none", |end| end.name());
        *books.ends.entry(end.to_owned()).or_default() += 1;
    }
    books.jobs = cluster.jobs.len();
    books.nodes = cluster.nodes.values().filter(|node| node.launched_at.is_some()).count();
    books.segments = report.segments.len();
    let costs = report.jobs.iter().filter_map(|job| job.cost.as_ref());
    for cost in costs {
        books.billed = Usd(books.billed.0 + cost.billed_nano_usd);
        books.wasted = Usd(books.wasted.0 + cost.wasted_nano_usd);
    }
}

/// INV-09: the segments of a node reach from its launch to its end without gap or overlap, and their sum is the bill.
fn segments(history: &History, report: &v1::ReportReply) -> Vec<String> {
    let mut by_node: BTreeMap<u64, Vec<&v1::SegmentView>> = BTreeMap::new();
    for segment in &report.segments {
        by_node.entry(segment.node_id).or_default().push(segment);
    }
    let mut violations = Vec::new();
    for node in history.cluster.nodes.values() {
        let Some(launched) = node.launched_at else { continue };
        let from = history.billed_from.get(&node.id).copied().unwrap_or(launched.0);
        let mut segments = by_node.remove(&node.id.0).unwrap_or_default();
        segments.sort_by_key(|segment| segment.start_ms);
        if let Some(wrong) = not_contiguous(&segments, from, history.ended.get(&node.id)) {
            violations.push(format!("INV-09: node {}: {wrong}", node.id));
        }
    }
    violations
        .extend(by_node.keys().map(|node| format!("INV-09: node {node} was never launched and is paid for")));
    let sum: i64 = report.segments.iter().map(|segment| segment.amount_nano_usd).sum();
    let bill: i64 =
        report.jobs.iter().filter_map(|job| job.cost.as_ref()).map(|cost| cost.billed_nano_usd).sum();
    if sum != bill {
        violations.push(format!(
            "INV-09: the segments sum to {}, the jobs are billed {}",
            Usd(sum),
            Usd(bill)
        ));
    }
    violations
}

/// INV-09: each node is billed from the moment to the moment that the cloud, not the history, says it lived.
fn bills(cluster: &Cluster, listed: &[Instance], books: &mut Books) -> Vec<String> {
    let mut violations = Vec::new();
    for node in cluster.nodes.values() {
        let Some(known) = listed.iter().find(|known| Some(&known.instance) == node.instance.as_ref()) else {
            continue;
        };
        let InstanceState::Gone { at: ended, .. } = known.state else { continue };
        books.bills_compared += 1;
        let (first, last) = (node.ledger.segments.first(), node.ledger.segments.last());
        let billed = first.map(|segment| segment.start).zip(last.and_then(|segment| segment.end));
        // Nothing is billed for a node that ended within the millisecond of its launch.
        let lived = (known.launched_at < ended).then_some((known.launched_at, ended));
        if billed != lived {
            let id = node.id;
            violations.push(format!("INV-09: node {id} is billed for {billed:?}, the cloud says {lived:?}"));
        }
    }
    violations
}

/// What is wrong with the segments of one node, in order. `end` is when it ended, and when that was heard.
fn not_contiguous(segments: &[&v1::SegmentView], launched: u64, end: Option<&(u64, u64)>) -> Option<String> {
    let Some((ended, heard)) = end else { return Some("it never ended".into()) };
    if let Some(open) = segments.iter().find(|segment| segment.end_ms.is_none()) {
        return Some(format!("a segment is open since {}", open.start_ms));
    }
    if let Some(pair) = segments.windows(2).find(|pair| pair[0].end_ms != Some(pair[1].start_ms)) {
        return Some(format!(
            "a segment ends at {:?} and the next starts at {}",
            pair[0].end_ms, pair[1].start_ms
        ));
    }
    // Nothing is billed for a node that ended within the millisecond of its launch.
    let from = segments.first().map_or(launched, |first| first.start_ms);
    let to = segments.last().and_then(|last| last.end_ms).unwrap_or(launched);
    let whole = from == launched && to == *ended.min(heard).max(&launched);
    (!whole).then(|| {
        format!(
            "its segments reach from {from} to {to}, it lived from {launched} to {ended} (heard at {heard})"
        )
    })
}

/// Lines of the scheduler's log that say that something is wrong with the scheduler itself.
fn alarms(log: &str) -> Vec<String> {
    let alarming = log.lines().filter(|line| line.contains("panicked at") || line.contains("ERROR"));
    alarming.map(|line| format!("the scheduler's log: {line}")).collect()
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start the runtime")
}

fn sha256(path: &Path) -> anyhow::Result<String> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(start_ms: u64, end_ms: Option<u64>) -> v1::SegmentView {
        v1::SegmentView { start_ms, end_ms, ..v1::SegmentView::default() }
    }

    fn wrong(segments: &[v1::SegmentView], launched: u64, end: Option<(u64, u64)>) -> Option<String> {
        let segments: Vec<&v1::SegmentView> = segments.iter().collect();
        not_contiguous(&segments, launched, end.as_ref())
    }

    #[test]
    fn segments_that_reach_from_launch_to_end_are_right() {
        let whole = [segment(10, Some(20)), segment(20, Some(35))];
        assert_eq!(wrong(&whole, 10, Some((35, 40))), None);
        assert_eq!(wrong(&whole, 10, Some((50, 35))), None, "a cloud whose clock is ahead");
        assert!(wrong(&whole, 10, Some((30, 40))).is_some(), "what came after the end is not paid for");
        assert_eq!(wrong(&[], 10, Some((10, 10))), None);
    }

    #[test]
    fn gaps_overlaps_open_ends_and_missing_time_are_told() {
        let end = Some((35, 40));
        assert!(wrong(&[segment(10, Some(20)), segment(21, Some(35))], 10, end).is_some());
        assert!(wrong(&[segment(10, Some(20)), segment(19, Some(35))], 10, end).is_some());
        assert!(wrong(&[segment(10, None)], 10, end).is_some());
        assert!(wrong(&[segment(11, Some(35))], 10, end).is_some(), "begins late");
        assert!(wrong(&[segment(10, Some(34))], 10, end).is_some(), "ends early");
        assert!(wrong(&[segment(10, Some(36))], 10, end).is_some(), "ends late");
        assert!(wrong(&[segment(10, Some(35))], 10, None).is_some(), "a node without an end");
        assert!(wrong(&[], 10, end).is_some(), "nothing is billed for 25 ms");
    }

    #[test]
    fn a_history_that_breaks_an_invariant_is_told() {
        let event = |version: u64, fact: serde_json::Value| v1::EventLine {
            version,
            json: serde_json::json!({ "schema": 1, "event": { "at": version, "fact": fact } }).to_string(),
        };
        let spec = serde_json::to_value(spotq_testkit::job("a")).unwrap();
        let submitted = serde_json::json!({
            "fact": "job_submitted", "job": 1, "uuid": "u", "client_key": "k", "spec": spec,
        });
        let task = serde_json::json!({ "job": 1, "index": 0 });
        let done = |task: &serde_json::Value| serde_json::json!({ "fact": "task_done", "task": task, "outcome": { "outcome": "completed" } });
        let history = replay(&[event(0, submitted.clone())]).unwrap();
        assert_eq!((history.violations.len(), history.cluster.jobs.len()), (0, 1));
        let skipped = replay(&[event(0, submitted.clone()), event(2, done(&task))]).unwrap_err().to_string();
        assert!(skipped.contains("version 2"), "{skipped}");
        assert!(
            replay(&[event(0, submitted.clone()), event(1, submitted)]).is_err(),
            "a job that is there twice"
        );
    }

    #[test]
    fn alarms_are_errors_and_panics_alone() {
        let log = " INFO a: fine\nERROR b: broken\nthread 'x' panicked at src/a.rs:1\n WARN c: hm\n";
        assert_eq!(alarms(log).len(), 2);
    }
}
