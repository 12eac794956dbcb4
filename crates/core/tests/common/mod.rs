//! A small honest world for tests of the core: a cloud that does what it is asked and remembers it, workers that obey,
//! checkpoint stores, and a loop like the engine's that checks every step. It decides nothing itself.

pub mod checked;
pub mod cloud;
pub mod steps;
pub mod workers;
pub mod world;
