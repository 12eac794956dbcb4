//! What the demo claims, computed from what it left behind: hashes of files, segments of the ledger, the history.

use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use sha2::{Digest as _, Sha256};
use spotq_checkpoint::Restore;
use spotq_model::{TaskId, Usd, UsdPerHour};
use spotq_proto::v1;

use super::Place;
use crate::client::{Client, job_request};
use crate::error::ExpectedError;
use crate::out::Out;
use crate::{pull, report, words};

/// The last node is ended soon after the job; until then its segment is open and the bill not final.
const CLOSED_LIMIT: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// What was found.
#[derive(Debug)]
pub(super) struct Evidence {
    final_sha256: String,
    uninterrupted_sha256: String,
    job: v1::JobReport,
    segments: Vec<v1::SegmentView>,
    as_of_ms: u64,
}

/// The figures, as `-o json` prints them. Money is a decimal string of dollars.
#[derive(Debug, Serialize)]
pub(super) struct Proof {
    seed: u64,
    outcome: String,
    attempts: u32,
    preemptions: u32,
    preemptions_without_notice: u32,
    scheduler_restarts: u32,
    steps: u64,
    steps_repeated: u64,
    final_sha256: String,
    uninterrupted_sha256: String,
    identical: bool,
    cost_usd: Usd,
    on_demand_usd: Usd,
    savings_pct: f64,
    wasted_usd: Usd,
    /// How many preemptions were asked for.
    #[serde(skip)]
    asked: u32,
    #[serde(skip)]
    evidence: Evidence,
}

/// One line of `segments.json`.
#[derive(Debug, Serialize)]
struct SegmentLine {
    node: u64,
    pool: String,
    market: String,
    start_ms: u64,
    end_ms: u64,
    price_usd_h: UsdPerHour,
    on_demand_usd_h: UsdPerHour,
    amount_usd: Usd,
    generation: u64,
    price_source: String,
    price_as_of_ms: u64,
}

/// Fetches the model through the checkpoint store, the ledger and the history, writes them, and hashes the models.
pub(super) async fn gather(client: &Client, task: TaskId, place: &Place) -> Result<Evidence, ExpectedError> {
    let report = closed_report(client, task).await?;
    let [job] = report.jobs.as_slice() else {
        return Err(ExpectedError::Internal(format!(
            "the report has {} jobs, expected one",
            report.jobs.len()
        )));
    };
    fetch_model(client, task, &place.final_dir).await?;
    write_segments(&place.root.join("segments.json"), &report.segments)?;
    write_events(client, &place.root.join("events.jsonl")).await?;
    Ok(Evidence {
        final_sha256: sha256(&place.final_dir.join("model.bin"))?,
        uninterrupted_sha256: sha256(&place.uninterrupted.join("model.bin"))?,
        job: job.clone(),
        segments: report.segments.clone(),
        as_of_ms: report.as_of_ms,
    })
}

impl Proof {
    pub(super) fn new(seed: u64, asked: u32, scheduler_restarts: u32, evidence: Evidence) -> Self {
        let cost = evidence.job.cost.unwrap_or_default();
        let percent = words::percent(cost.saved_net_nano_usd, cost.on_demand_useful_nano_usd).unwrap_or(0.0);
        Proof {
            seed,
            outcome: evidence.job.outcome.clone().unwrap_or_else(|| evidence.job.phase.clone()),
            attempts: evidence.job.attempts,
            preemptions: evidence.job.preemptions,
            preemptions_without_notice: evidence.job.preemptions_without_notice,
            scheduler_restarts,
            steps: evidence.job.steps_done,
            steps_repeated: evidence.job.steps_repeated,
            identical: evidence.final_sha256 == evidence.uninterrupted_sha256,
            final_sha256: evidence.final_sha256.clone(),
            uninterrupted_sha256: evidence.uninterrupted_sha256.clone(),
            cost_usd: Usd(cost.billed_nano_usd),
            on_demand_usd: Usd(cost.on_demand_useful_nano_usd),
            savings_pct: (percent * 100.0).round() / 100.0,
            wasted_usd: Usd(cost.wasted_nano_usd),
            asked,
            evidence,
        }
    }

    /// The claim: the job completed, its model is the undisturbed one to the bit, and it really went through all that.
    pub(super) fn holds(&self) -> bool {
        let went_through = self.preemptions >= self.asked
            && self.preemptions_without_notice >= 1
            && self.scheduler_restarts >= 1;
        self.identical && self.outcome == "completed" && went_through
    }

    pub(super) fn print(&self, out: &Out, kept: Option<&Path>) -> Result<(), ExpectedError> {
        if super::for_programs(out) {
            return out.json(self);
        }
        let evidence = &self.evidence;
        let mut text = report::page(&evidence.job, &evidence.segments, evidence.as_of_ms, out);
        let verdict = if self.identical { "bit-identical to" } else { "DIFFERENT from" };
        text.push_str(&format!(
            "\nfinal model    {}\nuninterrupted  {}\nThe model is {verdict} the uninterrupted one, after {} preemptions \
             ({} without notice) and {} kill -9 of the scheduler.\n",
            self.final_sha256,
            self.uninterrupted_sha256,
            self.preemptions,
            self.preemptions_without_notice,
            self.scheduler_restarts,
        ));
        if !self.holds() {
            text.push_str("The demo did NOT show what it should: see the figures above.\n");
        }
        if let Some(dir) = kept {
            text.push_str(&format!("Everything is in {}.\n", dir.display()));
        }
        out.data(&text)
    }
}

/// The job's report once every segment of it is closed.
async fn closed_report(client: &Client, task: TaskId) -> Result<v1::ReportReply, ExpectedError> {
    let deadline = tokio::time::Instant::now() + CLOSED_LIMIT;
    loop {
        let request = v1::ReportRequest { job_id: Some(task.job.0) };
        let reply = client.reports().report(request).await;
        let reply = reply.map_err(|e| client.failed("read the report", &e))?.into_inner();
        if reply.segments.iter().all(|segment| segment.end_ms.is_some()) {
            return Ok(reply);
        }
        if tokio::time::Instant::now() > deadline {
            return Err(ExpectedError::Internal("a node was not ended after the job".into()));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

async fn fetch_model(client: &Client, task: TaskId, dir: &Path) -> Result<(), ExpectedError> {
    let outputs = client.jobs().outputs(job_request(task)).await;
    let outputs = outputs.map_err(|e| client.failed("find the model", &e))?.into_inner();
    let repository = pull::open(&outputs.url, &outputs.read_key)?;
    match repository.pull(dir, &|_| {}).await {
        Ok(Restore::Restored(_)) => Ok(()),
        Ok(Restore::Nothing { .. }) => Err(ExpectedError::Internal("the job left no model".into())),
        Err(error) => Err(ExpectedError::Internal(format!("cannot fetch the model: {error}"))),
    }
}

fn write_segments(path: &Path, segments: &[v1::SegmentView]) -> Result<(), ExpectedError> {
    let lines: Vec<SegmentLine> = segments
        .iter()
        .map(|s| SegmentLine {
            node: s.node_id,
            pool: s.pool.clone(),
            market: s.market.clone(),
            start_ms: s.start_ms,
            end_ms: s.end_ms.unwrap_or(s.start_ms),
            price_usd_h: UsdPerHour::nanos(s.price_nano_usd_h),
            on_demand_usd_h: UsdPerHour::nanos(s.on_demand_nano_usd_h),
            amount_usd: Usd(s.amount_nano_usd),
            generation: s.generation,
            price_source: s.price_source.clone(),
            price_as_of_ms: s.price_as_of_ms,
        })
        .collect();
    let text = serde_json::to_string_pretty(&lines)
        .map_err(|e| ExpectedError::Internal(format!("cannot write segments as JSON: {e}")))?;
    std::fs::write(path, text + "\n").map_err(|e| ExpectedError::writing(path, &e))
}

async fn write_events(client: &Client, path: &Path) -> Result<(), ExpectedError> {
    let failed = |e: &tonic::Status| client.failed("read the history", e);
    let stream = client.reports().events(v1::EventsRequest { job_id: None }).await;
    let mut stream = stream.map_err(|e| failed(&e))?.into_inner();
    let mut text = String::new();
    while let Some(line) = stream.message().await.map_err(|e| failed(&e))? {
        text.push_str(&line.json);
        text.push('\n');
    }
    std::fs::write(path, text).map_err(|e| ExpectedError::writing(path, &e))
}

fn sha256(path: &Path) -> Result<String, ExpectedError> {
    let bytes = std::fs::read(path).map_err(|e| ExpectedError::reading(path, &e))?;
    Ok(Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect())
}
