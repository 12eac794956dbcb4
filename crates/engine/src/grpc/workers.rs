//! The stream of one worker: its reports become inputs, the engine's words go out.

use std::pin::Pin;
use std::sync::Arc;

use futures::Stream;
use spotq_core::{NodeState, is_current};
use spotq_model::{Checkpoint, Exit, Generation, Input, NodeId, Progress, Report, TaskId, Timestamp};
use spotq_proto::v1::{self, report::What, scheduler_message::Kind, worker_message};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::auth::{Admission, Caller, IDENTITY_TTL, Joins, Refused, Security, Shown};
use crate::clock::now;
use crate::handle::{Msg, Seen, Shared};
use crate::logs;
use crate::sessions::OUTBOX_SIZE;

#[derive(Debug)]
pub(super) struct Workers {
    shared: Shared,
    joins: Joins,
    security: Option<Arc<Security>>,
}

impl Workers {
    pub(super) fn new(shared: Shared, joins: Joins, security: Option<Arc<Security>>) -> Self {
        Self { shared, joins, security }
    }

    /// Whether the worker is the one that may speak for its node.
    async fn admit(&self, hello: &mut v1::Hello) -> Result<Option<Lease>, Status> {
        let node = NodeId(hello.node_id);
        let shown = Shown {
            join_secret: std::mem::take(&mut hello.join_secret),
            worker_key: std::mem::take(&mut hello.worker_key),
            identity: std::mem::take(&mut hello.identity),
        };
        let joins = self.joins.clone();
        let admitted = spotq_host::blocking(move || joins.admit(node, &shown, now())).await;
        match admitted.map_err(|error| Status::internal(error.to_string()))? {
            Ok(Admission::Bound { lease }) => Ok(Some(Lease { joins: self.joins.clone(), lease })),
            Ok(Admission::Unbound) => Ok(None),
            Err(Refused::Disk(error)) => Err(Status::unavailable(Refused::Disk(error).to_string())),
            Err(refused @ Refused::WrongSecret) => {
                tracing::warn!(%node, "a worker was refused: wrong join secret");
                Err(Status::unauthenticated(refused.to_string()))
            }
            Err(refused) => {
                tracing::warn!(%node, %refused, "a worker was refused");
                Err(Status::unauthenticated(refused.to_string()))
            }
        }
    }
}

/// What makes new identities for the worker of a session.
struct Lease {
    joins: Joins,
    lease: String,
}

type Outgoing = Pin<Box<dyn Stream<Item = Result<v1::SchedulerMessage, Status>> + Send>>;

#[tonic::async_trait]
impl v1::workers_server::Workers for Workers {
    type SessionStream = Outgoing;

    async fn session(
        &self,
        request: Request<Streaming<v1::WorkerMessage>>,
    ) -> Result<Response<Outgoing>, Status> {
        let caller = Caller::of(&request)?;
        let mut incoming = request.into_inner();
        let first = incoming.message().await?.and_then(|message| message.kind);
        let Some(worker_message::Kind::Hello(mut hello)) = first else {
            return Err(Status::invalid_argument("the first message of a worker must be Hello"));
        };
        let node = NodeId(hello.node_id);
        caller.note(node.0);
        let lease = self.admit(&mut hello).await?;
        let held = grants(hello.held)?;
        let (outbox, outgoing) = mpsc::channel(OUTBOX_SIZE);
        let session =
            Session { shared: self.shared.clone(), node, outbox, lease, security: self.security.clone() };
        session.join(held).await?;
        tokio::spawn(session.run(incoming));
        Ok(Response::new(Box::pin(ReceiverStream::new(outgoing))))
    }
}

struct Session {
    shared: Shared,
    node: NodeId,
    outbox: crate::sessions::Outbox,
    lease: Option<Lease>,
    security: Option<Arc<Security>>,
}

/// A grant: which task, which generation of it.
type Held = (TaskId, Generation);

impl Session {
    /// Welcomes the worker and tells it to stop what it may no longer do.
    async fn join(&self, held: Vec<Held>) -> Result<(), Status> {
        let node = self.node;
        let welcome = self.shared.handle.query(move |seen| may_join(seen, node)).await?;
        welcome.map_err(Status::failed_precondition)?;
        let input = Input::WorkerJoined { node, held: held.clone() };
        let asked = held.clone();
        let stale = self.shared.handle.ask(Some(input), move |seen| {
            asked
                .into_iter()
                .filter(|(task, gen_)| !is_current(seen.cluster, node, *task, *gen_))
                .collect::<Vec<_>>()
        });
        let stale = stale.await?;
        let config = &self.shared.config;
        let log_ack = |(task, generation): &Held| v1::LogAck {
            grant: Some((*task, *generation).into()),
            offset: logs::stored(&config.data_dir, *task, *generation),
        };
        let welcome = v1::Welcome {
            cluster: config.policies.cluster.clone(),
            heartbeat_ms: millis(config.heartbeat),
            lease_ttl_ms: config.policies.lease_ttl.0,
            dead_man_ms: millis(config.dead_man),
            logs: held.iter().map(log_ack).collect(),
            identity: self.identity(),
        };
        self.say(Kind::Welcome(welcome)).await;
        for grant in stale {
            self.say(superseded(grant)).await;
        }
        Ok(())
    }

    fn identity(&self) -> Option<v1::Identity> {
        let Lease { joins, lease } = self.lease.as_ref()?;
        let ca_pem = self.security.as_ref().map(|security| security.ca_pem().to_string());
        Some(joins.identity(self.node, lease, now(), ca_pem.unwrap_or_default()))
    }

    /// Gives the worker a new identity long before the old one runs out.
    async fn renew(&self) {
        loop {
            tokio::time::sleep(IDENTITY_TTL.as_duration() / 2).await;
            if let Some(identity) = self.identity() {
                self.say(Kind::Identity(identity)).await;
            }
        }
    }

    async fn run(self, mut incoming: Streaming<v1::WorkerMessage>) {
        let (id, cut) = self.shared.sessions.open(self.node, self.outbox.clone());
        tokio::select! {
            biased;
            () = self.listen(&mut incoming) => {}
            // A report that is cut off in the middle was not acknowledged, so the worker sends it again.
            () = cut.cancelled() => {}
            () = self.outbox.closed() => {}
            () = self.renew() => {}
        }
        self.shared.sessions.close(self.node, id);
    }

    async fn listen(&self, incoming: &mut Streaming<v1::WorkerMessage>) {
        self.shared.handle.tell(Msg::Joined(self.node)).await;
        while let Ok(Some(message)) = incoming.message().await {
            self.shared.sessions.heard(self.node);
            let handled = match message.kind {
                Some(worker_message::Kind::Report(report)) => self.report(report).await,
                Some(worker_message::Kind::Log(chunk)) => self.log(chunk).await,
                Some(worker_message::Kind::Heartbeat(_)) => Ok(()),
                Some(worker_message::Kind::Hello(_)) | None => {
                    Err(Status::invalid_argument("unexpected message in a worker's stream"))
                }
            };
            if let Err(status) = handled {
                let _ = self.outbox.send(Err(status)).await;
                return;
            }
        }
    }

    /// The acknowledgement goes out when the report's events are durable.
    async fn report(&self, report: v1::Report) -> Result<(), Status> {
        let (id, node) = (report.id, self.node);
        let (task, generation): Held =
            report.grant.ok_or_else(|| missing("grant"))?.try_into().map_err(invalid)?;
        let finished = matches!(report.what, Some(What::Finished(_)));
        let what = to_model(report.what.ok_or_else(|| missing("what"))?, generation)?;
        let input = Input::Reported { node, task, generation, report: what };
        let current =
            self.shared.handle.ask(Some(input), move |seen| is_current(seen.cluster, node, task, generation));
        let current = current.await?;
        if !current && !finished {
            self.say(superseded((task, generation))).await;
        }
        self.say(Kind::ReportAck(v1::ReportAck { id })).await;
        Ok(())
    }

    async fn log(&self, chunk: v1::LogChunk) -> Result<(), Status> {
        let grant = chunk.grant.ok_or_else(|| missing("grant"))?;
        let (task, generation): Held = grant.try_into().map_err(invalid)?;
        let node = self.node;
        let mine = self.shared.handle.query(move |seen| {
            let attempts = seen.cluster.task(task).map(|t| t.attempts.as_slice()).unwrap_or_default();
            attempts.iter().any(|a| a.generation == generation && a.node == node)
        });
        if !mine.await? {
            return Err(Status::permission_denied(format!(
                "node {node} never ran generation {generation} of {task}"
            )));
        }
        let data_dir = self.shared.config.data_dir.clone();
        let write = move || logs::write(&data_dir, task, generation, chunk.offset, &chunk.data);
        let written = spotq_host::blocking(write).await.map_err(|e| Status::internal(e.to_string()))?;
        match written {
            Ok(offset) => {
                self.say(Kind::LogAck(v1::LogAck { grant: Some((task, generation).into()), offset })).await;
            }
            // The worker keeps its log and sends it again on its next session.
            Err(error) => tracing::warn!(%task, %generation, %error, "writing a log"),
        }
        Ok(())
    }

    async fn say(&self, kind: Kind) {
        // A closed outbox ends the session on its next turn.
        let _ = self.outbox.send(Ok(v1::SchedulerMessage { kind: Some(kind) })).await;
    }
}

fn may_join(seen: &Seen<'_>, node: NodeId) -> Result<(), String> {
    match seen.cluster.nodes.get(&node).map(|known| known.state) {
        Some(NodeState::Booting | NodeState::Ready) => Ok(()),
        // The cloud may start a node before its answer to the launch is with us: the worker tries again.
        Some(NodeState::Requested) => {
            Err(format!("node {node} is not launched yet, as far as is known here"))
        }
        Some(NodeState::Ending | NodeState::Gone) => Err(format!("node {node} is being ended")),
        None => Err(format!("node {node} is unknown here")),
    }
}

fn superseded((task, generation): Held) -> Kind {
    Kind::Stop(v1::StopTask {
        grant: Some((task, generation).into()),
        reason: v1::StopReason::Superseded.into(),
        deadline_ms: 0,
    })
}

fn to_model(what: What, generation: Generation) -> Result<Report, Status> {
    Ok(match what {
        What::Accepted(_) => Report::Accepted,
        What::Restored(restored) => {
            Report::Restored { from: restored.from.map(checkpoint), fell_back: restored.fell_back }
        }
        What::Started(_) => Report::Started,
        What::Progress(progress) => Report::Progressed { progress: progress_of(&progress) },
        What::Noticed(noticed) => {
            Report::Noticed { deadline: Timestamp(noticed.deadline_ms), source: noticed.source }
        }
        What::NoticeWithdrawn(_) => Report::NoticeWithdrawn,
        What::Committed(committed) => {
            let checkpoint = checkpoint(committed);
            if checkpoint.generation != generation {
                return Err(Status::invalid_argument("a commit of another generation than its grant"));
            }
            Report::Committed { checkpoint }
        }
        What::Finished(finished) => Report::Finished { exit: exit(finished)? },
        What::Superseded(by) => Report::Superseded { by: Generation(by.by_generation) },
    })
}

fn exit(finished: v1::Finished) -> Result<Exit, Status> {
    let stopped = finished.stopped();
    if stopped == v1::StopReason::Unspecified {
        return Err(Status::invalid_argument("`stopped` must say why, or NONE"));
    }
    Ok(Exit {
        exit_code: finished.exit_code,
        signal: finished.signal,
        out_of_memory: finished.out_of_memory,
        launch_error: finished.launch_error,
        signalled: finished.signalled,
        worker_leaving: stopped == v1::StopReason::WorkerLeaving,
        stopped_at: Timestamp(finished.stopped_at_ms),
        last_progress: finished.last_progress.as_ref().map(progress_of),
        detail: finished.detail,
    })
}

fn checkpoint(wire: v1::Checkpoint) -> Checkpoint {
    Checkpoint {
        sequence: wire.sequence,
        log_sequence: wire.log_sequence,
        generation: Generation(wire.generation),
        step: wire.step,
        bytes_total: wire.bytes_total,
        bytes_uploaded: wire.bytes_uploaded,
        saved_at: Timestamp(wire.saved_at_ms),
        manifest_hash: wire.manifest_hash,
    }
}

fn progress_of(wire: &v1::Progress) -> Progress {
    Progress { step: wire.step, total: wire.total }
}

fn grants(held: Vec<v1::Grant>) -> Result<Vec<Held>, Status> {
    held.into_iter().map(|grant| Held::try_from(grant).map_err(invalid)).collect()
}

fn missing(field: &str) -> Status {
    Status::invalid_argument(format!("the message lacks `{field}`"))
}

fn invalid(error: spotq_proto::WireError) -> Status {
    Status::invalid_argument(error.to_string())
}

fn millis(span: std::time::Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
