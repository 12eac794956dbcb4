//! Events as the store keeps them: JSON with a schema number, apart from the wire. Old schemas are read for ever.

use serde::{Deserialize, Serialize};
use spotq_core::{Cluster, IllegalEvent, apply};
use spotq_model::{EVENT_SCHEMA, Event, EventRecord, Version};
use spotq_store::{Recovered, Snapshot, StoreError};

/// The version of the snapshot's format. The records behind a snapshot may be gone, so old ones are read for ever.
const SNAPSHOT_SCHEMA: u16 = 1;

/// A store that cannot be read back.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error(
        "record {version} of the store is not an event ({source}); restore the data directory from a backup"
    )]
    NotAnEvent { version: u64, source: serde_json::Error },
    #[error(
        "record {version} of the store has schema {found}, this version reads up to {EVENT_SCHEMA}; use a newer spotqd"
    )]
    FromTheFuture { version: u64, found: u16 },
    #[error("the snapshot of the store is damaged ({source}); restore the data directory from a backup")]
    Snapshot { source: serde_json::Error },
    #[error(
        "the snapshot of the store has schema {found}, this version reads up to {SNAPSHOT_SCHEMA}; use a newer spotqd"
    )]
    SnapshotFromTheFuture { found: u16 },
    #[error(
        "the snapshot of the store says that it sums up {says} records, but it is kept as the sum of {kept}; restore the data directory from a backup"
    )]
    SnapshotElsewhere { says: Version, kept: Version },
    #[error("the store does not add up: {0}; restore the data directory from a backup")]
    Illegal(#[from] IllegalEvent),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The bytes of one event.
pub fn encode_event(event: &Event) -> Vec<u8> {
    #[derive(Serialize)]
    struct Borrowed<'a> {
        schema: u16,
        event: &'a Event,
    }
    serde_json::to_vec(&Borrowed { schema: EVENT_SCHEMA, event })
        .expect("events hold only strings, numbers and lists")
}

/// Reads one record; `version` is its place, for the message.
pub fn decode_record(version: u64, bytes: &[u8]) -> Result<Event, RecordError> {
    let read = serde_json::from_slice::<EventRecord>(bytes);
    // A newer record may not even look like an event of today, so its schema is asked for alone.
    let schema = read.as_ref().map_or_else(|_| schema_of(bytes), |record| Some(record.schema));
    if let Some(found) = schema.filter(|found| *found > EVENT_SCHEMA) {
        return Err(RecordError::FromTheFuture { version, found });
    }
    read.map(|record| record.event).map_err(|source| RecordError::NotAnEvent { version, source })
}

/// The bytes of a snapshot.
pub(crate) fn encode_snapshot(cluster: &Cluster) -> Vec<u8> {
    #[derive(Serialize)]
    struct Borrowed<'a> {
        schema: u16,
        cluster: &'a Cluster,
    }
    serde_json::to_vec(&Borrowed { schema: SNAPSHOT_SCHEMA, cluster })
        .expect("the state holds only strings, numbers and lists")
}

/// The state that a store adds up to.
pub(crate) fn rebuild(recovered: &Recovered) -> Result<Cluster, RecordError> {
    let mut cluster = recovered.snapshot.as_ref().map_or(Ok(Cluster::default()), decode_snapshot)?;
    for (version, record) in (recovered.first_version().0..).zip(&recovered.records) {
        apply(&mut cluster, &decode_record(version, record)?)?;
    }
    Ok(cluster)
}

fn decode_snapshot(snapshot: &Snapshot) -> Result<Cluster, RecordError> {
    #[derive(Deserialize)]
    struct Owned {
        cluster: Cluster,
    }
    if let Some(found) = schema_of(&snapshot.bytes).filter(|found| *found > SNAPSHOT_SCHEMA) {
        return Err(RecordError::SnapshotFromTheFuture { found });
    }
    let Owned { cluster } =
        serde_json::from_slice(&snapshot.bytes).map_err(|source| RecordError::Snapshot { source })?;
    let (says, kept) = (cluster.version, snapshot.version);
    if says == kept { Ok(cluster) } else { Err(RecordError::SnapshotElsewhere { says, kept }) }
}

fn schema_of(bytes: &[u8]) -> Option<u16> {
    #[derive(Deserialize)]
    struct Head {
        schema: u16,
    }
    serde_json::from_slice::<Head>(bytes).ok().map(|head| head.schema)
}
