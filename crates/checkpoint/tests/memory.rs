//! A push and a restore of a file much larger than the buffers, in a process of its own whose memory is read.

use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::Path;
use std::process::Command;

use spotq_checkpoint::conformance;
use spotq_checkpoint::{CHUNK_BYTES, JobKey, Options, Repository};
use spotq_model::Generation;

const CHILD: &str = "SPOTQ_TEST_CHECKPOINT_MEMORY";
const CHUNKS: u64 = 8;
/// What the process may take beside its buffers: the worker's own limit.
const BESIDE_BUFFERS: u64 = 30 << 20;

fn run_child(work: &Path) {
    let source = work.join("source");
    std::fs::create_dir(&source).expect("test directory");
    // Holes, but for one number in each chunk that makes it unlike the others: quick to write.
    let mut file = std::fs::File::create(source.join("model.bin")).expect("test file");
    for n in 0..CHUNKS {
        file.seek(SeekFrom::Start(n * CHUNK_BYTES as u64)).expect("test file");
        file.write_all(&(n + 1).to_le_bytes()).expect("test file");
    }
    file.set_len(CHUNKS * CHUNK_BYTES as u64).expect("test file");
    let url = format!("file://{}", work.join("store").display());
    let repo = Repository::from_url(&url, JobKey([5; 32]), [], Options::default()).expect("a good address");
    // As the worker runs it.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        repo.push(&source, &conformance::request(1, 1), &|_| {}).await.expect("push");
        repo.restore(&work.join("target"), Generation(1)).await.expect("restore");
    });
}

/// The most memory that this process ever had, in bytes.
fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("VmHWM is there");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number of kB") << 10
}

#[test]
fn memory_stays_within_two_chunks() {
    if let Some(work) = std::env::var_os(CHILD) {
        run_child(Path::new(&work));
        std::fs::write(Path::new(&work).join("peak"), peak_memory().to_string()).unwrap();
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "memory_stays_within_two_chunks"])
        .env(CHILD, work.path())
        .output()
        .unwrap();
    assert!(child.status.success(), "{child:?}");
    let peak: u64 = std::fs::read_to_string(work.path().join("peak")).unwrap().parse().unwrap();
    let buffers = 2 * CHUNK_BYTES as u64;
    assert!(peak > CHUNK_BYTES as u64, "a peak of {peak} bytes is not this process's");
    assert!(peak <= buffers + BESIDE_BUFFERS, "{peak} bytes are more than two chunks and {BESIDE_BUFFERS}");
    let restored = std::fs::metadata(work.path().join("target/model.bin")).unwrap();
    assert_eq!(restored.len(), CHUNKS * CHUNK_BYTES as u64);
}
