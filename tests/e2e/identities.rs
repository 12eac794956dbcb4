//! TLS, users and secrets, as a person sets them up: `spotqd init`, `spotq login`, and what must appear nowhere.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use spotq_testkit::wait_until;

use crate::cluster::{Cluster, DEADLINE, Ran, daemon, spotq, text};
use crate::leftovers;

/// `spotq` with contexts of its own below `home`, and nothing in its environment.
fn person(cluster: &Cluster, home: &str, args: &[&str]) -> Command {
    let mut command = spotq(args);
    command.env("XDG_CONFIG_HOME", cluster.dir().join(home)).current_dir(cluster.dir().path());
    command
}

/// Logs in with a token on standard input.
fn login(cluster: &Cluster, home: &str, token: &str, extra: &[&str]) -> Ran {
    use std::io::Write as _;
    let (url, ca) = (cluster.url(), cluster.data().join("tls/ca.pem"));
    let args = [&["login", "--server", &url, "--ca", text(&ca), "--token-stdin"], extra].concat();
    let mut command = person(cluster, home, &args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(token.as_bytes()).unwrap();
    Ran::from(&child.wait_with_output().unwrap())
}

#[test]
fn users_log_in_act_on_their_own_jobs_and_are_out_when_removed() {
    let (cluster, admin) = Cluster::start_secured("users", &[]);
    let bob = cluster.manage(&["user", "add", "bob", "--role", "user"]).ok().stdout;
    login(&cluster, "ada", &admin, &["--name", "lab"]).ok();
    login(&cluster, "bob", &bob, &[]).ok();
    let context = cluster.dir().join("ada/spotq/contexts/lab.json");
    assert_eq!(std::fs::metadata(context).unwrap().permissions().mode() & 0o777, 0o600);
    let list = Ran::of(person(&cluster, "ada", &["context", "list"])).ok().stdout;
    assert!(
        list.contains("* lab") && list.contains(&cluster.url()) && !list.contains(admin.trim()),
        "{list}"
    );
    // A job of the admin's, and one of bob's, who cannot make it somebody else's.
    let of_admin = cluster.submit(&["--hold", "--", "true"]);
    let mut submit = person(&cluster, "bob", &["submit", "-o", "json", "--", "true"]);
    submit.env("USER", "root");
    let of_bob = Ran::of(submit).json()["job_id"].to_string();
    assert_eq!(cluster.show(&of_bob)["user"], "bob");
    cluster.completed(&of_bob);
    for order in ["cancel", "release", "logs"] {
        let refused = Ran::of(person(&cluster, "bob", &[order, &of_admin]));
        refused.refuses(65, &["bob may not", "another user's"]);
    }
    Ran::of(person(&cluster, "bob", &["logs", &of_bob])).ok();
    Ran::of(person(&cluster, "bob", &["queue"])).ok();
    // Nobody, and somebody with a wrong token.
    Ran::of(person(&cluster, "nobody", &["--server", &cluster.url(), "queue"])).refuses(64, &["spotq login"]);
    login(&cluster, "nobody", "spotq_guess\n", &[]).refuses(65, &["cannot log in"]);
    cluster.manage(&["user", "remove", "bob"]).ok();
    let out = || Ran::of(person(&cluster, "bob", &["queue"])).code == 65;
    wait_until(DEADLINE, out, "bob's token to count no more").unwrap();
    cluster.run(&["cancel", &of_admin]).ok();
    cluster.manage(&["audit", "verify"]).ok();
    cluster.end();
}

#[test]
fn a_rotation_of_the_ca_disturbs_nobody_who_works() {
    let (mut cluster, admin) = Cluster::start_secured("rotation", &[]);
    login(&cluster, "old", &admin, &[]).ok();
    let flag = cluster.dir().join("flag");
    let wait = format!("until [ -e {} ]; do sleep 0.05; done", flag.display());
    let job = cluster.submit(&["--", "sh", "-c", &wait]);
    cluster.wait_phase(&job, "running");
    let before = std::fs::read(cluster.data().join("tls/ca.pem")).unwrap();
    cluster.manage(&["rotate", "--ca"]).ok();
    assert_ne!(std::fs::read(cluster.data().join("tls/ca.pem")).unwrap(), before);
    // The worker knows the old CA alone and joins a scheduler that has a certificate of the new one.
    cluster.kill();
    cluster.start_again();
    // So does a person who logged in before.
    Ran::of(person(&cluster, "old", &["queue"])).ok();
    std::fs::write(&flag, "").unwrap();
    let done = cluster.completed(&job);
    assert_eq!(done["generation"], 1, "{done:#}");
    cluster.manage(&["rotate", "--forget-old"]).refuses(65, &["two hours", "--force"]);
    cluster.end();
}

#[test]
fn what_cannot_be_made_is_said_in_one_message() {
    let (cluster, _) = Cluster::start_secured("manage", &[]);
    cluster.manage(&["init"]).refuses(65, &["exists"]);
    cluster.manage(&["user", "add", "admin", "--role", "user"]).refuses(65, &["admin", "exists"]);
    cluster.manage(&["user", "remove", "admin"]).refuses(65, &["last admin"]);
    cluster.manage(&["user", "remove", "eve"]).refuses(65, &["no user `eve`"]);
    cluster.manage(&["user", "add", "eve", "--role", "king"]).refuses(2, &["king", "operator"]);
    let mut elsewhere = daemon();
    elsewhere.args(["user", "list", "--data", text(&cluster.dir().join("nothing"))]);
    Ran::of(elsewhere).refuses(73, &["nothing"]);
    cluster.end();
}

/// INV-14: the store's keys, the join secret and a user's token, through all of a run with a preemption and a restart.
#[test]
fn a_secret_is_in_no_log_no_file_no_argument_and_no_environment_of_a_node() {
    let marker = "MARKERsecret0123456789";
    let (mut cluster, admin) = Cluster::start_secured("inv14", &[("AWS_SECRET_ACCESS_KEY", marker)]);
    login(&cluster, "ada", &admin, &[]).ok();
    // The job looks where a job can: at its own environment, and at that of everything above it up to the node.
    let script = "env; p=$$; while [ $p -gt 1 ] && tr '\\0' '\\n' < /proc/$p/environ | grep -q SPOTQ_NODE=; do \
                  tr '\\0' '\\n' < /proc/$p/environ; tr '\\0' ' ' < /proc/$p/cmdline; \
                  p=$(sed 's/.*) . //' /proc/$p/stat | cut -d' ' -f1); done; echo looked; sleep 600";
    let job = cluster.submit(&["--", "sh", "-c", script]);
    let looked = |times: usize| {
        let seen = || cluster.logs(&job).stdout.matches("looked").count() >= times;
        wait_until(DEADLINE, seen, "the job's own search").unwrap();
    };
    looked(1);
    cluster.preempt(&job, "2s");
    looked(2);
    let token = admin.trim();
    for (pid, _) in leftovers::of(cluster.dir().path()) {
        let of = |what: &str| std::fs::read(format!("/proc/{pid}/{what}")).unwrap_or_default();
        let (environment, arguments) = (of("environ"), of("cmdline"));
        assert!(!contains(&arguments, marker) && !contains(&arguments, token), "arguments of {pid}");
        if contains(&environment, "SPOTQ_NODE=") {
            assert!(!contains(&environment, marker) && !contains(&environment, "JOIN_SECRET"), "{pid}");
        }
    }
    let printed =
        [&["show", &job, "-o", "json"][..], &["logs", &job], &["report", "-o", "json"], &["nodes", "-a"]];
    for args in printed {
        let ran = cluster.run(args).ok();
        let all = ran.stdout + &ran.stderr;
        assert!(!all.contains(marker) && !all.contains(token), "{args:?}: {all}");
    }
    cluster.kill();
    cluster.start_again();
    cluster.run(&["cancel", &job]).ok();
    cluster.wait(&job);
    let home = cluster.dir().join("ada");
    let mut files = 0;
    for file in files_below(cluster.dir().path()) {
        let bytes = std::fs::read(&file).unwrap_or_default();
        assert!(!contains(&bytes, marker), "{}", file.display());
        // The person's own context holds the token, and nothing else does.
        assert!(file.starts_with(&home) || !contains(&bytes, token), "{}", file.display());
        files += 1;
    }
    assert!(files > 10, "only {files} files were looked at");
    cluster.end();
}

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|part| part == text.as_bytes())
}

fn files_below(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut dirs = vec![dir.to_owned()];
    while let Some(dir) = dirs.pop() {
        // A node's directory goes while we look.
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => dirs.push(entry.path()),
                Ok(kind) if kind.is_file() => files.push(entry.path()),
                _ => {}
            }
        }
    }
    files
}
