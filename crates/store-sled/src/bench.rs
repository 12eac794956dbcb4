//! What the disk and sled could do at best, to compare the store with: the same bytes under the same keys in the same
//! batches, with nothing around them. Used by benchmarks only.

use std::fs::File;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use spotq_store::Result;

use crate::failure::{io_error, sled_error, sync_data};
use crate::opening;

/// One group commit: keys and values.
pub type RecordedBatch = Vec<(Vec<u8>, Vec<u8>)>;

/// Keeps every group commit of a store that was opened with it. It grows without bound, so it is for benchmarks.
#[derive(Debug, Clone, Default)]
pub struct BatchRecorder(Arc<Mutex<Vec<RecordedBatch>>>);

impl BatchRecorder {
    /// What was written since the last call.
    #[must_use]
    pub fn take(&self) -> Vec<RecordedBatch> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn record(&self, batch: &[(Vec<u8>, Vec<u8>)]) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(batch.to_vec());
    }
}

/// Writes `batches` to a new sled in `dir` (which must be empty), each with `apply_batch`, `flush` and `fdatasync`,
/// and returns how long that took, without opening and closing.
pub fn bare_group_commit(dir: &Path, batches: &[RecordedBatch], cache_bytes: u64) -> Result<Duration> {
    let failed = |error: sled::Error| sled_error(dir, "write", &error);
    let db = opening::sled_config(dir, cache_bytes).open().map_err(failed)?;
    let path = dir.join(opening::SLED_FILE);
    let file = File::open(&path).map_err(|error| io_error(&path, "open", &error))?;
    sync_data(&file, &path);
    let start = Instant::now();
    for pairs in batches {
        let mut batch = sled::Batch::default();
        for (key, value) in pairs {
            batch.insert(key.as_slice(), value.as_slice());
        }
        db.apply_batch(batch).map_err(failed)?;
        db.flush().map_err(failed)?;
        sync_data(&file, &path);
    }
    Ok(start.elapsed())
}
