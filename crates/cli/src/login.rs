//! `spotq login` and `spotq context`. A token is read and kept, and never shown or taken as an argument.

use std::io::{IsTerminal as _, Read as _, Write as _};
use std::path::Path;
use std::process::ExitCode;

use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};
use spotq_proto::tls::certificates;
use spotq_proto::v1;

use crate::args::{ContextCommand, LoginArgs};
use crate::client::Client;
use crate::config::{self, Surroundings, Target};
use crate::contexts::Context;
use crate::error::ExpectedError;
use crate::out::{Out, plain};

/// No token is longer.
const TOKEN_BYTES_MAX: u64 = 4096;

/// Asks the scheduler who we are there, and keeps the context if it knows us.
pub async fn login(args: &LoginArgs, server: Option<&str>, out: &Out) -> Result<ExitCode, ExpectedError> {
    let around = Surroundings::of_process();
    let server = server.or(around.server.as_deref()).ok_or_else(|| {
        ExpectedError::Usage(
            "login needs the scheduler's address\n  hint: add --server https://HOST:7470".into(),
        )
    })?;
    let server = if server.contains("://") { server.to_owned() } else { format!("https://{server}") };
    let server = config::address(&server)?;
    if !server.starts_with("https://") {
        return Err(ExpectedError::BadInput(format!(
            "{server} is plain text, which takes no token\n  hint: write https://…"
        )));
    }
    let ca_pem = read(&args.ca)?;
    certificates(&ca_pem).map_err(|why| ExpectedError::BadInput(format!("{}: {why}", args.ca.display())))?;
    let certificate_pem = args.cert.as_deref().map(read).transpose()?;
    let token = match certificate_pem {
        Some(_) => None,
        None => Some(token(args)?),
    };
    let context = Context { server: server.clone(), ca_pem, token, certificate_pem };
    let client = Client::connect_as(&Target::from(context.clone())).await?;
    let me = client.admin().who_am_i(v1::WhoAmIRequest {}).await;
    let me = me.map_err(|status| client.failed("log in", &status))?.into_inner();
    around.contexts()?.keep(&args.name, &context)?;
    out.say(&format!(
        "logged in to {server} as {} ({}), context {}",
        plain(&me.name),
        plain(&me.role),
        args.name
    ));
    Ok(ExitCode::SUCCESS)
}

pub fn context(command: &ContextCommand, out: &Out) -> Result<ExitCode, ExpectedError> {
    let contexts = Surroundings::of_process().contexts()?;
    let unknown = |name: &str| {
        ExpectedError::NotFound(format!(
            "there is no context `{}`\n  hint: `spotq context list` lists all",
            plain(name)
        ))
    };
    match command {
        ContextCommand::List => {
            let current = contexts.current();
            for name in contexts.names() {
                let star = if current.as_deref() == Some(&name) { "*" } else { " " };
                if let Some(context) = contexts.get(&name)? {
                    out.data(&format!("{star} {name}  {}\n", plain(&context.server)))?;
                }
            }
        }
        ContextCommand::Use { name } => {
            contexts.get(name)?.ok_or_else(|| unknown(name))?;
            contexts.make_current(name)?;
        }
        ContextCommand::Remove { name } => {
            if !contexts.remove(name)? {
                return Err(unknown(name));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn token(args: &LoginArgs) -> Result<String, ExpectedError> {
    let text = if args.token_stdin { from_stdin()? } else { from_terminal()? };
    let token = text.trim();
    if token.is_empty() || !token.chars().all(|c| c.is_ascii_graphic()) {
        return Err(ExpectedError::BadInput(
            "that is no token\n  hint: it begins with spotq_ and comes from `spotqd user add`".into(),
        ));
    }
    Ok(token.to_owned())
}

fn from_stdin() -> Result<String, ExpectedError> {
    let mut text = String::new();
    let read = std::io::stdin().lock().take(TOKEN_BYTES_MAX).read_to_string(&mut text);
    read.map_err(|_| ExpectedError::BadInput("the token on standard input cannot be read".into()))?;
    Ok(text)
}

/// Without echo, which comes back whatever happens.
fn from_terminal() -> Result<String, ExpectedError> {
    let stdin = std::io::stdin();
    if !stdin.is_terminal() {
        return Err(ExpectedError::Usage(
            "there is no terminal to read the token from\n  hint: add --token-stdin".into(),
        ));
    }
    let failed = |e: rustix::io::Errno| ExpectedError::Internal(format!("cannot set up the terminal: {e}"));
    let before = tcgetattr(&stdin).map_err(failed)?;
    let mut silent = before.clone();
    silent.local_modes.remove(LocalModes::ECHO);
    // Somebody who sees no prompt can type all the same.
    let _ = write!(std::io::stderr(), "token: ").and_then(|()| std::io::stderr().flush());
    tcsetattr(&stdin, OptionalActions::Flush, &silent).map_err(failed)?;
    let mut line = String::new();
    let read = stdin.read_line(&mut line);
    tcsetattr(&stdin, OptionalActions::Flush, &before).map_err(failed)?;
    let _ = writeln!(std::io::stderr());
    read.map_err(|_| ExpectedError::BadInput("the token cannot be read".into()))?;
    Ok(line)
}

fn read(path: &Path) -> Result<String, ExpectedError> {
    std::fs::read_to_string(path).map_err(|e| ExpectedError::reading(path, &e))
}
