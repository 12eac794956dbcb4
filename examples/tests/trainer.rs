//! The character model's trainer as a process: what it does on signals, and that interruptions never change the model.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "these are tests, helpers included")]

#[path = "support/interrupted.rs"]
mod interrupted;
mod support;

use std::{fs, os::unix::process::ExitStatusExt, path::Path, process::Command};

use interrupted::run_interrupted;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use support::{Trainer, run_whole};

/// A trainer that saves into `dir/ckpt`, writes `dir/model.bin` and prints each step.
fn trainer(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_spotq-train"));
    command
        .env("SPOTQ_CHECKPOINT_DIR", dir.join("ckpt"))
        .env("SPOTQ_PROGRESS_FILE", dir.join("progress"))
        .env("SPOTQ_NOTICE_FILE", dir.join("notice"))
        .env("SPOTQ_RESUME_FROM", "")
        .env("SPOTQ_ATTEMPT", "1")
        .args(["--log-every", "1", "--out"])
        .arg(dir.join("model.bin"))
        .args(args);
    command
}

fn model(dir: &Path) -> Vec<u8> {
    fs::read(dir.join("model.bin")).unwrap()
}

fn checkpoints(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir.join("ckpt"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn kill_pid(pid: Pid) {
    let _ = kill_process(pid, Signal::KILL);
}

#[test]
fn interruptions_at_random_steps_do_not_change_the_model() {
    for seed in 1..=4 {
        let (plain, cut) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let args = ["--steps", "160", "--state-mb", "2", "--save-every", "13"];
        run_whole(trainer(plain.path(), &args).env_remove("SPOTQ_CHECKPOINT_DIR"));
        let interrupted = run_interrupted(|_| trainer(cut.path(), &args), seed, 12, 40);
        assert!(interrupted >= 3, "only {interrupted} interruptions");
        assert!(model(plain.path()) == model(cut.path()), "seed {seed} changed the model");
    }
}

#[test]
fn torn_and_timed_saves_do_not_change_the_model() {
    let (plain, torn) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    run_whole(&mut trainer(plain.path(), &["--steps", "60"]));
    let args = ["--steps", "60", "--torn-save", "--timer-only", "--save-every", "0", "--save-every-ms", "30"];
    let mut killed = 0;
    // A kill as the first byte of a save appears under its final name: the next attempt must not take it for whole.
    for round in 0..4 {
        let mut attempt = Trainer::start(&mut trainer(torn.path(), &args));
        attempt.expect_line("saved step ");
        attempt.expect_line("step ");
        let (before, deadline) = (checkpoints(torn.path()), std::time::Instant::now());
        while checkpoints(torn.path()) == before && deadline.elapsed().as_secs() < 60 {
            std::thread::yield_now();
        }
        attempt.signal(Signal::KILL);
        let (status, lines) = attempt.finish();
        if status.success() {
            println!("round {round}: finished before the kill: {lines:?}");
            break;
        }
        killed += 1;
    }
    assert!(killed >= 1);
    let lines = run_whole(&mut trainer(torn.path(), &["--steps", "60"]));
    assert!(lines.iter().any(|l| l.contains("incomplete or damaged")), "nothing was torn: {lines:#?}");
    assert!(lines.iter().any(|l| l.contains("resuming at step")), "{lines:#?}");
    assert!(model(plain.path()) == model(torn.path()));
}

#[test]
fn term_saves_the_step_reached_and_exits_143() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["--steps", "100000", "--save-every", "0"];
    let mut first = Trainer::start(&mut trainer(dir.path(), &args));
    first.expect_line("step 3/");
    first.signal(Signal::TERM);
    let (status, lines) = first.finish();
    assert_eq!(status.code(), Some(143), "{lines:#?}");
    let last = lines.iter().rev().find_map(|l| l.strip_prefix("step ")?.split('/').next()).unwrap();
    assert_eq!(checkpoints(dir.path()), [format!("step-{last}.ckpt")]);
    let mut second = Trainer::start(trainer(dir.path(), &args).env("SPOTQ_ATTEMPT", "2"));
    second.expect_line(&format!("attempt 2: resuming at step {last} of"));
}

#[test]
fn usr1_and_the_notice_file_save_at_once_and_training_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    // Steps of a minute: the save must not wait for the next one.
    let args = ["--steps", "100000", "--save-every", "0", "--step-ms", "60000"];
    let mut trainer = Trainer::start(&mut trainer(dir.path(), &args));
    trainer.expect_line("step 1/");
    trainer.signal(Signal::USR1);
    trainer.expect_line("saved step 1 (USR1");
    fs::remove_file(dir.path().join("ckpt/step-1.ckpt")).unwrap();
    fs::write(dir.path().join("notice"), "{}").unwrap();
    trainer.expect_line("saved step 1 (notice");
    assert_eq!(checkpoints(dir.path()), ["step-1.ckpt"], "a save that was removed is made again");
    trainer.signal(Signal::TERM);
    assert_eq!(trainer.finish().0.code(), Some(143));
}

#[test]
fn progress_is_json_lines_from_the_start_to_the_end() {
    let dir = tempfile::tempdir().unwrap();
    run_whole(&mut trainer(dir.path(), &["--steps", "25"]));
    let text = fs::read_to_string(dir.path().join("progress")).unwrap();
    let steps: Vec<u64> = text
        .lines()
        .map(|line| {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            assert_eq!(line["total"], 25);
            line["step"].as_u64().unwrap()
        })
        .collect();
    assert_eq!((steps.first(), steps.last()), (Some(&0), Some(&25)));
    assert!(steps.windows(2).all(|pair| pair[0] < pair[1] && pair[1] - pair[0] <= 10), "{steps:?}");
}

#[test]
fn variants_misbehave_as_they_say() {
    let cases = [
        ("--exit-zero-on-term", Signal::TERM, Some(0), None),
        ("--timer-only", Signal::TERM, None, Some(15)),
        ("--timer-only", Signal::USR1, None, Some(10)),
        ("--die-on-usr1", Signal::USR1, None, Some(10)),
    ];
    for (flag, signal, code, killed_by) in cases {
        let dir = tempfile::tempdir().unwrap();
        let mut trainer =
            Trainer::start(&mut trainer(dir.path(), &["--steps", "100000", "--save-every", "0", flag]));
        trainer.expect_line("step 2/");
        trainer.signal(signal);
        let (status, lines) = trainer.finish();
        assert_eq!((status.code(), status.signal()), (code, killed_by), "{flag} {signal:?}: {lines:#?}");
        assert!(checkpoints(dir.path()).is_empty(), "{flag} {signal:?}: {lines:#?}");
    }
}

#[test]
fn a_trainer_that_ignores_term_goes_on_after_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::start(&mut trainer(dir.path(), &["--steps", "40", "--ignore-term"]));
    trainer.expect_line("step 3/");
    trainer.signal(Signal::TERM);
    let (status, lines) = trainer.finish();
    assert!(status.success() && lines.contains(&"done after 40 steps".to_owned()), "{status}: {lines:#?}");
}

#[test]
fn a_double_fork_leaves_a_process_in_a_session_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::start(&mut trainer(dir.path(), &["--steps", "100000", "--double-fork"]));
    let line = trainer.expect_line("stray process ");
    let pid = line.split(' ').nth(2).and_then(|pid| pid.parse().ok()).and_then(Pid::from_raw).unwrap();
    let session = session(&pid.to_string());
    trainer.signal(Signal::TERM);
    let status = trainer.wait();
    let alive = test_kill_process(pid).is_ok();
    kill_pid(pid);
    assert!(status.code() == Some(143) && alive);
    assert_ne!(session, self::session("self"));
}

/// The session of a process, as the kernel writes it: 0 for one whose leader is outside our process namespace (which
/// `getsid` of rustix does not expect).
fn session(process: &str) -> u32 {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    // The name, in parentheses, may hold anything; after it come the state, the parent, the group and the session.
    let (_, fields) = stat.rsplit_once(')').unwrap();
    fields.split_whitespace().nth(3).unwrap().parse().unwrap()
}

#[test]
fn a_crash_comes_at_its_step_and_only_in_the_attempts_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["--steps", "20", "--save-every", "8", "--crash-at-step", "10", "--crash-attempts", "1"];
    let (status, lines) = Trainer::start(&mut trainer(dir.path(), &args)).finish();
    assert_eq!(status.signal(), Some(6), "{lines:#?}");
    assert_eq!(checkpoints(dir.path()), ["step-8.ckpt"]);
    let (status, lines) = Trainer::start(trainer(dir.path(), &args).args(["--exit-code", "7"])).finish();
    assert_eq!(status.code(), Some(7), "{lines:#?}");
    assert!(!lines.contains(&"done after 20 steps".to_owned()));
    let (status, lines) =
        Trainer::start(trainer(dir.path(), &args).args(["--exit-code", "7"]).env("SPOTQ_ATTEMPT", "2"))
            .finish();
    assert_eq!(status.code(), Some(7), "{lines:#?}");
    assert!(lines.contains(&"done after 20 steps".to_owned()));
}

#[test]
fn variables_that_are_set_to_nothing_are_as_good_as_absent() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = trainer(dir.path(), &["--steps", "3"]);
    for name in ["SPOTQ_CHECKPOINT_DIR", "SPOTQ_PROGRESS_FILE", "SPOTQ_NOTICE_FILE"] {
        command.env(name, "");
    }
    let lines = run_whole(&mut command);
    assert!(!lines.iter().any(|line| line.contains("saved")), "{lines:#?}");
}

#[test]
fn bad_input_ends_in_one_message_that_names_it() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("short.txt"), "ab").unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    let short = dir.path().join("short.txt").display().to_string();
    let below_a_file = dir.path().join("file/ckpt").display().to_string();
    let no_dir = dir.path().join("no/model.bin").display().to_string();
    let cases = [
        (vec!["--data", "/no/such/text"], "cannot open the training text /no/such/text"),
        (vec!["--data", &short], "at least 17 are needed"),
        (vec!["--steps", "1", "--out", &no_dir], "cannot write the final model"),
        (vec!["--checkpoint-dir", &below_a_file], "cannot make the checkpoint directory"),
        (vec!["--steps", "many"], "invalid value 'many' for '--steps <STEPS>'"),
    ];
    for (args, message) in cases {
        let mut command = Command::new(env!("CARGO_BIN_EXE_spotq-train"));
        let (status, lines) = Trainer::start(command.args(&args)).finish();
        assert!(status.code().is_some_and(|code| code != 0), "{args:?}: {status}");
        assert!(lines.join("\n").contains(message), "{args:?}: {lines:#?}");
    }
}
