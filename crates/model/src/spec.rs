//! What a user asks for: the job as understood, whatever file or flags it came from.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Cloud, Span, Timestamp, Usd, UsdPerHour};

/// A job as understood and checked. Defaults are filled in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSpec {
    pub name: String,
    /// Who submitted, as the client said; used for display and reports.
    pub user: String,
    pub command: Command,
    /// Shell text run once on each node before the command.
    pub setup: Option<String>,
    /// Directory that the command starts in; the attempt's own directory if absent.
    pub workdir: Option<String>,
    pub env: BTreeMap<String, String>,
    pub resources: Resources,
    pub checkpoint: CheckpointSpec,
    pub policy: PlacementPolicy,
    /// The job stops, with a checkpoint, when it has cost this much.
    pub budget: Option<Usd>,
    pub project: Option<String>,
    pub tags: BTreeMap<String, String>,
    /// Running time over all attempts.
    pub time_limit: Option<Span>,
    pub retry: Retry,
    pub priority: i32,
    /// Not placed before this moment.
    pub begin: Option<Timestamp>,
    /// Submitted on hold: not placed before `release`.
    pub hold: bool,
    /// Globs, relative to the working directory, of files that are uploaded at each commit and at the end.
    pub outputs: Vec<String>,
}

/// What to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Command {
    /// Run by `bash -c` (`sh -c` where there is no bash), as SkyPilot's `run:`.
    Shell { text: String },
    /// A program and its arguments, run without a shell.
    Argv { argv: Vec<String> },
    /// A script with its own `#!` line and the arguments that follow it.
    Script { text: String, args: Vec<String> },
}

/// Which nodes will do.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Resources {
    /// Any of these will do; empty means any node will.
    pub any_of: Vec<Choice>,
    /// A node that costs more than this per hour is not taken.
    pub max_hourly: Option<UsdPerHour>,
}

/// One acceptable kind of node; an absent field does not restrict.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Choice {
    pub accelerator: Option<String>,
    /// How many accelerators; 0 with `accelerator: None`.
    pub accelerator_count: u32,
    pub cpus_min: u32,
    pub memory_gib_min: u32,
    pub cloud: Option<Cloud>,
    pub region: Option<String>,
    pub zone: Option<String>,
    pub instance_type: Option<String>,
}

/// Where and when the job saves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointSpec {
    /// The job's own name for the directory, if it cannot read `SPOTQ_CHECKPOINT_DIR`: made a link to it.
    pub dir: Option<String>,
    /// How often the job is expected to save; used for advice and warnings.
    pub interval: Option<Span>,
    /// Sent to the ranks on notice so that they save; `None` for a job that saves by itself.
    pub signal: Option<Signal>,
    pub signal_target: SignalTarget,
    /// Time between the stop signal (TERM) and KILL when the job is ended.
    pub grace: Span,
    pub profile: Profile,
    /// Glob, relative to the checkpoint directory, of a marker that says a checkpoint is complete.
    pub complete_when: Option<String>,
    /// How many committed checkpoints stay.
    pub keep: u32,
}

impl Default for CheckpointSpec {
    fn default() -> Self {
        CheckpointSpec {
            dir: None,
            interval: None,
            signal: None,
            signal_target: SignalTarget::Ranks,
            grace: Span::secs(10),
            profile: Profile::Generic,
            complete_when: None,
            keep: 3,
        }
    }
}

/// Signals that a job may ask for on notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Signal {
    Usr1,
    Usr2,
    Term,
    Int,
    Hup,
}

/// Who gets the save signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SignalTarget {
    /// The leaves of the process tree, where training happens.
    Ranks,
    /// The process that the command started as.
    Launcher,
    /// Every process of the job.
    All,
}

/// How to tell that a checkpoint on disk is complete. The engine in full adds the frameworks' own rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Profile {
    /// No process of the job has a file under the directory open for writing, and nothing changed for a while.
    Generic,
    /// The job writes aside and renames: each file that is not a temporary name is complete when it appears.
    Rename,
    /// Orbax: a step directory is complete under its final name.
    Orbax,
}

/// What may be paid for speed and safety.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlacementPolicy {
    /// Spot where there is some, on-demand where there is none.
    #[default]
    SpotFirst,
    /// Wait for spot.
    SpotOnly,
    /// Never interrupted by the market.
    OnDemand,
}

impl PlacementPolicy {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            PlacementPolicy::SpotFirst => "spot-first",
            PlacementPolicy::SpotOnly => "spot-only",
            PlacementPolicy::OnDemand => "on-demand",
        }
    }
}

/// How often to try again. The two budgets are separate: a preemption is not the job's fault.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Retry {
    /// `None`: as often as it takes.
    pub preemptions: Option<u32>,
    pub failures: u32,
    /// If not empty, only these exit codes are tried again.
    pub exit_codes: Vec<i32>,
}
