//! What identities cost: a warm submit over TLS beside one in plain text to the same engine in the same run, and a new
//! worker's way from dialling to its refusal, which is all of a join but the welcome.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use spotq_engine::pki::Pki;
use spotq_engine::seal::Sealer;
use spotq_engine::{ClusterSecret, Role, Security, Users};
use spotq_model::NodeId;
use spotq_proto::tls::{Trust, connect};
use spotq_proto::v1;
use spotq_proto::v1::jobs_client::JobsClient;
use spotq_store_sled::{SledOptions, SledStore};
use tokio::net::TcpListener;
use tonic::Request;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint};

use super::submits::{job, multi_thread, start};
use super::{Figure, Wanted, median, say};

const SECRET: [u8; 32] = [7; 32];
/// The two take turns, so that a moody disk is moody to both.
const ROUNDS: usize = 9;
/// Submits of one caller in one turn.
const SUBMITS: usize = 300;
const JOINS: usize = 50;
/// Submits over TLS may take this much longer.
const TLS_WANTED: f64 = 1.2;
const JOIN_WANTED_MS: f64 = 50.0;
const TOKEN: &str = "spotq_bench";

pub fn measure(dir: &Path) -> anyhow::Result<Vec<Figure>> {
    let dir = dir.join("trust");
    std::fs::create_dir_all(&dir)?;
    let (server, clients) = (multi_thread("bench-server")?, multi_thread("bench-clients")?);
    let security = Arc::new(prepare(&dir)?);
    let ca_pem = security.ca_pem().to_string();
    let store = SledStore::open(&dir.join("store"), SledOptions::default())?;
    let engine = server.block_on(start(&dir, store))?;
    let bind = || server.block_on(TcpListener::bind("127.0.0.1:0"));
    let (plain, tls) = (bind()?, bind()?);
    let plain_url = format!("http://{}", plain.local_addr()?);
    let tls_url = format!("https://{}", tls.local_addr()?);
    let serving = [
        server.spawn(spotq_engine::serve(&engine, plain, std::future::pending())),
        server.spawn(spotq_engine::serve_secured(&engine, tls, security, std::future::pending())),
    ];
    let trust = Trust { ca_pem, identity_pem: None };
    let figures = clients.block_on(async {
        let figure = submits(&plain_url, &tls_url, &trust).await?;
        anyhow::Ok(vec![figure, joins(&tls_url, &trust).await?])
    });
    serving.iter().for_each(tokio::task::JoinHandle::abort);
    server.block_on(engine.stop())?;
    figures
}

fn prepare(dir: &Path) -> anyhow::Result<Security> {
    let (secret, sealer) = (ClusterSecret::new(SECRET), Sealer::open(dir)?);
    Pki::init(dir, sealer.clone(), &[])?;
    let mut users = Users::none(&secret);
    users.add("bench", Role::User, Some(TOKEN), None)?;
    users.save(dir)?;
    Ok(Security::open(dir, &secret, sealer)?)
}

async fn submits(plain_url: &str, tls_url: &str, trust: &Trust) -> anyhow::Result<Figure> {
    let plain = dial(plain_url, trust).await?;
    let tls = dial(tls_url, trust).await?;
    let (mut ratios, mut seen) = (Vec::new(), String::new());
    for round in 0..=ROUNDS {
        let without = one_caller(&plain, &format!("plain-{round}")).await?;
        let with = one_caller(&tls, &format!("tls-{round}")).await?;
        let us = |took: Duration| took.as_secs_f64() * 1e6 / SUBMITS as f64;
        seen = format!("{:.0} µs, plain {:.0} µs", us(with), us(without));
        // The first round sets both connections up.
        if round > 0 {
            say(&format!("a submit over TLS: {seen}"));
            ratios.push(with.as_secs_f64() / without.as_secs_f64());
        }
    }
    let name = "a warm submit over TLS of one in plain text";
    Ok(Figure::new(name, median(&mut ratios), "", Wanted::AtMost(TLS_WANTED), seen))
}

async fn dial(url: &str, trust: &Trust) -> anyhow::Result<Channel> {
    Ok(connect(Endpoint::from_shared(url.to_owned())?.tcp_nodelay(true), trust).await?)
}

async fn one_caller(channel: &Channel, name: &str) -> anyhow::Result<Duration> {
    let mut client = JobsClient::new(channel.clone());
    let spec = v1::JobSpec::from(&job());
    let bearer: MetadataValue<Ascii> = format!("Bearer {TOKEN}").parse()?;
    let started = Instant::now();
    for number in 0..SUBMITS {
        let client_key = format!("{name}-{number}");
        let mut request = Request::new(v1::SubmitRequest { client_key, spec: Some(spec.clone()) });
        request.metadata_mut().insert("authorization", bearer.clone());
        client.submit(request).await?;
    }
    Ok(started.elapsed())
}

/// Each with a connection, a handshake and a node of its own. No node is known here, so what comes back in place of the
/// welcome is a refusal; the join secret has been checked and bound to the worker on the disk by then.
async fn joins(url: &str, trust: &Trust) -> anyhow::Result<Figure> {
    let secret = ClusterSecret::new(SECRET);
    let mut took = Vec::new();
    for number in 0..JOINS {
        let node = NodeId(1_000_000 + number as u64);
        let hello = v1::Hello {
            node_id: node.0,
            join_secret: secret.join_secret(node),
            worker_key: format!("{number:064}"),
            protocol_minor: spotq_proto::PROTOCOL_MINOR,
            ..v1::Hello::default()
        };
        let started = Instant::now();
        let mut client = v1::workers_client::WorkersClient::new(dial(url, trust).await?);
        let kind = Some(v1::worker_message::Kind::Hello(hello));
        let refused = client.session(tokio_stream::iter([v1::WorkerMessage { kind }])).await;
        took.push(started.elapsed().as_secs_f64() * 1e3);
        let code = refused.err().map(|status| status.code());
        anyhow::ensure!(code == Some(tonic::Code::FailedPrecondition), "the join ended with {code:?}");
    }
    let worst = took.iter().copied().fold(0.0, f64::max);
    let from = format!("{JOINS} joins, the worst {worst:.1} ms");
    Ok(Figure::new(
        "join handshake of a worker",
        median(&mut took),
        "ms",
        Wanted::AtMost(JOIN_WANTED_MS),
        from,
    ))
}
