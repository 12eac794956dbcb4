//! Real processes that push and restore, killed with -9 at random moments (INV-02, INV-05, INV-06).
//!
//! The test binary runs itself again as the victim, told what to do by its environment.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use spotq_checkpoint::conformance::{self, Tree};
use spotq_checkpoint::{JobKey, Options, Pushed, Repository, Restore};
use spotq_model::Generation;

const ROUNDS: u64 = 25;
const VICTIM: &str = "SPOTQ_TEST_CHECKPOINT_VICTIM";
/// Each victim is killed at a moment up to this long after it began, in which it makes several steps.
const LONGEST_LIFE: Duration = Duration::from_millis(150);

fn open(work: &Path) -> Repository {
    let options = Options { chunk_bytes: 4096, ..Options::default() };
    let url = format!("file://{}", work.join("store").display());
    Repository::from_url(&url, JobKey([5; 32]), [], options).expect("a good address")
}

/// The files of a step follow from the step, so that a restored tree can be checked by itself.
fn write_step(dir: &Path, step: u64) {
    for (name, len) in [("a", 20_000), ("b", 9_000)] {
        let mut bytes = vec![0; len];
        blake3::Hasher::new()
            .update(&step.to_le_bytes())
            .update(name.as_bytes())
            .finalize_xof()
            .fill(&mut bytes);
        std::fs::write(dir.join(name), bytes).expect("test file");
    }
}

fn tree_of_step(work: &Path, step: u64) -> Vec<Vec<u8>> {
    let dir = work.join("expected");
    std::fs::create_dir_all(&dir).expect("test directory");
    write_step(&dir, step);
    contents(&dir)
}

fn contents(dir: &Path) -> Vec<Vec<u8>> {
    ["a", "b"].map(|name| std::fs::read(dir.join(name)).expect("both files are there")).to_vec()
}

/// Restores, then saves step after step, and says which ones are committed. Ends only by being killed.
async fn victim(work: &Path, generation: u64) {
    let repo = open(work);
    let dir = work.join("job");
    let mut step = match repo.restore(&dir, Generation(generation)).await.expect("restore") {
        Restore::Restored(restored) => restored.step.expect("every push has a step"),
        Restore::Nothing { .. } => 0,
    };
    loop {
        step += 1;
        write_step(&dir, step);
        match repo.push(&dir, &conformance::request(generation, step), &|_| {}).await.expect("push") {
            Pushed::Committed(_) => {
                let acknowledged = work.join(format!("ack-{step}"));
                std::fs::write(acknowledged, b"").expect("test file");
            }
            Pushed::Unchanged(head) => panic!("step {step} is not {head:?}"),
        }
    }
}

fn spawn(work: &Path, generation: u64) -> Child {
    Command::new(std::env::current_exe().expect("own program"))
        .args(["--exact", "a_killed_process_leaves_whole_checkpoints_only", "--nocapture"])
        .env(VICTIM, format!("{generation}:{}", work.display()))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("own program starts")
}

fn last_acknowledged(work: &Path) -> u64 {
    let names = std::fs::read_dir(work).expect("readable").map(|e| e.expect("readable").file_name());
    let steps = names.filter_map(|name| name.to_str()?.strip_prefix("ack-")?.parse().ok());
    steps.max().unwrap_or(0)
}

#[test]
fn a_killed_process_leaves_whole_checkpoints_only() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    if let Ok(told) = std::env::var(VICTIM) {
        let (generation, work) = told.split_once(':').unwrap();
        runtime.block_on(victim(Path::new(work), generation.parse().unwrap()));
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let work = work.path();
    for round in 1..=ROUNDS {
        let mut child = spawn(work, round);
        // A different moment in each round, the same ones in each run of the test.
        let life = LONGEST_LIFE.mul_f64(f64::from(blake3::hash(&round.to_le_bytes()).as_bytes()[0]) / 255.0);
        // On a slow machine most victims die before they commit; every third one is left alive until it has.
        let (begun, before) = (Instant::now(), last_acknowledged(work));
        while begun.elapsed() < life || (round % 3 == 1 && last_acknowledged(work) == before) {
            assert!(child.try_wait().unwrap().is_none(), "the victim ended by itself in round {round}");
            assert!(begun.elapsed() < Duration::from_secs(60), "nothing was committed in a minute");
            std::thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let acknowledged = last_acknowledged(work);
        let job = work.join("job");
        if job.exists() && !Tree::read(&job).is_empty() {
            // The victim may have been writing its own files; what a restore put there has both.
            assert_eq!(std::fs::read_dir(&job).unwrap().count(), 2, "round {round}: a partial tree");
        }
        let seen = work.join(format!("seen-{round}"));
        match runtime.block_on(open(work).pull(&seen, &|_| {})).unwrap() {
            Restore::Restored(restored) => {
                let step = restored.step.unwrap();
                assert!(
                    step >= acknowledged,
                    "round {round}: step {acknowledged} was committed, {step} came back"
                );
                assert!(restored.fell_back.is_empty(), "round {round}: {:?}", restored.fell_back);
                assert_eq!(
                    contents(&seen),
                    tree_of_step(work, step),
                    "round {round}: step {step} is not itself"
                );
            }
            Restore::Nothing { .. } => assert_eq!(acknowledged, 0, "round {round}"),
        }
        let report = runtime.block_on(open(work).verify()).unwrap();
        assert!(report.is_sound(), "round {round}: {report:?}");
    }
    assert!(last_acknowledged(work) >= ROUNDS / 3, "the victims lived long enough to commit");
}
