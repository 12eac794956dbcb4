//! `spotqd init`, `rotate`, `user` and `audit`: they change files of a data directory and exit.
//!
//! A scheduler that runs sees the change within two seconds. A token is printed once, to stdout, and kept nowhere.

use std::ffi::OsString;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use spotq_engine::pki::{OVERLAP_MS, Pki};
use spotq_engine::seal::{Sealer, hex, random};
use spotq_engine::{ClusterSecret, Role, Security, TOKEN_PREFIX, Users, audit};

use crate::error::DaemonError;
use crate::secrets;

/// The words that make `spotqd` one of these commands instead of the scheduler.
const COMMANDS: [&str; 4] = ["init", "rotate", "user", "audit"];

#[derive(Debug, Parser)]
#[command(name = "spotqd", version)]
struct ManageArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make a CA, a certificate for the server, and an admin; from then on spotqd serves with TLS.
    ///
    /// The admin's token is printed to stdout, once.
    Init {
        #[command(flatten)]
        at: At,
        /// Host name or IP address that clients and workers use; may be repeated. This machine's loopback always counts.
        #[arg(long = "name", value_name = "HOST")]
        names: Vec<String>,
        /// Name of the admin.
        #[arg(long, value_name = "USER", default_value = "admin")]
        admin: String,
    },
    /// Make a new certificate for the server, which takes it without a restart.
    Rotate {
        #[command(flatten)]
        at: At,
        /// One more host name or IP address; may be repeated.
        #[arg(long = "name", value_name = "HOST")]
        names: Vec<String>,
        /// A new CA as well. The old one is trusted too, until `--forget-old`.
        #[arg(long, conflicts_with = "forget_old")]
        ca: bool,
        /// Trust the newest CA alone. Clients need its ca.pem, and users with certificates new ones.
        #[arg(long)]
        forget_old: bool,
        /// Even if workers may not have heard of the newest CA, as after a theft of the old one's key.
        #[arg(long, requires = "forget_old")]
        force: bool,
    },
    /// Who may do what.
    #[command(subcommand)]
    User(UserCommand),
    /// What was done.
    #[command(subcommand)]
    Audit(AuditCommand),
}

#[derive(Debug, Subcommand)]
enum UserCommand {
    /// Add a user, and print its token to stdout, once.
    Add {
        name: String,
        /// viewer sees states and money; user acts on own jobs; operator on all; admin manages users, too.
        #[arg(long)]
        role: Role,
        /// Write a client certificate with its key here in place of a token.
        #[arg(long, value_name = "FILE")]
        cert: Option<PathBuf>,
        #[command(flatten)]
        at: At,
    },
    /// List names and roles.
    List {
        #[command(flatten)]
        at: At,
    },
    /// Remove a user: its token or certificate counts no more.
    Remove {
        name: String,
        #[command(flatten)]
        at: At,
    },
}

#[derive(Debug, Subcommand)]
enum AuditCommand {
    /// Check that no line of the audit log was changed, removed or put in.
    Verify {
        #[command(flatten)]
        at: At,
    },
}

#[derive(Debug, Args)]
struct At {
    /// Directory of the scheduler.
    #[arg(long, value_name = "DIR")]
    data: PathBuf,
}

/// Whether these arguments, which begin with the program's name, are for [`main`].
pub(crate) fn is_meant(args: &[OsString]) -> bool {
    args.get(1).and_then(|word| word.to_str()).is_some_and(|word| COMMANDS.contains(&word))
}

pub(crate) fn main(args: Vec<OsString>) -> ExitCode {
    let args = match ManageArgs::try_parse_from(args) {
        Ok(args) => args,
        Err(error) => {
            // Help goes to stdout, wrong usage to stderr; a closed pipe leaves nobody to tell.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
        }
    };
    match run(args.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => crate::daemon::say(&error),
    }
}

fn run(command: Command) -> Result<(), DaemonError> {
    match command {
        Command::Init { at, names, admin } => init(&at.data, &names, &admin),
        Command::Rotate { at, names, ca, forget_old, force } => {
            let mut here = Here::open(&at.data)?;
            here.rotate(&names, ca, forget_old.then_some(if force { 0 } else { OVERLAP_MS }))
        }
        Command::User(UserCommand::Add { name, role, cert, at }) => {
            Here::open(&at.data)?.add(&name, role, cert.as_deref())
        }
        Command::User(UserCommand::List { at }) => {
            let here = Here::open(&at.data)?;
            let mut text = String::new();
            for user in here.users()?.all() {
                let by = if user.certificate.is_some() { "certificate" } else { "token" };
                text.push_str(&format!("{}\t{}\t{by}\n", user.name, user.role));
            }
            print(&text)
        }
        Command::User(UserCommand::Remove { name, at }) => {
            let here = Here::open(&at.data)?;
            let mut users = here.users()?;
            users.remove(&name).map_err(manage)?;
            users.save(&here.data).map_err(manage)?;
            talk(&format!("{name} is removed"));
            Ok(())
        }
        Command::Audit(AuditCommand::Verify { at }) => {
            let here = Here::open(&at.data)?;
            let found = audit::verify(&here.data, &here.secret).map_err(manage)?;
            print(&format!("{} lines are whole ({} to {})\n", found.lines, found.first, found.last))
        }
    }
}

fn init(data: &Path, names: &[String], admin: &str) -> Result<(), DaemonError> {
    let data = crate::daemon::data_dir(data)?;
    let _lock = lock(&data)?;
    let sealer = Sealer::open(&data).map_err(manage)?;
    let secret = ClusterSecret::new(secrets::cluster_secret(&data, &sealer)?);
    let token = token()?;
    let mut users = Users::load(&data, &secret).map_err(manage)?;
    users.add(admin, Role::Admin, Some(&token), None).map_err(manage)?;
    let pki = Pki::init(&data, sealer, names).map_err(manage)?;
    users.save(&data).map_err(manage)?;
    talk(&format!("made a CA and a certificate for {}", pki.hosts().join(", ")));
    talk(&format!("clients need {}; the token of `{admin}` is:", Security::ca_path(&data).display()));
    print(&format!("{token}\n"))?;
    talk("keep it: it is stored nowhere. Restart a spotqd that runs; log in with");
    talk(&format!("  spotq login --server https://HOST:7470 --ca {}", Security::ca_path(&data).display()));
    Ok(())
}

/// A data directory that was made ready by `init`, locked against a second command.
struct Here {
    data: PathBuf,
    sealer: Sealer,
    secret: ClusterSecret,
    _lock: std::fs::File,
}

impl Here {
    fn open(data: &Path) -> Result<Self, DaemonError> {
        let fail = |error: &dyn std::fmt::Display| DaemonError::Data {
            path: data.to_owned(),
            detail: error.to_string(),
        };
        let path = data.canonicalize().map_err(|error| fail(&error))?;
        if !Security::directory(&path).exists() {
            return Err(fail(&"it has no identities; `spotqd init` makes the first"));
        }
        let lock = lock(&path)?;
        let sealer = Sealer::open(&path).map_err(manage)?;
        let secret = ClusterSecret::new(secrets::cluster_secret(&path, &sealer)?);
        Ok(Here { data: path, sealer, secret, _lock: lock })
    }

    fn users(&self) -> Result<Users, DaemonError> {
        Users::load(&self.data, &self.secret).map_err(manage)
    }

    fn rotate(&mut self, names: &[String], ca: bool, forget: Option<u64>) -> Result<(), DaemonError> {
        let mut pki = Pki::open(&self.data, self.sealer.clone()).map_err(manage)?;
        let now = spotq_engine::now().0;
        if ca {
            pki.renew_ca(now).map_err(manage)?;
            talk("made a new CA; the old one is trusted as well until `spotqd rotate --forget-old`");
        }
        if let Some(overlap) = forget {
            pki.forget_old(now, overlap).map_err(manage)?;
            talk("the newest CA alone is trusted");
        }
        if !names.is_empty() || (!ca && forget.is_none()) {
            pki.renew_server(names).map_err(manage)?;
            talk(&format!("made a new certificate for {}", pki.hosts().join(", ")));
        }
        Ok(())
    }

    fn add(&self, name: &str, role: Role, cert: Option<&Path>) -> Result<(), DaemonError> {
        let mut users = self.users()?;
        let Some(path) = cert else {
            let token = token()?;
            users.add(name, role, Some(&token), None).map_err(manage)?;
            users.save(&self.data).map_err(manage)?;
            talk(&format!("{name} is {role}; the token is stored nowhere:"));
            return print(&format!("{token}\n"));
        };
        let pki = Pki::open(&self.data, self.sealer.clone()).map_err(manage)?;
        let certified = pki.user(name).map_err(manage)?;
        users.add(name, role, None, Some(&certified.der)).map_err(manage)?;
        let fail =
            |error: std::io::Error| DaemonError::Data { path: path.to_owned(), detail: error.to_string() };
        let mut file =
            std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(fail)?;
        file.write_all(certified.pem.as_bytes()).map_err(fail)?;
        users.save(&self.data).map_err(manage)?;
        talk(&format!("{name} is {role}; certificate and key are in {}", path.display()));
        Ok(())
    }
}

/// Two commands at once would lose a user.
fn lock(data: &Path) -> Result<std::fs::File, DaemonError> {
    let path = data.join("manage.lock");
    let fail = |error: std::io::Error| DaemonError::Data { path: path.clone(), detail: error.to_string() };
    let file = std::fs::OpenOptions::new().create(true).append(true).mode(0o600).open(&path).map_err(fail)?;
    file.lock().map_err(fail)?;
    Ok(file)
}

fn token() -> Result<String, DaemonError> {
    Ok(format!("{TOKEN_PREFIX}{}", hex(&random().map_err(manage)?)))
}

fn manage(error: impl std::fmt::Display) -> DaemonError {
    DaemonError::Manage(error.to_string())
}

fn print(text: &str) -> Result<(), DaemonError> {
    let mut stdout = std::io::stdout().lock();
    let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    written.map_err(|error| DaemonError::Running(format!("write to stdout: {error}")))
}

#[expect(clippy::print_stderr, reason = "what is said beside the data of a command")]
fn talk(text: &str) {
    eprintln!("{text}");
}
