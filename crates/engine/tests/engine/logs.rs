//! Logs of attempts: stored by offset, followed over all attempts.

use spotq_model::NodeId;
use spotq_proto::logframe;
use spotq_proto::v1::{self, LogStream};
use spotq_testkit::job;
use tonic::Code;

use crate::common::worker::{exited, progress};
use crate::common::{DEADLINE, Served, World, phase};

fn frame(text: &str) -> Vec<u8> {
    logframe::encode(LogStream::Stdout, 5, text.as_bytes())
}

async fn read(served: &Served, request: v1::LogsRequest) -> Vec<(u64, LogStream, String)> {
    let mut jobs = served.jobs().await;
    let mut stream = jobs.logs(request).await.unwrap().into_inner();
    let mut lines = Vec::new();
    let all = async {
        while let Some(reply) = stream.message().await.unwrap() {
            lines.push((reply.generation, reply.stream(), String::from_utf8(reply.data).unwrap()));
        }
    };
    tokio::time::timeout(DEADLINE, all).await.expect("the log has an end");
    lines
}

#[tokio::test]
async fn pieces_come_twice_or_too_early_without_harm_and_survive_a_restart() {
    let world = World::new("logs-offsets");
    let served = world.start().await;
    let (id, mut worker, grant) = served.running("a").await;
    let (hello, world_) = (frame("hello "), frame("world"));
    let (whole, end) = (hello.len() as u64, (hello.len() + world_.len()) as u64);
    assert_eq!(worker.log(grant, whole, &world_).await.unwrap(), 0, "a gap is not taken");
    assert_eq!(worker.log(grant, 0, &hello[..5]).await.unwrap(), 5);
    assert_eq!(worker.log(grant, 0, &hello).await.unwrap(), whole, "it overlaps");
    assert_eq!(worker.log(grant, 0, &hello).await.unwrap(), whole, "it repeats");
    assert_eq!(worker.log(grant, u64::MAX, &world_).await.unwrap(), whole, "no overflow");
    served.crash().await;
    let served = world.start().await;
    let mut worker = served.worker(worker.node, vec![grant]).await;
    let acked: Vec<_> = worker.welcome.logs.iter().map(|ack| (ack.grant.unwrap(), ack.offset)).collect();
    assert_eq!(acked, [(grant, whole)]);
    assert_eq!(worker.log(grant, whole, &world_).await.unwrap(), end);
    let lines = read(&served, v1::LogsRequest { job_id: id.0, ..v1::LogsRequest::default() }).await;
    let text: String =
        lines.iter().filter(|line| line.1 == LogStream::Stdout).map(|line| line.2.as_str()).collect();
    assert_eq!(text, "hello world");
}

#[tokio::test]
async fn a_worker_writes_into_its_own_logs_only() {
    let world = World::new("logs-own");
    let served = world.start().await;
    let (_, mut first, own) = served.running("a").await;
    let (_, mut second, others) = served.running("b").await;
    let refused = first.log(others, 0, &frame("x")).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    let never = v1::Grant { generation: 7, ..others };
    assert_eq!(second.log(never, 0, &frame("x")).await.unwrap_err().code(), Code::PermissionDenied);
    let mut back = served.worker(NodeId(1), vec![own]).await;
    assert!(back.log(own, 0, &frame("x")).await.unwrap() > 0);
}

#[tokio::test]
async fn followers_see_all_attempts_in_order_with_a_note_for_each() {
    let world = World::new("logs-follow");
    let served = world.start().await;
    let (id, mut worker, grant) = served.running("a").await;
    worker.log(grant, 0, &frame("from one\n")).await.unwrap();
    let request = v1::LogsRequest { job_id: id.0, follow: true, ..v1::LogsRequest::default() };
    let mut jobs = served.jobs().await;
    let mut following = jobs.logs(request).await.unwrap().into_inner();
    let note = following.message().await.unwrap().unwrap();
    assert_eq!((note.generation, note.stream()), (1, LogStream::Note));
    assert_eq!(following.message().await.unwrap().unwrap().data, b"from one\n");
    let instance = world.cloud.fake.live()[0].instance.clone();
    world.cloud.fake.end(&instance, spotq_model::GoneCause::Preempted);
    served
        .until("a second attempt", |c| c.task(spotq_model::TaskId::only(id)).unwrap().attempts.len() == 2)
        .await;
    let node = served.launched(id).await;
    let mut worker = served.worker(node, Vec::new()).await;
    let second = worker.start_task().await;
    worker.log(second, 0, &frame("from two\n")).await.unwrap();
    worker.report(second, progress(1)).await.unwrap();
    worker.report(second, exited(0)).await.unwrap();
    served.until("the end of the job", |c| phase(c, id) == "done").await;
    let mut rest = Vec::new();
    let all = async {
        while let Some(reply) = following.message().await.unwrap() {
            rest.push((reply.generation, reply.stream(), String::from_utf8(reply.data).unwrap()));
        }
    };
    tokio::time::timeout(DEADLINE, all).await.expect("a finished job's log has an end");
    let kinds: Vec<_> = rest.iter().map(|line| (line.0, line.1)).collect();
    let expected = [(1, LogStream::Note), (2, LogStream::Note), (2, LogStream::Stdout), (2, LogStream::Note)];
    assert_eq!(kinds, expected, "{rest:?}");
    assert!(rest[0].2.contains("preempted without notice"), "{rest:?}");
    assert!(rest[3].2.contains("completed"), "{rest:?}");
    let later = read(&served, v1::LogsRequest { job_id: id.0, ..v1::LogsRequest::default() }).await;
    assert_eq!(later[2..], rest[..], "read afterwards it is the same");
    let one = v1::LogsRequest { job_id: id.0, generation: Some(1), ..v1::LogsRequest::default() };
    assert!(read(&served, one).await.iter().all(|line| line.0 == 1));
}

#[tokio::test]
async fn bytes_that_are_no_log_are_named_and_stop_nobody_else() {
    let world = World::new("logs-garbage");
    let served = world.start().await;
    let (id, mut worker, grant) = served.running("a").await;
    worker.log(grant, 0, &[0xff; 100]).await.unwrap();
    let mut jobs = served.jobs().await;
    let request = v1::LogsRequest { job_id: id.0, ..v1::LogsRequest::default() };
    let mut stream = jobs.logs(request).await.unwrap().into_inner();
    let ended = loop {
        match stream.message().await {
            Ok(Some(_)) => {}
            ended => break ended,
        }
    };
    let ended = ended.unwrap_err();
    assert_eq!(ended.code(), Code::DataLoss);
    assert!(ended.message().contains("attempt 1"), "{ended}");
    assert_eq!(served.submit(job("b")).await.0, 2);
}
