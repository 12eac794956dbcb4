//! Metadata services of the three clouds, as far as the worker's watchers use them, set by a test.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use tokio::sync::watch;

#[derive(Debug, Clone, Default)]
pub struct Says {
    /// Body of `spot/instance-action`; 404 without one.
    pub aws: Option<String>,
    pub gcp: String,
    /// The whole document.
    pub azure: String,
    /// Every answer is this instead.
    pub broken: Option<(u16, String)>,
}

#[derive(Debug, Default)]
struct Seen {
    tokens: Vec<String>,
    refused_tokens: u32,
    consents: Vec<String>,
    polls: u32,
}

#[derive(Clone)]
struct Shared {
    says: watch::Sender<Says>,
    seen: Arc<Mutex<Seen>>,
}

pub struct Metadata {
    pub address: SocketAddr,
    shared: Shared,
    _stop: tokio::sync::oneshot::Sender<()>,
}

impl Metadata {
    pub fn start() -> Metadata {
        let says = Says { gcp: "FALSE".into(), azure: events(&[]), ..Says::default() };
        let shared = Shared { says: watch::channel(says).0, seen: Arc::default() };
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let (tell, told) = std::sync::mpsc::channel();
        let router = Router::new()
            .route("/latest/api/token", put(token))
            .route("/latest/meta-data/spot/instance-action", get(instance_action))
            .route("/computeMetadata/v1/instance/preempted", get(preempted))
            .route("/metadata/scheduledevents", get(scheduled).merge(post(consent)))
            .route("/metadata/instance/compute/name", get(async || "vm-1"))
            .with_state(shared.clone());
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
                tell.send(listener.local_addr().unwrap()).unwrap();
                tokio::select! {
                    served = axum::serve(listener, router) => served.unwrap(),
                    _ = stopped => {}
                }
            });
        });
        Metadata { address: told.recv().unwrap(), shared, _stop: stop }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn say(&self, change: impl FnOnce(&mut Says)) {
        self.shared.says.send_modify(change);
    }

    pub fn polls(&self) -> u32 {
        self.shared.seen.lock().unwrap().polls
    }

    pub fn consents(&self) -> Vec<String> {
        self.shared.seen.lock().unwrap().consents.clone()
    }

    pub fn tokens(&self) -> usize {
        self.shared.seen.lock().unwrap().tokens.len()
    }

    /// Tokens given so far are not taken any more.
    pub fn revoke_tokens(&self) {
        self.shared.seen.lock().unwrap().tokens.clear();
    }

    pub fn refused_tokens(&self) -> u32 {
        self.shared.seen.lock().unwrap().refused_tokens
    }
}

/// A Scheduled Events document with `(id, status, not_before)` each.
pub fn events(preempts: &[(&str, &str, &str)]) -> String {
    let events: Vec<serde_json::Value> = preempts
        .iter()
        .map(|(id, status, not_before)| {
            serde_json::json!({
                "EventId": id, "EventType": "Preempt", "ResourceType": "VirtualMachine", "Resources": ["vm-1"],
                "EventStatus": status, "NotBefore": not_before, "Description": "", "EventSource": "Platform",
                "DurationInSeconds": -1
            })
        })
        .collect();
    serde_json::json!({ "DocumentIncarnation": 1, "Events": events }).to_string()
}

/// Counts the poll; the answer of a broken service comes first.
fn broken(shared: &Shared) -> Option<Response> {
    shared.seen.lock().unwrap().polls += 1;
    let (status, body) = shared.says.borrow().broken.clone()?;
    Some((StatusCode::from_u16(status).unwrap(), body).into_response())
}

async fn token(State(shared): State<Shared>, headers: HeaderMap) -> Response {
    const TTL: &str = "x-aws-ec2-metadata-token-ttl-seconds";
    let Some(ttl) = headers.get(TTL).cloned() else { return StatusCode::BAD_REQUEST.into_response() };
    let mut seen = shared.seen.lock().unwrap();
    let token = format!("token-{}-{}", seen.refused_tokens, seen.tokens.len());
    seen.tokens.push(token.clone());
    ([(TTL, ttl)], token).into_response()
}

async fn instance_action(State(shared): State<Shared>, headers: HeaderMap) -> Response {
    if let Some(answer) = broken(&shared) {
        return answer;
    }
    let token =
        headers.get("x-aws-ec2-metadata-token").and_then(|t| t.to_str().ok()).unwrap_or_default().to_owned();
    {
        let mut seen = shared.seen.lock().unwrap();
        if !seen.tokens.contains(&token) {
            seen.refused_tokens += 1;
            return StatusCode::UNAUTHORIZED.into_response();
        }
    }
    match shared.says.borrow().aws.clone() {
        Some(body) => body.into_response(),
        None => (StatusCode::NOT_FOUND, "<?xml version=\"1.0\"?><html>404</html>").into_response(),
    }
}

async fn preempted(
    State(shared): State<Shared>,
    Query(query): Query<std::collections::HashMap<String, String>>,
    headers: HeaderMap,
) -> Response {
    if let Some(answer) = broken(&shared) {
        return answer;
    }
    if headers.get("metadata-flavor").is_none_or(|flavor| flavor != "Google") {
        return StatusCode::FORBIDDEN.into_response();
    }
    let mut says = shared.says.subscribe();
    let tag = |body: &str| format!("etag-{}", body.trim());
    if query.get("wait_for_change").is_some_and(|wait| wait == "true") {
        let last = query.get("last_etag").cloned().unwrap_or_default();
        let hold = Duration::from_secs(query["timeout_sec"].parse().unwrap());
        let changed = says.wait_for(|says| tag(&says.gcp) != last || says.broken.is_some());
        let _ = tokio::time::timeout(hold, changed).await;
    }
    let body = shared.says.borrow().gcp.clone();
    ([("ETag", tag(&body))], body).into_response()
}

async fn scheduled(State(shared): State<Shared>, headers: HeaderMap) -> Response {
    if let Some(answer) = broken(&shared) {
        return answer;
    }
    if headers.get("metadata").is_none_or(|value| value != "true") {
        return StatusCode::BAD_REQUEST.into_response();
    }
    shared.says.borrow().azure.clone().into_response()
}

async fn consent(State(shared): State<Shared>, body: String) -> StatusCode {
    shared.seen.lock().unwrap().consents.push(body);
    StatusCode::OK
}
