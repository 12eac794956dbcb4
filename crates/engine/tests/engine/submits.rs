//! A submit is acknowledged when it is durable, once per key.

use std::collections::BTreeSet;
use std::task::Poll;
use std::time::Duration;

use futures::future::join_all;
use futures::poll;
use spotq_engine::EngineError;
use spotq_model::JobSpec;
use spotq_proto::v1;
use spotq_store::{Store as _, StoreError};
use spotq_testkit::{job, wait_until_async};
use tonic::Code;

use crate::common::{DEADLINE, World};

#[tokio::test]
async fn a_store_that_fails_acknowledges_nothing_and_ends_the_engine() {
    let world = World::new("submit-fails");
    let mut served = world.start().await;
    let mut jobs = served.jobs().await;
    world.store.mem.fail_next_appends(1);
    let request = v1::SubmitRequest { client_key: "a".into(), spec: Some((&job("a")).into()) };
    assert_eq!(jobs.submit(request).await.unwrap_err().code(), Code::Unavailable);
    let ended = served.engine.failed().await;
    assert!(matches!(ended, Err(StoreError::Failed { .. })), "{ended:?}");
    let refused = served.engine.handle.submit("b".into(), job("b")).await;
    assert!(matches!(refused, Err(EngineError::Stopping)), "{refused:?}");
    drop(served);
    assert!(world.start().await.cluster().await.jobs.is_empty());
}

#[tokio::test]
async fn answers_wait_until_what_they_saw_is_durable() {
    let world = World::new("submit-held");
    let served = world.start().await;
    let handle = &served.engine.handle;
    world.store.hold();
    let mut first = Box::pin(handle.submit("a".into(), job("a")));
    let mut second = Box::pin(handle.submit("b".into(), job("b")));
    assert!(poll!(&mut first).is_pending() && poll!(&mut second).is_pending());
    wait_until_async(DEADLINE, async || world.store.waiting() > 0, "an append").await.unwrap();
    // A reader must not be told of a job that a power cut could take back.
    let mut seen = Box::pin(handle.query(|seen| seen.cluster.jobs.len()));
    assert!(poll!(&mut seen).is_pending());
    let lists = world.cloud.lists();
    wait_until_async(DEADLINE, async || world.cloud.lists() > lists + 3, "some time").await.unwrap();
    assert!(
        poll!(&mut first).is_pending() && poll!(&mut second).is_pending() && poll!(&mut seen).is_pending()
    );
    assert!(world.store.log().is_empty());
    world.store.release();
    let answers = (first.await.unwrap(), second.await.unwrap(), seen.await.unwrap());
    assert_eq!((answers.0.job.0, answers.1.job.0, answers.2), (1, 2, 2));
    world.cloud.assert_nothing_early();
}

#[tokio::test]
async fn a_reader_does_not_wait_for_the_submit_that_came_with_it() {
    let world = World::new("submit-reader");
    let served = world.start().await;
    let handle = &served.engine.handle;
    // Held, since effects would cut the gathering short. From the first commit on messages are gathered.
    let held = || JobSpec { hold: true, ..job("held") };
    handle.submit("first".into(), held()).await.unwrap();
    world.store.hold();
    let name = |number: usize| (format!("key-{number}"), job("early"));
    let mut early: Vec<_> = (0..6).map(name).map(|(key, job)| Box::pin(handle.submit(key, job))).collect();
    for submit in &mut early {
        assert!(poll!(submit).is_pending());
    }
    wait_until_async(DEADLINE, async || world.store.waiting() > 0, "an append").await.unwrap();
    // With so many in the air, these two are gathered for a while; the first appends become durable meanwhile.
    let mut reader = Box::pin(handle.query(|seen| seen.cluster.jobs.len()));
    let mut late = Box::pin(handle.submit("late".into(), held()));
    assert!(poll!(&mut reader).is_pending() && poll!(&mut late).is_pending());
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
    world.store.release();
    // What it was told is what was in the air before.
    assert_eq!(reader.await.unwrap(), 7);
    assert_eq!(late.await.unwrap().job.0, 8);
}

#[tokio::test]
async fn each_answer_of_a_slow_store_comes_after_its_record() {
    let world = World::new("submit-slow");
    world.store.slow(Duration::from_millis(10));
    let served = world.start().await;
    let submits = (0..50).map(|n| {
        let (handle, store) = (served.engine.handle.clone(), world.store.clone());
        async move {
            let key = format!("key-{n}");
            let submitted = handle.submit(key.clone(), job("slow")).await.unwrap();
            let text = String::from_utf8(store.log().concat()).unwrap();
            assert!(
                text.contains(&format!("\"client_key\":\"{key}\"")),
                "{key} is acknowledged but not durable"
            );
            submitted.job
        }
    });
    let ids = join_all(submits).await;
    assert!(ids.is_sorted(), "jobs are numbered in the order in which they came");
}

#[tokio::test]
async fn a_thousand_submits_at_once_have_a_number_each_and_survive_a_restart() {
    let world = World::new("submit-thousand");
    let served = world.start().await;
    let submits = (0..1000).map(|n| served.engine.handle.submit(format!("key-{n}"), job("many")));
    let submitted: Vec<_> = join_all(submits).await.into_iter().map(Result::unwrap).collect();
    let ids: BTreeSet<_> = submitted.iter().map(|s| s.job).collect();
    assert_eq!((ids.len(), submitted.iter().filter(|s| s.created).count()), (1000, 1000));
    served.crash().await;
    let after = world.start().await.cluster().await;
    for (n, known) in submitted.iter().enumerate() {
        assert_eq!(after.by_client_key.get(format!("key-{n}").as_str()), Some(&known.job));
        assert_eq!(after.jobs[&known.job].uuid, known.uuid);
    }
}

#[tokio::test]
async fn one_key_is_one_job_at_once_and_over_a_restart() {
    let world = World::new("submit-key");
    let served = world.start().await;
    let handle = &served.engine.handle;
    let same = join_all((0..20).map(|_| handle.submit("key".into(), job("first")))).await;
    let same: Vec<_> = same.into_iter().map(Result::unwrap).collect();
    assert_eq!(same.iter().filter(|s| s.created).count(), 1);
    assert!(same.iter().all(|s| (s.job, &s.uuid) == (same[0].job, &same[0].uuid)));
    served.crash().await;
    let served = world.start().await;
    let again = served.engine.handle.submit("key".into(), job("second")).await.unwrap();
    assert_eq!((again.job, &again.uuid, again.created), (same[0].job, &same[0].uuid, false));
    assert_eq!(served.cluster().await.jobs[&again.job].spec.name, "first");
}

#[tokio::test]
async fn a_submit_whose_answer_was_lost_with_its_scheduler_is_found_by_its_key() {
    let world = World::new("submit-lost");
    let served = world.start().await;
    world.store.hold();
    let handle = served.engine.handle.clone();
    let mut lost = Box::pin(handle.submit("key".into(), job("lost")));
    assert!(poll!(&mut lost).is_pending());
    wait_until_async(DEADLINE, async || world.store.waiting() > 0, "an append").await.unwrap();
    served.crash().await;
    assert!(matches!(poll!(&mut lost), Poll::Ready(Err(EngineError::Stopping))));
    world.store.release();
    wait_until_async(DEADLINE, async || world.store.waiting() == 0, "the append").await.unwrap();
    let again = world.start().await.engine.handle.submit("key".into(), job("lost")).await.unwrap();
    assert!(!again.created);
}

#[tokio::test]
async fn a_large_job_fits_and_a_larger_one_is_refused_with_its_size() {
    let world = World::new("submit-large");
    let served = world.start().await;
    let mut jobs = served.jobs().await;
    let sized = |bytes: usize| {
        let spec = JobSpec { setup: Some("#".repeat(bytes)), hold: true, ..job("large") };
        v1::SubmitRequest { client_key: format!("{bytes}"), spec: Some((&spec).into()) }
    };
    let id = jobs.submit(sized(6_000_000)).await.unwrap().into_inner().job_id;
    let view = jobs.get(v1::JobRequest { job_id: id, task_index: 0 }).await.unwrap().into_inner();
    assert_eq!(view.spec.unwrap().setup.unwrap().len(), 6_000_000);
    // It would fit the request, but not the grant that carries it to its worker.
    let refused = jobs.submit(sized(8_000_000)).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(refused.message().contains("the job has 80000"), "{refused}");
    let refused = jobs.submit(sized(9_000_000)).await.unwrap_err();
    assert_eq!(refused.code(), Code::OutOfRange);
    assert!(refused.message().contains("too large"), "{refused}");
    assert_eq!(world.store.recover().await.unwrap().records.len(), 2, "the job and its hold");
}

#[tokio::test]
async fn odd_names_are_kept_and_bad_requests_say_what_is_wrong() {
    let world = World::new("submit-odd");
    let served = world.start().await;
    let mut jobs = served.jobs().await;
    for name in ["x".repeat(300), "🦀 näme".into(), "two\nlines".into()] {
        let spec = JobSpec { name: name.clone(), hold: true, ..job("") };
        let request = v1::SubmitRequest { client_key: name.clone(), spec: Some((&spec).into()) };
        // Refused or kept, but never lost or changed.
        match jobs.submit(request).await {
            Ok(reply) => {
                let id = v1::JobRequest { job_id: reply.into_inner().job_id, task_index: 0 };
                assert_eq!(jobs.get(id).await.unwrap().into_inner().name, name);
            }
            Err(status) => assert_eq!(status.code(), Code::InvalidArgument, "{status}"),
        }
    }
    let refused = |request: v1::SubmitRequest| {
        let mut jobs = jobs.clone();
        async move { jobs.submit(request).await.unwrap_err() }
    };
    let spec: v1::JobSpec = (&job("a")).into();
    let no_key = v1::SubmitRequest { client_key: String::new(), spec: Some(spec.clone()) };
    assert!(refused(no_key).await.message().contains("client_key"));
    let no_spec = v1::SubmitRequest { client_key: "a".into(), spec: None };
    assert!(refused(no_spec).await.message().contains("no job"));
    let garbage = v1::JobSpec { policy: 99, ..spec };
    let garbage = v1::SubmitRequest { client_key: "a".into(), spec: Some(garbage) };
    assert_eq!(refused(garbage).await.code(), Code::InvalidArgument);
}
