//! The services on the wire. They translate, authorise by exact ids, and ask the engine; they decide nothing.

mod admin;
mod jobs;
mod reports;
mod workers;

use std::future::Future;
use std::time::Duration;

use spotq_model::{JobId, TaskId};
use spotq_proto::{MESSAGE_BYTES_MAX, v1};
use tokio::net::TcpListener;
use tonic::Status;
use tonic::transport::Server;

use crate::core_loop::Running;
use crate::handle::{EngineError, Shared};

/// A job's size on the wire. Grants and views carry the job and a little more, and must fit a message too.
const JOB_BYTES_MAX: usize = MESSAGE_BYTES_MAX - 1024 * 1024;
/// A peer that is gone without a word is noticed after two of these.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// Streams that one connection may hold: one worker or one command line needs a few.
const STREAMS_MAX: u32 = 1024;

/// Serves until `stop` resolves. The listener is bound by the caller, who knows how to report a taken port.
pub fn serve<Stop: Future<Output = ()> + Send + 'static>(
    engine: &Running,
    listener: TcpListener,
    stop: Stop,
) -> impl Future<Output = Result<(), tonic::transport::Error>> + Send + use<Stop> {
    serve_shared(engine.shared.clone(), listener, stop)
}

async fn serve_shared(
    shared: Shared,
    listener: TcpListener,
    stop: impl Future<Output = ()> + Send,
) -> Result<(), tonic::transport::Error> {
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<v1::jobs_server::JobsServer<jobs::Jobs>>().await;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(spotq_proto::DESCRIPTOR)
        .build_v1()
        .expect("the descriptor is made by our own build");
    let started_ms = crate::clock::now().0;
    let incoming = tonic::transport::server::TcpIncoming::from(listener).with_nodelay(Some(true));
    Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .max_concurrent_streams(STREAMS_MAX)
        .add_service(health_service)
        .add_service(reflection)
        .add_service(
            v1::jobs_server::JobsServer::new(jobs::Jobs::new(shared.clone()))
                .max_decoding_message_size(MESSAGE_BYTES_MAX)
                .max_encoding_message_size(MESSAGE_BYTES_MAX),
        )
        .add_service(
            v1::workers_server::WorkersServer::new(workers::Workers::new(shared.clone()))
                .max_decoding_message_size(MESSAGE_BYTES_MAX)
                .max_encoding_message_size(MESSAGE_BYTES_MAX),
        )
        .add_service(v1::reports_server::ReportsServer::new(reports::Reports::new(shared.clone())))
        .add_service(v1::admin_server::AdminServer::new(admin::Admin::new(shared, started_ms)))
        .serve_with_incoming_shutdown(incoming, stop)
        .await
}

fn task_id(job_id: u32, task_index: u32) -> TaskId {
    TaskId { job: JobId(job_id), index: task_index }
}

fn no_such_job(id: TaskId) -> Status {
    Status::not_found(format!("there is no job {id}; `spotq queue --all` lists the jobs"))
}

impl From<EngineError> for Status {
    fn from(error: EngineError) -> Status {
        Status::unavailable(error.to_string())
    }
}
