//! What the outside asks for: by signals and by the notice file. It only notes requests; the training loop acts.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::Context;
use signal_hook::{
    consts::{SIGTERM, SIGUSR1},
    flag,
};

use super::args::Variant;

/// Requests that have come in.
#[derive(Debug)]
pub struct Requests {
    stop: Arc<AtomicBool>,
    save: Arc<AtomicBool>,
    notice_file: Option<PathBuf>,
    notice_seen: bool,
}

impl Requests {
    /// Installs the handlers that `variant` asks for.
    ///
    /// # Errors
    /// The system refuses a handler.
    pub fn listen(variant: &Variant, notice_file: Option<PathBuf>) -> anyhow::Result<Self> {
        let requests = Requests {
            stop: Arc::default(),
            save: Arc::default(),
            notice_file: notice_file.filter(|_| !variant.timer_only),
            notice_seen: false,
        };
        if variant.timer_only {
            return Ok(requests);
        }
        // A program that ignores TERM catches it, as Python's and the shells' do; SIG_IGN would pass to children.
        let stop = if variant.ignore_term { Arc::default() } else { Arc::clone(&requests.stop) };
        flag::register(SIGTERM, stop).context("cannot install a handler for TERM")?;
        if !variant.die_on_usr1 {
            flag::register(SIGUSR1, Arc::clone(&requests.save))
                .context("cannot install a handler for USR1")?;
        }
        Ok(requests)
    }

    /// Whether TERM has come.
    #[must_use]
    pub fn stop(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Why to save now, if USR1 has come or the notice file has appeared since the last call.
    pub fn take_save(&mut self) -> Option<&'static str> {
        if self.save.swap(false, Ordering::Relaxed) {
            return Some("USR1");
        }
        let present = self.notice_file.as_ref().is_some_and(|file| file.exists());
        // A notice that is withdrawn and given again is a new one.
        let appeared = present && !self.notice_seen;
        self.notice_seen = present;
        appeared.then_some("notice")
    }
}
