//! Watches what a running attempt writes: its checkpoint directory and its progress file.
//!
//! Only looks and tells; it shares what it knows with the uploads through [`Seen`].

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use spotq_model::Timestamp;
use tokio::sync::{mpsc, watch};

use crate::ids::{Instant, now};
use crate::progress::{Point, Progress};
use crate::renames::{Habit, Renames};
use crate::saves::{Complete, Pace, Saves};
use crate::surroundings::Processes;

/// How often to look: a saver in calm need not be caught at once, and a look costs a directory walk.
const LOOK_CALM: Duration = Duration::from_millis(100);
/// On notice each moment counts.
const LOOK_HURRIED: Duration = Duration::from_millis(20);
/// A look may take this share of the time, so that a huge directory is looked at less often.
const LOOK_COST_FACTOR: u32 = 4;
/// Progress is told at most this often.
const PROGRESS_GAP: Duration = Duration::from_millis(500);

/// What was seen so far; locked for moments only, never across an await.
#[derive(Debug)]
pub struct Seen {
    pub saves: Saves,
    pub progress: Progress,
    /// Calm uploads are not begun before this.
    pub not_before: Option<Instant>,
}

/// What an observer tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sight {
    Complete(Complete),
    Progress(Point),
}

/// Shared between observer, uploads and attempt.
pub type SharedSeen = Arc<Mutex<Seen>>;

/// Locks for a moment.
pub fn lock(seen: &SharedSeen) -> MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Looks until `pace` closes or nobody listens.
pub async fn observe(
    dir: PathBuf,
    seen: SharedSeen,
    processes: Arc<dyn Processes>,
    mut pace: watch::Receiver<Pace>,
    tell: mpsc::Sender<Sight>,
) {
    // Without it the habit stays unknown and an unknown saver has to be quiet for long, which is the safe side.
    let mut renames =
        Renames::watch(&dir).inspect_err(|error| tracing::info!(%error, "no news of renames")).ok();
    let mut told_progress: Option<Instant> = None;
    loop {
        let began = Instant::now();
        let habit =
            renames.as_mut().map_or(Habit::Unknown, |renames| renames.look(|| processes.has_writer(&dir)));
        let looker = {
            let mut seen = lock(&seen);
            seen.saves.learn(habit);
            seen.saves.looker()
        };
        let wanted = dir.clone();
        let Ok(mut look) = spotq_host::blocking(move || looker.look(&wanted)).await else { return };
        // Whatever name it has: what was made and may yet be renamed is not complete.
        look.temporary |= renames.as_ref().is_some_and(Renames::is_saving);
        let current = *pace.borrow_and_update();
        let sights = {
            let mut seen = lock(&seen);
            let mut sights = Vec::new();
            let at = now();
            seen.progress.look(at);
            let due = told_progress.is_none_or(|told| told.elapsed() >= PROGRESS_GAP);
            if let Some(point) = seen.progress.untold().filter(|_| due) {
                seen.progress.mark_told();
                told_progress = Some(Instant::now());
                sights.push(Sight::Progress(point));
            }
            let waits = current == Pace::Calm && seen.not_before.is_some_and(|until| Instant::now() < until);
            if !waits {
                let complete = seen.saves.judge(at, current, &look, || processes.has_writer(&dir));
                sights.extend(complete.map(Sight::Complete));
            }
            sights
        };
        for sight in sights {
            if tell.send(sight).await.is_err() {
                return;
            }
        }
        let usual = if current == Pace::Calm { LOOK_CALM } else { LOOK_HURRIED };
        let rest = usual.max(began.elapsed() * LOOK_COST_FACTOR);
        tokio::select! {
            biased;
            changed = pace.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(rest) => {}
        }
    }
}

/// The step that a file written at `at` holds, by the progress seen.
#[must_use]
pub fn step_at(seen: &SharedSeen, at: Timestamp) -> Option<u64> {
    lock(seen).progress.step_at(at)
}
