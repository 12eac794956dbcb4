//! Users: they submit with a key of their own, ask again when no answer comes, and change their minds.

use spotq_model::{Input, JobId, Span};

use crate::counts::Count;
use crate::draw::Wish;
use crate::scheduler::Msg;
use crate::world::{Ev, World};

/// A client that hears nothing asks again after this.
const PATIENCE_MS: (u64, u64) = (3000, 15_000);

/// What a client is told.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Reply {
    Submitted(JobId),
    Wished(usize),
}

impl World {
    /// A client submits, for the first time or again.
    pub(crate) fn submit(&mut self, client: usize, tried: bool) {
        if self.d.jobs[client].answered.is_some() {
            return;
        }
        if tried {
            self.counts.add(Count::RequestRepeated);
        }
        self.request(client, || Msg::Submit { client });
        let patience = self.rng.within(PATIENCE_MS.0, PATIENCE_MS.1);
        self.after(patience, Ev::Submit { client, tried: true });
    }

    /// A client wants something of its job; it asks until it is told that it was heard.
    pub(crate) fn wish(&mut self, client: usize, wish: usize) {
        let patience = self.rng.within(PATIENCE_MS.0, PATIENCE_MS.1);
        let plan = &self.d.jobs[client];
        let Some(what) = plan.wishes.get(wish).map(|(_, what)| *what) else { return };
        if let Some(job) = plan.answered {
            if self.heard.contains(&(client, wish)) {
                return;
            }
            let input = match what {
                Wish::Cancel => Input::Cancel { job },
                Wish::Hold => Input::Hold { job },
                Wish::Release => Input::Release { job },
                Wish::Requeue => Input::Requeue { job },
                Wish::Drill(notice) => Input::Drill { job, notice: Span(notice) },
            };
            self.request(client, || Msg::Wish { client, wish, input: input.clone() });
        }
        self.after(patience, Ev::Wish { client, wish });
    }

    fn request(&mut self, _client: usize, msg: impl Fn() -> Msg) {
        let loss = self.d.faults.client_loss_ppm;
        let proc = self.leader;
        let who = (proc, self.procs[proc].inc);
        if self.procs[proc].core.is_none() {
            return;
        }
        if !self.calm && self.rng.chance(loss) {
            self.counts.add(Count::RequestLost);
            return;
        }
        let delay = self.rng.within(1, 200);
        self.tell(who, delay, msg());
        if !self.calm && self.rng.chance(loss) {
            self.counts.add(Count::RequestDoubled);
            let delay = self.rng.within(1, 30_000);
            self.tell(who, delay, msg());
        }
    }

    pub(crate) fn reply(&mut self, client: usize, reply: Reply) {
        if !self.calm && self.rng.chance(self.d.faults.client_loss_ppm) {
            self.counts.add(Count::AnswerLost);
            return;
        }
        let delay = self.rng.within(1, 200);
        self.after(delay, Ev::Reply { client, reply });
    }

    /// The client has it in writing.
    pub(crate) fn replied(&mut self, client: usize, reply: Reply) {
        match reply {
            Reply::Submitted(job) => {
                let known = self.d.jobs[client].answered.replace(job);
                if known.is_some_and(|known| known != job) {
                    let key = &self.d.jobs[client].client_key;
                    self.violated("INV-04", format!("`{key}` was told two jobs: {known:?} and {job}"));
                }
            }
            Reply::Wished(wish) => {
                self.heard.insert((client, wish));
                self.d.jobs[client].cancel_acked |= self.d.jobs[client].wishes[wish].1 == Wish::Cancel;
            }
        }
    }
}
