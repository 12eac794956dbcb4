//! Attempts as real processes under a scheduler that a test controls.

#![expect(clippy::unwrap_used, reason = "a test says what went wrong by its panic")]

mod common;

use common::{LIMIT, Scheduler, Worker, WorkerOptions, shell, trainer};
use spotq_model::{Command, JobSpec, Span};
use spotq_proto::v1::{self, StopReason, report::What};
use spotq_testkit::wait_until;

struct Bed {
    dir: tempfile::TempDir,
    scheduler: Scheduler,
    worker: Worker,
}

impl Bed {
    fn new() -> Bed {
        Bed::with(&WorkerOptions::default())
    }

    fn with(options: &WorkerOptions<'_>) -> Bed {
        let dir = tempfile::tempdir().unwrap();
        let scheduler = Scheduler::start();
        let worker = Worker::start(&scheduler, &dir.path().join("node"), options);
        Bed { dir, scheduler, worker }
    }

    fn store(&self) -> std::path::PathBuf {
        self.dir.path().join("store")
    }

    fn grant(&self, job: u32, generation: u64, spec: &JobSpec) -> v1::Grant {
        self.scheduler.grant(job, generation, spec, &self.store())
    }

    fn run(&self, job: u32, spec: &JobSpec) -> v1::Finished {
        let grant = self.grant(job, 1, spec);
        self.scheduler.finished(grant)
    }

    fn nothing_runs(&self) {
        let none = wait_until(LIMIT, || self.worker.leftovers().is_empty(), "the end of all processes");
        none.unwrap_or_else(|error| panic!("{error}: {:?}", self.worker.leftovers()));
    }
}

#[test]
fn a_command_runs_to_its_end_and_its_output_and_exit_code_arrive() {
    let bed = Bed::new();
    let end = bed.run(1, &shell("echo out; echo err >&2; exit 3"));
    assert_eq!((end.exit_code, end.signal, end.stopped()), (Some(3), None, StopReason::None));
    assert!(!end.signalled && end.launch_error.is_none());
    let grant = common::grant(1, 1);
    bed.scheduler.wait_log(grant, "out");
    bed.scheduler.wait_log(grant, "err");
    let kinds: Vec<String> = bed.scheduler.reports(grant).iter().map(|r| format!("{:?}", r.what)).collect();
    let at = |name: &str| kinds.iter().position(|kind| kind.contains(name)).unwrap();
    assert!(
        at("Accepted") < at("Restored") && at("Restored") < at("Started") && at("Started") < at("Finished")
    );
    let resident = bed.scheduler.resident_bytes().unwrap();
    assert!(resident > 0 && resident < 30 << 20, "the worker uses {resident} bytes");
}

#[test]
fn a_signal_is_reported_as_a_signal() {
    let end = Bed::new().run(1, &shell("kill -SEGV $$"));
    assert_eq!((end.exit_code, end.signal), (None, Some(11)));
}

#[test]
fn a_command_that_cannot_be_started_is_a_launch_error() {
    let bed = Bed::new();
    let argv = |argv: &[&str]| JobSpec {
        command: Command::Argv { argv: argv.iter().map(|a| (*a).to_owned()).collect() },
        ..spotq_testkit::job("x")
    };
    let end = bed.run(1, &argv(&["no-such-program-anywhere"]));
    assert!(end.launch_error.clone().unwrap().contains("command not found"), "{end:?}");
    assert_eq!(end.exit_code, None);
    let plain = bed.dir.path().join("plain");
    std::fs::write(&plain, "no program").unwrap();
    let end = bed.run(2, &argv(&[plain.to_str().unwrap()]));
    assert!(end.launch_error.clone().unwrap_or_default().contains("permission denied"), "{end:?}");
    let end = bed.run(3, &JobSpec { workdir: Some("/no/such/dir".into()), ..shell("true") });
    assert!(end.launch_error.unwrap().contains("/no/such/dir"));
    let end = bed.run(4, &JobSpec { setup: Some("exit 4".into()), ..shell("true") });
    assert!(end.launch_error.unwrap().contains("exit code 4"));
    let mut large = shell("true");
    large.env.insert("HUGE".into(), "x".repeat(500_000));
    let end = bed.run(5, &large);
    assert!(end.launch_error.unwrap().contains("too large"));
    assert_eq!(bed.run(6, &shell("no-such-program-anywhere")).exit_code, Some(127), "the shell's own answer");
}

#[test]
fn a_large_environment_newlines_and_a_large_script_arrive_unchanged() {
    let bed = Bed::new();
    let mut spec = shell("printf '%s' \"$LINES\" | wc -l; env | wc -c; echo -n \"$V49\" | wc -c");
    spec.env.insert("LINES".into(), "a\nb\nc 'q' \"d\"".into());
    for n in 0..50 {
        spec.env.insert(format!("V{n}"), "x".repeat(10_000));
    }
    let end = bed.run(1, &spec);
    assert_eq!(end.exit_code, Some(0), "{end:?}");
    bed.scheduler.wait_log(common::grant(1, 1), "2\n");
    bed.scheduler.wait_log(common::grant(1, 1), "10000\n");
    let text = format!("#!/bin/bash\n{}\necho args: \"$@\"\n", "# padding\n".repeat(100_000));
    let script = JobSpec {
        command: Command::Script { text, args: vec!["a b".into(), "c".into()] },
        ..spotq_testkit::job("x")
    };
    assert_eq!(bed.run(2, &script).exit_code, Some(0));
    bed.scheduler.wait_log(common::grant(2, 1), "args: a b c");
    let long = shell(&format!("{}echo the end", "true\n".repeat(50_000)));
    assert_eq!(bed.run(3, &long).exit_code, Some(0));
    bed.scheduler.wait_log(common::grant(3, 1), "the end");
}

#[test]
fn the_join_secret_does_not_reach_the_job() {
    let bed = Bed::new();
    let end = bed.run(1, &shell("env; cat /proc/$PPID/environ | tr '\\0' '\\n' >/dev/null; echo over"));
    assert_eq!(end.exit_code, Some(0));
    let grant = common::grant(1, 1);
    bed.scheduler.wait_log(grant, "over");
    assert!(!bed.scheduler.log(grant).contains(common::SECRET));
    assert!(bed.scheduler.log(grant).contains("SPOTQ_JOB_ID=1"));
}

#[test]
fn double_forked_children_are_killed_at_the_end() {
    let bed = Bed::new();
    let stray =
        "(setsid bash -c 'sleep 600 & sleep 600' >/dev/null 2>&1 &) ; (setsid sleep 600 &); echo left";
    assert_eq!(bed.run(1, &shell(stray)).exit_code, Some(0));
    bed.nothing_runs();
}

#[test]
fn a_command_that_ignores_term_is_killed_after_its_grace() {
    let bed = Bed::new();
    let mut spec = shell("trap '' TERM; echo ready; while true; do sleep 0.05; done");
    spec.checkpoint.grace = Span::millis(300);
    let grant = bed.grant(1, 1, &spec);
    bed.scheduler.wait_log(grant, "ready");
    bed.scheduler.stop(grant, StopReason::Cancel);
    let end = bed.scheduler.finished(grant);
    assert_eq!((end.signal, end.stopped(), end.signalled), (Some(9), StopReason::Cancel, true));
    bed.nothing_runs();
}

#[test]
fn a_trainer_below_a_shell_gets_its_grace_after_the_shell_died() {
    let bed = Bed::new();
    let spec = shell(
        "bash -c 'trap \"sleep 0.3; echo saved; exit 0\" TERM; echo ready; while true; do sleep 0.05; done'; true",
    );
    let grant = bed.grant(1, 1, &spec);
    bed.scheduler.wait_log(grant, "ready");
    bed.scheduler.stop(grant, StopReason::Cancel);
    bed.scheduler.finished(grant);
    bed.scheduler.wait_log(grant, "saved");
}

#[test]
fn checkpoints_are_committed_while_it_runs_and_the_next_attempt_resumes() {
    let bed = Bed::new();
    let spec = trainer(&[("EVERY", "10")]);
    let first = bed.grant(1, 1, &spec);
    wait_until(LIMIT, || bed.scheduler.committed(first).len() >= 2, "two commits").unwrap();
    let newest = bed.scheduler.committed(first).last().unwrap().step.unwrap();
    assert_eq!(newest % 10, 0, "the step is the saved one");
    bed.scheduler.stop(first, StopReason::Superseded);
    let end = bed.scheduler.finished(first);
    assert_eq!((end.signal, end.stopped()), (Some(9), StopReason::Superseded));
    let newest = bed.scheduler.committed(first).last().unwrap().step.unwrap();
    let second = bed.grant(1, 2, &trainer(&[("EVERY", "10"), ("STEPS", &(newest + 30).to_string())]));
    let from = bed.scheduler.wait_report(second, "the restore", |what| match what {
        What::Restored(restored) => Some(restored.from.clone()),
        _ => None,
    });
    assert_eq!(from.unwrap().step, Some(newest));
    assert_eq!(bed.scheduler.finished(second).exit_code, Some(0));
    bed.scheduler.wait_log(second, &format!("starting at step {newest}, resume from '/"));
    assert_eq!(bed.scheduler.committed(second).last().unwrap().step, Some((newest + 30) / 10 * 10));
}

#[test]
fn a_requeue_saves_first() {
    let bed = Bed::new();
    let grant = bed.grant(1, 1, &trainer(&[]));
    bed.scheduler.wait_log(grant, "starting");
    bed.scheduler.stop(grant, StopReason::Requeue);
    let end = bed.scheduler.finished(grant);
    assert_eq!((end.stopped(), end.signalled), (StopReason::Requeue, true));
    assert_eq!(bed.scheduler.committed(grant).len(), 1);
}

#[test]
fn an_older_generation_is_refused_by_the_worker_and_by_the_store() {
    let bed = Bed::new();
    let newer = bed.grant(1, 5, &shell("sleep 600"));
    bed.scheduler.started(newer);
    bed.grant(1, 4, &shell("echo must not run"));
    // Another worker has no journal that knows of generation 5: the store refuses.
    let other = Scheduler::start();
    let worker = Worker::start(
        &other,
        &bed.dir.path().join("other"),
        &WorkerOptions { node: 2, ..Default::default() },
    );
    let old = other.grant(1, 4, &shell("echo must not run"), &bed.store());
    let by = other.wait_report(old, "the refusal", |what| match what {
        What::Superseded(superseded) => Some(superseded.by_generation),
        _ => None,
    });
    assert_eq!(by, 5);
    let end = other.finished(old);
    assert_eq!((end.stopped(), end.exit_code), (StopReason::Superseded, None));
    assert!(bed.scheduler.reports(common::grant(1, 4)).is_empty());
    drop(worker);
}

#[test]
fn the_scheduler_can_be_away_and_nothing_is_lost_or_repeated() {
    let dir = tempfile::tempdir().unwrap();
    let scheduler = Scheduler::start();
    let node = dir.path().join("node");
    let worker = Worker::start(&scheduler, &node, &WorkerOptions::default());
    let store = dir.path().join("store");
    let flag = dir.path().join("flag");
    let text = format!(
        "echo one; while [ ! -e {0} ]; do sleep 0.02; done; echo two; touch {0}.done; exit 5",
        flag.display()
    );
    let grant = scheduler.grant(1, 1, &shell(&text), &store);
    scheduler.wait_log(grant, "one");
    scheduler.set_deaf(true);
    let scheduler = scheduler.restart_after(|| {
        std::fs::write(&flag, "").unwrap();
        let done = flag.with_extension("done");
        wait_until(LIMIT, || done.exists(), "the job goes on without a scheduler").unwrap();
    });
    scheduler.finished(grant);
    assert!(scheduler.hellos().last().unwrap().held.contains(&grant));
    scheduler.set_deaf(false);
    let scheduler = scheduler.restart_after(|| {});
    scheduler.wait_log(grant, "two");
    assert_eq!(scheduler.log(grant), "one\ntwo\n");
    let ends = scheduler.reports(grant).iter().filter(|r| matches!(r.what, Some(What::Finished(_)))).count();
    assert_eq!(ends, 1, "one end, however often it was sent");
    wait_until(LIMIT, || !node.join("attempts/1-1").exists(), "the attempt's files are removed").unwrap();
    drop(worker);
}

#[test]
fn a_killed_worker_takes_its_job_along_and_its_successor_reports_the_end() {
    let mut bed = Bed::new();
    let grant = bed.grant(1, 1, &shell("(setsid sleep 600 &); echo ready; sleep 600"));
    bed.scheduler.wait_log(grant, "ready");
    bed.worker.signal(rustix::process::Signal::KILL);
    bed.worker.wait_exit();
    bed.worker.start_again(&bed.scheduler);
    let end = bed.scheduler.finished(grant);
    assert!(end.detail.unwrap().contains("restarted"));
    assert_eq!((end.exit_code, end.signal), (None, None));
    bed.nothing_runs();
    assert_eq!(bed.run(2, &shell("exit 0")).exit_code, Some(0), "and it works on");
}

#[test]
fn a_terminated_worker_saves_reports_and_leaves() {
    let mut bed = Bed::new();
    let grant = bed.grant(1, 1, &trainer(&[]));
    bed.scheduler.wait_log(grant, "starting");
    bed.worker.signal(rustix::process::Signal::TERM);
    let end = bed.scheduler.finished(grant);
    assert_eq!(end.stopped(), StopReason::WorkerLeaving);
    assert_eq!(bed.scheduler.committed(grant).len(), 1);
    assert_eq!(bed.worker.wait_exit().code(), Some(0));
    bed.nothing_runs();
}

#[test]
fn a_worker_without_a_scheduler_saves_and_leaves_in_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let scheduler = Scheduler::start();
    scheduler.set_dead_man(300);
    let mut worker = Worker::start(&scheduler, &dir.path().join("node"), &WorkerOptions::default());
    let mut spec = trainer(&[]);
    spec.checkpoint.grace = Span::millis(500);
    let grant = scheduler.grant(1, 1, &spec, &dir.path().join("store"));
    scheduler.wait_log(grant, "starting");
    drop(scheduler);
    assert_eq!(worker.wait_exit().code(), Some(3));
    assert!(worker.leftovers().is_empty());
}

#[test]
fn a_stop_of_a_grant_that_never_came_is_answered() {
    let bed = Bed::new();
    let grant = common::grant(9, 1);
    bed.scheduler.stop(grant, StopReason::Cancel);
    assert!(bed.scheduler.finished(grant).detail.unwrap().contains("never ran"));
}

#[test]
fn outputs_are_uploaded_and_come_back_in_the_next_attempt() {
    let bed = Bed::new();
    let spec = |text: &str| JobSpec { outputs: vec!["out/*.txt".into()], ..trainer(&[("T", text)]) };
    let mut first = spec("");
    first.command = Command::Shell {
        text: "mkdir -p out; echo one > out/a.txt; echo x > out/b.bin; echo 1 > $SPOTQ_CHECKPOINT_DIR/step-1"
            .into(),
    };
    let grant = bed.grant(1, 1, &first);
    assert_eq!(bed.scheduler.finished(grant).detail, None);
    assert!(bed.store().join("outputs/log").exists());
    let mut second = spec("");
    second.command = Command::Shell { text: "cat out/a.txt; ls out".into() };
    let grant = bed.grant(1, 2, &second);
    assert_eq!(bed.scheduler.finished(grant).exit_code, Some(0));
    bed.scheduler.wait_log(grant, "a.txt");
    assert!(bed.scheduler.log(grant).starts_with("one\n") && !bed.scheduler.log(grant).contains("b.bin"));
}

#[test]
fn an_unknown_saver_is_committed_when_its_file_is_closed_and_quiet() {
    let bed = Bed::new();
    let mut spec = shell(
        "exec 7> $SPOTQ_CHECKPOINT_DIR/model; echo half >&7; echo open; read -t 1.5 <> <(:); exec 7>&-; echo closed; sleep 600",
    );
    spec.checkpoint.profile = spotq_model::Profile::Generic;
    let grant = bed.grant(1, 1, &spec);
    bed.scheduler.wait_log(grant, "open");
    bed.scheduler.wait_log(grant, "closed");
    assert!(bed.scheduler.committed(grant).is_empty(), "not while it is open");
    wait_until(LIMIT, || bed.scheduler.committed(grant).len() == 1, "the commit").unwrap();
}

/// A command that, once `flag` is there, saves one checkpoint and ends.
fn saves_and_ends(flag: &std::path::Path, code: i32) -> JobSpec {
    let mut spec = shell(&format!(
        "echo ready; while [ ! -e {} ]; do sleep 0.02; done; \
         echo x > $SPOTQ_CHECKPOINT_DIR/.s.tmp; mv $SPOTQ_CHECKPOINT_DIR/.s.tmp $SPOTQ_CHECKPOINT_DIR/step-1; exit {code}",
        flag.display()
    ));
    spec.checkpoint.profile = spotq_model::Profile::Rename;
    spec
}

/// A bed whose command has ended after its store went away; nothing of the end is reported yet.
fn ended_without_a_store(code: i32) -> (Bed, v1::Grant) {
    let bed = Bed::new();
    let flag = bed.dir.path().join("flag");
    let grant = bed.grant(1, 1, &saves_and_ends(&flag, code));
    bed.scheduler.wait_log(grant, "ready");
    std::fs::rename(bed.store(), bed.dir.path().join("away")).unwrap();
    std::fs::write(bed.store(), "no directory").unwrap();
    std::fs::write(&flag, "").unwrap();
    bed.scheduler.wait_log(grant, "the last checkpoint was not uploaded");
    assert!(!bed.scheduler.reports(grant).iter().any(|r| matches!(r.what, Some(What::Finished(_)))));
    (bed, grant)
}

#[test]
fn results_that_cannot_be_stored_at_first_are_stored_when_the_store_is_back() {
    let (bed, grant) = ended_without_a_store(0);
    std::fs::remove_file(bed.store()).unwrap();
    std::fs::rename(bed.dir.path().join("away"), bed.store()).unwrap();
    let end = bed.scheduler.finished(grant);
    assert_eq!((end.exit_code, end.detail), (Some(0), None));
    assert_eq!(bed.scheduler.committed(grant).len(), 1);
}

#[test]
fn an_attempt_whose_results_are_not_stored_is_lost_and_says_what_is_missing() {
    let (bed, grant) = ended_without_a_store(0);
    bed.scheduler.send(v1::scheduler_message::Kind::Stop(v1::StopTask {
        grant: Some(grant),
        reason: StopReason::Cancel.into(),
        deadline_ms: 1,
    }));
    let end = bed.scheduler.finished(grant);
    assert_eq!((end.exit_code, end.signal, end.stopped()), (None, None, StopReason::None));
    let detail = end.detail.unwrap();
    assert!(detail.contains("the last checkpoint was not uploaded"), "{detail}");
    bed.scheduler.wait_log(grant, "not everything that it made is stored");
}

#[test]
fn a_command_that_failed_keeps_its_exit_code_when_its_results_are_not_stored() {
    let (bed, grant) = ended_without_a_store(3);
    bed.scheduler.send(v1::scheduler_message::Kind::Stop(v1::StopTask {
        grant: Some(grant),
        reason: StopReason::Cancel.into(),
        deadline_ms: 1,
    }));
    let end = bed.scheduler.finished(grant);
    assert_eq!(end.exit_code, Some(3));
    assert!(end.detail.unwrap().contains("was not uploaded"));
}

/// An unknown saver that writes and ends as a stopped shell does, after `before`.
fn half_a_save(before: &str) -> JobSpec {
    let mut spec = shell(&format!("{before} echo half > $SPOTQ_CHECKPOINT_DIR/model; exit 143"));
    spec.checkpoint.profile = spotq_model::Profile::Generic;
    spec
}

#[test]
fn an_exit_code_like_that_of_a_stop_is_a_failure_when_nobody_asked_for_one() {
    let bed = Bed::with(&WorkerOptions { args: &["--quiet-hurried", "60s"], ..Default::default() });
    let grant = bed.grant(1, 1, &half_a_save(""));
    assert_eq!(bed.scheduler.finished(grant).exit_code, Some(143));
    assert!(bed.scheduler.committed(grant).is_empty(), "nobody knows whether that save was whole");
    // Asked to end, it ends as it means to, and what it saved counts.
    let waits = "trap asked=1 TERM; echo ready; while [ -z \"$asked\" ]; do sleep 0.02; done;";
    let grant = bed.grant(2, 1, &half_a_save(waits));
    bed.scheduler.wait_log(grant, "ready");
    bed.scheduler.stop(grant, StopReason::Cancel);
    assert_eq!(bed.scheduler.finished(grant).exit_code, Some(143));
    assert_eq!(bed.scheduler.committed(grant).len(), 1);
}

/// A process that leaves the tree: no parent, no session and no environment in common with its command. It writes its
/// number to `file`.
fn stray(file: &std::path::Path) -> String {
    format!(
        "(env -i setsid /bin/sh -c 'echo $$ > {0}.new; mv {0}.new {0}; exec sleep 1000' >/dev/null 2>&1 &); \
         while [ ! -e {0} ]; do sleep 0.02; done; echo left;",
        file.display()
    )
}

/// Ends a stray that a failed test leaves.
struct Stray(u32);

impl Stray {
    fn of(file: &std::path::Path) -> Stray {
        wait_until(LIMIT, || file.exists(), "the stray's number").unwrap();
        Stray(std::fs::read_to_string(file).unwrap().trim().parse().unwrap())
    }

    fn lives(&self) -> bool {
        let command = std::fs::read(format!("/proc/{}/cmdline", self.0)).unwrap_or_default();
        command.starts_with(b"sleep\0")
    }
}

impl Drop for Stray {
    fn drop(&mut self) {
        if self.lives() {
            let _ = spotq_testkit::processes::signal(self.0, rustix::process::Signal::KILL);
        }
    }
}

#[test]
fn a_child_without_parent_session_and_environment_is_killed_at_the_end_with_cgroups_and_without() {
    for args in [&["--no-cgroups"][..], &[]] {
        let bed = Bed::with(&WorkerOptions { args, ..Default::default() });
        let file = bed.dir.path().join("stray");
        assert_eq!(bed.run(1, &shell(&format!("{} exit 0", stray(&file)))).exit_code, Some(0));
        assert!(!Stray::of(&file).lives(), "{args:?}");
    }
}

#[test]
fn a_stray_ends_with_the_last_attempt_that_it_may_belong_to_and_not_before() {
    let bed = Bed::with(&WorkerOptions { args: &["--no-cgroups"], ..Default::default() });
    let place = |name: &str| bed.dir.path().join(name);
    let until = |flag: &str| format!("while [ ! -e {} ]; do sleep 0.02; done", place(flag).display());
    let first = bed.grant(1, 1, &shell(&format!("{} {}", stray(&place("one")), until("end"))));
    let one = Stray::of(&place("one"));
    // The second begins after the first one's stray, so that this cannot be its own.
    assert_eq!(bed.run(2, &shell(&format!("{} exit 0", stray(&place("two"))))).exit_code, Some(0));
    assert!(one.lives());
    let two = Stray::of(&place("two"));
    std::fs::write(place("end"), "").unwrap();
    bed.scheduler.finished(first);
    assert!(!one.lives() && !two.lives());
}

#[test]
fn a_store_that_is_away_or_empty_when_a_replacement_starts_is_not_the_jobs_fault() {
    let bed = Bed::new();
    let mut spec = shell("echo started");
    spec.outputs = vec!["*.txt".to_owned()];
    // Empty, as the mount point of a store that is not mounted: its emptiness is certain at once.
    std::fs::create_dir(bed.store()).unwrap();
    let grant = bed.scheduler.grant_from_step(1, 2, &spec, &bed.store(), Some(50));
    let end = bed.scheduler.finished(grant);
    assert_eq!((end.exit_code, end.launch_error), (None, None));
    assert!(end.detail.unwrap().contains("step 50 was committed"));
    // Away: the attempt waits for it.
    std::fs::remove_dir_all(bed.store()).unwrap();
    std::fs::write(bed.store(), "no directory").unwrap();
    let grant = bed.grant(2, 1, &spec);
    bed.scheduler.wait_log(grant, "waiting for the checkpoint store");
    std::fs::remove_file(bed.store()).unwrap();
    assert_eq!(bed.scheduler.finished(grant).exit_code, Some(0));
}

#[test]
fn a_pattern_of_outputs_without_files_is_told_when_the_command_ended_well() {
    let bed = Bed::new();
    let mut spec = shell("echo x > there.txt");
    spec.outputs = vec!["there.txt".to_owned(), "nothing/*.bin".to_owned()];
    assert_eq!(bed.run(1, &spec).exit_code, Some(0));
    let log = bed.scheduler.log(common::grant(1, 1));
    assert!(
        log.contains("`outputs: nothing/*.bin` matches no file") && !log.contains("outputs: there"),
        "{log}"
    );
}
