//! Streams between workers and schedulers. A stream keeps its order and loses nothing while it stands; it may break with
//! messages in it, and it may be half-open: both ends believe in it and nothing arrives.

use spotq_model::NodeId;

use crate::counts::Count;
use crate::scheduler::Msg;
use crate::worker::ToWorker;
use crate::world::{Ev, World};

/// How long the ends of a half-open stream believe in it.
const HALF_OPEN_MS: (u64, u64) = (5000, 60_000);
/// How soon a worker dials again.
const DIAL_AGAIN_MS: (u64, u64) = (200, 3000);

#[derive(Debug)]
pub(crate) struct Conn {
    inst: usize,
    worker_inc: u32,
    proc: usize,
    proc_inc: u32,
    open: bool,
    /// Nothing arrives any more.
    blocked: bool,
    /// Since when nothing arrives, if it does not.
    pub cut_at: u64,
    /// When the newest message of each direction arrives.
    to_scheduler_at: u64,
    to_worker_at: u64,
}

impl World {
    pub(crate) fn flows(&self, conn: usize) -> bool {
        self.conns[conn].open && !self.conns[conn].blocked
    }

    /// A worker looks for the leader. It may find one that was deposed and does not know.
    pub(crate) fn dial(&mut self, inst: usize, inc: u32) {
        let worker = &self.cloud.insts[inst].worker;
        if !worker.is(inc) || worker.conn.is_some() {
            return;
        }
        let again = self.rng.within(DIAL_AGAIN_MS.0, DIAL_AGAIN_MS.1);
        let lonely = self.cloud.insts[inst].worker.partitioned_until;
        if lonely > self.t {
            self.at(lonely + again, Ev::Dial { inst, inc });
            return;
        }
        let astray = !self.calm && self.rng.percent(10);
        let proc = if astray { self.rng.below(self.procs.len() as u64) as usize } else { self.leader };
        if self.procs[proc].core.is_none() {
            self.after(again, Ev::Dial { inst, inc });
            return;
        }
        let proc_inc = self.procs[proc].inc;
        let conn = self.conns.len();
        self.conns.push(Conn {
            inst,
            worker_inc: inc,
            proc,
            proc_inc,
            open: true,
            blocked: false,
            cut_at: self.t,
            to_scheduler_at: 0,
            to_worker_at: 0,
        });
        self.counts.add(Count::Dialled);
        let node = self.cloud.insts[inst].node;
        let worker = &mut self.cloud.insts[inst].worker;
        (worker.conn, worker.welcomed) = (Some(conn), false);
        let held = worker.held();
        self.send_to_scheduler(conn, Msg::Hello { conn, node, held });
    }

    pub(crate) fn send_to_scheduler(&mut self, conn: usize, msg: Msg) {
        if self.flows(conn) {
            let delay = self.rng.within(1, 60);
            let stream = &mut self.conns[conn];
            stream.to_scheduler_at = stream.to_scheduler_at.max(self.t + delay);
            let at = stream.to_scheduler_at;
            self.at(at, Ev::ToScheduler { conn, msg: Box::new(msg) });
        }
    }

    pub(crate) fn send_to_worker(&mut self, conn: usize, msg: ToWorker) {
        if self.flows(conn) {
            let delay = self.rng.within(1, 60);
            let stream = &mut self.conns[conn];
            stream.to_worker_at = stream.to_worker_at.max(self.t + delay);
            let at = stream.to_worker_at;
            self.at(at, Ev::ToWorker { conn, msg: Box::new(msg) });
        }
    }

    pub(crate) fn arrive_at_scheduler(&mut self, conn: usize, msg: Msg) {
        if self.flows(conn) {
            let who = (self.conns[conn].proc, self.conns[conn].proc_inc);
            self.inbox(who, msg);
        }
    }

    pub(crate) fn arrive_at_worker(&mut self, conn: usize, msg: ToWorker) {
        let (inst, inc) = (self.conns[conn].inst, self.conns[conn].worker_inc);
        let worker = &self.cloud.insts[inst].worker;
        if self.flows(conn) && worker.is(inc) && worker.conn == Some(conn) {
            self.worker_hears(inst, msg);
        }
    }

    /// The stream is over; both ends learn it soon.
    pub(crate) fn conn_break(&mut self, conn: usize) {
        let stream = &mut self.conns[conn];
        if !stream.open {
            return;
        }
        stream.open = false;
        if !stream.blocked {
            stream.cut_at = self.t;
        }
        let delay = self.rng.within(0, 1000);
        self.after(delay, Ev::Broken { conn });
    }

    /// Nothing arrives any more, and neither end knows.
    pub(crate) fn conn_half_open(&mut self, conn: usize) {
        let t = self.t;
        let stream = &mut self.conns[conn];
        if stream.open && !stream.blocked {
            (stream.blocked, stream.cut_at) = (true, t);
            let delay = self.rng.within(HALF_OPEN_MS.0, HALF_OPEN_MS.1);
            self.after(delay, Ev::Broken { conn });
        }
    }

    pub(crate) fn broken(&mut self, conn: usize) {
        let Conn { inst, worker_inc, proc, proc_inc, cut_at, .. } = self.conns[conn];
        self.conns[conn].open = false;
        let node: NodeId = self.cloud.insts[inst].node;
        if self.procs[proc].inc == proc_inc
            && let Some(core) = &mut self.procs[proc].core
            && core.sessions.get(&node) == Some(&conn)
        {
            core.sessions.remove(&node);
            let heard = core.heard.entry(node).or_insert(cut_at);
            *heard = (*heard).max(cut_at);
        }
        let worker = &mut self.cloud.insts[inst].worker;
        if worker.is(worker_inc) && worker.conn == Some(conn) {
            worker.conn = None;
            let again = self.rng.within(DIAL_AGAIN_MS.0, DIAL_AGAIN_MS.1);
            self.after(again, Ev::Dial { inst, inc: worker_inc });
        }
    }

    pub(crate) fn scheduler_conns_break(&mut self, proc: usize, inc: u32) {
        let ends = |conn: &&Conn| conn.open && conn.proc == proc && conn.proc_inc == inc;
        if !self.conns.iter().any(|conn| ends(&conn)) {
            return;
        }
        for conn in 0..self.conns.len() {
            if ends(&&self.conns[conn]) {
                self.conn_break(conn);
            }
        }
    }
}
