//! What happened, as a hash for every run and as text for those who want to read it.

use std::collections::VecDeque;

use spotq_model::Event;

use crate::draw::START;
use crate::world::Ev;

/// Lines that are kept of a run that is not printed whole.
const LAST_LINES: usize = 60;

/// See the module.
#[derive(Debug)]
pub(crate) struct Trace {
    hash: u64,
    t: u64,
    on: bool,
    lines: VecDeque<String>,
    /// Every line is kept.
    whole: bool,
}

impl Trace {
    pub(crate) fn new(level: crate::TraceLevel) -> Trace {
        let (on, whole) = (level != crate::TraceLevel::Hash, level == crate::TraceLevel::Whole);
        Trace { hash: 0xcbf2_9ce4_8422_2325, t: 0, on, lines: VecDeque::new(), whole }
    }

    fn mix(&mut self, n: u64) {
        self.hash = (self.hash ^ n).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
    }

    /// The simulation takes its next step.
    pub(crate) fn step(&mut self, t: u64, ev: &Ev) {
        self.t = t;
        self.mix(t);
        self.mix(kind(ev));
        if self.on && !matches!(ev, Ev::Tick { .. } | Ev::Step { .. } | Ev::Write { .. } | Ev::Audit) {
            self.line(|| format!("{ev:?}"));
        }
    }

    /// Something became durable.
    pub(crate) fn event(&mut self, t: u64, event: &Event) {
        self.mix(t ^ event.at.0.rotate_left(32));
        if self.on {
            self.line(|| format!("  = {:?}", event.fact));
        }
    }

    pub(crate) fn line(&mut self, text: impl FnOnce() -> String) {
        if self.on {
            if !self.whole && self.lines.len() == LAST_LINES {
                self.lines.pop_front();
            }
            let seconds = self.t.saturating_sub(START) as f64 / 1000.0;
            self.lines.push_back(format!("{seconds:9.3} {}", text()));
        }
    }

    pub(crate) fn finish(&mut self) -> (u64, Vec<String>) {
        (self.hash, std::mem::take(&mut self.lines).into())
    }
}

/// A number for what happens and to whom.
fn kind(ev: &Ev) -> u64 {
    let (kind, who) = match ev {
        Ev::Submit { client, .. } => (1, *client),
        Ev::Wish { client, .. } => (2, *client),
        Ev::Reply { client, .. } => (3, *client),
        Ev::Lead { proc } => (4, *proc),
        Ev::Inbox { proc, .. } => (5, *proc),
        Ev::Step { proc, .. } => (6, *proc),
        Ev::Tick { proc, .. } => (7, *proc),
        Ev::PollOffers { proc, .. } => (8, *proc),
        Ev::PollList { proc, .. } => (9, *proc),
        Ev::Write { id } => (10, *id as usize),
        Ev::Appended { proc, .. } => (11, *proc),
        Ev::Call { who, .. } => (12, who.0),
        Ev::Fate { inst, .. } => (13, *inst),
        Ev::Dial { inst, .. } => (14, *inst),
        Ev::ToScheduler { conn, .. } => (15, *conn),
        Ev::ToWorker { conn, .. } => (16, *conn),
        Ev::Broken { conn } => (17, *conn),
        Ev::NoticeSeen { inst, .. } => (18, *inst),
        Ev::WorkerBack { inst, .. } => (19, *inst),
        Ev::Work { inst, .. } => (20, *inst),
        Ev::Fault(fault) => (21, *fault as usize),
        Ev::Calm => (22, 0),
        Ev::Audit => (23, 0),
    };
    kind << 32 | who as u64
}
