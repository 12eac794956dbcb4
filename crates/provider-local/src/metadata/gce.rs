//! Google Compute Engine: the metadata server with `wait_for_change`.
//!
//! A waiting read answers when the value differs from the one that `last_etag` names, or, without `last_etag`,
//! from the one at the start of the call. It must never answer without the flavor header.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use spotq_model::Market;

use super::{Service, Signal, query};

const FLAVOR: (&str, &str) = ("metadata-flavor", "Google");
/// Longest wait of one call. The real server waits without end; a bound here keeps a lost client from holding
/// a connection for ever, and a watcher asks again anyway.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);
/// The project number in resource names.
const PROJECT: &str = "000000000000";

pub(super) async fn handle(
    State(service): State<Arc<Service>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
) -> Response {
    if headers.get(FLAVOR.0).is_none_or(|v| v != FLAVOR.1) {
        return plain(StatusCode::FORBIDDEN, "Missing Metadata-Flavor:Google header.\n");
    }
    if method != Method::GET {
        return plain(StatusCode::METHOD_NOT_ALLOWED, "Method not allowed.\n");
    }
    let path = uri.path();
    let now = *service.signal.borrow();
    let Some(first) = value(&service, &now, path) else {
        return plain(StatusCode::NOT_FOUND, "The requested URL was not found on this server.\n");
    };
    let wait = query(uri.query(), "wait_for_change").is_some_and(|v| v.eq_ignore_ascii_case("true"));
    if !wait {
        return answer(path, &first);
    }
    let limit = query(uri.query(), "timeout_sec").and_then(|v| v.parse().ok());
    let limit = limit.map_or(LONGEST_WAIT, Duration::from_secs).min(LONGEST_WAIT);
    let known = query(uri.query(), "last_etag").map_or_else(|| etag(path, &first), str::to_owned);
    let mut signal = service.signal.subscribe();
    let changed = signal.wait_for(|now| value(&service, now, path).is_some_and(|v| etag(path, &v) != known));
    let now = match tokio::time::timeout(limit, changed).await {
        Ok(Ok(now)) => *now,
        // Time is up, or the node is gone and its service with it.
        Ok(Err(_)) | Err(_) => *service.signal.borrow(),
    };
    answer(path, &value(&service, &now, path).unwrap_or(first))
}

fn value(service: &Service, now: &Signal, path: &str) -> Option<String> {
    let facts = &service.facts;
    let path = path.trim_end_matches('/');
    if path.is_empty() {
        return Some("computeMetadata/\n".into());
    }
    Some(match path.strip_prefix("/computeMetadata/v1/instance/")? {
        "preempted" => flag(now.notice.is_some()),
        "maintenance-event" => "NONE".into(),
        "id" | "name" => facts.instance.to_string(),
        "zone" => format!("projects/{PROJECT}/zones/{}", facts.pool.zone),
        "machine-type" => format!("projects/{PROJECT}/machineTypes/{}", facts.pool.instance_type),
        "scheduling/preemptible" => flag(facts.pool.market == Market::Spot),
        _ => return None,
    })
}

fn flag(set: bool) -> String {
    if set { "TRUE" } else { "FALSE" }.into()
}

/// Sixteen hex digits that depend on the value alone, as the real server's.
fn etag(path: &str, value: &str) -> String {
    blake3::hash(format!("{path}\n{value}").as_bytes()).to_hex()[..16].to_owned()
}

fn answer(path: &str, value: &str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "application/text".to_owned()),
        (header::ETAG, etag(path, value)),
        (header::SERVER, "Metadata Server for VM".to_owned()),
    ];
    (headers, [FLAVOR], value.to_owned()).into_response()
}

fn plain(status: StatusCode, message: &'static str) -> Response {
    (status, [FLAVOR], message).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::tests::{NOTICE, client, start};

    const POOL: &str = "gcp/us-central1/us-central1-a/a2-ultragpu-1g/spot";

    async fn get(url: &str, path: &str) -> reqwest::Response {
        let url = format!("{url}/computeMetadata/v1/instance/{path}");
        client().get(url).header(FLAVOR.0, FLAVOR.1).send().await.unwrap()
    }

    #[tokio::test]
    async fn the_flavor_header_is_required_and_echoed() {
        let (_service, url) = start(POOL);
        let bare = client().get(format!("{url}/computeMetadata/v1/instance/id")).send().await.unwrap();
        assert_eq!(bare.status(), 403);
        let good = get(&url, "id").await;
        assert_eq!(good.status(), 200);
        assert_eq!(good.headers()[FLAVOR.0], FLAVOR.1);
        assert_eq!(good.text().await.unwrap(), "i-0123456789abcdef0");
        assert_eq!(get(&url, "no/such/path").await.status(), 404);
        assert_eq!(
            get(&url, "zone").await.text().await.unwrap(),
            "projects/000000000000/zones/us-central1-a"
        );
        assert_eq!(get(&url, "maintenance-event").await.text().await.unwrap(), "NONE");
    }

    #[tokio::test]
    async fn a_waiting_read_answers_when_the_flag_flips() {
        let (service, url) = start(POOL);
        let before = get(&url, "preempted").await;
        let etag = before.headers()["etag"].to_str().unwrap().to_owned();
        assert_eq!(before.text().await.unwrap(), "FALSE");
        let path = format!("preempted?wait_for_change=true&timeout_sec=60&last_etag={etag}");
        let waiting = tokio::spawn(async move { get(&url, &path).await });
        // The waiter is there when a second receiver exists, or will look before it waits; both must work.
        service.announce(NOTICE);
        let after = waiting.await.unwrap();
        assert_ne!(after.headers()["etag"].to_str().unwrap(), etag);
        assert_eq!(after.text().await.unwrap(), "TRUE");
    }

    #[tokio::test]
    async fn an_old_etag_answers_at_once_so_that_no_flip_is_missed() {
        let (service, url) = start(POOL);
        service.announce(NOTICE);
        let response = get(&url, "preempted?wait_for_change=true&timeout_sec=600&last_etag=0").await;
        assert_eq!(response.text().await.unwrap(), "TRUE");
    }

    #[tokio::test]
    async fn a_wait_ends_at_its_timeout_with_the_value_of_then() {
        let (_service, url) = start(POOL);
        let started = std::time::Instant::now();
        let response = get(&url, "preempted?wait_for_change=true&timeout_sec=1").await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.text().await.unwrap(), "FALSE");
        assert!(started.elapsed() >= Duration::from_secs(1));
    }
}
