//! The command line as clap sees it. Only describes; nothing here acts.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use spotq_examples::TrainArgs;
use spotq_model::{Span, TaskId};

use crate::demo::DemoArgs;
use crate::out::Format;

const AFTER_HELP: &str = "\
Exit codes:
  0 done   2 wrong usage   64 bad job file or value   65 refused   66 no such file or job
  69 no scheduler answers   70 fault of spotq   73 cannot write   130 stopped by Ctrl-C
  `run` and `wait` end with the job's own code, or: 75 preempted too often, 76 nodes failed,
  77 budget spent, 124 time limit, 125 could not be started, 130 cancelled, 137 out of memory

Start here:
  spotq demo                              see a job survive preemption; needs nothing
  spotqd --data ~/.spotq --local          a scheduler with simulated clouds on this machine
  spotq run -- python train.py            run a command on the cheapest capacity and follow it";

/// Runs training jobs on spot capacity and makes preemption a non-event.
#[derive(Debug, Parser)]
#[command(name = "spotq", version, after_help = AFTER_HELP, max_term_width = 100, subcommand_required = true, arg_required_else_help = true)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Everywhere")]
pub struct Global {
    /// Scheduler: an address, or a context of ~/.config/spotq [env: SPOTQ_SERVER]
    #[arg(long, global = true, value_name = "ADDR")]
    pub server: Option<String>,
    /// How data is printed.
    #[arg(short, long, global = true, value_enum, default_value_t, value_name = "FORMAT")]
    pub output: Format,
    /// No colours; NO_COLOR in the environment does the same.
    #[arg(long, global = true)]
    pub no_color: bool,
    /// Only data and errors.
    #[arg(short, long, global = true)]
    pub quiet: bool,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a real model through preemptions on this machine, and see what it saved.
    Demo(DemoArgs),
    /// Put a job into the queue.
    Submit(SubmitArgs),
    /// Submit, follow output and progress, end with the job's code. With `-o json` stdout is the job as `show` has it.
    Run(SubmitArgs),
    /// List jobs.
    Queue(QueueArgs),
    /// All about a job.
    Show(JobArg),
    /// Why a job is where it is, and what would change that.
    Explain(JobArg),
    /// Print a job's output, of all attempts.
    Logs(LogsArgs),
    /// Cancel jobs.
    Cancel(JobsArg),
    /// Keep jobs from being placed.
    Hold(JobsArg),
    /// Let held jobs go.
    Release(JobsArg),
    /// Stop jobs and place them anew, from their checkpoints.
    Requeue(JobsArg),
    /// Wait until jobs are done; end with the job's code. Without `-q` up to 3 s more, until the bill is final.
    Wait(JobsArg),
    /// Drill: preempt a job as the cloud would.
    Preempt(PreemptArgs),
    /// What capacity costs now.
    Offers(OffersArgs),
    /// What was paid, saved and wasted.
    Report(ReportArgs),
    /// Fetch a job's declared outputs.
    Pull(PullArgs),
    /// About the scheduler.
    Info,
    /// Nodes that are paid for.
    Nodes(NodesArgs),
    /// Keep a scheduler's address, its CA and your token as a context, and use it from now on.
    ///
    /// The token is read from the terminal, or with --token-stdin from standard input; it is never an argument.
    Login(LoginArgs),
    /// Contexts that `login` has kept.
    #[command(subcommand)]
    Context(ContextCommand),
    /// Print a completion script for a shell.
    Completions {
        /// Which shell.
        shell: clap_complete::Shell,
    },
    /// Write man pages into a directory.
    Man {
        /// Made if it does not exist.
        dir: PathBuf,
    },
    /// The example trainer, as a plain program.
    #[command(hide = true)]
    Train(TrainArgs),
}

#[derive(Debug, Clone, Args)]
pub struct JobArg {
    /// A job's number, such as 7.
    pub job: TaskId,
}

#[derive(Debug, Clone, Args)]
pub struct JobsArg {
    /// Jobs' numbers.
    #[arg(required = true, value_name = "JOB")]
    pub jobs: Vec<TaskId>,
}

#[derive(Debug, Clone, Args)]
pub struct QueueArgs {
    /// Also jobs that are done.
    #[arg(short, long)]
    pub all: bool,
    /// Only this user's jobs.
    #[arg(short, long)]
    pub user: Option<String>,
    /// At most so many.
    #[arg(short = 'n', long, default_value_t = 0, hide_default_value = true, value_name = "N")]
    pub limit: u32,
}

#[derive(Debug, Clone, Args)]
pub struct LogsArgs {
    /// A job's number, such as 7.
    pub job: TaskId,
    /// Go on as output comes, until the job is done.
    #[arg(short, long)]
    pub follow: bool,
    /// Only the attempt with this number, as `show` has it under TRY.
    #[arg(long, visible_alias = "attempt", value_name = "N")]
    pub generation: Option<u64>,
}

#[derive(Debug, Clone, Args)]
pub struct PreemptArgs {
    /// A job's number, such as 7.
    pub job: TaskId,
    /// How long before the node goes; 0s for none.
    #[arg(long, default_value = "30s", value_name = "TIME")]
    pub notice: Span,
}

#[derive(Debug, Clone, Args)]
pub struct OffersArgs {
    /// Only nodes with these, such as A100-80GB:8.
    #[arg(long, value_name = "NAME[:COUNT]")]
    pub gpus: Option<String>,
}

#[derive(Debug, Clone, Args)]
pub struct ReportArgs {
    /// Only this job, with its segments; all jobs if absent.
    pub job: Option<TaskId>,
}

#[derive(Debug, Clone, Args)]
pub struct PullArgs {
    /// A job's number, such as 7.
    pub job: TaskId,
    /// Where to; made if it does not exist, and must be empty [default: outputs-JOB]
    pub dir: Option<PathBuf>,
}

#[derive(Debug, Clone, Args)]
pub struct NodesArgs {
    /// Also nodes that are gone.
    #[arg(short, long)]
    pub all: bool,
}

#[derive(Debug, Clone, Args)]
pub struct LoginArgs {
    /// Certificate of the scheduler's CA: `tls/ca.pem` of its data directory.
    #[arg(long, value_name = "FILE")]
    pub ca: PathBuf,
    /// Read the token from standard input.
    #[arg(long)]
    pub token_stdin: bool,
    /// Client certificate with its key, from `spotqd user add --cert`, in place of a token.
    #[arg(long, value_name = "FILE", conflicts_with = "token_stdin")]
    pub cert: Option<PathBuf>,
    /// Name of the context.
    #[arg(long, value_name = "CTX", default_value = "default")]
    pub name: String,
}

#[derive(Debug, Subcommand)]
pub enum ContextCommand {
    /// List them; the one in use has a star.
    List,
    /// Use another.
    Use {
        /// As `login --name` has called it.
        name: String,
    },
    /// Forget one, with its token.
    Remove {
        /// As `login --name` has called it.
        name: String,
    },
}

#[derive(Debug, Clone, Default, Args)]
pub struct SubmitArgs {
    /// Job file (YAML) or script; `-` reads standard input.
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// A command to run, or the arguments of a script.
    #[arg(last = true, value_name = "CMD")]
    pub command: Vec<String>,
    /// Print the job as understood and submit nothing; needs no scheduler.
    #[arg(long)]
    pub dry_run: bool,
    /// Submitting twice with one key is one job [default: a new one each time]
    #[arg(long, value_name = "KEY")]
    pub client_key: Option<String>,
    #[command(flatten)]
    pub change: Overrides,
}

/// Flags that say more than the file, or otherwise. Their values are checked as those of a job file are.
#[derive(Debug, Clone, Default, PartialEq, Args)]
#[command(next_help_heading = "Over what the file says")]
pub struct Overrides {
    /// Name of the job.
    #[arg(long)]
    pub name: Option<String>,
    /// Accelerators, such as A100-80GB:8.
    #[arg(long, value_name = "NAME[:COUNT]")]
    pub gpus: Option<String>,
    /// At least so many CPUs.
    #[arg(long, value_name = "N")]
    pub cpus: Option<String>,
    /// At least so much memory, in GiB.
    #[arg(long, value_name = "GIB")]
    pub memory: Option<String>,
    /// Only this cloud: aws, gcp or azure.
    #[arg(long)]
    pub cloud: Option<String>,
    /// Only this region.
    #[arg(long)]
    pub region: Option<String>,
    /// Only this zone.
    #[arg(long)]
    pub zone: Option<String>,
    /// Only this kind of node, such as g5.xlarge.
    #[arg(long, value_name = "TYPE")]
    pub instance_type: Option<String>,
    /// spot-first, spot-only or on-demand.
    #[arg(long)]
    pub policy: Option<String>,
    /// No node that costs more per hour, in dollars.
    #[arg(long, value_name = "USD")]
    pub max_hourly_cost: Option<String>,
    /// Stop, with a checkpoint, when the job has cost so much.
    #[arg(long, value_name = "USD")]
    pub budget: Option<String>,
    /// Running time over all attempts, such as 2h.
    #[arg(long, value_name = "TIME")]
    pub time_limit: Option<String>,
    /// Environment variable; without a value, this shell's.
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    pub env: Vec<String>,
    /// The job's own name for the directory that SPOTQ_CHECKPOINT_DIR points to.
    #[arg(long, value_name = "DIR")]
    pub checkpoint_dir: Option<String>,
    /// Signal that makes the job save: USR1, USR2, TERM, INT or HUP.
    #[arg(long, value_name = "SIGNAL")]
    pub save_signal: Option<String>,
    /// How to tell that a checkpoint is complete: generic, rename or orbax.
    #[arg(long, value_name = "PROFILE")]
    pub checkpoint_profile: Option<String>,
    /// Time between TERM and KILL when the job is ended.
    #[arg(long, value_name = "TIME")]
    pub grace: Option<String>,
    /// So many preemptions are taken in stride; any number if absent.
    #[arg(long, value_name = "N")]
    pub retry_preemptions: Option<u32>,
    /// So many failures are tried again.
    #[arg(long, value_name = "N")]
    pub retry_failures: Option<u32>,
    /// Files to keep, as a glob below the working directory; may be repeated.
    #[arg(long, value_name = "GLOB")]
    pub outputs: Vec<String>,
    /// Higher goes first.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub priority: Option<i32>,
    /// Do not place it before `spotq release`.
    #[arg(long)]
    pub hold: bool,
    /// Directory that the command starts in [default for scripts and commands: this one]
    #[arg(long, value_name = "DIR")]
    pub workdir: Option<String>,
    /// Project that pays; kept with the job, and not used in reports yet.
    #[arg(long)]
    pub project: Option<String>,
    /// A label; kept with the job, and not used in reports yet. May be repeated.
    #[arg(long, value_name = "NAME=VALUE")]
    pub tag: Vec<String>,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_command_after_the_dashes_keeps_its_own_flags() {
        let cli =
            Cli::try_parse_from(["spotq", "run", "--gpus", "T4", "--", "python", "t.py", "-o", "x"]).unwrap();
        let Command::Run(args) = cli.command else { panic!("not run") };
        assert_eq!(args.command, ["python", "t.py", "-o", "x"]);
        assert_eq!((args.change.gpus.as_deref(), cli.global.output), (Some("T4"), Format::Table));
    }

    #[test]
    fn global_flags_may_follow_the_subcommand() {
        let cli = Cli::try_parse_from(["spotq", "show", "7", "-o", "json", "--server", "h:1", "-q"]).unwrap();
        assert_eq!(cli.global.output, Format::Json);
        assert_eq!(cli.global.server.as_deref(), Some("h:1"));
        assert!(cli.global.quiet);
    }

    #[test]
    fn usage_errors_end_with_2() {
        for line in [
            &["spotq", "show", "seven"][..],
            &["spotq", "nosuch"],
            &["spotq", "cancel"],
            &["spotq", "queue", "-o", "xml"],
        ] {
            assert_eq!(Cli::try_parse_from(line).unwrap_err().exit_code(), 2, "{line:?}");
        }
    }
}
