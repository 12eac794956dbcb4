//! INV-14: no secret in a log line, in `Debug` output, or in what the store and the users get to see.

use std::io;
use std::sync::{Arc, Mutex};

use spotq_model::{Input, NodeId};
use spotq_proto::v1;
use spotq_store::Store as _;

use crate::common::worker::exited;
use crate::common::{SECRET, Worker, World, secret};

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test]
async fn no_secret_is_printed_whatever_happens() {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::TRACE)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let world = World::new("secrets");
    let served = world.start().await;
    let (id, mut worker, grant) = served.running("a").await;
    let refused =
        Worker::dial(&served.url, NodeId(1), "guessed-secret".into(), Vec::new()).await.unwrap_err();
    served.engine.handle.command(Input::Requeue { job: id }).await.unwrap();
    worker.report(grant, exited(3)).await.unwrap();
    let mut outputs = served.jobs().await;
    outputs.outputs(v1::JobRequest { job_id: id.0, task_index: 0 }).await.unwrap();
    let uuid = served.cluster().await.jobs[&id].uuid.clone();
    let log = String::from_utf8_lossy(&lines.0.lock().unwrap()).into_owned();
    let shown = [
        log,
        format!("{:?} {:?} {:?}", world.config(), served.engine, secret()),
        format!("{refused:?}"),
        String::from_utf8(world.store.recover().await.unwrap().records.concat()).unwrap(),
    ];
    assert!(shown[0].contains("wrong join secret"), "the log was captured");
    let key = secret().checkpoint_key(&uuid);
    let secrets = [
        secret().join_secret(NodeId(1)),
        "guessed-secret".into(),
        hex(&key),
        format!("{key:?}").trim_matches(['[', ']']).to_owned(),
        hex(&SECRET),
        format!("{SECRET:?}").trim_matches(['[', ']']).to_owned(),
        "worker-env-secret".into(),
    ];
    for (place, text) in ["log", "debug", "status", "store"].iter().zip(&shown) {
        for secret in &secrets {
            assert!(!text.contains(secret.as_str()), "a secret is in the {place}");
        }
    }
}

#[test]
fn each_node_and_each_job_has_secrets_of_its_own() {
    let secret = secret();
    assert_ne!(secret.join_secret(NodeId(1)), secret.join_secret(NodeId(2)));
    assert_ne!(secret.checkpoint_key("a"), secret.checkpoint_key("b"));
    assert!(secret.may_join(NodeId(1), &secret.join_secret(NodeId(1))));
    assert!(!secret.may_join(NodeId(1), &secret.join_secret(NodeId(2))));
}
