//! AWS: the instance metadata service, version 2 (session tokens required).
//!
//! Paths of interruptions answer 404 with an XHTML body until there is something to say; that is the normal
//! answer, not a fault. It must never answer a read without a valid token.

use std::sync::Arc;
use std::time::SystemTime;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;
use spotq_model::Market;

use super::{Service, rfc3339};

const TTL_HEADER: &str = "x-aws-ec2-metadata-token-ttl-seconds";
const TOKEN_HEADER: &str = "x-aws-ec2-metadata-token";
/// Bounds that EC2 sets on the life of a token, in seconds.
const TTL_RANGE: std::ops::RangeInclusive<u64> = 1..=21_600;

pub(super) async fn handle(
    State(service): State<Arc<Service>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
) -> Response {
    let path = uri.path().trim_end_matches('/');
    if path == "/latest/api/token" {
        return if method == Method::PUT {
            token(&service, &headers)
        } else {
            page(StatusCode::METHOD_NOT_ALLOWED)
        };
    }
    let presented = headers.get(TOKEN_HEADER).and_then(|v| v.to_str().ok());
    if !presented.is_some_and(|token| is_valid(&service, token)) {
        return page(StatusCode::UNAUTHORIZED);
    }
    if method != Method::GET && method != Method::HEAD {
        return page(StatusCode::METHOD_NOT_ALLOWED);
    }
    read(&service, path).unwrap_or_else(|| page(StatusCode::NOT_FOUND))
}

fn token(service: &Service, headers: &HeaderMap) -> Response {
    let ttl = headers.get(TTL_HEADER).and_then(|v| v.to_str().ok()).and_then(|v| v.parse().ok());
    let Some(ttl) = ttl.filter(|ttl| TTL_RANGE.contains(ttl)) else { return page(StatusCode::BAD_REQUEST) };
    let expires = now_s() + ttl;
    let mut response = text(format!("{expires}.{}", signature(service, expires)));
    response.headers_mut().insert(TTL_HEADER, HeaderValue::from(ttl));
    response
}

fn is_valid(service: &Service, token: &str) -> bool {
    let Some((expires, signed)) = token.split_once('.') else { return false };
    let Ok(expires) = expires.parse() else { return false };
    signed == signature(service, expires) && now_s() < expires
}

fn signature(service: &Service, expires: u64) -> String {
    blake3::keyed_hash(&service.token_key, &expires.to_le_bytes()).to_hex().to_string()
}

fn read(service: &Service, path: &str) -> Option<Response> {
    let facts = &service.facts;
    let notice = service.signal.borrow().notice;
    let response = match path.strip_prefix("/latest/")? {
        "meta-data/spot/instance-action" => {
            json_body(&json!({ "action": "terminate", "time": rfc3339(notice?.deadline) }))
        }
        "meta-data/spot/termination-time" => text(rfc3339(notice?.deadline)),
        "meta-data/events/recommendations/rebalance" => {
            json_body(&json!({ "noticeTime": rfc3339(notice?.told_at) }))
        }
        "meta-data/events/maintenance/scheduled" | "meta-data/events/maintenance/history" => {
            json_body(&json!([]))
        }
        "meta-data/instance-id" => text(facts.instance.to_string()),
        "meta-data/instance-life-cycle" => text(match facts.pool.market {
            Market::Spot => "spot".into(),
            Market::OnDemand => "on-demand".into(),
        }),
        "meta-data/instance-type" => text(facts.pool.instance_type.clone()),
        "meta-data/placement/availability-zone" => text(facts.pool.zone.clone()),
        "meta-data/placement/region" => text(facts.pool.region.clone()),
        "dynamic/instance-identity/document" => json_body(&json!({
            "accountId": "000000000000",
            "architecture": "x86_64",
            "availabilityZone": facts.pool.zone,
            "imageId": "ami-00000000000000000",
            "instanceId": facts.instance,
            "instanceType": facts.pool.instance_type,
            "pendingTime": rfc3339(facts.launched_at),
            "privateIp": "127.0.0.1",
            "region": facts.pool.region,
            "version": "2017-09-30",
        })),
        _ => return None,
    };
    Some(response)
}

fn text(body: String) -> Response {
    ([(header::CONTENT_TYPE, "text/plain")], body).into_response()
}

fn json_body(value: &serde_json::Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

fn page(status: StatusCode) -> Response {
    let title = format!("{} - {}", status.as_u16(), status.canonical_reason().unwrap_or("Error"));
    let body = format!(
        "<?xml version=\"1.0\" encoding=\"iso-8859-1\"?>\n\
         <!DOCTYPE html PUBLIC \"-//W3C//DTD XHTML 1.0 Transitional//EN\"\n\
         \t\"http://www.w3.org/TR/xhtml1/DTD/xhtml1-transitional.dtd\">\n\
         <html xmlns=\"http://www.w3.org/1999/xhtml\" xml:lang=\"en\" lang=\"en\">\n \
         <head>\n  <title>{title}</title>\n </head>\n <body>\n  <h1>{title}</h1>\n </body>\n</html>\n"
    );
    (status, [(header::CONTENT_TYPE, "text/html")], Body::from(body)).into_response()
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::tests::{NOTICE, client, start};

    const POOL: &str = "aws/us-east-1/us-east-1b/g4dn.xlarge/spot";

    async fn get_token(url: &str, ttl: &str) -> reqwest::Response {
        client().put(format!("{url}/latest/api/token")).header(TTL_HEADER, ttl).send().await.unwrap()
    }

    async fn get(url: &str, token: &str, path: &str) -> (u16, String, String) {
        let request = client().get(format!("{url}/latest/{path}")).header(TOKEN_HEADER, token);
        let response = request.send().await.unwrap();
        let kind = response.headers().get("content-type").unwrap().to_str().unwrap().to_owned();
        (response.status().as_u16(), kind, response.text().await.unwrap())
    }

    #[tokio::test]
    async fn a_token_echoes_its_ttl_and_bad_ttls_are_refused() {
        let (_service, url) = start(POOL);
        let good = get_token(&url, "60").await;
        assert_eq!(good.status(), 200);
        assert_eq!(good.headers()[TTL_HEADER], "60");
        for bad in ["0", "21601", "soon", "-1"] {
            assert_eq!(get_token(&url, bad).await.status(), 400, "{bad}");
        }
        let absent = client().put(format!("{url}/latest/api/token")).send().await.unwrap();
        assert_eq!(absent.status(), 400);
    }

    #[tokio::test]
    async fn without_a_valid_token_every_read_is_401() {
        let (service, url) = start(POOL);
        let bare = client().get(format!("{url}/latest/meta-data/instance-id")).send().await.unwrap();
        assert_eq!(bare.status(), 401);
        assert!(bare.text().await.unwrap().contains("<h1>401 - Unauthorized</h1>"));
        let expired = format!("{}.{}", now_s() - 1, signature(&service, now_s() - 1));
        let forged = format!("{}.{}", now_s() + 60, "0".repeat(64));
        for token in ["", "x", &expired, &forged] {
            assert_eq!(get(&url, token, "meta-data/instance-id").await.0, 401, "{token}");
        }
    }

    #[tokio::test]
    async fn the_paths_of_an_interruption_are_404_until_there_is_one() {
        let (service, url) = start(POOL);
        let token = get_token(&url, "60").await.text().await.unwrap();
        let paths = [
            "meta-data/spot/instance-action",
            "meta-data/spot/termination-time",
            "meta-data/events/recommendations/rebalance",
        ];
        for path in paths {
            let (status, kind, body) = get(&url, &token, path).await;
            assert_eq!((status, kind.as_str()), (404, "text/html"), "{path}");
            assert!(body.contains("<h1>404 - Not Found</h1>") && body.starts_with("<?xml"), "{body}");
        }
        service.announce(NOTICE);
        let expected = [
            ("application/json", r#"{"action":"terminate","time":"2026-04-11T22:26:58Z"}"#),
            ("text/plain", "2026-04-11T22:26:58Z"),
            ("application/json", r#"{"noticeTime":"2026-04-11T22:24:58Z"}"#),
        ];
        for (path, (kind, body)) in paths.into_iter().zip(expected) {
            assert_eq!(get(&url, &token, path).await, (200, kind.into(), body.into()));
        }
        service.withdraw();
        assert_eq!(get(&url, &token, paths[0]).await.0, 404);
    }

    #[tokio::test]
    async fn identity_is_that_of_the_pool() {
        let (_service, url) = start(POOL);
        let token = get_token(&url, "60").await.text().await.unwrap();
        for (path, expected) in [
            ("meta-data/instance-id", "i-0123456789abcdef0"),
            ("meta-data/instance-life-cycle", "spot"),
            ("meta-data/instance-type", "g4dn.xlarge"),
            ("meta-data/placement/availability-zone", "us-east-1b"),
        ] {
            assert_eq!(get(&url, &token, path).await.2, expected);
        }
        let (_, _, document) = get(&url, &token, "dynamic/instance-identity/document").await;
        let document: serde_json::Value = serde_json::from_str(&document).unwrap();
        assert_eq!(document["region"], "us-east-1");
        assert_eq!(document["availabilityZone"], "us-east-1b");
        assert_eq!(get(&url, &token, "meta-data/no-such-path").await.0, 404);
    }
}
