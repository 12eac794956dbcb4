//! The cases of the suite. Each states one rule in its name.
//!
//! For tests only.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::sync::Arc;

use bytes::Bytes;
use futures::StreamExt as _;
use object_store::path::Path as ObjectPath;
use object_store::{ObjectStore, ObjectStoreExt as _, PutMode};
use spotq_model::Generation;

use super::faults::{Fault, Faulty};
use super::fixture::{Tree, noise, repository, request, write_state};
use crate::log::Action;
use crate::{CheckpointError, Committed, LogSeq, Pushed, Repository, Restore, Restored, fold};

type Place = (Arc<dyn ObjectStore>, ObjectPath);

pub(super) async fn the_probe_accepts_the_store((store, prefix): Place) {
    let repo = repository(store, &prefix);
    repo.probe_put_if_absent().await.expect("put-if-absent is honoured");
    repo.probe_put_if_absent().await.expect("a second probe says the same");
}

pub(super) async fn a_push_restores_bit_for_bit((store, prefix): Place) {
    let work = scratch();
    let source = work.path().join("source");
    write_state(&source, 1);
    fs::create_dir(source.join("empty")).expect("test directory is writable");
    fs::write(source.join("nothing"), b"").expect("test file is writable");
    fs::write(source.join(std::ffi::OsStr::from_bytes(b"not utf-8 \xff")), b"x").expect("writable");
    symlink("shards/optim.bin", source.join("latest")).expect("test link can be made");
    symlink("../model.bin", source.join("shards/up")).expect("test link can be made");
    fs::set_permissions(source.join("model.bin"), fs::Permissions::from_mode(0o640)).expect("own file");
    fs::set_permissions(source.join("empty"), fs::Permissions::from_mode(0o555)).expect("own directory");
    let repo = repository(Arc::clone(&store), &prefix);
    let committed = push(&repo, &source, 1, 10).await;
    assert_eq!((committed.step, committed.bytes_total), (Some(10), 5701));

    // Another attempt, on a machine that has leftovers of its own.
    let target = work.path().join("target");
    fs::create_dir(&target).expect("test directory is writable");
    fs::write(target.join("leftover"), b"of an older attempt").expect("test file is writable");
    let restored = restore(&repository(store, &prefix), &target, 2).await;
    assert_eq!((restored.checkpoint, restored.step), (committed.checkpoint, Some(10)));
    assert_eq!(Tree::read(&target), Tree::read(&source), "restored is what was pushed, and nothing else");
    let beside: Vec<_> =
        fs::read_dir(work.path()).expect("readable").map(|e| e.expect("readable").file_name()).collect();
    assert_eq!(beside.len(), 2, "nothing is left beside the target: {beside:?}");
}

pub(super) async fn an_unchanged_directory_is_not_committed_twice((store, prefix): Place) {
    let work = scratch();
    write_state(work.path(), 1);
    let repo = repository(Arc::clone(&store), &prefix);
    let first = push(&repo, work.path(), 1, 10).await;
    let before = repo.entries().await.expect("log is readable").len();
    for repo in [&repo, &repository(store, &prefix)] {
        match repo.push(work.path(), &request(1, 11), &|_| {}).await {
            Ok(Pushed::Unchanged(head)) => assert_eq!(head.checkpoint, first.checkpoint),
            other => panic!("expected Unchanged, got {other:?}"),
        }
        assert_eq!(repo.entries().await.expect("log is readable").len(), before);
    }
}

pub(super) async fn unchanged_chunks_are_not_uploaded_again((store, prefix): Place) {
    let work = scratch();
    write_state(work.path(), 1);
    let repo = repository(store, &prefix);
    let first = push(&repo, work.path(), 1, 1).await;
    assert_eq!(first.bytes_uploaded, 5700);
    fs::write(work.path().join("shards/optim.bin"), noise(77, 700)).expect("test file is writable");
    let second = push(&repo, work.path(), 1, 2).await;
    assert_eq!(second.bytes_uploaded, 700, "only the changed file is uploaded");
    let target = work.path().with_extension("target");
    let restored = restore(&repo, &target, 1).await;
    assert_eq!(restored.step, Some(2));
    assert_eq!(Tree::read(&target), Tree::read(work.path()));
    fs::remove_dir_all(target).expect("own directory");
}

/// Two repositories that have read the same log and then both commit.
pub(super) async fn two_writers_race_and_both_commit((store, prefix): Place) {
    let work = scratch();
    let dirs = [work.path().join("a"), work.path().join("b")];
    write_state(&dirs[0], 1);
    write_state(&dirs[1], 2);
    let repos = [repository(Arc::clone(&store), &prefix), repository(Arc::clone(&store), &prefix)];
    for repo in &repos {
        repo.fence(Generation(1)).await.expect("fence");
    }
    let (a, b) = tokio::join!(push(&repos[0], &dirs[0], 1, 1), push(&repos[1], &dirs[1], 1, 2));
    assert_ne!(a.log_seq, b.log_seq);
    assert_ne!(a.checkpoint, b.checkpoint);
    let entries = repository(store, &prefix).entries().await.expect("log is sound");
    let commits = entries.iter().filter(|e| matches!(e.action, Action::Commit { .. })).count();
    assert_eq!((commits, entries.len()), (2, 3), "one fence, two commits, no gap");
}

pub(super) async fn one_number_has_one_winner((store, prefix): Place) {
    let path = ObjectPath::from(format!("{prefix}/log/00000000000000000001.json"));
    let writers = (0..16_u8).map(|n| {
        let (store, path) = (Arc::clone(&store), path.clone());
        async move { store.put_opts(&path, vec![n].into(), PutMode::Create.into()).await.is_ok() }
    });
    let won = futures::future::join_all(writers).await.into_iter().filter(|won| *won).count();
    assert_eq!(won, 1, "exactly one of 16 writers wins a number");
}

pub(super) async fn a_zombie_is_superseded((store, prefix): Place) {
    let work = scratch();
    write_state(work.path(), 1);
    let zombie = repository(Arc::clone(&store), &prefix);
    let good = push(&zombie, work.path(), 1, 10).await;
    let heir = repository(store, &prefix);
    let head = heir.fence(Generation(2)).await.expect("fence").expect("a head");
    assert_eq!(head.checkpoint, good.checkpoint);
    write_state(work.path(), 2);
    let by = |outcome: Result<(), CheckpointError>| match outcome {
        Err(CheckpointError::Superseded { by }) => by,
        other => panic!("expected Superseded, got {other:?}"),
    };
    let pushed = zombie.push(work.path(), &request(1, 20), &|_| {}).await.map(|_| ());
    assert_eq!(by(pushed), Generation(2));
    assert_eq!(by(zombie.fence(Generation(1)).await.map(|_| ())), Generation(2));
    assert_eq!(by(zombie.quarantine(Generation(1), good.checkpoint, "no").await), Generation(2));
    let target = work.path().join("target");
    assert_eq!(by(zombie.restore(&target, Generation(1)).await.map(|_| ())), Generation(2));
    assert_eq!(heir.head().await.expect("log is sound").expect("a head").checkpoint, good.checkpoint);
}

/// Whichever conditional write of a fence, a push or a quarantine loses its answer, it counts once.
pub(super) async fn a_lost_answer_is_settled_by_the_nonce((store, prefix): Place) {
    for nth in 0..5 {
        let work = scratch();
        write_state(work.path(), nth);
        let prefix = prefix.clone().join(format!("{nth}"));
        let flaky = Faulty::new(Arc::clone(&store), Fault::AnswerLost(nth));
        let repo = repository(flaky, &prefix);
        let committed = push(&repo, work.path(), 1, 10).await;
        repo.quarantine(Generation(1), committed.checkpoint, "test").await.expect("quarantine");
        let entries = repository(Arc::clone(&store), &prefix).entries().await.expect("log is sound");
        let kinds: Vec<_> = entries.iter().map(|e| std::mem::discriminant(&e.action)).collect();
        assert_eq!(kinds.len(), 3, "lost answer {nth}: each entry is there once: {entries:?}");
        assert_eq!(fold(&entries).head(), None);
    }
}

pub(super) async fn a_corrupt_chunk_falls_back((store, prefix): Place) {
    let replaced = |store: Arc<dyn ObjectStore>, path: ObjectPath| async move {
        store.put(&path, Bytes::from_static(b"not what it was").into()).await.expect("test damage");
    };
    falls_back(Arc::clone(&store), prefix.clone().join("replaced"), "chk", replaced).await;
    falls_back(store, prefix.join("flipped"), "chk", flip_a_bit).await;
}

pub(super) async fn a_missing_chunk_falls_back((store, prefix): Place) {
    let damage = |store: Arc<dyn ObjectStore>, path: ObjectPath| async move {
        store.delete(&path).await.expect("test damage");
    };
    falls_back(store, prefix, "chk", damage).await;
}

pub(super) async fn a_bad_manifest_falls_back((store, prefix): Place) {
    let missing = |store: Arc<dyn ObjectStore>, path: ObjectPath| async move {
        store.delete(&path).await.expect("test damage");
    };
    falls_back(Arc::clone(&store), prefix.clone().join("missing"), "man", missing).await;
    let truncated = |store: Arc<dyn ObjectStore>, path: ObjectPath| async move {
        let bytes = store.get(&path).await.expect("readable").bytes().await.expect("readable");
        store.put(&path, bytes.slice(..bytes.len() / 2).into()).await.expect("test damage");
    };
    falls_back(Arc::clone(&store), prefix.clone().join("truncated"), "man", truncated).await;
    let tampered = |store: Arc<dyn ObjectStore>, path: ObjectPath| async move {
        let bytes = store.get(&path).await.expect("readable").bytes().await.expect("readable");
        let text = String::from_utf8(bytes.to_vec()).expect("JSON");
        let bad = text.replace("model.bin", "nodel.bin");
        assert_ne!(bad, text);
        store.put(&path, bad.into_bytes().into()).await.expect("test damage");
    };
    falls_back(store, prefix.join("tampered"), "man", tampered).await;
}

/// Two checkpoints; an object of the newer one is damaged; a restore takes the older one and says so, the
/// damaged one is quarantined, and `pull`, which may not write, passes over it as well.
async fn falls_back<D, F>(store: Arc<dyn ObjectStore>, prefix: ObjectPath, kind: &str, damage: D)
where
    D: Fn(Arc<dyn ObjectStore>, ObjectPath) -> F,
    F: Future<Output = ()>,
{
    let work = scratch();
    let (source, target) = (work.path().join("source"), work.path().join("target"));
    write_state(&source, 1);
    let writer = repository(Arc::clone(&store), &prefix);
    let old = push(&writer, &source, 1, 10).await;
    let old_tree = Tree::read(&source);
    let before = list(&store, &prefix, kind).await;
    write_state(&source, 2);
    let new = push(&writer, &source, 1, 20).await;
    let after = list(&store, &prefix, kind).await;
    let victim =
        after.into_iter().find(|path| !before.contains(path)).expect("the new checkpoint has objects");
    damage(Arc::clone(&store), victim.clone()).await;

    let reader = repository(Arc::clone(&store), &prefix);
    match reader.pull(&work.path().join("pulled"), &|_| {}).await.expect("pull") {
        Restore::Restored(pulled) => assert_eq!(pulled.checkpoint, old.checkpoint),
        other => panic!("expected the older checkpoint, got {other:?}"),
    }
    let restored = restore(&reader, &target, 2).await;
    assert_eq!((restored.checkpoint, restored.step), (old.checkpoint, Some(10)));
    assert_eq!(restored.fell_back.len(), 1);
    assert_eq!(restored.fell_back[0].checkpoint, new.checkpoint);
    let object = &restored.fell_back[0].object;
    assert!(victim.as_ref().ends_with(object.as_str()), "{victim} is named, not {object}");
    assert_eq!(Tree::read(&target), old_tree);
    let head = repository(store, &prefix).head().await.expect("log is sound").expect("a head");
    assert_eq!(head.checkpoint, old.checkpoint, "the damaged checkpoint is quarantined for everybody");
    write_state(&source, 2);
    let again = push(&reader, &source, 2, 20).await;
    assert!(again.checkpoint > new.checkpoint, "numbers are not used twice");
    assert_eq!(restore(&reader, &target, 2).await.step, Some(20), "what was lost can be pushed again");
}

/// Dies at each call of a push in turn. The old head counts until the new one does; never anything else.
pub(super) async fn a_push_that_dies_leaves_the_old_head((store, prefix): Place) {
    let work = scratch();
    let source = work.path().join("source");
    for dead_from in 0.. {
        let prefix = prefix.clone().join(format!("{dead_from}"));
        write_state(&source, 1);
        let old = push(&repository(Arc::clone(&store), &prefix), &source, 1, 10).await;
        let old_tree = Tree::read(&source);
        write_state(&source, 2);
        let dying = Faulty::new(Arc::clone(&store), Fault::DeadFrom(dead_from));
        let counted = Arc::clone(&dying);
        let outcome = repository(dying, &prefix).push(&source, &request(1, 20), &|_| {}).await;
        let target = work.path().join("target");
        let restored = restore(&repository(Arc::clone(&store), &prefix), &target, 2).await;
        match outcome {
            Ok(Pushed::Committed(new)) => {
                assert_eq!(restored.checkpoint, new.checkpoint);
                assert!(dead_from > 5, "a push takes more calls than {dead_from}");
                assert!(counted.calls() <= dead_from, "the last round had no fault");
                return;
            }
            Ok(Pushed::Unchanged(_)) => panic!("the directory did change"),
            Err(CheckpointError::Unavailable { .. }) if restored.checkpoint == old.checkpoint => {
                assert_eq!(Tree::read(&target), old_tree, "dead from call {dead_from}");
            }
            // The commit succeeded, but the machine died before it knew.
            Err(CheckpointError::Unavailable { .. }) => assert_eq!(Tree::read(&target), Tree::read(&source)),
            Err(e) => panic!("dead from call {dead_from}: {e:?}"),
        }
    }
}

/// Dies at each call of a restore in turn: the directory holds what it held before, or all of the checkpoint.
pub(super) async fn a_restore_that_dies_shows_no_partial_tree((store, prefix): Place) {
    let work = scratch();
    let (source, target) = (work.path().join("source"), work.path().join("target"));
    write_state(&source, 1);
    push(&repository(Arc::clone(&store), &prefix), &source, 1, 10).await;
    fs::create_dir(&target).expect("test directory is writable");
    fs::write(target.join("before"), b"as it was").expect("test file is writable");
    let before = Tree::read(&target);
    for dead_from in 0.. {
        let dying = Faulty::new(Arc::clone(&store), Fault::DeadFrom(dead_from));
        match repository(dying, &prefix).restore(&target, Generation(1)).await {
            Ok(Restore::Restored(_)) => {
                assert!(dead_from > 5, "a restore takes more calls than {dead_from}");
                assert_eq!(Tree::read(&target), Tree::read(&source));
                break;
            }
            Err(CheckpointError::Unavailable { .. }) => {
                assert_eq!(Tree::read(&target), before, "dead from call {dead_from}");
            }
            other => panic!("dead from call {dead_from}: {other:?}"),
        }
    }
    let entries = repository(store, &prefix).entries().await.expect("log is sound");
    let quarantined = entries.iter().any(|e| matches!(e.action, Action::Quarantine { .. }));
    assert!(!quarantined, "a network that fails is not damage");
}

pub(super) async fn verify_names_every_damage((store, prefix): Place) {
    let work = scratch();
    write_state(work.path(), 1);
    let repo = repository(Arc::clone(&store), &prefix);
    push(&repo, work.path(), 1, 10).await;
    let report = repo.verify().await.expect("verify");
    assert!(report.is_sound(), "{report:?}");
    assert_eq!((report.log_entries, report.files, report.bytes), (2, 2, 5700));
    let mut chunks = list(&store, &prefix, "chk").await;
    let (missing, bad) = (chunks.remove(0), chunks.remove(0));
    store.delete(&missing).await.expect("test damage");
    flip_a_bit(Arc::clone(&store), bad.clone()).await;
    let report = repository(store, &prefix).verify().await.expect("verify");
    let named =
        |path: &ObjectPath| report.findings.iter().filter(|f| path.as_ref().ends_with(&f.object)).count();
    assert_eq!((named(&missing), named(&bad), report.findings.len()), (1, 1, 2), "{report:?}");
}

pub(super) async fn a_damaged_log_is_named((store, prefix): Place) {
    let work = scratch();
    write_state(work.path(), 1);
    push(&repository(Arc::clone(&store), &prefix), work.path(), 1, 10).await;
    let object = LogSeq(1).object();
    let path = ObjectPath::from(format!("{prefix}/{object}"));
    let good = store.get(&path).await.expect("readable").bytes().await.expect("readable");
    let garbage = [
        Bytes::from_static(b""),
        Bytes::from_static(b"{}"),
        good.slice(..good.len() - 1),
        Bytes::from(
            String::from_utf8(good.to_vec()).expect("JSON").replace("\"generation\":1", "\"generation\":0"),
        ),
    ];
    for bytes in garbage {
        store.put(&path, bytes.into()).await.expect("test damage");
        match repository(Arc::clone(&store), &prefix).head().await {
            Err(CheckpointError::Corrupt { object: named, .. }) => assert_eq!(named, object),
            other => panic!("expected Corrupt, got {other:?}"),
        }
        let report = repository(Arc::clone(&store), &prefix).verify().await.expect("verify");
        assert_eq!(report.findings.first().map(|f| f.object.as_str()), Some(object.as_str()));
    }
    store.delete(&path).await.expect("test damage");
    match repository(Arc::clone(&store), &prefix).head().await {
        Err(CheckpointError::Corrupt { object: named, .. }) => assert_eq!(named, object),
        other => panic!("expected Corrupt, got {other:?}"),
    }
    store.put(&path, good.into()).await.expect("repair");
    repository(store, &prefix).head().await.expect("sound again").expect("a head");
}

/// An entry of another history of the same job: well signed, rightly numbered, but out of the chain.
pub(super) async fn a_spliced_log_is_named((store, prefix): Place) {
    let work = scratch();
    let histories = [prefix.clone().join("one"), prefix.join("two")];
    for (seed, history) in (1..).zip(&histories) {
        write_state(work.path(), seed);
        push(&repository(Arc::clone(&store), history), work.path(), 1, 10).await;
    }
    let object = LogSeq(2).object();
    let [one, two] = histories.clone().map(|history| ObjectPath::from(format!("{history}/{object}")));
    let foreign = store.get(&two).await.expect("readable").bytes().await.expect("readable");
    store.put(&one, foreign.into()).await.expect("test damage");
    match repository(store, &histories[0]).head().await {
        Err(CheckpointError::Corrupt { object: named, .. }) => assert_eq!(named, object),
        other => panic!("expected Corrupt, got {other:?}"),
    }
}

async fn flip_a_bit(store: Arc<dyn ObjectStore>, path: ObjectPath) {
    let bytes = store.get(&path).await.expect("readable").bytes().await.expect("readable");
    let mut flipped = bytes.to_vec();
    flipped[0] ^= 1;
    store.put(&path, flipped.into()).await.expect("test damage");
}

fn scratch() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary directory can be made")
}

async fn push(repo: &Repository, dir: &std::path::Path, generation: u64, step: u64) -> Committed {
    match repo.push(dir, &request(generation, step), &|_| {}).await {
        Ok(Pushed::Committed(committed)) => committed,
        other => panic!("expected a commit of step {step}, got {other:?}"),
    }
}

async fn restore(repo: &Repository, dir: &std::path::Path, generation: u64) -> Restored {
    match repo.restore(dir, Generation(generation)).await {
        Ok(Restore::Restored(restored)) => restored,
        other => panic!("expected a restored checkpoint, got {other:?}"),
    }
}

async fn list(store: &Arc<dyn ObjectStore>, prefix: &ObjectPath, kind: &str) -> Vec<ObjectPath> {
    let below = ObjectPath::from(format!("{prefix}/{kind}"));
    let mut paths: Vec<_> =
        store.list(Some(&below)).map(|meta| meta.expect("store can be listed").location).collect().await;
    paths.sort();
    paths
}
