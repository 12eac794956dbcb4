//! Log, then act; anything done twice is harmless; what is lost on the way is found again.

use std::collections::BTreeSet;

use spotq_core::{NodeState, invariants};
use spotq_model::{
    EndWhy, Fact, GoneCause, Input, InstanceId, JobId, LaunchAnswer, NodeId, RefusalKind, Span, TaskId,
};
use spotq_proto::v1;
use spotq_provider::CloudProvider as _;
use spotq_testkit::{job, wait_until_async};

use crate::common::cloud::cloud_refusal;
use crate::common::worker::exited;
use crate::common::{DEADLINE, LaunchFault, World, phase};

#[tokio::test]
async fn the_cloud_is_not_called_before_the_reason_is_durable() {
    let world = World::new("act-durable");
    let served = world.start().await;
    served.until("prices", |_| world.cloud.lists() > 2).await;
    world.store.hold();
    let handle = served.engine.handle.clone();
    let submit = tokio::spawn(async move { handle.submit("a".into(), job("a")).await });
    wait_until_async(DEADLINE, async || world.store.waiting() > 0, "an append").await.unwrap();
    let lists = world.cloud.lists();
    wait_until_async(DEADLINE, async || world.cloud.lists() > lists + 5, "many ticks").await.unwrap();
    assert_eq!(world.cloud.launches(), []);
    world.store.release();
    let id = submit.await.unwrap().unwrap().job;
    served.launched(id).await;
    served.engine.handle.command(Input::Cancel { job: id }).await.unwrap();
    served.until("the end of the node", |c| c.live.is_empty()).await;
    world.cloud.assert_nothing_early();
}

#[tokio::test]
async fn a_launch_whose_answer_is_lost_is_asked_again_with_its_key_and_makes_one_node() {
    let world = World::new("act-lost");
    world.cloud.next_launch(LaunchFault::LoseAnswer);
    world.cloud.next_launch(LaunchFault::LoseAnswer);
    let served = world.start().await;
    let id = served.submit(job("a")).await;
    served.launched(id).await;
    let keys: BTreeSet<_> = world.cloud.launches().into_iter().map(|request| request.key).collect();
    assert_eq!((keys.len(), world.cloud.launches().len()), (1, 3));
    assert_eq!((world.cloud.fake.live().len(), served.cluster().await.nodes.len()), (1, 1));
}

#[tokio::test]
async fn everything_that_comes_twice_counts_once() {
    let world = World::new("act-twice");
    world.cloud.fake.double_changes();
    let served = world.start().await;
    let (id, mut worker, grant) = served.running("a").await;
    let node = served.cluster().await.nodes[&NodeId(1)].clone();
    let instance = node.instance.clone().unwrap();
    let answer = LaunchAnswer::Launched {
        instance: instance.clone(),
        quote: node.quote.clone(),
        launched_at: spotq_model::Timestamp(0),
    };
    for _ in 0..2 {
        let input = Input::LaunchAnswered { node: NodeId(1), answer: answer.clone() };
        served.engine.handle.command(input).await.unwrap();
    }
    worker.report(grant, exited(0)).await.unwrap();
    served.until("the end of the job", |c| phase(c, id) == "done").await;
    world.cloud.fake.end(&instance, GoneCause::Crashed);
    let gone = Input::InstanceGone { instance, cause: GoneCause::Preempted, at: spotq_engine::now() };
    served.engine.handle.command(gone).await.unwrap();
    served.until("the end of the node", |c| c.live.is_empty()).await;
    let count = |is: fn(&Fact) -> bool| world.store.events().iter().filter(|event| is(&event.fact)).count();
    assert_eq!(count(|fact| matches!(fact, Fact::NodeLaunched { .. })), 1);
    assert_eq!(count(|fact| matches!(fact, Fact::NodeGone { .. })), 1);
    assert_eq!(count(|fact| matches!(fact, Fact::TaskDone { .. })), 1);
}

#[tokio::test]
async fn a_pool_that_refuses_rests_where_people_can_see_it_and_the_next_one_is_taken() {
    let world = World::new("act-refused");
    world.cloud.next_launch(LaunchFault::Refuse(RefusalKind::InsufficientCapacity));
    let served = world.start().await;
    let id = served.submit(job("a")).await;
    served.launched(id).await;
    let pools: Vec<_> = world.cloud.launches().into_iter().map(|request| request.pool.zone).collect();
    assert_eq!(pools, ["us-east-1a", "us-east-1b"]);
    let mut jobs = served.jobs().await;
    let request = v1::JobRequest { job_id: id.0, task_index: 0 };
    let explained = jobs.explain(request).await.unwrap().into_inner();
    let resting: Vec<_> = explained.pools.iter().filter(|pool| pool.retry_ms.is_some()).collect();
    assert_eq!(resting.len(), 1);
    assert!(resting[0].pool.contains("us-east-1a") && !resting[0].eligible && resting[0].rank == 0);
    assert!(resting[0].why.contains("told to"), "{}", resting[0].why);
    let offers = jobs.offers(v1::OffersRequest::default()).await.unwrap().into_inner().offers;
    let resting: Vec<_> = offers.iter().filter(|offer| offer.cooling_down.is_some()).collect();
    assert_eq!(resting.len(), 1);
    assert!(resting[0].zone == "us-east-1a" && resting[0].market == "spot", "{:?}", resting[0]);
    let view = jobs.get(request).await.unwrap().into_inner();
    assert_eq!((view.preemptions, view.failures), (0, 0), "a refused launch spends nothing");
}

#[tokio::test]
async fn a_launch_that_never_answers_is_given_up_and_its_instance_is_ended_when_it_turns_up() {
    let mut world = World::new("act-hangs");
    world.policies.launch_timeout = Span::millis(200);
    world.cloud.next_launch(LaunchFault::Hang);
    let served = world.start().await;
    let id = served.submit(job("a")).await;
    let node = served.launched(id).await;
    assert_eq!(node, NodeId(2), "it was placed elsewhere");
    assert_ne!(world.cloud.launches()[0].pool, world.cloud.launches()[1].pool);
    assert_eq!(world.cloud.fake.live().len(), 1);
    world.cloud.land_hung().await;
    let orphan = InstanceId("i-fake-2".into());
    let ended = |c: &spotq_core::Cluster| {
        let node = c.nodes.values().find(|node| node.instance.as_ref() == Some(&orphan));
        node.is_some_and(|node| node.state == NodeState::Gone && node.ending == Some(EndWhy::Orphan))
    };
    let cluster = served.until("the end of the orphan", ended).await;
    assert!(world.cloud.fake.live().iter().all(|instance| instance.instance != orphan));
    let node = cluster.nodes.values().find(|node| node.instance.as_ref() == Some(&orphan)).unwrap();
    assert!(node.ledger.segments.iter().all(|segment| segment.end.is_some()), "{:?}", node.ledger);
    let nodes =
        served.admin().await.nodes(v1::NodesRequest { include_gone: true }).await.unwrap().into_inner().nodes;
    assert!(nodes.iter().any(|view| view.instance_id == orphan.0 && view.state == "gone"), "{nodes:?}");
    assert_eq!(phase(&served.cluster().await, id), "provisioning", "the job did not notice");
    world.cloud.assert_nothing_early();
}

#[tokio::test]
async fn a_job_cancelled_before_its_launch_is_answered_leaves_no_instance() {
    let world = World::new("act-cancel");
    world.cloud.next_launch(LaunchFault::Hang);
    let served = world.start().await;
    let id = served.submit(job("a")).await;
    wait_until_async(DEADLINE, async || !world.cloud.launches().is_empty(), "a launch").await.unwrap();
    served.engine.handle.command(Input::Cancel { job: id }).await.unwrap();
    assert_eq!(phase(&served.cluster().await, id), "done");
    world.cloud.land_hung().await;
    served.until("the end of the node", |c| c.live.is_empty()).await;
    assert_eq!(world.cloud.fake.live(), []);
    assert_eq!(world.cloud.launches().len(), 1);
    world.cloud.assert_nothing_early();
}

#[tokio::test]
async fn a_node_is_ended_until_the_cloud_says_that_it_is_gone() {
    let mut world = World::new("act-slow-end");
    world.policies.idle_ttl = Span::ZERO;
    world.cloud.fake.slow_endings();
    let served = world.start().await;
    let (_, mut worker, grant) = served.running("a").await;
    let instance = world.cloud.fake.live()[0].instance.clone();
    worker.report(grant, exited(0)).await.unwrap();
    served.until("the end of the node", |c| c.live.is_empty()).await;
    assert_eq!(world.cloud.terminations(&instance), 2);
    assert_eq!(world.cloud.fake.live(), []);
}

#[tokio::test]
async fn a_termination_that_fails_is_repeated() {
    let mut world = World::new("act-end-fails");
    world.policies.idle_ttl = Span::ZERO;
    let served = world.start().await;
    let (_, mut worker, grant) = served.running("a").await;
    // Polls take some of these, the termination the others.
    for _ in 0..20 {
        world.cloud.fake.refuse_next(cloud_refusal(RefusalKind::Throttled));
    }
    worker.report(grant, exited(0)).await.unwrap();
    served.until("the end of the node", |c| c.live.is_empty()).await;
    assert_eq!(world.cloud.fake.live(), []);
}

#[tokio::test]
async fn an_instance_that_nobody_asked_for_is_ended() {
    let world = World::new("act-orphan");
    let offers = world.cloud.fake.offers().await.unwrap();
    let request = spotq_provider::conformance::Setup {
        cluster: world.policies.cluster.clone(),
        ..spotq_provider::conformance::Setup::default()
    };
    world.cloud.fake.launch(request.request(&offers[0].pool, 77)).await.unwrap();
    let served = world.start().await;
    let cluster = served.until("the end of the orphan", |c| !c.nodes.is_empty() && c.live.is_empty()).await;
    assert_eq!(cluster.nodes.values().next().unwrap().ending, Some(EndWhy::Orphan));
    assert_eq!(world.cloud.fake.live(), []);
    assert_eq!(invariants::check(&cluster), []);
}

#[tokio::test]
async fn a_preempted_node_is_replaced_in_another_pool() {
    let world = World::new("act-preempted");
    let served = world.start().await;
    let (id, worker, _) = served.running("a").await;
    let instance = world.cloud.fake.live()[0].instance.clone();
    world.cloud.fake.end(&instance, GoneCause::Preempted);
    let task = |c: &spotq_core::Cluster, id: JobId| c.task(TaskId::only(id)).cloned().unwrap();
    served.until("a second attempt", |c| task(c, id).attempts.len() == 2).await;
    let node = served.launched(id).await;
    assert_ne!(node, worker.node);
    let mut second = served.worker(node, Vec::new()).await;
    let grant = second.start_task().await;
    assert_eq!(grant.generation, 2);
    let task = task(&served.cluster().await, id);
    assert_ne!(task.attempts[0].pool, task.attempts[1].pool);
    assert_eq!(task.preemptions, 1);
}
