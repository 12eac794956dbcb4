//! From our words to the wire's, and to the notice file. Pure.

use rustix::process::Signal as UnixSignal;
use spotq_model::{Signal, Timestamp};
use spotq_proto::v1;
use v1::report::What;

use crate::progress::Point;
use crate::supervise::{Finish, Stop};
use crate::uploads::RestoredFrom;

/// The end of an attempt that never began.
#[must_use]
pub fn cannot_start(message: String) -> What {
    finished(&Finish { launch_error: Some(message), ..Finish::default() }, None)
}

#[must_use]
pub fn finished(finish: &Finish, last: Option<Point>) -> What {
    let end = finish.end;
    What::Finished(v1::Finished {
        exit_code: end.and_then(|end| end.code),
        signal: end.and_then(|end| end.signal),
        out_of_memory: end.is_some_and(|end| end.out_of_memory),
        launch_error: finish.launch_error.clone(),
        stopped: stop_reason(finish.stopped).into(),
        signalled: finish.signalled,
        stopped_at_ms: end.map_or_else(crate::ids::now, |end| end.at).0,
        last_progress: last.map(progress),
        detail: finish.detail.clone(),
    })
}

/// The end of an attempt that is no fault of its command and says nothing about it: it is to be tried again.
#[must_use]
pub fn lost(detail: String) -> What {
    finished(&Finish { detail: Some(detail), ..Finish::default() }, None)
}

#[must_use]
pub fn restored(from: &RestoredFrom) -> What {
    What::Restored(v1::Restored { from: from.checkpoint.clone(), fell_back: from.fell_back })
}

#[must_use]
pub fn noticed(deadline: Timestamp, source: String) -> What {
    What::Noticed(v1::Noticed { deadline_ms: deadline.0, source })
}

#[must_use]
pub fn progress(point: Point) -> v1::Progress {
    v1::Progress { step: point.step, total: point.total }
}

#[must_use]
pub fn stop_reason(stop: Option<Stop>) -> v1::StopReason {
    match stop {
        None => v1::StopReason::None,
        Some(Stop::Notice) => v1::StopReason::Notice,
        Some(Stop::Cancel) => v1::StopReason::Cancel,
        Some(Stop::TimeLimit) => v1::StopReason::TimeLimit,
        Some(Stop::Budget) => v1::StopReason::Budget,
        Some(Stop::Requeue) => v1::StopReason::Requeue,
        Some(Stop::Superseded) => v1::StopReason::Superseded,
        Some(Stop::WorkerLeaving) => v1::StopReason::WorkerLeaving,
    }
}

/// `None` for a reason that asks for no stop.
#[must_use]
pub fn stop_from(reason: v1::StopReason) -> Option<Stop> {
    match reason {
        v1::StopReason::Unspecified | v1::StopReason::None => None,
        v1::StopReason::Notice => Some(Stop::Notice),
        v1::StopReason::Cancel => Some(Stop::Cancel),
        v1::StopReason::TimeLimit => Some(Stop::TimeLimit),
        v1::StopReason::Budget => Some(Stop::Budget),
        v1::StopReason::Requeue => Some(Stop::Requeue),
        v1::StopReason::Superseded => Some(Stop::Superseded),
        v1::StopReason::WorkerLeaving => Some(Stop::WorkerLeaving),
    }
}

#[must_use]
pub fn unix_signal(signal: Signal) -> UnixSignal {
    match signal {
        Signal::Usr1 => UnixSignal::USR1,
        Signal::Usr2 => UnixSignal::USR2,
        Signal::Term => UnixSignal::TERM,
        Signal::Int => UnixSignal::INT,
        Signal::Hup => UnixSignal::HUP,
    }
}

/// What a trainer reads when a stop is ahead.
#[must_use]
pub fn notice_file(deadline: Timestamp, source: &str) -> String {
    let at = i64::try_from(deadline.0).ok().and_then(|ms| jiff::Timestamp::from_millisecond(ms).ok());
    let at = at.map(|at| at.to_string()).unwrap_or_default();
    serde_json::json!({ "deadline": at, "deadline_ms": deadline.0, "source": source }).to_string() + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_survive_a_round_trip() {
        for stop in [
            Stop::Requeue,
            Stop::WorkerLeaving,
            Stop::Notice,
            Stop::Budget,
            Stop::TimeLimit,
            Stop::Cancel,
            Stop::Superseded,
        ] {
            assert_eq!(stop_from(stop_reason(Some(stop))), Some(stop));
        }
        assert_eq!(stop_from(v1::StopReason::Unspecified), None);
    }

    #[test]
    fn the_notice_file_says_when_in_two_ways() {
        let text = notice_file(Timestamp(1_587_748_304_000), "aws:spot/instance-action");
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["deadline"], "2020-04-24T17:11:44Z");
        assert_eq!(value["deadline_ms"], 1_587_748_304_000_u64);
    }
}
