//! Which scheduler to talk to, and as whom: `--server`, `SPOTQ_SERVER`, the current context, or here.
//!
//! Contexts are in the configuration file, which is the user's own, and in files that `spotq login` writes beside it.
//! Only resolves names; it never connects. A bad configuration is an error only where it is needed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use spotq_proto::tls::Trust;

use crate::contexts::{Context, Contexts};
use crate::error::ExpectedError;

/// Where `spotqd` listens unless told otherwise.
pub const DEFAULT_SERVER: &str = "http://127.0.0.1:7470";

/// The environment that matters here, so that tests need not change their own.
#[derive(Debug, Clone, Default)]
pub struct Surroundings {
    /// `SPOTQ_SERVER`.
    pub server: Option<String>,
    /// The configuration file, if there is a home to have it in.
    pub config: Option<PathBuf>,
    /// `SPOTQ_CA`: the file of the CA's certificate.
    pub ca: Option<PathBuf>,
    /// `SPOTQ_TOKEN`.
    pub token: Option<String>,
}

/// A scheduler, whom to trust about it, and who we are there.
#[derive(Clone, Default)]
pub struct Target {
    pub server: String,
    pub trust: Trust,
    pub token: Option<String>,
}

/// Never the token.
impl std::fmt::Debug for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Target").field("server", &self.server).finish_non_exhaustive()
    }
}

impl Target {
    /// One that wants to know nothing.
    #[must_use]
    pub fn plain(server: &str) -> Self {
        Target { server: server.to_owned(), ..Target::default() }
    }
}

impl From<Context> for Target {
    fn from(context: Context) -> Self {
        let trust = Trust { ca_pem: context.ca_pem, identity_pem: context.certificate_pem };
        Target { server: context.server, trust, token: context.token }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    current: Option<String>,
    #[serde(default)]
    contexts: BTreeMap<String, ContextEntry>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ContextEntry {
    server: String,
}

/// A larger configuration file is not one of ours.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

impl Surroundings {
    /// Of this process.
    #[must_use]
    pub fn of_process() -> Self {
        let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".config"));
        let base = std::env::var_os("XDG_CONFIG_HOME").filter(|dir| !dir.is_empty()).map(PathBuf::from);
        Surroundings {
            server: std::env::var("SPOTQ_SERVER").ok().filter(|server| !server.is_empty()),
            config: base.or_else(home).map(|base| base.join("spotq/config.yaml")),
            ca: std::env::var_os("SPOTQ_CA").filter(|file| !file.is_empty()).map(PathBuf::from),
            token: std::env::var("SPOTQ_TOKEN").ok().filter(|token| !token.is_empty()),
        }
    }

    /// Where `spotq login` keeps what it was told.
    pub fn contexts(&self) -> Result<Contexts, ExpectedError> {
        let dir = self.config.as_ref().and_then(|file| file.parent()).map(|dir| dir.join("contexts"));
        let dir = dir.ok_or_else(|| {
            ExpectedError::BadInput("there is no home directory to keep contexts in\n  hint: set HOME".into())
        })?;
        Ok(Contexts::new(dir))
    }
}

/// Whom to dial. `flag` is `--server`: an address, or the name of a context.
pub fn target(flag: Option<&str>, around: &Surroundings) -> Result<Target, ExpectedError> {
    let mut target = named(flag, around)?;
    if let Some(file) = &around.ca {
        target.trust.ca_pem = std::fs::read_to_string(file).map_err(|e| ExpectedError::reading(file, &e))?;
    }
    if around.token.is_some() {
        target.token.clone_from(&around.token);
    }
    Ok(target)
}

fn named(flag: Option<&str>, around: &Surroundings) -> Result<Target, ExpectedError> {
    // Without a home there is nothing that was kept.
    let kept = around.contexts().ok();
    if let Some(given) = flag.or(around.server.as_deref()) {
        if looks_like_address(given) {
            let server = address(given)?;
            let known = kept.map_or(Ok(None), |kept| kept.by_server(&server))?;
            return Ok(known.map_or_else(|| Target::plain(&server), Target::from));
        }
        return by_name(given, kept.as_ref(), around);
    }
    if let Some(name) = kept.as_ref().and_then(Contexts::current) {
        return by_name(&name, kept.as_ref(), around);
    }
    match &read(around)?.current {
        None => Ok(Target::plain(DEFAULT_SERVER)),
        Some(name) => by_name(name, kept.as_ref(), around),
    }
}

fn by_name(name: &str, kept: Option<&Contexts>, around: &Surroundings) -> Result<Target, ExpectedError> {
    if let Some(context) = kept.map_or(Ok(None), |kept| kept.get(name))? {
        return Ok(context.into());
    }
    let config = read(around)?;
    match config.contexts.get(name) {
        Some(entry) => Ok(Target::plain(&address(&entry.server)?)),
        None => Err(unknown_context(name, &config, around)),
    }
}

fn looks_like_address(text: &str) -> bool {
    text.contains(':') || text.contains('.') || text == "localhost"
}

pub fn address(text: &str) -> Result<String, ExpectedError> {
    let hint = "write for example http://127.0.0.1:7470";
    let url = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
    let bad = |why: &str| ExpectedError::BadInput(format!("`{text}` is no address: {why}\n  hint: {hint}"));
    let (scheme, rest) = match (url.strip_prefix("http://"), url.strip_prefix("https://")) {
        (Some(rest), _) => ("http", rest),
        (None, Some(rest)) => ("https", rest),
        (None, None) => return Err(bad("expected http://HOST:PORT or https://HOST:PORT")),
    };
    let authority = rest.trim_end_matches('/');
    if authority.is_empty() || authority.contains(['/', ' ', '@', '?', '#']) {
        return Err(bad("expected http://HOST:PORT"));
    }
    let has_port = authority.rsplit_once(':').is_some_and(|(host, port)| {
        !host.is_empty() && !port.contains(']') && port.parse::<u16>().is_ok_and(|p| p != 0)
    });
    if has_port {
        Ok(format!("{scheme}://{authority}"))
    } else if authority.ends_with(']') || !authority.contains(':') {
        Ok(format!("{scheme}://{authority}:7470"))
    } else {
        Err(bad("the port is a number from 1 to 65535"))
    }
}

fn read(around: &Surroundings) -> Result<Config, ExpectedError> {
    use serde_saphyr::MessageFormatter as _;
    let Some(path) = &around.config else { return Ok(Config::default()) };
    let text = match read_text(path) {
        Ok(text) => text,
        Err(e) if matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) => {
            return Ok(Config::default());
        }
        Err(e) => return Err(ExpectedError::reading(path, &e)),
    };
    if text.trim().is_empty() {
        return Ok(Config::default());
    }
    serde_saphyr::from_str(&text).map_err(|e| {
        ExpectedError::BadInput(format!(
            "{}{}: {}\n  hint: expected `current: NAME` and `contexts: {{NAME: {{server: ADDR}}}}`",
            path.display(),
            e.location().map_or_else(String::new, |at| format!(":{}:{}", at.line(), at.column())),
            crate::out::plain(&serde_saphyr::UserMessageFormatter.format_message(e.without_snippet()))
        ))
    })
}

fn read_text(path: &Path) -> std::io::Result<String> {
    use std::io::Read as _;
    let mut text = String::new();
    std::fs::File::open(path)?.take(CONFIG_BYTES_MAX).read_to_string(&mut text)?;
    Ok(text)
}

fn unknown_context(name: &str, config: &Config, around: &Surroundings) -> ExpectedError {
    let known: Vec<&str> = config.contexts.keys().map(String::as_str).collect();
    let place = around.config.as_deref().map_or_else(String::new, |path| format!(" in {}", path.display()));
    let hint = if known.is_empty() {
        "no context is defined there; an address is written HOST:PORT".to_owned()
    } else {
        format!("defined are: {}", known.join(", "))
    };
    ExpectedError::BadInput(format!(
        "there is no context `{}`{place}\n  hint: {hint}",
        crate::out::plain(name)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(flag: Option<&str>, around: &Surroundings) -> Result<String, ExpectedError> {
        target(flag, around).map(|target| target.server)
    }

    fn with_config(text: &str) -> (tempfile::TempDir, Surroundings) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.yaml");
        std::fs::write(&path, text).unwrap();
        (dir, Surroundings { config: Some(path), ..Surroundings::default() })
    }

    #[test]
    fn the_flag_wins_over_the_environment_over_the_context_over_the_default() {
        let (_dir, mut around) = with_config("current: lab\ncontexts:\n  lab: {server: lab.example:9000}\n");
        assert_eq!(server(None, &Surroundings::default()).unwrap(), DEFAULT_SERVER);
        assert_eq!(server(None, &around).unwrap(), "http://lab.example:9000");
        around.server = Some("127.0.0.1:1".into());
        assert_eq!(server(None, &around).unwrap(), "http://127.0.0.1:1");
        assert_eq!(server(Some("http://h:2/"), &around).unwrap(), "http://h:2");
        assert_eq!(server(Some("lab"), &around).unwrap(), "http://lab.example:9000");
    }

    #[test]
    fn addresses_get_a_scheme_and_a_port_and_nonsense_is_refused() {
        let at = |text: &str| server(Some(text), &Surroundings::default());
        assert_eq!(at("localhost").unwrap(), "http://localhost:7470");
        assert_eq!(at("[::1]:80").unwrap(), "http://[::1]:80");
        assert_eq!(at("10.0.0.1").unwrap(), "http://10.0.0.1:7470");
        assert_eq!(at("https://h").unwrap(), "https://h:7470");
        for bad in
            ["https://h:0", "ftp://h:1", "h:port", "h:0", "h:99999", "http://", "http://a/b", "http://u@h:1"]
        {
            assert_eq!(at(bad).unwrap_err().exit_code(), 64, "{bad}");
        }
    }

    #[test]
    fn a_bad_configuration_names_its_file_and_what_was_expected() {
        let (_dir, around) = with_config("current: lab\nkontexts: {}\n");
        let text = server(None, &around).unwrap_err().to_string();
        assert!(
            text.contains("config.yaml:2:1: ") && text.contains("kontexts") && !text.contains("<input>"),
            "{text}"
        );
        let (_dir, around) = with_config("current: lab\ncontexts: {prod: {server: h}}\n");
        let text = server(None, &around).unwrap_err().to_string();
        assert!(text.contains("`lab`") && text.contains("prod"), "{text}");
        let (_dir, around) = with_config(": : :\n\t- ");
        assert_eq!(server(None, &around).unwrap_err().exit_code(), 64);
    }
}
