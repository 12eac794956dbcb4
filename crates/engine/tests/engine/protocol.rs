//! What workers may say, what they are told, and when.

use futures::poll;
use spotq_model::{Fact, NodeId, TaskId};
use spotq_proto::v1::{self, StopReason, report::What, scheduler_message, worker_message::Kind};
use spotq_testkit::{job, wait_until_async};
use tonic::Code;

use crate::common::worker::{committed, exited, open, progress};
use crate::common::{DEADLINE, Worker, World, phase, secret};

#[tokio::test]
async fn only_the_worker_of_a_node_may_join_for_it() {
    let world = World::new("join-refused");
    let served = world.start().await;
    let id = served.submit(job("a")).await;
    let node = served.launched(id).await;
    let refused = |node: NodeId, shown: String| {
        let url = served.url.clone();
        async move { Worker::dial(&url, node, shown, Vec::new()).await.unwrap_err() }
    };
    for shown in [String::new(), "guess".into(), secret().join_secret(NodeId(2)), "x".repeat(100_000)] {
        assert_eq!(refused(node, shown).await.code(), Code::Unauthenticated);
    }
    let unknown = refused(NodeId(99), secret().join_secret(NodeId(99))).await;
    assert_eq!(unknown.code(), Code::FailedPrecondition);
    assert!(unknown.message().contains("99"), "{unknown}");
    // None of them took the node from its worker.
    let mut worker = served.worker(node, Vec::new()).await;
    assert_eq!(worker.start_task().await.job_id, id.0);
}

#[tokio::test]
async fn a_session_begins_with_hello_and_has_one() {
    let world = World::new("join-hello");
    let served = world.start().await;
    let refused = open(&served.url, Kind::Heartbeat(v1::Heartbeat::default())).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(refused.message().contains("Hello"), "{refused}");
    let (_, mut worker, _) = served.running("a").await;
    worker.send(Kind::Hello(v1::Hello::default())).await;
    let ended = worker.acknowledged(999).await.unwrap_err();
    assert_eq!(ended.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn a_welcome_tells_the_times_of_this_cluster() {
    let world = World::new("join-welcome");
    let served = world.start().await;
    let (_, worker, _) = served.running("a").await;
    let welcome = &worker.welcome;
    assert_eq!(welcome.cluster, world.policies.cluster);
    assert_eq!((welcome.heartbeat_ms, welcome.lease_ttl_ms, welcome.dead_man_ms), (1000, 20_000, 600_000));
}

#[tokio::test]
async fn a_report_is_acknowledged_when_it_is_durable() {
    let world = World::new("report-durable");
    let served = world.start().await;
    let (_, mut worker, grant) = served.running("a").await;
    world.store.hold();
    let number = worker.send_report(grant, committed(1, 1, 10)).await;
    wait_until_async(DEADLINE, async || world.store.waiting() > 0, "an append").await.unwrap();
    let lists = world.cloud.lists();
    {
        let mut next = Box::pin(worker.next());
        wait_until_async(DEADLINE, async || world.cloud.lists() > lists + 3, "some time").await.unwrap();
        assert!(poll!(&mut next).is_pending());
        world.store.release();
        let said = next.await.unwrap();
        assert!(
            matches!(said, Some(scheduler_message::Kind::ReportAck(ack)) if ack.id == number),
            "{said:?}"
        );
    }
    let durable = world.store.events();
    assert!(durable.iter().any(|event| matches!(event.fact, Fact::CheckpointCommitted { .. })));
}

#[tokio::test]
async fn reports_that_are_sent_again_change_nothing_and_are_acknowledged() {
    let world = World::new("report-again");
    let served = world.start().await;
    let id = served.submit(job("a")).await;
    let node = served.launched(id).await;
    let mut worker = served.worker(node, Vec::new()).await;
    let grant = worker.grant().await.grant.unwrap();
    let reports = [
        What::Accepted(v1::Accepted {}),
        What::Restored(v1::Restored { from: None, fell_back: 0 }),
        What::Started(v1::Started { pid: 1 }),
        committed(1, 1, 10),
        What::Noticed(v1::Noticed { deadline_ms: spotq_engine::now().0 + 60_000, source: "test".into() }),
        exited(0),
    ];
    for what in &reports {
        worker.report(grant, what.clone()).await.unwrap();
        let before = served.cluster().await.jobs;
        worker.report(grant, what.clone()).await.unwrap();
        assert_eq!(served.cluster().await.jobs, before, "{what:?} twice");
    }
    // In another session, by a worker that did not hear the answers.
    let before = world.store.log().len();
    drop(worker);
    let done = served.until("the end of the job", |c| phase(c, id) == "done").await;
    assert_eq!(done.task(TaskId::only(id)).unwrap().attempts.len(), 1);
    let facts = world.store.events();
    assert!(facts[before..].iter().all(|event| !matches!(event.fact, Fact::AttemptEnded { .. })));
}

#[tokio::test]
async fn what_an_older_generation_says_is_acknowledged_and_changes_nothing() {
    let world = World::new("report-stale");
    let served = world.start().await;
    let (id, mut old, first) = served.running("a").await;
    served.engine.handle.command(spotq_model::Input::LeaseExpired { node: old.node }).await.unwrap();
    let node = served.launched(id).await;
    let mut new = served.worker(node, Vec::new()).await;
    let second = new.start_task().await;
    assert_eq!(second.generation, 2);
    let before = served.cluster().await.task(TaskId::only(id)).unwrap().clone();
    for what in
        [exited(0), committed(1, 5, 500), progress(7), What::Superseded(v1::Superseded { by_generation: 9 })]
    {
        old.report(first, what).await.unwrap();
    }
    assert_eq!(served.cluster().await.task(TaskId::only(id)).unwrap(), &before);
    let told: Vec<_> = old.stops.iter().map(|stop| (stop.grant.unwrap(), stop.reason())).collect();
    // A command that is over needs no order to stop; the three others do.
    assert_eq!(told, [(first, StopReason::Superseded); 3]);
    // A worker may not speak for another's grant either.
    old.report(second, exited(1)).await.unwrap();
    assert_eq!(served.cluster().await.task(TaskId::only(id)).unwrap(), &before);
    new.report(second, exited(0)).await.unwrap();
    served.until("the end of the job", |c| phase(c, id) == "done").await;
}

#[tokio::test]
async fn garbage_in_a_report_ends_the_session_and_changes_nothing() {
    let world = World::new("report-garbage");
    let served = world.start().await;
    let (id, worker, grant) = served.running("a").await;
    let node = worker.node;
    drop(worker);
    let finished = |stopped: i32| {
        What::Finished(v1::Finished { exit_code: Some(0), stopped, ..v1::Finished::default() })
    };
    let report = |grant: Option<v1::Grant>, what: Option<What>| v1::Report { id: 1, grant, at_ms: 0, what };
    let bad = [
        report(Some(grant), Some(finished(StopReason::Unspecified.into()))),
        report(Some(grant), Some(finished(99))),
        report(Some(grant), Some(committed(2, 1, 10))),
        report(None, Some(exited(0))),
        report(Some(grant), None),
        report(Some(v1::Grant { generation: 0, ..grant }), Some(exited(0))),
        report(Some(v1::Grant { job_id: 0, ..grant }), Some(exited(0))),
    ];
    for report in bad {
        let mut worker = served.worker(node, vec![grant]).await;
        worker.send(Kind::Report(report.clone())).await;
        let ended = worker.acknowledged(1).await.unwrap_err();
        assert_eq!(ended.code(), Code::InvalidArgument, "{report:?}: {ended}");
        assert!(!ended.message().is_empty());
    }
    assert_eq!(phase(&served.cluster().await, id), "running");
    let held = v1::Grant { generation: 0, ..grant };
    let refused = Worker::dial(&served.url, node, secret().join_secret(node), vec![held]).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn a_grant_carries_all_that_the_task_needs_and_is_repeated_until_it_is_taken() {
    let world = World::new("grant");
    let served = world.start().await;
    let id = served.submit(job("train")).await;
    let node = served.launched(id).await;
    let mut worker = served.worker(node, Vec::new()).await;
    let first = worker.grant().await;
    let uuid = served.cluster().await.jobs[&id].uuid.clone();
    assert_eq!(first.spec.as_ref().unwrap().name, "train");
    assert_eq!((first.job_uuid.as_str(), first.newest_step), (uuid.as_str(), None));
    assert_eq!(first.checkpoint_url, format!("file:///checkpoints/v1/default/{uuid}"));
    assert_eq!(first.checkpoint_key, secret().checkpoint_key(&uuid));
    assert_eq!(worker.grant().await, first, "it was not taken, so it comes again");
    let grant = worker.start_task().await;
    worker.report(grant, committed(1, 3, 30)).await.unwrap();
    served.engine.handle.command(spotq_model::Input::LeaseExpired { node }).await.unwrap();
    let node = served.launched(id).await;
    let second = served.worker(node, Vec::new()).await.grant().await;
    assert_eq!((second.newest_step, second.grant.unwrap().generation), (Some(30), 2));
}
