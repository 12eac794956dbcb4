//! Directives of a script: `#SPOTQ --key[-sub]=value` carries every key of a job file, `#SBATCH` a few of Slurm's.
//!
//! Both become the tree that a YAML file would give, so one reader checks both. A directive stands before the
//! first command, as in Slurm; a later one is a comment, and a warning says so.

use super::error::{Fault, FaultKind, Notes, Place, shown};
use super::keys::nearest;
use super::values::parse_slurm_time;
use super::yaml::{Key, Kind, Node};

/// How the value of an option becomes a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// One value; the last one given counts, as in Slurm.
    One,
    /// One value, `true` if it is left out.
    Flag,
    /// Values between commas; several options add up.
    List,
    /// One value, which may hold commas; several options add up.
    Each,
    /// `NAME=VALUE`; several options add up.
    Pair,
}

pub(super) struct OptionOf {
    pub(super) name: &'static str,
    pub(super) path: &'static [&'static str],
    form: Form,
}

const fn option(name: &'static str, path: &'static [&'static str], form: Form) -> OptionOf {
    OptionOf { name, path, form }
}

/// Every option and its key in a job file.
pub(super) const OPTIONS: &[OptionOf] = &[
    option("name", &["name"], Form::One),
    option("workdir", &["workdir"], Form::One),
    option("setup", &["setup"], Form::One),
    option("envs", &["envs"], Form::Pair),
    option("env", &["envs"], Form::Pair),
    option("accelerators", &["resources", "accelerators"], Form::List),
    option("gpus", &["resources", "accelerators"], Form::List),
    option("cpus", &["resources", "cpus"], Form::One),
    option("memory", &["resources", "memory"], Form::One),
    option("infra", &["resources", "infra"], Form::One),
    option("cloud", &["resources", "cloud"], Form::One),
    option("region", &["resources", "region"], Form::One),
    option("zone", &["resources", "zone"], Form::One),
    option("use-spot", &["resources", "use_spot"], Form::Flag),
    option("max-hourly-cost", &["resources", "max_hourly_cost"], Form::One),
    option("instance-type", &["resources", "instance_type"], Form::One),
    option("resources-accelerators", &["resources", "accelerators"], Form::List),
    option("resources-cpus", &["resources", "cpus"], Form::One),
    option("resources-memory", &["resources", "memory"], Form::One),
    option("resources-infra", &["resources", "infra"], Form::One),
    option("resources-cloud", &["resources", "cloud"], Form::One),
    option("resources-region", &["resources", "region"], Form::One),
    option("resources-zone", &["resources", "zone"], Form::One),
    option("resources-use-spot", &["resources", "use_spot"], Form::Flag),
    option("resources-max-hourly-cost", &["resources", "max_hourly_cost"], Form::One),
    option("resources-instance-type", &["resources", "instance_type"], Form::One),
    option("checkpoint-dir", &["checkpoint", "dir"], Form::One),
    option("checkpoint-interval", &["checkpoint", "interval"], Form::One),
    option("checkpoint-signal", &["checkpoint", "signal"], Form::One),
    option("checkpoint-signal-target", &["checkpoint", "signal_target"], Form::One),
    option("checkpoint-grace", &["checkpoint", "grace"], Form::One),
    option("checkpoint-profile", &["checkpoint", "profile"], Form::One),
    option("checkpoint-complete-when", &["checkpoint", "complete_when"], Form::One),
    option("checkpoint-keep", &["checkpoint", "keep"], Form::One),
    option("policy", &["policy"], Form::One),
    option("budget", &["budget"], Form::One),
    option("project", &["project"], Form::One),
    option("tags", &["tags"], Form::Pair),
    option("tag", &["tags"], Form::Pair),
    option("time-limit", &["time_limit"], Form::One),
    option("retry-preemptions", &["retry", "preemptions"], Form::One),
    option("retry-failures", &["retry", "failures"], Form::One),
    option("retry-exit-codes", &["retry", "exit_codes"], Form::List),
    option("priority", &["priority"], Form::One),
    option("begin", &["begin"], Form::One),
    option("hold", &["hold"], Form::Flag),
    option("outputs", &["outputs"], Form::Each),
    // Beyond this version: the reader of job files says so.
    option("num-nodes", &["num_nodes"], Form::One),
    option("array", &["array"], Form::One),
    option("dependencies", &["dependencies"], Form::Each),
    option("deadline", &["deadline"], Form::One),
    option("work-total", &["work"], Form::One),
    option("work-progress", &["work"], Form::One),
    option("inputs", &["inputs"], Form::Each),
];

/// Each option is compared with those before it.
const OPTIONS_MAX: usize = 5000;

/// The directives of a script as the tree of a job file.
pub(super) fn directives(text: &str, notes: &mut Notes) -> Result<Node, Fault> {
    check_first_line(text)?;
    let mut tree = Tree { root: Vec::new() };
    let mut sbatch = Tree { root: Vec::new() };
    let mut gpus = None;
    let mut options = 0;
    let mut commands_begun = false;
    for (index, line) in text.lines().enumerate() {
        let number = index + 1;
        let Some((mark, rest)) = directive(line) else {
            commands_begun |= !line.trim_start().starts_with('#') && !line.trim().is_empty();
            continue;
        };
        let words = words(rest, number, mark.len() + 1);
        if commands_begun {
            let at = Place::new(number, 1);
            notes.push(at, format!("this {mark} line has no effect: it stands after the first command"));
            continue;
        }
        options += words.len();
        if options > OPTIONS_MAX {
            let message = format!("more than {OPTIONS_MAX} options in one script");
            return Err(Fault::invalid(
                Place::new(number, 1),
                message,
                "put variables into a file that the script reads",
            ));
        }
        let mut words = words.into_iter().peekable();
        while let Some(word) = words.next() {
            if mark == "#SPOTQ" {
                spotq_option(&word, &mut words, &mut tree)?;
            } else {
                sbatch_option(&word, &mut words, &mut sbatch, &mut gpus, notes)?;
            }
        }
    }
    for (key, value) in sbatch.root {
        if tree.get(&key.text).is_none() {
            tree.root.push((key, value));
        }
    }
    if let Some(gpus) = gpus {
        tree.gpus(gpus)?;
    }
    Ok(Node { at: Place::START, kind: Kind::Map(tree.root) })
}

/// Options of a command line, in the form of `#SPOTQ` lines, as the top of a job file.
pub(super) fn option_tree(options: &[String]) -> Result<Vec<(Key, Node)>, Fault> {
    let words: Vec<Word> =
        options.iter().map(|text| Word { at: Place::OPTION, text: text.clone() }).collect();
    let mut tree = Tree { root: Vec::new() };
    let mut words = words.into_iter().peekable();
    while let Some(word) = words.next() {
        spotq_option(&word, &mut words, &mut tree)?;
    }
    Ok(tree.root)
}

/// A word of a directive and where it starts.
#[derive(Debug)]
struct Word {
    at: Place,
    text: String,
}

type Words = std::iter::Peekable<std::vec::IntoIter<Word>>;

fn check_first_line(text: &str) -> Result<(), Fault> {
    let first = text.lines().next().unwrap_or_default();
    if text.split('\n').next().is_some_and(|line| line.ends_with('\r')) {
        return Err(Fault::new(
            FaultKind::Unreadable,
            Place::START,
            "the lines of the script end in CR LF, as on Windows: no shell can run it",
            "convert it, for example with `dos2unix`",
        ));
    }
    if first.strip_prefix("#!").is_none_or(|program| program.trim().is_empty()) {
        return Err(Fault::invalid(
            Place::START,
            "expected a script that starts with `#!` and a program",
            "make the first line `#!/bin/bash`",
        ));
    }
    Ok(())
}

/// The mark of a directive and what follows it. `##SBATCH` is a comment.
fn directive(line: &str) -> Option<(&'static str, &str)> {
    for mark in ["#SPOTQ", "#SBATCH"] {
        if let Some(rest) = line.strip_prefix(mark)
            && (rest.is_empty() || rest.starts_with([' ', '\t']))
        {
            return Some((mark, rest));
        }
    }
    None
}

/// Splits at blanks; quotes keep blanks, and a word that starts with `#` begins a comment.
fn words(rest: &str, line: usize, first_column: usize) -> Vec<Word> {
    let mut out: Vec<Word> = Vec::new();
    let mut open: Option<Word> = None;
    let mut quote = None;
    for (index, c) in rest.chars().enumerate() {
        match (quote, c) {
            (Some(q), _) if q == c => quote = None,
            (Some(_), _) => open.iter_mut().for_each(|word| word.text.push(c)),
            (None, ' ' | '\t' | '\r') => out.extend(open.take()),
            (None, '#') if open.is_none() => break,
            (None, _) => {
                let start = || Word { at: Place::new(line, first_column + index), text: String::new() };
                let word = open.get_or_insert_with(start);
                if matches!(c, '"' | '\'') { quote = Some(c) } else { word.text.push(c) }
            }
        }
    }
    out.extend(open);
    out
}

fn spotq_option(word: &Word, rest: &mut Words, tree: &mut Tree) -> Result<(), Fault> {
    let Some(body) = word.text.strip_prefix("--") else {
        let message = format!("expected an option such as `--budget=20`, found {}", shown(&word.text));
        return Err(Fault::invalid(word.at, message, "put a value that holds blanks in quotes"));
    };
    let (name, given) = body.split_once('=').map_or((body, None), |(name, value)| (name, Some(value)));
    // `--tags-team=nlp` is `tags: {team: nlp}`.
    let pair = [("tags-", "tags"), ("envs-", "envs")]
        .into_iter()
        .find_map(|(prefix, key)| Some((key, name.strip_prefix(prefix)?)));
    if let (Some((key, sub)), Some(value)) = (pair, given) {
        return tree.add_pair(&[key], word.at, sub, value);
    }
    let Some(option) = OPTIONS.iter().find(|option| option.name == name.replace('_', "-")) else {
        let hint = match nearest(name, OPTIONS.iter().map(|option| option.name)) {
            Some(near) => format!("did you mean `--{near}`?"),
            None => "options are the keys of a job file, such as `--checkpoint-dir` or `--time-limit`".into(),
        };
        return Err(Fault::invalid(word.at, format!("unknown option {}", shown(&format!("--{name}"))), hint));
    };
    let value = match (given, option.form) {
        (Some(value), _) => value.to_owned(),
        (None, Form::Flag) => "true".into(),
        (None, _) => match rest.next_if(|next| !next.text.starts_with("--")) {
            Some(next) => next.text,
            None => {
                let message = format!("the option `--{name}` has no value");
                return Err(Fault::invalid(word.at, message, format!("write `--{name}=VALUE`")));
            }
        },
    };
    match option.form {
        Form::One | Form::Flag => tree.set(option.path, Node::scalar(word.at, value)),
        Form::Each => tree.append(option.path, word.at, [value.as_str()].into_iter()),
        Form::List => tree.append(option.path, word.at, value.split(',')),
        Form::Pair => match value.split_once('=') {
            Some((key, value)) => tree.add_pair(option.path, word.at, key, value)?,
            None => {
                let message = format!("`--{name}`: expected NAME=VALUE, found {}", shown(&value));
                return Err(Fault::invalid(word.at, message, format!("write `--{name}=NAME=VALUE`")));
            }
        },
    }
    Ok(())
}

/// GPUs that `#SBATCH` asks for: where, the option as written, and the value.
struct SbatchGpus {
    at: Place,
    option: String,
    value: String,
}

fn sbatch_option(
    word: &Word,
    rest: &mut Words,
    tree: &mut Tree,
    gpus: &mut Option<SbatchGpus>,
    notes: &mut Notes,
) -> Result<(), Fault> {
    let Some((name, given)) = sbatch_name(&word.text) else {
        notes.push(word.at, format!("{} is no option of sbatch: it has no effect", shown(&word.text)));
        return Ok(());
    };
    let value = given.or_else(|| rest.next_if(|next| !next.text.starts_with('-')).map(|next| next.text));
    let value = value.unwrap_or_default();
    let unsupported = |what: &str, hint: &str| {
        let message = format!("#SBATCH --{name}: {what} is not supported by this version");
        Err(Fault::new(FaultKind::Unsupported, word.at, message, hint))
    };
    match name.as_str() {
        "job-name" => tree.set(&["name"], Node::scalar(word.at, value)),
        "time" => {
            let span = parse_slurm_time(&value)
                .map_err(|why| Fault::invalid(word.at, format!("#SBATCH --time: {why}"), ""))?;
            if let Some(span) = span {
                tree.set(&["time_limit"], Node::scalar(word.at, format!("{}ms", span.0)));
            }
        }
        "gpus" | "gpus-per-node" => {
            *gpus = Some(SbatchGpus { at: word.at, option: word.text.clone(), value });
        }
        "gres" => {
            for item in value.split(',') {
                match item.strip_prefix("gpu:").or((item == "gpu").then_some("1")) {
                    Some(spec) => {
                        let option = word.text.clone();
                        *gpus = Some(SbatchGpus { at: word.at, option, value: spec.to_owned() });
                    }
                    None => notes.push(
                        word.at,
                        format!("#SBATCH --gres={} is not honoured by this version", shown(item)),
                    ),
                }
            }
        }
        // These change what the job is: to run it without them would be another job.
        "nodes" if matches!(value.as_str(), "1" | "1-1") => {}
        "nodes" => {
            return unsupported("a job of several nodes", "set `#SBATCH --nodes=1`: a job runs on one node");
        }
        "array" => return unsupported("an array", "submit each member as a job of its own"),
        "dependency" => {
            return unsupported("a dependency", "submit the second job after `spotq wait JOB` has returned");
        }
        _ => notes.push(word.at, format!("#SBATCH {} is not honoured by this version", shown(&word.text))),
    }
    Ok(())
}

/// The long name of an option of sbatch, and its value if that is part of the word.
fn sbatch_name(word: &str) -> Option<(String, Option<String>)> {
    const SHORT: &[(char, &str)] = &[
        ('J', "job-name"),
        ('t', "time"),
        ('N', "nodes"),
        ('a', "array"),
        ('d', "dependency"),
        ('G', "gpus"),
    ];
    if let Some(body) = word.strip_prefix("--") {
        let (name, value) = body.split_once('=').map_or((body, None), |(n, v)| (n, Some(v.to_owned())));
        return (!name.is_empty()).then(|| (name.to_owned(), value));
    }
    let mut chars = word.strip_prefix('-')?.chars();
    let letter = chars.next()?;
    let attached = chars.as_str();
    let name = SHORT.iter().find(|(short, _)| *short == letter).map_or(word, |(_, long)| long);
    let value = (!attached.is_empty()).then(|| attached.strip_prefix('=').unwrap_or(attached).to_owned());
    Some((name.to_owned(), value))
}

/// The top of a job file in the making.
struct Tree {
    root: Vec<(Key, Node)>,
}

impl Tree {
    fn get(&self, key: &str) -> Option<&Node> {
        self.root.iter().find(|(k, _)| k.text == key).map(|(_, value)| value)
    }

    fn set(&mut self, path: &[&str], value: Node) {
        let at = value.at;
        *slot(&mut self.root, path, at) = value;
    }

    fn append<'v>(&mut self, path: &[&str], at: Place, values: impl Iterator<Item = &'v str>) {
        let node = slot(&mut self.root, path, at);
        let mut list = match std::mem::replace(&mut node.kind, Kind::Seq(Vec::new())) {
            Kind::Seq(list) => list,
            Kind::Scalar { .. } | Kind::Map(_) => Vec::new(),
        };
        list.extend(values.map(|value| Node::scalar(at, value.trim())));
        node.kind = Kind::Seq(list);
    }

    fn add_pair(&mut self, path: &[&str], at: Place, key: &str, value: &str) -> Result<(), Fault> {
        let node = slot(&mut self.root, path, at);
        if !matches!(node.kind, Kind::Map(_)) {
            node.kind = Kind::Map(Vec::new());
        }
        if let Kind::Map(entries) = &mut node.kind {
            if entries.iter().any(|(k, _)| k.text == key) {
                let message = format!("{} is given twice", shown(key));
                return Err(Fault::invalid(at, message, "keep one of them"));
            }
            entries.push((Key::new(at, key), Node::scalar(at, value)));
        }
        Ok(())
    }

    /// GPUs of `#SBATCH`, unless `#SPOTQ` names accelerators.
    fn gpus(&mut self, gpus: SbatchGpus) -> Result<(), Fault> {
        let named = match self.get("resources").map(|node| &node.kind) {
            Some(Kind::Map(entries)) => entries.iter().any(|(key, _)| key.text == "accelerators"),
            _ => false,
        };
        if named {
            return Ok(());
        }
        // `gpu:4(S:0-1)` binds to sockets, which a node of our own does not need.
        let value = gpus.value.split('(').next().unwrap_or_default();
        let (model, count) = value.rsplit_once(':').unwrap_or_else(|| {
            let is_count = value.bytes().all(|b| b.is_ascii_digit());
            if is_count { ("", value) } else { (value, "1") }
        });
        if count == "0" {
            return Ok(());
        }
        if model.is_empty() {
            // Without a model the job would start on a node without GPUs, or on the wrong ones.
            return Err(Fault::invalid(
                gpus.at,
                format!("#SBATCH {} names no model of GPU", shown(&gpus.option)),
                format!("add a line `#SPOTQ --accelerators=A100:{count}` with the model that will do"),
            ));
        }
        self.set(&["resources", "accelerators"], Node::scalar(gpus.at, format!("{model}:{count}")));
        Ok(())
    }
}

/// The node at `path`, made if it is absent.
fn slot<'t>(entries: &'t mut Vec<(Key, Node)>, path: &[&str], at: Place) -> &'t mut Node {
    let (first, rest) = path.split_first().expect("every path of the table has a first key");
    let index = entries.iter().position(|(key, _)| key.text == *first).unwrap_or_else(|| {
        entries.push((Key::new(at, *first), Node { at, kind: Kind::Map(Vec::new()) }));
        entries.len() - 1
    });
    let node = &mut entries[index].1;
    if rest.is_empty() {
        return node;
    }
    if !matches!(node.kind, Kind::Map(_)) {
        node.kind = Kind::Map(Vec::new());
    }
    match &mut node.kind {
        Kind::Map(inner) => slot(inner, rest, at),
        Kind::Scalar { .. } | Kind::Seq(_) => unreachable!("it was made a map above"),
    }
}
