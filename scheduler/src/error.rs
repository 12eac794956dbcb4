//! Why the daemon did not start or did not go on, by what the operator can do.

use std::net::SocketAddr;
use std::path::PathBuf;

/// Each has its exit code.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    #[error("{0}")]
    Config(String),
    #[error("data directory {path}: {detail}")]
    Data { path: PathBuf, detail: String },
    #[error("listen on {address}: {detail}")]
    Listen { address: String, detail: String },
    #[error(
        "{address} is not a loopback address, and beyond loopback spotqd serves only with TLS; make certificates with `spotqd init --data DIR --name HOST`, or listen on 127.0.0.1"
    )]
    NotLoopback { address: SocketAddr },
    #[error("start the local cloud: {0}")]
    LocalCloud(#[from] spotq_provider_local::LocalError),
    #[error("{0}")]
    Manage(String),
    #[error("{0}")]
    Running(String),
}

impl DaemonError {
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            DaemonError::Config(_) | DaemonError::NotLoopback { .. } => 78,
            DaemonError::Data { .. } | DaemonError::LocalCloud(_) => 73,
            DaemonError::Manage(_) => 65,
            DaemonError::Listen { .. } => 69,
            DaemonError::Running(_) => 70,
        }
    }
}
