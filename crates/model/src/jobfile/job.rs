//! One document of a job file to one `JobSpec`: the keys at the top, `checkpoint:` and `retry:`.

use std::collections::BTreeMap;

use crate::{CheckpointSpec, Command, JobSpec, Resources, Retry};

use super::Context;
use super::error::{Fault, FaultKind, Notes, Place, shown};
use super::values::{did_you_mean, parse_moment, parse_signal, too_long, truth, whole};
use super::values::{
    expected, items, line, money, parsed, policy, profile, relative, signal_target, span, text,
};
use super::yaml::{Key, Kind, Node};
use super::{keys, resources};

/// Names longer than this do not fit a file name, a tag of a cloud or a table.
pub(super) const NAME_CHARS_MAX: usize = 255;
/// Linux takes no argument or variable (with its name) beyond 128 KiB, its final NUL included.
pub(super) const ONE_STRING_BYTES_MAX: usize = 128 * 1024 - 1;
/// Linux gives arguments and environment together 2 MiB by default; half of it leaves room for what the job adds.
pub(super) const ENV_BYTES_MAX: usize = 1 << 20;
/// Tags are copied to the cloud, which takes 50 on AWS; a few are ours.
const TAGS_MAX: usize = 40;
/// The longest value of a tag that AWS takes.
const TAG_CHARS_MAX: usize = 256;
/// Globs are matched against every file at each commit.
const OUTPUTS_MAX: usize = 1000;
/// A save takes minutes; a longer pause between TERM and KILL is a mistake that keeps a node running.
const GRACE_HOURS_MAX: u64 = 24;

/// What a document says, before it is complete.
pub(super) struct Draft {
    pub spec: JobSpec,
    /// `name:`, if it is given.
    pub name: Option<String>,
    /// `run:`, if it is given.
    pub run: Option<String>,
    /// `use_spot:`, if it is given; yields to `policy:`.
    use_spot: Option<bool>,
    policy_given: Option<Place>,
}

/// Reads the keys of one document.
pub(super) fn draft(doc: &Node, ctx: &Context, notes: &mut Notes) -> Result<Draft, Fault> {
    let entries = match &doc.kind {
        Kind::Map(entries) => entries,
        Kind::Seq(_) => {
            return Err(Fault::invalid(
                doc.at,
                "expected keys such as `run:` at the top of the file, found a list",
                "remove the leading `- `; put several jobs in one file with a line `---` between them",
            ));
        }
        Kind::Scalar { .. } => {
            return Err(Fault::invalid(
                doc.at,
                format!("expected keys such as `run:` at the top of the file, found {}", doc.what()),
                "write `run: COMMAND`; a script starts with a `#!` line",
            ));
        }
    };
    let mut draft = Draft { spec: blank(ctx), name: None, run: None, use_spot: None, policy_given: None };
    for (key, value) in entries {
        draft.key(key, value, ctx, notes)?;
    }
    match (draft.use_spot, draft.policy_given) {
        (Some(use_spot), None) => {
            draft.spec.policy =
                if use_spot { crate::PlacementPolicy::SpotFirst } else { crate::PlacementPolicy::OnDemand };
        }
        (Some(use_spot), Some(at)) if use_spot == (draft.spec.policy == crate::PlacementPolicy::OnDemand) => {
            let policy = draft.spec.policy.as_str();
            notes.push(
                at,
                format!("`policy: {policy}` and `use_spot: {use_spot}` disagree: the policy is taken"),
            );
        }
        _ => {}
    }
    Ok(draft)
}

/// A job with every default, and nothing to run.
pub(super) fn blank(ctx: &Context) -> JobSpec {
    JobSpec {
        name: String::new(),
        user: ctx.user.clone(),
        command: Command::Argv { argv: Vec::new() },
        setup: None,
        workdir: None,
        env: BTreeMap::new(),
        resources: Resources::default(),
        checkpoint: CheckpointSpec::default(),
        policy: crate::PlacementPolicy::default(),
        budget: None,
        project: None,
        tags: BTreeMap::new(),
        time_limit: None,
        retry: Retry::default(),
        priority: 0,
        begin: None,
        hold: false,
        outputs: Vec::new(),
    }
}

/// A name made from a file's or a program's, within the rules for names.
pub(super) fn name_from(text: &str) -> String {
    let base = text.rsplit('/').next().unwrap_or(text);
    let stem = base.rsplit_once('.').map_or(base, |(stem, _)| if stem.is_empty() { base } else { stem });
    let clean = |c: char| if c.is_control() || matches!(c, '\u{2028}' | '\u{2029}') { '-' } else { c };
    let name: String = stem.chars().take(NAME_CHARS_MAX).map(clean).collect();
    if name.trim().is_empty() { "job".into() } else { name }
}

impl Draft {
    fn key(&mut self, key: &Key, value: &Node, ctx: &Context, notes: &mut Notes) -> Result<(), Fault> {
        let path = key.text.as_str();
        // A key without a value is as good as absent, as in SkyPilot; but it must be a key.
        if value.is_null() && keys::TOP.contains(&path) {
            return Ok(());
        }
        let spec = &mut self.spec;
        match path {
            "name" => self.name = Some(line(path, value, NAME_CHARS_MAX)?.to_owned()),
            "workdir" => spec.workdir = Some(workdir(value)?),
            "setup" => spec.setup = Some(text(path, value)?.to_owned()),
            "run" => self.run = Some(run(value)?),
            "envs" => spec.env = env(value)?,
            "resources" => {
                let read = resources::read(value, notes)?;
                spec.resources = read.resources;
                self.use_spot = read.use_spot;
            }
            "checkpoint" => spec.checkpoint = checkpoint(value, notes)?,
            "policy" => {
                spec.policy = policy(path, value)?;
                self.policy_given = Some(value.at);
            }
            "budget" => spec.budget = Some(money(path, value)?),
            "project" => {
                spec.project = Some(line(path, value, TAG_CHARS_MAX)?.to_owned());
                notes.push_once(key.at, keys::PROJECT_UNUSED);
            }
            "tags" => {
                spec.tags = tags(value)?;
                notes.push_once(key.at, keys::TAGS_UNUSED);
            }
            "time_limit" => spec.time_limit = Some(span(path, value)?),
            "retry" => spec.retry = retry(value)?,
            "priority" => spec.priority = whole(path, value, i32::MIN.into(), i32::MAX.into())?,
            "begin" => {
                let begin = parsed(path, value, |text| parse_moment(text, ctx.now))?;
                if begin < ctx.now {
                    notes.push(value.at, "`begin` is in the past: the job may start at once");
                }
                spec.begin = Some(begin);
            }
            "hold" => spec.hold = truth(path, value)?,
            "outputs" => {
                let list = items(path, value, OUTPUTS_MAX)?;
                spec.outputs =
                    list.iter().map(|n| relative(path, n).map(str::to_owned)).collect::<Result<_, _>>()?;
            }
            "num_nodes" if whole::<u32>(path, value, 1, i64::from(u32::MAX))? == 1 => {}
            _ => return other(key, value, notes),
        }
        Ok(())
    }
}

/// A key at the top that is not honoured.
fn other(key: &Key, value: &Node, notes: &mut Notes) -> Result<(), Fault> {
    if let Some(fault) = keys::not_yet(&key.text, key.at) {
        return Err(fault);
    }
    let Some(note) = keys::foreign("", &key.text) else {
        return Err(keys::unknown("", &key.text, key.at));
    };
    notes.push(key.at, note);
    if let ("file_mounts", Kind::Map(mounts)) = (key.text.as_str(), &value.kind) {
        for (target, mount) in mounts {
            if is_bucket_mount(mount) {
                let bucket =
                    format!("the bucket mounted at {} is not mounted by this version", shown(&target.text));
                notes.push(target.at, format!("{bucket}: save to the directory in `SPOTQ_CHECKPOINT_DIR`"));
            }
        }
    }
    Ok(())
}

fn is_bucket_mount(mount: &Node) -> bool {
    let Kind::Map(entries) = &mount.kind else { return false };
    let get = |name: &str| entries.iter().find(|(key, _)| key.text == name).map(|(_, value)| &value.kind);
    // MOUNT is SkyPilot's default mode of a bucket.
    match get("mode") {
        Some(Kind::Scalar { text, .. }) => text.to_ascii_uppercase().starts_with("MOUNT"),
        Some(_) => false,
        None => get("source").is_some() || get("name").is_some(),
    }
}

fn run(value: &Node) -> Result<String, Fault> {
    let run = match &value.kind {
        Kind::Scalar { .. } => text("run", value)?,
        Kind::Seq(_) | Kind::Map(_) => {
            let message = format!("`run`: expected a command, found {}", value.what());
            return Err(Fault::invalid(value.at, message, "write `run: |` and the commands below, indented"));
        }
    };
    if run.trim().is_empty() {
        return Err(Fault::invalid(
            value.at,
            "`run` is empty: there is nothing to run",
            "write `run: COMMAND`",
        ));
    }
    Ok(run.to_owned())
}

fn workdir(value: &Node) -> Result<String, Fault> {
    if let Kind::Map(_) = &value.kind {
        return Err(Fault::new(
            FaultKind::Unsupported,
            value.at,
            "`workdir` from a git repository is not supported by this version",
            "clone it in `setup`, or name a directory",
        ));
    }
    directory("workdir", value)
}

/// A directory: any path of one line, but not a URL.
fn directory(path: &str, value: &Node) -> Result<String, Fault> {
    // The longest path that Linux takes.
    const PATH_MAX: usize = 4096;
    let dir = line(path, value, PATH_MAX)?;
    if dir.contains("://") {
        return Err(expected(path, "a directory, not a URL", value));
    }
    Ok(dir.to_owned())
}

fn env(value: &Node) -> Result<BTreeMap<String, String>, Fault> {
    let Kind::Map(entries) = &value.kind else {
        return Err(expected("envs", "keys of the form `NAME: value`", value));
    };
    let mut env = BTreeMap::new();
    let mut total = 0;
    for (key, value) in entries {
        let name = &key.text;
        check_env_name(name, key.at)?;
        let path = format!("envs.{name}");
        if value.is_null() {
            return Err(Fault::invalid(
                value.at,
                format!("`{path}` has no value"),
                format!("write `{name}: \"\"` for an empty one"),
            ));
        }
        let text = text(&path, value)?;
        let bytes = name.len() + text.len() + 2;
        if bytes > ONE_STRING_BYTES_MAX {
            let hint = "Linux starts no process with it: pass a file instead";
            return Err(too_long(key.at, &format!("`{path}`"), bytes, ONE_STRING_BYTES_MAX, hint));
        }
        total += bytes;
        env.insert(name.clone(), text.to_owned());
    }
    if total > ENV_BYTES_MAX {
        let hint = "Linux starts no process with so large an environment: pass a file instead";
        return Err(too_long(value.at, "`envs`", total, ENV_BYTES_MAX, hint));
    }
    Ok(env)
}

fn check_env_name(name: &str, at: Place) -> Result<(), Fault> {
    let mut bytes = name.bytes();
    let first_ok = bytes.next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_');
    // A longer name is a mistake, and is repeated in messages.
    const NAME_BYTES_MAX: usize = 255;
    if !first_ok || !bytes.all(|b| b.is_ascii_alphanumeric() || b == b'_') || name.len() > NAME_BYTES_MAX {
        return Err(Fault::invalid(
            at,
            format!("{} is not the name of a variable", shown(name)),
            "use letters, digits and `_`, not starting with a digit, at most 255 of them",
        ));
    }
    if name.starts_with("SPOTQ_") {
        return Err(Fault::invalid(
            at,
            format!("the variable {} is reserved: spotq sets those that start with `SPOTQ_`", shown(name)),
            "use another name",
        ));
    }
    Ok(())
}

fn tags(value: &Node) -> Result<BTreeMap<String, String>, Fault> {
    let Kind::Map(entries) = &value.kind else {
        return Err(expected("tags", "keys of the form `name: value`", value));
    };
    if entries.len() > TAGS_MAX {
        let message = format!("`tags` has {} tags, more than {TAGS_MAX}", entries.len());
        return Err(Fault::invalid(value.at, message, "clouds take no more: remove some"));
    }
    let mut tags = BTreeMap::new();
    for (key, value) in entries {
        // The longest name of a tag that AWS takes.
        const TAG_NAME_CHARS_MAX: usize = 128;
        let name = line("tags", &Node::scalar(key.at, key.text.clone()), TAG_NAME_CHARS_MAX)?.to_owned();
        let text = if value.is_null() { "" } else { text("tags", value)? };
        if !text.is_empty() {
            line(&format!("tags.{name}"), value, TAG_CHARS_MAX)?;
        }
        tags.insert(name, text.to_owned());
    }
    Ok(tags)
}

fn checkpoint(value: &Node, notes: &mut Notes) -> Result<CheckpointSpec, Fault> {
    let Kind::Map(entries) = &value.kind else {
        return Err(expected("checkpoint", "keys such as `dir` and `interval`", value));
    };
    let mut spec = CheckpointSpec::default();
    for (key, value) in entries {
        let path = keys::join("checkpoint", &key.text);
        let path = path.as_str();
        if value.is_null() && keys::CHECKPOINT.contains(&key.text.as_str()) {
            continue;
        }
        match key.text.as_str() {
            "dir" => spec.dir = Some(directory(path, value)?),
            "interval" => {
                spec.interval = Some(span(path, value)?);
                notes.push_once(key.at, keys::INTERVAL_UNUSED);
            }
            "signal" => spec.signal = signal(path, value)?,
            "signal_target" => spec.signal_target = signal_target(path, value)?,
            "grace" => {
                spec.grace = span(path, value)?;
                if spec.grace > crate::Span::secs(GRACE_HOURS_MAX * 3600) {
                    return Err(expected(path, &format!("at most {GRACE_HOURS_MAX}h"), value));
                }
            }
            "profile" => spec.profile = profile(path, value)?,
            "complete_when" => spec.complete_when = Some(relative(path, value)?.to_owned()),
            // Each kept checkpoint is listed at every restore.
            "keep" => {
                spec.keep = whole(path, value, 1, 1000)?;
                notes.push_once(key.at, keys::KEEP_UNUSED);
            }
            other => return Err(keys::unknown("checkpoint", other, key.at)),
        }
    }
    Ok(spec)
}

fn signal(path: &str, value: &Node) -> Result<Option<crate::Signal>, Fault> {
    let word = text(path, value)?;
    if word.eq_ignore_ascii_case("none") {
        return Ok(None);
    }
    parse_signal(word).map(Some).map_err(|why| {
        let hint = did_you_mean(word, &["USR1", "USR2", "TERM", "INT", "HUP"]);
        Fault::invalid(value.at, format!("`{path}`: {why}"), hint)
    })
}

fn retry(value: &Node) -> Result<Retry, Fault> {
    let Kind::Map(entries) = &value.kind else {
        return Err(expected("retry", "keys such as `preemptions` and `failures`", value));
    };
    // A program has no more exit codes.
    const EXIT_CODES_MAX: usize = 255;
    let mut retry = Retry::default();
    for (key, value) in entries {
        let path = keys::join("retry", &key.text);
        let path = path.as_str();
        if value.is_null() && keys::RETRY.contains(&key.text.as_str()) {
            continue;
        }
        match key.text.as_str() {
            "preemptions" if text(path, value)? == "unlimited" => retry.preemptions = None,
            "preemptions" => retry.preemptions = Some(whole(path, value, 0, i64::from(u32::MAX))?),
            "failures" => retry.failures = whole(path, value, 0, i64::from(u32::MAX))?,
            "exit_codes" => {
                let list = items(path, value, EXIT_CODES_MAX)?;
                retry.exit_codes = list.iter().map(|n| whole(path, n, 1, 255)).collect::<Result<_, _>>()?;
            }
            other => return Err(keys::unknown("retry", other, key.at)),
        }
    }
    if !retry.exit_codes.is_empty() && retry.failures == 0 {
        return Err(Fault::invalid(
            value.at,
            "`retry.exit_codes` has no effect without `retry.failures`",
            "add `failures: N`, how often such an exit is tried again",
        ));
    }
    Ok(retry)
}
