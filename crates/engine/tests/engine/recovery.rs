//! Snapshots, old files and files that cannot be read.

use std::collections::BTreeSet;

use spotq_core::{Cluster, apply};
use spotq_engine::{RecordError, decode_record, encode_event};
use spotq_model::{Event, Fact, JobId, JobSpec, TaskId, Timestamp, Version};
use spotq_store::{Store as _, StoreError};
use spotq_testkit::{FACT_KINDS, fact_kind, job, wait_until_async};

use crate::common::worker::{committed, exited};
use crate::common::{DEADLINE, World, phase};
use crate::samples::samples;

/// Written by schema 1 and never to be changed: stores with such lines are read for ever.
const GOLDEN: &str = include_str!("golden/events-v1.jsonl");

#[tokio::test]
async fn a_snapshot_and_what_followed_are_the_whole_history() {
    let mut world = World::new("recovery-snapshot");
    world.snapshot_every = 25;
    let served = world.start().await;
    for n in 0..4 {
        served.submit(JobSpec { hold: true, ..job(&format!("held-{n}")) }).await;
    }
    let (id, mut worker, grant) = served.running("a").await;
    for n in 1..=80 {
        worker.report(grant, committed(1, n, n * 10)).await.unwrap();
    }
    worker.report(grant, exited(0)).await.unwrap();
    let before = served.until("the end of the job", |c| phase(c, id) == "done").await;
    let snapshots = async || world.store.recover().await.unwrap().snapshot.is_some();
    wait_until_async(DEADLINE, snapshots, "a snapshot").await.unwrap();
    served.crash().await;
    let kept = world.store.recover().await.unwrap();
    assert!(
        kept.records.len() < 50 && kept.snapshot.unwrap().version > Version(50),
        "old records are dropped"
    );
    let mut replayed = Cluster::default();
    for event in world.store.events() {
        apply(&mut replayed, &event).unwrap();
    }
    let served = world.start().await;
    let after = served.cluster().await;
    assert_eq!(after, replayed);
    assert_eq!(after.jobs, before.jobs);
    // And it goes on from there.
    assert_eq!(served.submit(job("next")).await.0, id.0 + 1);
}

async fn refusal(world: &World) -> RecordError {
    match spotq_engine::start(world.config()).await {
        Ok(_) => panic!("a store like that must be refused"),
        Err(error) => error,
    }
}

/// A store with one good record and then these.
async fn store_of(name: &str, records: Vec<Vec<u8>>) -> World {
    let world = World::new(name);
    let epoch = world.store.take_leadership().await.unwrap();
    let spec = Box::new(job("good"));
    let fact =
        Fact::JobSubmitted { job: JobId(1), uuid: "u".into(), client_key: "k".into(), spec: spec.into() };
    let good = encode_event(&Event { at: Timestamp(1), fact });
    let all = std::iter::once(good).chain(records).collect();
    world.store.append(epoch, Version(0), all).await.unwrap();
    world
}

#[tokio::test]
async fn a_record_that_is_torn_or_foreign_is_named_by_its_number() {
    for bad in [
        &b"{\"schema\":1,\"event\":{\"at\":1,\"fact\""[..],
        b"",
        b"\xff\xfe",
        b"[]",
        b"{\"schema\":1}",
        b"null",
    ] {
        let error = refusal(&store_of("recovery-torn", vec![bad.to_vec()]).await).await;
        assert!(matches!(error, RecordError::NotAnEvent { version: 1, .. }), "{error:?}");
        assert!(error.to_string().contains("record 1") && error.to_string().contains("backup"), "{error}");
    }
    let unknown = br#"{"schema":1,"event":{"at":1,"fact":{"fact":"job_teleported"}}}"#;
    let error = refusal(&store_of("recovery-unknown", vec![unknown.to_vec()]).await).await;
    assert!(matches!(error, RecordError::NotAnEvent { version: 1, .. }), "{error:?}");
}

#[tokio::test]
async fn a_record_of_a_newer_release_asks_for_that_release() {
    let unknown: &[u8] = br#"{"schema":2,"event":{"at":1,"fact":{"fact":"job_teleported"}}}"#;
    let elsewhere = br#"{"schema":9,"what":"no event at all"}"#;
    for (bad, schema) in [(unknown, 2), (elsewhere, 9)] {
        let error = refusal(&store_of("recovery-newer", vec![bad.to_vec()]).await).await;
        assert!(
            matches!(error, RecordError::FromTheFuture { version: 1, found } if found == schema),
            "{error:?}"
        );
        assert!(error.to_string().contains("newer spotqd"), "{error}");
    }
}

#[tokio::test]
async fn a_history_that_contradicts_itself_is_refused() {
    let event = Event { at: Timestamp(2), fact: Fact::TaskReleased { task: TaskId::only(JobId(9)) } };
    let error = refusal(&store_of("recovery-illegal", vec![encode_event(&event)]).await).await;
    assert!(matches!(error, RecordError::Illegal(_)), "{error:?}");
    assert!(error.to_string().contains("backup"), "{error}");
}

type Is = fn(&RecordError) -> bool;

#[tokio::test]
async fn a_snapshot_that_cannot_be_used_is_named() {
    let good = Cluster { version: Version(1), ..Cluster::default() };
    let cluster = serde_json::to_string(&good).unwrap();
    let cases: [(String, Is); 4] = [
        (String::from("{\"schema\":1,\"cluster\":{\"ver"), |e| matches!(e, RecordError::Snapshot { .. })),
        (String::from("not a snapshot"), |e| matches!(e, RecordError::Snapshot { .. })),
        (String::from("{\"schema\":7,\"cluster\":[]}"), |e| {
            matches!(e, RecordError::SnapshotFromTheFuture { found: 7 })
        }),
        (
            format!("{{\"schema\":1,\"cluster\":{}}}", cluster.replacen("\"version\":1", "\"version\":5", 1)),
            |e| matches!(e, RecordError::SnapshotElsewhere { says: Version(5), kept: Version(1) }),
        ),
    ];
    for (bytes, is_expected) in cases {
        let world = store_of("recovery-bad-snapshot", Vec::new()).await;
        let epoch = world.store.take_leadership().await.unwrap();
        world.store.snapshot(epoch, Version(1), bytes.clone().into_bytes()).await.unwrap();
        let error = refusal(&world).await;
        assert!(is_expected(&error), "{bytes}: {error:?}");
        assert!(error.to_string().contains("snapshot"), "{error}");
    }
}

#[tokio::test]
async fn an_old_term_cannot_write_a_snapshot() {
    let world = World::new("recovery-fenced-snapshot");
    let old = world.store.take_leadership().await.unwrap();
    world.store.take_leadership().await.unwrap();
    let refused = world.store.snapshot(old, Version(0), Vec::new()).await;
    assert!(matches!(refused, Err(StoreError::Fenced { .. })), "{refused:?}");
}

#[test]
fn every_event_is_written_and_read_as_it_was_in_schema_1() {
    let samples = samples();
    let lines: Vec<&str> = GOLDEN.lines().collect();
    let written: Vec<String> =
        samples.iter().map(|event| String::from_utf8(encode_event(event)).unwrap()).collect();
    assert_eq!(written.len(), lines.len(), "a new kind of event needs a line at the end of the file");
    for ((sample, line), written) in samples.iter().zip(&lines).zip(&written) {
        assert_eq!(&decode_record(0, line.as_bytes()).unwrap(), sample, "an old line reads differently now");
        assert_eq!(written, line, "what is written now is not what was written then");
    }
}

#[test]
fn there_is_a_sample_of_every_kind_of_event() {
    let kinds: BTreeSet<usize> = samples().iter().map(|event| fact_kind(&event.fact)).collect();
    assert_eq!(kinds, (0..FACT_KINDS).collect());
}
