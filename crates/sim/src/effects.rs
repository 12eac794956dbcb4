//! What the state owes the world, carried out as the engine does it: one at a time for each key, again and again until the
//! state says that it is done. The process can die before each of them.

use spotq_core::due;
use spotq_model::{Effect, EffectClass, Generation, Input, NodeId};

use crate::cloud::CloudCall;
use crate::counts::Count;
use crate::scheduler::{Core, Crash, Flight, Msg};
use crate::worker::ToWorker;
use crate::world::{Ev, World};

/// As in the engine.
const CALL_TIMEOUT: u64 = 60_000;
const TELL_AGAIN: u64 = 1000;
const LOOK_AGAIN: u64 = 100;
const CALL_AGAIN: u64 = 200;
const CALL_AGAIN_MAX: u64 = 15_000;

/// Tells effects apart.
pub(crate) type Key = (EffectClass, NodeId, Generation);

impl World {
    pub(crate) fn effects(&mut self, who: (usize, u32), core: &mut Core) -> Result<(), Crash> {
        let owed = due(&core.c, self.clock(who.0));
        let keys: Vec<Key> = owed.iter().map(Effect::key).collect();
        core.flights.retain(|key, flight| flight.busy || keys.contains(key));
        for (effect, key) in owed.into_iter().zip(keys) {
            let t = self.t;
            let flight = core.flights.entry(key).or_insert(Flight { busy: false, not_before: t, tries: 0 });
            if flight.busy || flight.not_before > t {
                continue;
            }
            flight.tries += 1;
            let again = (CALL_AGAIN << (flight.tries.min(8) - 1)).min(CALL_AGAIN_MAX);
            self.may_crash(Count::CrashBetweenEffects)?;
            let told = self.start(who, core, effect);
            if let Some(flight) = core.flights.get_mut(&key) {
                (flight.busy, flight.not_before) = match told {
                    None => (true, t + again),
                    Some(true) => (false, t + TELL_AGAIN),
                    Some(false) => (false, t + LOOK_AGAIN),
                };
            }
        }
        Ok(())
    }

    /// `None`: a call to the cloud runs; else whether the worker was told.
    fn start(&mut self, who: (usize, u32), core: &Core, effect: Effect) -> Option<bool> {
        let key = effect.key();
        let call = match effect {
            Effect::Grant { node, task, generation } => {
                let spec = core.c.spec(task)?.clone();
                return Some(self.say(core, node, ToWorker::Grant { grant: (task, generation), spec }));
            }
            Effect::Stop { node, task, generation, why, deadline } => {
                let grant = (task, generation);
                return Some(self.say(core, node, ToWorker::Stop { grant, why, deadline: deadline.0 }));
            }
            Effect::Launch { node, key, pool, expires_at } => {
                CloudCall::Launch { node, key, pool, expires_at: expires_at.0 }
            }
            Effect::Terminate { instance, .. } => CloudCall::Terminate { instance },
            Effect::Drill { node, instance, notice } => CloudCall::Drill { node, instance, notice: notice.0 },
        };
        self.call(who, key, call);
        None
    }

    fn say(&mut self, core: &Core, node: NodeId, message: ToWorker) -> bool {
        match core.sessions.get(&node) {
            Some(conn) => {
                self.send_to_worker(*conn, message);
                true
            }
            None => false,
        }
    }

    /// A call runs beside the loop; whatever becomes of it, it is over after a while.
    fn call(&mut self, who: (usize, u32), key: Key, call: CloudCall) {
        let lost = !self.calm && self.rng.chance(self.d.faults.cloud_loss_ppm);
        if lost {
            self.counts.add(Count::CloudCallLost);
            self.tell(who, CALL_TIMEOUT, Msg::EffectOver(key));
        } else {
            let delay = self.rng.within(10, 2000);
            self.after(delay, Ev::Call { who, key, call: Box::new(call) });
        }
    }

    /// The cloud's answer on its way back.
    pub(crate) fn call_answered(&mut self, who: (usize, u32), key: Key, input: Option<Input>) {
        let faults = &self.d.faults;
        let (loss, late, double) = (faults.cloud_loss_ppm, faults.cloud_late_ppm, faults.cloud_double_ppm);
        if !self.calm && self.rng.chance(loss) {
            self.counts.add(Count::CloudAnswerLost);
            self.tell(who, CALL_TIMEOUT, Msg::EffectOver(key));
            return;
        }
        let late = !self.calm && self.rng.chance(late);
        let delay = if late { self.rng.within(5000, CALL_TIMEOUT) } else { self.rng.within(10, 500) };
        if late {
            self.counts.add(Count::CloudAnswerLate);
        }
        if let Some(input) = input {
            if !self.calm && self.rng.chance(double) {
                self.counts.add(Count::CloudAnswerDoubled);
                let again = delay + self.rng.within(1, 120_000);
                self.tell(who, again, Msg::Input(input.clone()));
            }
            self.tell(who, delay, Msg::Input(input));
        }
        self.tell(who, delay + 1, Msg::EffectOver(key));
    }
}
