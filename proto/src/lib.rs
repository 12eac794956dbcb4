//! The wire: the services and messages of `spotq.v1`, their conversions to the model, and the frames of log files.
//!
//! Wire types never enter the core. A message that names no known enum value, or lacks what it needs, is refused
//! with a [`WireError`], never given a default.

mod convert;
pub mod logframe;
pub mod tls;

pub use convert::WireError;

/// Generated from `proto/spotq/v1/*.proto`.
#[expect(
    clippy::allow_attributes,
    clippy::large_enum_variant,
    reason = "generated code is not ours to style"
)]
pub mod v1 {
    tonic::include_proto!("spotq.v1");
}

/// Generated from the descriptor.
mod methods {
    include!(concat!(env!("OUT_DIR"), "/methods.rs"));
}
pub use methods::Method;

/// The compiled descriptor, for gRPC reflection and the compatibility test.
pub const DESCRIPTOR: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/spotq_descriptor.bin"));

/// Goes up with each addition to v1; both sides say theirs in the handshake.
pub const PROTOCOL_MINOR: u32 = 2;

/// The largest message that either side accepts. A job file of 1 MB with an environment of 500 KB fits with room.
pub const MESSAGE_BYTES_MAX: usize = 8 * 1024 * 1024;
