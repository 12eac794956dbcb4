//! What happens to a job, in sentences: nobody who waits should wonder.
//!
//! Pure: views of a job go in as they come, lines come out. It tells of changes only, and never the same thing twice.

use std::collections::BTreeMap;

use spotq_model::{Span, Timestamp, Usd, UsdPerHour};
use spotq_proto::v1;

use crate::words::{self, price, usd};

/// Remembers what was told of one job.
#[derive(Debug, Default)]
pub struct Narrator {
    started: bool,
    told: String,
    /// The newest attempt whose end was told.
    ended: u64,
    /// When the node of a draining attempt goes; the view forgets it when the drain is over.
    deadlines: BTreeMap<u64, u64>,
    bill: Bill,
}

/// What the end of a job says of its money.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Bill {
    /// The figures will not change.
    #[default]
    Final,
    /// A node still costs something.
    Open,
    /// Nothing: a report follows.
    Reported,
}

impl Narrator {
    /// For a job that was just submitted: all that happens to it is news.
    #[must_use]
    pub fn from_the_start() -> Self {
        Narrator { started: true, ..Narrator::default() }
    }

    /// How its end is told.
    pub fn bill(&mut self, bill: Bill) {
        self.bill = bill;
    }

    /// What is new in `job`.
    pub fn tell(&mut self, job: &v1::JobView, now: Timestamp) -> Vec<String> {
        let mut lines = Vec::new();
        if let Some(deadline) = job.deadline_ms {
            self.deadlines.insert(job.generation, deadline);
        }
        for attempt in job.attempts.iter().filter(|a| !a.end.is_empty() && a.generation > self.ended) {
            // What happened before we looked is in `show`.
            if self.started {
                lines.extend(self.end_of(attempt, job));
            }
        }
        let ended = job.attempts.iter().filter(|a| !a.end.is_empty()).map(|a| a.generation).max();
        self.ended = self.ended.max(ended.unwrap_or(0));
        self.deadlines.retain(|generation, _| *generation > self.ended);
        self.started = true;

        let topic = topic(job);
        if topic != self.told {
            self.told = topic;
            lines.push(headline(job, now, self.bill));
        }
        lines
    }

    fn end_of(&self, attempt: &v1::AttemptView, job: &v1::JobView) -> Option<String> {
        let done = words::is_done(job);
        let next = if done { "" } else { ", looking for capacity" };
        let place = words::place(&attempt.pool);
        match attempt.end.as_str() {
            "preempted" => {
                let notice = match (attempt.noticed_ms, self.deadlines.get(&attempt.generation)) {
                    (None, _) => "no notice".to_owned(),
                    (Some(_), None) => "with notice".to_owned(),
                    (Some(at), Some(deadline)) => {
                        // The watcher hears of a notice of 30 s a moment after it was given.
                        let ms = deadline.saturating_sub(at).saturating_add(500);
                        format!("notice {}", Span(ms - ms % 1000))
                    }
                };
                Some(format!("preempted on {place} ({notice}), {}{next}", saved(attempt, job)))
            }
            "node_lost" => {
                let why = if attempt.detail.is_empty() { "" } else { ": " };
                Some(format!(
                    "lost the node on {place}{why}{}, {}{next}",
                    attempt.detail,
                    saved(attempt, job)
                ))
            }
            "requeued" if words::is_refused(attempt) => {
                Some(format!("no node on {place}: {}", attempt.detail))
            }
            "requeued" => Some(format!("stopped to be placed anew, {}{next}", saved(attempt, job))),
            // The end of the job says these in full.
            _ if done => None,
            end => {
                let why = if attempt.detail.is_empty() { "" } else { ": " };
                Some(format!(
                    "attempt {} ended ({}{why}{}), trying again",
                    attempt.generation,
                    end.replace('_', " "),
                    attempt.detail
                ))
            }
        }
    }
}

/// How it stands, in one line: step, price, attempt, money saved so far.
#[must_use]
pub fn status(job: &v1::JobView, now: Timestamp) -> String {
    let id = words::task(job);
    let mut parts = vec![format!("job {id} {}", job.phase)];
    match job.phase.as_str() {
        "pending" | "held" => {
            if !job.reason.is_empty() {
                parts.push(job.reason.clone());
            }
            if let Some(at) = job.next_try_ms {
                parts.push(format!("next try {}", words::until(Timestamp(at), now)));
            }
        }
        "draining" => {
            if let Some(at) = job.deadline_ms {
                parts.push(format!("node goes {}", words::until(Timestamp(at), now)));
            }
        }
        _ => {}
    }
    if job.progress.is_some() {
        parts.push(format!("step {}", words::steps(job.progress.as_ref())));
    }
    if let Some(node) = &job.node {
        parts.push(price(UsdPerHour::nanos(node.price_nano_usd_h)));
    }
    if job.generation > 0 {
        parts.push(format!("try {}", job.generation));
    }
    let cost = job.cost.unwrap_or_default();
    if cost.billed_nano_usd != 0 {
        let net = cost.saved_net_nano_usd;
        let saved = if net < 0 { words::more(net) } else { format!("{} saved", usd(Usd(net))) };
        parts.push(format!("{} spent, {saved}", usd(Usd(cost.billed_nano_usd))));
    }
    // Last, because a narrow window cuts the end.
    parts.extend(job.node.as_ref().map(|node| words::place(&node.pool)));
    crate::out::plain(&parts.join(" · "))
}

/// What a line was told about. Figures within a reason (a price, a count) change all the time and are no news.
fn topic(job: &v1::JobView) -> String {
    let reason: String = job.reason.chars().filter(|c| !c.is_ascii_digit()).collect();
    let pool = job.node.as_ref().map_or("", |node| node.pool.as_str());
    match job.phase.as_str() {
        "pending" | "held" => format!("{} {reason}", job.phase),
        _ => format!("{} {} {pool}", job.phase, job.generation),
    }
}

fn headline(job: &v1::JobView, now: Timestamp, bill: Bill) -> String {
    let id = words::task(job);
    let node = job.node.as_ref();
    let place = node.map_or_else(|| "a node".to_owned(), |n| words::place(&n.pool));
    let rate = node.map_or_else(String::new, |n| {
        format!(
            " at {} (on demand {})",
            price(UsdPerHour::nanos(n.price_nano_usd_h)),
            price(UsdPerHour::nanos(n.on_demand_nano_usd_h))
        )
    });
    let text = match job.phase.as_str() {
        "held" => format!("job {id} is held; `spotq release {id}` lets it go"),
        "pending" => {
            let reason = if job.reason.is_empty() { "no reason given" } else { &job.reason };
            let next = job
                .next_try_ms
                .filter(|at| *at > now.0)
                .map_or_else(String::new, |at| format!("; next try {}", words::until(Timestamp(at), now)));
            format!("job {id} waits: {reason}{next}")
        }
        "provisioning" => format!("getting {place}{rate}"),
        "restoring" => match job.checkpoint.as_ref().and_then(|c| c.step) {
            Some(step) => format!("{place} is up, restoring the checkpoint at step {step}"),
            None => format!("{place} is up, making it ready"),
        },
        "running" => {
            let attempt = job.attempts.iter().find(|a| a.generation == job.generation);
            let from = attempt.and_then(|a| a.resumed_step);
            let resumed = from.map_or_else(String::new, |step| format!(", resumed at step {step}"));
            format!("{} runs on {place}{rate}{resumed}", words::attempt(job))
        }
        // A stop that was asked for is no notice of the cloud.
        "draining" if job.reason.starts_with("asked to stop") => format!("job {id} was {}", job.reason),
        "draining" => match job.deadline_ms {
            Some(at) => format!("notice on {place}: it goes {}; saving", words::until(Timestamp(at), now)),
            None => format!("notice on {place}; saving"),
        },
        "completing" if job.reason.is_empty() => "the command is over".to_owned(),
        "completing" => format!("the command is over: {}", job.reason),
        "done" => farewell(job, bill),
        other => format!("job {id} is {other}"),
    };
    crate::out::plain(&text)
}

fn farewell(job: &v1::JobView, bill: Bill) -> String {
    let id = words::task(job);
    let outcome = if job.outcome_text.is_empty() { "done" } else { &job.outcome_text };
    let cost = job.cost.unwrap_or_default();
    let billed = usd(Usd(cost.billed_nano_usd));
    let preemptions = words::count(u64::from(job.preemptions), "preemption");
    match bill {
        Bill::Final => format!("job {id} {outcome}: {billed} billed, {}, {preemptions}", words::saved(&cost)),
        Bill::Open => format!(
            "job {id} {outcome}: {billed} billed so far, {preemptions}; its node is still being returned, `spotq report \
             {id}` shows the final bill"
        ),
        Bill::Reported => format!("job {id} {outcome}, {preemptions}"),
    }
}

/// What the end of an attempt left to go on from.
fn saved(attempt: &v1::AttemptView, job: &v1::JobView) -> String {
    match (attempt.committed_step, &job.checkpoint) {
        (Some(step), _) => format!("checkpoint at step {step} saved"),
        (None, Some(v1::Checkpoint { step: Some(step), .. })) => {
            format!("an earlier checkpoint at step {step} is there")
        }
        (None, Some(_)) => "a checkpoint is there".to_owned(),
        (None, None) => "no checkpoint yet".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::views::test::{NOW, job};

    fn view(phase: &str) -> v1::JobView {
        v1::JobView { phase: phase.into(), attempts: vec![], generation: 1, ..job() }
    }

    fn attempt(end: &str, noticed: Option<u64>, committed: Option<u64>) -> v1::AttemptView {
        v1::AttemptView {
            generation: 1,
            pool: "aws/us-east-1/us-east-1a/g5.xlarge/spot".into(),
            end: end.into(),
            noticed_ms: noticed,
            committed_step: committed,
            ..Default::default()
        }
    }

    #[test]
    fn a_preemption_is_told_with_notice_place_and_step() {
        let mut narrator = Narrator::default();
        assert_eq!(narrator.tell(&view("running"), NOW).len(), 1);
        let drain = v1::JobView { deadline_ms: Some(NOW.0 + 30_000), ..view("draining") };
        assert_eq!(
            narrator.tell(&drain, NOW),
            ["notice on aws/us-east-1a g5.xlarge: it goes in 30s; saving"]
        );
        let mut gone = v1::JobView { node: None, reason: "in the queue".into(), ..view("pending") };
        gone.attempts = vec![attempt("preempted", Some(NOW.0), Some(600))];
        assert_eq!(
            narrator.tell(&gone, NOW),
            [
                "preempted on aws/us-east-1a g5.xlarge (notice 30s), checkpoint at step 600 saved, looking for capacity",
                "job 7 waits: in the queue",
            ]
        );
        assert!(narrator.tell(&gone, NOW).is_empty(), "told twice");
    }

    #[test]
    fn a_preemption_without_notice_or_checkpoint_says_so() {
        let mut narrator = Narrator::default();
        narrator.tell(&view("running"), NOW);
        let mut gone = v1::JobView { checkpoint: None, ..view("pending") };
        gone.attempts = vec![attempt("preempted", None, None)];
        let lines = narrator.tell(&gone, NOW);
        assert!(lines[0].contains("(no notice), no checkpoint yet"), "{lines:?}");
    }

    #[test]
    fn what_happened_before_we_looked_is_not_told() {
        let lines = Narrator::default().tell(&job(), NOW);
        assert_eq!(
            lines,
            [
                "attempt 2 runs on aws/us-east-1a g5.xlarge at $0.3100/h (on demand $1.01/h), resumed at step 600"
            ]
        );
    }

    #[test]
    fn a_price_that_moves_within_a_reason_is_no_news_and_another_reason_is() {
        let mut narrator = Narrator::default();
        let wait = |reason: &str| v1::JobView { reason: reason.into(), node: None, ..view("pending") };
        assert_eq!(narrator.tell(&wait("the cheapest pool costs $0.31/h"), NOW).len(), 1);
        assert_eq!(narrator.tell(&wait("the cheapest pool costs $0.32/h"), NOW).len(), 0);
        assert_eq!(narrator.tell(&wait("no prices from any cloud yet"), NOW).len(), 1);
    }

    #[test]
    fn a_failed_attempt_is_told_while_the_job_goes_on_and_not_at_its_end() {
        let mut narrator = Narrator::default();
        narrator.tell(&view("running"), NOW);
        let mut again = view("pending");
        again.attempts =
            vec![v1::AttemptView { detail: "exit code 3".into(), ..attempt("failed", None, None) }];
        assert_eq!(narrator.tell(&again, NOW)[0], "attempt 1 ended (failed: exit code 3), trying again");

        let mut narrator = Narrator::default();
        narrator.tell(&view("running"), NOW);
        let mut end = v1::JobView { outcome_text: "failed with exit code 3".into(), ..view("done") };
        end.attempts = vec![attempt("failed", None, None)];
        assert_eq!(
            narrator.tell(&end, NOW),
            [
                "job 7 failed with exit code 3: $0.9731 billed, $2.03 saved (68%) against on demand, 1 preemption"
            ]
        );
    }

    #[test]
    fn the_end_says_what_of_the_bill_is_known() {
        let end = v1::JobView { outcome_text: "completed".into(), ..view("done") };
        let told = |bill: Bill| {
            let mut narrator = Narrator::default();
            narrator.bill(bill);
            narrator.tell(&end, NOW).remove(0)
        };
        assert_eq!(
            told(Bill::Open),
            "job 7 completed: $0.9731 billed so far, 1 preemption; its node is still being returned, `spotq report 7` \
             shows the final bill"
        );
        assert_eq!(told(Bill::Reported), "job 7 completed, 1 preemption");
        let dear = v1::Cost { saved_net_nano_usd: -12_000_000, ..job().cost.unwrap() };
        let end = v1::JobView { cost: Some(dear), ..end };
        assert_eq!(
            Narrator::default().tell(&end, NOW),
            ["job 7 completed: $0.9731 billed, cost $0.0120 more than on demand (0%), 1 preemption"]
        );
        let line = status(&v1::JobView { cost: Some(dear), ..job() }, NOW);
        assert!(line.contains("$0.9731 spent, $0.0120 more than on demand ·"), "{line}");
    }

    #[test]
    fn an_attempt_after_refused_launches_says_so_and_keeps_its_number() {
        let refused = |generation: u64| v1::AttemptView {
            generation,
            detail: "insufficient capacity: none left".into(),
            ..attempt("requeued", None, None)
        };
        let mut first = v1::JobView { generation: 2, ..view("running") };
        first.attempts = vec![refused(1)];
        let line = Narrator::default().tell(&first, NOW).remove(0);
        assert!(line.starts_with("attempt 2 (1 launch refused before) runs on aws/"), "{line}");
        first.generation = 4;
        first.attempts = vec![refused(1), refused(2), refused(3)];
        let line = Narrator::default().tell(&first, NOW).remove(0);
        assert!(line.starts_with("attempt 4 (3 launches refused before) runs on aws/"), "{line}");
        let second = v1::AttemptView { generation: 2, ..attempt("preempted", None, None) };
        first.attempts = vec![refused(1), second.clone(), refused(3)];
        let line = Narrator::default().tell(&first, NOW).remove(0);
        assert!(line.starts_with("attempt 4 (1 launch refused before) runs on aws/"), "told once: {line}");
        first.generation = 3;
        first.attempts = vec![refused(1), second];
        let line = Narrator::default().tell(&first, NOW).remove(0);
        assert!(line.starts_with("attempt 3 runs on aws/"), "{line}");
    }

    #[test]
    fn the_status_line_has_step_price_attempt_and_money() {
        assert_eq!(
            status(&job(), NOW),
            "job 7 running · step 1200/5000 · $0.3100/h · try 2 · $0.9731 spent, $2.03 saved · aws/us-east-1a g5.xlarge"
        );
        let waiting = v1::JobView {
            reason: "sold out".into(),
            next_try_ms: Some(NOW.0 + 5000),
            generation: 0,
            cost: None,
            node: None,
            progress: None,
            ..view("pending")
        };
        assert_eq!(status(&waiting, NOW), "job 7 pending · sold out · next try in 5s");
    }

    #[test]
    fn text_of_others_cannot_move_the_cursor() {
        let evil = v1::JobView { reason: "\u{1b}[2Jgone".into(), ..view("pending") };
        for line in Narrator::default().tell(&evil, NOW).into_iter().chain([status(&evil, NOW)]) {
            assert!(!line.contains('\u{1b}'), "{line:?}");
        }
    }
}
