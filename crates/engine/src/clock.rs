//! The one place where the scheduler asks what time it is. Wall-clock time may jump; the core never lets time run
//! backwards, and how long something takes is measured with [`Instant`].

pub use spotq_host::{Instant, now};
