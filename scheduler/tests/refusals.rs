//! Everything that keeps the daemon from starting has one clear message and its documented exit code.

use std::path::PathBuf;

use spotq_scheduler::{DaemonArgs, DaemonError, run};
use spotq_testkit::TempDir;

/// Arguments that would start a daemon in this directory, on a port that the system picks.
fn args(data: PathBuf) -> DaemonArgs {
    DaemonArgs { data, listen: "127.0.0.1:0".into(), config: None, local: true, seed: 1 }
}

async fn refused(args: DaemonArgs) -> DaemonError {
    match run(args).await {
        Ok(()) => panic!("the daemon ran and ended without a reason"),
        Err(error) => error,
    }
}

fn assert_says(error: &DaemonError, code: u8, parts: &[&str]) {
    let text = error.to_string();
    assert_eq!(error.exit_code(), code, "{text}");
    for part in parts {
        assert!(text.contains(part), "`{text}` lacks `{part}`");
    }
}

#[tokio::test]
async fn a_port_in_use_is_named_as_such() {
    let dir = TempDir::new("port");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = taken.local_addr().unwrap().to_string();
    let error = refused(DaemonArgs { listen: listen.clone(), ..args(dir.join("data")) }).await;
    assert_says(&error, 69, &[&listen, "in use", "--listen"]);
}

#[tokio::test]
async fn an_address_that_is_none_or_not_here_is_refused() {
    let dir = TempDir::new("address");
    for (listen, code, parts) in [
        ("0.0.0.0:0", 78, ["0.0.0.0:0", "spotqd init"]),
        ("[::]:0", 78, ["[::]:0", "spotqd init"]),
        ("7470", 69, ["7470", "HOST:PORT"]),
        ("127.0.0.1:99999", 69, ["127.0.0.1:99999", "listen on"]),
        ("", 69, ["listen on", "HOST:PORT"]),
    ] {
        let error = refused(DaemonArgs { listen: listen.into(), ..args(dir.join("data")) }).await;
        assert_says(&error, code, &parts);
    }
}

#[tokio::test]
async fn a_data_directory_that_is_a_file_is_refused_and_left_alone() {
    let dir = TempDir::new("file");
    let file = dir.write("data", "mine");
    for data in [file.clone(), file.join("below")] {
        let error = refused(args(data.clone())).await;
        assert_says(&error, 73, &[data.to_str().unwrap(), "not a directory", "--data"]);
    }
    assert_eq!(std::fs::read(file).unwrap(), b"mine");
}

#[tokio::test]
async fn a_secret_that_is_damaged_is_refused_and_left_alone() {
    let dir = TempDir::new("secret");
    let secret = dir.write("data/secret", "too short");
    let error = refused(args(dir.join("data"))).await;
    assert_says(&error, 73, &[secret.to_str().unwrap(), "9 bytes", "32", "backup"]);
    assert!(!error.to_string().contains("too short"), "what it holds is nobody's business");
    assert_eq!(std::fs::read(&secret).unwrap(), b"too short");
    std::fs::remove_file(&secret).unwrap();
    std::fs::create_dir(&secret).unwrap();
    assert_says(&refused(args(dir.join("data"))).await, 73, &[secret.to_str().unwrap()]);
}

#[tokio::test]
async fn a_secret_is_made_once_for_its_owner_alone() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = TempDir::new("secret-made");
    // The address is refused after the directory was made ready.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let args = DaemonArgs { listen: taken.local_addr().unwrap().to_string(), ..args(dir.join("a/b/data")) };
    refused(args.clone()).await;
    let secret = args.data.join("secret");
    let first = std::fs::read(&secret).unwrap();
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert!(first.starts_with(b"spotq-sealed"), "it is sealed");
    assert_eq!((mode(&secret), mode(&args.data.join("master.key"))), (0o600, 0o600));
    assert_eq!(mode(&args.data), 0o700, "what jobs write is their owner's alone, too");
    refused(args).await;
    assert_eq!(std::fs::read(secret).unwrap(), first);
}

#[tokio::test]
async fn a_secret_of_an_older_version_is_sealed_and_stays_the_same() {
    let dir = TempDir::new("secret-old");
    let secret = dir.write("data/secret", [7; 32]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let args = DaemonArgs { listen: taken.local_addr().unwrap().to_string(), ..args(dir.join("data")) };
    refused(args.clone()).await;
    let sealed = std::fs::read(&secret).unwrap();
    assert!(!sealed.windows(32).any(|part| part == [7; 32]));
    let sealer = spotq_engine::seal::Sealer::open(&args.data).unwrap();
    assert_eq!(sealer.read(&secret).unwrap(), Ok(vec![7; 32]));
    // With another key it is refused, and left alone.
    std::fs::remove_file(args.data.join("master.key")).unwrap();
    assert_says(&refused(args).await, 73, &["cannot be opened with this key", "SPOTQ_MASTER_KEY_FILE"]);
    assert_eq!(std::fs::read(&secret).unwrap(), sealed);
}

#[tokio::test]
async fn a_bad_configuration_names_its_file_and_line_before_anything_is_made() {
    let dir = TempDir::new("config");
    for (text, parts) in [
        ("cluster: a\nclustre: b\n", ["clustre", "config.yaml:2:1: "]),
        ("cluster: [1\n", ["config.yaml:1:", "bracket"]),
        ("cluster: a\ncluster: b\n", ["config.yaml:2:1: ", "second time"]),
        ("local:\n  cloud:\n    no_such_key: 3\n", ["no_such_key", "config.yaml:3:5: "]),
    ] {
        let config = Some(dir.write("config.yaml", text));
        let error = refused(DaemonArgs { config, ..args(dir.join("data")) }).await;
        assert_says(&error, 78, &parts);
        assert_says(&error, 78, &[dir.join("config.yaml").to_str().unwrap()]);
    }
    let missing = dir.join("no-such.yaml");
    let error = refused(DaemonArgs { config: Some(missing.clone()), ..args(dir.join("data")) }).await;
    assert_says(&error, 78, &[missing.to_str().unwrap()]);
    let binary = Some(dir.write("config.yaml", [0xff, 0xfe, 0x00]));
    assert_says(
        &refused(DaemonArgs { config: binary, ..args(dir.join("data")) }).await,
        78,
        &["config.yaml"],
    );
    assert!(!dir.join("data").exists());
}

#[tokio::test]
async fn a_wrong_policy_is_refused_before_a_cloud_is_started() {
    let dir = TempDir::new("policy");
    for (text, part) in [
        ("policies: {idle_tll: 3}\n", "idle_tll"),
        ("policies: {idle_ttl: soon}\n", "config.yaml:1:22: expected a whole number"),
        ("policies: {nodes_max: -1}\n", "config.yaml:1:23: expected a whole number, not below 0"),
    ] {
        let config = Some(dir.write("config.yaml", text));
        let error = refused(DaemonArgs { config, ..args(dir.join("data")) }).await;
        assert_says(&error, 78, &[part]);
    }
    assert!(!dir.join("data/cloud").exists(), "nothing was left running");
}

#[tokio::test]
async fn without_a_cloud_there_is_nothing_to_schedule_on() {
    let dir = TempDir::new("no-cloud");
    let error = refused(DaemonArgs { local: false, ..args(dir.join("data")) }).await;
    assert_says(&error, 78, &["--local"]);
}

#[tokio::test]
async fn a_store_in_use_or_damaged_is_named() {
    let dir = TempDir::new("store");
    let store = dir.join("data/store");
    let held = spotq_store_sled::SledStore::open(&store, spotq_store_sled::SledOptions::default()).unwrap();
    assert_says(&refused(args(dir.join("data"))).await, 73, &["in use", "store"]);
    drop(held);
    let other = TempDir::new("store-file");
    other.write("data/store", "not a store");
    assert_says(&refused(args(other.join("data"))).await, 73, &["store"]);
}
