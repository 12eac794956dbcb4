//! Runs the writer program, and checks a store against what the writer was told.

pub mod records;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use spotq_store::Store;
use spotq_store_sled::{SledOptions, SledStore};

use records::Load;

/// How long anything may take before a test gives up on it. The machine may be busy; nothing here takes seconds alone.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running writer; it is killed when the test lets go of it.
pub struct Writer {
    pub child: Child,
    acks: PathBuf,
}

/// What the writer was told by the store up to some moment.
#[derive(Debug, Default)]
pub struct Acks {
    pub ready: Option<u64>,
    pub opening: u64,
    pub version: u64,
    pub snapshot: u64,
    pub archived: BTreeSet<u64>,
}

impl Writer {
    /// `acks` is kept over several runs.
    pub fn start(dir: &Path, acks: &Path, in_flight: usize, load: Load, sync: &str) -> Self {
        let child = Command::new(env!("CARGO_BIN_EXE_store-sled-writer"))
            .args([dir, acks])
            .args([&in_flight.to_string(), load.name(), sync])
            .spawn()
            .unwrap();
        Self { child, acks: acks.to_owned() }
    }

    pub fn acks(&self) -> Acks {
        Acks::read(&self.acks)
    }

    /// Waits until the acknowledgements satisfy `enough`.
    pub fn wait_until(&mut self, what: &str, mut enough: impl FnMut(&Acks) -> bool) -> Acks {
        wait_for(what, || {
            let acks = self.acks();
            if enough(&acks) {
                return Some(acks);
            }
            if let Some(status) = self.child.try_wait().unwrap() {
                panic!("the writer ended ({status}) before {what}; acknowledged so far: {acks:?}");
            }
            None
        })
    }
}

/// Waits until the condition holds.
fn wait_for<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < deadline, "no {what} within {PATIENCE:?}");
        std::thread::yield_now();
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl Acks {
    pub fn read(path: &Path) -> Self {
        let mut acks = Self::default();
        let text = std::fs::read_to_string(path).unwrap_or_default();
        // The last line may be half written still.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        for line in whole.lines() {
            let (word, number) = line.split_once(' ').unwrap();
            let number = number.parse().unwrap();
            match word {
                "opening" => (acks.opening, acks.ready) = (acks.opening + 1, None),
                "ready" => acks.ready = Some(number),
                "acked" => acks.version = acks.version.max(number),
                "snapshot" => acks.snapshot = acks.snapshot.max(number),
                "archived" => drop(acks.archived.insert(number)),
                other => panic!("the writer said `{other}`"),
            }
        }
        acks
    }
}

/// Opens the store and says what is wrong with it: anything acknowledged that is missing, or anything that is not as
/// written. Returns the version that was found.
pub async fn check(dir: &Path, load: Load, acks: &Acks) -> Result<u64, String> {
    let store = SledStore::open(dir, SledOptions::default()).map_err(|error| format!("open: {error}"))?;
    let found = store.recover().await.map_err(|error| format!("recover: {error}"))?;
    let version = found.version().0;
    if version < acks.version {
        return Err(format!("acknowledged up to {}, found {version}", acks.version));
    }
    if found.first_version().0 < acks.snapshot {
        return Err(format!("acknowledged snapshot {}, found {}", acks.snapshot, found.first_version()));
    }
    if let Some(snapshot) = &found.snapshot
        && snapshot.bytes != records::snapshot(snapshot.version.0)
    {
        return Err(format!("snapshot {} is not as written", snapshot.version));
    }
    for (number, record) in (found.first_version().0..).zip(&found.records) {
        if *record != load.record(number) {
            return Err(format!("record {number} is not as written"));
        }
    }
    check_archive(&store, load, acks).await?;
    Ok(version)
}

async fn check_archive(store: &SledStore, load: Load, acks: &Acks) -> Result<(), String> {
    let mut missing = acks.archived.clone();
    let mut from = String::new();
    loop {
        let page = store.archived(&from, 500).await.map_err(|error| format!("archived: {error}"))?;
        for entry in &page {
            let number = entry.key.parse().map_err(|error| format!("archive key {}: {error}", entry.key))?;
            if (entry.key.as_str(), &entry.value) != (&load.archived(number).0, &load.archived(number).1) {
                return Err(format!("archive entry {number} is not as written"));
            }
            missing.remove(&number);
        }
        let Some(last) = page.last() else { break };
        from = format!("{}\0", last.key);
    }
    if missing.is_empty() { Ok(()) } else { Err(format!("archived, but not found: {missing:?}")) }
}
