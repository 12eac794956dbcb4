//! A full disk, a read-only directory, a directory in use and the like are named as such, and lose nothing.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test, helpers included, ends at the first surprise"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use spotq_model::Version;
use spotq_store::{Store, StoreError};
use spotq_store_sled::{SledOptions, SledStore};

fn open(dir: &Path) -> Result<SledStore, StoreError> {
    SledStore::open(dir, SledOptions::default())
}

fn record(number: u64) -> Vec<u8> {
    number.to_le_bytes().into_iter().cycle().take(3000).collect()
}

/// A file system in memory of a given size; unmounted at the end.
struct Tmpfs(PathBuf);

impl Tmpfs {
    /// None, and the reason on stdout, where that is not permitted.
    fn new(at: PathBuf, size: &str) -> Option<Self> {
        fs::create_dir_all(&at).unwrap();
        match run("mount", &["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs", at.to_str().unwrap()]) {
            Ok(()) => Some(Self(at)),
            Err(error) => {
                println!("skipped: cannot mount a tmpfs here: {error}");
                None
            }
        }
    }

    fn remount(&self, options: &str) {
        run("mount", &["-o", &format!("remount,{options}"), self.0.to_str().unwrap()]).unwrap();
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        run("umount", &["-l", self.0.to_str().unwrap()]).ok();
    }
}

fn run(program: &str, arguments: &[&str]) -> Result<(), String> {
    let output = Command::new(program).args(arguments).output().map_err(|error| error.to_string())?;
    if output.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
    }
}

/// Appends until the store refuses; returns the version that was acknowledged last and the refusal.
async fn fill(store: &SledStore) -> (u64, StoreError) {
    let epoch = store.take_leadership().await.unwrap();
    let mut version = store.recover().await.unwrap().version();
    // Many times what the small disks of these tests hold.
    for _ in 0..100_000 {
        match store.append(epoch, version, vec![record(version.0)]).await {
            Ok(next) => version = next,
            Err(error) => return (version.0, error),
        }
    }
    panic!("the disk did not fill up");
}

async fn assert_holds(store: &SledStore, version: u64) {
    let found = store.recover().await.unwrap().records;
    assert!(found.len() as u64 >= version, "acknowledged {version}, found {}", found.len());
    assert!(
        found.into_iter().eq((0..).map(record).take(found_len(store).await)),
        "all records are as written"
    );
}

async fn found_len(store: &SledStore) -> usize {
    store.recover().await.unwrap().records.len()
}

#[tokio::test]
async fn a_full_disk_is_refused_in_advance_and_the_store_goes_on_when_there_is_room() {
    let temporary = tempfile::tempdir().unwrap();
    let Some(disk) = Tmpfs::new(temporary.path().join("disk"), "24m") else { return };
    let filler = disk.0.join("filler");
    fs::write(&filler, vec![0; 8 << 20]).unwrap();
    let store = open(&disk.0.join("store")).unwrap();
    let (version, error) = fill(&store).await;
    assert!(matches!(error, StoreError::DiskFull { needed: 1.., .. }), "{error:?}");
    assert!(error.to_string().contains("is full; free at least"), "{error}");
    fs::remove_file(filler).unwrap();
    let epoch = store.take_leadership().await.unwrap();
    assert_eq!(store.append(epoch, Version(version), vec![record(version)]).await, Ok(Version(version + 1)));
    drop(store);
    // There is no room for a copy of sled's files now, and the store is opened nevertheless.
    fs::write(disk.0.join("filler"), vec![0; 6 << 20]).unwrap();
    assert_holds(&open(&disk.0.join("store")).unwrap(), version + 1).await;
    let left = fs::read_dir(disk.0.join("store")).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(left.into_iter().all(|name| !name.to_string_lossy().starts_with("sled-")), "nothing half made");
}

#[tokio::test]
async fn a_disk_that_fills_up_under_a_write_stops_the_store_and_loses_nothing() {
    let temporary = tempfile::tempdir().unwrap();
    let Some(disk) = Tmpfs::new(temporary.path().join("disk"), "12m") else { return };
    let dir = disk.0.join("store");
    let unchecked = SledOptions { min_free_bytes: 0, ..SledOptions::default() };
    let store = SledStore::open(&dir, unchecked).unwrap();
    let (version, error) = fill(&store).await;
    assert!(matches!(error, StoreError::DiskFull { .. }), "{error:?}");
    assert!(store.take_leadership().await.is_err(), "a store that failed to write stays stopped");
    assert!(store.recover().await.is_err(), "what it believes is not on the disk");
    drop(store);
    disk.remount("size=64m");
    let store = open(&dir).unwrap();
    assert_holds(&store, version).await;
    let epoch = store.take_leadership().await.unwrap();
    let actual = store.recover().await.unwrap().version();
    assert!(
        store.append(epoch, actual, vec![record(actual.0)]).await.is_ok(),
        "it goes on after the restart"
    );
}

#[tokio::test]
async fn no_room_for_a_large_record_or_a_snapshot_stops_nothing() {
    let temporary = tempfile::tempdir().unwrap();
    let Some(disk) = Tmpfs::new(temporary.path().join("disk"), "12m") else { return };
    let store = open(&disk.0.join("store")).unwrap();
    let epoch = store.take_leadership().await.unwrap();
    let large = vec![7; 20 << 20];
    let refused = store.append(epoch, Version(0), vec![record(0), large.clone()]).await;
    assert!(matches!(refused, Err(StoreError::DiskFull { .. })), "{refused:?}");
    assert_eq!(store.append(epoch, Version(0), vec![record(0)]).await, Ok(Version(1)));
    let refused = store.snapshot(epoch, Version(1), large).await;
    assert!(matches!(refused, Err(StoreError::DiskFull { .. })), "{refused:?}");
    assert_eq!(store.append(epoch, Version(1), vec![record(1)]).await, Ok(Version(2)));
}

#[tokio::test]
async fn a_read_only_place_is_named() {
    let temporary = tempfile::tempdir().unwrap();
    let Some(disk) = Tmpfs::new(temporary.path().join("disk"), "24m") else { return };
    drop(open(&disk.0.join("store")).unwrap());
    disk.remount("ro");
    for dir in ["store", "new"] {
        let error = open(&disk.0.join(dir)).unwrap_err();
        assert!(matches!(error, StoreError::ReadOnly { .. }), "{dir}: {error:?}");
        assert!(error.to_string().contains("cannot write to"), "{error}");
    }
}

#[test]
fn a_second_opener_is_told_who_is_in_the_way() {
    let temporary = tempfile::tempdir().unwrap();
    let store = open(temporary.path()).unwrap();
    let error = open(temporary.path()).unwrap_err();
    assert_eq!(error, StoreError::InUse { path: temporary.path().to_owned() });
    assert!(error.to_string().contains("is in use by another process"), "{error}");
    drop(store);
    open(temporary.path()).unwrap();
}

#[test]
fn another_process_cannot_open_a_store_in_use() {
    let temporary = tempfile::tempdir().unwrap();
    let _store = open(&temporary.path().join("store")).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_store-sled-writer"))
        .args([temporary.path().join("store"), temporary.path().join("acks")])
        .args(["1", "small", "device"])
        .output()
        .unwrap();
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("is in use by another process"), "{said}");
}

#[test]
fn a_file_in_the_place_of_the_directory_is_named() {
    let temporary = tempfile::tempdir().unwrap();
    let file = temporary.path().join("file");
    fs::write(&file, "x").unwrap();
    for dir in [file.clone(), file.join("below")] {
        assert!(matches!(open(&dir), Err(StoreError::NotADirectory { .. })), "{}", dir.display());
    }
}

#[test]
fn a_store_of_a_newer_format_is_left_alone() {
    let temporary = tempfile::tempdir().unwrap();
    drop(open(temporary.path()).unwrap());
    let format = temporary.path().join("format");
    fs::write(&format, "spotq store, sled 0.34, format 2\n").unwrap();
    assert!(matches!(open(temporary.path()), Err(StoreError::UnknownFormat { found: 2, known: 1, .. })));
    fs::write(&format, "something else").unwrap();
    assert!(matches!(open(temporary.path()), Err(StoreError::Corrupt { .. })));
}

#[test]
fn a_start_that_was_cut_short_is_set_aside() {
    let temporary = tempfile::tempdir().unwrap();
    fs::create_dir_all(temporary.path().join("sled")).unwrap();
    fs::write(temporary.path().join("sled/conf"), "").unwrap();
    open(temporary.path()).unwrap();
    assert!(temporary.path().join("unfinished-1-sled/conf").exists());
}

#[test]
fn a_lost_data_file_is_damage_and_not_a_new_store() {
    let temporary = tempfile::tempdir().unwrap();
    drop(open(temporary.path()).unwrap());
    fs::remove_file(temporary.path().join("sled/db")).unwrap();
    assert!(matches!(open(temporary.path()), Err(StoreError::Corrupt { .. })));
    fs::remove_dir_all(temporary.path().join("sled")).unwrap();
    assert!(matches!(open(temporary.path()), Err(StoreError::Corrupt { .. })));
}

#[tokio::test]
async fn a_caller_far_ahead_of_the_disk_is_refused_and_nothing_is_lost() {
    let temporary = tempfile::tempdir().unwrap();
    let store = open(temporary.path()).unwrap();
    let epoch = store.take_leadership().await.unwrap();
    let pending: Vec<_> = (0..60_000).map(|n| store.append(epoch, Version(n), vec![vec![1]])).collect();
    let (mut acknowledged, mut busy) = (0, 0);
    for pending in pending {
        match pending.await {
            Ok(version) => acknowledged = version.0,
            Err(StoreError::Busy { .. }) => busy += 1,
            Err(StoreError::Conflict { .. }) => assert!(busy > 0, "only behind a refused append"),
            Err(other) => panic!("{other}"),
        }
    }
    assert!(busy > 0, "the queue is bounded");
    assert_eq!(found_len(&store).await as u64, acknowledged);
}
