//! MemStore passes the suite, and fails when told to.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use spotq_model::Version;
use spotq_store::conformance::{self, Factory};
use spotq_store::{MemStore, Store, StoreError};

#[derive(Default)]
struct Stores(Mutex<BTreeMap<String, MemStore>>);

#[async_trait]
impl Factory for Stores {
    async fn open(&self, name: &str) -> Arc<dyn Store> {
        Arc::new(
            self.0
                .lock()
                .expect("no test panics while it holds the lock")
                .entry(name.to_owned())
                .or_default()
                .clone(),
        )
    }
}

#[tokio::test]
async fn passes_the_conformance_suite() {
    conformance::run(&Stores::default()).await;
}

#[tokio::test]
async fn an_injected_failure_writes_nothing_and_fails_what_is_behind_it() {
    let store = MemStore::new();
    let epoch = store.take_leadership().await.unwrap();
    store.fail_next_appends(1);
    let failed = store.append(epoch, Version(0), vec![vec![1]]);
    let behind = store.append(epoch, Version(1), vec![vec![2]]);
    assert!(matches!(failed.await, Err(StoreError::Failed { .. })));
    assert!(matches!(behind.await, Err(StoreError::Conflict { .. })));
    assert_eq!(store.append(epoch, Version(0), vec![vec![3]]).await, Ok(Version(1)));
    assert_eq!((store.recover().await.unwrap().records, store.appends()), (vec![vec![3]], 1));
}
