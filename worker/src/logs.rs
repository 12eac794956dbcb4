//! An attempt's log file: what the command wrote, as frames, on the node's own disk.
//!
//! The file is the buffer between the command and the scheduler: a slow or absent scheduler never blocks training.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use spotq_proto::logframe;
use spotq_proto::v1::LogStream;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::Notify;

use crate::ids::now;

/// A log may fill this much of the node's disk; what comes after is dropped, and the log says so.
pub const LOG_BYTES_MAX: u64 = 1 << 30;
/// One read of the command's output.
const READ_BYTES: usize = 16 * 1024;
/// One message to the scheduler: large enough to be cheap, small beside the message limit.
pub const CHUNK_BYTES: usize = 64 * 1024;

/// A handle to append to the log; cheap to clone.
#[derive(Debug, Clone)]
pub struct LogWriter {
    inner: Arc<Mutex<Inner>>,
    grown: Arc<Notify>,
}

#[derive(Debug)]
struct Inner {
    file: File,
    bytes: u64,
    limit: u64,
    full: bool,
}

impl LogWriter {
    /// Opens the log, keeping what an earlier worker wrote. `grown` is told of each write.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn open(path: &Path, limit: u64, grown: Arc<Notify>) -> io::Result<LogWriter> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let bytes = file.metadata()?.len();
        Ok(LogWriter { inner: Arc::new(Mutex::new(Inner { file, bytes, limit, full: false })), grown })
    }

    /// Appends a piece of output. A full disk or a full log drops it: training goes on.
    pub fn write(&self, stream: LogStream, data: &[u8]) {
        if data.is_empty() {
            return;
        }
        let frames = logframe::encode(stream, now().0, data);
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).append(&frames);
        self.grown.notify_one();
    }

    /// A line of our own, for people.
    pub fn note(&self, text: &str) {
        self.write(LogStream::Note, format!("{text}\n").as_bytes());
    }

    /// Copies everything that `from` says until it ends.
    pub async fn pump(self, stream: LogStream, mut from: impl AsyncRead + Unpin) {
        let mut buffer = vec![0_u8; READ_BYTES];
        // An error here means that the other side is gone, as its end does.
        while let Ok(read) = from.read(&mut buffer).await {
            if read == 0 {
                break;
            }
            self.write(stream, &buffer[..read]);
        }
    }
}

impl Inner {
    fn append(&mut self, frames: &[u8]) {
        if self.full {
            return;
        }
        if self.bytes + frames.len() as u64 > self.limit {
            self.full = true;
            let note = format!("log is full at {} bytes; further output is dropped\n", self.limit);
            self.put(&logframe::encode(LogStream::Note, now().0, note.as_bytes()));
        } else {
            self.put(frames);
        }
    }

    fn put(&mut self, bytes: &[u8]) {
        match self.file.write_all(bytes) {
            Ok(()) => self.bytes += bytes.len() as u64,
            Err(error) => {
                // A cut frame would make the rest unreadable: take it back.
                let _ = self.file.set_len(self.bytes);
                tracing::warn!(%error, "cannot write the job's log; is the node's disk full?");
            }
        }
    }
}

/// Reads a log from an offset, for shipping.
#[derive(Debug)]
pub struct LogReader {
    path: PathBuf,
    /// Everything before it is with the scheduler.
    pub acked: u64,
    /// Everything before it was sent on this connection.
    pub sent: u64,
}

impl LogReader {
    #[must_use]
    pub fn new(path: PathBuf) -> LogReader {
        LogReader { path, acked: 0, sent: 0 }
    }

    /// Starts again after the acknowledged part: a new connection.
    pub fn rewind(&mut self) {
        self.sent = self.acked;
    }

    /// What the scheduler says that it has, at the start of a connection: a power cut may have taken some of it back.
    pub fn restart(&mut self, offset: u64) {
        self.acked = offset.min(self.size());
        self.sent = self.acked;
    }

    /// The scheduler has everything before `offset`.
    pub fn ack(&mut self, offset: u64) {
        self.acked = self.acked.max(offset.min(self.size()));
        self.sent = self.sent.max(self.acked);
    }

    /// How many bytes there are.
    #[must_use]
    pub fn size(&self) -> u64 {
        std::fs::metadata(&self.path).map_or(0, |meta| meta.len())
    }

    /// Bytes on the way to the scheduler.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        self.sent - self.acked
    }

    /// The next bytes to send with their offset, if there are any.
    pub fn next_chunk(&mut self) -> Option<(u64, Vec<u8>)> {
        let offset = self.sent;
        if offset >= self.size() {
            return None;
        }
        let mut file = File::open(&self.path).ok()?;
        file.seek(SeekFrom::Start(offset)).ok()?;
        let mut data = Vec::new();
        file.take(CHUNK_BYTES as u64).read_to_end(&mut data).ok()?;
        if data.is_empty() {
            return None;
        }
        self.sent += data.len() as u64;
        Some((offset, data))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(path: &Path) -> Vec<logframe::Frame> {
        let bytes = std::fs::read(path).unwrap();
        let (mut at, mut out) = (0, Vec::new());
        while let Some((frame, used)) = logframe::decode(&bytes[at..]).unwrap() {
            at += used;
            out.push(frame);
        }
        assert_eq!(at, bytes.len());
        out
    }

    #[test]
    fn a_full_log_says_so_once_and_stays_readable() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let log = LogWriter::open(&path, 200, Arc::default()).unwrap();
        for _ in 0..50 {
            log.write(LogStream::Stdout, b"0123456789");
        }
        let frames = frames(&path);
        assert_eq!(frames.iter().filter(|f| f.stream == LogStream::Note).count(), 1);
        assert!(frames.last().unwrap().data.starts_with(b"log is full"));
    }

    #[test]
    fn a_reader_sends_again_from_the_acknowledged_offset() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        std::fs::write(&path, vec![7_u8; CHUNK_BYTES + 10]).unwrap();
        let mut reader = LogReader::new(path);
        let (offset, first) = reader.next_chunk().unwrap();
        assert_eq!((offset, first.len()), (0, CHUNK_BYTES));
        reader.ack(100);
        reader.rewind();
        assert_eq!(reader.next_chunk().unwrap().0, 100);
        reader.ack(u64::MAX);
        assert_eq!((reader.next_chunk(), reader.in_flight()), (None, 0));
    }
}
