//! Events as the store keeps them: JSON with a schema number, apart from the wire. Old schemas are read for ever.

use spotq_core::{Cluster, IllegalEvent, apply};
use spotq_model::{EVENT_SCHEMA, Event, EventRecord};
use spotq_store::{Recovered, StoreError};

/// A store that cannot be read back.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error("record {version} of the store is not an event ({source}); restore the data directory from a backup")]
    NotAnEvent { version: u64, source: serde_json::Error },
    #[error("record {version} of the store has schema {found}, this version reads up to {EVENT_SCHEMA}; use a newer spotqd")]
    FromTheFuture { version: u64, found: u16 },
    #[error("the snapshot of the store is damaged ({source}); restore the data directory from a backup")]
    Snapshot { source: serde_json::Error },
    #[error("the store does not add up: {0}; restore the data directory from a backup")]
    Illegal(#[from] IllegalEvent),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The bytes of one event.
pub fn encode_event(event: &Event) -> Vec<u8> {
    #[derive(serde::Serialize)]
    struct Borrowed<'a> {
        schema: u16,
        event: &'a Event,
    }
    serde_json::to_vec(&Borrowed { schema: EVENT_SCHEMA, event }).expect("events hold only strings, numbers and lists")
}

/// Reads one record; `version` is its place, for the message.
pub fn decode_record(version: u64, bytes: &[u8]) -> Result<Event, RecordError> {
    let record: EventRecord =
        serde_json::from_slice(bytes).map_err(|source| RecordError::NotAnEvent { version, source })?;
    if record.schema > EVENT_SCHEMA {
        return Err(RecordError::FromTheFuture { version, found: record.schema });
    }
    Ok(record.event)
}

/// The state that a store adds up to.
pub(crate) fn rebuild(recovered: &Recovered) -> Result<Cluster, RecordError> {
    let mut cluster = match &recovered.snapshot {
        Some(snapshot) => {
            serde_json::from_slice(&snapshot.bytes).map_err(|source| RecordError::Snapshot { source })?
        }
        None => Cluster::default(),
    };
    for (version, record) in (recovered.first_version().0..).zip(&recovered.records) {
        apply(&mut cluster, &decode_record(version, record)?)?;
    }
    Ok(cluster)
}
