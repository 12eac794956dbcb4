//! What users see: one state, shown in several ways, with a clear no where there is nothing to see.

use spotq_core::{Cluster, apply};
use spotq_finops::job_report;
use spotq_model::{Input, JobId, JobSpec, Market, Span, TaskId};
use spotq_proto::v1;
use spotq_testkit::job;
use tonic::Code;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

use v1::report::What;

use crate::common::worker::{committed, exited, progress};
use crate::common::{DEADLINE, Served, World, phase};

fn request(job: JobId) -> v1::JobRequest {
    v1::JobRequest { job_id: job.0, task_index: 0 }
}

#[tokio::test]
async fn a_watched_job_is_shown_now_on_changes_and_a_last_time() {
    let world = World::new("view-watch");
    let served = world.start().await;
    let (id, mut worker, grant) = served.running("a").await;
    let mut jobs = served.jobs().await;
    let mut views = jobs.watch(request(id)).await.unwrap().into_inner();
    let first = views.message().await.unwrap().unwrap();
    assert_eq!((first.phase.as_str(), first.progress), ("running", None));
    worker.report(grant, progress(7)).await.unwrap();
    let seven =
        async { while views.message().await.unwrap().unwrap().progress.map(|p| p.step) != Some(7) {} };
    tokio::time::timeout(DEADLINE, seven).await.expect("progress is shown");
    // Newer than what is durable, as progress is made durable seldom.
    worker.report(grant, progress(8)).await.unwrap();
    let eight =
        async { while views.message().await.unwrap().unwrap().progress.map(|p| p.step) != Some(8) {} };
    tokio::time::timeout(DEADLINE, eight).await.expect("progress is shown");
    worker.report(grant, exited(0)).await.unwrap();
    let mut last = None;
    let rest = async {
        while let Some(view) = views.message().await.unwrap() {
            last = Some(view);
        }
    };
    tokio::time::timeout(DEADLINE, rest).await.expect("the stream of a done job ends");
    let last = last.unwrap();
    assert_eq!(
        (last.phase.as_str(), last.outcome.as_deref(), last.exit_code),
        ("done", Some("completed"), Some(0))
    );
    assert_eq!(last.attempts.len(), 1);
    assert_eq!(last.attempts[0].end, "completed");
    assert!(last.started_ms >= Some(last.submitted_ms) && last.ended_ms >= last.started_ms);
    let again = jobs.watch(request(id)).await.unwrap().into_inner().message().await.unwrap().unwrap();
    assert_eq!(again.outcome.as_deref(), Some("completed"), "a done job is shown at once, too");
}

#[tokio::test]
async fn what_the_worker_had_to_add_to_an_end_is_shown_with_it() {
    let world = World::new("view-detail");
    let served = world.start().await;
    let (id, mut worker, grant) = served.running("a").await;
    let What::Finished(failed) = exited(3) else { unreachable!("it is a finish") };
    let added = "the last checkpoint was not uploaded";
    worker
        .report(grant, What::Finished(v1::Finished { detail: Some(added.into()), ..failed }))
        .await
        .unwrap();
    served.until("the end of the job", |c| phase(c, id) == "done").await;
    let view = served.jobs().await.get(request(id)).await.unwrap().into_inner();
    assert_eq!(view.attempts[0].detail, format!("exit code 3; {added}"));
}

#[tokio::test]
async fn a_list_is_cut_by_user_end_and_number() {
    let world = World::new("view-list");
    let served = world.start().await;
    for (name, user) in [("a", "ada"), ("b", "bob"), ("c", "ada"), ("d", "ada")] {
        served.submit(JobSpec { user: user.into(), hold: true, ..job(name) }).await;
    }
    served.engine.handle.command(Input::Cancel { job: JobId(1) }).await.unwrap();
    let jobs = served.jobs().await;
    let list = |include_done: bool, user: Option<&str>, limit: u32| {
        let (mut jobs, user) = (jobs.clone(), user.map(str::to_owned));
        async move {
            let reply = jobs.list(v1::ListRequest { include_done, user, limit }).await.unwrap().into_inner();
            assert!(reply.jobs.iter().all(|job| job.spec.is_none()), "scripts would not fit a list");
            let ids: Vec<u32> = reply.jobs.iter().map(|job| job.job_id).collect();
            (ids, reply.total)
        }
    };
    assert_eq!(list(false, None, 0).await, (vec![2, 3, 4], 3));
    assert_eq!(list(true, None, 0).await, (vec![1, 2, 3, 4], 4));
    assert_eq!(list(true, Some("ada"), 0).await, (vec![1, 3, 4], 3));
    assert_eq!(list(true, None, 2).await, (vec![3, 4], 4), "the newest, and how many there are");
    assert_eq!(list(false, Some("eve"), 0).await, (vec![], 0));
}

#[tokio::test]
async fn an_explanation_says_what_waits_and_what_would_change_it() {
    let world = World::new("view-explain");
    let served = world.start().await;
    let dear = JobSpec {
        resources: spotq_model::Resources { max_hourly: Some("0.01".parse().unwrap()), any_of: Vec::new() },
        ..job("cheap")
    };
    let id = served.submit(dear).await;
    let mut jobs = served.jobs().await;
    let explained = loop {
        let explained = jobs.explain(request(id)).await.unwrap().into_inner();
        if explained.headline.contains("max_hourly_cost") {
            break explained;
        }
        tokio::time::sleep(crate::common::POLL).await;
    };
    assert!(explained.next.contains("max_hourly_cost"), "{explained:?}");
    assert_eq!(explained.pools.len(), 3);
    assert!(
        explained.pools.iter().all(|pool| !pool.eligible && pool.why.contains("0.0100")),
        "{explained:?}"
    );
    let spot = served.submit(JobSpec { hold: true, ..job("any") }).await;
    let pools = jobs.explain(request(spot)).await.unwrap().into_inner().pools;
    let ranks: Vec<_> = pools.iter().map(|pool| pool.rank).collect();
    assert_eq!(ranks, [1, 2, 3]);
    assert!(
        pools[0].pool.ends_with("us-east-1a/c7i.xlarge/spot") && pools[2].pool.ends_with("on-demand"),
        "{pools:?}"
    );
}

/// A job that was preempted once and then completed, and whose nodes are gone.
async fn finished(served: &Served, world: &World) -> JobId {
    let (id, mut worker, grant) = served.running("a").await;
    worker.report(grant, committed(1, 1, 10)).await.unwrap();
    let instance = world.cloud.fake.live()[0].instance.clone();
    world.cloud.fake.end(&instance, spotq_model::GoneCause::Preempted);
    served.until("a second attempt", |c| c.task(TaskId::only(id)).unwrap().attempts.len() == 2).await;
    let mut worker = served.worker(served.launched(id).await, Vec::new()).await;
    let grant = worker.grant().await.grant.unwrap();
    let from = served.cluster().await.task(TaskId::only(id)).unwrap().checkpoint.clone().unwrap();
    let from = v1::Checkpoint {
        sequence: from.sequence,
        log_sequence: from.log_sequence,
        generation: from.generation.0,
        step: from.step,
        ..v1::Checkpoint::default()
    };
    let reports = [
        v1::report::What::Accepted(v1::Accepted {}),
        v1::report::What::Restored(v1::Restored { from: Some(from), fell_back: 0 }),
        v1::report::What::Started(v1::Started { pid: 1 }),
        exited(0),
    ];
    for what in reports {
        worker.report(grant, what).await.unwrap();
    }
    served.until("the end of all", |c| phase(c, id) == "done" && c.live.is_empty()).await;
    id
}

#[tokio::test]
async fn a_report_of_a_finished_job_is_the_same_each_time_and_after_a_restart() {
    let mut world = World::new("view-report");
    world.policies.idle_ttl = Span::ZERO;
    let served = world.start().await;
    let id = finished(&served, &world).await;
    let ask = v1::ReportRequest { job_id: Some(id.0) };
    let first = served.reports().await.report(ask).await.unwrap().into_inner();
    let second = served.reports().await.report(ask).await.unwrap().into_inner();
    served.crash().await;
    let served = world.start().await;
    let third = served.reports().await.report(ask).await.unwrap().into_inner();
    for other in [&second, &third] {
        assert_eq!((&other.jobs, &other.segments), (&first.jobs, &first.segments));
    }
    let report = &first.jobs[0];
    assert_eq!((report.attempts, report.preemptions, report.preemptions_without_notice), (2, 1, 1));
    let sum: i64 = first.segments.iter().map(|segment| segment.amount_nano_usd).sum();
    assert_eq!(report.cost.unwrap().billed_nano_usd, sum);
    let spot = Market::Spot.to_string();
    assert!(
        first.segments.iter().all(|s| s.end_ms.is_some() && s.market == spot && s.price_source == "fake")
    );
    let all = served.reports().await.report(v1::ReportRequest { job_id: None }).await.unwrap().into_inner();
    assert_eq!(all.jobs, first.jobs);
}

#[tokio::test]
async fn the_history_parses_and_adds_up_to_the_same_report() {
    let mut world = World::new("view-events");
    world.policies.idle_ttl = Span::ZERO;
    let served = world.start().await;
    let id = finished(&served, &world).await;
    let other = served.submit(JobSpec { hold: true, ..job("other") }).await;
    let mut replayed = Cluster::default();
    let mut stream =
        served.reports().await.events(v1::EventsRequest { job_id: None }).await.unwrap().into_inner();
    while let Some(line) = stream.message().await.unwrap() {
        assert!(!line.json.contains('\n'));
        assert_eq!(line.version, replayed.version.0);
        apply(&mut replayed, &spotq_engine::decode_record(line.version, line.json.as_bytes()).unwrap())
            .unwrap();
    }
    assert_eq!(replayed, served.cluster().await);
    let now = spotq_engine::now();
    let task = TaskId::only(id);
    assert_eq!(job_report(&replayed, task, now), job_report(&served.cluster().await, task, now));
    let mut stream =
        served.reports().await.events(v1::EventsRequest { job_id: Some(id.0) }).await.unwrap().into_inner();
    let mut lines = 0;
    while let Some(line) = stream.message().await.unwrap() {
        assert!(!line.json.contains(&format!("\"job\":{other}")), "{}", line.json);
        lines += 1;
    }
    assert!(lines > 10, "{lines}");
}

#[tokio::test]
async fn a_drill_needs_a_node_and_then_is_a_preemption() {
    let world = World::new("view-drill");
    let served = world.start().await;
    let held = served.submit(JobSpec { hold: true, ..job("held") }).await;
    let mut jobs = served.jobs().await;
    let drill = |id: JobId| v1::PreemptRequest { job_id: id.0, task_index: 0, notice_ms: 100 };
    let refused = jobs.preempt(drill(held)).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains("held") && refused.message().contains("try again"), "{refused}");
    let (id, _worker, _) = served.running("a").await;
    jobs.preempt(drill(id)).await.unwrap();
    let cluster =
        served.until("a second attempt", |c| c.task(TaskId::only(id)).unwrap().attempts.len() == 2).await;
    assert_eq!(cluster.task(TaskId::only(id)).unwrap().attempts[0].end.as_ref().unwrap().name(), "preempted");
    world.cloud.assert_nothing_early();
}

#[tokio::test]
async fn orders_change_the_job_and_the_answer_shows_it() {
    let world = World::new("view-orders");
    let served = world.start().await;
    let id = served.submit(JobSpec { hold: true, ..job("a") }).await;
    let mut jobs = served.jobs().await;
    let view = jobs.get(request(id)).await.unwrap().into_inner();
    assert_eq!((view.phase.as_str(), view.reason.as_str()), ("held", "held by its user"));
    let view = jobs.release(request(id)).await.unwrap().into_inner().job.unwrap();
    assert_ne!(view.phase, "held");
    let view = jobs.cancel(request(id)).await.unwrap().into_inner().job.unwrap();
    assert_eq!((view.phase.as_str(), view.exit_code), ("done", Some(130)));
    let after = world.store.log().len();
    for _ in 0..2 {
        let view = jobs.cancel(request(id)).await.unwrap().into_inner().job.unwrap();
        assert_eq!(view.outcome.as_deref(), Some("cancelled"), "a done job never changes again");
    }
    for refused in
        [jobs.hold(request(id)).await, jobs.requeue(request(id)).await, jobs.release(request(id)).await]
    {
        let refused = refused.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition);
        assert!(refused.message().contains("is done"), "{refused}");
    }
    let of_job = |event: &spotq_model::Event| {
        !matches!(event.fact, spotq_model::Fact::NodeGone { .. } | spotq_model::Fact::NodeLaunched { .. })
    };
    assert!(!world.store.events()[after..].iter().any(of_job));
}

#[tokio::test]
async fn a_job_that_does_not_exist_is_named_with_a_hint() {
    let world = World::new("view-unknown");
    let served = world.start().await;
    let mut jobs = served.jobs().await;
    let unknown = request(JobId(42));
    let mut refusals = vec![
        jobs.get(unknown).await.unwrap_err(),
        jobs.cancel(unknown).await.unwrap_err(),
        jobs.hold(unknown).await.unwrap_err(),
        jobs.release(unknown).await.unwrap_err(),
        jobs.requeue(unknown).await.unwrap_err(),
        jobs.explain(unknown).await.unwrap_err(),
        jobs.outputs(unknown).await.unwrap_err(),
        jobs.watch(unknown).await.unwrap_err(),
        jobs.logs(v1::LogsRequest { job_id: 42, ..v1::LogsRequest::default() }).await.unwrap_err(),
        jobs.preempt(v1::PreemptRequest { job_id: 42, ..v1::PreemptRequest::default() }).await.unwrap_err(),
    ];
    let mut reports = served.reports().await;
    refusals.push(reports.report(v1::ReportRequest { job_id: Some(42) }).await.unwrap_err());
    served.submit(JobSpec { hold: true, ..job("only") }).await;
    refusals.push(jobs.get(v1::JobRequest { job_id: 1, task_index: 3 }).await.unwrap_err());
    for refused in refusals {
        assert_eq!(refused.code(), Code::NotFound);
        assert!(refused.message().contains("spotq queue --all"), "{refused}");
    }
}

#[tokio::test]
async fn health_and_reflection_answer() {
    let world = World::new("view-health");
    let served = world.start().await;
    let channel = crate::common::channel(&served.url).await;
    let mut health = tonic_health::pb::health_client::HealthClient::new(channel.clone());
    for service in ["", "spotq.v1.Jobs"] {
        let request = tonic_health::pb::HealthCheckRequest { service: service.into() };
        let status = health.check(request).await.unwrap().into_inner().status();
        assert_eq!(status, ServingStatus::Serving);
    }
    let mut reflection =
        tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient::new(channel);
    let request = tonic_reflection::pb::v1::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut answers =
        reflection.server_reflection_info(tokio_stream::iter([request])).await.unwrap().into_inner();
    let answer = answers.message().await.unwrap().unwrap().message_response;
    let Some(MessageResponse::ListServicesResponse(list)) = answer else { panic!("{answer:?}") };
    let names: Vec<_> = list.service.into_iter().map(|service| service.name).collect();
    for service in ["spotq.v1.Jobs", "spotq.v1.Workers", "spotq.v1.Reports", "spotq.v1.Admin"] {
        assert!(names.iter().any(|name| name == service), "{names:?}");
    }
}
