//! What the cloud keeps of a node on disk, so that a restarted cloud takes its nodes over.
//!
//! One directory per node: `node.json` (ours), `worker.log`, and `disk/`, which is the node's own and vanishes
//! with it, as the disk of an instance does. No secret is ever written here.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use spotq_model::{InstanceId, Quote, Timestamp};
use spotq_provider::{GoneCause, Instance, Launched};

use crate::LocalError;
use crate::metadata::Notice;
use crate::tree::ProcessId;

const RECORD_VERSION: u32 = 1;
const RECORD_FILE: &str = "node.json";

/// A node as kept on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRecord {
    version: u32,
    /// As `list_owned` reports it.
    pub seen: Instance,
    pub cluster: String,
    pub quote: Quote,
    pub expires_at: Timestamp,
    pub metadata_port: u16,
    pub cgroup: Option<PathBuf>,
    pub process: Option<ProcessId>,
    /// Drawn when the node ran first, or given by a drill.
    pub notice: Option<Notice>,
    /// Why it is being ended, once it is.
    pub ending: Option<GoneCause>,
}

impl NodeRecord {
    /// What its launch is answered with, however often it is asked.
    #[must_use]
    pub fn launched(&self) -> Launched {
        let Instance { instance, launched_at, .. } = self.seen.clone();
        Launched { instance, quote: self.quote.clone(), launched_at }
    }

    #[must_use]
    pub fn new(seen: Instance, cluster: String, quote: Quote, expires_at: Timestamp) -> Self {
        NodeRecord {
            version: RECORD_VERSION,
            seen,
            cluster,
            quote,
            expires_at,
            metadata_port: 0,
            cgroup: None,
            process: None,
            notice: None,
            ending: None,
        }
    }
}

/// The directories of all nodes of a cloud.
#[derive(Debug, Clone)]
pub struct NodeDirs {
    root: PathBuf,
}

impl NodeDirs {
    /// # Errors
    /// When the directory cannot be made.
    pub fn open(cloud_dir: &Path) -> Result<Self, LocalError> {
        let root = cloud_dir.join("nodes");
        fs::create_dir_all(&root).map_err(LocalError::io("create", &root))?;
        Ok(NodeDirs { root })
    }

    /// The directory of a node.
    #[must_use]
    pub fn of(&self, instance: &InstanceId) -> PathBuf {
        self.root.join(&instance.0)
    }

    /// The node's own disk.
    #[must_use]
    pub fn disk(&self, instance: &InstanceId) -> PathBuf {
        self.of(instance).join("disk")
    }

    /// Writes a record, whole or not at all. Not synced: after a power cut the processes are gone as well.
    ///
    /// # Errors
    /// When the disk does not take it.
    pub fn save(&self, record: &NodeRecord) -> io::Result<()> {
        let dir = self.of(&record.seen.instance);
        fs::create_dir_all(&dir)?;
        write_whole(&dir.join(RECORD_FILE), &serde_json::to_vec_pretty(record)?)
    }

    /// Removes what a node leaves on its disk.
    pub fn wipe_disk(&self, instance: &InstanceId) {
        remove_tree(&self.disk(instance));
    }

    /// Forgets a node.
    pub fn forget(&self, instance: &InstanceId) {
        remove_tree(&self.of(instance));
    }

    /// Reads every node. A directory without a sound record is set aside under `corrupt/`; its name, which is the
    /// instance id, is answered so that its processes can be ended.
    ///
    /// # Errors
    /// When the directory itself cannot be read.
    pub fn load(&self) -> Result<(Vec<NodeRecord>, Vec<InstanceId>), LocalError> {
        let (mut records, mut corrupt) = (Vec::new(), Vec::new());
        let entries = fs::read_dir(&self.root).map_err(LocalError::io("read", &self.root))?;
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            match read_record(&entry.path(), &name) {
                Ok(record) => records.push(record),
                Err(detail) => {
                    tracing::warn!(node = %name, %detail, "a node's record is set aside as corrupt");
                    self.set_aside(&entry.path(), &name);
                    corrupt.push(InstanceId(name));
                }
            }
        }
        records.sort_by(|a, b| {
            (a.seen.launched_at, &a.seen.instance).cmp(&(b.seen.launched_at, &b.seen.instance))
        });
        Ok((records, corrupt))
    }

    fn set_aside(&self, path: &Path, name: &str) {
        let aside = self.root.with_file_name("corrupt");
        let target = aside.join(format!("{name}-{}", uuid::Uuid::new_v4().simple()));
        if let Err(error) = fs::create_dir_all(&aside).and_then(|()| fs::rename(path, &target)) {
            tracing::warn!(%error, node = %name, "a corrupt node directory could not be moved");
        }
    }
}

/// Writes a file by way of a temporary one beside it.
///
/// # Errors
/// When the disk does not take it.
pub fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension("tmp");
    fs::write(&temporary, bytes)?;
    fs::rename(&temporary, path)
}

fn read_record(dir: &Path, name: &str) -> Result<NodeRecord, String> {
    let bytes = fs::read(dir.join(RECORD_FILE)).map_err(|e| e.to_string())?;
    let record: NodeRecord = serde_json::from_slice(&bytes).map_err(|e| e.to_string())?;
    if record.version != RECORD_VERSION {
        return Err(format!("version {} of the record, expected {RECORD_VERSION}", record.version));
    }
    if record.seen.instance.0 != name {
        return Err(format!("the record is of {}", record.seen.instance));
    }
    Ok(record)
}

fn remove_tree(path: &Path) {
    if let Err(error) = fs::remove_dir_all(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(%error, path = %path.display(), "could not be removed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spotq_model::{EffectKey, NodeId, UsdPerHour};
    use spotq_provider::InstanceState;

    fn record(name: &str) -> NodeRecord {
        let seen = Instance {
            instance: InstanceId(name.into()),
            key: EffectKey("k".into()),
            node: Some(NodeId(4)),
            state: InstanceState::Running,
            pool: "aws/us-east-1/us-east-1a/c7i.xlarge/spot".parse().unwrap(),
            launched_at: Timestamp(5),
        };
        let price = UsdPerHour::nanos(1);
        let quote = Quote { price, on_demand: price, source: "test".into(), as_of: Timestamp(1) };
        NodeRecord::new(seen, "c".into(), quote, Timestamp(9))
    }

    #[test]
    fn records_survive_and_corrupt_ones_are_set_aside_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let nodes = NodeDirs::open(dir.path()).unwrap();
        nodes.save(&record("i-good")).unwrap();
        for (name, text) in [("i-cut", "{\"version\":1,"), ("i-empty", ""), ("i-new", "{\"version\":2}")] {
            fs::create_dir(nodes.of(&InstanceId(name.into()))).unwrap();
            fs::write(nodes.of(&InstanceId(name.into())).join(RECORD_FILE), text).unwrap();
        }
        fs::create_dir(nodes.of(&InstanceId("i-bare".into()))).unwrap();
        let (records, mut corrupt) = nodes.load().unwrap();
        assert_eq!(records, [record("i-good")]);
        corrupt.sort();
        assert_eq!(
            corrupt.iter().map(|i| i.0.as_str()).collect::<Vec<_>>(),
            ["i-bare", "i-cut", "i-empty", "i-new"]
        );
        assert_eq!(fs::read_dir(dir.path().join("corrupt")).unwrap().count(), 4);
        assert_eq!(nodes.load().unwrap().1, []);
    }
}
