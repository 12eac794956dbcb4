//! Job files: YAML in SkyPilot's form, scripts with directives, and plain commands, to `JobSpec`.
//!
//! Pure: reads no file and no clock; the caller passes bytes and the time. Every refusal names file, line and
//! column, what was expected, and what to do. Nothing in a file is dropped in silence: what has no effect is a
//! warning, and what would make another job of it is an error.

mod error;
mod job;
mod keys;
mod overlay;
mod resources;
mod script;
mod values;
mod yaml;

use crate::{Command, JobSpec, Timestamp};

use error::{COMMAND_LINE, Fault, FaultKind, Notes};
use job::{ENV_BYTES_MAX, NAME_CHARS_MAX, ONE_STRING_BYTES_MAX};
use overlay::Overlay;
use yaml::{Kind, Node};

pub use error::{JobFileError, Note, Place, Problem};
pub use resources::{Unknown, accelerator_name};
pub use values::{parse_moment, parse_policy, parse_signal, parse_slurm_time};

/// The largest job file or script, in bytes. A script goes to each node with its job; data belongs elsewhere.
pub const FILE_BYTES_MAX: usize = 4 << 20;

/// What the caller knows and the file does not say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Context {
    /// Who submits.
    pub user: String,
    /// The moment that `begin: +2h` counts from.
    pub now: Timestamp,
}

/// What a file says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parsed {
    /// At least one job, in the order of the file.
    pub jobs: Vec<JobSpec>,
    /// What is understood and has no effect, in the order of the file.
    pub warnings: Vec<Note>,
}

/// Reads a job file or a script, told apart by content: `#!` at the start, or a name that ends in `.sh`, `.sbatch`
/// or `.slurm`, is a script. `args` are passed to a script.
///
/// # Errors
/// If the bytes are not text, are too large, or are not a job.
pub fn load(bytes: &[u8], file_name: &str, args: &[String], ctx: &Context) -> Result<Parsed, JobFileError> {
    load_with(bytes, file_name, args, &[], ctx)
}

/// As `load`, with `options` in the form of `#SPOTQ` lines (`--budget=20`), which win over the file.
///
/// # Errors
/// As `load`, and if an option is unknown or wrong.
pub fn load_with(
    bytes: &[u8],
    file_name: &str,
    args: &[String],
    options: &[String],
    ctx: &Context,
) -> Result<Parsed, JobFileError> {
    let unreadable = |message: String, hint: &str| {
        Err(Fault::new(FaultKind::Unreadable, Place::NONE, message, hint).in_file(file_name, ""))
    };
    if bytes.len() > FILE_BYTES_MAX {
        let message = format!(
            "the file has {} bytes, more than the limit of {} MiB",
            bytes.len(),
            FILE_BYTES_MAX >> 20
        );
        return unreadable(message, "keep data out of it, and fetch the data in `setup` or `run`");
    }
    if bytes.starts_with(&[0xff, 0xfe]) || bytes.starts_with(&[0xfe, 0xff]) {
        return unreadable("the file is UTF-16 text: expected UTF-8".into(), "save it as UTF-8");
    }
    if let Some(index) = bytes.iter().position(|b| *b == 0) {
        let message = format!("the file is binary (a NUL at byte {index}): expected a job file or a script");
        return unreadable(message, "run a program with `spotq run -- PROGRAM`");
    }
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => return Err(not_utf8(bytes, error.valid_up_to(), file_name)),
    };
    // Editors on Windows begin a file with this mark, which is no part of the text.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let script_name = [".sh", ".sbatch", ".slurm"].iter().any(|end| file_name.ends_with(end));
    if text.starts_with("#!") || script_name {
        return Reading::new(text, file_name, options, ctx)?.script(args);
    }
    if !args.is_empty() {
        let (message, hint) = ("a job file takes no arguments", "put them into `run:`, or submit a script");
        return Err(Fault::invalid(Place::OPTION, message, hint).in_file(file_name, ""));
    }
    Reading::new(text, file_name, options, ctx)?.yaml()
}

/// Reads a job file: one job in each YAML document. A first document with nothing but a name is a pipeline's.
///
/// # Errors
/// If it is not YAML, or says something that is unknown, wrong or not supported.
pub fn parse_yaml(text: &str, file_name: &str, ctx: &Context) -> Result<Parsed, JobFileError> {
    Reading::new(text, file_name, &[], ctx)?.yaml()
}

/// Reads a script with a `#!` line: one job, which runs it with `args`.
///
/// # Errors
/// If it has no `#!` line, or a directive is unknown, wrong or not supported.
pub fn parse_script(
    text: &str,
    file_name: &str,
    args: &[String],
    ctx: &Context,
) -> Result<Parsed, JobFileError> {
    Reading::new(text, file_name, &[], ctx)?.script(args)
}

/// A job that runs a program with its arguments, without a shell.
///
/// # Errors
/// If there is no program, or Linux would not start it.
pub fn from_command(argv: &[String], ctx: &Context) -> Result<Parsed, JobFileError> {
    from_command_with(argv, &[], ctx)
}

/// As `from_command`, with `options` in the form of `#SPOTQ` lines, such as `--budget=20`.
///
/// # Errors
/// As `from_command`, and if an option is unknown or wrong.
pub fn from_command_with(argv: &[String], options: &[String], ctx: &Context) -> Result<Parsed, JobFileError> {
    Reading::new("", COMMAND_LINE, options, ctx)?.command(argv)
}

/// The names of all options, without their dashes, for help and completion.
pub fn option_names() -> impl Iterator<Item = &'static str> {
    script::OPTIONS.iter().map(|option| option.name)
}

/// One text on its way to jobs.
struct Reading<'a> {
    text: &'a str,
    file: &'a str,
    ctx: &'a Context,
    options: Overlay,
    notes: Notes,
}

impl<'a> Reading<'a> {
    fn new(
        text: &'a str,
        file: &'a str,
        options: &[String],
        ctx: &'a Context,
    ) -> Result<Reading<'a>, JobFileError> {
        let options = Overlay::new(options).map_err(|fault| fault.in_file(file, text))?;
        Ok(Reading { text, file, ctx, options, notes: Notes::new(file) })
    }

    fn yaml(mut self) -> Result<Parsed, JobFileError> {
        let jobs = self.yaml_jobs();
        self.finish(jobs)
    }

    fn script(mut self, args: &[String]) -> Result<Parsed, JobFileError> {
        let job = self.script_job(args);
        self.finish(job.map(|job| vec![job]))
    }

    fn command(mut self, argv: &[String]) -> Result<Parsed, JobFileError> {
        let job = self.command_job(argv);
        self.finish(job.map(|job| vec![job]))
    }

    fn finish(self, jobs: Result<Vec<JobSpec>, Fault>) -> Result<Parsed, JobFileError> {
        let jobs = jobs.map_err(|fault| fault.in_file(self.file, self.text))?;
        Ok(Parsed { jobs, warnings: self.notes.finish() })
    }

    fn yaml_jobs(&mut self) -> Result<Vec<JobSpec>, Fault> {
        check_size(self.text)?;
        let mut docs = yaml::documents(self.text)?;
        let pipeline = take_pipeline(&mut docs, &mut self.notes)?;
        if docs.is_empty() {
            return Err(Fault::invalid(
                Place::START,
                "the file is empty: there is nothing to run",
                "write at least `run: COMMAND`",
            ));
        }
        let several = docs.len() > 1;
        let base = pipeline.unwrap_or_else(|| job::name_from(self.file));
        let mut jobs = Vec::with_capacity(docs.len());
        for (index, doc) in docs.iter_mut().enumerate() {
            self.options.lay_over(doc);
            let draft = job::draft(doc, self.ctx, &mut self.notes)?;
            let Some(run) = draft.run else {
                let message = if draft.spec.setup.is_some() {
                    "`run` is missing: `setup` alone is no job"
                } else {
                    "`run` is missing: there is nothing to run"
                };
                return Err(Fault::invalid(doc.at, message, "add `run: COMMAND`"));
            };
            let mut spec = draft.spec;
            spec.command = Command::Shell { text: run };
            spec.name = draft.name.unwrap_or_else(|| default_name(&base, several.then_some(index + 1)));
            jobs.push(spec);
        }
        Ok(jobs)
    }

    fn script_job(&mut self, args: &[String]) -> Result<JobSpec, Fault> {
        check_size(self.text)?;
        let mut doc = script::directives(self.text, &mut self.notes)?;
        if self.text.contains('\0') {
            let message = "the script holds a NUL character";
            return Err(Fault::new(FaultKind::Unreadable, Place::NONE, message, "remove it"));
        }
        check_args(args)?;
        self.options.lay_over(&mut doc);
        let draft = job::draft(&doc, self.ctx, &mut self.notes)?;
        let mut spec = draft.spec;
        spec.command = Command::Script { text: self.text.to_owned(), args: args.to_vec() };
        spec.name = draft.name.unwrap_or_else(|| job::name_from(self.file));
        Ok(spec)
    }

    fn command_job(&mut self, argv: &[String]) -> Result<JobSpec, Fault> {
        let Some(program) = argv.first().filter(|program| !program.trim().is_empty()) else {
            let hint = "write it after `--`, as in `spotq run -- python train.py`";
            return Err(Fault::invalid(Place::OPTION, "there is no command", hint));
        };
        check_args(argv)?;
        let mut doc = Node { at: Place::OPTION, kind: Kind::Map(Vec::new()) };
        self.options.lay_over(&mut doc);
        let draft = job::draft(&doc, self.ctx, &mut self.notes)?;
        // An interpreter says little: the script that it runs names the job.
        let script = argv.iter().skip(1).find(|arg| arg.ends_with(".py") || arg.ends_with(".sh"));
        let mut spec = draft.spec;
        spec.command = Command::Argv { argv: argv.to_vec() };
        spec.name = draft.name.unwrap_or_else(|| job::name_from(script.unwrap_or(program)));
        Ok(spec)
    }
}

fn check_size(text: &str) -> Result<(), Fault> {
    if text.len() <= FILE_BYTES_MAX {
        return Ok(());
    }
    let hint = "keep data out of it, and fetch the data when the job runs";
    Err(values::too_long(Place::NONE, "the file", text.len(), FILE_BYTES_MAX, hint))
}

/// Takes the first document away if it is the header of a SkyPilot pipeline, and returns the pipeline's name.
fn take_pipeline(docs: &mut Vec<Node>, notes: &mut Notes) -> Result<Option<String>, Fault> {
    let [Node { at, kind: Kind::Map(entries) }, _, ..] = docs.as_slice() else { return Ok(None) };
    if entries.is_empty() || !entries.iter().all(|(key, _)| matches!(key.text.as_str(), "name" | "execution"))
    {
        return Ok(None);
    }
    let mut name = None;
    let mut parallel = false;
    for (key, value) in entries {
        match key.text.as_str() {
            "name" => name = Some(values::line("name", value, NAME_CHARS_MAX)?.to_owned()),
            _ => parallel = values::text("execution", value)? == "parallel",
        }
    }
    if !parallel {
        notes.push(*at, "the tasks of a pipeline are queued as jobs of their own: their order is not kept");
    }
    docs.remove(0);
    Ok(name)
}

fn default_name(base: &str, number: Option<usize>) -> String {
    let Some(number) = number else { return base.to_owned() };
    let end = format!("-{number}");
    let room = NAME_CHARS_MAX - end.len();
    base.chars().take(room).chain(end.chars()).collect()
}

/// Arguments that Linux would refuse when it is too late to ask.
fn check_args(args: &[String]) -> Result<(), Fault> {
    let mut total = 0;
    for (index, arg) in args.iter().enumerate() {
        if arg.contains('\0') {
            let message = format!("argument {index} holds a NUL character");
            return Err(Fault::invalid(Place::OPTION, message, "remove it: a command line cannot carry it"));
        }
        if arg.len() > ONE_STRING_BYTES_MAX {
            let what = format!("argument {index}");
            let hint = "pass a file instead";
            return Err(values::too_long(Place::OPTION, &what, arg.len(), ONE_STRING_BYTES_MAX, hint));
        }
        total += arg.len() + 1;
    }
    if total > ENV_BYTES_MAX {
        let hint = "pass a file instead";
        return Err(values::too_long(Place::OPTION, "the command line", total, ENV_BYTES_MAX, hint));
    }
    Ok(())
}

fn not_utf8(bytes: &[u8], index: usize, file: &str) -> JobFileError {
    let before = &bytes[..index];
    let line = before.iter().filter(|b| **b == b'\n').count() + 1;
    let start = before.iter().rposition(|b| *b == b'\n').map_or(0, |n| n + 1);
    let column = std::str::from_utf8(&before[start..]).map_or(0, |text| text.chars().count()) + 1;
    let message = format!("the byte 0x{:02x} is not UTF-8 text", bytes[index]);
    let text = String::from_utf8_lossy(bytes);
    Fault::new(FaultKind::Unreadable, Place::new(line, column), message, "save the file as UTF-8")
        .in_file(file, &text)
}

#[cfg(test)]
mod tests;
