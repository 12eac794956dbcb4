//! What may go wrong for a person at the keyboard: one message with a hint, and one documented exit code each.
//!
//! Nothing here prints. What is not expected is `Internal` and ends with [`codes::INTERNAL`].

use std::io::ErrorKind;
use std::path::Path;

use spotq_model::jobfile::JobFileError;
use tonic::{Code, Status};

/// The exit codes that are spotq's own; `docs/exit-codes.md` and `spotq --help` list them.
pub mod codes {
    /// Flags or arguments that the command does not have.
    pub const USAGE: u8 = 2;
    /// A job file, a script or a value that cannot be taken.
    pub const BAD_INPUT: u8 = 64;
    /// The scheduler understood and said no.
    pub const REFUSED: u8 = 65;
    /// A file or a job that does not exist or cannot be read.
    pub const NOT_FOUND: u8 = 66;
    /// No scheduler answers.
    pub const UNAVAILABLE: u8 = 69;
    /// A fault of spotq itself.
    pub const INTERNAL: u8 = 70;
    /// A file that cannot be written.
    pub const CANNOT_WRITE: u8 = 73;
    /// Stopped by Ctrl-C.
    pub const INTERRUPTED: u8 = 130;
    /// The reader of a job's output left before the job was done: what a shell says of SIGPIPE.
    pub const OUTPUT_CLOSED: u8 = 141;
}

/// A failure that we can explain.
#[derive(Debug, thiserror::Error)]
pub enum ExpectedError {
    /// The command line makes no sense as a whole.
    #[error("{0}")]
    Usage(String),
    /// The input has to change.
    #[error("{0}")]
    BadInput(String),
    /// The scheduler refused; the state or the rights have to change.
    #[error("{0}")]
    Refused(String),
    /// Name another file or job.
    #[error("{0}")]
    NotFound(String),
    /// Start or name a scheduler, or wait for it.
    #[error("{0}")]
    Unavailable(String),
    /// Free some space, or choose another place to write to.
    #[error("{0}")]
    CannotWrite(String),
    /// The scheduler or this program is at fault; the message is for whoever mends it.
    #[error("{0}")]
    Internal(String),
    /// Whoever read our output has enough; nothing is to be said.
    #[error("the reader of the output closed it")]
    ClosedPipe,
}

impl ExpectedError {
    /// The exit code of the process.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            ExpectedError::Usage(_) => codes::USAGE,
            ExpectedError::BadInput(_) => codes::BAD_INPUT,
            ExpectedError::Refused(_) => codes::REFUSED,
            ExpectedError::NotFound(_) => codes::NOT_FOUND,
            ExpectedError::Unavailable(_) => codes::UNAVAILABLE,
            ExpectedError::Internal(_) => codes::INTERNAL,
            ExpectedError::CannotWrite(_) => codes::CANNOT_WRITE,
            ExpectedError::ClosedPipe => 0,
        }
    }

    /// A file could not be read.
    #[must_use]
    pub fn reading(path: &Path, error: &std::io::Error) -> Self {
        let hint = match error.kind() {
            ErrorKind::NotFound => "check the name; to run a command write `spotq run -- COMMAND`",
            ErrorKind::PermissionDenied => "check its permissions",
            ErrorKind::IsADirectory => "name a file in it",
            _ => "check the file",
        };
        ExpectedError::NotFound(format!("cannot read {}: {}\n  hint: {hint}", path.display(), reason(error)))
    }

    /// A file or directory could not be written.
    #[must_use]
    pub fn writing(path: &Path, error: &std::io::Error) -> Self {
        let hint = match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
                "free some space there, or name another directory"
            }
            ErrorKind::ReadOnlyFilesystem | ErrorKind::PermissionDenied => {
                "name a directory that you may write to"
            }
            _ => "name another directory",
        };
        ExpectedError::CannotWrite(format!(
            "cannot write {}: {}\n  hint: {hint}",
            path.display(),
            reason(error)
        ))
    }

    /// Our own output could not be written.
    #[must_use]
    pub fn output(error: &std::io::Error) -> Self {
        match error.kind() {
            ErrorKind::BrokenPipe => ExpectedError::ClosedPipe,
            _ => ExpectedError::CannotWrite(format!(
                "cannot write the output: {}\n  hint: check the file or disk that it is sent to",
                reason(error)
            )),
        }
    }

    /// Nothing listens at `server`, or it does not speak our protocol.
    #[must_use]
    pub fn unreachable(server: &str, why: &str) -> Self {
        ExpectedError::Unavailable(format!(
            "no scheduler answers at {server}: {why}\n  hint: start one with `spotqd --data DIR --local`, or name \
             another with --server or SPOTQ_SERVER"
        ))
    }

    /// The scheduler's answer to `what` was an error.
    #[must_use]
    pub fn from_status(server: &str, what: &str, status: &Status) -> Self {
        let said = one_line(status.message());
        let text = format!("cannot {what}: {said}");
        if connection_broke(status) {
            return ExpectedError::unreachable(server, "the connection broke");
        }
        match status.code() {
            Code::InvalidArgument | Code::OutOfRange => ExpectedError::BadInput(text),
            Code::NotFound => ExpectedError::NotFound(text),
            Code::FailedPrecondition | Code::AlreadyExists | Code::Aborted => ExpectedError::Refused(text),
            Code::PermissionDenied | Code::Unauthenticated => {
                ExpectedError::Refused(format!("{text}\n  hint: ask whoever runs the scheduler at {server}"))
            }
            Code::ResourceExhausted => ExpectedError::Refused(format!(
                "{text}\n  hint: the scheduler is at a limit; try again later"
            )),
            Code::Unimplemented => ExpectedError::Unavailable(format!(
                "cannot {what}: the scheduler at {server} does not know this call\n  hint: update it to {}",
                env!("CARGO_PKG_VERSION")
            )),
            Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled => {
                ExpectedError::unreachable(server, &deepest(status, &said))
            }
            Code::Ok | Code::Unknown | Code::Internal | Code::DataLoss => ExpectedError::Internal(format!(
                "cannot {what}: the scheduler at {server} failed: {said}\n  hint: its log says more"
            )),
        }
    }
}

impl From<JobFileError> for ExpectedError {
    fn from(error: JobFileError) -> Self {
        ExpectedError::BadInput(error.to_string())
    }
}

/// Whether the transport failed, and not the scheduler: only then has a status of these codes a cause.
fn connection_broke(status: &Status) -> bool {
    matches!(status.code(), Code::Unknown | Code::Internal) && std::error::Error::source(status).is_some()
}

/// Whether the same call may pass later: the connection broke or the scheduler was away.
#[must_use]
pub fn may_pass_later(status: &Status) -> bool {
    match status.code() {
        Code::Unavailable
        | Code::DeadlineExceeded
        | Code::Cancelled
        | Code::Aborted
        | Code::Unknown
        | Code::Internal => true,
        Code::Ok
        | Code::InvalidArgument
        | Code::NotFound
        | Code::AlreadyExists
        | Code::PermissionDenied
        | Code::ResourceExhausted
        | Code::FailedPrecondition
        | Code::OutOfRange
        | Code::Unimplemented
        | Code::DataLoss
        | Code::Unauthenticated => false,
    }
}

/// The innermost cause, which names what happened ("connection refused"); the outer ones only say where.
#[must_use]
pub fn deepest(error: &(dyn std::error::Error + 'static), otherwise: &str) -> String {
    let mut cause = error.source();
    let mut text = otherwise.to_owned();
    while let Some(inner) = cause {
        text = inner.to_string();
        cause = inner.source();
    }
    // The number says less than the words before it.
    let words = text.split(" (os error").next().unwrap_or_default();
    one_line(&words.to_lowercase())
}

/// An error with what caused it, in one line.
#[must_use]
pub fn with_cause(error: &(dyn std::error::Error + 'static)) -> String {
    match error.source() {
        None => one_line(&error.to_string()),
        Some(_) => one_line(&format!("{error}: {}", deepest(error, ""))),
    }
}

fn reason(error: &std::io::Error) -> String {
    match error.kind() {
        ErrorKind::NotFound => "there is no such file".into(),
        ErrorKind::PermissionDenied => "permission denied".into(),
        ErrorKind::IsADirectory => "it is a directory".into(),
        ErrorKind::StorageFull => "the disk is full".into(),
        ErrorKind::ReadOnlyFilesystem => "the file system is read-only".into(),
        ErrorKind::QuotaExceeded => "the disk quota is used up".into(),
        _ => error.to_string().to_lowercase(),
    }
}

/// What another program said goes to a terminal: without control characters, in one line.
fn one_line(text: &str) -> String {
    crate::out::plain(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `docs/exit-codes.md` is written by this table.
    #[test]
    fn every_failure_has_its_documented_code() {
        let table = [
            (ExpectedError::Usage(String::new()), 2),
            (ExpectedError::BadInput(String::new()), 64),
            (ExpectedError::Refused(String::new()), 65),
            (ExpectedError::NotFound(String::new()), 66),
            (ExpectedError::Unavailable(String::new()), 69),
            (ExpectedError::Internal(String::new()), 70),
            (ExpectedError::CannotWrite(String::new()), 73),
            (ExpectedError::ClosedPipe, 0),
        ];
        let docs = include_str!("../../../docs/exit-codes.md");
        for (error, code) in table {
            assert_eq!(error.exit_code(), code, "{error:?}");
            assert!(docs.contains(&format!("| {code} |")), "docs/exit-codes.md lacks {code}");
        }
    }

    #[test]
    fn a_status_becomes_the_code_that_says_what_to_do() {
        let code = |status: Status| ExpectedError::from_status("http://s", "show job 7", &status).exit_code();
        assert_eq!(code(Status::not_found("no job 7")), 66);
        assert_eq!(code(Status::invalid_argument("bad")), 64);
        assert_eq!(code(Status::failed_precondition("done")), 65);
        assert_eq!(code(Status::permission_denied("no")), 65);
        assert_eq!(code(Status::resource_exhausted("full")), 65);
        assert_eq!(code(Status::unavailable("away")), 69);
        assert_eq!(code(Status::unimplemented("what")), 69);
        assert_eq!(code(Status::internal("bug")), 70);
    }

    #[test]
    fn a_broken_connection_is_not_a_fault_of_the_scheduler() {
        let broken = Status::from_error(Box::new(std::io::Error::other("h2 protocol error")));
        let error = ExpectedError::from_status("http://s", "watch job 7", &broken);
        assert_eq!(error.exit_code(), 69, "{error}");
        assert!(error.to_string().contains("the connection broke"), "{error}");
        assert!(may_pass_later(&broken));
    }

    #[test]
    fn full_disks_and_read_only_directories_are_named() {
        let text = |kind: ErrorKind| ExpectedError::writing(Path::new("/d"), &kind.into()).to_string();
        assert!(text(ErrorKind::StorageFull).contains("the disk is full"));
        assert!(text(ErrorKind::ReadOnlyFilesystem).contains("read-only"));
        assert!(text(ErrorKind::PermissionDenied).contains("permission denied"));
    }

    #[test]
    fn what_the_scheduler_says_cannot_move_the_cursor() {
        let status = Status::not_found("no job\u{1b}[2J 7\nsecond");
        let text = ExpectedError::from_status("http://s", "show", &status).to_string();
        assert!(!text.contains('\u{1b}'), "{text:?}");
    }
}
