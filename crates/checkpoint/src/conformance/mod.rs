//! What every object store must do for the checkpoint engine, as one suite that each of them runs.
//!
//! For tests: it panics on the first broken rule, naming it. It must never depend on one store's quirks.

mod cases;
mod faults;
mod fixture;

use std::future::Future;
use std::sync::Arc;

use object_store::ObjectStore;
use object_store::path::Path;

pub use faults::{Fault, Faulty, Overwriting};
pub use fixture::{Tree, repository, request};

/// Runs the whole suite. Each case gets a prefix of its own below a store from `factory`.
///
/// # Panics
/// On the first rule that the store breaks.
pub async fn run<F>(factory: F)
where
    F: Fn() -> Arc<dyn ObjectStore>,
{
    let run_id = uuid::Uuid::new_v4().simple().to_string();
    let place = |case: &str| (factory(), Path::from(format!("conformance/{run_id}/{case}")));
    named("probe", cases::the_probe_accepts_the_store(place("probe"))).await;
    named("round trip", cases::a_push_restores_bit_for_bit(place("round-trip"))).await;
    named("unchanged", cases::an_unchanged_directory_is_not_committed_twice(place("unchanged"))).await;
    named("dedupe", cases::unchanged_chunks_are_not_uploaded_again(place("dedupe"))).await;
    named("race", cases::two_writers_race_and_both_commit(place("race"))).await;
    named("one seq", cases::one_number_has_one_winner(place("one-seq"))).await;
    named("zombie", cases::a_zombie_is_superseded(place("zombie"))).await;
    named("lost answer", cases::a_lost_answer_is_settled_by_the_nonce(place("lost-answer"))).await;
    named("corrupt chunk", cases::a_corrupt_chunk_falls_back(place("corrupt-chunk"))).await;
    named("missing chunk", cases::a_missing_chunk_falls_back(place("missing-chunk"))).await;
    named("manifests", cases::a_bad_manifest_falls_back(place("manifest"))).await;
    named("push crash", cases::a_push_that_dies_leaves_the_old_head(place("push-crash"))).await;
    named("restore crash", cases::a_restore_that_dies_shows_no_partial_tree(place("restore-crash"))).await;
    named("verify", cases::verify_names_every_damage(place("verify"))).await;
    named("log damage", cases::a_damaged_log_is_named(place("log-damage"))).await;
    named("spliced log", cases::a_spliced_log_is_named(place("spliced"))).await;
}

async fn named(case: &str, work: impl Future<Output = ()>) {
    tracing::info!(case, "conformance");
    work.await;
}
