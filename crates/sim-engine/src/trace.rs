//! What happened, as a hash for every run and as text for those who want to read it.

use std::collections::VecDeque;

use spotq_sim::TraceLevel;

/// Lines that are kept of a run that is not printed whole.
const LAST_LINES: usize = 60;

/// See the module.
#[derive(Debug)]
pub(crate) struct Trace {
    hash: u64,
    on: bool,
    lines: VecDeque<String>,
    /// Every line is kept.
    whole: bool,
}

impl Trace {
    pub(crate) fn new(level: TraceLevel) -> Trace {
        let (on, whole) = (level != TraceLevel::Hash, level == TraceLevel::Whole);
        Trace { hash: 0xcbf2_9ce4_8422_2325, on, lines: VecDeque::new(), whole }
    }

    /// Something that counts for the hash.
    pub(crate) fn mark(&mut self, t: u64, text: &str) {
        self.mix(t);
        text.as_bytes().chunks(8).for_each(|chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.mix(u64::from_le_bytes(word));
        });
        self.line(t, || text.to_owned());
    }

    /// Something that is only worth reading.
    pub(crate) fn line(&mut self, t: u64, text: impl FnOnce() -> String) {
        if self.on {
            if !self.whole && self.lines.len() == LAST_LINES {
                self.lines.pop_front();
            }
            self.lines.push_back(format!("{:9.3} {}", t as f64 / 1000.0, text()));
        }
    }

    pub(crate) fn finish(&mut self) -> (u64, Vec<String>) {
        (self.hash, std::mem::take(&mut self.lines).into())
    }

    fn mix(&mut self, n: u64) {
        self.hash = (self.hash ^ n).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
    }
}
