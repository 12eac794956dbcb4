//! The command line of `spotqd`.

use std::path::PathBuf;

use clap::Parser;

/// Schedules training jobs on spot capacity.
#[derive(Debug, Clone, Parser)]
#[command(name = "spotqd", version, after_help = EXIT_CODES)]
pub struct DaemonArgs {
    /// Directory of the queue, the logs and the cluster's secret; made if it is not there. SPOTQ_MASTER_KEY_FILE names
    /// the key that secrets in it are sealed with; without it the key is `master.key` in the directory.
    #[arg(long, value_name = "DIR")]
    pub data: PathBuf,
    /// Address to serve on. Only loopback is served without TLS, which `spotqd init` makes.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7470")]
    pub listen: String,
    /// Settings, in YAML.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Use the simulated clouds on this machine.
    #[arg(long)]
    pub local: bool,
    /// Seed of the simulated market.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
}

const EXIT_CODES: &str = "\
Identities (each with --help):
  spotqd init --data DIR [--name HOST]…     a CA, a certificate, an admin; from then on TLS
  spotqd user add|list|remove --data DIR    who may do what
  spotqd rotate --data DIR [--ca]           new certificates, without a restart
  spotqd audit verify --data DIR            check the audit log

Exit codes:
  0   ended by a signal, everything is safe
  2   wrong usage
  65  an identity or certificate cannot be made or changed as asked
  69  the address is taken or cannot be served
  70  the store failed while running; what was acknowledged is safe
  73  the data directory cannot be used: read-only, full, in use, or not a directory
  78  the configuration is wrong";
