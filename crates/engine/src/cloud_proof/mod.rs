//! What a cloud says about a node, checked: a worker that shows it runs where we launched it.
//!
//! Pure: every verifier is a function of the proof, the time and what is expected. None calls a cloud; what takes a
//! call (the keys of Google, the answer of STS) is fetched by whoever wires a verifier to its cloud.

pub mod aws;
pub mod gcp;

use spotq_model::{NodeId, Timestamp};

/// A proof may have been made a little after our clock says that it is now.
pub const CLOCK_SKEW_MS: u64 = 60_000;

/// What the proof has to be about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expected {
    /// This cluster and node, so that a proof for another scheduler is worth nothing here; see [`audience`].
    pub audience: String,
    /// What the cloud calls the node.
    pub instance: String,
    /// The project or account that nodes are launched in.
    pub account: String,
    pub now: Timestamp,
}

/// Why a proof is none. Says what was wrong, and quotes nothing of the proof.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProofError {
    #[error("the proof is malformed: {0}")]
    Malformed(&'static str),
    #[error("the proof is signed by nobody that is trusted")]
    Signature,
    #[error("the proof is too old or not valid yet")]
    Time,
    #[error("the proof is for another {0}")]
    Other(&'static str),
    #[error("the proof would have us call an address that is not the cloud's")]
    Host,
}

/// A kind of proof that workers may be asked for.
pub trait NodeProof: Send + Sync {
    /// As in `CloudProof.kind`.
    fn kind(&self) -> &'static str;

    /// Whether `proof` says what is expected.
    ///
    /// # Errors
    /// It does not.
    fn verify(&self, proof: &str, expected: &Expected) -> Result<(), ProofError>;
}

/// What a worker asks its cloud to put into the proof.
#[must_use]
pub fn audience(cluster: &str, node: NodeId) -> String {
    format!("spotq:{cluster}:{node}")
}
