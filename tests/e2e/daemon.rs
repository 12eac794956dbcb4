//! The scheduler is killed or stopped: jobs go on, and nothing is left running that has no work.

use spotq_testkit::wait_until;

use crate::cluster::{Cluster, DEADLINE, assert_no_panic};
use crate::leftovers;
use crate::training::Training;

#[test]
fn training_does_not_notice_a_scheduler_that_is_killed() {
    let mut cluster = Cluster::start("kill-running");
    let job = Training::submit(&cluster, 600, &["--step-ms", "5", "--save-every", "100"]);
    cluster.wait_step(&job.job, 30);
    let mut wait = cluster.beside("wait", &["wait", &job.job]);
    wait_until(DEADLINE, || wait.stderr().contains("attempt 1"), "the first word of `wait`").unwrap();
    for _ in 0..3 {
        cluster.kill();
        cluster.start_again();
        cluster.wait_until(&job.job, "the scheduler", |seen| seen["phase"] != "pending");
    }
    job.ends_as_undisturbed(&cluster);
    let seen = cluster.show(&job.job);
    assert_eq!((&seen["generation"], &seen["preemptions"]), (&1.into(), &0.into()), "{seen:#}");
    let status = wait.wait(DEADLINE).unwrap_or_else(|e| panic!("{e}: {}", wait.stderr()));
    assert_eq!(status.code(), Some(0), "{}", wait.stderr());
    cluster.end();
}

#[test]
fn a_job_that_ends_while_the_scheduler_is_away_is_told_later() {
    let mut cluster = Cluster::start("ends-while-away");
    let marker = cluster.dir().join("ended");
    let script = format!("sleep 0.5; touch {}; exit 9", marker.display());
    let job = cluster.submit(&["--", "sh", "-c", &script]);
    cluster.wait_phase(&job, "running");
    cluster.kill();
    wait_until(DEADLINE, || marker.exists(), "the end of the command").unwrap();
    cluster.start_again();
    let (code, seen) = cluster.wait(&job);
    assert_eq!((code, &seen["exit_code"], &seen["generation"]), (9, &9.into(), &1.into()), "{seen:#}");
    cluster.end();
}

#[test]
fn a_scheduler_killed_while_a_job_drains_loses_no_step() {
    let mut cluster = Cluster::start("kill-draining");
    // A state of this size takes a moment to save and upload, so the kill comes in the middle of the drain.
    let job = Training::submit(&cluster, 300, &["--step-ms", "10", "--save-every", "0", "--state-mb", "8"]);
    cluster.wait_step(&job.job, 30);
    let before = cluster.show(&job.job)["progress"]["step"].as_u64();
    cluster.run(&["preempt", &job.job, "--notice", "20s"]).ok();
    cluster.wait_until(&job.job, "the drain", |seen| seen["phase"] == "draining" || seen["generation"] == 2);
    cluster.kill();
    cluster.start_again();
    let seen = cluster.completed(&job.job);
    assert_eq!((&seen["generation"], &seen["preemptions"]), (&2.into(), &1.into()), "{seen:#}");
    assert!(seen["attempts"][1]["resumed_step"].as_u64() >= before, "{seen:#}");
    cluster.end();
}

#[test]
fn an_acknowledged_submit_survives_a_kill_right_after_it() {
    let mut cluster = Cluster::start("kill-submit");
    for round in 0..5 {
        let job = cluster.submit(&["--", "sh", "-c", &format!("exit {}", 10 + round)]);
        cluster.kill();
        cluster.start_again();
        let (code, seen) = cluster.wait(&job);
        assert_eq!(code, 10 + round, "{seen:#}");
        // INV-02: whatever was under way when the scheduler died, one attempt came to an end.
        let ends = seen["attempts"].as_array().unwrap();
        assert_eq!(ends.iter().filter(|a| a["end"] == "failed").count(), 1, "{seen:#}");
    }
    cluster.end();
}

#[test]
fn a_scheduler_that_stops_leaves_training_alone_and_finds_it_again() {
    let mut cluster = Cluster::start("term-running");
    let job = Training::submit(&cluster, 500, &["--step-ms", "5", "--save-every", "100"]);
    cluster.wait_step(&job.job, 20);
    cluster.stop();
    let trainers =
        || leftovers::of(cluster.dir().path()).iter().filter(|p| p.1.contains("spotq-train")).count();
    assert!(trainers() > 0, "training was ended with the scheduler");
    cluster.start_again();
    job.ends_as_undisturbed(&cluster);
    let seen = cluster.show(&job.job);
    assert_eq!((&seen["generation"], &seen["preemptions"]), (&1.into(), &0.into()), "{seen:#}");
    cluster.end();
}

#[test]
fn a_scheduler_without_work_leaves_no_process() {
    let mut cluster = Cluster::start("term-idle");
    let job = cluster.submit(&["--", "true"]);
    cluster.completed(&job);
    // Its node is still there, idle.
    cluster.stop();
    leftovers::wait_gone(cluster.dir().path(), DEADLINE);
    assert_no_panic(&cluster.daemon_log());
    cluster.start_again();
    assert_eq!(cluster.show(&job)["outcome"], "completed");
    cluster.end();
}
