//! A job's output: of all attempts, in order, whole, and byte for byte.

use std::process::Stdio;

use spotq_testkit::wait_until;

use crate::cluster::{Cluster, DEADLINE, Ran};
use crate::training::Training;

#[test]
fn output_of_all_attempts_comes_in_order_and_follow_ends_with_the_job() {
    let mut cluster = Cluster::start("logs-attempts");
    let job = Training::submit(&cluster, 300, &["--step-ms", "10", "--save-every", "0", "--log-every", "1"]);
    cluster.wait_step(&job.job, 20);
    let mut follow = cluster.beside("follow", &["logs", "-f", &job.job]);
    cluster.preempt(&job.job, "10s");
    cluster.wait_until(&job.job, "attempt 2", |seen| seen["attempts"][1]["started_ms"].is_u64());
    cluster.kill();
    cluster.start_again();
    cluster.completed(&job.job);
    let status = follow.wait(DEADLINE).unwrap_or_else(|e| panic!("{e}: {}", follow.stderr()));
    assert_eq!(status.code(), Some(0), "{}", follow.stderr());
    let whole = cluster.logs(&job.job).ok();
    assert_eq!(follow.stdout(), whole.stdout, "following gave something else than the whole");
    let steps: Vec<u64> = whole.stdout.lines().filter_map(step).collect();
    let starts = whole.stdout.matches("attempt ").count();
    assert_eq!(starts, 2, "{}", whole.stdout);
    // Every step in order, and each once: the trainer saved on the notice, so none was done again.
    assert!((1..=300).all(|wanted| steps.contains(&wanted)), "steps are missing: {steps:?}");
    assert!(steps.windows(2).all(|pair| pair[0] <= pair[1]), "out of order: {steps:?}");
    // One attempt alone.
    let second = cluster.run(&["logs", "--generation", "2", &job.job]).ok().stdout;
    assert!(second.starts_with("attempt 2: resuming") && whole.stdout.ends_with(&second), "{second}");
    cluster.end();
}

#[test]
fn standard_output_and_errors_stay_apart() {
    let cluster = Cluster::start("logs-apart");
    let job = cluster.submit(&["--", "sh", "-c", "for i in 1 2 3; do echo out $i; echo err $i >&2; done"]);
    cluster.completed(&job);
    let ran = cluster.logs(&job).ok();
    assert_eq!(ran.stdout, "out 1\nout 2\nout 3\n");
    assert!(ran.stderr.contains("err 1\nerr 2\nerr 3\n"), "{ran:#?}");
    assert!(!ran.stderr.contains("out 1"), "{ran:#?}");
    cluster.end();
}

#[test]
fn ten_megabytes_and_bytes_that_are_no_text_arrive_whole() {
    let cluster = Cluster::start("logs-large");
    let bytes: Vec<u8> = (0..=255).chain([b'\n', 0, 0x1b]).cycle().take(300_000).collect();
    let binary = cluster.dir().write("binary", &bytes);
    let large: String = (0..150_000).map(|n| format!("{n:069}\n")).collect();
    let text = cluster.dir().write("large", &large);
    for (file, wanted) in [(&binary, bytes.as_slice()), (&text, large.as_bytes())] {
        let job = cluster.submit(&["--", "cat", file.to_str().unwrap()]);
        cluster.completed(&job);
        // What a busy scheduler has not taken by the end of the job comes after it.
        let mut output = Vec::new();
        let whole = wait_until(
            DEADLINE,
            || {
                let ran = cluster.command(&["logs", &job]).stdin(Stdio::null()).output().unwrap();
                Ran::from(&ran).ok();
                output = ran.stdout;
                output.len() >= wanted.len()
            },
            "all of the output",
        );
        assert!(whole.is_ok(), "{} of {} bytes of {} came", output.len(), wanted.len(), file.display());
        assert!(output == wanted, "the output of {} was changed on its way", file.display());
    }
    cluster.end();
}

#[test]
fn a_reader_that_has_enough_ends_logs_without_a_word() {
    let cluster = Cluster::start("logs-pipe");
    let job = cluster.submit(&["--", "sh", "-c", "yes | head -n 200000"]);
    cluster.completed(&job);
    let mut logs = cluster
        .command(&["logs", &job])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(logs.stdout.take());
    let ran = Ran::from(&logs.wait_with_output().unwrap());
    assert_eq!(ran.code, 0, "{ran:#?}");
    assert!(!ran.stderr.contains("pipe"), "{ran:#?}");
    cluster.end();
}

fn step(line: &str) -> Option<u64> {
    line.strip_prefix("step ")?.split('/').next()?.parse().ok()
}
