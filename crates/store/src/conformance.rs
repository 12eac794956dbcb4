//! What every store must do, as checks that each implementation runs in its own tests.
//!
//! A check panics with what it expected. Crashes of the process and of the machine are tested beside each durable
//! implementation, because they need a process of its own.

use std::sync::Arc;

use async_trait::async_trait;
use spotq_model::{Epoch, Version};

use crate::{ArchiveEntry, Recovered, Result, Store, StoreError};

/// How the suite gets at stores.
#[async_trait]
pub trait Factory: Send + Sync {
    /// Opens the store called `name` and creates it the first time. The suite drops every handle of a store before it
    /// opens it again, and then expects to find what was acknowledged.
    async fn open(&self, name: &str) -> Arc<dyn Store>;
}

/// Runs every check, each on a store of its own.
pub async fn run(factory: &dyn Factory) {
    starts_empty(factory).await;
    keeps_order(factory).await;
    refuses_a_wrong_version(factory).await;
    refuses_an_old_epoch(factory).await;
    epochs_grow_over_restarts(factory).await;
    pipelines_in_call_order(factory).await;
    fails_what_was_built_on_a_failure(factory).await;
    an_empty_append_only_checks(factory).await;
    keeps_records_of_all_sizes(factory).await;
    keeps_many_records(factory).await;
    an_append_is_all_or_nothing(factory).await;
    recovers_from_snapshot_and_tail(factory).await;
    a_snapshot_checks_epoch_and_version(factory).await;
    snapshots_of_all_sizes(factory).await;
    goes_on_over_many_snapshots(factory).await;
    dropping_a_large_record_keeps_its_twins(factory).await;
    archive_is_ordered_and_idempotent(factory).await;
    takes_appends_from_many_callers(factory).await;
}

async fn starts_empty(factory: &dyn Factory) {
    let store = factory.open("starts_empty").await;
    let found = recover(&store).await;
    assert_eq!(found, Recovered::default(), "a new store is empty");
    assert_eq!(found.version(), Version(0));
}

async fn keeps_order(factory: &dyn Factory) {
    let store = factory.open("keeps_order").await;
    let epoch = lead(&store).await;
    for n in 0..100_u64 {
        let version = done(store.append(epoch, Version(n), vec![record(n)]).await, "append");
        assert_eq!(version, Version(n + 1), "append returns the version after its last record");
    }
    drop(store);
    let found = recover(&factory.open("keeps_order").await).await;
    assert_eq!(
        found.records,
        (0..100).map(record).collect::<Vec<_>>(),
        "records come back in order after a restart"
    );
    assert_eq!(found.version(), Version(100));
}

async fn refuses_a_wrong_version(factory: &dyn Factory) {
    let store = factory.open("refuses_a_wrong_version").await;
    let epoch = lead(&store).await;
    done(store.append(epoch, Version(0), vec![record(0), record(1)]).await, "append");
    for expected in [0, 1, 3, u64::MAX] {
        let result = store.append(epoch, Version(expected), vec![record(9)]).await;
        assert_eq!(
            result,
            Err(StoreError::Conflict { expected: Version(expected), actual: Version(2) }),
            "an append that expects version {expected} of a store at 2"
        );
    }
    assert_eq!(
        recover(&store).await.records,
        vec![record(0), record(1)],
        "a refused append leaves nothing behind"
    );
    done(store.append(epoch, Version(2), vec![record(2)]).await, "append after a conflict");
}

async fn refuses_an_old_epoch(factory: &dyn Factory) {
    let store = factory.open("refuses_an_old_epoch").await;
    let old = lead(&store).await;
    done(store.append(old, Version(0), vec![record(0)]).await, "append of the leader");
    let new = lead(&store).await;
    assert!(new > old, "epoch {new} follows {old}");
    let fenced = StoreError::Fenced { epoch: old, by: new };
    assert_eq!(
        store.append(old, Version(1), vec![record(1)]).await,
        Err(fenced.clone()),
        "append of an old epoch"
    );
    assert_eq!(
        store.append(old, Version(1), vec![]).await,
        Err(fenced.clone()),
        "empty append of an old epoch"
    );
    assert_eq!(store.snapshot(old, Version(1), vec![1]).await, Err(fenced), "snapshot of an old epoch");
    done(store.append(new, Version(1), vec![record(1)]).await, "append of the new leader");
    let never = new.next();
    assert!(
        matches!(store.append(never, Version(2), vec![record(2)]).await, Err(StoreError::Fenced { .. })),
        "an epoch that nobody took does not lead"
    );
    let found = recover(&store).await;
    assert_eq!(found.records, vec![record(0), record(1)]);
    assert_eq!(found.snapshot, None);
}

async fn epochs_grow_over_restarts(factory: &dyn Factory) {
    let mut last = Epoch(0);
    for _ in 0..3 {
        let store = factory.open("epochs_grow").await;
        for _ in 0..2 {
            let epoch = lead(&store).await;
            assert!(epoch > last, "epoch {epoch} is above {last}");
            last = epoch;
        }
    }
}

async fn pipelines_in_call_order(factory: &dyn Factory) {
    let store = factory.open("pipelines").await;
    let epoch = lead(&store).await;
    let pending: Vec<_> = (0..500).map(|n| store.append(epoch, Version(n), vec![record(n)])).collect();
    // Awaited from the back: the order of the calls counts, not that of the waiting.
    for (n, pending) in pending.into_iter().enumerate().rev() {
        assert_eq!(pending.await, Ok(Version(n as u64 + 1)), "pipelined append {n}");
    }
    let dropped = store.append(epoch, Version(500), vec![record(500)]);
    drop(dropped);
    assert_eq!(
        recover(&store).await.records,
        (0..=500).map(record).collect::<Vec<_>>(),
        "an append goes on when its result is dropped, and recover sees all that was called before it"
    );
}

async fn fails_what_was_built_on_a_failure(factory: &dyn Factory) {
    let store = factory.open("fails_behind").await;
    let epoch = lead(&store).await;
    let good = store.append(epoch, Version(0), vec![record(0)]);
    let wrong = store.append(epoch, Version(7), vec![record(1)]);
    let behind = store.append(epoch, Version(8), vec![record(2)]);
    assert_eq!(good.await, Ok(Version(1)));
    assert!(matches!(wrong.await, Err(StoreError::Conflict { .. })));
    assert!(matches!(behind.await, Err(StoreError::Conflict { .. })), "an append behind a failed one fails");
    assert_eq!(recover(&store).await.records, vec![record(0)]);
}

async fn an_empty_append_only_checks(factory: &dyn Factory) {
    let store = factory.open("empty_append").await;
    let epoch = lead(&store).await;
    assert_eq!(store.append(epoch, Version(0), vec![]).await, Ok(Version(0)));
    done(store.append(epoch, Version(0), vec![vec![], vec![]]).await, "append of empty records");
    assert!(matches!(store.append(epoch, Version(0), vec![]).await, Err(StoreError::Conflict { .. })));
    drop(store);
    assert_eq!(recover(&factory.open("empty_append").await).await.records, vec![vec![], Vec::<u8>::new()]);
}

async fn keeps_records_of_all_sizes(factory: &dyn Factory) {
    const KIB: usize = 1024;
    let sizes = [0, 1, 300, 4095, 16 * KIB - 64, 16 * KIB - 1, 16 * KIB, 16 * KIB + 1, 128 * KIB, KIB * KIB];
    let records: Vec<_> = sizes.iter().map(|&size| noise(size)).collect();
    let store = factory.open("sizes").await;
    let epoch = lead(&store).await;
    done(store.append(epoch, Version(0), records.clone()).await, "append of all sizes at once");
    for (n, record) in records.iter().enumerate() {
        let expected = Version((records.len() + n) as u64);
        done(store.append(epoch, expected, vec![record.clone()]).await, "append of one size");
    }
    drop(store);
    let found = recover(&factory.open("sizes").await).await;
    assert_eq!(found.records.len(), 2 * records.len());
    for (n, found) in found.records.iter().enumerate() {
        assert!(*found == records[n % records.len()], "record {n} of {} bytes is as written", found.len());
    }
}

async fn keeps_many_records(factory: &dyn Factory) {
    const RECORDS: u64 = 20_000;
    let store = factory.open("many").await;
    let epoch = lead(&store).await;
    let mut pending = Vec::new();
    let mut version = 0;
    while version < RECORDS {
        let count = (version % 37) + 1;
        let batch = (version..version + count).map(record).collect();
        pending.push(store.append(epoch, Version(version), batch));
        version += count;
    }
    for pending in pending {
        done(pending.await, "one of many appends");
    }
    // And as many in a single append.
    done(
        store.append(epoch, Version(version), (version..2 * version).map(record).collect()).await,
        "a large append",
    );
    drop(store);
    let found = recover(&factory.open("many").await).await;
    assert_eq!(found.version(), Version(2 * version));
    assert!(found.records.into_iter().eq((0..2 * version).map(record)), "all records are as written");
}

async fn an_append_is_all_or_nothing(factory: &dyn Factory) {
    let store = factory.open("all_or_nothing").await;
    let epoch = lead(&store).await;
    let good = store.append(epoch, Version(0), vec![record(0), record(1), record(2)]);
    let wrong = store.append(epoch, Version(2), vec![record(3), record(4)]);
    let next = store.append(epoch, Version(3), vec![record(3)]);
    assert_eq!(good.await, Ok(Version(3)));
    assert!(matches!(wrong.await, Err(StoreError::Conflict { .. })), "2 is inside the append before it");
    assert_eq!(next.await, Ok(Version(4)), "one caller's conflict does not hold up another caller");
    let too_many = vec![Vec::new(); crate::MAX_APPEND_RECORDS + 1];
    assert!(matches!(store.append(epoch, Version(4), too_many).await, Err(StoreError::TooLarge { .. })));
    assert_eq!(recover(&store).await.records, (0..4).map(record).collect::<Vec<_>>());
}

async fn recovers_from_snapshot_and_tail(factory: &dyn Factory) {
    let store = factory.open("snapshot_and_tail").await;
    let epoch = lead(&store).await;
    done(store.append(epoch, Version(0), (0..10).map(record).collect()).await, "append");
    done(store.snapshot(epoch, Version(7), b"sum of 7".to_vec()).await, "snapshot inside an append");
    done(store.append(epoch, Version(10), vec![record(10)]).await, "append after a snapshot");
    drop(store);
    let store = factory.open("snapshot_and_tail").await;
    let found = recover(&store).await;
    assert_eq!(found.first_version(), Version(7));
    assert_eq!(found.snapshot.as_ref().map(|s| s.bytes.as_slice()), Some(b"sum of 7".as_slice()));
    assert_eq!(
        found.records,
        (7..11).map(record).collect::<Vec<_>>(),
        "exactly the records after the snapshot"
    );
    assert_eq!(found.version(), Version(11));
    // A snapshot at the very end leaves no tail, and numbering goes on.
    let epoch = lead(&store).await;
    done(store.snapshot(epoch, Version(11), b"sum of 11".to_vec()).await, "snapshot at the end");
    drop(store);
    let store = factory.open("snapshot_and_tail").await;
    let found = recover(&store).await;
    assert_eq!((found.first_version(), found.records.len()), (Version(11), 0));
    let epoch = lead(&store).await;
    assert_eq!(store.append(epoch, Version(11), vec![record(11)]).await, Ok(Version(12)));
}

async fn a_snapshot_checks_epoch_and_version(factory: &dyn Factory) {
    let store = factory.open("snapshot_checks").await;
    let epoch = lead(&store).await;
    done(store.append(epoch, Version(0), (0..4).map(record).collect()).await, "append");
    assert_eq!(
        store.snapshot(epoch, Version(5), vec![]).await,
        Err(StoreError::Conflict { expected: Version(5), actual: Version(4) }),
        "a snapshot cannot be ahead of the store"
    );
    done(store.snapshot(epoch, Version(3), b"three".to_vec()).await, "snapshot");
    done(store.snapshot(epoch, Version(2), b"two".to_vec()).await, "an older snapshot");
    done(store.snapshot(epoch, Version(3), b"again".to_vec()).await, "the same snapshot again");
    let found = recover(&store).await;
    assert_eq!(
        found.snapshot.map(|s| s.bytes),
        Some(b"three".to_vec()),
        "only a newer snapshot replaces one"
    );
    assert_eq!(found.records, vec![record(3)]);
}

async fn snapshots_of_all_sizes(factory: &dyn Factory) {
    let mut store = factory.open("snapshot_sizes").await;
    for (n, size) in [0, 1, 16 * 1024, 5 * 1024 * 1024].into_iter().enumerate() {
        let epoch = lead(&store).await;
        let version = Version(n as u64);
        done(store.append(epoch, version, vec![record(version.0)]).await, "append");
        done(store.snapshot(epoch, version.next(), noise(size)).await, "snapshot");
        drop(store);
        store = factory.open("snapshot_sizes").await;
        let bytes = recover(&store).await.snapshot.map(|s| s.bytes);
        assert!(bytes == Some(noise(size)), "a snapshot of {size} bytes comes back as written");
    }
}

async fn goes_on_over_many_snapshots(factory: &dyn Factory) {
    let mut version = 0;
    for round in 0..5 {
        let store = factory.open("many_snapshots").await;
        assert_eq!(
            recover(&store).await.version(),
            Version(version),
            "version at the start of round {round}"
        );
        let epoch = lead(&store).await;
        for _ in 0..6 {
            // A large record now and then, and the same one again later: what it shares must not be removed early.
            let large = noise(20_000 + (version % 2) as usize);
            let batch = vec![record(version), large, record(version + 2)];
            version = done(store.append(epoch, Version(version), batch).await, "append").0;
            done(store.snapshot(epoch, Version(version - 1), noise(version as usize)).await, "snapshot");
        }
        let found = recover(&store).await;
        assert_eq!(found.records, vec![record(version - 1)]);
        assert_eq!(found.snapshot.map(|s| s.bytes), Some(noise(version as usize)));
    }
}

async fn dropping_a_large_record_keeps_its_twins(factory: &dyn Factory) {
    let store = factory.open("twins").await;
    let epoch = lead(&store).await;
    let large = noise(50_000);
    for (version, record) in
        [large.clone(), record(1), large.clone(), record(3), record(4)].into_iter().enumerate()
    {
        done(store.append(epoch, Version(version as u64), vec![record]).await, "append");
    }
    let twin = ArchiveEntry { key: "twin".into(), value: large.clone() };
    done(store.archive(vec![twin.clone()]).await, "archive of the same bytes");
    // Two snapshots, because a store may keep what the one before the newest needs.
    for version in [1, 2] {
        done(store.snapshot(epoch, Version(version), vec![]).await, "snapshot behind the first of them");
    }
    drop(store);
    let store = factory.open("twins").await;
    assert!(
        recover(&store).await.records == [large, record(3), record(4)],
        "the second record is still there"
    );
    let epoch = lead(&store).await;
    for version in [4, 5] {
        done(store.snapshot(epoch, Version(version), vec![]).await, "snapshot behind both");
    }
    drop(store);
    let store = factory.open("twins").await;
    assert!(done(store.archived("", 9).await, "read of the archive") == [twin], "the archive keeps its own");
}

async fn archive_is_ordered_and_idempotent(factory: &dyn Factory) {
    let store = factory.open("archive").await;
    let entry = |n: u32, size: usize| ArchiveEntry { key: format!("task/{n:04}"), value: noise(size) };
    assert_eq!(done(store.archived("", 10).await, "read of an empty archive"), vec![]);
    let entries: Vec<_> = (0..50).map(|n| entry(n, n as usize * 1000)).collect();
    done(store.archive(entries.iter().rev().cloned().collect()).await, "archive");
    done(store.archive(entries[10..20].to_vec()).await, "archive of the same again");
    done(store.archive(vec![]).await, "archive of nothing");
    drop(store);
    let store = factory.open("archive").await;
    assert!(
        done(store.archived("", 100).await, "read all") == entries,
        "all entries, in the order of their keys"
    );
    assert!(
        done(store.archived("task/0010", 5).await, "read a page") == entries[10..15],
        "from a key, inclusive"
    );
    assert!(
        done(store.archived("task/00105", 1).await, "read between") == entries[11..12],
        "from between two keys"
    );
    assert_eq!(done(store.archived("task/9", 5).await, "read past the end"), vec![]);
    assert_eq!(done(store.archived("", 0).await, "read nothing"), vec![]);
    let odd = ArchiveEntry { key: "zz \u{1F680}\n".into(), value: vec![0xff, 0] };
    done(store.archive(vec![odd.clone()]).await, "archive of an odd key");
    assert_eq!(done(store.archived("u", 9).await, "read it back"), vec![odd.clone()]);
    let replaced = ArchiveEntry { value: noise(30_000), ..odd };
    done(store.archive(vec![replaced.clone()]).await, "archive replaces");
    assert!(done(store.archived("u", 9).await, "read it back") == vec![replaced]);
    let long = ArchiveEntry { key: "k".repeat(crate::MAX_ARCHIVE_KEY_BYTES + 1), value: vec![] };
    assert!(matches!(store.archive(vec![long]).await, Err(StoreError::TooLarge { .. })));
    assert_eq!(recover(&store).await, Recovered::default(), "the archive is not part of the log");
}

async fn takes_appends_from_many_callers(factory: &dyn Factory) {
    const CALLERS: u64 = 16;
    const EACH: u64 = 25;
    let store = factory.open("many_callers").await;
    let epoch = lead(&store).await;
    // Callers race for the next version; a loser reads the actual one from the error and tries again. Each round has
    // a winner, which bounds the tries.
    let callers = (0..CALLERS).map(|caller| {
        let store = Arc::clone(&store);
        async move {
            let mut version = Version(0);
            for n in 0..EACH {
                loop {
                    match store.append(epoch, version, vec![record(caller * EACH + n)]).await {
                        Ok(next) => break version = next,
                        Err(StoreError::Conflict { actual, .. }) => version = actual,
                        Err(error) => panic!("append of caller {caller} failed: {error}"),
                    }
                }
            }
        }
    });
    join_all(callers.collect()).await;
    let mut found = recover(&store).await.records;
    assert_eq!(found.len() as u64, CALLERS * EACH);
    found.sort_unstable();
    let mut all: Vec<_> = (0..CALLERS * EACH).map(record).collect();
    all.sort_unstable();
    assert_eq!(found, all, "each caller's records are there once");
}

/// Polls all futures until the last is done. Written out because this crate needs nothing else of `futures`.
async fn join_all<F: Future<Output = ()>>(futures: Vec<F>) {
    let mut futures: Vec<_> = futures.into_iter().map(Box::pin).collect();
    std::future::poll_fn(|context| {
        futures.retain_mut(|future| future.as_mut().poll(context).is_pending());
        if futures.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}

async fn lead(store: &Arc<dyn Store>) -> Epoch {
    done(store.take_leadership().await, "take leadership")
}

async fn recover(store: &Arc<dyn Store>) -> Recovered {
    done(store.recover().await, "recover")
}

fn done<T>(result: Result<T>, what: &str) -> T {
    result.unwrap_or_else(|error| panic!("{what} failed: {error}"))
}

/// A record of about 300 bytes, as a submit is, that differs for each `n`.
fn record(n: u64) -> Vec<u8> {
    let mut bytes = format!("record {n} ").into_bytes();
    bytes.extend(noise(250 + (n % 100) as usize));
    bytes
}

/// Bytes that do not compress and depend on `size` only.
fn noise(size: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64 ^ size as u64;
    (0..size)
        .map(|_| {
            // The multiplier and increment of Knuth's MMIX generator; the top byte is the best mixed one.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}
