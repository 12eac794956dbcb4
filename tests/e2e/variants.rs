//! Trainers that misbehave as real programs do, preempted: the model is still that of an undisturbed run.

use serde_json::Value;
use spotq_testkit::wait_until;

use crate::cluster::{Cluster, DEADLINE};
use crate::leftovers;
use crate::training::{SAVES, Training};

/// Starts a training that lasts for a few seconds, waits for `step`, preempts it, and gives the job when attempt 2 runs.
fn preempted(
    cluster: &Cluster,
    step: u64,
    notice: &str,
    flags: &[&str],
    trainer: &[&str],
) -> (Training, Value) {
    let pace = ["--step-ms", "8"];
    let job = Training::submit_with(cluster, 500, flags, &[&pace, trainer].concat());
    cluster.wait_step(&job.job, step);
    cluster.preempt(&job.job, notice);
    let seen = cluster.wait_until(&job.job, "attempt 2", |seen| {
        seen["attempts"][1]["started_ms"].is_u64() || seen["phase"] == "done"
    });
    assert_eq!(seen["attempts"][0]["end"], "preempted", "{seen:#}");
    (job, seen)
}

#[test]
fn one_that_ignores_term_is_killed_and_its_save_is_kept() {
    let cluster = Cluster::start("ignore-term");
    let flags = [&SAVES[..], &["--grace", "1s"]].concat();
    let (job, seen) = preempted(&cluster, 60, "10s", &flags, &["--ignore-term", "--save-every", "0"]);
    assert!(seen["attempts"][1]["resumed_step"].as_u64() >= Some(60), "{seen:#}");
    job.ends_as_undisturbed(&cluster);
    cluster.end();
}

#[test]
fn one_that_saves_on_a_timer_alone_goes_on_from_its_last_save() {
    let cluster = Cluster::start("timer-only");
    let trainer = ["--timer-only", "--save-every", "0", "--save-every-ms", "150"];
    let (job, seen) = preempted(&cluster, 100, "3s", &["--checkpoint-profile", "rename"], &trainer);
    let resumed = seen["attempts"][1]["resumed_step"].as_u64();
    assert!(resumed > Some(0) && resumed >= seen["attempts"][0]["committed_step"].as_u64(), "{seen:#}");
    job.ends_as_undisturbed(&cluster);
    cluster.end();
}

#[test]
fn one_that_dies_of_the_save_signal_on_a_notice_was_preempted_and_did_not_fail() {
    let cluster = Cluster::start("die-on-usr1");
    // No failure is allowed, so a death that counted as one would end the job.
    let flags = [&SAVES[..], &["--retry-failures", "0"]].concat();
    let (job, _) = preempted(&cluster, 60, "10s", &flags, &["--die-on-usr1", "--save-every", "25"]);
    job.ends_as_undisturbed(&cluster);
    assert_eq!(cluster.show(&job.job)["failures"], 0);
    cluster.end();
}

#[test]
fn one_that_exits_0_on_a_notice_has_not_completed() {
    let cluster = Cluster::start("exit-zero");
    let trainer = ["--exit-zero-on-term", "--save-every", "20"];
    let (job, seen) = preempted(&cluster, 60, "2s", &["--checkpoint-profile", "rename"], &trainer);
    assert_ne!(seen["phase"], "done", "half a training passed for a whole one: {seen:#}");
    job.ends_as_undisturbed(&cluster);
    let log = cluster.logs(&job.job).stdout;
    assert!(log.contains("stopping without a save") || log.contains("saved step"), "{log}");
    cluster.end();
}

#[test]
fn one_that_tears_its_saves_is_never_resumed_from_a_torn_one() {
    let cluster = Cluster::start("torn-save");
    // Half of the time a save is under way, each for half a second.
    let trainer = ["--torn-save", "--save-every", "60", "--step-ms", "8"];
    let job = Training::submit_with(&cluster, 700, &["--save-signal", "USR1"], &trainer);
    for (attempt, step) in [(1, 70), (2, 240), (3, 400)] {
        cluster.wait_until(&job.job, "the attempt's steps", |seen| {
            seen["phase"] == "done"
                || (seen["generation"] == attempt
                    && seen["attempts"][attempt - 1]["last_step"].as_u64() >= Some(step))
        });
        let notice = if attempt == 2 { "0s" } else { "2s" };
        cluster.preempt(&job.job, notice);
    }
    job.ends_as_undisturbed(&cluster);
    let log = cluster.logs(&job.job);
    assert!(!log.stderr.contains("skipping"), "a torn file was restored: {}", log.stderr);
    cluster.end();
}

#[test]
fn one_that_leaves_a_grandchild_leaves_no_process() {
    let cluster = Cluster::start("double-fork");
    let strays =
        || leftovers::of(cluster.dir().path()).iter().filter(|p| p.1.contains("--stray-stage")).count();
    let job = Training::submit(&cluster, 500, &["--double-fork", "--step-ms", "8", "--save-every", "0"]);
    cluster.wait_step(&job.job, 60);
    assert!(strays() > 0, "the trainer did not fork: the test tests nothing");
    cluster.preempt(&job.job, "10s");
    cluster.wait_step(&job.job, 100);
    assert!(strays() <= 1, "the first attempt's grandchild lives on beside the second's");
    job.ends_as_undisturbed(&cluster);
    wait_until(DEADLINE, || strays() == 0, "the end of the grandchildren").unwrap();
    cluster.end();
}

#[test]
fn one_that_crashes_is_tried_again_as_often_as_the_job_allows() {
    let cluster = Cluster::start("crash");
    let crash = ["--crash-at-step", "120", "--save-every", "50", "--crash-attempts", "2"];
    let flags = [&SAVES[..], &["--retry-failures", "2"]].concat();
    let job = Training::submit_with(&cluster, 200, &flags, &crash);
    job.ends_as_undisturbed(&cluster);
    let seen = cluster.show(&job.job);
    assert_eq!((&seen["failures"], &seen["preemptions"]), (&2.into(), &0.into()), "{seen:#}");
    // It went on from its checkpoint rather than from the start.
    assert_eq!(seen["attempts"][2]["resumed_step"], 100, "{seen:#}");
    let flags = [&SAVES[..], &["--retry-failures", "1"]].concat();
    let job = Training::submit_with(&cluster, 200, &flags, &crash);
    let (code, seen) = cluster.wait(&job.job);
    assert_eq!((code, &seen["outcome"], &seen["failures"]), (134, &"failed".into(), &2.into()), "{seen:#}");
    cluster.end();
}
