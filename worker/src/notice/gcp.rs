//! Compute Engine: the `preempted` flag of the metadata server, by long poll.

use std::time::Duration;

use reqwest::{Client, StatusCode};
use spotq_model::{Span, Timestamp};
use tokio::sync::mpsc;

use super::{Changes, CloudSays, TIMEOUT, WatchConfig, tell_change, text_of};
use crate::ids::now;

const SOURCE: &str = "gcp:instance/preempted";
const PATH: &str = "/computeMetadata/v1/instance/preempted";
/// How long the server holds an unchanged answer back.
const HOLD: Duration = Duration::from_secs(60);

pub(super) async fn watch(config: &WatchConfig, client: &Client, tell: &mpsc::Sender<CloudSays>) {
    let (mut changes, mut etag, mut deadline) = (Changes::default(), None::<String>, None::<Timestamp>);
    loop {
        let started = tokio::time::Instant::now();
        let held = etag.is_some();
        let answer = tokio::select! {
            answer = ask(config, client, etag.as_deref()) => answer,
            () = tell.closed() => return,
        };
        let change = match &answer {
            Some((true, _)) => {
                let at = *deadline.get_or_insert_with(|| now() + Span(config.unnamed.as_millis() as u64));
                changes.see(Some((at, SOURCE)))
            }
            Some((false, _)) => {
                deadline = None;
                changes.see(None)
            }
            None => None,
        };
        let (changed, heard) = (change.is_some(), answer.is_some());
        if !tell_change(tell, change).await {
            return;
        }
        etag = answer.and_then(|(_, etag)| etag);
        // A server that answers a long poll at once with nothing new does not hold: poll it instead.
        let waited = started.elapsed();
        let may_hold = heard && !held && etag.is_some();
        if !changed && !may_hold && waited < config.poll {
            tokio::time::sleep(config.poll - waited).await;
        }
    }
}

/// The flag and its entity tag; `None` if the answer tells nothing.
async fn ask(config: &WatchConfig, client: &Client, etag: Option<&str>) -> Option<(bool, Option<String>)> {
    let mut request = client.get(format!("{}{PATH}", config.base)).header("Metadata-Flavor", "Google");
    if let Some(etag) = etag {
        request = request
            .query(&[("wait_for_change", "true"), ("last_etag", etag)])
            .query(&[("timeout_sec", HOLD.as_secs())])
            .timeout(HOLD + TIMEOUT);
    }
    let response = request.send().await.ok()?;
    if response.status() != StatusCode::OK {
        return None;
    }
    let etag = response.headers().get("ETag").and_then(|etag| etag.to_str().ok()).map(str::to_owned);
    let flag = parse_preempted(&text_of(response).await?)?;
    Some((flag, etag))
}

/// `TRUE` or `FALSE`; anything else is neither.
pub(super) fn parse_preempted(body: &str) -> Option<bool> {
    match body.trim() {
        "TRUE" => Some(true),
        "FALSE" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_two_words_are_understood() {
        assert_eq!(parse_preempted("TRUE\n"), Some(true));
        assert_eq!(parse_preempted("FALSE"), Some(false));
        for bad in ["", "true", "1", "<html>TRUE</html>"] {
            assert_eq!(parse_preempted(bad), None, "{bad}");
        }
    }
}
