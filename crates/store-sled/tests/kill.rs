//! kill -9 at any moment loses nothing that was acknowledged.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test, helpers included, ends at the first surprise"
)]

mod common;

use common::records::Load;
use common::{Writer, check};

#[tokio::test]
async fn forty_kills_of_one_store_lose_no_acknowledged_record() {
    kill_again_and_again(Load::Mixed, 40).await;
}

#[tokio::test]
async fn kills_lose_nothing_while_sled_reuses_its_segments() {
    kill_again_and_again(Load::Small, 20).await;
}

async fn kill_again_and_again(load: Load, rounds: u64) {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("store");
    let acks = temporary.path().join("acks");
    // What is random is the moment of the kill; the number only spreads the moments.
    let seed = u64::from(std::process::id());
    println!("seed {seed}");
    let mut highest = 0;
    for round in 0..rounds {
        let random = (seed ^ round).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
        let mut writer = Writer::start(&dir, &acks, [1, 8, 64, 200][round as usize % 4], load, "device");
        if round % 5 == 4 {
            // While it opens the store and repairs what the last kill left.
            writer.wait_until("opening", |acks| acks.opening == round + 1);
        } else {
            let wanted = writer.acks().version + 1 + random % 400;
            writer.wait_until("acknowledgements", |acks| acks.version >= wanted);
        }
        writer.child.kill().unwrap();
        writer.child.wait().unwrap();
        let acked = writer.acks();
        let version = check(&dir, load, &acked)
            .await
            .unwrap_or_else(|lost| panic!("seed {seed}, round {round}: {lost}"));
        assert!(version >= highest, "round {round}: the store went back from {highest} to {version}");
        highest = version;
    }
    assert!(highest >= rounds, "the writer wrote something: {highest}");
}
