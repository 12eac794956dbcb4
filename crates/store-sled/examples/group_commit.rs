//! Prints how close the store comes to a bare sled group commit of the same bytes, keys and batches.
//!
//! `cargo run --release -p spotq-store-sled --example group_commit -- [CALLERS] [APPENDS] [DIR]`

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use spotq_model::Version;
use spotq_store::Store;
use spotq_store_sled::{BatchRecorder, SledOptions, SledStore, bare_group_commit};

/// As large as a submitted job.
const RECORD_BYTES: usize = 300;

/// Disks are moody; the median of a few rounds is not.
const ROUNDS: usize = 7;

#[expect(clippy::print_stdout, reason = "a benchmark that prints its result")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let callers: usize = arguments.next().map_or(Ok(128), |text| text.parse())?;
    let appends: usize = arguments.next().map_or(Ok(40_000), |text| text.parse())?;
    let dir = arguments.next().map_or_else(|| std::env::temp_dir().join("spotq-group-commit"), PathBuf::from);
    let runtime = tokio::runtime::Builder::new_multi_thread().build()?;

    let mut ratios = Vec::new();
    for round in 0..ROUNDS {
        let recorder = BatchRecorder::default();
        let options = SledOptions { recorder: Some(recorder.clone()), ..SledOptions::default() };
        let cache_bytes = options.cache_bytes;
        let store_dir = dir.join(format!("{}-{round}-store", std::process::id()));
        let bare_dir = dir.join(format!("{}-{round}-bare", std::process::id()));

        let store = Arc::new(SledStore::open(&store_dir, options)?);
        let seconds = runtime.block_on(drive(&store, callers, appends))?;
        drop(store);
        let mut batches = recorder.take();
        batches.retain(|batch| batch.iter().all(|(key, _)| key.starts_with(b"r")));
        std::fs::create_dir_all(&bare_dir)?;
        let bare = bare_group_commit(&bare_dir, &batches, cache_bytes)?.as_secs_f64();

        let (ours, best) = (appends as f64 / seconds, appends as f64 / bare);
        println!(
            "{callers} callers, {appends} appends of {RECORD_BYTES} B in {} commits: {ours:.0}/s, bare {best:.0}/s, ratio {:.2}",
            batches.len(),
            ours / best
        );
        std::fs::remove_dir_all(&store_dir)?;
        std::fs::remove_dir_all(&bare_dir)?;
        ratios.push(ours / best);
    }
    ratios.sort_by(f64::total_cmp);
    println!("median ratio {:.2}", ratios[ROUNDS / 2]);
    Ok(())
}

/// Each caller waits for its append before it makes the next one. Returns the seconds that took.
async fn drive(
    store: &Arc<SledStore>,
    callers: usize,
    appends: usize,
) -> Result<f64, Box<dyn std::error::Error>> {
    let epoch = store.take_leadership().await?;
    // The versions are given out in call order, as the engine does it.
    let next = Arc::new(Mutex::new(Version(0)));
    let start = Instant::now();
    let tasks: Vec<_> = (0..callers)
        .map(|caller| {
            let (store, next) = (Arc::clone(store), Arc::clone(&next));
            let mine = appends / callers + usize::from(caller < appends % callers);
            tokio::spawn(async move {
                for _ in 0..mine {
                    let pending = {
                        let mut next = next.lock().unwrap_or_else(PoisonError::into_inner);
                        let expected = *next;
                        *next = expected.next();
                        store.append(epoch, expected, vec![vec![caller as u8; RECORD_BYTES]])
                    };
                    pending.await?;
                }
                Ok::<_, spotq_store::StoreError>(())
            })
        })
        .collect();
    for task in tasks {
        task.await??;
    }
    Ok(start.elapsed().as_secs_f64())
}
