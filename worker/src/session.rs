//! The line to the scheduler: one stream, dialled again for as long as there is something to say.
//!
//! Carries messages and nothing else: what they mean is the agent's business.

use std::sync::Arc;
use std::time::Duration;

use spotq_proto::tls::Trust;
use spotq_proto::v1;
use spotq_proto::v1::workers_client::WorkersClient;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

use crate::surroundings::Surroundings;

/// First pause after a lost connection, doubled up to the second.
const PAUSE: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// A peer that vanished without a word is noticed after about two of these.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// Messages on their way into the stream; the rest waits in the outbox.
const OUT_MAX: usize = 32;

/// What happens on the line.
#[derive(Debug)]
pub enum Line {
    /// A stream begins: the first message must be a Hello.
    Open(mpsc::Sender<v1::WorkerMessage>),
    Heard(Box<v1::scheduler_message::Kind>),
    Closed,
    /// The scheduler does not want this worker.
    Refused {
        message: String,
    },
}

/// Checks the address.
///
/// # Errors
/// It is no address; the text says what is expected.
pub fn endpoint(server: &str) -> Result<Endpoint, String> {
    let bad = |e: &dyn std::fmt::Display| {
        format!("`{server}` is not a server address ({e}): expected http://HOST:PORT or https://HOST:PORT")
    };
    let endpoint = Endpoint::from_shared(server.to_owned()).map_err(|e| bad(&e))?;
    Ok(endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE)
        .keep_alive_while_idle(true))
}

/// Dials until nobody listens any more.
pub async fn keep_open(
    around: Arc<dyn Surroundings>,
    endpoint: Endpoint,
    trust: watch::Receiver<Trust>,
    tell: mpsc::Sender<Line>,
) {
    let mut pause = PAUSE;
    while !tell.is_closed() {
        let trusted = trust.borrow().clone();
        match once(around.as_ref(), &endpoint, trusted, &tell).await {
            Ended::Heard => pause = PAUSE,
            Ended::Failed => {}
            Ended::Refused(message) => {
                if tell.send(Line::Refused { message }).await.is_err() {
                    return;
                }
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

enum Ended {
    /// The scheduler had welcomed us.
    Heard,
    Failed,
    Refused(String),
}

async fn once(
    around: &dyn Surroundings,
    endpoint: &Endpoint,
    trust: Trust,
    tell: &mpsc::Sender<Line>,
) -> Ended {
    let channel: Channel = match around.dial(endpoint.clone(), trust).await {
        Ok(channel) => channel,
        Err(error) => {
            tracing::debug!(%error, "the scheduler does not answer");
            return Ended::Failed;
        }
    };
    let mut client = WorkersClient::new(channel).max_decoding_message_size(spotq_proto::MESSAGE_BYTES_MAX);
    let (out, receiver) = mpsc::channel(OUT_MAX);
    if tell.send(Line::Open(out)).await.is_err() {
        return Ended::Failed;
    }
    let mut stream = match client.session(ReceiverStream::new(receiver)).await {
        Ok(response) => response.into_inner(),
        Err(status) => return closed(tell, Ended::Failed, &status).await,
    };
    let mut ended = Ended::Failed;
    loop {
        match stream.message().await {
            Ok(Some(message)) => {
                let Some(kind) = message.kind else { continue };
                ended = Ended::Heard;
                if tell.send(Line::Heard(Box::new(kind))).await.is_err() {
                    return ended;
                }
            }
            Ok(None) => {
                let _ = tell.send(Line::Closed).await;
                return ended;
            }
            Err(status) => return closed(tell, ended, &status).await,
        }
    }
}

async fn closed(tell: &mpsc::Sender<Line>, ended: Ended, status: &tonic::Status) -> Ended {
    tracing::debug!(%status, "the line to the scheduler is closed");
    let _ = tell.send(Line::Closed).await;
    match status.code() {
        Code::Unauthenticated | Code::PermissionDenied | Code::NotFound | Code::FailedPrecondition => {
            Ended::Refused(status.message().to_owned())
        }
        _ => ended,
    }
}
