//! Trainers that really train, save and resume: the demo and the tests run them as ordinary user programs.
//!
//! The library knows the trainer contract (`SPOTQ_*` variables, signals, files) and nothing else of spotq: it must
//! never link the engine or the worker, because what it shows is that a program needs no library to survive preemption.

pub mod trainer;

pub use trainer::{TrainArgs, run};
