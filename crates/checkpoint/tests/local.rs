//! The suite on a local directory and in memory, and what only local stores can show.

use std::sync::Arc;

use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use spotq_checkpoint::conformance;

#[tokio::test]
async fn in_memory_store_passes_the_suite() {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    conformance::run(|| Arc::clone(&store)).await;
}

#[tokio::test]
async fn local_directory_passes_the_suite() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn ObjectStore> =
        Arc::new(LocalFileSystem::new_with_prefix(dir.path()).unwrap().with_fsync(true));
    conformance::run(|| Arc::clone(&store)).await;
}
