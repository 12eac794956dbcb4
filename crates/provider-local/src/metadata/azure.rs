//! Azure: Scheduled Events and the little of the instance document that a watcher needs.
//!
//! An event goes from `Scheduled` to `Started` (its `NotBefore` is then empty) and vanishes when it is over or
//! withdrawn; there is no `Completed`. Acknowledging an event lets the eviction go ahead at once, so a watcher
//! must do it only after its work is durable.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};
use spotq_model::Market;

use super::{Service, query, rfc1123};

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct StartRequests {
    start_requests: Vec<StartRequest>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct StartRequest {
    event_id: String,
}

pub(super) async fn handle(
    State(service): State<Arc<Service>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    if headers.get("metadata").is_none_or(|v| !v.as_bytes().eq_ignore_ascii_case(b"true")) {
        return bad("Bad request. Required metadata header not specified");
    }
    if query(uri.query(), "api-version").is_none_or(str::is_empty) {
        return bad("Bad request. api-version was not specified in the request");
    }
    match (method, uri.path()) {
        (Method::GET, "/metadata/scheduledevents") => {
            wait_if_first(&service).await;
            json_body(StatusCode::OK, &document(&service))
        }
        (Method::POST, "/metadata/scheduledevents") => acknowledge(&service, &body),
        (Method::GET, "/metadata/instance/compute/name") => {
            ([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], service.facts.instance.to_string())
                .into_response()
        }
        (Method::GET, "/metadata/instance") => {
            json_body(StatusCode::OK, &json!({ "compute": compute(&service) }))
        }
        (Method::GET, "/metadata/instance/compute") => json_body(StatusCode::OK, &compute(&service)),
        _ => json_body(StatusCode::NOT_FOUND, &json!({ "error": "Not found" })),
    }
}

/// The service is switched on by its first call, which is slow in the real cloud.
async fn wait_if_first(service: &Service) {
    if service.first_call.send_replace(false) {
        tokio::time::sleep(service.facts.first_call).await;
    }
}

fn document(service: &Service) -> Value {
    let signal = *service.signal.borrow();
    let events: Vec<Value> = signal
        .notice
        .iter()
        .map(|notice| {
            json!({
                "EventId": signal.event.to_string().to_uppercase(),
                "EventType": "Preempt",
                "ResourceType": "VirtualMachine",
                "Resources": [service.facts.instance],
                "EventStatus": if signal.acknowledged { "Started" } else { "Scheduled" },
                "NotBefore": if signal.acknowledged { String::new() } else { rfc1123(notice.deadline) },
                "Description": "Virtual machine is being evicted.",
                "EventSource": "Platform",
                "DurationInSeconds": -1,
            })
        })
        .collect();
    json!({ "DocumentIncarnation": signal.incarnation, "Events": events })
}

fn acknowledge(service: &Service, body: &[u8]) -> Response {
    let Ok(request) = serde_json::from_slice::<StartRequests>(body) else {
        return bad("Bad request. The body is not a list of StartRequests");
    };
    let current = *service.signal.borrow();
    let id = current.event.to_string();
    let known = |r: &StartRequest| current.notice.is_some() && r.event_id.eq_ignore_ascii_case(&id);
    if request.start_requests.is_empty() || !request.start_requests.iter().all(known) {
        return bad("Bad request. EventId is not known");
    }
    service.signal.send_if_modified(|signal| {
        let first = !signal.acknowledged && signal.notice.is_some();
        if first {
            signal.acknowledged = true;
            signal.incarnation += 1;
        }
        first
    });
    service.acknowledged.notify_one();
    StatusCode::OK.into_response()
}

fn compute(service: &Service) -> Value {
    let pool = &service.facts.pool;
    json!({
        "name": service.facts.instance,
        "vmId": service.facts.instance,
        "vmSize": pool.instance_type,
        "location": pool.region,
        "zone": pool.zone.rsplit('-').next(),
        "priority": match pool.market { Market::Spot => "Spot", Market::OnDemand => "Regular" },
        "evictionPolicy": match pool.market { Market::Spot => "Delete", Market::OnDemand => "" },
    })
}

fn bad(message: &str) -> Response {
    json_body(StatusCode::BAD_REQUEST, &json!({ "error": message }))
}

fn json_body(status: StatusCode, value: &Value) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json; charset=utf-8")], value.to_string()).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::tests::{NOTICE, client, start};

    const POOL: &str = "azure/eastus/eastus-1/Standard_NC4as_T4_v3/spot";
    const EVENTS: &str = "/metadata/scheduledevents?api-version=2020-07-01";

    async fn events(url: &str) -> Value {
        let response =
            client().get(format!("{url}{EVENTS}")).header("Metadata", "true").send().await.unwrap();
        assert_eq!(response.status(), 200);
        serde_json::from_str(&response.text().await.unwrap()).unwrap()
    }

    async fn post(url: &str, body: String) -> u16 {
        let request = client().post(format!("{url}{EVENTS}")).header("Metadata", "true").body(body);
        request.send().await.unwrap().status().as_u16()
    }

    #[tokio::test]
    async fn the_metadata_header_and_the_version_are_required() {
        let (_service, url) = start(POOL);
        assert_eq!(client().get(format!("{url}{EVENTS}")).send().await.unwrap().status(), 400);
        let no_version = client().get(format!("{url}/metadata/scheduledevents")).header("Metadata", "true");
        assert_eq!(no_version.send().await.unwrap().status(), 400);
    }

    #[tokio::test]
    async fn a_preemption_appears_and_goes_with_the_incarnation_rising() {
        let (service, url) = start(POOL);
        assert_eq!(events(&url).await, json!({ "DocumentIncarnation": 1, "Events": [] }));
        service.announce(NOTICE);
        let document = events(&url).await;
        assert_eq!(document["DocumentIncarnation"], 2);
        let event = &document["Events"][0];
        assert_eq!(event["EventType"], "Preempt");
        assert_eq!(event["EventStatus"], "Scheduled");
        assert_eq!(event["NotBefore"], "Sat, 11 Apr 2026 22:26:58 GMT");
        assert_eq!(event["Resources"], json!(["i-0123456789abcdef0"]));
        service.withdraw();
        assert_eq!(events(&url).await, json!({ "DocumentIncarnation": 3, "Events": [] }));
    }

    #[tokio::test]
    async fn an_acknowledged_event_is_started_and_the_owner_is_told() {
        let (service, url) = start(POOL);
        service.announce(NOTICE);
        let id = events(&url).await["Events"][0]["EventId"].as_str().unwrap().to_owned();
        assert_eq!(post(&url, "not json".into()).await, 400);
        assert_eq!(post(&url, r#"{"StartRequests":[{"EventId":"other"}]}"#.into()).await, 400);
        assert_eq!(post(&url, json!({ "StartRequests": [{ "EventId": id }] }).to_string()).await, 200);
        service.acknowledged().await;
        let event = &events(&url).await["Events"][0];
        assert_eq!(event["EventStatus"], "Started");
        assert_eq!(event["NotBefore"], "");
        assert_eq!(event["EventId"], json!(id));
    }

    #[tokio::test]
    async fn the_name_that_events_are_filtered_by_is_served() {
        let (_service, url) = start(POOL);
        let path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text";
        let name = client().get(format!("{url}{path}")).header("Metadata", "true").send().await.unwrap();
        assert_eq!(name.text().await.unwrap(), "i-0123456789abcdef0");
    }
}
