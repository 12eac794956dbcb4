//! Ways in for a simulation, which runs this worker in surroundings of its own. Must never be part of a product build.

pub use crate::agent::{Config, run_in};
pub use crate::bootstrap::Bootstrap;
pub use crate::logs::LogWriter;
pub use crate::notice::{CloudSays, WatchConfig};
pub use crate::process::{Ended, Launch, Pumps};
pub use crate::saves::Quiet;
pub use crate::supervise::End;
pub use crate::surroundings::{Processes, Started, Surroundings};
pub use rustix::process::Signal;
