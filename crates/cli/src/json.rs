//! JSON as programs get it: money is a decimal string of dollars, each time is an RFC 3339 string beside its
//! milliseconds.
//!
//! These shapes are a contract: fields are added, never renamed or removed.

use std::collections::BTreeMap;

use serde::Serialize;
use serde::ser::SerializeMap as _;
use spotq_model::{JobId, JobSpec, TaskId, Timestamp, Usd, UsdPerHour};
use spotq_proto::v1;

use crate::words;

/// A moment under `NAME` and `NAME_ms`; both are null where there is none.
#[derive(Debug, Clone, Copy)]
struct At(&'static str, Option<u64>);

#[derive(Debug, Serialize)]
pub struct Submitted {
    pub job_id: u32,
    pub job_uuid: String,
    pub name: String,
    pub created: bool,
    pub checkpoint_url: String,
    pub warnings: Vec<String>,
}

#[derive(Debug, Serialize)]
pub struct Understood<'a> {
    pub jobs: &'a [JobSpec],
    pub warnings: Vec<String>,
}

#[derive(Debug, Serialize)]
pub struct Job {
    job_id: u32,
    task: String,
    job_uuid: String,
    name: String,
    user: String,
    phase: String,
    reason: String,
    outcome: Option<String>,
    outcome_text: String,
    exit_code: Option<i32>,
    #[serde(flatten)]
    times: Times,
    generation: u64,
    preemptions: u32,
    failures: u32,
    progress: Option<Progress>,
    checkpoint: Option<Checkpoint>,
    cost: Cost,
    node: Option<Node>,
    attempts: Vec<Attempt>,
    checkpoint_url: String,
    spec: Option<JobSpec>,
}

#[derive(Debug, Serialize)]
struct Attempt {
    generation: u64,
    node: u64,
    pool: String,
    #[serde(flatten)]
    times: Times,
    end: Option<String>,
    detail: String,
    resumed_step: Option<u64>,
    last_step: Option<u64>,
    committed_step: Option<u64>,
    billed_usd: Usd,
}

#[derive(Debug, Serialize)]
struct Progress {
    step: u64,
    total: Option<u64>,
}

#[derive(Debug, Serialize)]
struct Checkpoint {
    sequence: u64,
    generation: u64,
    step: Option<u64>,
    bytes_total: u64,
    bytes_uploaded: u64,
    #[serde(flatten)]
    times: Times,
    manifest_hash: String,
}

#[derive(Debug, Serialize)]
struct Cost {
    billed_usd: Usd,
    on_demand_useful_usd: Usd,
    on_demand_billed_usd: Usd,
    wasted_usd: Usd,
    saved_net_usd: Usd,
    saved_gross_usd: Usd,
    saved_net_pct: Option<f64>,
}

#[derive(Debug, Serialize)]
pub struct Node {
    node: u64,
    instance_id: String,
    pool: String,
    state: String,
    job_id: Option<u32>,
    price_usd_h: UsdPerHour,
    on_demand_usd_h: UsdPerHour,
    #[serde(flatten)]
    times: Times,
    detail: String,
}

#[derive(Debug, Serialize)]
pub struct Explained {
    job_id: u32,
    headline: String,
    next: String,
    pools: Vec<Verdict>,
}

#[derive(Debug, Serialize)]
struct Verdict {
    pool: String,
    eligible: bool,
    rank: Option<u32>,
    why: String,
    price_usd_h: UsdPerHour,
    on_demand_usd_h: UsdPerHour,
    #[serde(flatten)]
    times: Times,
}

#[derive(Debug, Serialize)]
pub struct Offer {
    cloud: String,
    region: String,
    zone: String,
    instance_type: String,
    market: String,
    accelerator: Option<String>,
    accelerator_count: u32,
    cpus: u32,
    memory_gib: u32,
    price_usd_h: UsdPerHour,
    on_demand_usd_h: UsdPerHour,
    price_source: String,
    interruptions_per_hour: f64,
    cooling_down: Option<String>,
    #[serde(flatten)]
    times: Times,
}

#[derive(Debug, Serialize)]
pub struct Report {
    #[serde(flatten)]
    times: Times,
    jobs: Vec<JobReport>,
    segments: Vec<Segment>,
}

#[derive(Debug, Serialize)]
struct JobReport {
    job_id: u32,
    name: String,
    phase: String,
    outcome: Option<String>,
    cost: Cost,
    attempts: u32,
    preemptions: u32,
    preemptions_without_notice: u32,
    steps_done: u64,
    steps_repeated: u64,
    billed_ms: u64,
    useful_ms: u64,
    waste: Vec<Waste>,
}

#[derive(Debug, Serialize)]
struct Waste {
    cause: String,
    ms: u64,
    amount_usd: Usd,
}

#[derive(Debug, Serialize)]
struct Segment {
    node: u64,
    pool: String,
    market: String,
    job_id: Option<u32>,
    generation: u64,
    #[serde(flatten)]
    times: Times,
    price_usd_h: UsdPerHour,
    on_demand_usd_h: UsdPerHour,
    price_source: String,
    amount_usd: Usd,
}

#[derive(Debug, Serialize)]
pub struct Info {
    server: String,
    version: String,
    cluster: String,
    epoch: u64,
    #[serde(flatten)]
    times: Times,
    jobs_active: u32,
    jobs_done: u32,
    nodes_live: u32,
    workers_connected: u32,
    store_url: String,
}

#[derive(Debug, Serialize)]
pub struct Pulled {
    pub job_id: u32,
    pub dir: String,
    pub url: String,
    pub files: BTreeMap<String, u64>,
    pub bytes: u64,
}

impl From<&v1::JobView> for Job {
    fn from(job: &v1::JobView) -> Self {
        Job {
            job_id: job.job_id,
            task: TaskId { job: JobId(job.job_id), index: job.task_index }.to_string(),
            job_uuid: job.job_uuid.clone(),
            name: job.name.clone(),
            user: job.user.clone(),
            phase: job.phase.clone(),
            reason: job.reason.clone(),
            outcome: job.outcome.clone(),
            outcome_text: job.outcome_text.clone(),
            exit_code: job.exit_code,
            times: Times(vec![
                At("submitted", Some(job.submitted_ms)),
                At("started", job.started_ms),
                At("ended", job.ended_ms),
                At("next_try", job.next_try_ms),
                At("deadline", job.deadline_ms),
            ]),
            generation: job.generation,
            preemptions: job.preemptions,
            failures: job.failures,
            progress: job.progress.map(|p| Progress { step: p.step, total: p.total }),
            checkpoint: job.checkpoint.as_ref().map(Into::into),
            cost: job.cost.unwrap_or_default().into(),
            node: job.node.as_ref().map(Into::into),
            attempts: job.attempts.iter().map(Into::into).collect(),
            checkpoint_url: job.checkpoint_url.clone(),
            // A spec of a newer scheduler may say what we do not know; the rest of the job is still worth printing.
            spec: job.spec.clone().and_then(|spec| spec.try_into().ok()),
        }
    }
}

impl From<&v1::AttemptView> for Attempt {
    fn from(attempt: &v1::AttemptView) -> Self {
        Attempt {
            generation: attempt.generation,
            node: attempt.node_id,
            pool: attempt.pool.clone(),
            times: Times(vec![
                At("placed", Some(attempt.placed_ms)),
                At("started", attempt.started_ms),
                At("noticed", attempt.noticed_ms),
                At("stopped", attempt.stopped_ms),
                At("ended", attempt.ended_ms),
            ]),
            end: Some(attempt.end.clone()).filter(|end| !end.is_empty()),
            detail: attempt.detail.clone(),
            resumed_step: attempt.resumed_step,
            last_step: attempt.last_step,
            committed_step: attempt.committed_step,
            billed_usd: Usd(i64::try_from(attempt.billed_nano_usd).unwrap_or(i64::MAX)),
        }
    }
}

impl From<&v1::Checkpoint> for Checkpoint {
    fn from(checkpoint: &v1::Checkpoint) -> Self {
        Checkpoint {
            sequence: checkpoint.sequence,
            generation: checkpoint.generation,
            step: checkpoint.step,
            bytes_total: checkpoint.bytes_total,
            bytes_uploaded: checkpoint.bytes_uploaded,
            times: Times(vec![At("saved", Some(checkpoint.saved_at_ms))]),
            manifest_hash: checkpoint.manifest_hash.clone(),
        }
    }
}

impl From<v1::Cost> for Cost {
    fn from(cost: v1::Cost) -> Self {
        Cost {
            billed_usd: Usd(cost.billed_nano_usd),
            on_demand_useful_usd: Usd(cost.on_demand_useful_nano_usd),
            on_demand_billed_usd: Usd(cost.on_demand_billed_nano_usd),
            wasted_usd: Usd(cost.wasted_nano_usd),
            saved_net_usd: Usd(cost.saved_net_nano_usd),
            saved_gross_usd: Usd(cost.saved_gross_nano_usd),
            // A rounded figure for people; programs divide the exact ones.
            saved_net_pct: words::percent(cost.saved_net_nano_usd, cost.on_demand_useful_nano_usd)
                .map(|pct| (pct * 100.0).round() / 100.0),
        }
    }
}

impl From<&v1::NodeView> for Node {
    fn from(node: &v1::NodeView) -> Self {
        Node {
            node: node.node_id,
            instance_id: node.instance_id.clone(),
            pool: node.pool.clone(),
            state: node.state.clone(),
            job_id: some_job(node.job_id),
            price_usd_h: UsdPerHour::nanos(node.price_nano_usd_h),
            on_demand_usd_h: UsdPerHour::nanos(node.on_demand_nano_usd_h),
            times: Times(vec![At("requested", Some(node.requested_ms)), At("ended", node.ended_ms)]),
            detail: node.detail.clone(),
        }
    }
}

impl Explained {
    #[must_use]
    pub fn new(task: TaskId, reply: &v1::ExplainReply) -> Self {
        let verdict = |p: &v1::PoolVerdict| Verdict {
            pool: p.pool.clone(),
            eligible: p.eligible,
            rank: Some(p.rank).filter(|rank| *rank != 0),
            why: p.why.clone(),
            price_usd_h: UsdPerHour::nanos(p.price_nano_usd_h),
            on_demand_usd_h: UsdPerHour::nanos(p.on_demand_nano_usd_h),
            times: Times(vec![At("retry", p.retry_ms)]),
        };
        Explained {
            job_id: task.job.0,
            headline: reply.headline.clone(),
            next: reply.next.clone(),
            pools: reply.pools.iter().map(verdict).collect(),
        }
    }
}

impl From<&v1::OfferView> for Offer {
    fn from(offer: &v1::OfferView) -> Self {
        Offer {
            cloud: offer.cloud.clone(),
            region: offer.region.clone(),
            zone: offer.zone.clone(),
            instance_type: offer.instance_type.clone(),
            market: offer.market.clone(),
            accelerator: offer.accelerator.clone(),
            accelerator_count: offer.accelerator_count,
            cpus: offer.cpus,
            memory_gib: offer.memory_gib,
            price_usd_h: UsdPerHour::nanos(offer.price_nano_usd_h),
            on_demand_usd_h: UsdPerHour::nanos(offer.on_demand_nano_usd_h),
            price_source: offer.price_source.clone(),
            interruptions_per_hour: offer.interruptions_per_hour_ppm as f64 / 1e6,
            cooling_down: offer.cooling_down.clone(),
            times: Times(vec![At("price_as_of", Some(offer.price_as_of_ms)), At("retry", offer.retry_ms)]),
        }
    }
}

impl From<&v1::ReportReply> for Report {
    fn from(reply: &v1::ReportReply) -> Self {
        Report {
            times: Times(vec![At("as_of", Some(reply.as_of_ms))]),
            jobs: reply.jobs.iter().map(Into::into).collect(),
            segments: reply.segments.iter().map(Into::into).collect(),
        }
    }
}

impl From<&v1::JobReport> for JobReport {
    fn from(job: &v1::JobReport) -> Self {
        let waste = |w: &v1::Waste| Waste { cause: w.cause.clone(), ms: w.ms, amount_usd: Usd(w.nano_usd) };
        JobReport {
            job_id: job.job_id,
            name: job.name.clone(),
            phase: job.phase.clone(),
            outcome: job.outcome.clone(),
            cost: job.cost.unwrap_or_default().into(),
            attempts: job.attempts,
            preemptions: job.preemptions,
            preemptions_without_notice: job.preemptions_without_notice,
            steps_done: job.steps_done,
            steps_repeated: job.steps_repeated,
            billed_ms: job.billed_ms,
            useful_ms: job.useful_ms,
            waste: job.waste.iter().map(waste).collect(),
        }
    }
}

impl From<&v1::SegmentView> for Segment {
    fn from(segment: &v1::SegmentView) -> Self {
        Segment {
            node: segment.node_id,
            pool: segment.pool.clone(),
            market: segment.market.clone(),
            job_id: some_job(segment.job_id),
            generation: segment.generation,
            times: Times(vec![
                At("start", Some(segment.start_ms)),
                At("end", segment.end_ms),
                At("price_as_of", Some(segment.price_as_of_ms)),
            ]),
            price_usd_h: UsdPerHour::nanos(segment.price_nano_usd_h),
            on_demand_usd_h: UsdPerHour::nanos(segment.on_demand_nano_usd_h),
            price_source: segment.price_source.clone(),
            amount_usd: Usd(segment.amount_nano_usd),
        }
    }
}

impl Info {
    #[must_use]
    pub fn new(server: &str, info: &v1::InfoReply) -> Self {
        Info {
            server: server.to_owned(),
            version: info.version.clone(),
            cluster: info.cluster.clone(),
            epoch: info.epoch,
            times: Times(vec![At("started", Some(info.started_ms))]),
            jobs_active: info.jobs_active,
            jobs_done: info.jobs_done,
            nodes_live: info.nodes_live,
            workers_connected: info.workers_connected,
            store_url: info.store_url.clone(),
        }
    }
}

/// Several moments of one thing, flattened into its object.
#[derive(Debug, Clone)]
struct Times(Vec<At>);

impl Serialize for Times {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        let mut map = s.serialize_map(Some(self.0.len() * 2))?;
        for At(name, ms) in &self.0 {
            map.serialize_entry(name, &ms.map(|ms| words::rfc3339(Timestamp(ms))))?;
            map.serialize_entry(&format!("{name}_ms"), ms)?;
        }
        map.end()
    }
}

fn some_job(id: u32) -> Option<u32> {
    Some(id).filter(|id| *id != 0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::views::test::{job, report};

    #[test]
    fn money_is_a_decimal_string_and_times_come_twice() {
        let value = serde_json::to_value(Job::from(&job())).unwrap();
        assert_eq!(value["job_id"], json!(7));
        assert_eq!(value["cost"]["billed_usd"], json!("0.973100000"));
        assert_eq!(value["node"]["price_usd_h"], json!("0.310000000"));
        assert_eq!(value["submitted"], json!("2023-11-14T22:13:20Z"));
        assert_eq!(value["submitted_ms"], json!(1_700_000_000_000_u64));
        assert_eq!((&value["ended"], &value["ended_ms"]), (&json!(null), &json!(null)));
        assert_eq!(value["progress"], json!({"step": 1200, "total": 5000}));
        assert_eq!(value["attempts"][0]["end"], json!("preempted"));
        assert_eq!(value["attempts"][1]["end"], json!(null));
        assert_eq!(value["exit_code"], json!(null));
    }

    #[test]
    fn segments_carry_what_a_bill_needs() {
        let value = serde_json::to_value(Report::from(&report())).unwrap();
        let segment = value["segments"][0].as_object().unwrap();
        for field in
            ["node", "pool", "market", "start_ms", "end_ms", "price_usd_h", "on_demand_usd_h", "amount_usd"]
        {
            assert!(segment.contains_key(field), "no {field}");
        }
        assert_eq!(
            value["jobs"][0]["waste"][0],
            json!({"cause": "boot", "ms": 8000, "amount_usd": "0.000700000"})
        );
    }

    #[test]
    fn a_submit_prints_the_documented_fields() {
        let submitted = Submitted {
            job_id: 7,
            job_uuid: "u".into(),
            name: "n".into(),
            created: true,
            checkpoint_url: "file:///c".into(),
            warnings: vec![],
        };
        assert_eq!(
            serde_json::to_string(&submitted).unwrap(),
            r#"{"job_id":7,"job_uuid":"u","name":"n","created":true,"checkpoint_url":"file:///c","warnings":[]}"#
        );
    }
}
