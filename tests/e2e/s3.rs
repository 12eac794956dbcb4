//! Checkpoints and outputs on a real S3 server, moto, instead of a directory.
//!
//! Where it is not installed the test says so and passes; `./test` installs it.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Command;

use spotq_testkit::{Child, TempDir, free_port, wait_until};

use crate::cluster::{Cluster, DEADLINE};
use crate::training::Training;

#[test]
fn a_preempted_job_with_its_checkpoints_on_s3_ends_as_undisturbed() {
    let Some(program) = moto() else { return };
    let (dir, port) = (TempDir::new("moto"), free_port());
    let mut command = Command::new(program);
    command.args(["-H", "127.0.0.1", "-p", &port.to_string()]);
    let server = Child::start("moto", dir.path(), command).unwrap();
    wait_until(DEADLINE, || make_bucket(port), "a bucket")
        .unwrap_or_else(|e| panic!("{e}: {}", server.stderr()));
    let endpoint = format!("http://127.0.0.1:{port}");
    let environment = [
        ("AWS_ENDPOINT_URL", endpoint.as_str()),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
        ("AWS_REGION", "us-east-1"),
    ];
    let cluster = Cluster::start_with_settings("s3", "checkpoint_store: s3://bucket/runs\n", &environment);
    let job = Training::submit(&cluster, 300, &["--step-ms", "10", "--save-every", "0"]);
    cluster.wait_step(&job.job, 60);
    cluster.preempt(&job.job, "20s");
    job.ends_as_undisturbed_with(&cluster, &environment);
    let seen = cluster.show(&job.job);
    assert!(seen["checkpoint_url"].as_str().unwrap().starts_with("s3://bucket/runs/"), "{seen:#}");
    assert!(seen["attempts"][1]["resumed_step"].as_u64() >= Some(60), "{seen:#}");
    assert!(!cluster.data().join("checkpoints").exists(), "checkpoints went to the disk as well");
    cluster.end();
}

fn moto() -> Option<PathBuf> {
    let dir = std::env::var_os("SPOTQ_TEST_S3_BIN").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/py/s3/bin")),
        PathBuf::from,
    );
    let path = dir.join("moto_server");
    if path.exists() {
        return Some(path);
    }
    #[expect(clippy::print_stderr, reason = "a skipped test says why")]
    {
        eprintln!("skipped: {} is not installed; `./test` installs it", path.display());
    }
    None
}

/// Makes the bucket, which also shows that the server is ready.
fn make_bucket(port: u16) -> bool {
    let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else { return false };
    let request = "PUT /bucket HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    let mut answer = String::new();
    let asked =
        stream.write_all(request.as_bytes()).and_then(|()| stream.read_to_string(&mut answer).map(|_| ()));
    asked.is_ok() && answer.starts_with("HTTP/1.1 200")
}
