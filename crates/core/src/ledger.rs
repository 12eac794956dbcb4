//! The ledger: what each node costs, from its launch to its end, without gaps and without overlaps (INV-09).
//!
//! A segment has one frozen quote and one holder. A new price or a new holder closes it and opens the next at the same
//! moment. Amounts are integers of nano-dollars, fixed when a segment closes; the bill is their sum.

use serde::{Deserialize, Serialize};
use spotq_model::{Generation, Quote, Span, TaskId, Timestamp, Usd};

/// A stretch of node time at one frozen price.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    pub start: Timestamp,
    /// Exclusive; `None` while it is open.
    pub end: Option<Timestamp>,
    pub quote: Quote,
    /// Who pays: the attempt that the node works for, or worked for last.
    pub holder: Option<(TaskId, Generation)>,
    /// Fixed at the end; zero while it is open.
    pub amount: Usd,
}

impl Segment {
    /// How long it is, up to `now` if it is open.
    #[must_use]
    pub fn length(&self, now: Timestamp) -> Span {
        self.end.unwrap_or(now).since(self.start)
    }

    /// What it costs, up to `now` if it is open.
    #[must_use]
    pub fn amount_at(&self, now: Timestamp) -> Usd {
        if self.end.is_some() { self.amount } else { self.quote.price.cost(self.length(now)) }
    }

    /// What the same time costs at the on-demand price that was frozen with it.
    #[must_use]
    pub fn on_demand_at(&self, now: Timestamp) -> Usd {
        self.quote.on_demand.cost(self.length(now))
    }
}

/// The segments of one node, in order. All but the last are closed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Ledger {
    pub segments: Vec<Segment>,
}

impl Ledger {
    pub(crate) fn open(&mut self, at: Timestamp, quote: Quote, holder: Option<(TaskId, Generation)>) {
        let start = self.segments.last().and_then(|s| s.end).map_or(at, |end| end.max(at));
        self.segments.push(Segment { start, end: None, quote, holder, amount: Usd::ZERO });
    }

    /// A new price from `at` on.
    pub(crate) fn reprice(&mut self, at: Timestamp, quote: Quote) {
        if let Some(holder) = self.current().map(|s| s.holder) {
            self.close(at);
            self.open(at, quote, holder);
        }
    }

    /// A new holder from `at` on.
    pub(crate) fn hand_over(&mut self, at: Timestamp, holder: (TaskId, Generation)) {
        if let Some(quote) = self.current().map(|s| s.quote.clone()) {
            self.close(at);
            self.open(at, quote, Some(holder));
        }
    }

    /// Ends the open segment. One without length leaves no trace, so that the same moment twice is harmless.
    pub(crate) fn close(&mut self, at: Timestamp) {
        let Some(last) = self.segments.last_mut().filter(|s| s.end.is_none()) else { return };
        // A clock that was set back must not make time negative.
        let end = at.max(last.start);
        if end == last.start {
            self.segments.pop();
            return;
        }
        last.amount = last.quote.price.cost(end.since(last.start));
        last.end = Some(end);
    }

    /// Ends everything at `at`, which may be before moments at which segments were cut: what came after it was never
    /// billed.
    pub(crate) fn end(&mut self, at: Timestamp) {
        self.segments.retain(|segment| segment.start < at);
        let Some(last) = self.segments.last_mut().filter(|s| s.end.is_none_or(|end| end > at)) else {
            return;
        };
        last.amount = last.quote.price.cost(at.since(last.start));
        last.end = Some(at);
    }

    fn current(&self) -> Option<&Segment> {
        self.segments.last().filter(|s| s.end.is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_costs_its_price_and_would_cost_the_on_demand_price_for_the_same_time() {
        let quote = Quote {
            price: "0.3".parse().unwrap(),
            on_demand: "1".parse().unwrap(),
            source: "test".into(),
            as_of: Timestamp(0),
        };
        let mut ledger = Ledger::default();
        ledger.open(Timestamp(0), quote, None);
        let now = Timestamp(3_600_000);
        let costs = |ledger: &Ledger, now| {
            let segment = &ledger.segments[0];
            (segment.amount_at(now), segment.on_demand_at(now))
        };
        assert_eq!(costs(&ledger, now), (Usd(300_000_000), Usd(1_000_000_000)), "while it is open");
        ledger.close(now);
        let later = now + Span::secs(3600);
        assert_eq!(costs(&ledger, later), (Usd(300_000_000), Usd(1_000_000_000)), "once it is closed");
    }
}
