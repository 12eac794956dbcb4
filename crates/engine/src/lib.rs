//! The loop round the core: one inbox, decide, append, apply, start what is due. It decides nothing itself.
//!
//! An input is answered only when its events are durable, and an effect starts only from durable state. Everything
//! that is in memory only (sessions, prices, newest progress) can be lost at any moment without harm.

mod clock;
mod config;
mod core_loop;
mod effects;
mod gather;
mod grpc;
mod handle;
mod logs;
mod poll;
mod records;
mod sessions;
mod view;

pub use clock::now;
pub use config::{ClusterSecret, EngineConfig};
pub use core_loop::{Running, start};
pub use grpc::serve;
pub use handle::{EngineError, Handle, Seen, Submitted};
pub use records::{RecordError, decode_record, encode_event};
