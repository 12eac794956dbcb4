//! The engine against a store in memory, a cloud in memory and workers that are driven by hand. No process is started
//! and nothing outside loopback is reached.

mod acting;
mod common;
mod logs;
mod protocol;
mod quiet;
mod recovery;
mod restart;
mod samples;
mod secrets;
mod sessions;
mod submits;
mod views;
