//! Asks the cloud for its instances and prices, and passes on its news.

use std::time::Duration;

use spotq_model::{Input, InstanceSeen};
use spotq_provider::{Instance, InstanceState};
use tokio::sync::broadcast::error::RecvError;
use tokio_util::sync::CancellationToken;

use crate::clock::now;
use crate::handle::{Msg, Shared};

/// Refusals of a poll in a row before it is said at warning level; one is an everyday thing.
const REFUSALS_TO_WARN: u32 = 5;

/// Prices, every `poll_every`.
pub(crate) async fn offers(shared: Shared, stop: CancellationToken) {
    let mut refused = 0_u32;
    let mut first = true;
    while wait(&shared, &stop, &mut first).await {
        match shared.config.provider.offers().await {
            Ok(offers) => {
                refused = 0;
                shared.handle.tell(Msg::Offers(offers)).await;
            }
            Err(refusal) => {
                refused += 1;
                if refused == REFUSALS_TO_WARN {
                    tracing::warn!(%refusal.kind, refusal.message, "no prices from the cloud");
                }
            }
        }
    }
}

/// Instances, every `poll_every`: finds orphans and nodes that vanished (INV-03).
pub(crate) async fn instances(shared: Shared, stop: CancellationToken) {
    let mut refused = 0_u32;
    let mut first = true;
    while wait(&shared, &stop, &mut first).await {
        let asked_at = now();
        match shared.config.provider.list_owned(&shared.config.policies.cluster).await {
            Ok(instances) => {
                refused = 0;
                let instances = instances.into_iter().map(seen).collect();
                shared.handle.input(Input::Instances { asked_at, instances }).await;
            }
            Err(refusal) => {
                refused += 1;
                if refused == REFUSALS_TO_WARN {
                    tracing::warn!(%refusal.kind, refusal.message, "no list of instances from the cloud");
                }
            }
        }
    }
}

/// News of instances that are gone, as they come. What is missed here is found by `instances`.
pub(crate) async fn changes(shared: Shared, stop: CancellationToken) {
    let mut news = shared.config.provider.changes();
    loop {
        let change = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            change = news.recv() => change,
        };
        match change {
            Ok(change) => {
                if let InstanceState::Gone { cause, at } = change.state {
                    shared.handle.input(Input::InstanceGone { instance: change.instance, cause, at }).await;
                }
            }
            Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => return,
        }
    }
}

fn seen(instance: Instance) -> InstanceSeen {
    let (gone, gone_at) = match instance.state {
        InstanceState::Gone { cause, at } => (Some(cause), Some(at)),
        InstanceState::Pending | InstanceState::Running | InstanceState::Ending => (None, None),
    };
    InstanceSeen {
        instance: instance.instance,
        key: instance.key,
        node: instance.node,
        pool: instance.pool,
        launched_at: instance.launched_at,
        gone,
        gone_at,
    }
}

/// Waits for the next round (not before the first); false when it is time to stop.
async fn wait(shared: &Shared, stop: &CancellationToken, first: &mut bool) -> bool {
    let pause = if std::mem::take(first) { Duration::ZERO } else { shared.config.poll_every };
    tokio::select! {
        biased;
        () = stop.cancelled() => false,
        () = tokio::time::sleep(pause) => true,
    }
}
