//! Leases, replaced sessions and workers that do not listen.

use std::time::{Duration, Instant};

use spotq_model::{JobSpec, Span, TaskId};
use spotq_proto::v1::{self, StopReason, report::What, scheduler_message};
use spotq_testkit::job;

use crate::common::worker::{exited, progress};
use crate::common::{DEADLINE, World, phase};

#[tokio::test]
async fn heartbeats_keep_a_lease_and_silence_loses_it() {
    let mut world = World::new("session-lease");
    world.policies.lease_ttl = Span::millis(700);
    let served = world.start().await;
    let (id, mut old, first) = served.running("a").await;
    let (started, mut beat) = (Instant::now(), tokio::time::interval(Duration::from_millis(50)));
    while started.elapsed() < 3 * world.policies.lease_ttl.as_duration() {
        beat.tick().await;
        old.heartbeat().await;
    }
    assert_eq!(
        served.cluster().await.task(TaskId::only(id)).unwrap().generation.0,
        1,
        "it was heard all the time"
    );
    // From here on it is silent, though its connection stands.
    served.until("a second attempt", |c| c.task(TaskId::only(id)).unwrap().generation.0 == 2).await;
    let node = served.launched(id).await;
    assert_ne!(node, old.node);
    let mut new = served.worker(node, Vec::new()).await;
    let second = new.start_task().await;
    old.report(first, progress(9)).await.unwrap();
    assert_eq!(
        old.stops.last().map(|stop| (stop.grant, stop.reason())),
        Some((Some(first), StopReason::Superseded))
    );
    new.report(second, exited(0)).await.unwrap();
    let done = served.until("the end of the job", |c| phase(c, id) == "done").await;
    let ends: Vec<_> = done
        .task(TaskId::only(id))
        .unwrap()
        .attempts
        .iter()
        .map(|a| a.end.as_ref().unwrap().name())
        .collect();
    assert_eq!(ends, ["node_lost", "completed"]);
}

#[tokio::test]
async fn a_second_session_of_a_node_ends_the_first() {
    let world = World::new("session-second");
    let served = world.start().await;
    let (id, mut first, grant) = served.running("a").await;
    let mut second = served.worker(first.node, vec![grant]).await;
    let ended = loop {
        match first.next().await {
            Ok(Some(_)) => {}
            ended => break ended,
        }
    };
    assert!(matches!(ended, Ok(None)), "{ended:?}");
    served.engine.handle.command(spotq_model::Input::Cancel { job: id }).await.unwrap();
    assert_eq!(second.stop().await.reason(), StopReason::Cancel);
    let info = served.admin().await.info(v1::InfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.workers_connected, info.nodes_live, info.jobs_active), (1, 1, 1));
}

#[tokio::test]
async fn a_worker_that_does_not_listen_is_cut_off_and_served_again_when_it_comes_back() {
    let world = World::new("session-deaf");
    let served = world.start().await;
    let spec = JobSpec { setup: Some("#".repeat(4_000_000)), ..job("large") };
    let id = served.submit(spec).await;
    let node = served.launched(id).await;
    let mut deaf = served.worker(node, Vec::new()).await;
    // The grant fills the connection; the answers to all this fill what may wait for it.
    let nobodys = v1::Grant { job_id: 77, task_index: 0, generation: 1 };
    for _ in 0..600 {
        deaf.send_report(nobodys, What::Accepted(v1::Accepted {})).await;
    }
    // The grant is repeated each second; once it finds no room the session is over.
    let admin = served.admin().await;
    let gone = async {
        while admin.clone().info(v1::InfoRequest {}).await.unwrap().into_inner().workers_connected > 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(DEADLINE, gone).await.expect("the session is cut off");
    let heard = async {
        let mut heard = 0;
        while let Ok(Some(_)) = deaf.next().await {
            heard += 1;
        }
        heard
    };
    let heard =
        tokio::time::timeout(DEADLINE, heard).await.expect("its stream ends, or it would wait for ever");
    assert!(heard < 1200, "not all was kept for it: {heard}");
    let mut back = served.worker(node, Vec::new()).await;
    let grant = back.start_task().await;
    assert_eq!(grant.job_id, id.0);
}

#[tokio::test]
async fn a_stop_is_repeated_until_the_end_is_reported() {
    let world = World::new("session-stop");
    let served = world.start().await;
    let (id, mut worker, grant) = served.running("a").await;
    served.engine.handle.command(spotq_model::Input::Cancel { job: id }).await.unwrap();
    let (first, again) = (worker.stop().await, worker.stop().await);
    assert_eq!((first.grant, first.reason(), first), (Some(grant), StopReason::Cancel, again));
    assert!(first.deadline_ms > spotq_engine::now().0);
    let finished = v1::Finished {
        exit_code: Some(0),
        signalled: true,
        stopped: StopReason::Cancel.into(),
        ..v1::Finished::default()
    };
    worker.report(grant, What::Finished(finished)).await.unwrap();
    assert_eq!(phase(&served.cluster().await, id), "done");
}

#[tokio::test]
async fn a_free_node_takes_the_next_job() {
    let world = World::new("session-next");
    let served = world.start().await;
    let (_, mut worker, grant) = served.running("a").await;
    worker.report(grant, exited(0)).await.unwrap();
    let next = served.submit(job("b")).await;
    let grant = loop {
        match worker.next().await.unwrap() {
            Some(scheduler_message::Kind::Grant(grant)) => break grant.grant.unwrap(),
            Some(_) => {}
            None => panic!("the stream of a free node stays open"),
        }
    };
    assert_eq!(grant.job_id, next.0);
    assert_eq!(world.cloud.launches().len(), 1);
}
