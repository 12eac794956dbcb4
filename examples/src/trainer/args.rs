//! The trainer's flags. They only describe a run; nothing here acts.

use std::path::PathBuf;

use clap::{
    Args,
    builder::{OsStringValueParser, TypedValueParser},
};

/// Flags of the character model's trainer.
///
/// Only `--steps`, `--data` and `--state-mb` reach the final model; everything else changes when and how it is
/// saved, or how the process misbehaves on purpose for the tests.
#[derive(Debug, Clone, Args)]
pub struct TrainArgs {
    /// Steps to train for.
    #[arg(long, default_value_t = 600)]
    pub steps: u64,

    /// Text to learn; any file will do. The built-in text is used if absent.
    #[arg(long, value_name = "FILE")]
    pub data: Option<PathBuf>,

    /// Write the final model here, by a temporary file and a rename.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,

    /// Directory of step-<n>.ckpt files; nothing is saved if absent.
    #[arg(long, value_name = "DIR", env = "SPOTQ_CHECKPOINT_DIR", value_parser = path())]
    pub checkpoint_dir: Option<PathBuf>,

    /// File that progress is appended to, as JSON lines.
    #[arg(long, value_name = "FILE", env = "SPOTQ_PROGRESS_FILE", value_parser = path())]
    pub progress_file: Option<PathBuf>,

    /// File whose appearance means: save at once.
    #[arg(long, value_name = "FILE", env = "SPOTQ_NOTICE_FILE", value_parser = path())]
    pub notice_file: Option<PathBuf>,

    /// What the checkpoint directory was restored from; empty on a first start.
    #[arg(long, value_name = "NAME", env = "SPOTQ_RESUME_FROM", hide = true)]
    pub resume_from: Option<String>,

    /// Number of this attempt, from 1.
    #[arg(long, value_name = "N", env = "SPOTQ_ATTEMPT", hide = true)]
    pub attempt: Option<u64>,

    /// Save every N steps; 0 for never.
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub save_every: u64,

    /// Save every N milliseconds as well; 0 for never.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub save_every_ms: u64,

    /// Add N MiB to the state that is saved. They change as training goes on, and the final model has their hash.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=65_536))]
    pub state_mb: u32,

    /// Take at least N milliseconds for a step. It changes nothing in the result.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub step_ms: u64,

    /// Print the loss every N steps.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    pub log_every: u64,

    /// Print N characters written by the model at the end.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=10_000))]
    pub sample: u32,

    #[command(flatten)]
    pub variant: Variant,
}

/// How to misbehave, each as some real programs do.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Variants for tests")]
pub struct Variant {
    /// Catch TERM and go on.
    #[arg(long, conflicts_with_all = ["timer_only", "exit_zero_on_term"])]
    pub ignore_term: bool,

    /// Handle no signal and no notice: save only by steps or time.
    #[arg(long)]
    pub timer_only: bool,

    /// Install no handler for USR1, so that it kills.
    #[arg(long)]
    pub die_on_usr1: bool,

    /// Start a grandchild in a session of its own that outlives its parent.
    #[arg(long)]
    pub double_fork: bool,

    /// On TERM save nothing and exit 0.
    #[arg(long, conflicts_with = "timer_only")]
    pub exit_zero_on_term: bool,

    /// Exit with this code at the end, and at --crash-at-step.
    #[arg(long, value_name = "CODE")]
    pub exit_code: Option<u8>,

    /// Die after this step, before it is saved: with --exit-code, or by abort if there is none.
    #[arg(long, value_name = "STEP")]
    pub crash_at_step: Option<u64>,

    /// Crash only in the first N attempts.
    #[arg(long, value_name = "N", requires = "crash_at_step")]
    pub crash_attempts: Option<u64>,

    /// Write checkpoints slowly under their final name, so that a kill tears them.
    #[arg(long)]
    pub torn_save: bool,

    /// Internal: which process of the double fork this is.
    #[arg(long, hide = true)]
    pub stray_stage: Option<u8>,
}

impl TrainArgs {
    /// The same, with a variable that is set to nothing taken as one that is not set.
    pub(super) fn without_empty_paths(mut self) -> Self {
        for path in [&mut self.checkpoint_dir, &mut self.progress_file, &mut self.notice_file] {
            path.take_if(|path| path.as_os_str().is_empty());
        }
        self
    }
}

/// Unlike the parser that clap chooses for a path, this one lets an empty one through.
fn path() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().map(PathBuf::from)
}
