//! The control API of the cloud: HTTP and JSON on loopback, with a random bearer token.
//!
//! `DIR/control.json` (readable by its owner alone) says where it listens. Every answer is a `Result`: a refusal
//! is an answer like any other, and an HTTP error means that the call was not understood.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Query, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use spotq_model::{EffectKey, InstanceId, NodeId, Offer, Pool, Refusal, Span, Timestamp};
use spotq_provider::{Instance, InstanceChange, Launched, TerminateState};

use crate::MarketConfig;
use crate::cloud::Cloud;

/// How long a call for changes waits before it answers with none.
pub const LONG_POLL: Duration = Duration::from_secs(20);

/// What `control.json` says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ControlFile {
    pub pid: u32,
    pub url: String,
    pub token: String,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Hello {
    pub seed: u64,
    pub run: String,
}

/// A launch on the wire. It carries the join secret, which its `Debug` leaves out.
#[derive(Clone, Serialize, Deserialize)]
pub struct LaunchBody {
    pub key: EffectKey,
    pub node: NodeId,
    pub pool: Pool,
    pub tags: BTreeMap<String, String>,
    pub expires_at: Timestamp,
    pub server: String,
    pub join_secret: String,
    pub env: BTreeMap<String, String>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct ListBody {
    pub cluster: String,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct InstanceBody {
    pub instance: InstanceId,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct InterruptBody {
    pub instance: InstanceId,
    pub notice_ms: u64,
}

/// Orders to the market; what is absent stays.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MarketBody {
    pub market: Option<MarketConfig>,
    pub boot_ms: Option<u64>,
    /// Each refuses the next launch that its scope covers.
    pub refuse_next: Vec<Refusal>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct ChangesQuery {
    /// The run that `since` is a position of; absent on a first call.
    pub run: Option<String>,
    #[serde(default)]
    pub since: u64,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct ChangesReply {
    pub run: String,
    /// The position to ask from next.
    pub next: u64,
    pub changes: Vec<InstanceChange>,
}

impl fmt::Debug for LaunchBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LaunchBody").field("key", &self.key).field("pool", &self.pool).finish_non_exhaustive()
    }
}

type Answer<T> = Json<Result<T, Refusal>>;

/// The API over a cloud.
pub fn router(cloud: Arc<Cloud>, token: &str) -> Router {
    let expected: Arc<str> = format!("Bearer {token}").into();
    Router::new()
        .route("/v1/hello", get(hello))
        .route("/v1/offers", post(offers))
        .route("/v1/launch", post(launch))
        .route("/v1/list", post(list))
        .route("/v1/terminate", post(terminate))
        .route("/v1/interrupt", post(interrupt))
        .route("/v1/withdraw", post(withdraw))
        .route("/v1/market", post(market))
        .route("/v1/changes", get(changes))
        .route("/v1/shutdown", post(shutdown))
        .with_state(cloud.clone())
        .layer(middleware::from_fn(move |request: Request, next: Next| {
            let (expected, cloud) = (expected.clone(), cloud.clone());
            async move {
                let presented = request.headers().get(header::AUTHORIZATION);
                if presented.is_none_or(|v| v.as_bytes() != expected.as_bytes()) {
                    return StatusCode::UNAUTHORIZED.into_response();
                }
                cloud.touch();
                next.run(request).await
            }
        }))
}

/// A cloud that is ending does not say hello, so that whoever wants one waits for the next.
async fn hello(State(cloud): State<Arc<Cloud>>) -> Response {
    if cloud.is_open() {
        Json(Hello { seed: cloud.seed, run: cloud.run.clone() }).into_response()
    } else {
        StatusCode::SERVICE_UNAVAILABLE.into_response()
    }
}

async fn offers(State(cloud): State<Arc<Cloud>>) -> Answer<Vec<Offer>> {
    Json(Ok(cloud.offers()))
}

async fn launch(State(cloud): State<Arc<Cloud>>, Json(body): Json<LaunchBody>) -> Answer<Launched> {
    Json(cloud.launch(body))
}

async fn list(State(cloud): State<Arc<Cloud>>, Json(body): Json<ListBody>) -> Answer<Vec<Instance>> {
    Json(Ok(cloud.list(&body.cluster)))
}

async fn terminate(
    State(cloud): State<Arc<Cloud>>,
    Json(body): Json<InstanceBody>,
) -> Answer<TerminateState> {
    Json(Ok(cloud.terminate(&body.instance)))
}

async fn interrupt(State(cloud): State<Arc<Cloud>>, Json(body): Json<InterruptBody>) -> Answer<()> {
    Json(cloud.interrupt(&body.instance, Span(body.notice_ms)))
}

async fn withdraw(State(cloud): State<Arc<Cloud>>, Json(body): Json<InstanceBody>) -> Answer<()> {
    Json(cloud.withdraw(&body.instance))
}

async fn market(State(cloud): State<Arc<Cloud>>, Json(body): Json<MarketBody>) -> Response {
    match cloud.order(body) {
        Ok(()) => Json(Ok::<(), Refusal>(())).into_response(),
        Err(message) => (StatusCode::BAD_REQUEST, message).into_response(),
    }
}

async fn changes(State(cloud): State<Arc<Cloud>>, Query(query): Query<ChangesQuery>) -> Json<ChangesReply> {
    let reply = cloud.changes_since(query.run.as_deref(), query.since);
    let current = query.run.as_deref() == Some(cloud.run.as_str());
    if !current || !reply.changes.is_empty() {
        return Json(reply);
    }
    // No change within the time is an answer too.
    let _ = tokio::time::timeout(LONG_POLL, cloud.wait_for_changes(query.since)).await;
    Json(cloud.changes_since(query.run.as_deref(), query.since))
}

async fn shutdown(State(cloud): State<Arc<Cloud>>) -> Answer<()> {
    cloud.close().await;
    Json(Ok(()))
}
