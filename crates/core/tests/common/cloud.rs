//! The cloud: instances by launch key, each until somebody ends it. A key asked for twice is one instance.

use spotq_model::{EffectKey, GoneCause, InstanceId, InstanceSeen, NodeId, Pool, Timestamp};

#[derive(Debug, Default)]
pub struct Cloud {
    pub instances: Vec<InstanceSeen>,
    /// What the cloud will take back, and when.
    pub notices: Vec<(InstanceId, Timestamp)>,
}

impl Cloud {
    /// Its clock is not the scheduler's: what it says about `now` may be before it was asked.
    pub fn launch(
        &mut self,
        now: Timestamp,
        key: &EffectKey,
        node: Option<NodeId>,
        pool: &Pool,
    ) -> InstanceSeen {
        if let Some(known) = self.instances.iter().find(|i| i.key == *key) {
            return known.clone();
        }
        let number = self.instances.len() as u64 + 1;
        let made = InstanceSeen {
            instance: InstanceId(format!("i-{number}")),
            key: key.clone(),
            node,
            pool: pool.clone(),
            launched_at: Timestamp((now.0 + number % 2 * 100).saturating_sub(number * 700 % 3000)),
            gone: None,
            gone_at: None,
        };
        self.instances.push(made.clone());
        made
    }

    /// The first end is the one that counts.
    pub fn end(&mut self, instance: &InstanceId, cause: GoneCause, at: Timestamp) {
        if let Some(known) = self.instances.iter_mut().find(|i| i.instance == *instance && i.gone.is_none()) {
            known.gone = Some(cause);
            known.gone_at = Some(at);
        }
    }

    pub fn is_up(&self, instance: &InstanceId) -> bool {
        self.instances.iter().any(|i| i.instance == *instance && i.gone.is_none())
    }

    pub fn notice(&self, instance: &InstanceId) -> Option<Timestamp> {
        self.notices.iter().find(|(noticed, _)| noticed == instance).map(|(_, deadline)| *deadline)
    }

    /// Takes back what it said it would.
    pub fn reclaim(&mut self, now: Timestamp) -> Vec<InstanceId> {
        let over: Vec<InstanceId> =
            self.notices.iter().filter(|(_, deadline)| *deadline <= now).map(|(i, _)| i.clone()).collect();
        self.notices.retain(|(_, deadline)| *deadline > now);
        over.iter().for_each(|instance| self.end(instance, GoneCause::Preempted, now));
        over
    }
}
