//! A small character-level language model that trains, saves and resumes as the trainer contract says.
//!
//! The final model depends on the text, the number of steps and `--state-mb` alone: not on where or how often the run
//! was interrupted, when it saved, or how fast it went. Nothing in this module may make it depend on anything else.

mod args;
pub mod data;
pub mod math;
pub mod model;
mod progress;
mod saves;
mod signals;
pub mod state;
mod stray;

use std::{
    io::Write,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::Context;

pub use args::{TrainArgs, Variant};
use data::Data;
use model::{TrainState, Workspace};
use progress::Progress;
use saves::{SaveDir, SaveStyle, replace_file};
use signals::Requests;

/// 128 + 15, as a shell reports a program that TERM ended.
const EXIT_TERM: u8 = 143;
/// While a paced step waits, requests are looked at this often: prompt for a notice of seconds, and no load.
const PACE_SLICE: Duration = Duration::from_millis(5);

/// Trains as `args` say and gives the exit code: 0 at the end, 143 after TERM.
///
/// # Errors
/// The text, the checkpoint directory or the output cannot be read or written.
pub fn run(args: TrainArgs) -> anyhow::Result<ExitCode> {
    if let Some(stage) = args.variant.stray_stage {
        stray::run_stage(stage)?;
        return Ok(ExitCode::SUCCESS);
    }
    let args = args.without_empty_paths();
    // Before anything slow, so that an early signal is not lost on the default action.
    let requests = Requests::listen(&args.variant, args.notice_file.clone())?;
    if args.variant.double_fork {
        stray::start()?;
    }
    let data = Data::load(args.data.as_deref())?;
    let mut saves = match &args.checkpoint_dir {
        Some(dir) => {
            let style = if args.variant.torn_save { SaveStyle::Torn } else { SaveStyle::Rename };
            Some(SaveDir::open(dir, style)?)
        }
        None => None,
    };
    let state = start_state(&args, &data, saves.as_mut())?;
    let progress = Progress::open(args.progress_file.as_deref(), state.step, args.steps);
    let work = Workspace::new(data.alphabet.len());
    Run { args, data, state, work, saves, requests, progress, last_save: Instant::now(), log: Log::default() }
        .train()
}

/// Everything of one process's run.
struct Run {
    args: TrainArgs,
    data: Data,
    state: TrainState,
    work: Workspace,
    saves: Option<SaveDir>,
    requests: Requests,
    progress: Progress,
    last_save: Instant,
    log: Log,
}

/// The losses since the last line of the log; for display, so no checkpoint holds them.
#[derive(Default)]
struct Log {
    sum: f32,
    count: u32,
}

impl Run {
    fn train(mut self) -> anyhow::Result<ExitCode> {
        let step_time = Duration::from_millis(self.args.step_ms);
        loop {
            if let Some(code) = self.handle_requests()? {
                return Ok(code);
            }
            if self.state.step >= self.args.steps {
                return self.finish();
            }
            let began = Instant::now();
            let loss = self.state.train_step(&self.data, &mut self.work);
            self.report(loss);
            if self.crash_is_due() {
                return Ok(self.crash());
            }
            self.save_by_cadence()?;
            while let Some(rest) = step_time.checked_sub(began.elapsed()).filter(|rest| !rest.is_zero()) {
                pause(rest.min(PACE_SLICE));
                if let Some(code) = self.handle_requests()? {
                    return Ok(code);
                }
            }
        }
    }

    fn handle_requests(&mut self) -> anyhow::Result<Option<ExitCode>> {
        if self.requests.stop() {
            if self.args.variant.exit_zero_on_term {
                say("TERM: stopping without a save");
                return Ok(Some(ExitCode::SUCCESS));
            }
            self.save("TERM")?;
            return Ok(Some(ExitCode::from(EXIT_TERM)));
        }
        if let Some(why) = self.requests.take_save() {
            self.save(why)?;
        }
        Ok(None)
    }

    fn save_by_cadence(&mut self) -> anyhow::Result<()> {
        let TrainArgs { save_every, save_every_ms, .. } = self.args;
        let by_step = save_every > 0 && self.state.step.is_multiple_of(save_every);
        let by_time = save_every_ms > 0 && self.last_save.elapsed() >= Duration::from_millis(save_every_ms);
        if by_step || by_time {
            self.save(if by_step { "steps" } else { "timer" })?;
        }
        Ok(())
    }

    fn save(&mut self, why: &str) -> anyhow::Result<()> {
        let Some(saves) = &mut self.saves else {
            return Ok(());
        };
        let began = Instant::now();
        saves.save(&self.state, &self.data)?;
        self.last_save = Instant::now();
        say(&format!("saved step {} ({why}, {} ms)", self.state.step, began.elapsed().as_millis()));
        Ok(())
    }

    fn report(&mut self, loss: f32) {
        let (step, total) = (self.state.step, self.args.steps);
        self.progress.note(step);
        self.log.sum += loss;
        self.log.count += 1;
        if step.is_multiple_of(self.args.log_every) || step >= total {
            say(&format!("step {step}/{total} loss {:.2}", self.log.sum / self.log.count as f32));
            self.log = Log::default();
        }
    }

    fn crash_is_due(&self) -> bool {
        let Variant { crash_at_step, crash_attempts, .. } = self.args.variant;
        let attempt = self.args.attempt.unwrap_or(1);
        crash_at_step == Some(self.state.step) && crash_attempts.is_none_or(|attempts| attempt <= attempts)
    }

    fn crash(&self) -> ExitCode {
        talk(&format!("crashing at step {}, as asked", self.state.step));
        match self.args.variant.exit_code {
            Some(code) => ExitCode::from(code),
            None => std::process::abort(),
        }
    }

    fn finish(mut self) -> anyhow::Result<ExitCode> {
        // A run that is lost after its last step then has nothing to do again but write its output.
        self.save("end")?;
        if let Some(out) = &self.args.out {
            replace_file(out, |file| state::write_model(&self.state, &self.data, file))
                .with_context(|| format!("cannot write the final model {}", out.display()))?;
        }
        if self.args.sample > 0 {
            let text = self.state.sample(&self.data, self.args.sample as usize);
            say(&String::from_utf8_lossy(&text));
        }
        say(&format!("done after {} steps", self.state.step));
        Ok(ExitCode::from(self.args.variant.exit_code.unwrap_or(0)))
    }
}

fn start_state(args: &TrainArgs, data: &Data, saves: Option<&mut SaveDir>) -> anyhow::Result<TrainState> {
    let attempt = args.attempt.unwrap_or(1);
    if let Some(saves) = saves {
        let found = saves.newest(data, args.state_mb)?;
        for line in &found.skipped {
            talk(line);
        }
        if let Some(state) = found.state {
            say(&format!("attempt {attempt}: resuming at step {} of {}", state.step, args.steps));
            return Ok(state);
        }
    }
    if let Some(from) = args.resume_from.as_deref().filter(|from| !from.is_empty()) {
        talk(&format!("asked to resume from {from}, but found no checkpoint to use; starting from step 0"));
    }
    say(&format!("attempt {attempt}: starting at step 0 of {}", args.steps));
    Ok(TrainState::new(data.alphabet.len(), args.state_mb))
}

/// Prints a line of the log. A reader that has gone away must not end the training.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Prints a line for people, in the same spirit.
fn talk(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

#[expect(
    clippy::disallowed_methods,
    reason = "the trainer is one thread that computes; there is no runtime to block"
)]
fn pause(time: Duration) {
    std::thread::sleep(time);
}
