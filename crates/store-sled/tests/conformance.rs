//! The sled store passes the suite of every store.

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use spotq_store::Store;
use spotq_store::conformance::{self, Factory};
use spotq_store_sled::{SledOptions, SledStore};

struct Directories(PathBuf);

#[async_trait]
impl Factory for Directories {
    async fn open(&self, name: &str) -> Arc<dyn Store> {
        Arc::new(
            SledStore::open(&self.0.join(name), SledOptions::default()).expect("the suite opens good stores"),
        )
    }
}

#[tokio::test]
async fn passes_the_conformance_suite() {
    let dir = tempfile::tempdir().unwrap();
    conformance::run(&Directories(dir.path().to_owned())).await;
    // sled writes fragments above its limit to files that it never syncs. There must be none.
    for store in std::fs::read_dir(dir.path()).unwrap() {
        let fragments = store.unwrap().path().join("sled/blobs");
        assert_eq!(std::fs::read_dir(&fragments).unwrap().count(), 0, "files in {}", fragments.display());
    }
}
