//! Names what the operating system and sled report, and ends the process where going on would lose data.

use std::fs::File;
use std::io;
use std::path::Path;

use spotq_store::StoreError;

/// Names an I/O error by what the user can do about it.
pub(crate) fn io_error(path: &Path, operation: &str, error: &io::Error) -> StoreError {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            StoreError::DiskFull { path: path.to_owned(), needed: 0 }
        }
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
            StoreError::ReadOnly { path: path.to_owned(), reason: error.to_string() }
        }
        io::ErrorKind::NotADirectory => StoreError::NotADirectory { path: path.to_owned() },
        _ => StoreError::Failed {
            operation: format!("{operation} of {}", path.display()),
            reason: error.to_string(),
        },
    }
}

/// Names an error of sled.
pub(crate) fn sled_error(dir: &Path, operation: &str, error: &sled::Error) -> StoreError {
    match error {
        sled::Error::Io(error) => io_error(dir, operation, error),
        sled::Error::Corruption { .. } => corrupt(dir, damage_in(error)),
        other => StoreError::Failed {
            operation: format!("{operation} in {}", dir.display()),
            reason: other.to_string(),
        },
    }
}

/// What an error of sled says about its files. Its own words for damage end with the backtrace that it did not take.
pub(crate) fn damage_in(error: &sled::Error) -> String {
    match error {
        sled::Error::Corruption { at: Some(at), .. } => format!("sled found damaged bytes at {at}"),
        sled::Error::Corruption { at: None, .. } => "sled found damaged bytes in its files".to_owned(),
        other => format!("sled cannot open its files: {other}"),
    }
}

pub(crate) fn corrupt(path: &Path, what: impl Into<String>) -> StoreError {
    StoreError::Corrupt { path: path.to_owned(), what: what.into() }
}

/// Syncs the data of a file, or ends the process. See [`die`].
pub(crate) fn sync_data(file: &File, path: &Path) {
    if let Err(error) = file.sync_data() {
        die(path, "fdatasync", &error.to_string());
    }
}

/// Syncs a directory, so that the names in it survive a power cut, or ends the process. See [`die`].
pub(crate) fn sync_dir(dir: &Path) -> Result<(), StoreError> {
    let opened = File::open(dir).map_err(|error| io_error(dir, "open", &error))?;
    if let Err(error) = opened.sync_all() {
        die(dir, "fsync", &error.to_string());
    }
    Ok(())
}

/// Ends the process. After a failed sync the kernel may drop the pages that it could not write and report success the
/// next time, so nothing that this process believes about the disk is true any more; only a restart reads what is
/// really there.
#[expect(clippy::print_stderr, reason = "the process ends here and no log line may be lost with it")]
pub(crate) fn die(path: &Path, operation: &str, reason: &str) -> ! {
    eprintln!(
        "spotq store: {operation} of {} failed: {reason}; stopping at once because acknowledged writes could be lost; \
         check the disk, then restart",
        path.display()
    );
    std::process::abort();
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use super::*;

    #[test]
    #[ignore = "ends its process; the next test runs it in one of its own"]
    fn syncs_what_cannot_be_synced() {
        let path = Path::new("/dev/null");
        sync_data(&File::open(path).unwrap(), path);
    }

    #[test]
    fn a_failed_sync_ends_the_process_and_says_why() {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "failure::tests::syncs_what_cannot_be_synced", "--ignored", "--nocapture"])
            .output()
            .unwrap();
        assert_eq!(output.status.signal(), Some(rustix::process::Signal::ABORT.as_raw()), "{output:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("fdatasync of /dev/null failed") && said.contains("check the disk"), "{said}");
    }
}
