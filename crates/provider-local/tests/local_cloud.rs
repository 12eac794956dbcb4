//! The simulated cloud as a real process: nodes, notices, endings, and restarts of the cloud itself.
#![expect(clippy::unwrap_used, reason = "tests; the lint does not see that their helpers are tests as well")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use spotq_model::{InstanceId, Pool, RefusalKind, Scope, Span};
use spotq_provider::conformance::{self, Setup};
use spotq_provider::{CloudProvider, GoneCause, InstanceState, LaunchRequest, TerminateState};
use spotq_provider_local::{CloudConfig, LocalCloud, LocalError, MarketConfig};

const CLOUD: &str = env!("CARGO_BIN_EXE_spotq-localcloud");
const PATIENCE: Duration = Duration::from_secs(20);
/// A worker that leaves its arguments behind and waits.
const WAITS: &str = "echo \"$@\" > args; echo $$ > pid; exec sleep 600";
/// One that ignores TERM and has children in sessions of their own.
const CLINGS: &str = "trap '' TERM; (setsid sh -c 'trap \"\" TERM; sleep 600; true' &); (sleep 600 & ); \
                      echo $$ > pid; sleep 600; sleep 600";

struct Fixture {
    _end: EndOnPanic,
    dir: tempfile::TempDir,
    config: CloudConfig,
    cloud: LocalCloud,
}

/// A failed test leaves no cloud and no node behind either.
struct EndOnPanic(PathBuf);

impl Drop for EndOnPanic {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        let control = fs::read(self.0.join("control.json")).unwrap_or_default();
        let control: serde_json::Value = serde_json::from_slice(&control).unwrap_or_default();
        if let Some(pid) = control["pid"].as_i64().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?)) {
            let _ = kill_process(pid, Signal::TERM);
        }
    }
}

impl Fixture {
    async fn start(script: &str, change: impl FnOnce(&mut CloudConfig)) -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        let worker = dir.path().join("worker.sh");
        fs::write(&worker, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&worker, fs::Permissions::from_mode(0o755)).unwrap();
        let calm = MarketConfig {
            mean_lifetime_s: 0,
            capacity_errors_spot_pct: 0,
            capacity_errors_on_demand_pct: 0,
            ..MarketConfig::default()
        };
        let mut config = CloudConfig {
            boot_ms: 20,
            terminate_grace_ms: 200,
            idle_exit_ms: 2_000,
            worker: Some(worker),
            market: calm,
            ..CloudConfig::default()
        };
        change(&mut config);
        let cloud = connect(dir.path(), &config).await;
        Fixture { _end: EndOnPanic(dir.path().join("cloud")), dir, config, cloud }
    }

    async fn run_node(&self, number: u64) -> InstanceId {
        self.run_in("aws/us-east-1/us-east-1a/c7i.xlarge/spot", number).await
    }

    async fn run_in(&self, pool: &str, number: u64) -> InstanceId {
        let launched = self.cloud.launch(request(pool, number)).await.unwrap();
        self.wait(&launched.instance, |s| s == InstanceState::Running).await;
        launched.instance
    }

    async fn wait(&self, instance: &InstanceId, wanted: impl Fn(InstanceState) -> bool) -> InstanceState {
        eventually(&format!("{instance} gets where it should"), || async {
            let state = self.state(instance).await?;
            wanted(state).then_some(state)
        })
        .await
    }

    async fn state(&self, instance: &InstanceId) -> Option<InstanceState> {
        let listed = self.cloud.list_owned("conformance").await.unwrap();
        listed.into_iter().find(|i| i.instance == *instance).map(|i| i.state)
    }

    async fn end(&self, instance: &InstanceId) {
        eventually("terminate ends at Gone", || async {
            let state = self.cloud.terminate(instance).await.unwrap();
            (state == TerminateState::Gone).then_some(())
        })
        .await;
    }

    /// What the worker script wrote to its disk.
    async fn written(&self, instance: &InstanceId, file: &str) -> String {
        let path = self.node_dir(instance).join("disk").join(file);
        eventually(&format!("{} is written", path.display()), || async {
            fs::read_to_string(&path)
                .ok()
                .filter(|text| text.ends_with('\n'))
                .map(|text| text.trim().to_owned())
        })
        .await
    }

    fn node_dir(&self, instance: &InstanceId) -> PathBuf {
        self.cloud.dir().join("nodes").join(&instance.0)
    }

    fn record(&self, instance: &InstanceId) -> serde_json::Value {
        serde_json::from_slice(&fs::read(self.node_dir(instance).join("node.json")).unwrap()).unwrap()
    }

    fn kill_cloud(&self) -> u32 {
        let pid = self.cloud.pid();
        kill_process(raw(pid), Signal::KILL).unwrap();
        pid
    }
}

async fn connect(dir: &Path, config: &CloudConfig) -> LocalCloud {
    LocalCloud::connect_or_start(&dir.join("cloud"), 7, config, Path::new(CLOUD)).await.unwrap()
}

fn request(pool: &str, number: u64) -> LaunchRequest {
    Setup::default().request(&pool.parse::<Pool>().unwrap(), number)
}

fn raw(pid: u32) -> Pid {
    Pid::from_raw(i32::try_from(pid).unwrap()).unwrap()
}

fn is_alive(pid: u32) -> bool {
    let zombie = || fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| s.contains(") Z "));
    test_kill_process(raw(pid)).is_ok() && !zombie()
}

/// Living processes whose environment names the node.
fn processes_of(instance: &InstanceId) -> Vec<String> {
    let marker = format!("SPOTQ_NODE={instance}");
    let pids = fs::read_dir("/proc").unwrap().flatten().map(|e| e.file_name().to_string_lossy().into_owned());
    pids.filter(|pid| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|b| *b == 0).any(|v| v == marker.as_bytes())
    })
    .collect()
}

async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, check: impl Fn() -> F) -> T {
    let started = Instant::now();
    loop {
        if let Some(value) = check().await {
            return value;
        }
        assert!(started.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn the_local_cloud_keeps_the_contract() {
    let fixture = Fixture::start(WAITS, |config| config.market.capacity_errors_spot_pct = 30).await;
    conformance::run(&fixture.cloud, &Setup::default()).await;
    fixture.cloud.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_worker_gets_what_it_needs_and_the_secret_is_in_no_argument_no_variable_and_no_file() {
    let script = format!(
        "echo $CARGO_MANIFEST_DIR > foreign; env > environment; echo $SPOTQ_NODE $(cat) > bootstrap; {WAITS}"
    );
    let fixture = Fixture::start(&script, |_| {}).await;
    let mut wanted = request("gcp/us-east4/us-east4-a/n2-standard-4/spot", 31);
    wanted.bootstrap.join_secret = spotq_provider::Secret::new("sesame");
    wanted.bootstrap.env.insert("EXTRA".into(), "more".into());
    let instance = fixture.cloud.launch(wanted).await.unwrap().instance;
    let bootstrap = fixture.written(&instance, "bootstrap").await;
    assert_eq!(bootstrap, format!(r#"{instance} {{"env":{{"EXTRA":"more"}},"join_secret":"sesame"}}"#));
    let environment = fixture.written(&instance, "environment").await;
    assert!(!environment.contains("sesame") && !environment.contains("more"), "{environment}");
    let args = fixture.written(&instance, "args").await;
    let record = fixture.record(&instance);
    let expected = format!(
        "--server http://127.0.0.1:9 --node 31 --instance {instance} --dir {}/disk --cloud gcp --metadata \
         http://127.0.0.1:{} --bootstrap -",
        fixture.node_dir(&instance).display(),
        record["metadata_port"]
    );
    assert_eq!(args, expected);
    assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some());
    assert_eq!(
        fixture.written(&instance, "foreign").await,
        "",
        "a node has nothing else of its starter's environment"
    );
    assert!(!record.to_string().contains("sesame"));
    let log = fs::read_to_string(fixture.cloud.dir().join("cloud.log")).unwrap();
    assert!(!log.contains("sesame"));
    fixture.cloud.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_terminated_node_leaves_no_process_and_no_disk_even_if_it_clings() {
    let fixture = Fixture::start(CLINGS, |_| {}).await;
    let instance = fixture.run_node(1).await;
    eventually("the tree has grown", || async { (processes_of(&instance).len() >= 5).then_some(()) }).await;
    fixture.end(&instance).await;
    assert_eq!(processes_of(&instance), Vec::<String>::new());
    assert!(!fixture.node_dir(&instance).join("disk").exists(), "the disk goes with the node");
    let state = fixture.state(&instance).await;
    assert!(matches!(state, Some(InstanceState::Gone { cause: GoneCause::Terminated, .. })), "{state:?}");
    fixture.cloud.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_worker_that_ends_takes_its_node_with_it() {
    let fixture = Fixture::start("(setsid sleep 600 &); exit 3", |_| {}).await;
    let mut changes = fixture.cloud.changes();
    let launched =
        fixture.cloud.launch(request("aws/us-east-1/us-east-1a/c7i.xlarge/spot", 1)).await.unwrap();
    let state = fixture.wait(&launched.instance, InstanceState::is_gone).await;
    assert!(matches!(state, InstanceState::Gone { cause: GoneCause::Crashed, .. }), "{state:?}");
    assert_eq!(processes_of(&launched.instance), Vec::<String>::new());
    let told = async { while !changes.recv().await.unwrap().state.is_gone() {} };
    tokio::time::timeout(PATIENCE, told).await.expect("the crash is told");
    fixture.cloud.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_killed_cloud_comes_back_and_takes_its_nodes_over() {
    let fixture = Fixture::start(WAITS, |_| {}).await;
    let (kept, lost) = (fixture.run_node(1).await, fixture.run_node(2).await);
    let (worker, dead) = (fixture.written(&kept, "pid").await, fixture.written(&lost, "pid").await);
    let port = fixture.record(&kept)["metadata_port"].clone();
    fixture.cloud.simulate_interruption(&kept, Span::secs(600)).await.unwrap();

    let old = fixture.kill_cloud();
    eventually("the cloud is dead", || async { (!is_alive(old)).then_some(()) }).await;
    assert!(is_alive(worker.parse().unwrap()), "nodes outlive the cloud's process");
    kill_process(raw(dead.parse().unwrap()), Signal::KILL).unwrap();

    // The next call starts a new process.
    let state = fixture.wait(&lost, InstanceState::is_gone).await;
    assert!(matches!(state, InstanceState::Gone { cause: GoneCause::Crashed, .. }), "{state:?}");
    assert_ne!(fixture.cloud.pid(), old);
    assert_eq!(fixture.state(&kept).await, Some(InstanceState::Running));
    assert!(is_alive(worker.parse().unwrap()), "a node is taken over, not replaced");
    assert_eq!(fixture.record(&kept)["metadata_port"], port);
    assert_eq!(aws_action(&fixture, &kept).await.0, 200, "a standing notice is served again");
    let replay = fixture.cloud.launch(request("aws/us-east-1/us-east-1a/c7i.xlarge/spot", 1)).await.unwrap();
    assert_eq!(replay.instance, kept, "keys are remembered");

    fixture.end(&kept).await;
    assert_eq!(processes_of(&kept), Vec::<String>::new());
    fixture.cloud.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_corrupt_record_is_set_aside_and_its_processes_end() {
    let fixture = Fixture::start(CLINGS, |_| {}).await;
    let (good, bad) = (fixture.run_node(1).await, fixture.run_node(2).await);
    let old = fixture.kill_cloud();
    eventually("the cloud is dead", || async { (!is_alive(old)).then_some(()) }).await;
    fs::write(fixture.node_dir(&bad).join("node.json"), "{\"version\": 1, \"se").unwrap();
    assert_eq!(fixture.state(&bad).await, None);
    assert_eq!(fixture.state(&good).await, Some(InstanceState::Running));
    eventually("the unknown node ends", || async { processes_of(&bad).is_empty().then_some(()) }).await;
    assert_eq!(fs::read_dir(fixture.cloud.dir().join("corrupt")).unwrap().count(), 1);
    fixture.cloud.shutdown().await.unwrap();
}

#[tokio::test]
async fn shutdown_ends_every_process() {
    let fixture = Fixture::start(CLINGS, |_| {}).await;
    let nodes = [fixture.run_node(1).await, fixture.run_node(2).await];
    let pid = fixture.cloud.pid();
    fixture.cloud.shutdown().await.unwrap();
    for node in &nodes {
        assert_eq!(processes_of(node), Vec::<String>::new());
    }
    eventually("the cloud ends", || async { (!is_alive(pid)).then_some(()) }).await;
    assert!(!fixture.cloud.dir().join("control.json").exists());
    let after = fixture.cloud.offers().await.unwrap_err();
    assert_eq!(after.kind, RefusalKind::Transient, "nothing is started again after a shutdown");
}

#[tokio::test]
async fn a_cloud_that_nobody_needs_ends_and_one_with_a_node_stays() {
    let Fixture { dir, config, cloud, .. } = Fixture::start(WAITS, |config| config.idle_exit_ms = 300).await;
    let pid = cloud.pid();
    let launched = cloud.launch(request("aws/us-east-1/us-east-1a/c7i.xlarge/spot", 1)).await.unwrap();
    drop(cloud);
    // The node's own end, by its time-to-live or by us, is what lets the cloud go.
    let again = connect(dir.path(), &config).await;
    assert_eq!(again.pid(), pid, "a running cloud is found, not replaced");
    while again.terminate(&launched.instance).await.unwrap() != TerminateState::Gone {}
    drop(again);
    eventually("the cloud ends", || async { (!is_alive(pid)).then_some(()) }).await;
}

#[tokio::test]
async fn a_node_that_is_terminated_while_it_boots_never_runs() {
    let fixture =
        Fixture::start("touch ../../../../ran; exec sleep 600", |config| config.boot_ms = 60_000).await;
    let launched =
        fixture.cloud.launch(request("aws/us-east-1/us-east-1a/c7i.xlarge/spot", 1)).await.unwrap();
    fixture.end(&launched.instance).await;
    let state = fixture.state(&launched.instance).await;
    assert!(matches!(state, Some(InstanceState::Gone { cause: GoneCause::Terminated, .. })), "{state:?}");
    assert!(!fixture.dir.path().join("ran").exists());
    fixture.cloud.shutdown().await.unwrap();
}

#[tokio::test]
async fn clients_that_come_at_once_share_one_cloud() {
    let fixture = Fixture::start(WAITS, |_| {}).await;
    let old = fixture.kill_cloud();
    eventually("the cloud is dead", || async { (!is_alive(old)).then_some(()) }).await;
    let one = || connect(fixture.dir.path(), &fixture.config);
    let (a, b, c) = tokio::join!(one(), one(), one());
    assert!(a.pid() == b.pid() && b.pid() == c.pid() && a.pid() != old);
    let pid = a.pid();
    a.shutdown().await.unwrap();
    eventually("the cloud ends", || async { (!is_alive(pid)).then_some(()) }).await;
    // Nobody who lost the race is still waiting to become the cloud.
    let dir = fixture.cloud.dir().to_str().unwrap();
    let clouds = || {
        let all = fs::read_dir("/proc").unwrap().flatten();
        all.filter(|e| {
            let line = fs::read(e.path().join("cmdline")).unwrap_or_default();
            line.starts_with(b"spotq-localcloud") && String::from_utf8_lossy(&line).contains(dir)
        })
        .count()
    };
    eventually("all clouds of the directory end", || async { (clouds() == 0).then_some(()) }).await;
}

#[tokio::test]
async fn the_market_preempts_spot_nodes_by_itself() {
    let fixture = Fixture::start(WAITS, |config| {
        config.market.mean_lifetime_s = 1;
        config.market.notice_ms = Some(50);
    })
    .await;
    let launched =
        fixture.cloud.launch(request("aws/us-east-1/us-east-1a/c7i.xlarge/spot", 1)).await.unwrap();
    let state = fixture.wait(&launched.instance, InstanceState::is_gone).await;
    assert!(matches!(state, InstanceState::Gone { cause: GoneCause::Preempted, .. }), "{state:?}");
    fixture.cloud.shutdown().await.unwrap();
}

#[tokio::test]
async fn an_ordered_refusal_is_given_once_to_a_launch_that_it_covers() {
    let fixture = Fixture::start(WAITS, |_| {}).await;
    let (here, there) =
        ("aws/us-east-1/us-east-1a/c7i.xlarge/spot", "aws/us-west-2/us-west-2a/c7i.xlarge/spot");
    let refusal = spotq_model::Refusal {
        kind: RefusalKind::QuotaExceeded,
        scope: Scope::Region { cloud: spotq_model::Cloud::Aws, region: "us-east-1".into() },
        cool_down: Span::secs(9),
        message: "ordered".into(),
    };
    fixture.cloud.refuse_next(refusal.clone()).await.unwrap();
    fixture.cloud.launch(request(there, 1)).await.unwrap();
    assert_eq!(fixture.cloud.launch(request(here, 2)).await.unwrap_err(), refusal);
    fixture.cloud.launch(request(here, 2)).await.unwrap();
    fixture.cloud.shutdown().await.unwrap();
}

async fn aws_action(fixture: &Fixture, instance: &InstanceId) -> (u16, String) {
    let base = format!("http://127.0.0.1:{}/latest", fixture.record(instance)["metadata_port"]);
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let token = http.put(format!("{base}/api/token")).header("x-aws-ec2-metadata-token-ttl-seconds", "60");
    let token = token.send().await.unwrap().text().await.unwrap();
    let path = format!("{base}/meta-data/spot/instance-action");
    let response = http.get(path).header("x-aws-ec2-metadata-token", token).send().await.unwrap();
    (response.status().as_u16(), response.text().await.unwrap())
}

async fn get(fixture: &Fixture, instance: &InstanceId, path: &str, header: (&str, &str)) -> String {
    let url = format!("http://127.0.0.1:{}{path}", fixture.record(instance)["metadata_port"]);
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    http.get(url).header(header.0, header.1).send().await.unwrap().text().await.unwrap()
}

#[tokio::test]
async fn once_a_drill_is_accepted_every_clouds_metadata_tells_it_and_a_withdrawal_takes_it_back() {
    let fixture = Fixture::start(WAITS, |_| {}).await;
    let aws = fixture.run_in("aws/us-east-1/us-east-1a/g4dn.xlarge/spot", 1).await;
    let gcp = fixture.run_in("gcp/us-east4/us-east4-a/n2-standard-4/spot", 2).await;
    let azure = fixture.run_in("azure/eastus/eastus-1/Standard_D4s_v5/spot", 3).await;
    let preempted = "/computeMetadata/v1/instance/preempted";
    let events = "/metadata/scheduledevents?api-version=2020-07-01";
    for (round, notice) in [(0, true), (1, false)] {
        for instance in [&aws, &gcp, &azure] {
            if notice {
                fixture.cloud.simulate_interruption(instance, Span::secs(600)).await.unwrap();
            } else {
                fixture.cloud.withdraw(instance).await.unwrap();
            }
        }
        assert_eq!(aws_action(&fixture, &aws).await.0 == 200, notice, "round {round}");
        let flag = get(&fixture, &gcp, preempted, ("Metadata-Flavor", "Google")).await;
        assert_eq!(flag == "TRUE", notice, "round {round}: {flag}");
        let document = get(&fixture, &azure, events, ("Metadata", "true")).await;
        assert_eq!(document.contains("\"Preempt\""), notice, "round {round}: {document}");
    }
    fixture.cloud.shutdown().await.unwrap();
}

#[tokio::test]
async fn the_control_api_is_for_its_owner_alone() {
    let fixture = Fixture::start(WAITS, |_| {}).await;
    let file = fixture.cloud.dir().join("control.json");
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let control: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let url = format!("{}/v1/offers", control["url"].as_str().unwrap());
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    assert_eq!(http.post(&url).send().await.unwrap().status(), 401);
    assert_eq!(http.post(&url).bearer_auth("guess").send().await.unwrap().status(), 401);
    fixture.cloud.shutdown().await.unwrap();
}

#[tokio::test]
async fn what_cannot_start_says_why() {
    let fixture = Fixture::start(WAITS, |_| {}).await;
    let dir = fixture.cloud.dir();
    let exe = Path::new(CLOUD);
    let other = LocalCloud::connect_or_start(dir, 8, &fixture.config, exe).await.unwrap_err();
    assert!(matches!(other, LocalError::OtherSeed { running: 7, wanted: 8, .. }), "{other}");
    let mut second = Command::new(CLOUD);
    second.args(["serve", "--dir"]).arg(dir);
    let second = tokio::task::spawn_blocking(move || second.output()).await.unwrap().unwrap();
    assert!(!second.status.success());
    let message = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(message.contains("already running"), "{message}");
    fixture.cloud.shutdown().await.unwrap();

    let empty = tempfile::tempdir().unwrap();
    let config = CloudConfig::default();
    let nothing = LocalCloud::connect_or_start(empty.path(), 1, &config, Path::new("/no/such/program")).await;
    assert!(nothing.unwrap_err().to_string().contains("could not run /no/such/program"));
    let file = empty.path().join("file");
    fs::write(&file, "").unwrap();
    let not_a_dir = LocalCloud::connect_or_start(&file, 1, &config, exe).await.unwrap_err().to_string();
    assert!(not_a_dir.contains("could not create") && not_a_dir.contains("file"), "{not_a_dir}");
    let market = MarketConfig { no_notice_pct: 200, ..MarketConfig::default() };
    let bad = CloudConfig { market, ..CloudConfig::default() };
    let refused = LocalCloud::connect_or_start(empty.path(), 1, &bad, exe).await.unwrap_err().to_string();
    assert!(refused.contains("no_notice_pct"), "{refused}");
}
