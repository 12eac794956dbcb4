//! The frames of an attempt's log file: what stream, when, how many bytes, then the bytes.
//!
//! Worker and scheduler keep the same file; the worker sends byte ranges, the scheduler writes them at their offset,
//! so a range sent twice is harmless. A frame that was cut by a crash is not shown until its rest arrives.

use crate::v1::LogStream;

/// Stream (1 byte), time in ms (8, little endian), length (4, little endian).
pub const HEADER_BYTES: usize = 13;
/// A longer write is split into several frames.
pub const FRAME_DATA_MAX: usize = 64 * 1024;

/// One piece of output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    pub stream: LogStream,
    pub at_ms: u64,
    pub data: Vec<u8>,
}

/// The bytes of `data` as one or more frames.
#[must_use]
pub fn encode(stream: LogStream, at_ms: u64, data: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(data.len() + HEADER_BYTES);
    for part in data.chunks(FRAME_DATA_MAX) {
        out.push(stream as u8);
        out.extend_from_slice(&at_ms.to_le_bytes());
        out.extend_from_slice(&u32::try_from(part.len()).unwrap_or(0).to_le_bytes());
        out.extend_from_slice(part);
    }
    out
}

/// Takes the first whole frame from `bytes`: the frame and how many bytes it took.
///
/// `Ok(None)` means that more bytes are needed. `Err` means that this is no log file.
pub fn decode(bytes: &[u8]) -> Result<Option<(Frame, usize)>, BadFrame> {
    let Some(header) = bytes.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
    let stream = match header[0] {
        1 => LogStream::Stdout,
        2 => LogStream::Stderr,
        3 => LogStream::Note,
        other => return Err(BadFrame { stream: other }),
    };
    let mut at = [0; 8];
    at.copy_from_slice(&header[1..9]);
    let mut len = [0; 4];
    len.copy_from_slice(&header[9..13]);
    let len = u32::from_le_bytes(len) as usize;
    if len > FRAME_DATA_MAX {
        return Err(BadFrame { stream: header[0] });
    }
    let end = HEADER_BYTES + len;
    let Some(data) = bytes.get(HEADER_BYTES..end) else { return Ok(None) };
    Ok(Some((Frame { stream, at_ms: u64::from_le_bytes(at), data: data.to_vec() }, end)))
}

/// Bytes that cannot be a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a log frame (stream byte {stream})")]
pub struct BadFrame {
    pub stream: u8,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_a_round_trip_and_long_writes_are_split() {
        let data = vec![7_u8; FRAME_DATA_MAX + 10];
        let bytes = encode(LogStream::Stderr, 42, &data);
        let (first, used) = decode(&bytes).unwrap().unwrap();
        let (second, rest) = decode(&bytes[used..]).unwrap().unwrap();
        assert_eq!(first.data.len() + second.data.len(), data.len());
        assert_eq!((second.stream, second.at_ms, used + rest), (LogStream::Stderr, 42, bytes.len()));
    }

    #[test]
    fn a_cut_frame_waits_and_garbage_is_refused() {
        let bytes = encode(LogStream::Stdout, 1, b"hello");
        for cut in 0..bytes.len() {
            assert_eq!(decode(&bytes[..cut]), Ok(None), "cut at {cut}");
        }
        assert!(decode(&[9; 40]).is_err());
        assert!(decode(&[1; 40]).is_err());
    }
}
