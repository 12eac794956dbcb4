//! The loop round the core: one inbox, decide, append, apply, start what is due. It decides nothing itself.
//!
//! An input is answered only when its events are durable, and an effect starts only from durable state. Everything
//! that is in memory only (sessions, prices, newest progress) can be lost at any moment without harm.

pub mod audit;
mod auth;
mod clock;
pub mod cloud_proof;
mod config;
mod core_loop;
mod effects;
mod gather;
mod grpc;
mod handle;
mod logs;
pub mod pki;
mod poll;
mod records;
pub mod seal;
mod sessions;
mod view;

pub use auth::{Role, Rule, Security, SecurityError, TOKEN_PREFIX, User, UserError, Users, rule};
pub use clock::now;
pub use config::{ClusterSecret, EngineConfig};
pub use core_loop::{Running, start};
pub use effects::CA_VARIABLE;
pub use grpc::{serve, serve_incoming, serve_secured};
pub use handle::{EngineError, Handle, Seen, Submitted};
pub use records::{RecordError, decode_record, encode_event};
