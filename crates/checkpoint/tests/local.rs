//! The suite on a local directory and in memory, and what only local stores can show. Time is virtual: the pauses between
//! tries take none.

use std::sync::Arc;

use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use spotq_checkpoint::conformance::{self, Tree};
use spotq_checkpoint::{CheckpointError, JobKey, Options, Pushed, Repository, Restore};
use spotq_model::Generation;

#[tokio::test(start_paused = true)]
async fn in_memory_store_passes_the_suite() {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    conformance::run(|| Arc::clone(&store)).await;
}

#[tokio::test(start_paused = true)]
async fn local_directory_passes_the_suite() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn ObjectStore> =
        Arc::new(LocalFileSystem::new_with_prefix(dir.path()).unwrap().with_fsync(true));
    conformance::run(|| Arc::clone(&store)).await;
}

/// The command line of `mount`, for tests that need a file system of their own.
struct Mounted(std::path::PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(&self.0).status();
    }
}

#[expect(clippy::print_stderr, reason = "a skipped test says why")]
fn mount_tmpfs(dir: &std::path::Path, options: &str) -> Option<Mounted> {
    let mut command = std::process::Command::new("mount");
    command.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(dir);
    match command.output() {
        Ok(output) if output.status.success() => Some(Mounted(dir.to_path_buf())),
        other => {
            eprintln!("skipped: a small file system cannot be mounted here (root is needed): {other:?}");
            None
        }
    }
}

fn open(dir: &std::path::Path) -> Repository {
    let url = format!("file://{}", dir.display());
    Repository::from_url(&url, JobKey([7; 32]), [], Options::default()).expect("a good address")
}

#[tokio::test(start_paused = true)]
async fn a_store_that_overwrites_is_refused_by_name() {
    let store: Arc<dyn ObjectStore> = Arc::new(conformance::Overwriting(Arc::new(InMemory::new())));
    let repo = conformance::repository(store, &"job".into());
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("model"), b"x").unwrap();
    for outcome in [
        repo.probe_put_if_absent().await,
        repo.fence(Generation(1)).await.map(|_| ()),
        repo.push(dir.path(), &conformance::request(1, 1), &|_| {}).await.map(|_| ()),
    ] {
        let error = outcome.unwrap_err();
        assert!(matches!(error, CheckpointError::Refused { .. }), "{error:?}");
        assert!(error.to_string().contains("Overwriting(InMemory)"), "{error}");
    }
    assert_eq!(repo.head().await.unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn a_full_disk_is_named_on_push_and_on_restore_and_the_old_head_stays() {
    let work = tempfile::tempdir().unwrap();
    let (small, source) = (work.path().join("small"), work.path().join("source"));
    std::fs::create_dir(&small).unwrap();
    std::fs::create_dir(&source).unwrap();
    let Some(_mounted) = mount_tmpfs(&small, "size=1m") else { return };
    let repo = open(&small.join("store"));
    std::fs::write(source.join("model"), b"small").unwrap();
    repo.push(&source, &conformance::request(1, 1), &|_| {}).await.unwrap();
    std::fs::write(source.join("model"), vec![1; 2 << 20]).unwrap();
    let error = repo.push(&source, &conformance::request(1, 2), &|_| {}).await.unwrap_err();
    assert!(matches!(error, CheckpointError::NoSpace { .. }), "{error:?}");
    assert_eq!(repo.head().await.unwrap().unwrap().step, Some(1));

    let roomy = open(&work.path().join("roomy"));
    roomy.push(&source, &conformance::request(1, 2), &|_| {}).await.unwrap();
    let error = roomy.restore(&small.join("job"), Generation(1)).await.unwrap_err();
    assert!(matches!(error, CheckpointError::NoSpace { .. }), "{error:?}");
    assert!(
        error.to_string().contains("the checkpoint needs"),
        "it is said before anything is written: {error}"
    );
    assert!(!small.join("job").exists());
}

#[tokio::test(start_paused = true)]
async fn a_read_only_store_and_a_read_only_target_are_named() {
    let work = tempfile::tempdir().unwrap();
    let (read_only, source) = (work.path().join("ro"), work.path().join("source"));
    std::fs::create_dir(&read_only).unwrap();
    std::fs::create_dir(&source).unwrap();
    std::fs::write(source.join("model"), b"x").unwrap();
    let Some(_mounted) = mount_tmpfs(&read_only, "ro,size=64m") else { return };
    let url = format!("file://{}", read_only.join("store").display());
    let error = Repository::from_url(&url, JobKey([7; 32]), [], Options::default()).unwrap_err();
    assert!(matches!(error, CheckpointError::Denied { .. }), "{error:?}");
    let error = open(&read_only).push(&source, &conformance::request(1, 1), &|_| {}).await.unwrap_err();
    assert!(matches!(error, CheckpointError::Denied { .. }), "{error:?}");
    let good = open(&work.path().join("store"));
    good.push(&source, &conformance::request(1, 1), &|_| {}).await.unwrap();
    let error = good.restore(&read_only.join("job"), Generation(1)).await.unwrap_err();
    assert!(matches!(error, CheckpointError::Denied { .. }), "{error:?}");
}

type Change<'a> = &'a (dyn Fn(&std::path::Path) + Send + Sync);

/// Changes the directory at the first sign of progress, in the middle of a push.
async fn push_while(change: impl Fn(&std::path::Path) + Send + Sync) -> Result<Pushed, CheckpointError> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    for name in ["a", "b"] {
        std::fs::write(dir.path().join(name), vec![name.as_bytes()[0]; 3000]).expect("test file");
    }
    let repo = conformance::repository(Arc::new(InMemory::new()), &"job".into());
    let done = std::sync::atomic::AtomicBool::new(false);
    let on_progress = |_| {
        if !done.swap(true, std::sync::atomic::Ordering::SeqCst) {
            change(dir.path());
        }
    };
    let outcome = repo.push(dir.path(), &conformance::request(1, 1), &on_progress).await;
    assert!(done.load(std::sync::atomic::Ordering::SeqCst), "the change happened during the push");
    if outcome.is_err() {
        assert_eq!(repo.head().await.expect("log is sound"), None, "nothing was committed");
    }
    outcome
}

#[tokio::test(start_paused = true)]
async fn files_that_change_during_a_push_are_not_committed() {
    let rewritten = |dir: &std::path::Path| std::fs::write(dir.join("a"), vec![9; 3000]).expect("test file");
    let truncated = |dir: &std::path::Path| std::fs::write(dir.join("b"), b"").expect("test file");
    let removed = |dir: &std::path::Path| std::fs::remove_file(dir.join("b")).expect("test file");
    let removed_first = |dir: &std::path::Path| std::fs::remove_file(dir.join("a")).expect("test file");
    let replaced = |dir: &std::path::Path| {
        std::fs::write(dir.join("new"), vec![b'a'; 3000]).expect("test file");
        std::fs::rename(dir.join("new"), dir.join("a")).expect("test file");
    };
    let linked = |dir: &std::path::Path| {
        std::fs::remove_file(dir.join("b")).expect("test file");
        std::os::unix::fs::symlink("a", dir.join("b")).expect("test link");
    };
    let changes: [(&str, Change<'_>); 6] = [
        ("a", &rewritten),
        ("b", &truncated),
        ("b", &removed),
        ("a", &removed_first),
        ("a", &replaced),
        ("b", &linked),
    ];
    for (name, change) in changes {
        match push_while(change).await {
            Err(CheckpointError::Changed { path }) => assert!(path.ends_with(name), "{path:?}"),
            other => panic!("expected Changed for {name}, got {other:?}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_file_that_appears_beside_a_checkpoint_does_not_disturb_it() {
    let outcome = push_while(|dir| std::fs::write(dir.join("next.tmp"), b"x").expect("test file")).await;
    assert!(matches!(outcome, Ok(Pushed::Committed(_))), "{outcome:?}");
}

#[tokio::test(start_paused = true)]
async fn nothing_to_restore_leaves_an_empty_directory_and_keeps_what_was_there() {
    let work = tempfile::tempdir().unwrap();
    let target = work.path().join("job");
    let repo = conformance::repository(Arc::new(InMemory::new()), &"job".into());
    let first = repo.restore(&target, Generation(1)).await.unwrap();
    assert_eq!(first, Restore::Nothing { fell_back: vec![], set_aside: None });
    assert!(target.is_dir());
    std::fs::write(target.join("mine"), b"x").unwrap();
    match repo.restore(&target, Generation(2)).await.unwrap() {
        Restore::Nothing { set_aside: Some(aside), .. } => {
            assert_eq!(std::fs::read(aside.join("mine")).unwrap(), b"x");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(std::fs::read_dir(&target).unwrap().count(), 0);
    let refused = repo.pull(work.path(), &|_| {}).await;
    assert!(matches!(refused, Err(CheckpointError::Invalid { .. })), "{refused:?}");
    let file = work.path().join("file");
    std::fs::write(&file, b"x").unwrap();
    for outcome in [repo.pull(&file, &|_| {}).await, repo.restore(&file, Generation(2)).await] {
        assert!(outcome.unwrap_err().to_string().contains("list"), "a file is nothing to restore into");
        assert_eq!(std::fs::read(&file).unwrap(), b"x");
    }
}

/// Polls a restore so many times, then drops it, then waits until work on other threads has ended too.
fn restore_with_polls(
    repo: &Repository,
    target: &std::path::Path,
    polls: u32,
) -> Option<Result<Restore, CheckpointError>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let mut left = polls;
        let mut restore = std::pin::pin!(repo.restore(target, Generation(1)));
        std::future::poll_fn(|cx| match restore.as_mut().poll(cx) {
            std::task::Poll::Ready(outcome) => std::task::Poll::Ready(Some(outcome)),
            std::task::Poll::Pending if left == 0 => std::task::Poll::Ready(None),
            std::task::Poll::Pending => {
                left -= 1;
                std::task::Poll::Pending
            }
        })
        .await
    })
}

#[test]
fn a_restore_that_is_cancelled_anywhere_shows_no_partial_tree() {
    let work = tempfile::tempdir().unwrap();
    let (source, target) = (work.path().join("source"), work.path().join("target"));
    std::fs::create_dir(&source).unwrap();
    std::fs::write(source.join("a"), vec![1; 5000]).unwrap();
    std::fs::write(source.join("b"), vec![2; 5000]).unwrap();
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let prefix = "job".into();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let pushing = conformance::repository(Arc::clone(&store), &prefix);
    runtime.block_on(pushing.push(&source, &conformance::request(1, 1), &|_| {})).unwrap();
    std::fs::create_dir(&target).unwrap();
    std::fs::write(target.join("before"), b"x").unwrap();
    let (before, whole) = (Tree::read(&target), Tree::read(&source));
    for polls in 1..1000 {
        let repo = conformance::repository(Arc::clone(&store), &prefix);
        let finished = restore_with_polls(&repo, &target, polls);
        let now = Tree::read(&target);
        if let Some(outcome) = finished {
            assert!(polls > 3, "a restore waits more than {polls} times");
            assert!(matches!(outcome, Ok(Restore::Restored(_))), "{outcome:?}");
            assert_eq!(now, whole);
            assert_eq!(
                std::fs::read_dir(work.path()).unwrap().count(),
                2,
                "nothing is left beside the target"
            );
            return;
        }
        assert!(now == before || now == whole, "cancelled after {polls} polls: {now:?}");
    }
    panic!("a restore never finished");
}

/// Two generations push and fence in any order, each with its own idea of the log (INV-02, INV-06).
fn interleaved(steps: &[(usize, bool)]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let prefix = "job".into();
        let dir = tempfile::tempdir().expect("a temporary directory");
        let repos = [(); 2].map(|()| conformance::repository(Arc::clone(&store), &prefix));
        let (mut newest, mut last_step) = (0, None);
        for (step, (writer, push)) in (1_u64..).zip(steps) {
            let generation = *writer as u64 + 1;
            std::fs::write(dir.path().join("model"), step.to_le_bytes()).expect("test file");
            let outcome = if *push {
                let request = conformance::request(generation, step);
                repos[*writer].push(dir.path(), &request, &|_| {}).await.map(|_| ())
            } else {
                repos[*writer].fence(Generation(generation)).await.map(|_| ())
            };
            match outcome {
                Ok(()) => {
                    assert!(generation >= newest, "generation {generation} wrote after {newest}");
                    newest = generation;
                    last_step = if *push { Some(step) } else { last_step };
                }
                Err(CheckpointError::Superseded { by }) => {
                    assert!(
                        by == Generation(newest) && generation < newest,
                        "{generation} superseded by {by}"
                    );
                }
                Err(e) => panic!("{e:?}"),
            }
            let head =
                conformance::repository(Arc::clone(&store), &prefix).head().await.expect("log is sound");
            assert_eq!(head.and_then(|head| head.step), last_step);
        }
    });
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]
    #[test]
    fn inv_02_06_two_generations_in_any_order(
        steps in proptest::collection::vec((0..2_usize, proptest::bool::weighted(0.8)), 1..12),
    ) {
        interleaved(&steps);
    }
}
