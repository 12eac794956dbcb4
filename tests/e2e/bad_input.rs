//! Input that cannot be taken, and places that cannot be used: one clear message, the documented code, nothing lost.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use spotq_testkit::{Child, TempDir, free_port, wait_for};

use crate::cluster::{Cluster, DEADLINE, Ran, assert_no_panic, daemon, spotq, text};
use crate::leftovers;

#[test]
fn job_files_that_make_no_sense_are_64_with_their_place_and_nothing_is_submitted() {
    let cluster = Cluster::start("bad-files");
    let deep = format!("name: a\nrun: x\nenvs:\n  A: {}", "[".repeat(5000));
    let files: [(&str, &[u8], &str); 9] = [
        ("empty.yaml", b"", "empty.yaml:1:1"),
        ("unknown.yaml", b"name: a\nrunn: x\n", "unknown.yaml:2:1"),
        ("broken.yaml", b"name: [a\nrun: x", "broken.yaml:2:"),
        ("twice.yaml", b"name: a\nrun: x\nname: b\n", "twice.yaml:3:1"),
        ("list.yaml", b"- a\n", "list.yaml:1:1"),
        ("cycle.yaml", b"a: &a [*a]\n", "cycle.yaml:1:"),
        ("deep.yaml", deep.as_bytes(), "deep.yaml:4:"),
        ("binary.yaml", b"name: a\n\x00\xff", "binary.yaml"),
        ("empty.sh", b"", "empty.sh:1:1"),
    ];
    for (name, content, place) in files {
        let path = cluster.dir().write(name, content);
        cluster.run(&["submit", text(&path)]).refuses(64, &[place, "spotq: "]);
    }
    cluster.run(&["submit", "no-such.yaml"]).refuses(66, &["no-such.yaml", "no such file"]);
    cluster.run(&["submit", "."]).refuses(66, &["it is a directory"]);
    assert_eq!(cluster.json(&["queue", "--all"]), serde_json::json!([]));
    cluster.end();
}

#[test]
fn flags_and_values_that_make_no_sense_are_named() {
    let cluster = Cluster::start("bad-flags");
    for (args, code, part) in [
        (&["submit", "--frobnicate", "--", "true"][..], 2, "--frobnicate"),
        (&["submit"], 2, "nothing to submit"),
        (&["frobnicate"], 2, "frobnicate"),
        (&["show", "seven"], 2, "seven"),
        (&["show", "4294967296"], 2, "4294967296"),
        (&["queue", "-o", "xml"], 2, "xml"),
        (&["preempt", "1", "--notice", "never"], 2, "never"),
        (&["submit", "--gpus", "T4:0", "--", "true"], 64, "T4:0"),
        (&["submit", "--time-limit", "0", "--", "true"], 64, "time_limit"),
        (&["submit", "--budget=-1", "--", "true"], 64, "budget"),
        (&["submit", "--name", "two\nlines", "--", "true"], 64, "name"),
        (&["submit", "--name", &"n".repeat(300), "--", "true"], 64, "300"),
        (&["submit", "--env", "1A=1", "--", "true"], 64, "1A"),
        (&["submit", "--", ""], 64, ""),
    ] {
        cluster.run(args).refuses(code, &[part]);
    }
    assert_eq!(cluster.json(&["queue", "--all"]), serde_json::json!([]));
    cluster.end();
}

#[test]
fn a_job_that_does_not_exist_is_66_and_a_scheduler_that_is_away_69() {
    let mut cluster = Cluster::start("no-such-job");
    let commands = [
        "show", "wait", "logs", "cancel", "hold", "release", "requeue", "pull", "report", "preempt",
        "explain",
    ];
    for command in commands {
        cluster.run(&[command, "999"]).refuses(66, &["no job 999"]);
    }
    let kept = cluster.submit(&["--hold", "--", "true"]);
    cluster.kill();
    for command in commands.iter().filter(|command| **command != "wait") {
        cluster.run(&[command, &kept]).refuses(69, &["no scheduler answers", "spotqd --data"]);
    }
    for args in [
        &["queue"][..],
        &["submit", "--", "true"],
        &["run", "--", "true"],
        &["offers"],
        &["info"],
        &["wait", &kept],
    ] {
        cluster.run(args).refuses(69, &["no scheduler answers"]);
    }
    cluster.run(&["queue", "--server", "host:port"]).refuses(64, &["host:port"]);
    cluster.start_again();
    assert_eq!(cluster.show(&kept)["phase"], "held");
    cluster.run(&["cancel", &kept]).ok();
    cluster.end();
}

#[test]
fn long_scripts_large_environments_and_odd_names_work_or_are_refused() {
    let cluster = Cluster::start("large");
    let filler = "# a line of a long script, of which there are very many\n".repeat(20_000);
    assert!(filler.len() > 1_000_000);
    let script = cluster.dir().write("long.sh", format!("#!/bin/sh\n{filler}echo the end\n"));
    let job = cluster.submit(&[text(&script)]);
    cluster.completed(&job);
    assert_eq!(cluster.logs(&job).ok().stdout, "the end\n");
    // The system bounds one variable to 128 KiB, so half a megabyte takes several.
    let values: Vec<String> = (0..10).map(|n| format!("VALUE_{n}={}", "v".repeat(50_000))).collect();
    let flags: Vec<&str> = values.iter().flat_map(|value| ["-e", value]).collect();
    let command = ["--", "sh", "-c", "echo ${#VALUE_0} ${#VALUE_9}"];
    let job = cluster.submit(&[&flags[..], &command].concat());
    cluster.completed(&job);
    assert_eq!(cluster.logs(&job).ok().stdout, "50000 50000\n");
    let huge = cluster.dir().write("huge.yaml", format!("run: echo\nenvs: {{V: {}}}\n", "v".repeat(500_000)));
    let ran = cluster.run(&["submit", "-o", "json", text(&huge)]);
    if ran.code == 0 {
        let (code, seen) = cluster.wait(&ran.json()["job_id"].to_string());
        assert_eq!((code, &seen["outcome"]), (125, &"launch_failure".into()), "{seen:#}");
    } else {
        ran.refuses(64, &["V"]);
    }
    let name = "🚀 größte Übung";
    let job = cluster.submit(&["--name", name, "--", "true"]);
    assert_eq!(cluster.completed(&job)["name"], name);
    assert!(cluster.run(&["queue", "--all"]).ok().stdout.contains(name));
    cluster.end();
}

#[test]
fn a_configuration_that_makes_no_sense_is_78_with_its_line() {
    let dir = TempDir::new("bad-config");
    for (config, parts) in [
        ("cluster: a\nclutser: b\n", &["spotqd.yaml:2:1: ", "clutser"][..]),
        ("policies:\n  nodes_max: many\n", &["spotqd.yaml:2:14: "]),
        ("local: [\n", &["spotqd.yaml:"]),
    ] {
        dir.write("spotqd.yaml", config);
        fails(dir.path(), &["--local", "--config", text(&dir.join("spotqd.yaml"))], 78, parts);
    }
    fails(dir.path(), &["--local", "--config", "no-such.yaml"], 78, &["no-such.yaml"]);
    fails(dir.path(), &[], 78, &["--local"]);
    fails(dir.path(), &["--local", "--listen", "0.0.0.0:0"], 78, &["loopback"]);
    fails(dir.path(), &["--local", "--listen", "nonsense"], 69, &["nonsense", "127.0.0.1:7470"]);
    fails(dir.path(), &["--local", "--seed", "x"], 2, &["--seed"]);
    leftovers::wait_gone(dir.path(), DEADLINE);
}

#[test]
fn a_port_that_is_taken_is_69_and_a_directory_in_use_73() {
    let cluster = Cluster::start("in-use");
    let job = cluster.submit(&["--hold", "--", "true"]);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let dir = TempDir::new("port-in-use");
    fails(dir.path(), &["--local", "--listen", &address], 69, &[&address, "in use"]);
    let second = Ran::of({
        let mut command = cluster.daemon_command();
        command.args(["--listen", "127.0.0.1:0"]);
        command
    });
    second.refuses(73, &[text(&cluster.data()), "in use"]);
    // The first one has not noticed.
    assert_eq!(cluster.show(&job)["phase"], "held");
    cluster.run(&["cancel", &job]).ok();
    cluster.end();
}

#[test]
fn a_data_directory_that_cannot_be_used_is_73_and_stays_as_it_is() {
    let dir = TempDir::new("bad-data");
    let file = dir.write("data", "somebody's text");
    fails(dir.path(), &["--local"], 73, &[text(&file), "not a directory"]);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "somebody's text");
    std::fs::remove_file(&file).unwrap();
    dir.write("data/secret", "too short");
    fails(dir.path(), &["--local"], 73, &["secret", "32"]);
    let Some(_mounted) = Mounted::tmpfs(&dir.join("data"), "ro,size=1m") else { return };
    fails(dir.path(), &["--local"], 73, &["ead-only"]);
    leftovers::wait_gone(dir.path(), DEADLINE);
}

#[test]
fn a_store_of_which_the_files_are_damaged_is_named_and_never_taken_for_a_new_one() {
    let mut cluster = Cluster::start("damaged");
    let job = cluster.submit(&["--hold", "--", "true"]);
    cluster.run(&["cancel", &job]).ok();
    cluster.stop();
    let store = cluster.data().join("store");
    let largest = walk(&store).into_iter().max_by_key(|path| std::fs::metadata(path).unwrap().len()).unwrap();
    let junk = vec![0xa5_u8; usize::try_from(std::fs::metadata(&largest).unwrap().len()).unwrap()];
    std::fs::write(&largest, &junk).unwrap();
    // Nor does a second start take what is left for a new, empty store.
    for _ in 0..2 {
        let mut command = cluster.daemon_command();
        command.args(["--listen", "127.0.0.1:0"]);
        Ran::of(command).refuses(73, &[text(&store), "damaged", "backup"]);
    }
}

#[test]
fn a_disk_that_fills_up_ends_the_scheduler_with_70_and_loses_nothing() {
    let dir = TempDir::new("full-disk");
    let data = dir.join("data");
    let Some(mounted) = Mounted::tmpfs(&data, "size=10m") else { return };
    let port = free_port().to_string();
    let start = |name: &str| {
        let mut command = daemon();
        command.args(["--local", "--listen", &format!("127.0.0.1:{port}"), "--data", text(&data)]);
        Child::start(name, dir.path(), command).unwrap()
    };
    let mut first = start("first");
    let server = format!("127.0.0.1:{port}");
    let submit = |text: &str| {
        let mut command =
            spotq(&["submit", "--server", &server, "-o", "json", "--hold", "-e", text, "--", "true"]);
        command.current_dir(dir.path());
        Ran::of(command)
    };
    wait_for(DEADLINE, || (submit("A=1").code == 0).then_some(()), "the first submit").unwrap();
    // Each job has text that does not compress, so that the disk is soon full.
    let mut acknowledged = 1;
    let mut refused = String::new();
    for n in 0..200 {
        let name = format!("submit-{n}");
        let noise = format!("A={}", noise(n));
        let command = spotq(&["submit", "--server", &server, "--hold", "-e", &noise, "--", "true"]);
        let mut child = Child::start(&name, dir.path(), command).unwrap();
        // A submit goes on asking for a minute when the scheduler is gone; here nobody will start it meanwhile.
        let ended =
            wait_for(DEADLINE, || child.ended().map(Some).or(first.ended().map(|_| None)), "an answer");
        match ended.unwrap() {
            Some(status) if status.success() => acknowledged += 1,
            Some(status) => {
                refused = child.stderr();
                assert!(matches!(status.code(), Some(65 | 69 | 70)), "{status}: {refused}");
                break;
            }
            None => break,
        }
    }
    assert!(acknowledged < 200, "the disk never became full");
    if let Some(status) = first.ended() {
        assert_eq!(status.code(), Some(70), "{}", first.stderr());
    } else {
        first.kill();
    }
    let said = format!("{}{refused}", first.stderr());
    assert!(said.contains("full") || said.contains("No space left"), "the full disk is not named: {said}");
    assert_no_panic(&said);
    mounted.resize("size=200m");
    let mut second = start("second");
    let all = wait_for(
        DEADLINE,
        || {
            let ran = Ran::of(spotq(&["queue", "--server", &server, "-o", "json", "-n", "1000"]));
            (ran.code == 0).then(|| ran.json())
        },
        "the second scheduler",
    );
    let all = all.unwrap_or_else(|e| panic!("{e}: {}", second.stderr()));
    let found = all.as_array().unwrap().len();
    assert!(found >= acknowledged, "{acknowledged} jobs were acknowledged, {found} are there");
    second.signal(rustix::process::Signal::TERM).unwrap();
    second.wait(DEADLINE).unwrap();
    leftovers::kill(dir.path());
}

/// `spotqd` with `dir/data` must end at once, with this code and a message that has `parts`.
fn fails(dir: &Path, args: &[&str], code: i32, parts: &[&str]) {
    let mut command = daemon();
    command.arg("--data").arg(dir.join("data")).current_dir(dir);
    if !args.contains(&"--listen") {
        command.args(["--listen", "127.0.0.1:0"]);
    }
    command.args(args);
    let mut child = Child::start("fails", dir, command).unwrap();
    let status = child.wait(Duration::from_secs(60));
    let status = status.unwrap_or_else(|e| panic!("{e}: {args:?} was accepted: {}", child.stderr()));
    let ran = Ran { code: status.code().unwrap(), stdout: child.stdout(), stderr: child.stderr() };
    assert_no_panic(&ran.stderr);
    assert_eq!(ran.stdout, "", "{ran:#?}");
    ran.refuses(code, parts);
    for log in ["fails.out", "fails.err"] {
        std::fs::remove_file(dir.join(log)).unwrap();
    }
}

/// Text of 100 kB that no compression makes small, different for each `seed`.
fn noise(seed: u64) -> String {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..100_000)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            char::from(b'0' + (state % 64) as u8)
        })
        .collect()
}

fn walk(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() { found.extend(walk(&path)) } else { found.push(path) }
    }
    found
}

/// A file system of a test's own, taken away at its end.
struct Mounted {
    at: PathBuf,
}

impl Mounted {
    /// Mounts a file system in memory; without the right to do so it says so and gives none.
    fn tmpfs(at: &Path, options: &str) -> Option<Mounted> {
        std::fs::create_dir_all(at).unwrap();
        if run("mount", &["-t", "tmpfs", "-o", options, "tmpfs", text(at)]) {
            return Some(Mounted { at: at.to_owned() });
        }
        #[expect(clippy::print_stderr, reason = "a skipped test says why")]
        {
            eprintln!("skipped: a file system can be mounted by root alone");
        }
        None
    }

    fn resize(&self, options: &str) {
        assert!(run("mount", &["-o", &format!("remount,{options}"), text(&self.at)]));
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Processes of a failed test may still use it; lazily, it goes when they do.
        run("umount", &["-l", text(&self.at)]);
    }
}

fn run(program: &str, args: &[&str]) -> bool {
    Command::new(program).args(args).output().is_ok_and(|output| output.status.success())
}
