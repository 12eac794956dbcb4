//! The scheduler's host: the real engine with its gRPC services, on a disk and a network that are simulated.

use std::sync::Arc;
use std::time::Duration;

use spotq_engine::{ClusterSecret, EngineConfig};
use turmoil::net::TcpListener;

use crate::cloud::SimCloud;
use crate::net::{self, PORT};
use crate::oracle::Oracle;
use crate::store::SimStore;
use crate::world::World;

/// How often workers show that they live.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// One life of the scheduler's process.
pub(crate) async fn run(world: World) -> turmoil::Result {
    let store = SimStore::open(&world);
    let config = {
        let cloud = Arc::new(SimCloud::new(&world));
        let inner = world.lock();
        EngineConfig {
            policies: inner.d.policies.clone(),
            store,
            provider: cloud,
            data_dir: inner.dir.join("scheduler"),
            checkpoint_root: "sim://checkpoints".into(),
            secret: ClusterSecret::new([7; 32]),
            server_url: net::server_url(),
            worker_env: std::collections::BTreeMap::new(),
            poll_every: Duration::from_millis(inner.d.poll_ms),
            heartbeat: HEARTBEAT,
            dead_man: Duration::from_millis(inner.d.dead_man_ms),
            snapshot_every: inner.d.snapshot_every,
        }
    };
    let mut engine = spotq_engine::start(config).await?;
    if let Ok(state) = engine.handle.query(|seen| seen.cluster.clone()).await {
        Oracle::recovered(&mut world.lock(), &state);
    }
    let listener = TcpListener::bind(("0.0.0.0", PORT)).await?;
    let served = spotq_engine::serve_incoming(&engine, net::incoming(listener), std::future::pending());
    // Dropped with the process: an orderly end would tell the connections in an order that is left to chance.
    let mut served = std::pin::pin!(served);
    tokio::select! {
        biased;
        ended = engine.failed() => {
            let inner = &mut *world.lock();
            if !inner.disk.broken {
                inner.violated("INV-12", format!("the engine ends by itself: {ended:?}"));
            }
            inner.say(|| format!("the scheduler ends: {ended:?}"));
        }
        served = &mut served => {
            world.lock().violated("INV-12", format!("the scheduler serves no more: {served:?}"));
        }
    }
    world.lock().scheduler_over = true;
    // The process is gone; the host waits to be started again.
    std::future::pending().await
}
