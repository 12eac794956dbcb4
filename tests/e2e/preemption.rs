//! Preemptions with and without a notice: the job ends with the model of an undisturbed run, and the bill adds up.

use serde_json::Value;

use crate::cluster::{Cluster, DEADLINE, step_of};
use crate::ledger::{assert_contiguous, bill, nanos};
use crate::training::{SAVES, Training};

#[test]
fn a_notice_of_30_s_costs_no_step_and_the_bill_adds_up() {
    let cluster = Cluster::start("preempt-30");
    let job = Training::submit(&cluster, 400, &["--step-ms", "10", "--save-every", "0"]);
    cluster.wait_step(&job.job, 100);
    cluster.preempt(&job.job, "30s");
    let resumed =
        cluster.wait_until(&job.job, "attempt 2", |seen| seen["attempts"][1]["started_ms"].is_u64());
    let (first, second) = (&resumed["attempts"][0], &resumed["attempts"][1]);
    assert_eq!((&first["end"], &resumed["preemptions"]), (&"preempted".into(), &1.into()));
    assert!(first["noticed_ms"].is_u64(), "{first:#}");
    assert!(second["resumed_step"].as_u64() >= first["last_step"].as_u64(), "steps were lost: {resumed:#}");
    assert_ne!(first["node"], second["node"]);
    job.ends_as_undisturbed(&cluster);
    let report = closed_report(&cluster, &job.job);
    assert_bill(&report);
    let told = &report["jobs"][0];
    assert_eq!((&told["steps_done"], &told["steps_repeated"]), (&400.into(), &0.into()), "{told:#}");
    // Nothing was done twice, so next to nothing of the bill can be for work that is done again.
    let redone = waste_ms(told, "redone");
    assert!(redone <= first_run_ms(&resumed) / 2, "{redone} ms redone, though no step was: {told:#}");
    cluster.end();
}

#[test]
fn a_notice_of_10_s_is_enough_for_a_trainer_that_saves() {
    let cluster = Cluster::start("preempt-10");
    let job = Training::submit(&cluster, 400, &["--step-ms", "10", "--save-every", "0"]);
    cluster.wait_step(&job.job, 60);
    cluster.preempt(&job.job, "10s");
    cluster.wait_step(&job.job, 120);
    cluster.preempt(&job.job, "10s");
    job.ends_as_undisturbed(&cluster);
    let seen = cluster.show(&job.job);
    let resumed: Vec<_> = attempts(&seen).iter().map(|a| a["resumed_step"].as_u64()).collect();
    assert!(resumed[0].is_none() && resumed[1] >= Some(60) && resumed[2] >= Some(120), "{seen:#}");
    assert_bill(&closed_report(&cluster, &job.job));
    cluster.end();
}

#[test]
fn without_a_notice_the_job_goes_on_from_its_last_checkpoint() {
    let cluster = Cluster::start("preempt-0");
    let job = Training::submit(&cluster, 400, &["--step-ms", "10", "--save-every", "50"]);
    cluster.wait_until(&job.job, "a checkpoint", |seen| seen["checkpoint"]["step"].as_u64() >= Some(50));
    cluster.preempt(&job.job, "0s");
    let resumed =
        cluster.wait_until(&job.job, "attempt 2", |seen| seen["attempts"][1]["started_ms"].is_u64());
    let (first, second) = (&resumed["attempts"][0], &resumed["attempts"][1]);
    assert_eq!(first["noticed_ms"], Value::Null, "{first:#}");
    // INV-06: never below what was committed.
    assert!(second["resumed_step"].as_u64() >= first["committed_step"].as_u64(), "{resumed:#}");
    assert!(second["resumed_step"].as_u64() >= Some(50), "{resumed:#}");
    job.ends_as_undisturbed(&cluster);
    let report = closed_report(&cluster, &job.job);
    assert_bill(&report);
    assert_eq!(report["jobs"][0]["preemptions_without_notice"], 1);
    cluster.end();
}

#[test]
fn a_preemption_budget_that_is_spent_ends_the_job_with_75() {
    let cluster = Cluster::start("preempt-budget");
    let flags = [&SAVES[..], &["--retry-preemptions", "1"]].concat();
    let job = Training::submit_with(&cluster, 100_000, &flags, &["--step-ms", "5", "--save-every", "0"]);
    cluster.wait_step(&job.job, 10);
    cluster.preempt(&job.job, "10s");
    cluster.wait_until(&job.job, "the second attempt", |seen| {
        seen["generation"] == 2 && seen["phase"] == "running" && step_of(seen) > 0
    });
    cluster.run(&["preempt", &job.job, "--notice", "10s"]).ok();
    let (code, seen) = cluster.wait(&job.job);
    assert_eq!((code, &seen["outcome"]), (75, &"preemption_budget_spent".into()), "{seen:#}");
    // What it had reached is safe, for a job that is submitted to go on from there.
    assert!(seen["checkpoint"]["step"].as_u64() > Some(10), "{seen:#}");
    cluster.end();
}

/// The report of a job that is done, once its last node is ended and the bill is final.
pub fn closed_report(cluster: &Cluster, job: &str) -> Value {
    spotq_testkit::wait_for(
        DEADLINE,
        || {
            let report = cluster.json(&["report", job]);
            segments(&report).iter().all(|segment| segment["end_ms"].is_u64()).then_some(report)
        },
        "the end of the job's nodes",
    )
    .unwrap()
}

/// Every figure of a job's report follows from its segments, and two reports of it are the same.
pub fn assert_bill(report: &Value) {
    let segments = segments(report);
    assert!(!segments.is_empty());
    assert_contiguous(segments);
    let (told, cost) = (&report["jobs"][0], &report["jobs"][0]["cost"]);
    let billed = bill(segments);
    assert_eq!(nanos(&cost["billed_usd"]), billed, "the bill is not the sum of its segments: {report:#}");
    let billed_ms: u64 =
        segments.iter().map(|s| s["end_ms"].as_u64().unwrap() - s["start_ms"].as_u64().unwrap()).sum();
    assert_eq!(told["billed_ms"].as_u64(), Some(billed_ms), "{told:#}");
    let waste = told["waste"].as_array().unwrap();
    let wasted: i64 = waste.iter().map(|line| nanos(&line["amount_usd"])).sum();
    assert_eq!(nanos(&cost["wasted_usd"]), wasted, "{told:#}");
    let wasted_ms: u64 = waste.iter().map(|line| line["ms"].as_u64().unwrap()).sum();
    assert_eq!(told["useful_ms"].as_u64().unwrap() + wasted_ms, billed_ms, "{told:#}");
    let saved = nanos(&cost["on_demand_useful_usd"]) - billed;
    assert_eq!(nanos(&cost["saved_net_usd"]), saved, "{told:#}");
    assert_eq!(nanos(&cost["saved_gross_usd"]), nanos(&cost["on_demand_billed_usd"]) - billed, "{told:#}");
}

fn segments(report: &Value) -> &[Value] {
    report["segments"].as_array().unwrap()
}

fn attempts(job: &Value) -> &[Value] {
    job["attempts"].as_array().unwrap()
}

fn waste_ms(told: &Value, cause: &str) -> u64 {
    let lines = told["waste"].as_array().unwrap();
    lines.iter().filter(|line| line["cause"] == cause).map(|line| line["ms"].as_u64().unwrap()).sum()
}

fn first_run_ms(job: &Value) -> u64 {
    let first = &job["attempts"][0];
    first["stopped_ms"].as_u64().unwrap() - first["started_ms"].as_u64().unwrap()
}
