//! A scheduler that ends at any moment is replaced by one that goes on; running training does not notice.

use std::time::Instant;

use spotq_engine::EngineError;
use spotq_model::{Input, Span, TaskId};
use spotq_proto::v1::{self, StopReason, report::What};
use spotq_store::StoreError;
use spotq_testkit::{job, wait_until_async};

use crate::common::worker::{committed, exited};
use crate::common::{DEADLINE, LaunchFault, World, phase, secret};

#[tokio::test]
async fn a_launch_in_flight_is_asked_again_with_its_key() {
    let world = World::new("restart-launch");
    world.cloud.next_launch(LaunchFault::NoAnswer);
    let served = world.start().await;
    let id = served.submit(job("a")).await;
    wait_until_async(DEADLINE, async || world.cloud.fake.live().len() == 1, "an instance").await.unwrap();
    served.crash().await;
    let served = world.start().await;
    served.launched(id).await;
    let keys: Vec<_> = world.cloud.launches().into_iter().map(|request| request.key).collect();
    assert_eq!(keys.len(), 2);
    assert_eq!(keys[0], keys[1]);
    assert_eq!((world.cloud.fake.live().len(), served.cluster().await.nodes.len()), (1, 1));
    world.cloud.assert_nothing_early();
}

#[tokio::test]
async fn a_termination_in_flight_is_asked_again() {
    let world = World::new("restart-terminate");
    let served = world.start().await;
    let id = served.submit(job("a")).await;
    served.launched(id).await;
    let instance = world.cloud.fake.live()[0].instance.clone();
    // The cloud's answer never arrives here, so only the next term can finish this.
    world.cloud.fake.slow_endings();
    served.engine.handle.command(Input::Cancel { job: id }).await.unwrap();
    wait_until_async(DEADLINE, async || world.cloud.terminations(&instance) > 0, "a call").await.unwrap();
    served.crash().await;
    let served = world.start().await;
    served.until("the end of the node", |c| c.live.is_empty()).await;
    assert!(world.cloud.terminations(&instance) > 1);
    assert_eq!(world.cloud.fake.live(), []);
}

#[tokio::test]
async fn a_worker_that_comes_back_with_its_task_keeps_it() {
    let world = World::new("restart-keeps");
    let served = world.start().await;
    let (id, worker, grant) = served.running("a").await;
    served.crash().await;
    let served = world.start().await;
    let mut worker = served.worker(worker.node, vec![grant]).await;
    worker.report(grant, committed(1, 1, 10)).await.unwrap();
    assert_eq!(phase(&served.cluster().await, id), "running");
    assert_eq!(worker.stops, []);
    worker.report(grant, exited(0)).await.unwrap();
    let cluster = served.until("the end of the job", |c| phase(c, id) == "done").await;
    let task = cluster.task(TaskId::only(id)).unwrap();
    assert_eq!((task.attempts.len(), task.checkpoint.as_ref().unwrap().step), (1, Some(10)));
    assert_eq!(world.cloud.launches().len(), 1);
}

#[tokio::test]
async fn a_worker_that_comes_back_without_its_task_has_lost_it_and_stale_grants_are_stopped() {
    let world = World::new("restart-without");
    let served = world.start().await;
    let (id, worker, first) = served.running("a").await;
    served.crash().await;
    let served = world.start().await;
    let mut worker = served.worker(worker.node, Vec::new()).await;
    let second = worker.grant().await.grant.unwrap();
    assert_eq!((second.job_id, second.generation), (id.0, 2));
    let cluster = served.cluster().await;
    let end = cluster.task(TaskId::only(id)).unwrap().attempts[0].end.clone().unwrap();
    assert_eq!(end.name(), "node_lost");
    drop(worker);
    let mut worker = served.worker(spotq_model::NodeId(1), vec![first, second]).await;
    let stop = worker.stop().await;
    assert_eq!((stop.grant, stop.reason()), (Some(first), StopReason::Superseded));
}

#[tokio::test]
async fn a_task_that_was_never_accepted_is_granted_again() {
    let world = World::new("restart-grant");
    let served = world.start().await;
    let id = served.submit(job("a")).await;
    let node = served.launched(id).await;
    let mut worker = served.worker(node, Vec::new()).await;
    let first = worker.grant().await;
    served.crash().await;
    let served = world.start().await;
    let mut worker = served.worker(node, Vec::new()).await;
    let again = worker.grant().await;
    assert_eq!(again.grant, first.grant);
    assert_eq!((again.checkpoint_url, again.checkpoint_key), (first.checkpoint_url, first.checkpoint_key));
}

#[tokio::test]
async fn an_order_to_stop_is_given_again() {
    let world = World::new("restart-stop");
    let served = world.start().await;
    let (id, worker, grant) = served.running("a").await;
    served.engine.handle.command(Input::Cancel { job: id }).await.unwrap();
    served.crash().await;
    let served = world.start().await;
    let mut worker = served.worker(worker.node, vec![grant]).await;
    let stop = worker.stop().await;
    assert_eq!((stop.grant, stop.reason()), (Some(grant), StopReason::Cancel));
    let finished = v1::Finished {
        signal: Some(15),
        signalled: true,
        stopped: StopReason::Cancel.into(),
        ..v1::Finished::default()
    };
    worker.report(grant, What::Finished(finished)).await.unwrap();
    let cluster = served.until("the end of the job", |c| phase(c, id) == "done").await;
    assert_eq!(cluster.task(TaskId::only(id)).unwrap().attempts[0].end.as_ref().unwrap().name(), "cancelled");
}

#[tokio::test]
async fn an_older_scheduler_is_fenced_and_stops_asking_the_cloud() {
    let world = World::new("restart-fenced");
    let mut old = world.start().await;
    let new = world.start().await;
    let refused = old.engine.handle.submit("old".into(), job("old")).await;
    assert!(matches!(refused, Err(EngineError::Stopping)), "{refused:?}");
    let ended = old.engine.failed().await;
    assert!(matches!(ended, Err(StoreError::Fenced { .. })), "{ended:?}");
    new.crash().await;
    // Nobody is left to ask. A call that was under way may still be counted, so the figure is taken when it rests.
    let silence = async {
        let mut calls = world.cloud.fake.calls().len();
        loop {
            tokio::time::sleep(world.config().poll_every * 3).await;
            if calls == std::mem::replace(&mut calls, world.cloud.fake.calls().len()) {
                break;
            }
        }
    };
    tokio::time::timeout(DEADLINE, silence).await.expect("a fenced scheduler falls silent");
    let newest = world.start().await;
    assert_eq!(newest.submit(job("new")).await.0, 1, "the fenced submit left nothing");
}

#[tokio::test]
async fn a_restart_gives_every_worker_a_whole_lease() {
    let mut world = World::new("restart-lease");
    world.policies.lease_ttl = Span::millis(600);
    let served = world.start().await;
    let (id, _worker, _) = served.running("a").await;
    served.crash().await;
    let started = Instant::now();
    let served = world.start().await;
    let cluster =
        served.until("a second attempt", |c| c.task(TaskId::only(id)).unwrap().attempts.len() == 2).await;
    assert!(started.elapsed() >= world.policies.lease_ttl.as_duration(), "{:?}", started.elapsed());
    let end = cluster.task(TaskId::only(id)).unwrap().attempts[0].end.clone().unwrap();
    assert_eq!(end.name(), "node_lost");
}

#[tokio::test]
async fn the_secrets_of_nodes_and_jobs_outlive_a_scheduler() {
    let world = World::new("restart-secrets");
    let served = world.start().await;
    let (_, worker, grant) = served.running("a").await;
    let (node, shown) = (worker.node, secret().join_secret(worker.node));
    assert_eq!(world.cloud.launches()[0].bootstrap.join_secret.expose(), shown);
    served.crash().await;
    let served = world.start().await;
    crate::common::Worker::dial(&served.url, node, shown, vec![grant]).await.unwrap();
}
