//! The services on the wire. They translate, authorise by exact ids, and ask the engine; they decide nothing.

mod admin;
mod jobs;
mod reports;
mod workers;

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use spotq_model::TaskId;
use spotq_proto::{MESSAGE_BYTES_MAX, v1};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tonic::Status;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::{Connected, TcpIncoming};

use crate::auth::{AuthLayer, Joins, Security, Unbound};
use crate::core_loop::Running;
use crate::handle::{EngineError, Shared};

/// A job's size on the wire. Grants and views carry the job and a little more, and must fit a message too.
const JOB_BYTES_MAX: usize = MESSAGE_BYTES_MAX - 1024 * 1024;
/// A peer that is gone without a word is noticed after two of these.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// Streams that one connection may hold: one worker or one command line needs a few.
const STREAMS_MAX: u32 = 1024;

/// Serves until `stop` resolves, to everybody who can connect: for loopback alone.
/// The listener is bound by the caller, who knows how to report a taken port.
pub fn serve<Stop: Future<Output = ()> + Send + 'static>(
    engine: &Running,
    listener: TcpListener,
    stop: Stop,
) -> impl Future<Output = Result<(), tonic::transport::Error>> + Send + use<Stop> {
    serve_incoming(engine, TcpIncoming::from(listener).with_nodelay(Some(true)), stop)
}

/// As [`serve`], for connections that somebody else accepts.
pub fn serve_incoming<Incoming, Connection, Stop>(
    engine: &Running,
    incoming: Incoming,
    stop: Stop,
) -> impl Future<Output = Result<(), tonic::transport::Error>> + Send + use<Incoming, Connection, Stop>
where
    Incoming: Stream<Item = io::Result<Connection>> + Send + 'static,
    Connection: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    Stop: Future<Output = ()> + Send + 'static,
{
    let shared = engine.shared.clone();
    async move {
        let routes = routes(shared, None).await;
        server()
            .layer(AuthLayer::new(None))
            .add_routes(routes)
            .serve_with_incoming_shutdown(incoming, stop)
            .await
    }
}

/// Serves with TLS until `stop` resolves, to those whom `security` knows, and reloads it when its files change.
pub fn serve_secured<Stop: Future<Output = ()> + Send + 'static>(
    engine: &Running,
    listener: TcpListener,
    security: Arc<Security>,
    stop: Stop,
) -> impl Future<Output = Result<(), tonic::transport::Error>> + Send + use<Stop> {
    let shared = engine.shared.clone();
    // A second listener has the same CA.
    let _ = shared.security.set(security.clone());
    async move {
        let incoming = crate::auth::incoming(listener, security.clone());
        let routes = routes(shared, Some(security.clone())).await;
        let served = server()
            .layer(AuthLayer::new(Some(security.clone())))
            .add_routes(routes)
            .serve_with_incoming_shutdown(incoming, stop);
        tokio::select! {
            ended = served => ended,
            () = security.watch() => Ok(()),
        }
    }
}

fn server() -> Server {
    Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .max_concurrent_streams(STREAMS_MAX)
}

async fn routes(shared: Shared, security: Option<Arc<Security>>) -> Routes {
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<v1::jobs_server::JobsServer<jobs::Jobs>>().await;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(spotq_proto::DESCRIPTOR)
        .build_v1()
        .expect("the descriptor is made by our own build");
    let started_ms = crate::clock::now().0;
    // Without authentication workers of an older version go on; beyond loopback there were none.
    let unbound = if security.is_some() { Unbound::Refused } else { Unbound::Taken };
    let joins = Joins::new(&shared.config.data_dir, &shared.config.secret, unbound);
    forget_joins(&shared, &joins).await;
    Routes::new(health_service)
        .add_service(reflection)
        .add_service(
            v1::jobs_server::JobsServer::new(jobs::Jobs::new(shared.clone()))
                .max_decoding_message_size(MESSAGE_BYTES_MAX)
                .max_encoding_message_size(MESSAGE_BYTES_MAX),
        )
        .add_service(
            v1::workers_server::WorkersServer::new(workers::Workers::new(
                shared.clone(),
                joins,
                security.clone(),
            ))
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX),
        )
        .add_service(v1::reports_server::ReportsServer::new(reports::Reports::new(shared.clone())))
        .add_service(v1::admin_server::AdminServer::new(admin::Admin::new(shared, started_ms, security)))
}

/// Nodes that are gone join no more. Looked at once at each start, which bounds what is kept.
async fn forget_joins(shared: &Shared, joins: &Joins) {
    let live = shared.handle.query(|seen| seen.cluster.live.iter().copied().collect::<Vec<_>>()).await;
    let (Ok(live), joins) = (live, joins.clone()) else { return };
    // One that stays is looked at again at the next start.
    let _ = spotq_host::blocking(move || joins.forget(|node| live.contains(&node))).await;
}

pub(crate) fn no_such_job(id: TaskId) -> Status {
    Status::not_found(format!("there is no job {id}; `spotq queue --all` lists the jobs"))
}

impl From<EngineError> for Status {
    fn from(error: EngineError) -> Status {
        Status::unavailable(error.to_string())
    }
}
