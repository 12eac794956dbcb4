//! EC2: the instance metadata service, version 2 (session tokens).

use std::time::{Duration, Instant};

use reqwest::{Client, StatusCode};
use serde::Deserialize;
use spotq_model::Timestamp;
use tokio::sync::mpsc;

use super::{Changes, CloudSays, WatchConfig, tell_change, text_of, to_timestamp};

const SOURCE: &str = "aws:spot/instance-action";
/// As the vendor's own termination handler asks for.
const TOKEN_TTL: Duration = Duration::from_secs(3600);
/// A token is renewed this long before it ends.
const TOKEN_SPARE: Duration = Duration::from_secs(15);
const TOKEN_HEADER: &str = "X-aws-ec2-metadata-token";
const TTL_HEADER: &str = "X-aws-ec2-metadata-token-ttl-seconds";
/// A notice that disappears must be gone in this many polls before it counts as withdrawn.
const GONE_POLLS: u32 = 2;
/// The rebalance recommendation is only a hint for the log; it is asked for at every so many polls.
const REBALANCE_EVERY: u32 = 5;

/// What one poll saw.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Seen {
    Nothing,
    Notice(Timestamp),
    /// An error or garbage: no information.
    Unknown,
}

pub(super) async fn watch(config: &WatchConfig, client: &Client, tell: &mpsc::Sender<CloudSays>) {
    let mut session = Session { client, base: &config.base, token: None };
    let (mut changes, mut gone, mut polls, mut rebalance) = (Changes::default(), 0_u32, 0_u32, None);
    loop {
        let seen = session.instance_action().await;
        let change = match seen {
            Seen::Notice(deadline) => {
                gone = 0;
                changes.see(Some((deadline, SOURCE)))
            }
            Seen::Nothing => {
                gone += 1;
                if gone >= GONE_POLLS { changes.see(None) } else { None }
            }
            Seen::Unknown => None,
        };
        if !tell_change(tell, change).await {
            return;
        }
        if polls.is_multiple_of(REBALANCE_EVERY) {
            let found = session.rebalance().await;
            if found.is_some() && found != rebalance {
                tracing::info!(at = ?found, "EC2 recommends to rebalance; a notice may follow");
            }
            rebalance = found.or(rebalance);
        }
        polls = polls.wrapping_add(1);
        tokio::time::sleep(config.poll).await;
    }
}

/// `{"action":"terminate","time":"2020-04-24T17:11:44Z"}`; anything else is no notice.
pub(super) fn parse_instance_action(body: &str) -> Option<Timestamp> {
    #[derive(Deserialize)]
    struct InstanceAction {
        action: String,
        time: String,
    }
    let found: InstanceAction = serde_json::from_str(body).ok()?;
    let known = matches!(found.action.as_str(), "terminate" | "stop" | "hibernate");
    known.then(|| parse_time(&found.time)).flatten()
}

/// `{"noticeTime":"2020-10-16T19:18:24Z"}`
pub(super) fn parse_rebalance(body: &str) -> Option<Timestamp> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Rebalance {
        notice_time: String,
    }
    serde_json::from_str::<Rebalance>(body).ok().and_then(|found| parse_time(&found.notice_time))
}

/// RFC 3339 in UTC.
fn parse_time(text: &str) -> Option<Timestamp> {
    text.parse::<jiff::Timestamp>().ok().map(to_timestamp)
}

struct Session<'a> {
    client: &'a Client,
    base: &'a str,
    token: Option<(String, Instant)>,
}

impl Session<'_> {
    async fn instance_action(&mut self) -> Seen {
        match self.get("/latest/meta-data/spot/instance-action").await {
            Some((StatusCode::NOT_FOUND, _)) => Seen::Nothing,
            Some((StatusCode::OK, body)) => parse_instance_action(&body).map_or(Seen::Unknown, Seen::Notice),
            Some((status, _)) => {
                tracing::debug!(%status, "unexpected answer about the spot notice");
                Seen::Unknown
            }
            None => Seen::Unknown,
        }
    }

    async fn rebalance(&mut self) -> Option<Timestamp> {
        match self.get("/latest/meta-data/events/recommendations/rebalance").await {
            Some((StatusCode::OK, body)) => parse_rebalance(&body),
            _ => None,
        }
    }

    /// One read; a refused token is replaced once.
    async fn get(&mut self, path: &str) -> Option<(StatusCode, String)> {
        for _ in 0..2 {
            let token = self.token().await?;
            let url = format!("{}{path}", self.base);
            let response = self.client.get(url).header(TOKEN_HEADER, token).send().await.ok()?;
            let status = response.status();
            if status == StatusCode::UNAUTHORIZED {
                self.token = None;
                continue;
            }
            return Some((status, text_of(response).await?));
        }
        None
    }

    async fn token(&mut self) -> Option<String> {
        if let Some((token, until)) = &self.token
            && Instant::now() + TOKEN_SPARE < *until
        {
            return Some(token.clone());
        }
        let url = format!("{}/latest/api/token", self.base);
        let response =
            self.client.put(url).header(TTL_HEADER, TOKEN_TTL.as_secs().to_string()).send().await.ok()?;
        if response.status() != StatusCode::OK {
            return None;
        }
        let granted = response.headers().get(TTL_HEADER).and_then(|ttl| ttl.to_str().ok()?.parse().ok());
        let until = Instant::now() + granted.map_or(TOKEN_TTL, Duration::from_secs).min(TOKEN_TTL);
        let token = text_of(response).await?.trim().to_owned();
        self.token = Some((token.clone(), until));
        Some(token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vendors_sample_is_a_notice_and_garbage_is_not() {
        let sample = r#"{"action":"terminate","time":"2020-04-24T17:11:44Z"}"#;
        assert_eq!(parse_instance_action(sample), Some(Timestamp(1_587_748_304_000)));
        for bad in [
            "",
            "{}",
            "null",
            "<?xml version=\"1.0\"?>",
            r#"{"action":"dance","time":"2020-04-24T17:11:44Z"}"#,
            r#"{"action":"stop","time":"soon"}"#,
        ] {
            assert_eq!(parse_instance_action(bad), None, "{bad}");
        }
        assert!(parse_rebalance(r#"{"noticeTime":"2020-10-16T19:18:24Z"}"#).is_some());
        assert_eq!(parse_rebalance("x"), None);
    }
}
