//! What the demo tells while it runs: sentences about what happens, and one line that moves.

use std::cell::RefCell;

use spotq_proto::v1;

use crate::narrate::{Bill, Narrator, status};
use crate::out::Out;
use crate::screen::Screen;
use crate::words;

#[derive(Debug)]
pub(super) struct Story {
    screen: RefCell<Screen>,
    narrator: RefCell<Narrator>,
    started: tokio::time::Instant,
}

impl Story {
    pub(super) fn new(out: &Out) -> Self {
        let mut narrator = Narrator::default();
        narrator.bill(Bill::Reported);
        Story {
            screen: RefCell::new(Screen::new(*out)),
            narrator: RefCell::new(narrator),
            started: tokio::time::Instant::now(),
        }
    }

    /// A sentence of the demo's own.
    pub(super) fn say(&self, text: &str) {
        let seconds = self.started.elapsed().as_secs_f64();
        self.screen.borrow().say(&format!("{seconds:5.1}s  {text}"));
    }

    /// What is new about the job.
    pub(super) fn job(&self, job: &v1::JobView) {
        let now = words::now();
        for line in self.narrator.borrow_mut().tell(job, now) {
            self.say(&line);
        }
        self.screen.borrow_mut().status(&status(job, now));
    }

    /// Takes the moving line away.
    pub(super) fn end(&self) {
        // Nothing of a job was passed through this screen, so there is nothing to lose.
        let _ = self.screen.borrow_mut().finish();
    }
}
