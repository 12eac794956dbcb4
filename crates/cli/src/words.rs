//! Times, money and phases as people read them. Pure.

use spotq_model::{JobId, Outcome, Span, TaskId, Timestamp, Usd, UsdPerHour};
use spotq_proto::v1;

use crate::out::Tone;

/// Now, by the clock of this machine.
#[must_use]
pub fn now() -> Timestamp {
    Timestamp(u64::try_from(jiff::Timestamp::now().as_millisecond()).unwrap_or(0))
}

/// A moment in UTC, to the second or as fine as it is.
#[must_use]
pub fn rfc3339(at: Timestamp) -> String {
    let ms = i64::try_from(at.0).ok();
    ms.and_then(|ms| jiff::Timestamp::from_millisecond(ms).ok())
        .map_or_else(|| format!("{} ms after 1970", at.0), |at| at.to_string())
}

/// `$0.97`; small amounts keep the digits that matter.
#[must_use]
pub fn usd(amount: Usd) -> String {
    let (sign, size) = if amount.0 < 0 { ("-", Usd(amount.0.saturating_neg())) } else { ("", amount) };
    match size.0 {
        0 => "$0".into(),
        1..5_000 => format!("{sign}<$0.00001"),
        5_000..10_000_000 => format!("{sign}${size:.5}"),
        10_000_000..1_000_000_000 => format!("{sign}${size:.4}"),
        _ => format!("{sign}${size:.2}"),
    }
}

/// `$0.3100/h`.
#[must_use]
pub fn price(price: UsdPerHour) -> String {
    format!("{}/h", rate(price))
}

/// As [`price`], under a title that says the unit.
#[must_use]
pub fn rate(price: UsdPerHour) -> String {
    let amount = price.0;
    if amount.0 >= 1_000_000_000 { format!("${amount:.2}") } else { format!("${amount:.4}") }
}

/// `part` of `whole` in per cent; none of nothing.
#[must_use]
pub fn percent(part: i64, whole: i64) -> Option<f64> {
    (whole > 0).then(|| part as f64 * 100.0 / whole as f64)
}

/// `$2.03 saved (68%) against on demand`; what cost more than that says so.
#[must_use]
pub fn saved(cost: &v1::Cost) -> String {
    let net = cost.saved_net_nano_usd;
    let share = percent(net, cost.on_demand_useful_nano_usd)
        .map_or_else(String::new, |pct| format!(" ({:.0}%)", pct.abs()));
    if net < 0 {
        format!("cost {}{share}", more(net))
    } else {
        format!("{} saved{share} against on demand", usd(Usd(net)))
    }
}

/// `$0.0012 more than on demand`, of a saving below zero.
#[must_use]
pub fn more(saved_nanos: i64) -> String {
    format!("{} more than on demand", usd(Usd(saved_nanos.saturating_neg())))
}

/// Whether a cloud refused the launch of this attempt: it has a number, and never reached a node.
#[must_use]
pub fn is_refused(attempt: &v1::AttemptView) -> bool {
    attempt.end == "requeued" && attempt.started_ms.is_none() && !attempt.detail.is_empty()
}

/// `attempt 3 (2 launches refused before)`, of the launches since the attempt before it. The number is the one that
/// `logs --generation` takes, so refused launches keep theirs.
#[must_use]
pub fn attempt(job: &v1::JobView) -> String {
    let earlier = job.attempts.iter().rev().filter(|a| a.generation < job.generation);
    let before = earlier.take_while(|a| is_refused(a)).count();
    match before {
        0 => format!("attempt {}", job.generation),
        1 => format!("attempt {} (1 launch refused before)", job.generation),
        n => format!("attempt {} ({n} launches refused before)", job.generation),
    }
}

/// `in 12s`, `now`, for a moment to come.
#[must_use]
pub fn until(at: Timestamp, now: Timestamp) -> String {
    if at <= now { "now".into() } else { format!("in {}", at.since(now)) }
}

/// `1 file`, `2 files`.
#[must_use]
pub fn count(n: u64, one: &str) -> String {
    if n == 1 { format!("1 {one}") } else { format!("{n} {one}s") }
}

/// `1200/5000`, `1200`, or nothing.
#[must_use]
pub fn steps(progress: Option<&v1::Progress>) -> String {
    match progress {
        None => String::new(),
        Some(v1::Progress { step, total: None }) => step.to_string(),
        Some(v1::Progress { step, total: Some(total) }) => format!("{step}/{total}"),
    }
}

/// `12.3 MB`.
#[must_use]
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["kB", "MB", "GB", "TB", "PB"];
    if n < 1000 {
        return format!("{n} B");
    }
    let mut value = n as f64 / 1000.0;
    let mut unit = 0;
    while value >= 999.95 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// `aws/us-east-1a g5.xlarge`: what tells pools apart, without the region that the zone names again.
#[must_use]
pub fn place(pool: &str) -> String {
    match pool.parse::<spotq_model::Pool>() {
        Ok(p) => {
            let market = match p.market {
                spotq_model::Market::Spot => "",
                spotq_model::Market::OnDemand => " on-demand",
            };
            format!("{}/{} {}{market}", p.cloud, p.zone, p.instance_type)
        }
        Err(_) => pool.to_owned(),
    }
}

#[must_use]
pub fn task(job: &v1::JobView) -> TaskId {
    TaskId { job: JobId(job.job_id), index: job.task_index }
}

#[must_use]
pub fn is_done(job: &v1::JobView) -> bool {
    job.phase == "done"
}

/// How a phase is coloured; a done job by its outcome.
#[must_use]
pub fn tone(phase: &str, outcome: Option<&str>) -> Tone {
    match (phase, outcome) {
        ("done", Some("completed")) | ("running", _) => Tone::Good,
        ("done", Some("cancelled")) => Tone::Plain,
        ("done", _) => Tone::Bad,
        ("held" | "pending" | "draining", _) => Tone::Waiting,
        ("provisioning" | "restoring" | "completing", _) => Tone::Busy,
        _ => Tone::Plain,
    }
}

/// How long the job has been in the system, or was.
#[must_use]
pub fn age(job: &v1::JobView, now: Timestamp) -> Span {
    job.ended_ms.map_or(now, Timestamp).since(Timestamp(job.submitted_ms))
}

/// The exit code for a job that is done: its own, or the one that its outcome is documented with.
#[must_use]
pub fn exit_code(job: &v1::JobView) -> u8 {
    let outcome = match job.outcome.as_deref() {
        Some("completed") => Outcome::Completed,
        Some("timeout") => Outcome::Timeout,
        Some("cancelled") => Outcome::Cancelled,
        Some("preemption_budget_spent") => Outcome::PreemptionBudgetSpent,
        Some("node_failure") => Outcome::NodeFailure,
        Some("out_of_memory") => Outcome::OutOfMemory,
        Some("launch_failure") => Outcome::LaunchFailure { message: String::new() },
        Some("budget_exhausted") => Outcome::BudgetExhausted,
        // "failed", or what a newer scheduler calls it: certainly not completed.
        _ => Outcome::Failed { exit_code: job.exit_code.unwrap_or(1) },
    };
    match (outcome.exit_code(), &outcome) {
        (_, Outcome::Completed) => 0,
        // The system keeps eight bits, and of a failure they must not read as success.
        (code, _) => u8::try_from(code & 0xff).ok().filter(|code| *code != 0).unwrap_or(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(outcome: &str, exit_code: Option<i32>) -> v1::JobView {
        v1::JobView { phase: "done".into(), outcome: Some(outcome.into()), exit_code, ..Default::default() }
    }

    #[test]
    fn exit_codes_are_the_documented_ones_and_a_failure_is_never_0() {
        for (outcome, own, code) in [
            ("completed", Some(0), 0),
            ("failed", Some(3), 3),
            ("failed", Some(256), 1),
            ("failed", Some(-1), 255),
            ("failed", None, 1),
            ("timeout", None, 124),
            ("launch_failure", None, 125),
            ("cancelled", Some(0), 130),
            ("out_of_memory", Some(9), 137),
            ("preemption_budget_spent", None, 75),
            ("node_failure", None, 76),
            ("budget_exhausted", None, 77),
            ("a word of the future", None, 1),
        ] {
            assert_eq!(exit_code(&done(outcome, own)), code, "{outcome}");
        }
    }

    /// Every outcome of the model is known here by the name that the scheduler sends.
    #[test]
    fn each_outcome_of_the_model_has_its_code() {
        let all = [
            Outcome::Completed,
            Outcome::Failed { exit_code: 9 },
            Outcome::Timeout,
            Outcome::Cancelled,
            Outcome::PreemptionBudgetSpent,
            Outcome::NodeFailure,
            Outcome::OutOfMemory,
            Outcome::LaunchFailure { message: "m".into() },
            Outcome::BudgetExhausted,
        ];
        for outcome in all {
            assert_eq!(
                i32::from(exit_code(&done(outcome.name(), Some(9)))),
                outcome.exit_code(),
                "{outcome}"
            );
        }
    }

    #[test]
    fn small_amounts_keep_the_digits_that_matter() {
        for (nanos, text) in [
            (0, "$0"),
            (700, "<$0.00001"),
            (123_456, "$0.00012"),
            (23_456_789, "$0.0235"),
            (12_345_678_901, "$12.35"),
            (-5_000_000, "-$0.00500"),
        ] {
            assert_eq!(usd(Usd(nanos)), text);
        }
        assert_eq!(price(UsdPerHour::nanos(310_000_000)), "$0.3100/h");
        assert_eq!(bytes(999), "999 B");
        assert_eq!(bytes(999_999), "1.0 MB");
        assert_eq!(bytes(12_345_678), "12.3 MB");
        assert_eq!(bytes(u64::MAX), "18446.7 PB");
    }

    #[test]
    fn what_cost_more_than_on_demand_is_no_saving() {
        let cost = |net: i64| v1::Cost {
            saved_net_nano_usd: net,
            on_demand_useful_nano_usd: 10_000_000,
            ..Default::default()
        };
        assert_eq!(saved(&cost(5_000_000)), "$0.00500 saved (50%) against on demand");
        assert_eq!(saved(&cost(-1_200_000)), "cost $0.00120 more than on demand (12%)");
        let nothing_useful = v1::Cost { on_demand_useful_nano_usd: 0, ..cost(-1_200_000) };
        assert_eq!(saved(&nothing_useful), "cost $0.00120 more than on demand");
        assert_eq!(saved(&cost(0)), "$0 saved (0%) against on demand");
        assert!(saved(&cost(i64::MIN)).starts_with("cost $"));
    }

    #[test]
    fn times_are_rfc_3339_and_nonsense_does_not_panic() {
        assert_eq!(rfc3339(Timestamp(1_700_000_000_123)), "2023-11-14T22:13:20.123Z");
        assert!(rfc3339(Timestamp(u64::MAX)).contains("1970"));
    }
}
