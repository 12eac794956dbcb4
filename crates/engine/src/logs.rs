//! Logs of attempts: written at the offset that the worker names, so that a piece sent twice is harmless.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use spotq_model::{Generation, TaskId};
use spotq_proto::logframe::{self, Frame};

/// More than this of one attempt is acknowledged but not kept.
pub(crate) const LOG_BYTES_MAX: u64 = 1 << 30;
/// Read at once by a follower.
const READ_BYTES: usize = 256 * 1024;

pub(crate) fn path(data_dir: &Path, task: TaskId, generation: Generation) -> PathBuf {
    data_dir.join("logs").join(task.to_string()).join(format!("{generation}.log"))
}

/// How much of an attempt's log is here.
pub(crate) fn stored(data_dir: &Path, task: TaskId, generation: Generation) -> u64 {
    std::fs::metadata(path(data_dir, task, generation)).map_or(0, |meta| meta.len())
}

/// Writes a piece and says up to where the log is whole now. A piece beyond the end is refused by not moving; once the
/// log is as long as it may be, everything after is taken for written, so that the worker does not send it for ever.
pub(crate) fn write(
    data_dir: &Path,
    task: TaskId,
    generation: Generation,
    offset: u64,
    data: &[u8],
) -> io::Result<u64> {
    let path = path(data_dir, task, generation);
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)?;
    }
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
    let length = file.metadata()?.len();
    let end = offset.saturating_add(data.len() as u64);
    if length >= LOG_BYTES_MAX {
        return Ok(end.max(length));
    }
    if offset > length {
        return Ok(length);
    }
    let room = usize::try_from(LOG_BYTES_MAX - offset).unwrap_or(usize::MAX);
    file.write_all_at(&data[..data.len().min(room)], offset)?;
    Ok(end.max(length))
}

/// Reads an attempt's frames from the start, as far as they are there.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    offset: u64,
    rest: Vec<u8>,
}

impl Reader {
    /// The next frames; none if nothing new is there. Bytes that are no frames end the log with an error.
    pub(crate) fn read(&mut self, path: &Path) -> io::Result<Vec<Frame>> {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut buffer = vec![0; READ_BYTES];
        let count = file.read_at(&mut buffer, self.offset)?;
        self.offset += count as u64;
        self.rest.extend_from_slice(&buffer[..count]);
        let mut frames = Vec::new();
        let mut used = 0;
        while let Some((frame, size)) = logframe::decode(&self.rest[used..]).map_err(io::Error::other)? {
            frames.push(frame);
            used += size;
        }
        self.rest.drain(..used);
        Ok(frames)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spotq_model::JobId;
    use spotq_proto::v1::LogStream;

    #[test]
    fn a_log_at_its_limit_takes_everything_and_keeps_the_start() {
        let dir = std::env::temp_dir().join(format!("spotq-logs-{}", uuid::Uuid::new_v4()));
        let (task, generation) = (TaskId::only(JobId(1)), Generation(1));
        write(&dir, task, generation, 0, b"x").unwrap();
        let file = path(&dir, task, generation);
        // A hole costs no disk.
        OpenOptions::new().write(true).open(&file).unwrap().set_len(LOG_BYTES_MAX - 3).unwrap();
        assert_eq!(write(&dir, task, generation, LOG_BYTES_MAX - 3, b"12345").unwrap(), LOG_BYTES_MAX + 2);
        assert_eq!(stored(&dir, task, generation), LOG_BYTES_MAX, "cut at the limit");
        let next = write(&dir, task, generation, LOG_BYTES_MAX + 2, b"678").unwrap();
        assert_eq!(next, LOG_BYTES_MAX + 5, "the worker goes on after what it sent");
        assert_eq!(stored(&dir, task, generation), LOG_BYTES_MAX);
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn pieces_may_come_twice_and_a_gap_is_not_taken() {
        let dir = std::env::temp_dir().join(format!("spotq-logs-{}", uuid::Uuid::new_v4()));
        let (task, generation) = (TaskId::only(JobId(1)), Generation(1));
        let bytes = logframe::encode(LogStream::Stdout, 5, b"hello");
        let (head, tail) = bytes.split_at(7);
        assert_eq!(write(&dir, task, generation, 7, tail).unwrap(), 0, "a gap");
        assert_eq!(write(&dir, task, generation, 0, head).unwrap(), 7);
        assert_eq!(write(&dir, task, generation, 0, head).unwrap(), 7, "twice");
        let mut reader = Reader::default();
        let file = path(&dir, task, generation);
        assert_eq!(reader.read(&file).unwrap(), Vec::new(), "half a frame waits");
        assert_eq!(write(&dir, task, generation, 7, tail).unwrap(), bytes.len() as u64);
        assert_eq!(reader.read(&file).unwrap()[0].data, b"hello");
        assert_eq!(stored(&dir, task, generation), bytes.len() as u64);
        std::fs::remove_dir_all(dir).unwrap();
    }
}
