//! The clouds: one instance per launch key, refusals with a scope, lists that lag, notices of any length, prices that
//! move, and ends that nobody announced. What an instance costs and when it lived is true here and nowhere else.

use std::collections::BTreeMap;

use spotq_model::{
    EffectClass, EffectKey, Generation, GoneCause, Input, InstanceId, InstanceSeen, LaunchAnswer, Market,
    NodeId, Pool, Quote, Refusal, RefusalKind, Scope, Span, Timestamp, UsdPerHour,
};

use crate::counts::Count;
use crate::oracle::Oracle;
use crate::rng::Rng;
use crate::scheduler::Msg;
use crate::worker::Worker;
use crate::world::{Ev, World};

/// A list shows an instance that has ended for so long.
const LISTED_AFTER_END: u64 = 120_000;

#[derive(Debug, Default)]
pub(crate) struct Cloud {
    pub insts: Vec<Inst>,
    by_key: BTreeMap<EffectKey, usize>,
}

/// An instance and what runs on it.
#[derive(Debug)]
pub(crate) struct Inst {
    pub id: InstanceId,
    pub key: EffectKey,
    pub node: NodeId,
    pub pool: Pool,
    pub quote: Quote,
    pub launched_at: u64,
    pub expires_at: u64,
    pub gone: Option<(GoneCause, u64)>,
    /// It was told to end and has not yet.
    ending: bool,
    pub notice: Option<u64>,
    /// How much later lists show what is true.
    lag: u64,
    pub worker: Worker,
}

/// What a scheduler asks of a cloud.
#[derive(Debug)]
pub(crate) enum CloudCall {
    Launch { node: NodeId, key: EffectKey, pool: Pool, expires_at: u64 },
    Terminate { instance: InstanceId },
    Drill { node: NodeId, instance: InstanceId, notice: u64 },
}

/// What happens to an instance.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fate {
    Boot,
    /// The market wants it back, with this much warning.
    Reclaim(u64),
    Reclaimed,
    Withdrawn,
    Crash,
    Ended,
    Expire,
}

type Key = (EffectClass, NodeId, Generation);

impl Inst {
    pub(crate) fn is_up(&self) -> bool {
        self.gone.is_none()
    }
}

impl World {
    pub(crate) fn cloud_called(&mut self, who: (usize, u32), key: Key, call: CloudCall) {
        let answer = match call {
            CloudCall::Launch { node, key, pool, expires_at } => self.launch(node, key, pool, expires_at),
            CloudCall::Terminate { instance } => self.terminate(who.0, &instance),
            CloudCall::Drill { node, instance, notice } => Some(self.drill(node, &instance, notice)),
        };
        self.call_answered(who, key, answer);
    }

    fn launch(&mut self, node: NodeId, key: EffectKey, pool: Pool, expires_at: u64) -> Option<Input> {
        if let Some(known) = self.cloud.by_key.get(&key).copied() {
            self.counts.add(Count::LaunchRepeated);
            Oracle::launched_again(self, known, node, &pool);
            return Some(launched(&self.cloud.insts[known]));
        }
        Oracle::launching(self, node, &key, &pool);
        let refused =
            |refusal| Some(Input::LaunchAnswered { node, answer: LaunchAnswer::Refused { refusal } });
        if expires_at <= self.t {
            let (scope, message) = (Scope::Pool { pool }, "it would be born expired".into());
            let kind = RefusalKind::InvalidRequest;
            return refused(Refusal { kind, scope, cool_down: Span::secs(5), message });
        }
        if !self.calm && self.rng.chance(self.d.faults.refuse_ppm) {
            self.counts.add(Count::Refused);
            return refused(self.refusal(pool));
        }
        let unknown = !self.calm && self.rng.chance(self.d.faults.unknown_ppm);
        if unknown {
            self.counts.add(Count::LaunchUnknown);
            if self.rng.percent(50) {
                return None;
            }
        }
        let made = self.make(node, key, pool, expires_at);
        (!unknown).then(|| launched(&self.cloud.insts[made]))
    }

    fn refusal(&mut self, pool: Pool) -> Refusal {
        let cool_down = Span::secs(self.rng.within(2, 30));
        let (kind, scope, message) = match self.rng.below(6) {
            0 => {
                self.counts.add(Count::RefusedQuota);
                let (cloud, region, market) = (pool.cloud, pool.region, pool.market);
                let scope = Scope::RegionMarket { cloud, region, market };
                (RefusalKind::QuotaExceeded, scope, "quota of this region")
            }
            1 => (RefusalKind::PriceTooLow, Scope::Pool { pool }, "price above the offer"),
            2 => {
                let scope = Scope::Zone { cloud: pool.cloud, zone: pool.zone };
                (RefusalKind::InsufficientCapacity, scope, "zone is full")
            }
            3 => (RefusalKind::Denied, Scope::Cloud { cloud: pool.cloud }, "not allowed just now"),
            _ => (RefusalKind::InsufficientCapacity, Scope::Pool { pool }, "no capacity"),
        };
        Refusal { kind, scope, cool_down, message: message.into() }
    }

    fn make(&mut self, node: NodeId, key: EffectKey, pool: Pool, expires_at: u64) -> usize {
        let inst = self.cloud.insts.len();
        let offer = self.d.offers.iter().find(|offer| offer.pool == pool);
        let quote = offer.map(|offer| offer.quote.clone()).unwrap_or_else(|| unknown_price(self.t));
        let lag = self.rng.within(0, self.d.faults.list_lag_max);
        let spot = pool.market == Market::Spot;
        self.cloud.by_key.insert(key.clone(), inst);
        self.cloud.insts.push(Inst {
            id: InstanceId(format!("i-{inst}")),
            key,
            node,
            pool,
            quote,
            launched_at: self.t,
            expires_at,
            gone: None,
            ending: false,
            notice: None,
            lag,
            worker: Worker::default(),
        });
        self.at(expires_at, Ev::Fate { inst, fate: Fate::Expire });
        let boots = self.calm || !self.rng.chance(self.d.faults.node_crash_ppm / 2);
        if boots {
            let delay = self.rng.within(3000, 60_000);
            self.after(delay, Ev::Fate { inst, fate: Fate::Boot });
        }
        if !self.calm && spot && self.rng.chance(self.d.faults.notice_ppm) {
            let delay = self.rng.gap(150_000);
            let notice = notice_length(&mut self.rng);
            self.after(delay, Ev::Fate { inst, fate: Fate::Reclaim(notice) });
        }
        if !self.calm && self.rng.chance(self.d.faults.node_crash_ppm) {
            let delay = self.rng.gap(150_000);
            self.after(delay, Ev::Fate { inst, fate: Fate::Crash });
        }
        inst
    }

    fn terminate(&mut self, proc: usize, instance: &InstanceId) -> Option<Input> {
        let inst = number(instance)?;
        if self.cloud.insts.get(inst)?.is_up() {
            Oracle::terminating(self, inst);
            let slow = self.rng.percent(if self.calm { 30 } else { 60 });
            if slow {
                if !std::mem::replace(&mut self.cloud.insts[inst].ending, true) {
                    // Some clouds take minutes to end what they no longer hear: a zombie goes on meanwhile.
                    let long = !self.calm && self.rng.percent(50);
                    let delay =
                        if long { self.rng.within(30_000, 180_000) } else { self.rng.within(500, 30_000) };
                    self.after(delay, Ev::Fate { inst, fate: Fate::Ended });
                }
                return None;
            }
            self.end(inst, GoneCause::Terminated);
        }
        let at = self.clock(proc);
        Some(Input::InstanceGone { instance: instance.clone(), cause: GoneCause::Terminated, at })
    }

    fn drill(&mut self, node: NodeId, instance: &InstanceId, notice: u64) -> Input {
        let inst = number(instance).filter(|inst| {
            self.cloud.insts.get(*inst).is_some_and(|i| i.is_up() && i.pool.market == Market::Spot)
        });
        let error = match inst {
            Some(inst) => {
                self.reclaim(inst, notice);
                None
            }
            None => Some("only spot instances that are up can be interrupted".into()),
        };
        Input::DrillAnswered { node, error }
    }

    pub(crate) fn fate(&mut self, inst: usize, fate: Fate) {
        if !self.cloud.insts[inst].is_up() {
            return;
        }
        match fate {
            Fate::Boot => self.boot(inst),
            Fate::Reclaim(_) | Fate::Crash if self.calm => {}
            Fate::Reclaim(notice) => self.reclaim(inst, notice),
            Fate::Reclaimed => {
                let due = self.cloud.insts[inst].notice.is_some_and(|deadline| deadline <= self.t);
                if due {
                    self.end(inst, GoneCause::Preempted);
                }
            }
            Fate::Withdrawn => {
                if self.cloud.insts[inst].notice.take().is_some() {
                    self.counts.add(Count::NoticeWithdrawn);
                    self.show_notice(inst, None);
                }
            }
            Fate::Crash => {
                self.counts.add(Count::NodeCrash);
                self.end(inst, GoneCause::Crashed);
            }
            Fate::Ended => self.end(inst, GoneCause::Terminated),
            Fate::Expire => self.end(inst, GoneCause::Expired),
        }
    }

    fn reclaim(&mut self, inst: usize, notice: u64) {
        if notice == 0 {
            self.counts.add(Count::LostWithoutNotice);
            self.cloud.insts[inst].worker.touch();
            self.end(inst, GoneCause::Preempted);
            return;
        }
        self.counts.add(Count::Notice);
        let deadline = self.t + notice;
        self.cloud.insts[inst].notice = Some(deadline);
        self.at(deadline, Ev::Fate { inst, fate: Fate::Reclaimed });
        self.show_notice(inst, Some(deadline));
        match self.rng.below(10) {
            0 => {
                let delay = self.rng.below(notice);
                self.after(delay, Ev::Fate { inst, fate: Fate::Withdrawn });
            }
            1 => {
                self.counts.add(Count::NoticeDoubled);
                let moved = deadline + self.rng.below(20_000);
                self.cloud.insts[inst].notice = Some(moved);
                self.at(moved, Ev::Fate { inst, fate: Fate::Reclaimed });
                self.show_notice(inst, Some(moved));
            }
            _ => {}
        }
    }

    /// The end of an instance, whoever wanted it. What runs on it is gone at once.
    fn end(&mut self, inst: usize, cause: GoneCause) {
        self.trace.line(|| format!("i-{inst} is gone: {cause:?}"));
        self.worker_ends(inst, cause);
        self.cloud.insts[inst].gone = Some((cause, self.t));
        let news =
            Input::InstanceGone { instance: self.cloud.insts[inst].id.clone(), cause, at: Timestamp(self.t) };
        for proc in 0..self.procs.len() {
            if self.procs[proc].core.is_none() {
                continue;
            }
            if !self.calm && self.rng.chance(self.d.faults.news_loss_ppm) {
                self.counts.add(Count::NewsLost);
                continue;
            }
            let delay = self.rng.within(10, 5000);
            let inc = self.procs[proc].inc;
            self.tell((proc, inc), delay, Msg::Input(news.clone()));
        }
    }

    pub(crate) fn poll_offers(&mut self, proc: usize, inc: u32) {
        if self.procs[proc].inc == inc && self.procs[proc].core.is_some() {
            let offers = self.d.offers.clone();
            self.tell((proc, inc), 20, Msg::Offers(offers));
            self.after(self.d.poll_ms, Ev::PollOffers { proc, inc });
        }
    }

    pub(crate) fn poll_list(&mut self, proc: usize, inc: u32) {
        if self.procs[proc].inc != inc || self.procs[proc].core.is_none() {
            return;
        }
        self.after(self.d.poll_ms, Ev::PollList { proc, inc });
        if !self.calm && self.rng.chance(self.d.faults.cloud_loss_ppm) {
            self.counts.add(Count::CloudCallLost);
            return;
        }
        let instances: Vec<InstanceSeen> =
            self.cloud.insts.iter().filter_map(|inst| as_listed(inst, self.t)).collect();
        if self.d.faults.list_lag_max > 0 {
            self.counts.add(Count::ListLagged);
        }
        let input = Input::Instances { asked_at: self.clock(proc), instances };
        let delay = self.rng.within(10, 3000);
        self.tell((proc, inc), delay, Msg::Input(input));
    }

    /// A spot price moves; it may rise above the price on demand.
    pub(crate) fn move_price(&mut self) {
        self.counts.add(Count::PriceMoved);
        let pool = self.rng.below(self.d.offers.len() as u64) as usize;
        let price = UsdPerHour::nanos(self.rng.within(50_000_000, 1_300_000_000) as i64);
        let t = self.t;
        let offer = &mut self.d.offers[pool];
        if offer.pool.market == Market::Spot {
            (offer.quote.price, offer.quote.as_of) = (price, Timestamp(t));
        }
    }

    /// Prices at which every job can be placed.
    pub(crate) fn calm_prices(&mut self) {
        let t = self.t;
        for offer in self.d.offers.iter_mut().filter(|offer| offer.pool.market == Market::Spot) {
            (offer.quote.price, offer.quote.as_of) = (UsdPerHour::nanos(300_000_000), Timestamp(t));
        }
    }
}

fn launched(inst: &Inst) -> Input {
    let (instance, quote) = (inst.id.clone(), inst.quote.clone());
    let answer = LaunchAnswer::Launched { instance, quote, launched_at: Timestamp(inst.launched_at) };
    Input::LaunchAnswered { node: inst.node, answer }
}

fn as_listed(inst: &Inst, t: u64) -> Option<InstanceSeen> {
    if inst.launched_at + inst.lag > t {
        return None;
    }
    let gone = inst.gone.filter(|(_, at)| at + inst.lag <= t);
    if gone.is_some_and(|(_, at)| at + LISTED_AFTER_END < t) {
        return None;
    }
    Some(InstanceSeen {
        instance: inst.id.clone(),
        key: inst.key.clone(),
        node: Some(inst.node),
        pool: inst.pool.clone(),
        launched_at: Timestamp(inst.launched_at),
        gone: gone.map(|(cause, _)| cause),
        gone_at: gone.map(|(_, at)| Timestamp(at)),
    })
}

fn notice_length(rng: &mut Rng) -> u64 {
    match rng.below(6) {
        0 => 0,
        1 => rng.within(1, 5000),
        2 => 30_000,
        3 => 120_000,
        _ => rng.within(5000, 180_000),
    }
}

fn number(instance: &InstanceId) -> Option<usize> {
    instance.0.strip_prefix("i-")?.parse().ok()
}

fn unknown_price(t: u64) -> Quote {
    let price = UsdPerHour::nanos(1_000_000_000);
    Quote { price, on_demand: price, source: "sim".into(), as_of: Timestamp(t) }
}
