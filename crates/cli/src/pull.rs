//! `spotq pull`: a job's declared outputs, verified, into a directory.
//!
//! Reads only: while the job runs it fetches what was committed last, and never disturbs whoever writes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use spotq_checkpoint::{CheckpointError, JobKey, Options, Repository, Restore};

use crate::args::PullArgs;
use crate::client::{Client, job_request};
use crate::error::ExpectedError;
use crate::json;
use crate::out::{Format, Out, plain};
use crate::screen::Screen;
use crate::words;

/// How many bytes the moving line may be behind.
const SHOWN_EVERY_BYTES: u64 = 1 << 20;

/// Fetches the newest committed outputs.
pub async fn pull(client: &Client, args: &PullArgs, out: &Out) -> Result<(), ExpectedError> {
    let task = args.job;
    let reply = client.jobs().outputs(job_request(task)).await;
    let outputs = reply
        .map(tonic::Response::into_inner)
        .map_err(|e| client.failed(&format!("find the outputs of job {task}"), &e))?;
    if outputs.globs.is_empty() {
        return Err(ExpectedError::Refused(format!(
            "job {task} declares no outputs\n  hint: name them in `outputs:` of its job file, or with --outputs GLOB"
        )));
    }
    let dir = args.dir.clone().unwrap_or_else(|| PathBuf::from(format!("outputs-{task}")));
    let repository = open(&outputs.url, &outputs.read_key)?;
    if let Some(parent) = dir.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        std::fs::create_dir_all(parent).map_err(|e| ExpectedError::writing(parent, &e))?;
    }
    let restored = fetch(&repository, &dir, out).await.map_err(|e| explain(e, &dir))?;
    let Restore::Restored(restored) = restored else {
        let why = match restored {
            Restore::Nothing { fell_back, .. } if !fell_back.is_empty() => "what it saved is damaged",
            _ => "none has been saved yet",
        };
        return Err(ExpectedError::NotFound(format!(
            "job {task} has no outputs: {why}\n  hint: they are kept at each checkpoint and at the end of the job"
        )));
    };
    for damaged in &restored.fell_back {
        out.say(&format!("spotq: newer outputs are damaged ({}); these are older", plain(&damaged.object)));
    }
    let files = list(&dir)?;
    if out.format == Format::Json {
        return out.json(&json::Pulled {
            job_id: task.job.0,
            dir: dir.display().to_string(),
            url: outputs.url,
            bytes: files.values().sum(),
            files,
        });
    }
    for name in files.keys() {
        out.data(&format!("{}\n", plain(&dir.join(name).display().to_string())))?;
    }
    let count = words::count(files.len() as u64, "file");
    out.say(&format!("{count}, {}, verified", words::bytes(restored.bytes)));
    Ok(())
}

pub(crate) fn open(url: &str, key: &[u8]) -> Result<Repository, ExpectedError> {
    let key: [u8; 32] = key.try_into().map_err(|_| {
        ExpectedError::Internal(format!("the scheduler sent a key of {} bytes: expected 32", key.len()))
    })?;
    // A variable that is not text is none that a store's client reads.
    let env = std::env::vars_os().filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)));
    Repository::from_url(url, JobKey(key), env, Options::default()).map_err(|e| explain(e, Path::new("")))
}

async fn fetch(repository: &Repository, dir: &Path, out: &Out) -> Result<Restore, CheckpointError> {
    let screen = std::sync::Mutex::new((Screen::new(*out), 0_u64));
    let result = repository
        .pull(dir, &|progress| {
            let Ok(mut guard) = screen.lock() else { return };
            let (screen, shown) = &mut *guard;
            if progress.bytes_done >= *shown + SHOWN_EVERY_BYTES
                || progress.bytes_done == progress.bytes_total
            {
                *shown = progress.bytes_done;
                let (done, total) = (words::bytes(progress.bytes_done), words::bytes(progress.bytes_total));
                screen.status(&format!("fetching {done} of {total}"));
            }
        })
        .await;
    if let Ok((mut screen, _)) = screen.into_inner() {
        // Nothing of a job was passed through this screen, so there is nothing to lose.
        let _ = screen.finish();
    }
    result
}

/// The files below `dir` with their sizes, by name.
fn list(dir: &Path) -> Result<BTreeMap<String, u64>, ExpectedError> {
    let mut files = BTreeMap::new();
    let mut open = vec![dir.to_path_buf()];
    while let Some(next) = open.pop() {
        let failed = |e: std::io::Error| ExpectedError::reading(&next, &e);
        for entry in std::fs::read_dir(&next).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let meta = entry.metadata().map_err(failed)?;
            if meta.is_dir() {
                open.push(entry.path());
            } else {
                let path = entry.path();
                let name = path.strip_prefix(dir).unwrap_or(&path);
                files.insert(name.to_string_lossy().into_owned(), meta.len());
            }
        }
    }
    Ok(files)
}

fn explain(error: CheckpointError, dir: &Path) -> ExpectedError {
    let text = error.to_string();
    match error {
        CheckpointError::NoSpace { .. } => ExpectedError::CannotWrite(text),
        CheckpointError::Denied { .. } => ExpectedError::CannotWrite(text),
        CheckpointError::Invalid { .. } => ExpectedError::BadInput(format!(
            "{text}\n  hint: name a directory that is new or empty, not {}",
            dir.display()
        )),
        CheckpointError::Unavailable { .. } => ExpectedError::Unavailable(crate::error::with_cause(&error)),
        CheckpointError::Corrupt { .. }
        | CheckpointError::Refused { .. }
        | CheckpointError::Changed { .. }
        | CheckpointError::Superseded { .. } => ExpectedError::Internal(text),
    }
}
