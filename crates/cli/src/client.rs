//! The connection to the scheduler: dials, bounds every call in time, and puts failures into words.
//!
//! Holds no state of jobs. Streams that outlive a restart of the scheduler are in `stream`.

use std::time::Duration;

use spotq_model::TaskId;
use spotq_proto::tls::{self, TlsError};
use spotq_proto::v1::admin_client::AdminClient;
use spotq_proto::v1::jobs_client::JobsClient;
use spotq_proto::v1::reports_client::ReportsClient;
use spotq_proto::{MESSAGE_BYTES_MAX, v1};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

use crate::config::Target;
use crate::error::{ExpectedError, deepest, may_pass_later};

/// A scheduler that takes longer to accept a connection is not there for a person who waits.
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// Time to the first byte of an answer; a durable submit takes milliseconds.
const ANSWER_MAX: Duration = Duration::from_secs(30);
/// A half-open connection is noticed after these two, so that a stream does not hang for ever.
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(10);
const KEEP_ALIVE_ANSWER_MAX: Duration = Duration::from_secs(10);
/// How long a submit whose answer was lost is repeated: a scheduler that restarts is back by then.
const SUBMIT_AGAIN_MAX: Duration = Duration::from_secs(60);
/// Pauses between tries grow from the first to the second.
pub const PAUSE_MIN: Duration = Duration::from_millis(100);
pub const PAUSE_MAX: Duration = Duration::from_secs(3);

/// A handle on the scheduler; cheap to clone. It reconnects by itself on the next call.
#[derive(Debug, Clone)]
pub struct Client {
    pub server: String,
    channel: Channel,
    bearer: Bearer,
}

/// Says who we are on every call.
#[derive(Clone)]
pub struct Bearer(Option<MetadataValue<Ascii>>);

/// Never the token.
impl std::fmt::Debug for Bearer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "Bearer(…)" } else { "Bearer(none)" })
    }
}

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(bearer) = &self.0 {
            request.metadata_mut().insert("authorization", bearer.clone());
        }
        Ok(request)
    }
}

type Line = InterceptedService<Channel, Bearer>;

impl Client {
    /// Dials a scheduler on this machine that asks nobody who it is.
    pub async fn connect(server: &str) -> Result<Self, ExpectedError> {
        Client::connect_as(&Target::plain(server)).await
    }

    /// Dials, so that a wrong address is known before anything is asked.
    pub async fn connect_as(target: &Target) -> Result<Self, ExpectedError> {
        let server = target.server.as_str();
        let endpoint = Endpoint::from_shared(server.to_owned())
            .map_err(|e| ExpectedError::BadInput(format!("`{server}` is no address: {e}")))?
            .connect_timeout(CONNECT_MAX)
            .timeout(ANSWER_MAX)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(KEEP_ALIVE_EVERY)
            .keep_alive_timeout(KEEP_ALIVE_ANSWER_MAX)
            .keep_alive_while_idle(true);
        if server.starts_with("https://") && target.trust.ca_pem.is_empty() {
            return Err(ExpectedError::BadInput(format!(
                "nothing says which CA to trust for {server}\n  hint: log in with `spotq login --server {server} --ca \
                 FILE`, or name the file in SPOTQ_CA"
            )));
        }
        let channel = tls::connect(endpoint, &target.trust).await.map_err(|e| match e {
            TlsError::Connect(e) => ExpectedError::unreachable(server, &deepest(&e, &e.to_string())),
            other => ExpectedError::BadInput(other.to_string()),
        })?;
        Ok(Client { server: server.to_owned(), channel, bearer: bearer(target)? })
    }

    #[must_use]
    pub fn jobs(&self) -> JobsClient<Line> {
        JobsClient::with_interceptor(self.channel.clone(), self.bearer.clone())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX)
    }

    #[must_use]
    pub fn reports(&self) -> ReportsClient<Line> {
        ReportsClient::with_interceptor(self.channel.clone(), self.bearer.clone())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
    }

    #[must_use]
    pub fn admin(&self) -> AdminClient<Line> {
        AdminClient::with_interceptor(self.channel.clone(), self.bearer.clone())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
    }

    /// Words for a failed call.
    #[must_use]
    pub fn failed(&self, what: &str, status: &Status) -> ExpectedError {
        ExpectedError::from_status(&self.server, what, status)
    }

    /// One job as it is now.
    pub async fn get(&self, task: TaskId) -> Result<v1::JobView, ExpectedError> {
        let answer = self.jobs().get(job_request(task)).await;
        answer.map(tonic::Response::into_inner).map_err(|e| self.failed(&format!("look up job {task}"), &e))
    }

    /// Submits; if the answer is lost it asks again with the same key, which is the same job (INV-04).
    pub async fn submit(&self, request: v1::SubmitRequest) -> Result<v1::SubmitReply, ExpectedError> {
        let started = tokio::time::Instant::now();
        let mut pause = PAUSE_MIN;
        loop {
            let status = match self.jobs().submit(request.clone()).await {
                Ok(answer) => return Ok(answer.into_inner()),
                Err(status) => status,
            };
            if !may_pass_later(&status) || started.elapsed() + pause > SUBMIT_AGAIN_MAX {
                return Err(self.failed("submit the job", &status));
            }
            tokio::time::sleep(pause).await;
            pause = next_pause(pause);
        }
    }
}

/// A token goes out encrypted only.
fn bearer(target: &Target) -> Result<Bearer, ExpectedError> {
    let token = target.token.as_ref().filter(|_| target.server.starts_with("https://"));
    let value = token.map(|token| format!("Bearer {token}").parse::<MetadataValue<Ascii>>()).transpose();
    let mut value =
        value.map_err(|_| ExpectedError::BadInput("the token is none of a scheduler's".into()))?;
    value.iter_mut().for_each(|value| value.set_sensitive(true));
    Ok(Bearer(value))
}

/// The pause after `pause`.
#[must_use]
pub fn next_pause(pause: Duration) -> Duration {
    (pause * 2).min(PAUSE_MAX)
}

/// A request about one job.
#[must_use]
pub fn job_request(task: TaskId) -> v1::JobRequest {
    v1::JobRequest { job_id: task.job.0, task_index: task.index }
}
