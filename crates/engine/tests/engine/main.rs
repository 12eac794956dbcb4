//! The engine against a store in memory, a cloud in memory and workers that are driven by hand. No process is started
//! and nothing outside loopback is reached.
#![expect(clippy::unwrap_used, reason = "a helper of tests fails the test that called it")]

mod access;
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
