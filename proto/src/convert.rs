//! Between wire and model.
#[derive(Debug, thiserror::Error)] #[error("bad message")] pub struct WireError;
