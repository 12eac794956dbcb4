//! The `spotq` binary against a scheduler of the tests: what goes to stdout, what to stderr, and the exit codes.

#![expect(clippy::unwrap_used, reason = "a helper of tests may panic as a test may")]

mod fake;

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use fake::{Fake, done, job};
use rustix::process::Signal;
use serde_json::{Value, json};
use spotq_proto::v1;
use spotq_testkit::{Child, TempDir, wait_until};

/// Longer than anything here takes on a slow machine.
const DEADLINE: Duration = Duration::from_secs(30);

/// `spotq` with nothing of this process's configuration.
fn spotq(server: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_spotq"));
    command
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .env("USER", "ada")
        .env("XDG_CONFIG_HOME", "/nonexistent")
        .env("SPOTQ_SERVER", server)
        .stdin(Stdio::null());
    command
}

fn run(fake: &Fake, args: &[&str]) -> Output {
    spotq(&fake.server()).args(args).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or_else(|| panic!("ended by a signal: {output:?}"))
}

fn json_of(output: &Output) -> Value {
    assert_eq!(code(output), 0, "{}", stderr(output));
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", stdout(output)))
}

fn start(name: &str, dir: &Path, fake: &Fake, args: &[&str]) -> Child {
    let mut command = spotq(&fake.server());
    command.args(args);
    Child::start(name, dir, command).unwrap()
}

fn exit_code(child: &mut Child) -> i32 {
    let status = child.wait(DEADLINE).unwrap_or_else(|e| panic!("{e}\n{}", child.stderr()));
    status.code().unwrap()
}

#[test]
fn help_is_plain_text_that_documents_the_exit_codes() {
    let output = spotq("").arg("--help").env("NO_COLOR", "1").output().unwrap();
    let text = stdout(&output);
    assert_eq!(code(&output), 0);
    assert!(text.contains("Exit codes:") && text.contains("69 no scheduler answers"), "{text}");
    assert!(!text.contains('\u{1b}'), "{text:?}");
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
}

#[test]
fn wrong_usage_is_2_and_a_scheduler_that_is_not_there_is_69() {
    let usage = spotq("").args(["show", "seven"]).output().unwrap();
    assert_eq!(code(&usage), 2);
    assert!(stderr(&usage).contains("expected a number such as 7"), "{}", stderr(&usage));
    let port = spotq_testkit::free_port();
    let away = spotq(&format!("127.0.0.1:{port}")).arg("queue").output().unwrap();
    assert_eq!(code(&away), 69);
    let text = stderr(&away);
    assert!(text.contains("connection refused") && text.contains("spotqd --data"), "{text}");
    assert!(stdout(&away).is_empty());
}

#[test]
fn submit_prints_the_documented_json_and_a_key_makes_it_idempotent() {
    let fake = Fake::start();
    let args = ["submit", "-o", "json", "--client-key", "k", "--name", "n", "--", "true"];
    let first = run(&fake, &args);
    let value = json_of(&first);
    assert_eq!(value["job_id"], json!(1));
    assert_eq!(value["created"], json!(true));
    for field in ["job_uuid", "name", "warnings"] {
        assert!(!value[field].is_null(), "no {field}: {value}");
    }
    assert_eq!(stdout(&first).lines().count(), 1, "one line: {}", stdout(&first));
    assert_eq!(json_of(&run(&fake, &args))["created"], json!(false));
    assert_eq!(fake.disk(|disk| disk.specs.len()), 1);
}

#[test]
fn a_submit_whose_answer_is_lost_is_asked_again_and_stays_one_job() {
    let fake = Fake::start();
    fake.disk(|disk| disk.lose_answers = 2);
    let value = json_of(&run(&fake, &["submit", "-o", "json", "--", "true"]));
    assert_eq!(value["job_id"], json!(1));
    assert_eq!(fake.disk(|disk| (disk.specs.len(), disk.keys.len())), (1, 1));
}

#[test]
fn every_document_of_a_file_is_a_job() {
    let (fake, dir) = (Fake::start(), TempDir::new("cli-documents"));
    let file = dir.write("jobs.yaml", "name: a\nrun: x\n---\nname: b\nrun: y\n");
    let value = json_of(&run(&fake, &["submit", "-o", "json", file.to_str().unwrap()]));
    assert_eq!((&value[0]["name"], &value[1]["name"]), (&json!("a"), &json!("b")));
    assert_eq!((&value[0]["job_id"], &value[1]["job_id"]), (&json!(1), &json!(2)));
    let quiet = run(&fake, &["submit", "-q", "--", "true"]);
    assert_eq!((stdout(&quiet).as_str(), stderr(&quiet).as_str()), ("3\n", ""));
}

#[test]
fn a_bad_job_file_is_64_with_line_and_column_and_a_missing_one_66() {
    let (fake, dir) = (Fake::start(), TempDir::new("cli-bad"));
    let file = dir.write("bad.yaml", "name: a\nrunn: x\n");
    let output = run(&fake, &["submit", file.to_str().unwrap()]);
    assert_eq!(code(&output), 64);
    assert!(stderr(&output).contains("bad.yaml:2:1:"), "{}", stderr(&output));
    assert_eq!(code(&run(&fake, &["submit", "no-such-file.yaml"])), 66);
    assert_eq!(code(&run(&fake, &["submit"])), 2);
    assert_eq!(fake.disk(|disk| disk.specs.len()), 0);
}

#[test]
fn a_dry_run_needs_no_scheduler() {
    let nowhere = format!("127.0.0.1:{}", spotq_testkit::free_port());
    let output = spotq(&nowhere)
        .args(["submit", "--dry-run", "-o", "json", "--budget", "3", "--", "true"])
        .output()
        .unwrap();
    let value = json_of(&output);
    assert_eq!(value["jobs"][0]["budget"], json!("3.000000000"));
    assert_eq!(value["jobs"][0]["user"], json!("ada"));
}

#[test]
fn a_job_of_a_megabyte_script_and_half_a_megabyte_environment_arrives() {
    let (fake, dir) = (Fake::start(), TempDir::new("cli-large"));
    let script = format!("#!/bin/sh\n# {}\ntrue\n", "x".repeat(1 << 20));
    let file = dir.write("big.sh", &script);
    let values: Vec<String> = (0..5).map(|i| format!("V{i}={}", "é".repeat(50_000))).collect();
    let mut args = vec!["submit", file.to_str().unwrap()];
    for value in &values {
        args.extend(["--env", value]);
    }
    let output = run(&fake, &args);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let spec = fake.disk(|disk| disk.specs.remove(0));
    assert_eq!(spec.env.len(), 5);
    let Some(v1::command::Kind::Script(sent)) = spec.command.unwrap().kind else { panic!("not a script") };
    assert_eq!(sent.text, script);
}

#[test]
fn wait_ends_with_the_jobs_code() {
    let fake = Fake::start();
    fake.job(done(1, "completed", 0));
    fake.job(done(2, "failed", 3));
    fake.job(done(3, "timeout", 0));
    assert_eq!(code(&run(&fake, &["wait", "1"])), 0);
    let failed = run(&fake, &["wait", "2"]);
    assert_eq!(code(&failed), 3);
    assert!(stderr(&failed).contains("job 2 failed"), "{}", stderr(&failed));
    assert_eq!(code(&run(&fake, &["wait", "1", "3", "2"])), 124);
    assert_eq!(code(&run(&fake, &["wait", "99"])), 66);
    let output = run(&fake, &["wait", "2", "-o", "json", "-q"]);
    assert_eq!((code(&output), stderr(&output).as_str()), (3, ""));
    assert_eq!(serde_json::from_slice::<Value>(&output.stdout).unwrap()["outcome"], json!("failed"));
}

#[test]
fn run_prints_the_job_as_one_document_for_programs_and_its_output_beside() {
    let (fake, dir) = (Fake::start(), TempDir::new("cli-run-json"));
    fake.log(v1::LogStream::Stdout, "hello\n");
    let mut child = start("run", dir.path(), &fake, &["run", "-o", "json", "--", "train"]);
    wait_until(DEADLINE, || child.stderr().contains("hello"), "the output").unwrap();
    fake.job(done(1, "failed", 9));
    assert_eq!(exit_code(&mut child), 9);
    let value: Value =
        serde_json::from_str(&child.stdout()).unwrap_or_else(|e| panic!("{e}: {}", child.stdout()));
    assert_eq!(
        (&value["job_id"], &value["outcome"], &value["exit_code"]),
        (&json!(1), &json!("failed"), &json!(9))
    );
    assert_eq!(value["cost"]["billed_usd"], json!("0.000000000"));
    assert_eq!(value, json_of(&run(&fake, &["show", "1", "-o", "json"])), "the same as `show`");
}

#[test]
fn a_job_is_named_in_every_line_where_several_are_waited_for() {
    let (fake, dir) = (Fake::start(), TempDir::new("cli-wait-two"));
    fake.job(job(1, "running"));
    fake.job(job(2, "pending"));
    let mut child = start("wait", dir.path(), &fake, &["wait", "1", "2"]);
    wait_until(DEADLINE, || child.stderr().contains("job 1: attempt 1 runs"), "the first job").unwrap();
    wait_until(DEADLINE, || child.stderr().contains("spotq: job 2 waits"), "the second job").unwrap();
    fake.job(done(1, "completed", 0));
    fake.job(done(2, "completed", 0));
    assert_eq!(exit_code(&mut child), 0);
    assert!(child.stderr().lines().all(|line| line.starts_with("spotq: job ")), "{}", child.stderr());
    assert_eq!(child.stderr().matches("job 2: job 2").count(), 0);
}

#[test]
fn the_bill_of_a_job_that_ended_is_final_or_said_to_be_open() {
    let (fake, dir) = (Fake::start(), TempDir::new("cli-bill"));
    let billed = |nanos: i64| {
        let cost = v1::Cost { billed_nano_usd: nanos, ..Default::default() };
        v1::JobView { cost: Some(cost), ..done(1, "completed", 0) }
    };
    fake.disk(|disk| disk.segments = vec![v1::SegmentView::default()]);
    fake.job(billed(1_000_000_000));
    let open = run(&fake, &["wait", "1"]);
    assert_eq!(code(&open), 0);
    let text = stderr(&open);
    assert!(text.contains("$1.00 billed so far") && text.contains("`spotq report 1`"), "{text}");

    let before = fake.disk(|disk| disk.reports_asked);
    json_of(&run(&fake, &["wait", "1", "-q", "-o", "json"]));
    assert_eq!(fake.disk(|disk| disk.reports_asked), before, "with -q nothing more is waited for");
    let mut child = start("wait", dir.path(), &fake, &["wait", "1"]);
    wait_until(DEADLINE, || fake.disk(|disk| disk.reports_asked > before), "a look at the bill").unwrap();
    fake.job(billed(2_000_000_000));
    fake.disk(|disk| disk.segments[0].end_ms = Some(5));
    assert_eq!(exit_code(&mut child), 0);
    assert!(child.stderr().contains("$2.00 billed, "), "{}", child.stderr());
}

#[test]
fn explain_counts_why_nothing_fits_and_shows_those_that_come_closest() {
    let fake = Fake::start();
    fake.job(job(1, "pending"));
    fake.job(done(2, "failed", 3));
    let pool = |n: usize, why: &str| v1::PoolVerdict {
        pool: format!("aws/us-east-1/us-east-1a/g{n}.xlarge/spot"),
        why: why.into(),
        ..Default::default()
    };
    let mut pools = vec![pool(0, "refused lately, insufficient capacity: no g0")];
    pools.extend((1..=12).map(|n| pool(n, &format!("has {} CPUs, 64 wanted", 20 - n))));
    fake.disk(|disk| disk.pools = pools);
    let output = run(&fake, &["explain", "1"]);
    let text = stdout(&output);
    let counts = "None of 13 pools would do:\n   12  fewer than 64 CPUs\n    1  refused lately, insufficient capacity\n\n";
    assert!(text.contains(counts), "{text}");
    assert_eq!(text.matches(".xlarge").count(), 10, "{text}");
    assert!(text.find("g0.xlarge") < text.find("g1.xlarge"), "{text}");
    assert!(stderr(&output).contains("… and 3 more; `-o wide` lists all"), "{}", stderr(&output));
    assert_eq!(stdout(&run(&fake, &["explain", "1", "-o", "wide"])).matches(".xlarge").count(), 13);
    assert_eq!(json_of(&run(&fake, &["explain", "1", "-o", "json"]))["pools"].as_array().unwrap().len(), 13);

    let over = run(&fake, &["explain", "2"]);
    assert_eq!(stdout(&over), "job 2 is done: failed\n");
    assert!(stderr(&over).contains("`spotq show 2`") && stderr(&over).contains("`spotq report 2`"));
    assert_eq!(json_of(&run(&fake, &["explain", "2", "-o", "json"]))["pools"], json!([]));
}

#[test]
fn what_a_job_file_sets_in_vain_is_told_once() {
    let (fake, dir) = (Fake::start(), TempDir::new("cli-in-vain"));
    let doc = "run: x\nproject: p\ncheckpoint: {keep: 3}\n";
    let file = dir.write("job.yaml", format!("{doc}---\n{doc}"));
    let output = run(&fake, &["submit", file.to_str().unwrap(), "--tag", "a=b"]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    for key in ["`project`", "`checkpoint.keep`", "`tags`"] {
        let told = stderr(&output).lines().filter(|l| l.starts_with("warning: ") && l.contains(key)).count();
        assert_eq!(told, 1, "{key}: {}", stderr(&output));
    }
    assert_eq!(fake.disk(|disk| disk.specs[1].project.clone()).as_deref(), Some("p"));
}

#[test]
fn a_number_of_preemptions_out_of_range_says_the_range() {
    for number in ["1", "101", "x"] {
        let output = spotq("").args(["demo", "--preemptions", number]).output().unwrap();
        assert_eq!(code(&output), 2);
        assert!(stderr(&output).contains("expected a number from 2 to 100"), "{}", stderr(&output));
    }
    let help = spotq("").args(["demo", "--help"]).output().unwrap();
    assert!(stdout(&help).contains("from 2 to 100"), "{}", stdout(&help));
}

#[test]
fn wait_survives_a_scheduler_that_is_killed_and_says_so_once() {
    let (mut fake, dir) = (Fake::start(), TempDir::new("cli-wait"));
    fake.job(job(1, "running"));
    let mut child = start("wait", dir.path(), &fake, &["wait", "1"]);
    wait_until(DEADLINE, || child.stderr().contains("attempt 1 runs"), "the first view").unwrap();
    fake.kill();
    wait_until(DEADLINE, || child.stderr().contains("scheduler away"), "the news").unwrap();
    fake.restart();
    wait_until(DEADLINE, || child.stderr().contains("scheduler is back"), "the return").unwrap();
    fake.job(done(1, "failed", 7));
    assert_eq!(exit_code(&mut child), 7);
    assert_eq!(child.stderr().matches("scheduler away").count(), 1, "{}", child.stderr());
    assert_eq!(child.stdout(), "");
}

#[test]
fn run_passes_output_through_once_across_a_restart_and_ends_with_the_jobs_code() {
    let (mut fake, dir) = (Fake::start(), TempDir::new("cli-run"));
    fake.log(v1::LogStream::Stdout, "hello ");
    fake.log(v1::LogStream::Note, "attempt 1 on aws\n");
    fake.log(v1::LogStream::Note, "the notice was withdrawn\n");
    fake.log(v1::LogStream::Stderr, "warning\n");
    let mut child = start("run", dir.path(), &fake, &["run", "--", "train"]);
    wait_until(DEADLINE, || child.stderr().contains("warning"), "the first output").unwrap();
    fake.kill();
    fake.log(v1::LogStream::Stdout, "wor");
    fake.restart();
    fake.log(v1::LogStream::Stdout, "ld\u{fffd}");
    wait_until(DEADLINE, || child.stdout().contains("world"), "the rest").unwrap();
    fake.job(done(1, "failed", 9));
    assert_eq!(exit_code(&mut child), 9);
    assert_eq!(child.stdout(), "hello world\u{fffd}");
    let told = child.stderr();
    assert_eq!(told.matches("warning\n").count(), 1, "{told}");
    assert_eq!(told.matches("the notice was withdrawn").count(), 1, "{told}");
    assert!(!told.contains("attempt 1 on aws"), "told twice, in other words: {told}");
    assert!(told.contains("job 1 failed"), "{told}");
}

#[test]
fn ctrl_c_cancels_a_run_and_waits_for_its_end() {
    let (fake, dir) = (Fake::start(), TempDir::new("cli-cancel"));
    let mut child = start("run", dir.path(), &fake, &["run", "--", "train"]);
    wait_until(DEADLINE, || fake.disk(|d| d.watches_opened + d.logs_opened >= 2), "the streams").unwrap();
    wait_until(DEADLINE, || child.stderr().contains("waits:"), "the first view").unwrap();
    child.signal(Signal::INT).unwrap();
    assert_eq!(exit_code(&mut child), 130);
    assert_eq!(fake.disk(|disk| disk.cancelled.clone()), [1]);
    assert!(child.stderr().contains("cancelling job 1"), "{}", child.stderr());
}

#[test]
fn a_second_ctrl_c_leaves_a_run_that_is_slow_to_end() {
    let (fake, dir) = (Fake::start(), TempDir::new("cli-leave-run"));
    fake.disk(|disk| disk.slow_to_cancel = true);
    let mut child = start("run", dir.path(), &fake, &["run", "--", "train"]);
    wait_until(DEADLINE, || child.stderr().contains("waits:"), "the first view").unwrap();
    child.signal(Signal::INT).unwrap();
    wait_until(DEADLINE, || fake.disk(|disk| disk.cancelled == [1]), "the cancel").unwrap();
    assert!(child.ended().is_none(), "it waits for the end: {}", child.stderr());
    child.signal(Signal::INT).unwrap();
    assert_eq!(exit_code(&mut child), 130);
    assert!(child.stderr().contains("being cancelled"), "{}", child.stderr());
}

#[test]
fn a_run_whose_reader_leaves_is_no_success() {
    let (fake, dir) = (Fake::start(), TempDir::new("cli-pipe"));
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let errors = std::fs::File::create(dir.join("err")).unwrap();
    let mut child =
        spotq(&fake.server()).args(["run", "--", "x"]).stdout(writer).stderr(errors).spawn().unwrap();
    fake.log(v1::LogStream::Stdout, "hello");
    wait_until(DEADLINE, || child.try_wait().unwrap().is_some(), "the end").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(141));
    assert!(fake.disk(|disk| disk.cancelled.is_empty()));
}

#[test]
fn ctrl_c_leaves_a_wait_and_the_job_alone() {
    let (fake, dir) = (Fake::start(), TempDir::new("cli-leave"));
    fake.job(job(1, "running"));
    let mut child = start("wait", dir.path(), &fake, &["wait", "1"]);
    wait_until(DEADLINE, || child.stderr().contains("attempt 1 runs"), "the first view").unwrap();
    child.signal(Signal::INT).unwrap();
    assert_eq!(exit_code(&mut child), 130);
    assert!(child.stderr().contains("not touched"), "{}", child.stderr());
    assert!(fake.disk(|disk| disk.cancelled.is_empty()));
}

#[test]
fn logs_sends_each_stream_to_its_own() {
    let fake = Fake::start();
    fake.job(done(1, "completed", 0));
    fake.log(v1::LogStream::Stdout, "out\n");
    fake.log(v1::LogStream::Stderr, "err\n");
    fake.log(v1::LogStream::Note, "note \u{1b}[2J\n");
    let output = run(&fake, &["logs", "1", "--generation", "1"]);
    assert_eq!((code(&output), stdout(&output).as_str()), (0, "out\n"));
    assert_eq!(stderr(&output), "err\nnote \n");
    let asked = fake.disk(|disk| disk.log_requests[0]);
    assert_eq!((asked.generation, asked.follow), (Some(1), false));
    assert_eq!(code(&run(&fake, &["logs", "5"])), 66);
}

#[test]
fn logs_follow_until_the_job_is_done() {
    let (mut fake, dir) = (Fake::start(), TempDir::new("cli-follow"));
    fake.job(job(1, "running"));
    fake.log(v1::LogStream::Stdout, "one\n");
    let mut child = start("logs", dir.path(), &fake, &["logs", "-f", "1"]);
    wait_until(DEADLINE, || child.stdout() == "one\n", "the first line").unwrap();
    fake.kill();
    fake.restart();
    fake.log(v1::LogStream::Stdout, "two\n");
    wait_until(DEADLINE, || child.stdout() == "one\ntwo\n", "the second line").unwrap();
    fake.job(done(1, "failed", 4));
    assert_eq!(exit_code(&mut child), 0, "logs are read, whatever the job did");
}

#[test]
fn the_queue_is_data_for_programs() {
    let fake = Fake::start();
    fake.job(v1::JobView { name: "a,\u{1b}[31mb".into(), ..job(1, "running") });
    fake.job(done(2, "completed", 0));
    let value = json_of(&run(&fake, &["queue", "-o", "json"]));
    assert_eq!(value.as_array().unwrap().len(), 1);
    assert_eq!(value[0]["submitted"], json!("2023-11-14T22:13:20Z"));
    let csv = run(&fake, &["queue", "-o", "csv", "--all"]);
    let text = stdout(&csv);
    assert!(text.starts_with("job_id,name,user,phase,"), "{text}");
    assert!(text.contains("\n1,\"a,b\",ada,running,1,,,0.000000000,"), "{text}");
    assert_eq!(text.lines().count(), 3);
}

#[test]
fn orders_go_to_every_job_and_the_first_refusal_is_the_code() {
    let fake = Fake::start();
    fake.job(job(1, "running"));
    fake.job(done(2, "completed", 0));
    fake.job(job(3, "running"));
    let output = run(&fake, &["hold", "1", "2", "3"]);
    assert_eq!(code(&output), 65);
    let text = stderr(&output);
    assert!(text.contains("cannot hold job 2") && text.contains("job 3 is held"), "{text}");
    assert_eq!(code(&run(&fake, &["release", "1"])), 0);
    assert_eq!(code(&run(&fake, &["requeue", "99"])), 66);
    let value = json_of(&run(&fake, &["cancel", "-o", "json", "1"]));
    assert_eq!(value[0]["job_id"], json!(1));
    assert_eq!(fake.disk(|disk| disk.cancelled.clone()), [1]);
}

#[test]
fn a_drill_says_how_much_notice_it_gives() {
    let fake = Fake::start();
    fake.job(job(1, "running"));
    let output = run(&fake, &["preempt", "1", "--notice", "10s"]);
    assert_eq!(code(&output), 0);
    assert!(stderr(&output).contains("10s of notice"), "{}", stderr(&output));
    assert_eq!(fake.disk(|disk| disk.preempted.unwrap().notice_ms), 10_000);
    assert_eq!(code(&run(&fake, &["preempt", "1", "--notice", "soon"])), 2);
}

#[test]
fn the_other_questions_are_answered_as_table_and_json() {
    let fake = Fake::start();
    fake.job(job(1, "pending"));
    let explained = run(&fake, &["explain", "1"]);
    assert!(stdout(&explained).starts_with("job 1 waits: all 1"), "{}", stdout(&explained));
    assert!(stdout(&explained).contains("insufficient capacity"));
    assert_eq!(json_of(&run(&fake, &["explain", "1", "-o", "json"]))["pools"][0]["rank"], json!(null));
    let offers = json_of(&run(&fake, &["offers", "--gpus", "a100-80gb:8", "-o", "json"]));
    assert_eq!(offers[0]["price_usd_h"], json!("0.310000000"));
    let asked = fake.disk(|disk| disk.offers_asked.clone()).unwrap();
    assert_eq!((asked.accelerator.as_deref(), asked.accelerator_count), (Some("A100-80GB"), 8));
    assert_eq!(json_of(&run(&fake, &["show", "1", "-o", "json"]))["phase"], json!("pending"));
    assert_eq!(json_of(&run(&fake, &["report", "-o", "json"]))["jobs"][0]["job_id"], json!(1));
    assert!(stdout(&run(&fake, &["report", "1"])).contains("billed"));
    assert_eq!(json_of(&run(&fake, &["info", "-o", "json"]))["epoch"], json!(3));
    assert!(stdout(&run(&fake, &["nodes"])).contains("idle"));
}

#[test]
fn a_reader_that_leaves_is_no_failure_and_a_full_disk_is_named() {
    let fake = Fake::start();
    fake.job(job(1, "running"));
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = spotq(&fake.server());
    let output = command.arg("queue").stdout(writer).stderr(Stdio::piped()).output().unwrap();
    assert_eq!((code(&output), stderr(&output).as_str()), (0, ""));
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command = spotq(&fake.server());
    let output = command.arg("queue").stdout(full).stderr(Stdio::piped()).output().unwrap();
    assert_eq!(code(&output), 73);
    assert!(stderr(&output).contains("the disk is full"), "{}", stderr(&output));
}

#[test]
fn man_pages_and_completions_are_made_and_a_place_that_cannot_be_written_is_73() {
    let dir = TempDir::new("cli-man");
    let output = spotq("").arg("man").arg(dir.join("deep/man")).output().unwrap();
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert!(dir.join("deep/man/spotq-submit.1").exists());
    let file = dir.write("file", "x");
    assert_eq!(code(&spotq("").arg("man").arg(file.join("man")).output().unwrap()), 73);
    let bash = spotq("").args(["completions", "bash"]).output().unwrap();
    assert!(stdout(&bash).contains("_spotq"), "{}", stdout(&bash));
}

#[test]
fn a_context_of_the_configuration_file_names_the_scheduler() {
    let (fake, dir) = (Fake::start(), TempDir::new("cli-context"));
    let config = format!("current: lab\ncontexts:\n  lab: {{server: \"{}\"}}\n", fake.server());
    dir.write("spotq/config.yaml", config);
    let mut command = spotq("");
    let output =
        command.env_remove("SPOTQ_SERVER").env("XDG_CONFIG_HOME", dir.path()).arg("queue").output().unwrap();
    assert_eq!(code(&output), 0, "{}", stderr(&output));
}

#[test]
fn pull_fetches_verified_outputs_and_touches_nothing_that_is_there() {
    let (fake, dir) = (Fake::start(), TempDir::new("cli-pull"));
    let url = format!("file://{}", dir.join("store").display());
    dir.write("work/sub/model.bin", b"weights");
    publish(&url, &dir.join("work"));
    fake.job(job(1, "running"));
    let to = dir.join("got");
    let pull = |fake: &Fake| run(fake, &["pull", "1", to.to_str().unwrap(), "-o", "json"]);
    let none = pull(&fake);
    assert_eq!(code(&none), 65);
    assert!(stderr(&none).contains("declares no outputs"), "{}", stderr(&none));

    let outputs = v1::OutputsReply { url: url.clone(), read_key: vec![7; 32], globs: vec!["sub/*".into()] };
    fake.disk(|disk| disk.outputs = outputs.clone());
    let value = json_of(&pull(&fake));
    assert_eq!(value["files"], json!({"sub/model.bin": 7}));
    assert_eq!(std::fs::read(to.join("sub/model.bin")).unwrap(), b"weights");

    let again = pull(&fake);
    assert_eq!(code(&again), 64, "a directory with content is not written over: {}", stderr(&again));
    fake.disk(|disk| disk.outputs.read_key = vec![8; 32]);
    let other = run(&fake, &["pull", "1", dir.join("other").to_str().unwrap()]);
    assert_ne!(code(&other), 0, "a wrong key must not verify");
    assert!(!dir.join("other/sub/model.bin").exists());
}

fn publish(url: &str, work: &Path) {
    use spotq_checkpoint::{JobKey, Options, PushRequest, Repository, Selection};
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let repository = Repository::from_url(url, JobKey([7; 32]), [], Options::default()).unwrap();
        let generation = spotq_model::Generation(1);
        repository.fence(generation).await.unwrap();
        let request = PushRequest {
            generation,
            step: None,
            profile: spotq_model::Profile::Generic,
            created_at_ms: 1,
            selection: Selection::default(),
        };
        repository.push(work, &request, &|_| {}).await.unwrap();
    });
}
