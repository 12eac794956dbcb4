//! The queue: many jobs at once, jobs on hold, jobs that no node fits, and nodes that take the next job.

use serde_json::{Value, json};

use crate::cluster::{Cluster, Ran};

#[test]
fn twenty_jobs_at_once_all_complete() {
    let cluster = Cluster::start("twenty");
    let jobs: Vec<String> = (0..20)
        .map(|n| cluster.submit(&["--name", &format!("job-{n}"), "--", "sh", "-c", "echo $SPOTQ_JOB_ID"]))
        .collect();
    let args: Vec<&str> = ["wait", "-q"].into_iter().chain(jobs.iter().map(String::as_str)).collect();
    cluster.run(&args).ok();
    for job in &jobs {
        assert_eq!(cluster.logs(job).ok().stdout, format!("{job}\n"));
    }
    let all = cluster.json(&["queue", "--all"]);
    assert!(all.as_array().unwrap().iter().all(|job| job["outcome"] == "completed"), "{all:#}");
    cluster.end();
}

#[test]
fn a_job_on_hold_is_not_placed_before_it_is_released() {
    let cluster = Cluster::start("hold");
    let held = cluster.submit(&["--hold", "--", "true"]);
    let other = cluster.submit(&["--", "true"]);
    cluster.completed(&other);
    let seen = cluster.show(&held);
    assert_eq!((&seen["phase"], &seen["attempts"]), (&json!("held"), &json!([])), "{seen:#}");
    cluster.run(&["release", &held]).ok();
    cluster.completed(&held);
    cluster.run(&["release", &held]).refuses(65, &["done"]);
    cluster.run(&["requeue", &held]).refuses(65, &["done"]);
    cluster.end();
}

#[test]
fn a_free_node_takes_the_next_job() {
    let cluster = Cluster::start("reuse");
    let nodes: Vec<Value> = (0..3)
        .map(|_| {
            let job = cluster.submit(&["--", "true"]);
            cluster.completed(&job)["attempts"][0]["node"].clone()
        })
        .collect();
    assert!(nodes.iter().all(|node| *node == nodes[0]), "{nodes:?}");
    cluster.end();
}

#[test]
fn a_job_that_no_node_fits_says_why_and_what_would_fit() {
    let cluster = Cluster::start("no-pool");
    let gpus = cluster.submit(&["--gpus", "H200:8", "--", "true"]);
    let seen = cluster.wait_until(&gpus, "a reason", |seen| seen["reason"].as_str() != Some("in the queue"));
    assert_eq!(seen["phase"], "pending");
    assert!(seen["reason"].as_str().unwrap().contains("no pool has such a node"), "{seen:#}");
    let told = cluster.json(&["explain", &gpus]);
    assert!(told["headline"].as_str().unwrap().contains("no pool"), "{told:#}");
    let cheap = cluster.submit(&["--max-hourly-cost", "0.000001", "--", "true"]);
    let seen = cluster.wait_until(&cheap, "a reason", |seen| seen["reason"].as_str() != Some("in the queue"));
    assert!(seen["reason"].as_str().unwrap().contains("max_hourly_cost"), "{seen:#}");
    let table = cluster.run(&["queue"]).ok().stdout;
    assert!(table.contains("no pool has such a node") && table.contains("max_hourly"), "{table}");
    let why = cluster.run(&["explain", &cheap]).ok().stdout;
    assert!(why.contains("max_hourly_cost"), "{why}");
    for job in [&gpus, &cheap] {
        cluster.run(&["cancel", job]).ok();
        assert_eq!(cluster.wait(job).0, 130);
    }
    cluster.end();
}

#[test]
fn a_requeued_job_goes_on_from_its_checkpoint() {
    let cluster = Cluster::start("requeue");
    let job = crate::training::Training::submit(&cluster, 300, &["--step-ms", "10", "--save-every", "0"]);
    cluster.wait_step(&job.job, 50);
    cluster.run(&["requeue", &job.job]).ok();
    let seen = cluster.wait_until(&job.job, "attempt 2", |seen| seen["attempts"][1]["started_ms"].is_u64());
    assert_eq!(seen["attempts"][0]["end"], "requeued", "{seen:#}");
    assert!(seen["attempts"][1]["resumed_step"].as_u64() >= Some(50), "{seen:#}");
    job.ends_as_undisturbed(&cluster);
    assert_eq!(cluster.show(&job.job)["preemptions"], 0);
    cluster.end();
}

#[test]
fn a_higher_priority_goes_first() {
    let cluster = Cluster::start_with_settings("priority", "policies: {nodes_max: 1}\n", &[]);
    let blocker = cluster.submit(&["--", "sh", "-c", "until [ -e go ]; do sleep 0.02; done"]);
    cluster.wait_phase(&blocker, "running");
    let low = cluster.submit(&["--priority", "-5", "--", "true"]);
    let high = cluster.submit(&["--priority", "5", "--", "true"]);
    let reason =
        cluster.wait_until(&high, "a reason", |seen| seen["reason"].as_str() != Some("in the queue"));
    assert!(reason["reason"].as_str().unwrap().contains("limit of 1 live nodes"), "{reason:#}");
    cluster.dir().write("go", "");
    let (low, high) = (cluster.completed(&low), cluster.completed(&high));
    assert!(high["started_ms"].as_u64() <= low["started_ms"].as_u64(), "{high:#} {low:#}");
    Ran::of(cluster.command(&["queue"])).ok();
    cluster.end();
}
