//! What the programs of a run log: part of its trace, and searched for secrets.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use tracing_subscriber::fmt::MakeWriter;

use crate::world::World;

/// Every so many seeds everything that is logged is searched for secrets; it costs a third of a run.
pub(crate) const EVERY: u64 = 8;

/// The lines of one run.
#[derive(Debug, Clone)]
pub(crate) struct Logs {
    world: World,
    text: Arc<Mutex<Vec<u8>>>,
    on: bool,
}

impl Logs {
    pub(crate) fn new(world: &World, on: bool) -> Logs {
        Logs { world: world.clone(), text: Arc::default(), on }
    }

    /// Does the work, whose logs come here.
    pub(crate) fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        if !self.on {
            return work();
        }
        let filter = tracing_subscriber::EnvFilter::new(
            "off,spotq_engine=debug,spotq_worker=debug,spotq_checkpoint=debug,spotq_core=debug",
        );
        let subscriber = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(self.clone())
            .without_time()
            .with_ansi(false)
            .finish();
        tracing::subscriber::with_default(subscriber, work)
    }

    pub(crate) fn text(&self) -> String {
        let text = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&text).into_owned()
    }
}

/// One line.
#[derive(Debug)]
pub(crate) struct Line(Logs);

impl<'a> MakeWriter<'a> for Logs {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        Line(self.clone())
    }
}

impl io::Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.text.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        let line = String::from_utf8_lossy(bytes);
        self.0.world.lock().say(|| format!("    {}", line.trim_end()));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
