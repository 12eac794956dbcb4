//! Damaged files are named, never hidden, and what can be repaired is.

#![expect(clippy::unwrap_used, reason = "a test, helpers included, ends at the first surprise")]

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use spotq_model::Version;
use spotq_store::{ArchiveEntry, Recovered, Store, StoreError};
use spotq_store_sled::{SledOptions, SledStore};
use tempfile::TempDir;

const RECORDS: u64 = 400;

/// Two snapshots, a tail, large records, an archive.
async fn sample() -> (TempDir, PathBuf, Recovered) {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("store");
    let store = open(&dir).unwrap();
    let epoch = store.take_leadership().await.unwrap();
    for first in (0..RECORDS).step_by(4) {
        store.append(epoch, Version(first), (first..first + 4).map(record).collect()).await.unwrap();
        if first == 100 || first == 200 {
            store.snapshot(epoch, Version(first), vec![first as u8; 100_000]).await.unwrap();
        }
    }
    let entries = (0..40).map(|n| ArchiveEntry { key: format!("{n:03}"), value: vec![n; 500 * n as usize] });
    store.archive(entries.collect()).await.unwrap();
    let found = store.recover().await.unwrap();
    assert_eq!((found.first_version(), found.version()), (Version(200), Version(RECORDS)));
    drop(store);
    (temporary, dir, found)
}

fn record(number: u64) -> Vec<u8> {
    let size = if number.is_multiple_of(90) { 40_000 } else { 200 + number as usize };
    number.to_le_bytes().into_iter().cycle().take(size).collect()
}

fn open(dir: &Path) -> Result<SledStore, StoreError> {
    SledStore::open(dir, SledOptions::default())
}

async fn reopen(dir: &Path) -> Result<Recovered, StoreError> {
    open(dir)?.recover().await
}

#[track_caller]
fn assert_damaged<T: std::fmt::Debug>(result: Result<T, StoreError>, words: &str) {
    match result {
        Err(StoreError::Corrupt { .. }) => {
            let message = result.unwrap_err().to_string();
            assert!(message.contains(words), "`{message}` names `{words}`");
            assert!(message.contains("restore it from a backup"), "`{message}` says what to do");
            assert_eq!(message.matches("is damaged").count(), 1, "`{message}` says it once");
            assert!(!message.contains("backtrace"), "`{message}`");
        }
        other => panic!("expected damage to be reported, found {other:?}"),
    }
}

/// Changes sled's content behind the store's back.
fn edit(dir: &Path, change: impl FnOnce(&sled::Db)) {
    let db = sled::Config::new().path(dir.join("sled")).mode(sled::Mode::LowSpace).open().unwrap();
    change(&db);
    db.flush().unwrap();
    drop(db);
    wait_for_sled(&dir.join("sled"));
}

/// Threads of sled's may go on for a moment after its database was closed; its lock is free once they ended.
fn wait_for_sled(sled_dir: &Path) {
    let file = File::open(sled_dir.join("db")).unwrap();
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
}

fn last_record_key(db: &sled::Db) -> sled::IVec {
    db.scan_prefix(b"r").keys().next_back().unwrap().unwrap()
}

fn snap_file(dir: &Path) -> PathBuf {
    let names = fs::read_dir(dir.join("sled")).unwrap().map(|entry| entry.unwrap().path());
    names.into_iter().find(|path| path.file_name().unwrap().to_string_lossy().starts_with("snap.")).unwrap()
}

#[tokio::test]
async fn a_corrupt_summary_of_sled_is_set_aside_and_rebuilt() {
    let (_temporary, dir, before) = sample().await;
    let summary = reopen(&dir).await.map(|_| snap_file(&dir)).unwrap();
    let good = fs::read(&summary).unwrap();
    let mut flipped = good.clone();
    flipped[good.len() / 2] ^= 1;
    for (round, bad) in
        [vec![], good[..good.len() / 2].to_vec(), vec![0; good.len()], flipped].iter().enumerate()
    {
        let summary = snap_file(&dir);
        fs::write(&summary, bad).unwrap();
        assert_eq!(reopen(&dir).await.as_ref(), Ok(&before), "round {round}");
        let name = summary.file_name().unwrap().to_string_lossy().into_owned();
        let aside = fs::read_dir(dir.join("sled")).unwrap().filter(|entry| {
            let aside = entry.as_ref().unwrap().file_name().to_string_lossy().into_owned();
            aside.starts_with("corrupt-") && aside.ends_with(&name)
        });
        assert!(aside.count() > 0, "round {round}: the bad file is kept");
        let found = fs::read(dir.join(format!("old-{}-sled-before-opening", round + 1)).join(&name));
        assert_eq!(found.unwrap(), *bad, "round {round}: so is everything as it was found");
    }
}

#[tokio::test]
async fn damaged_bytes_in_the_data_file_are_noticed_or_do_not_matter() {
    let (_temporary, dir, before) = sample().await;
    let data = dir.join("sled/db");
    let good = fs::read(&data).unwrap();
    let mut noticed = 0;
    for offset in (0..good.len()).step_by(good.len() / 48) {
        let copy = tempfile::tempdir().unwrap();
        copy_tree(&dir, copy.path());
        let mut bytes = good.clone();
        bytes[offset] ^= 0x55;
        fs::write(copy.path().join("sled/db"), bytes).unwrap();
        match reopen(copy.path()).await {
            Ok(found) => assert_eq!(found, before, "a changed byte at {offset} changed what was read"),
            Err(StoreError::Corrupt { .. }) => noticed += 1,
            Err(other) => panic!("a changed byte at {offset}: {other}"),
        }
    }
    assert!(noticed > 0, "some of the bytes matter");
}

fn copy_of(dir: &Path) -> PathBuf {
    dir.join("sled-found-damaged")
}

/// sled's files and what is in them.
fn files(dir: &Path) -> BTreeMap<OsString, Vec<u8>> {
    wait_for_sled(dir);
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let files = entries.filter(|entry| entry.path().is_file());
    files.map(|entry| (entry.file_name(), fs::read(entry.path()).unwrap())).collect()
}

#[tokio::test]
async fn what_sled_would_drop_is_kept_and_named() {
    let (_temporary, dir, before) = sample().await;
    let data = dir.join("sled/db");
    let good = fs::read(&data).unwrap();
    // The records after the damage, of which sled drops all; the last one is a good witness.
    let witness = record(RECORDS - 1);
    let tail = good.windows(witness.len()).rposition(|bytes| bytes == witness).unwrap();
    let mut bad = good.clone();
    bad[tail / 2..tail / 2 + 8].iter_mut().for_each(|byte| *byte ^= 0x5a);
    fs::write(&data, &bad).unwrap();
    let original = files(&dir.join("sled"));
    // However often it is opened, the first copy stays.
    for round in 0..3 {
        let result = reopen(&dir).await;
        let place = copy_of(&dir);
        assert_damaged(
            result,
            &format!("a copy of sled's files from before it was opened is in {}", place.display()),
        );
        assert!(files(&place) == original, "round {round}: the copy is what was found");
    }
    assert!(
        fs::read(&data).unwrap() != bad,
        "sled rewrites what it finds damaged, or no copy would be needed"
    );
    let kept = fs::read(copy_of(&dir).join("db")).unwrap();
    assert_eq!(&kept[tail..tail + witness.len()], witness, "the last record is in the copy");
    // The bytes of a backup make the copy a whole store again, and what was damaged is still not removed.
    fs::remove_dir_all(dir.join("sled")).unwrap();
    copy_tree(&copy_of(&dir), &dir.join("sled"));
    fs::write(&data, &good).unwrap();
    assert_eq!(reopen(&dir).await.as_ref(), Ok(&before));
    assert!(!copy_of(&dir).exists());
    assert!(files(&dir.join("old-1-sled-found-damaged")) == original);
}

#[tokio::test]
async fn a_sound_store_is_opened_without_a_trace() {
    let (_temporary, dir, before) = sample().await;
    let names =
        || -> BTreeSet<_> { fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect() };
    let found = names();
    // A copy of an opening that was cut short, half made or whole, goes as well.
    for leftover in ["", "sled-before-opening.tmp", "sled-before-opening"] {
        if !leftover.is_empty() {
            copy_tree(&dir.join("sled"), &dir.join(leftover));
        }
        assert_eq!(reopen(&dir).await.as_ref(), Ok(&before));
        assert_eq!(names(), found, "after `{leftover}`");
    }
}

#[tokio::test]
async fn the_copy_of_an_opening_that_was_cut_short_is_the_better_one() {
    let (_temporary, dir, _) = sample().await;
    copy_tree(&dir.join("sled"), &dir.join("sled-before-opening"));
    let original = files(&dir.join("sled"));
    edit(&dir, |db| drop(db.remove(last_record_key(db)).unwrap()));
    assert_damaged(reopen(&dir).await, &copy_of(&dir).display().to_string());
    assert!(files(&copy_of(&dir)) == original);
}

#[tokio::test]
async fn damaged_settings_of_sled_are_written_again() {
    let (_temporary, dir, before) = sample().await;
    let settings = dir.join("sled/conf");
    let good = fs::read(&settings).unwrap();
    let summary = reopen(&dir).await.map(|_| snap_file(&dir)).unwrap();
    for offset in [0, 20, good.len() - 1] {
        let mut bad = good.clone();
        bad[offset] ^= 0x5a;
        fs::write(&settings, bad).unwrap();
        assert_eq!(reopen(&dir).await.as_ref(), Ok(&before), "offset {offset}");
        assert_eq!(fs::read(&settings).unwrap(), good, "offset {offset}");
    }
    let asides: BTreeSet<_> = files(&dir.join("sled"))
        .into_keys()
        .map(|name| name.into_string().unwrap())
        .filter(|name| name.starts_with("corrupt-"))
        .collect();
    let expected = ["corrupt-1-conf", "corrupt-2-conf", "corrupt-3-conf"].map(str::to_owned);
    assert_eq!(asides, BTreeSet::from(expected), "nothing else is set aside, not {}", summary.display());
}

#[tokio::test]
async fn a_good_summary_of_sled_stays_where_it_is_when_the_data_is_damaged() {
    let (_temporary, dir, _) = sample().await;
    edit(&dir, |db| {
        let key = last_record_key(db);
        let mut value = db.get(&key).unwrap().unwrap().to_vec();
        *value.last_mut().unwrap() ^= 1;
        db.insert(key, value).unwrap();
    });
    let found = files(&dir.join("sled"));
    assert!(found.keys().any(|name| name.to_string_lossy().starts_with("snap.")), "{:?}", found.keys());
    assert_damaged(reopen(&dir).await, "does not match its checksum");
    let left = files(&dir.join("sled"));
    // sled may have written a newer one in its place; then the old one is in the copy alone.
    assert!(left.keys().any(|name| name.to_string_lossy().starts_with("snap.")), "{:?}", left.keys());
    assert!(files(&copy_of(&dir)) == found);
}

#[tokio::test]
async fn a_lost_format_file_is_named_and_nothing_is_set_aside() {
    let (_temporary, dir, before) = sample().await;
    let format = dir.join("format");
    let line = fs::read_to_string(&format).unwrap();
    fs::remove_file(&format).unwrap();
    let found = files(&dir.join("sled"));
    for witness in ["acked", "blobs"] {
        let copy = tempfile::tempdir().unwrap();
        copy_tree(&dir, copy.path());
        if witness == "acked" {
            fs::remove_dir_all(copy.path().join("blobs")).unwrap();
        } else {
            fs::remove_file(copy.path().join("acked")).unwrap();
        }
        let result = reopen(copy.path()).await;
        assert_damaged(result, &format!("write the line `{}`", line.trim_end()));
        assert!(files(&copy.path().join("sled")) == found, "with `{witness}` alone: nothing was touched");
    }
    fs::write(&format, line).unwrap();
    assert_eq!(reopen(&dir).await, Ok(before), "what the message says helps");
}

#[tokio::test]
async fn one_message_names_all_damaged_files_of_records_and_putting_them_back_helps() {
    let (_temporary, dir, before) = sample().await;
    let blobs = [270, 360].map(|number| blob_path(&dir, &record(number)));
    for blob in &blobs {
        fs::write(blob, b"bad").unwrap();
    }
    for blob in &blobs {
        assert_damaged(reopen(&dir).await, &blob.display().to_string());
    }
    assert_damaged(
        reopen(&dir).await,
        "any backup with a file of this name has the right bytes; record 270 is in it",
    );
    fs::write(&blobs[0], record(270)).unwrap();
    fs::write(&blobs[1], record(360)).unwrap();
    assert_eq!(reopen(&dir).await, Ok(before));
}

#[tokio::test]
async fn a_record_that_is_not_as_written_is_named() {
    let (_temporary, dir, _) = sample().await;
    edit(&dir, |db| {
        let key = last_record_key(db);
        let mut value = db.get(&key).unwrap().unwrap().to_vec();
        *value.last_mut().unwrap() ^= 1;
        db.insert(key, value).unwrap();
    });
    assert_damaged(reopen(&dir).await, "does not match its checksum");
}

#[tokio::test]
async fn a_gap_in_the_log_is_named() {
    let (_temporary, dir, _) = sample().await;
    edit(&dir, |db| {
        let key = db.scan_prefix(b"r").keys().nth(20).unwrap().unwrap();
        db.remove(key).unwrap();
    });
    assert_damaged(reopen(&dir).await, "record");
}

#[tokio::test]
async fn a_lost_end_of_the_log_is_named() {
    let (_temporary, dir, _) = sample().await;
    edit(&dir, |db| drop(db.remove(last_record_key(db)).unwrap()));
    assert_damaged(reopen(&dir).await, "are missing");
}

#[tokio::test]
async fn a_lost_beginning_of_the_log_is_named() {
    let (_temporary, dir, _) = sample().await;
    edit(&dir, |db| {
        for key in db.scan_prefix(b"s").keys() {
            db.remove(key.unwrap()).unwrap();
        }
    });
    assert_damaged(reopen(&dir).await, "are missing");
}

#[tokio::test]
async fn a_missing_or_changed_file_of_a_large_record_is_named() {
    let (_temporary, dir, _) = sample().await;
    let blob = blob_path(&dir, &record(270));
    let good = fs::read(&blob).unwrap();
    for bad in [vec![1; good.len()], vec![]] {
        fs::write(&blob, bad).unwrap();
        assert_damaged(reopen(&dir).await, &blob.display().to_string());
    }
    fs::remove_file(&blob).unwrap();
    assert_damaged(reopen(&dir).await, "is missing");
}

#[tokio::test]
async fn a_bad_snapshot_falls_back_to_the_one_before_it() {
    let (_temporary, dir, _) = sample().await;
    fs::write(blob_path(&dir, &[200; 100_000]), b"not a snapshot").unwrap();
    let store = open(&dir).unwrap();
    let found = store.recover().await.unwrap();
    assert_eq!(found.first_version(), Version(100));
    assert_eq!(found.snapshot.as_ref().unwrap().bytes, vec![100; 100_000]);
    assert_eq!(found.records, (100..RECORDS).map(record).collect::<Vec<_>>());
    // The next snapshot repairs it.
    let epoch = store.take_leadership().await.unwrap();
    store.snapshot(epoch, Version(300), vec![30]).await.unwrap();
    drop(store);
    let found = reopen(&dir).await.unwrap();
    assert_eq!((found.first_version(), found.version()), (Version(300), Version(RECORDS)));
    assert!(!blob_path(&dir, &[200; 100_000]).exists(), "the bad snapshot is gone");
}

#[tokio::test]
async fn both_snapshots_bad_is_damage() {
    let (_temporary, dir, _) = sample().await;
    for version in [100, 200] {
        fs::remove_file(blob_path(&dir, &vec![version; 100_000])).unwrap();
    }
    let second = blob_path(&dir, &[200; 100_000]);
    assert_damaged(reopen(&dir).await, "are missing");
    assert_damaged(reopen(&dir).await, &format!("snapshot 200 cannot be read from {}", second.display()));
}

#[tokio::test]
async fn old_files_go_once_nothing_needs_them() {
    let (_temporary, dir, _) = sample().await;
    assert!(!blob_path(&dir, &record(0)).exists(), "record 0 is behind both snapshots");
    assert!(blob_path(&dir, &record(180)).exists(), "record 180 is behind one of them only");
    let stray = blob_path(&dir, b"stray");
    fs::create_dir_all(stray.parent().unwrap()).unwrap();
    fs::write(&stray, b"stray").unwrap();
    fs::write(dir.join("blobs/tmp-7"), b"half").unwrap();
    let archived = open(&dir).unwrap().archived("", 100).await.unwrap();
    assert!(!stray.exists() && !dir.join("blobs/tmp-7").exists(), "what a crash left is swept at the start");
    assert_eq!(archived.len(), 40, "the files of the archive stay");
}

fn blob_path(dir: &Path, content: &[u8]) -> PathBuf {
    let hash = blake3::hash(content).to_hex();
    dir.join("blobs").join(&hash.as_str()[..2]).join(hash.as_str())
}

fn copy_tree(from: &Path, to: &Path) {
    if from.join("db").exists() {
        wait_for_sled(from);
    }
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_tree(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}
