//! Who may call what, over real TLS: every method for every kind of caller, from one table.

use std::sync::Arc;

use spotq_engine::pki::Pki;
use spotq_engine::seal::Sealer;
use spotq_engine::{Role, Security, Users, rule};
use spotq_model::{JobId, NodeId, TaskId};
use spotq_proto::tls::{Trust, connect};
use spotq_proto::v1::{self, scheduler_message, worker_message::Kind};
use spotq_proto::{Method, PROTOCOL_MINOR};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataValue;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status, Streaming};

use crate::common::worker::exited;
use crate::common::{DEADLINE, Served, World, phase, secret};

/// The kinds of callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Who {
    Nobody,
    WrongToken,
    /// A worker that shows its identity where a user's token belongs.
    Worker,
    Viewer,
    /// A user whose job it is not.
    Other,
    Owner,
    Operator,
    Admin,
}

const ALL: [Who; 8] = [
    Who::Nobody,
    Who::WrongToken,
    Who::Worker,
    Who::Viewer,
    Who::Other,
    Who::Owner,
    Who::Operator,
    Who::Admin,
];

/// Written down a second time on purpose: whoever changes the table has to say so here, too.
fn allowed(method: Method) -> &'static [Who] {
    use Who::{Admin, Operator, Other, Owner, Viewer};
    match method {
        // By what its first message shows, whoever the caller is: see the tests of sessions below.
        Method::WorkersSession => &[],
        Method::JobsSubmit => &[Other, Owner, Operator, Admin],
        Method::JobsCancel
        | Method::JobsHold
        | Method::JobsRelease
        | Method::JobsRequeue
        | Method::JobsPreempt
        | Method::JobsLogs
        | Method::JobsOutputs => &[Owner, Operator, Admin],
        Method::JobsGet
        | Method::JobsList
        | Method::JobsWatch
        | Method::JobsExplain
        | Method::JobsOffers
        | Method::ReportsReport
        | Method::AdminInfo
        | Method::AdminNodes
        | Method::AdminWhoAmI => &[Viewer, Other, Owner, Operator, Admin],
        Method::ReportsEvents => &[Operator, Admin],
        Method::AdminUsers => &[Admin],
    }
}

type Bearer = Box<dyn FnMut(Request<()>) -> Result<Request<()>, Status> + Send + Sync>;
type Line = InterceptedService<Channel, Bearer>;

/// A scheduler with identities.
struct Secured {
    world: World,
    served: Served,
    security: Arc<Security>,
    ca_pem: String,
}

impl Secured {
    async fn start(name: &str) -> Secured {
        let world = World::new(name);
        let data = world.config().data_dir;
        let sealer = Sealer::open(&data).unwrap();
        Pki::init(&data, sealer.clone(), &[]).unwrap();
        let mut users = Users::none(&secret());
        for (name, role) in [
            ("vera", Role::Viewer),
            ("eve", Role::User),
            ("ada", Role::User),
            ("otto", Role::Operator),
            ("root", Role::Admin),
        ] {
            users.add(name, role, Some(&format!("spotq_{name}")), None).unwrap();
        }
        users.save(&data).unwrap();
        Secured::start_in(world).await
    }

    /// A new term on the same disk.
    async fn start_in(world: World) -> Secured {
        let data = world.config().data_dir;
        let sealer = Sealer::open(&data).unwrap();
        let security = Arc::new(Security::open(&data, &secret(), sealer).unwrap());
        let served = world.start_secured(security.clone()).await;
        let ca_pem = std::fs::read_to_string(Security::ca_path(&data)).unwrap();
        Secured { world, served, security, ca_pem }
    }

    async fn again(self) -> Secured {
        self.served.crash().await;
        Secured::start_in(self.world).await
    }

    async fn channel(&self) -> Channel {
        self.try_channel(&Trust { ca_pem: self.ca_pem.clone(), identity_pem: None }).await.unwrap()
    }

    async fn try_channel(&self, trust: &Trust) -> Result<Channel, spotq_proto::tls::TlsError> {
        connect(Endpoint::from_shared(self.served.url.clone()).unwrap(), trust).await
    }

    async fn line(&self, who: Who) -> Line {
        let token = match who {
            Who::Nobody => None,
            Who::WrongToken => Some("spotq_guessed".to_owned()),
            Who::Worker => Some("spotqw_1.99999999999999.00".to_owned()),
            Who::Viewer => Some("spotq_vera".to_owned()),
            Who::Other => Some("spotq_eve".to_owned()),
            Who::Owner => Some("spotq_ada".to_owned()),
            Who::Operator => Some("spotq_otto".to_owned()),
            Who::Admin => Some("spotq_root".to_owned()),
        };
        let value: Option<MetadataValue<_>> = token.map(|token| format!("Bearer {token}").parse().unwrap());
        let bearer: Bearer = Box::new(move |mut request: Request<()>| {
            if let Some(value) = &value {
                request.metadata_mut().insert("authorization", value.clone());
            }
            Ok(request)
        });
        InterceptedService::new(self.channel().await, bearer)
    }

    /// A job of ada's that is held.
    async fn held_job(&self) -> JobId {
        let mut spec = spotq_testkit::job("held");
        spec.hold = true;
        spec.user = "root".into();
        spec.env.insert("API_KEY".into(), "sesame".into());
        let request = v1::SubmitRequest { client_key: "key".into(), spec: Some((&spec).into()) };
        let mut jobs = v1::jobs_client::JobsClient::new(self.line(Who::Owner).await);
        JobId(jobs.submit(request).await.unwrap().into_inner().job_id)
    }

    async fn code(&self, method: Method, who: Who, job: JobId) -> Code {
        let called = call(method, self.line(who).await, job);
        let called = tokio::time::timeout(DEADLINE, called).await.expect("the call ends");
        called.map_or_else(|status| status.code(), |()| Code::Ok)
    }
}

/// Calls the method about the job, and waits for the first answer.
async fn call(method: Method, line: Line, job: JobId) -> Result<(), Status> {
    use v1::admin_client::AdminClient;
    use v1::jobs_client::JobsClient;
    use v1::reports_client::ReportsClient;
    let about = v1::JobRequest { job_id: job.0, task_index: 0 };
    async fn first<T>(stream: tonic::Response<Streaming<T>>) -> Result<(), Status> {
        stream.into_inner().message().await.map(drop)
    }
    match method {
        Method::WorkersSession => {
            let hello = Kind::Hello(v1::Hello { node_id: 1, ..v1::Hello::default() });
            let hello = v1::WorkerMessage { kind: Some(hello) };
            let mut client = v1::workers_client::WorkersClient::new(line);
            first(client.session(tokio_stream::iter([hello])).await?).await
        }
        Method::JobsSubmit => {
            let mut spec = spotq_testkit::job("another");
            spec.hold = true;
            let request = v1::SubmitRequest { client_key: "another".into(), spec: Some((&spec).into()) };
            JobsClient::new(line).submit(request).await.map(drop)
        }
        Method::JobsCancel => JobsClient::new(line).cancel(about).await.map(drop),
        Method::JobsHold => JobsClient::new(line).hold(about).await.map(drop),
        Method::JobsRelease => JobsClient::new(line).release(about).await.map(drop),
        Method::JobsRequeue => JobsClient::new(line).requeue(about).await.map(drop),
        Method::JobsPreempt => {
            let request = v1::PreemptRequest { job_id: job.0, task_index: 0, notice_ms: 0 };
            JobsClient::new(line).preempt(request).await.map(drop)
        }
        Method::JobsGet => JobsClient::new(line).get(about).await.map(drop),
        Method::JobsList => JobsClient::new(line).list(v1::ListRequest::default()).await.map(drop),
        Method::JobsWatch => first(JobsClient::new(line).watch(about).await?).await,
        Method::JobsExplain => JobsClient::new(line).explain(about).await.map(drop),
        Method::JobsLogs => {
            let request = v1::LogsRequest { job_id: job.0, ..v1::LogsRequest::default() };
            first(JobsClient::new(line).logs(request).await?).await
        }
        Method::JobsOffers => JobsClient::new(line).offers(v1::OffersRequest::default()).await.map(drop),
        Method::JobsOutputs => JobsClient::new(line).outputs(about).await.map(drop),
        Method::ReportsReport => {
            ReportsClient::new(line).report(v1::ReportRequest { job_id: Some(job.0) }).await.map(drop)
        }
        Method::ReportsEvents => {
            first(ReportsClient::new(line).events(v1::EventsRequest { job_id: None }).await?).await
        }
        Method::AdminInfo => AdminClient::new(line).info(v1::InfoRequest {}).await.map(drop),
        Method::AdminNodes => {
            AdminClient::new(line).nodes(v1::NodesRequest { include_gone: true }).await.map(drop)
        }
        Method::AdminWhoAmI => AdminClient::new(line).who_am_i(v1::WhoAmIRequest {}).await.map(drop),
        Method::AdminUsers => AdminClient::new(line).users(v1::UsersRequest {}).await.map(drop),
    }
}

fn is_denied(code: Code) -> bool {
    matches!(code, Code::PermissionDenied | Code::Unauthenticated)
}

#[tokio::test]
async fn every_method_is_for_those_of_the_table_and_nobody_else() {
    let secured = Secured::start("access").await;
    let job = secured.held_job().await;
    let before = secured.served.cluster().await.jobs;
    // Those who may not first: they must change nothing.
    for &method in Method::ALL {
        for who in ALL.into_iter().filter(|who| !allowed(method).contains(who)) {
            let code = secured.code(method, who, job).await;
            assert!(is_denied(code), "{who:?} calls {}: {code:?} ({:?})", method.path(), rule(method));
            let anonymous = matches!(who, Who::Nobody | Who::WrongToken | Who::Worker);
            let wanted = if anonymous { Code::Unauthenticated } else { Code::PermissionDenied };
            assert!(code == wanted || method == Method::WorkersSession, "{who:?} {}", method.path());
        }
    }
    assert_eq!(secured.served.cluster().await.jobs, before);
    for &method in Method::ALL {
        for &who in allowed(method) {
            let code = secured.code(method, who, job).await;
            assert!(!is_denied(code), "{who:?} calls {}: {code:?}", method.path());
            assert_ne!(code, Code::Unimplemented, "{}", method.path());
        }
    }
}

#[tokio::test]
async fn a_job_is_of_whoever_sent_it_and_its_environment_is_shown_to_no_other() {
    let secured = Secured::start("owner").await;
    let job = secured.held_job().await;
    let about = v1::JobRequest { job_id: job.0, task_index: 0 };
    for (who, value) in
        [(Who::Owner, "sesame"), (Who::Admin, "sesame"), (Who::Other, "(hidden)"), (Who::Viewer, "(hidden)")]
    {
        let mut jobs = v1::jobs_client::JobsClient::new(secured.line(who).await);
        let got = jobs.get(about).await.unwrap().into_inner();
        assert_eq!(got.user, "ada", "the request said root");
        assert_eq!(got.spec.unwrap().env["API_KEY"], value, "{who:?}");
        let watched = jobs.watch(about).await.unwrap().into_inner().message().await.unwrap().unwrap();
        assert_eq!(watched.spec.unwrap().env["API_KEY"], value, "{who:?}");
    }
    // Another's key names another's job no more than any other key does.
    let mut jobs = v1::jobs_client::JobsClient::new(secured.line(Who::Other).await);
    let spec = Some((&spotq_testkit::job("mine")).into());
    let reply = jobs.submit(v1::SubmitRequest { client_key: "key".into(), spec }).await.unwrap().into_inner();
    assert!(reply.created && reply.job_id != job.0, "{reply:?}");
}

#[tokio::test]
async fn a_method_that_is_none_is_refused_and_a_probe_is_answered() {
    let secured = Secured::start("paths").await;
    let mut grpc = tonic::client::Grpc::new(secured.line(Who::Admin).await);
    grpc.ready().await.unwrap();
    let path = tonic::codegen::http::uri::PathAndQuery::from_static("/spotq.v1.Jobs/Nothing");
    let codec = tonic_prost::ProstCodec::<v1::JobRequest, v1::JobView>::default();
    let code = grpc.unary(Request::new(v1::JobRequest::default()), path, codec).await.unwrap_err().code();
    assert_eq!(code, Code::Unimplemented);
    let mut health = tonic_health::pb::health_client::HealthClient::new(secured.line(Who::Nobody).await);
    health.check(tonic_health::pb::HealthCheckRequest::default()).await.unwrap();
}

#[tokio::test]
async fn a_stream_ends_when_its_user_is_removed_and_goes_on_when_another_is() {
    let secured = Secured::start("stream").await;
    let job = secured.held_job().await;
    let data = secured.world.config().data_dir;
    let watch = async |who| {
        let mut jobs = v1::jobs_client::JobsClient::new(secured.line(who).await);
        let mut stream =
            jobs.watch(v1::JobRequest { job_id: job.0, task_index: 0 }).await.unwrap().into_inner();
        stream.message().await.unwrap().expect("how it is now");
        stream
    };
    let (mut hers, mut ours) = (watch(Who::Owner).await, watch(Who::Operator).await);
    let mut users = Users::load(&data, &secret()).unwrap();
    users.remove("ada").unwrap();
    users.save(&data).unwrap();
    secured.security.reload().unwrap();
    /// Reads on, past what is no news; `true` at the end of the job.
    async fn to_the_end(stream: &mut Streaming<v1::JobView>) -> Result<bool, Code> {
        while let Some(view) = stream.message().await.map_err(|status| status.code())? {
            if view.phase == "done" {
                return Ok(true);
            }
        }
        Ok(false)
    }
    let ended = tokio::time::timeout(DEADLINE, to_the_end(&mut hers)).await.expect("it ends");
    assert_eq!(ended, Err(Code::Unauthenticated));
    call(Method::JobsCancel, secured.line(Who::Operator).await, job).await.unwrap();
    let news = tokio::time::timeout(DEADLINE, to_the_end(&mut ours)).await.expect("the other stream lives");
    assert_eq!(news, Ok(true));
}

#[tokio::test]
async fn a_scheduler_of_another_ca_is_not_talked_to_and_plain_text_gets_no_answer() {
    let secured = Secured::start("ca").await;
    let other = World::new("other-ca");
    let data = other.config().data_dir;
    Pki::init(&data, Sealer::open(&data).unwrap(), &[]).unwrap();
    let ca_pem = std::fs::read_to_string(Security::ca_path(&data)).unwrap();
    let error = secured.try_channel(&Trust { ca_pem, identity_pem: None }).await.unwrap_err();
    assert!(format!("{error:?}").contains("UnknownIssuer"), "{error:?}");
    let none = secured.try_channel(&Trust::default()).await.unwrap_err();
    assert!(none.to_string().contains("ca.pem"), "{none}");
    let plain = secured.served.url.replace("https", "http");
    let plain = connect(Endpoint::from_shared(plain).unwrap(), &Trust::default()).await;
    let info = v1::InfoRequest {};
    let answer = match plain {
        Ok(channel) => v1::admin_client::AdminClient::new(channel).info(info).await.map(drop).err(),
        Err(error) => Some(Status::unavailable(error.to_string())),
    };
    assert!(answer.is_some(), "plain text was answered");
}

#[tokio::test]
async fn a_user_with_a_certificate_is_known_by_it_until_it_is_removed() {
    let secured = Secured::start("certificate").await;
    let data = secured.world.config().data_dir;
    let pki = Pki::open(&data, Sealer::open(&data).unwrap()).unwrap();
    let certified = pki.user("carl").unwrap();
    let mut users = Users::load(&data, &secret()).unwrap();
    users.add("carl", Role::Operator, None, Some(&certified.der)).unwrap();
    users.save(&data).unwrap();
    let trust = Trust { ca_pem: secured.ca_pem.clone(), identity_pem: Some(certified.pem.clone()) };
    let who = async || {
        let mut admin = v1::admin_client::AdminClient::new(secured.try_channel(&trust).await.unwrap());
        admin.who_am_i(v1::WhoAmIRequest {}).await.map(|reply| reply.into_inner())
    };
    let carl = v1::UserView { name: "carl".into(), role: "operator".into() };
    assert_eq!(who().await.unwrap(), carl, "added while it runs");
    users.remove("carl").unwrap();
    users.save(&data).unwrap();
    secured.security.reload().unwrap();
    assert_eq!(who().await.unwrap_err().code(), Code::Unauthenticated);
    // Signed by our CA, and still nobody's.
    let stranger = Trust { identity_pem: Some(pki.user("carl").unwrap().pem), ..trust.clone() };
    let mut admin = v1::admin_client::AdminClient::new(secured.try_channel(&stranger).await.unwrap());
    assert_eq!(admin.who_am_i(v1::WhoAmIRequest {}).await.unwrap_err().code(), Code::Unauthenticated);
}

#[tokio::test]
async fn a_new_ca_is_taken_without_a_restart_and_the_old_one_is_trusted_until_it_is_forgotten() {
    let secured = Secured::start("rotate").await;
    let data = secured.world.config().data_dir;
    let mut pki = Pki::open(&data, Sealer::open(&data).unwrap()).unwrap();
    let old_user = pki.user("old").unwrap();
    let mut users = Users::load(&data, &secret()).unwrap();
    users.add("old", Role::User, None, Some(&old_user.der)).unwrap();
    users.save(&data).unwrap();
    let before = secured.line(Who::Admin).await;
    pki.renew_ca(1_000).unwrap();
    secured.security.reload().unwrap();
    let old = Trust { ca_pem: secured.ca_pem.clone(), identity_pem: Some(old_user.pem.clone()) };
    let both = std::fs::read_to_string(Security::ca_path(&data)).unwrap();
    let new = Trust { ca_pem: pem_blocks(&both)[0].clone(), identity_pem: None };
    assert_eq!(pem_blocks(&both).len(), 2);
    let me = async |trust: &Trust| {
        let channel = secured.try_channel(trust).await?;
        let mut admin = v1::admin_client::AdminClient::new(channel);
        Ok::<_, spotq_proto::tls::TlsError>(
            admin.who_am_i(v1::WhoAmIRequest {}).await.map(|r| r.into_inner().name),
        )
    };
    assert_eq!(me(&old).await.unwrap().unwrap(), "old", "with the old CA's certificates on both sides");
    assert_eq!(me(&new).await.unwrap().unwrap_err().code(), Code::Unauthenticated, "the new CA is trusted");
    v1::admin_client::AdminClient::new(before).info(v1::InfoRequest {}).await.unwrap();
    assert!(pki.forget_old(1_001, 100).is_err(), "too early");
    pki.forget_old(1_100, 100).unwrap();
    secured.security.reload().unwrap();
    assert!(me(&old).await.is_err(), "the old CA counts no more");
    assert_eq!(me(&new).await.unwrap().unwrap_err().code(), Code::Unauthenticated);
}

fn pem_blocks(pem: &str) -> Vec<String> {
    let end = "-----END CERTIFICATE-----";
    pem.split_inclusive(end)
        .filter(|block| block.contains(end))
        .map(|block| block.trim().to_owned())
        .collect()
}

/// A session's two ends, and its welcome.
struct Session {
    welcome: v1::Welcome,
    out: mpsc::Sender<v1::WorkerMessage>,
    incoming: Streaming<v1::SchedulerMessage>,
}

fn hello(node: NodeId, key: &str, join_secret: String, identity: &str) -> v1::Hello {
    v1::Hello {
        node_id: node.0,
        join_secret,
        worker_key: key.repeat(64),
        identity: identity.to_owned(),
        protocol_minor: PROTOCOL_MINOR,
        ..v1::Hello::default()
    }
}

impl Secured {
    async fn session(&self, hello: v1::Hello) -> Result<Session, Status> {
        let mut client = v1::workers_client::WorkersClient::new(self.channel().await);
        let (out, outgoing) = mpsc::channel(64);
        out.send(v1::WorkerMessage { kind: Some(Kind::Hello(hello)) }).await.unwrap();
        let mut incoming = client.session(ReceiverStream::new(outgoing)).await?.into_inner();
        match incoming.message().await?.and_then(|message| message.kind) {
            Some(scheduler_message::Kind::Welcome(welcome)) => Ok(Session { welcome, out, incoming }),
            other => panic!("a session begins with a welcome, not with {other:?}"),
        }
    }

    async fn refused(&self, hello: v1::Hello) -> bool {
        match self.session(hello).await {
            Ok(_) => false,
            Err(status) => {
                assert_eq!(status.code(), Code::Unauthenticated, "{status}");
                true
            }
        }
    }

    /// A job's node that is launched, not joined.
    async fn node(&self, name: &str) -> (JobId, NodeId) {
        let job = self.served.submit(spotq_testkit::job(name)).await;
        (job, self.served.launched(job).await)
    }
}

#[tokio::test]
async fn a_worker_joins_once_with_its_secret_and_then_with_its_identity_across_restarts() {
    let secured = Secured::start("join").await;
    let (_, node) = secured.node("a").await;
    let (_, other) = secured.node("b").await;
    let join = |node| secret().join_secret(node);
    // Nobody, a guess, another node's secret, and a worker without a key of its own.
    assert!(secured.refused(hello(node, "a", String::new(), "")).await);
    assert!(secured.refused(hello(node, "a", "guess".into(), "")).await);
    assert!(secured.refused(hello(node, "a", join(other), "")).await);
    assert!(
        secured.refused(v1::Hello { worker_key: String::new(), ..hello(node, "", join(node), "") }).await
    );
    let first = secured.session(hello(node, "a", join(node), "")).await.unwrap();
    let given = first.welcome.identity.clone().unwrap();
    assert_eq!(given.ca_pem, secured.ca_pem);
    drop(first);
    // The secret is worth nothing for anybody else, before and after a restart of the scheduler.
    let secured = {
        assert!(secured.refused(hello(node, "b", join(node), "")).await);
        secured.again().await
    };
    assert!(secured.refused(hello(node, "b", join(node), "")).await);
    assert!(secured.refused(hello(other, "a", String::new(), &given.token)).await, "of another node");
    let again = secured.session(hello(node, "a", String::new(), &given.token)).await.unwrap();
    assert!(again.welcome.identity.is_some());
    // A worker that lost its identity, but not its key, is still the one that joined.
    secured.session(hello(node, "a", join(node), "")).await.unwrap();
}

#[tokio::test]
async fn a_worker_speaks_for_its_own_node_and_generation_alone() {
    let secured = Secured::start("generation").await;
    let (job, node) = secured.node("a").await;
    let (_, stranger) = secured.node("b").await;
    let join = |node| secret().join_secret(node);
    let mut mine = secured.session(hello(node, "a", join(node), "")).await.unwrap();
    let grant = loop {
        let message =
            tokio::time::timeout(DEADLINE, mine.incoming.message()).await.unwrap().unwrap().unwrap();
        if let Some(scheduler_message::Kind::Grant(grant)) = message.kind {
            break grant.grant.unwrap();
        }
    };
    let report = |grant, id| {
        let report = v1::Report { id, grant: Some(grant), at_ms: 0, what: Some(exited(0)) };
        v1::WorkerMessage { kind: Some(Kind::Report(report)) }
    };
    let acknowledged = async |session: &mut Session| loop {
        let message = tokio::time::timeout(DEADLINE, session.incoming.message()).await.unwrap();
        match message.unwrap().unwrap().kind {
            Some(scheduler_message::Kind::ReportAck(_)) => return,
            _ => continue,
        }
    };
    let before = secured.served.cluster().await.task(TaskId::only(job)).unwrap().clone();
    // Another node's worker, and an older and a newer generation.
    let mut other = secured.session(hello(stranger, "b", join(stranger), "")).await.unwrap();
    other.out.send(report(grant, 1)).await.unwrap();
    acknowledged(&mut other).await;
    mine.out.send(report(v1::Grant { generation: grant.generation + 1, ..grant }, 1)).await.unwrap();
    acknowledged(&mut mine).await;
    assert_eq!(secured.served.cluster().await.task(TaskId::only(job)).unwrap(), &before);
    let log = v1::LogChunk { grant: Some(grant), offset: 0, data: b"forged".to_vec() };
    other.out.send(v1::WorkerMessage { kind: Some(Kind::Log(log)) }).await.unwrap();
    let ended = loop {
        match tokio::time::timeout(DEADLINE, other.incoming.message()).await.unwrap() {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the stream ended without a reason"),
            Err(status) => break status,
        }
    };
    assert_eq!(ended.code(), Code::PermissionDenied);
    mine.out.send(report(grant, 2)).await.unwrap();
    acknowledged(&mut mine).await;
    secured.served.until("the end of the job", |c| phase(c, job) == "done").await;
}

#[tokio::test]
async fn what_was_done_and_refused_is_in_the_audit_log_and_no_token_is() {
    let secured = Secured::start("audit").await;
    let job = secured.held_job().await;
    assert!(is_denied(secured.code(Method::JobsCancel, Who::Other, job).await));
    assert!(is_denied(secured.code(Method::AdminInfo, Who::WrongToken, job).await));
    assert_eq!(secured.code(Method::JobsCancel, Who::Owner, job).await, Code::Ok);
    let data = secured.world.config().data_dir;
    let wanted = [
        (r#""who":"ada""#, ".Jobs/Submit", "allowed"),
        (r#""who":"eve""#, ".Jobs/Cancel", "denied"),
        (r#""who":"""#, ".Admin/Info", "denied"),
        (r#""who":"ada""#, ".Jobs/Cancel", "allowed"),
    ];
    let log = || {
        let files = std::fs::read_dir(data.join("audit")).unwrap().flatten();
        files.map(|file| std::fs::read_to_string(file.path()).unwrap()).collect::<String>()
    };
    let found = async {
        loop {
            let text = log();
            let has = |(who, call, outcome): &(&str, &str, &str)| {
                text.lines().any(|line| [who, call, outcome].iter().all(|part| line.contains(**part)))
            };
            if wanted.iter().all(has) {
                return text;
            }
            tokio::time::sleep(crate::common::POLL).await;
        }
    };
    let text = tokio::time::timeout(DEADLINE, found).await.unwrap_or_else(|_| panic!("{}", log()));
    assert!(!text.contains("spotq_"), "{text}");
    assert!(text.contains(&format!(r#""about":{},"#, job.0)), "{text}");
    assert!(spotq_engine::audit::verify(&data, &secret()).unwrap().lines >= 4);
}
