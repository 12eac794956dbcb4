//! `spotq demo`: what it claims follows from what it leaves.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;
use spotq_testkit::TempDir;

use crate::cluster::{Ran, spotq, text};
use crate::ledger::{assert_contiguous, bill, nanos};
use crate::leftovers;

#[test]
fn the_demo_ends_with_an_identical_model_and_figures_that_anyone_can_compute_again() {
    let dir = TempDir::new("demo");
    let keep = dir.join("kept");
    let mut command = spotq(&["demo", "--seed", "3", "-o", "json", "--keep", text(&keep)]);
    command.env("TMPDIR", dir.path()).current_dir(dir.path());
    let told = Ran::of(command).json();
    let fields: BTreeSet<&str> = told.as_object().unwrap().keys().map(String::as_str).collect();
    let wanted = "seed outcome attempts preemptions preemptions_without_notice scheduler_restarts steps steps_repeated \
                  final_sha256 uninterrupted_sha256 identical cost_usd on_demand_usd savings_pct wasted_usd";
    assert_eq!(fields, wanted.split_whitespace().collect());
    assert_eq!(
        (&told["seed"], &told["outcome"], &told["identical"]),
        (&3.into(), &"completed".into(), &true.into())
    );
    assert!(told["preemptions"].as_u64() >= Some(5), "{told:#}");
    assert!(told["preemptions_without_notice"].as_u64() >= Some(1), "{told:#}");
    assert!(told["scheduler_restarts"].as_u64() >= Some(1), "{told:#}");
    assert!(told["attempts"].as_u64() > told["preemptions"].as_u64(), "{told:#}");
    assert_eq!(told["final_sha256"], told["uninterrupted_sha256"]);
    for (name, path) in
        [("final_sha256", "final/model.bin"), ("uninterrupted_sha256", "uninterrupted/model.bin")]
    {
        assert_eq!(told[name].as_str().unwrap(), sha256(&keep.join(path)));
    }
    let segments: Value =
        serde_json::from_slice(&std::fs::read(keep.join("segments.json")).unwrap()).unwrap();
    let segments = segments.as_array().unwrap();
    assert_contiguous(segments);
    assert_eq!(bill(segments), nanos(&told["cost_usd"]), "the bill is not the sum of its segments");
    let saved = nanos(&told["on_demand_usd"]) - nanos(&told["cost_usd"]);
    let percent = saved as f64 * 100.0 / nanos(&told["on_demand_usd"]) as f64;
    assert!((told["savings_pct"].as_f64().unwrap() - percent).abs() < 0.006, "{percent}: {told:#}");
    let events = std::fs::read_to_string(keep.join("events.jsonl")).unwrap();
    assert!(events.lines().count() > 20, "{events}");
    assert!(events.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()), "{events}");
    leftovers::wait_gone(dir.path(), crate::cluster::DEADLINE);
}

/// By another program than the one that made the claim.
fn sha256(path: &Path) -> String {
    let output = std::process::Command::new("sha256sum").arg(path).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().split_whitespace().next().unwrap().to_owned()
}
