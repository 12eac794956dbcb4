//! A worker that does exactly what the test says.

use spotq_model::NodeId;
use spotq_proto::v1::{self, report::What, scheduler_message, worker_message::Kind};
use spotq_proto::{MESSAGE_BYTES_MAX, PROTOCOL_MINOR};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::DEADLINE;

/// More than any test sends at once.
const OUT: usize = 2048;

#[derive(Debug)]
pub struct Worker {
    pub node: NodeId,
    pub welcome: v1::Welcome,
    /// Every order to stop that has come so far.
    pub stops: Vec<v1::StopTask>,
    out: mpsc::Sender<v1::WorkerMessage>,
    incoming: Streaming<v1::SchedulerMessage>,
    next_id: u64,
}

impl Worker {
    pub async fn dial(
        url: &str,
        node: NodeId,
        join_secret: String,
        held: Vec<v1::Grant>,
    ) -> Result<Worker, Status> {
        let hello = v1::Hello {
            node_id: node.0,
            instance_id: String::new(),
            join_secret,
            protocol_minor: PROTOCOL_MINOR,
            worker_version: "test".into(),
            held,
            ..v1::Hello::default()
        };
        let (out, mut incoming) = open(url, Kind::Hello(hello)).await?;
        let welcome = match incoming.message().await?.and_then(|message| message.kind) {
            Some(scheduler_message::Kind::Welcome(welcome)) => welcome,
            other => panic!("a session begins with a welcome, not with {other:?}"),
        };
        Ok(Worker { node, welcome, stops: Vec::new(), out, incoming, next_id: 1 })
    }

    /// The next word of the scheduler; `None` when it has ended the stream.
    pub async fn next(&mut self) -> Result<Option<scheduler_message::Kind>, Status> {
        let message = tokio::time::timeout(DEADLINE, self.incoming.message()).await;
        let kind = message.expect("the scheduler says something in time")?.and_then(|message| message.kind);
        if let Some(scheduler_message::Kind::Stop(stop)) = &kind {
            self.stops.push(*stop);
        }
        Ok(kind)
    }

    pub async fn send(&self, kind: Kind) {
        // The scheduler may have ended the stream, which some tests are about.
        let _ = self.out.send(v1::WorkerMessage { kind: Some(kind) }).await;
    }

    pub async fn heartbeat(&self) {
        self.send(Kind::Heartbeat(v1::Heartbeat::default())).await;
    }

    /// Waits for a task.
    pub async fn grant(&mut self) -> v1::GrantTask {
        loop {
            match self.next().await.unwrap() {
                Some(scheduler_message::Kind::Grant(grant)) => return grant,
                Some(_) => {}
                None => panic!("the scheduler ended the stream instead of granting a task"),
            }
        }
    }

    /// Waits for an order to stop.
    pub async fn stop(&mut self) -> v1::StopTask {
        loop {
            match self.next().await.unwrap() {
                Some(scheduler_message::Kind::Stop(stop)) => return stop,
                Some(_) => {}
                None => panic!("the scheduler ended the stream instead of stopping a task"),
            }
        }
    }

    /// Sends a report without waiting; its number.
    pub async fn send_report(&mut self, grant: v1::Grant, what: What) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.send(Kind::Report(v1::Report { id, grant: Some(grant), at_ms: 0, what: Some(what) })).await;
        id
    }

    /// Waits until a report is acknowledged.
    pub async fn acknowledged(&mut self, id: u64) -> Result<(), Status> {
        loop {
            match self.next().await? {
                Some(scheduler_message::Kind::ReportAck(ack)) if ack.id == id => return Ok(()),
                Some(_) => {}
                None => return Err(Status::cancelled("the stream ended")),
            }
        }
    }

    /// Sends a report and waits for its acknowledgement.
    pub async fn report(&mut self, grant: v1::Grant, what: What) -> Result<(), Status> {
        let id = self.send_report(grant, what).await;
        self.acknowledged(id).await
    }

    /// Takes a task and says that its command runs.
    pub async fn start_task(&mut self) -> v1::Grant {
        let grant = self.grant().await.grant.unwrap();
        self.report(grant, What::Accepted(v1::Accepted {})).await.unwrap();
        self.report(grant, What::Restored(v1::Restored { from: None, fell_back: 0 })).await.unwrap();
        self.report(grant, What::Started(v1::Started { pid: 1 })).await.unwrap();
        grant
    }

    /// Sends a piece of log and waits for the end of what is stored.
    pub async fn log(&mut self, grant: v1::Grant, offset: u64, data: &[u8]) -> Result<u64, Status> {
        self.send(Kind::Log(v1::LogChunk { grant: Some(grant), offset, data: data.to_vec() })).await;
        loop {
            match self.next().await? {
                Some(scheduler_message::Kind::LogAck(ack)) => return Ok(ack.offset),
                Some(_) => {}
                None => return Err(Status::cancelled("the stream ended")),
            }
        }
    }
}

type Opened = (mpsc::Sender<v1::WorkerMessage>, Streaming<v1::SchedulerMessage>);

/// Opens a session whose first message is this one.
pub async fn open(url: &str, first: Kind) -> Result<Opened, Status> {
    let client = v1::workers_client::WorkersClient::new(super::channel(url).await);
    let mut client = client.max_decoding_message_size(MESSAGE_BYTES_MAX);
    let (out, outgoing) = mpsc::channel(OUT);
    out.send(v1::WorkerMessage { kind: Some(first) }).await.unwrap();
    let incoming = client.session(ReceiverStream::new(outgoing)).await?.into_inner();
    Ok((out, incoming))
}

/// The end of a command that exited by itself.
pub fn exited(code: i32) -> What {
    What::Finished(v1::Finished {
        exit_code: Some(code),
        stopped: v1::StopReason::None.into(),
        ..v1::Finished::default()
    })
}

/// A committed checkpoint of this generation.
pub fn committed(generation: u64, number: u64, step: u64) -> What {
    What::Committed(v1::Checkpoint {
        sequence: number,
        log_sequence: number,
        generation,
        step: Some(step),
        bytes_total: 10,
        bytes_uploaded: 10,
        saved_at_ms: 1,
        manifest_hash: "hash".into(),
    })
}

pub fn progress(step: u64) -> What {
    What::Progress(v1::Progress { step, total: Some(100) })
}
