//! A scheduler with nothing to do does nothing.

use std::sync::Arc;
use std::time::Duration;

use spotq_engine::EngineConfig;
use spotq_store::MemStore;

use crate::common::World;

#[tokio::test]
async fn an_idle_engine_wakes_about_once_a_second() {
    let world = World::new("quiet");
    let config = EngineConfig {
        // Directly on the memory, and without polls, so that only the loop itself wakes the runtime.
        store: Arc::new(MemStore::new()),
        poll_every: Duration::from_secs(86_400),
        ..world.config()
    };
    tokio::time::pause();
    let alone = wakes_in_a_hundred_seconds().await;
    let engine = spotq_engine::start(config).await.unwrap();
    engine.handle.query(|_| ()).await.unwrap();
    let with_engine = wakes_in_a_hundred_seconds().await;
    engine.stop().await.unwrap();
    // The test itself wakes once a second. The engine may do the same, at other moments; a spin would be thousands.
    assert!(with_engine <= 3 * alone, "{with_engine} wakes with an engine, {alone} without");
}

async fn wakes_in_a_hundred_seconds() -> u64 {
    let metrics = tokio::runtime::Handle::current().metrics();
    let before = metrics.worker_park_count(0);
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    metrics.worker_park_count(0) - before
}
