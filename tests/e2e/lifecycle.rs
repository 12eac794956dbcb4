//! How a job ends: exit codes, limits and orders of the user; and the shapes of JSON that programs rely on.

use serde_json::{Value, json};

use crate::cluster::{Cluster, DEADLINE, Ran};
use crate::training::Training;

#[test]
fn a_job_ends_with_its_own_code() {
    let cluster = Cluster::start("own-code");
    let job = cluster.submit(&["--", "sh", "-c", "exit 7"]);
    let (code, seen) = cluster.wait(&job);
    assert_eq!((code, &seen["outcome"], &seen["exit_code"]), (7, &json!("failed"), &json!(7)), "{seen:#}");
    let ran = cluster.run(&["run", "--", "sh", "-c", "echo data; echo talk >&2; exit 3"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (3, "data\n"), "{ran:#?}");
    assert!(ran.stderr.contains("talk\n"), "{ran:#?}");
    cluster.end();
}

#[test]
fn a_command_that_does_not_exist_is_125_and_names_itself() {
    let cluster = Cluster::start("not-found");
    let job = cluster.submit(&["--", "no-such-program-here", "--flag"]);
    let (code, seen) = cluster.wait(&job);
    assert_eq!((code, &seen["outcome"]), (125, &json!("launch_failure")), "{seen:#}");
    assert!(seen["outcome_text"].as_str().unwrap().contains("no-such-program-here"), "{seen:#}");
    let gone = cluster.dir().join("gone");
    std::fs::create_dir(&gone).unwrap();
    let job = cluster.submit(&["--workdir", gone.to_str().unwrap(), "--hold", "--", "true"]);
    std::fs::remove_dir(&gone).unwrap();
    cluster.run(&["release", &job]).ok();
    let (code, seen) = cluster.wait(&job);
    assert_eq!((code, &seen["outcome"]), (125, &json!("launch_failure")), "{seen:#}");
    assert!(seen["outcome_text"].as_str().unwrap().contains("gone"), "{seen:#}");
    cluster.end();
}

#[test]
fn a_time_limit_is_124_and_a_trainer_that_ignores_term_is_killed() {
    let cluster = Cluster::start("time-limit");
    let flags = ["--time-limit", "1s", "--grace", "1s"];
    let job = Training::submit_with(&cluster, 1_000_000, &flags, &["--ignore-term", "--step-ms", "5"]);
    let (code, seen) = cluster.wait(&job.job);
    assert_eq!((code, &seen["outcome"]), (124, &json!("timeout")), "{seen:#}");
    cluster.end();
}

#[test]
fn a_budget_is_77_and_the_bill_stays_within_it_but_for_the_drain() {
    let cluster = Cluster::start("budget");
    // A node costs a few cents an hour, so this lasts for seconds.
    let flags = ["--budget", "0.00005", "--save-signal", "USR1", "--grace", "2s"];
    let job = Training::submit_with(&cluster, 1_000_000, &flags, &["--step-ms", "5"]);
    let (code, seen) = cluster.wait(&job.job);
    assert_eq!((code, &seen["outcome"]), (77, &json!("budget_exhausted")), "{seen:#}");
    assert!(seen["checkpoint"]["step"].as_u64() > Some(0), "stopped without a checkpoint: {seen:#}");
    cluster.end();
}

#[test]
fn a_cancelled_job_is_130_whether_it_waits_or_runs() {
    let cluster = Cluster::start("cancel");
    let waiting = cluster.submit(&["--hold", "--", "true"]);
    cluster.run(&["cancel", &waiting]).ok();
    let (code, seen) = cluster.wait(&waiting);
    assert_eq!((code, &seen["outcome"]), (130, &json!("cancelled")), "{seen:#}");
    assert_eq!(seen["attempts"], json!([]));
    let running = Training::submit(&cluster, 1_000_000, &["--step-ms", "5"]);
    cluster.wait_step(&running.job, 5);
    cluster.run(&["cancel", &running.job]).ok();
    let (code, seen) = cluster.wait(&running.job);
    assert_eq!((code, &seen["outcome"]), (130, &json!("cancelled")), "{seen:#}");
    // Exactly one end: another order is refused and changes nothing (INV-11).
    let again = cluster.run(&["cancel", &running.job]);
    assert!(again.code == 0 || again.code == 65, "{again:#?}");
    assert_eq!(cluster.show(&running.job)["outcome"], "cancelled");
    cluster.run(&["preempt", &running.job]).refuses(65, &[]);
    cluster.end();
}

/// Of a job, in `show`, `queue` and `wait`.
const JOB_FIELDS: [&str; 24] = [
    "job_id",
    "task",
    "job_uuid",
    "name",
    "user",
    "phase",
    "reason",
    "outcome",
    "outcome_text",
    "exit_code",
    "submitted",
    "submitted_ms",
    "started",
    "ended_ms",
    "generation",
    "preemptions",
    "failures",
    "progress",
    "checkpoint",
    "cost",
    "node",
    "attempts",
    "checkpoint_url",
    "spec",
];
/// Of a ledger segment.
const SEGMENT_FIELDS: [&str; 9] = [
    "node",
    "pool",
    "market",
    "start_ms",
    "end_ms",
    "price_usd_h",
    "on_demand_usd_h",
    "amount_usd",
    "price_source",
];
/// Of a job in a report.
const REPORT_FIELDS: [&str; 9] =
    ["job_id", "name", "outcome", "cost", "attempts", "preemptions", "steps_done", "steps_repeated", "waste"];

#[test]
fn the_json_of_each_command_has_its_documented_fields() {
    let cluster = Cluster::start("shapes");
    let submitted =
        Ran::of(cluster.command(&["submit", "-o", "json", "--name", "shape", "--", "true"])).json();
    fields(&submitted, &["job_id", "job_uuid", "name", "created", "checkpoint_url", "warnings"]);
    let job = submitted["job_id"].to_string();
    let waited = cluster.completed(&job);
    let shown = cluster.show(&job);
    let queued = cluster.json(&["queue", "--all"]);
    for seen in [&waited, &shown, &queued[0]] {
        fields(seen, &JOB_FIELDS);
        assert_eq!(
            (&seen["name"], &seen["user"], &seen["phase"]),
            (&json!("shape"), &json!("ada"), &json!("done"))
        );
        assert_eq!(seen["job_uuid"], submitted["job_uuid"]);
    }
    assert_eq!(cluster.json(&["queue"]), json!([]), "a job that is done is in the queue");
    let report = super::preemption::closed_report(&cluster, &job);
    super::preemption::assert_bill(&report);
    fields(&report["segments"][0], &SEGMENT_FIELDS);
    fields(&report["jobs"][0], &REPORT_FIELDS);
    let twice = [cluster.json(&["report", &job]), cluster.json(&["report", &job])];
    assert_eq!(twice[0]["jobs"], twice[1]["jobs"]);
    assert_eq!(twice[0]["segments"], twice[1]["segments"]);
    fields(
        &cluster.json(&["info"]),
        &["server", "version", "cluster", "epoch", "jobs_done", "nodes_live", "store_url"],
    );
    let offers = cluster.json(&["offers"]);
    fields(
        &offers[0],
        &["cloud", "region", "zone", "instance_type", "market", "price_usd_h", "on_demand_usd_h"],
    );
    cluster.end();
}

#[test]
fn a_submit_with_the_same_key_is_the_same_job_also_after_a_kill() {
    let mut cluster = Cluster::start("idempotent");
    let args = ["submit", "-o", "json", "--client-key", "same", "--", "true"];
    let first = Ran::of(cluster.command(&args)).json();
    cluster.completed(&first["job_id"].to_string());
    cluster.kill();
    cluster.start_again();
    let second = Ran::of(cluster.command(&args)).json();
    assert_eq!((&second["job_id"], &second["created"]), (&first["job_id"], &json!(false)));
    assert_eq!(cluster.json(&["queue", "--all"]).as_array().map(Vec::len), Some(1));
    cluster.end();
}

#[test]
fn a_job_gets_what_the_contract_promises() {
    let cluster = Cluster::start("contract");
    let script = "#!/bin/sh\nset -eu\ntest -d \"$SPOTQ_CHECKPOINT_DIR\"\ntest -z \"$SPOTQ_RESUME_FROM\"\n\
                  test \"$SPOTQ_ATTEMPT\" = 1\ntest ! -e \"$SPOTQ_NOTICE_FILE\"\n\
                  echo '{\"step\": 3, \"total\": 9}' >> \"$SPOTQ_PROGRESS_FILE\"\n\
                  test \"$SLURM_JOB_ID\" = 1\ntest \"$RANK/$WORLD_SIZE\" = 0/1\n\
                  test \"$GIVEN\" = \"a b=c\"\necho \"args: $*\"\n";
    let file = cluster.dir().write("job.sh", script);
    let job = cluster.submit(&[file.to_str().unwrap(), "-e", "GIVEN=a b=c", "--", "one", "two words"]);
    let seen = cluster.completed(&job);
    assert_eq!(seen["progress"], json!({"step": 3, "total": 9}));
    assert_eq!(cluster.logs(&job).ok().stdout, "args: one two words\n");
    cluster.end();
}

#[test]
fn interrupting_run_cancels_the_job_and_ends_with_130() {
    let cluster = Cluster::start("ctrl-c");
    let mut run =
        cluster.beside("run", &["run", "--grace", "1s", "--", "sh", "-c", "echo up; exec sleep 3600"]);
    cluster.wait_until("1", "the command", |seen| seen["phase"] == "running");
    run.signal(rustix::process::Signal::INT).unwrap();
    let status = run.wait(DEADLINE).unwrap_or_else(|e| panic!("{e}: {}", run.stderr()));
    assert_eq!(status.code(), Some(130), "{}", run.stderr());
    assert_eq!(cluster.show("1")["outcome"], "cancelled");
    cluster.end();
}

fn fields(value: &Value, names: &[&str]) {
    let object = value.as_object().unwrap_or_else(|| panic!("{value} is no object"));
    let missing: Vec<_> = names.iter().filter(|name| !object.contains_key(**name)).collect();
    assert!(missing.is_empty(), "no {missing:?} in {value:#}");
}
