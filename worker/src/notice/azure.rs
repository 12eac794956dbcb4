//! Azure: Scheduled Events. Only `Preempt` events of this machine count.

use std::collections::BTreeSet;
use std::time::Duration;

use reqwest::{Client, StatusCode};
use serde::Deserialize;
use spotq_model::Timestamp;
use tokio::sync::{mpsc, watch};

use super::{Changes, CloudSays, WatchConfig, tell_change, text_of, to_timestamp};
use crate::ids::now;

const SOURCE: &str = "azure:scheduled-events/Preempt";
const EVENTS: &str = "/metadata/scheduledevents?api-version=2020-07-01";
const NAME: &str = "/metadata/instance/compute/name?api-version=2021-02-01&format=text";
/// The first call switches the service on and may take two minutes.
const FIRST_TIMEOUT: Duration = Duration::from_secs(125);

/// A preemption of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Preempt {
    id: String,
    /// Absent once it has started.
    not_before: Option<Timestamp>,
    started: bool,
}

pub(super) async fn watch(
    config: &WatchConfig,
    client: &Client,
    tell: &mpsc::Sender<CloudSays>,
    durable: watch::Receiver<bool>,
) {
    let mut state = Watching::default();
    let mut first = true;
    let mut name = None;
    loop {
        if name.is_none() {
            name = own_name(config, client).await;
        }
        let own = name.as_deref().unwrap_or(&config.instance);
        let answer = tokio::select! {
            answer = ask(config, client, first) => answer,
            () = tell.closed() => return,
        };
        first &= answer.is_none();
        if let Some(body) = answer
            && let Some(seen) = parse_events(&body, own)
            && !tell_change(tell, state.see(seen.as_ref())).await
        {
            return;
        }
        if *durable.borrow() {
            state.consent(config, client).await;
        }
        if tell.is_closed() {
            return;
        }
        tokio::time::sleep(config.poll).await;
    }
}

#[derive(Debug, Default)]
struct Watching {
    changes: Changes,
    current: Option<Preempt>,
    consented: BTreeSet<String>,
    deadline: Option<Timestamp>,
}

impl Watching {
    fn see(&mut self, seen: Option<&Preempt>) -> Option<CloudSays> {
        let had_started = self.current.as_ref().is_some_and(|event| event.started);
        match seen {
            Some(event) => {
                // A started event names no time any more; the one it named before still holds.
                let deadline = event.not_before.or(self.deadline).unwrap_or_else(now);
                self.deadline = Some(deadline);
                self.current = Some(event.clone());
                self.changes.see(Some((deadline, SOURCE)))
            }
            // An event that has started and disappears is done, not cancelled.
            None if had_started => None,
            None => {
                self.current = None;
                self.deadline = None;
                self.changes.see(None)
            }
        }
    }

    /// Lets the eviction go on, once everything is saved.
    async fn consent(&mut self, config: &WatchConfig, client: &Client) {
        let Some(event) = &self.current else { return };
        if event.started || self.consented.contains(&event.id) {
            return;
        }
        let body = serde_json::json!({ "StartRequests": [{ "EventId": event.id }] });
        let url = format!("{}{EVENTS}", config.base);
        let sent = client.post(url).header("Metadata", "true").json(&body).send().await;
        if sent.is_ok_and(|response| response.status().is_success()) {
            self.consented.insert(event.id.clone());
        }
    }
}

async fn ask(config: &WatchConfig, client: &Client, first: bool) -> Option<String> {
    let mut request = client.get(format!("{}{EVENTS}", config.base)).header("Metadata", "true");
    if first {
        request = request.timeout(FIRST_TIMEOUT);
    }
    let response = request.send().await.ok()?;
    if response.status() == StatusCode::OK { text_of(response).await } else { None }
}

async fn own_name(config: &WatchConfig, client: &Client) -> Option<String> {
    let response =
        client.get(format!("{}{NAME}", config.base)).header("Metadata", "true").send().await.ok()?;
    if response.status() != StatusCode::OK {
        return None;
    }
    text_of(response).await.map(|name| name.trim().to_owned()).filter(|name| !name.is_empty())
}

/// `None`: the document is not understood. `Some(None)`: nothing is planned for `own`.
pub(super) fn parse_events(body: &str, own: &str) -> Option<Option<Preempt>> {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Document {
        events: Vec<serde_json::Value>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Event {
        event_id: String,
        event_type: String,
        resources: Vec<String>,
        event_status: String,
        #[serde(default)]
        not_before: String,
    }
    let document: Document = serde_json::from_str(body).ok()?;
    // An event that is not understood is skipped, not taken for a withdrawal of the others.
    let events = document.events.into_iter().filter_map(|event| serde_json::from_value::<Event>(event).ok());
    let mine = events
        .filter(|event| {
            event.event_type == "Preempt" && event.resources.iter().any(|name| is_same(name, own))
        })
        .filter_map(|event| {
            let started = event.event_status == "Started";
            let not_before = parse_time(&event.not_before);
            // Scheduled at a time that cannot be read is no notice.
            (started || not_before.is_some()).then_some(Preempt { id: event.event_id, not_before, started })
        })
        .min_by_key(|event| event.not_before.unwrap_or_default());
    Some(mine)
}

/// Azure compares names without regard to case.
fn is_same(name: &str, own: &str) -> bool {
    name.eq_ignore_ascii_case(own)
}

/// `Mon, 11 Apr 2026 22:26:58 GMT`. The day's name is not checked: the vendor's own samples get it wrong.
fn parse_time(text: &str) -> Option<Timestamp> {
    let rest = text.split_once(',').map_or(text, |(_, rest)| rest).trim();
    let rest = rest.strip_suffix("GMT")?.trim();
    let time = jiff::civil::DateTime::strptime("%d %b %Y %H:%M:%S", rest).ok()?;
    jiff::tz::TimeZone::UTC.to_timestamp(time).ok().map(to_timestamp)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(kind: &str, resource: &str, status: &str, not_before: &str) -> String {
        format!(
            r#"{{"DocumentIncarnation":2,"Events":[{{"EventId":"C7","EventType":"{kind}","ResourceType":"VirtualMachine","Resources":["{resource}"],"EventStatus":"{status}","NotBefore":"{not_before}","Description":"","EventSource":"Platform","DurationInSeconds":-1}}]}}"#
        )
    }

    const AT: &str = "Mon, 11 Apr 2026 22:26:58 GMT";

    #[test]
    fn a_preemption_of_this_machine_is_seen_and_others_are_not() {
        let seen = parse_events(&document("Preempt", "VM-1", "Scheduled", AT), "vm-1").unwrap().unwrap();
        assert_eq!((seen.not_before, seen.started), (Some(Timestamp(1_775_946_418_000)), false));
        for other in [
            document("Reboot", "vm-1", "Scheduled", AT),
            document("Preempt", "vm-2", "Scheduled", AT),
            document("Preempt", "vm-1", "Scheduled", "tomorrow"),
            r#"{"DocumentIncarnation":3,"Events":[]}"#.to_owned(),
            r#"{"DocumentIncarnation":3,"Events":[{"EventId":1}]}"#.to_owned(),
        ] {
            assert_eq!(parse_events(&other, "vm-1"), Some(None), "{other}");
        }
        for garbage in ["", "[]", "{}", "<html>"] {
            assert_eq!(parse_events(garbage, "vm-1"), None, "{garbage}");
        }
    }

    #[test]
    fn a_started_event_keeps_its_time_and_its_disappearance_is_no_withdrawal() {
        let mut state = Watching::default();
        let scheduled = parse_events(&document("Preempt", "vm-1", "Scheduled", AT), "vm-1").unwrap();
        assert!(matches!(state.see(scheduled.as_ref()), Some(CloudSays::Notice { .. })));
        let started = parse_events(&document("Preempt", "vm-1", "Started", ""), "vm-1").unwrap();
        assert_eq!(state.see(started.as_ref()), None);
        assert_eq!(state.see(None), None);
        let mut cancelled = Watching::default();
        cancelled.see(scheduled.as_ref());
        assert_eq!(cancelled.see(None), Some(CloudSays::Withdrawn));
    }
}
