//! The suite against real S3 servers: moto and ministack, from `requirements-s3.txt`.
//!
//! They are looked for in `SPOTQ_TEST_S3_BIN`, then in `target/py/s3/bin` of the workspace. Where they are not
//! installed the tests say so and pass.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use spotq_checkpoint::{CheckpointError, JobKey, Options, Repository, conformance};

/// Python takes seconds to start on a busy machine.
const START_DEADLINE: Duration = Duration::from_secs(60);

struct Server {
    child: Child,
    endpoint: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn program(name: &str) -> Option<PathBuf> {
    let dir = match std::env::var_os("SPOTQ_TEST_S3_BIN") {
        Some(dir) => PathBuf::from(dir),
        None => PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/py/s3/bin")),
    };
    let path = dir.join(name);
    if path.exists() {
        return Some(path);
    }
    #[expect(clippy::print_stderr, reason = "a skipped test says why")]
    {
        eprintln!(
            "skipped: {} is not installed; run `python3 -m venv target/py/s3 && \
         target/py/s3/bin/pip install -r crates/checkpoint/tests/requirements-s3.txt`",
            path.display()
        );
    }
    None
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("loopback has a free port").port()
}

/// Starts a server and makes the bucket, which also shows that it is ready.
async fn start(mut command: Command, port: u16) -> Server {
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the server starts");
    let mut server = Server { child, endpoint: format!("http://127.0.0.1:{port}") };
    let deadline = Instant::now() + START_DEADLINE;
    let client = reqwest::Client::new();
    loop {
        let answer = client.put(format!("{}/bucket", server.endpoint)).send().await;
        if answer.is_ok_and(|answer| answer.status().is_success()) {
            return server;
        }
        assert!(server.child.try_wait().expect("own child").is_none(), "the server ended at once");
        assert!(Instant::now() < deadline, "the server did not make a bucket in {START_DEADLINE:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn env(endpoint: &str) -> Vec<(String, String)> {
    [("AWS_ENDPOINT_URL", endpoint), ("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test")]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .to_vec()
}

fn open(server: &Server, url: &str) -> Repository {
    Repository::from_url(url, JobKey([1; 32]), env(&server.endpoint), Options::default())
        .expect("a good address")
}

async fn passes(server: &Server) {
    let repo = open(server, "s3://bucket/jobs/one");
    repo.probe_put_if_absent().await.expect("put-if-absent is honoured");
    conformance::run(|| repo.store()).await;
    a_full_chunk_goes_through(&repo).await;
    let missing = open(server, "s3://no-such-bucket/x").probe_put_if_absent().await;
    assert!(matches!(missing, Err(CheckpointError::Invalid { .. })), "{missing:?}");
}

/// Chunks of the real size, with a rest: 32 MiB + 5 bytes.
async fn a_full_chunk_goes_through(repo: &Repository) {
    let work = tempfile::tempdir().expect("a temporary directory");
    let (source, target) = (work.path().join("source"), work.path().join("target"));
    std::fs::create_dir(&source).expect("test directory");
    let data: Vec<u8> =
        (0..(32 << 20) + 5_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    std::fs::write(source.join("model.bin"), &data).expect("test file");
    repo.push(&source, &conformance::request(1, 1), &|_| {}).await.expect("push");
    repo.restore(&target, spotq_model::Generation(1)).await.expect("restore");
    assert!(
        std::fs::read(target.join("model.bin")).expect("restored file") == data,
        "the file came back as it was"
    );
}

#[tokio::test]
async fn moto_passes_the_suite() {
    let Some(program) = program("moto_server") else { return };
    let port = free_port();
    let mut command = Command::new(program);
    command.args(["-H", "127.0.0.1", "-p", &port.to_string()]).env("AWS_EC2_METADATA_DISABLED", "true");
    passes(&start(command, port).await).await;
}

#[tokio::test]
async fn ministack_passes_the_suite() {
    let Some(program) = program("ministack") else { return };
    let port = free_port();
    let mut command = Command::new(program);
    // Its default is to listen on every address of the machine.
    command.env("BIND_HOST", "127.0.0.1").env("GATEWAY_PORT", port.to_string());
    passes(&start(command, port).await).await;
}

#[test]
fn a_server_that_is_away_is_unavailable() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let endpoint = format!("http://127.0.0.1:{}", free_port());
        let server = env(&endpoint);
        let repo =
            Repository::from_url("s3://bucket/x", JobKey([1; 32]), server, Options::default()).unwrap();
        let outcome = tokio::time::timeout(Duration::from_secs(60), repo.head()).await.expect("retries end");
        assert!(matches!(outcome, Err(CheckpointError::Unavailable { .. })), "{outcome:?}");
    });
}
