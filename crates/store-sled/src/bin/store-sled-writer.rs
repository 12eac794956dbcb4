//! Appends to a store without end, for the crash tests: it is killed, stopped, or loses its power at any moment.
//!
//! `store-sled-writer DIR ACKS IN_FLIGHT mixed|small device|flush-only` keeps that many appends in flight and adds a line
//! to the file ACKS after each acknowledgement: `ready N`, `acked N` (the store's version), `snapshot N`, `archived N`.
//! It must never write such a line before the store has answered.

#[path = "../../tests/common/records.rs"]
mod records;

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use spotq_model::{Epoch, Version};
use spotq_store::{ArchiveEntry, Store, StoreError};
use spotq_store_sled::{SledOptions, SledStore, SyncMode};

use records::Load;

/// A snapshot for so many records of a mixed load. Frequent, so that dropping old records is seen by the tests too.
const SNAPSHOT_EVERY: u64 = 150;

/// A small load writes so many archive entries, over and over.
const SMALL_ARCHIVE: u64 = 100;

#[expect(clippy::print_stderr, reason = "a test program that says why it ended")]
fn main() -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("cannot start a runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(run()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), Box<dyn std::error::Error>> {
    let usage = "usage: store-sled-writer DIR ACKS IN_FLIGHT mixed|small device|flush-only";
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [dir, acks, in_flight, load, sync] = arguments.as_slice() else { return Err(usage.into()) };
    let sync = match sync.as_str() {
        "device" => SyncMode::Device,
        "flush-only" => SyncMode::FlushOnly,
        _ => return Err(usage.into()),
    };
    let load = [Load::Mixed, Load::Small].into_iter().find(|known| known.name() == load).ok_or(usage)?;
    let mut acks = OpenOptions::new().create(true).append(true).open(acks)?;
    say(&mut acks, "opening", 0)?;
    let store = SledStore::open(Path::new(dir), SledOptions { sync, ..SledOptions::default() })?;
    let epoch = store.take_leadership().await?;
    let version = store.recover().await?.version();
    say(&mut acks, "ready", version.0)?;
    append_for_ever(&store, epoch, version, &mut acks, in_flight.parse()?, load).await
}

async fn append_for_ever(
    store: &SledStore,
    epoch: Epoch,
    mut next: Version,
    acks: &mut File,
    in_flight: usize,
    load: Load,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut pending = VecDeque::new();
    let mut acked = next.0;
    loop {
        while pending.len() < in_flight {
            // Appends of one to three records.
            let count = 1 + next.0 % 3;
            let batch = (next.0..next.0 + count).map(|version| load.record(version)).collect();
            pending.push_back(store.append(epoch, next, batch));
            next = Version(next.0 + count);
        }
        let Some(oldest) = pending.pop_front() else { return Err(StoreError::Stopped.into()) };
        let before = acked;
        acked = oldest.await?.0;
        say(acks, "acked", acked)?;
        let entry = match load {
            Load::Mixed => (before / 50 != acked / 50).then_some(acked / 50),
            Load::Small => (before / 5 != acked / 5).then_some(acked / 5 % SMALL_ARCHIVE),
        };
        if let Some(number) = entry {
            let (key, value) = load.archived(number);
            store.archive(vec![ArchiveEntry { key, value }]).await?;
            say(acks, "archived", number)?;
        }
        if load == Load::Mixed && before / SNAPSHOT_EVERY != acked / SNAPSHOT_EVERY {
            store.snapshot(epoch, Version(acked), records::snapshot(acked)).await?;
            say(acks, "snapshot", acked)?;
        }
    }
}

/// One line in one write, so that a kill never leaves half of one.
fn say(acks: &mut File, word: &str, number: u64) -> io::Result<()> {
    acks.write_all(format!("{word} {number}\n").as_bytes())
}
