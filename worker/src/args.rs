//! The worker's command line.

use std::path::PathBuf;

use clap::Parser;
use spotq_model::{Cloud, Span};

use crate::agent::Config;
use crate::bootstrap::Bootstrap;
use crate::environment::JOIN_SECRET;
use crate::error::WorkerError;
use crate::notice::WatchConfig;
use crate::saves::Quiet;

/// The agent on a node: runs what the scheduler grants, watches for notices, saves, reports.
///
/// Started by whoever launches the node, who hands over the join secret with --bootstrap.
#[derive(Debug, Parser)]
#[command(name = "spotq-worker", version)]
pub struct Args {
    /// Address of the scheduler, such as http://127.0.0.1:7070
    #[arg(long)]
    server: String,
    /// Number of this node
    #[arg(long)]
    node: u64,
    /// What the cloud calls this node
    #[arg(long)]
    instance: String,
    /// Directory for everything that the worker writes
    #[arg(long)]
    dir: PathBuf,
    /// Secrets as JSON, {"join_secret": "…", "env": {…}}: a file, which is removed once read, or `-` for standard input
    #[arg(long, value_name = "FILE")]
    bootstrap: Option<PathBuf>,
    /// Whose metadata service to watch for notices: aws, gcp or azure
    #[arg(long)]
    cloud: Option<Cloud>,
    /// Address of the metadata service, if not the cloud's own
    #[arg(long)]
    metadata: Option<String>,
    /// How often to ask for notices
    #[arg(long, hide = true)]
    poll: Option<Span>,
    /// How long a node lives after a notice that names no time
    #[arg(long, hide = true)]
    unnamed_notice: Option<Span>,
    /// How long an unknown saver must be silent
    #[arg(long, hide = true)]
    quiet: Option<Span>,
    /// The same on notice
    #[arg(long, hide = true)]
    quiet_hurried: Option<Span>,
    /// Find the processes of a job without a cgroup even where one is permitted
    #[arg(long, hide = true)]
    no_cgroups: bool,
    /// Program that the worker re-executes to start commands
    #[arg(long, hide = true)]
    exe: Option<PathBuf>,
}

impl Args {
    /// # Errors
    /// The directory cannot be used.
    pub fn into_config(self) -> Result<Config, WorkerError> {
        std::fs::create_dir_all(&self.dir).map_err(|e| WorkerError::disk("make", &self.dir, e))?;
        // Children have another working directory.
        let dir = self.dir.canonicalize().map_err(|e| WorkerError::disk("open", &self.dir, e))?;
        let mut bootstrap = match &self.bootstrap {
            Some(from) => Bootstrap::take(from)?,
            None => Bootstrap::default(),
        };
        if bootstrap.join_secret.is_empty() {
            bootstrap.join_secret = std::env::var(JOIN_SECRET).unwrap_or_default();
        }
        let watch = self.cloud.map(|cloud| {
            let mut watch = WatchConfig::new(cloud, self.metadata.as_deref(), &self.instance);
            if let Some(poll) = self.poll {
                watch.poll = poll.as_duration();
            }
            if let Some(unnamed) = self.unnamed_notice {
                watch.unnamed = unnamed.as_duration();
            }
            watch
        });
        let usual = Quiet::default();
        let quiet = Quiet {
            calm: self.quiet.unwrap_or(usual.calm),
            hurried: self.quiet_hurried.unwrap_or(usual.hurried),
        };
        Ok(Config {
            server: self.server,
            node: self.node,
            instance: self.instance,
            dir,
            bootstrap,
            watch,
            quiet,
            no_cgroups: self.no_cgroups,
            exe: self.exe.unwrap_or_else(|| PathBuf::from("/proc/self/exe")),
        })
    }
}
