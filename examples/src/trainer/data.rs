//! The text to learn: bytes mapped to the small alphabet that occurs in them.
//!
//! What is learnt depends on these bytes alone, so the built-in text is a file of its own that no change of the
//! documentation touches.

use std::{fs, io::Read, path::Path};

use anyhow::{Context, ensure};

use super::model::CONTEXT;

/// The built-in text.
const CORPUS: &[u8] = include_bytes!("../../data/corpus.txt");

/// A text is held in memory whole; a model this small learns nothing more from a longer one.
const MAX_DATA_BYTES: u64 = 256 * 1024 * 1024;

/// A text over its own alphabet.
#[derive(Debug, Clone)]
pub struct Data {
    /// Each byte of the text as its index in `alphabet`.
    pub symbols: Vec<u8>,
    /// The bytes that occur, ascending.
    pub alphabet: Vec<u8>,
    /// BLAKE3 of the text, so that a checkpoint of another text is told apart.
    pub hash: [u8; 32],
}

impl Data {
    /// Reads `path`, or takes the built-in text.
    ///
    /// # Errors
    /// The file cannot be read, is too long, or too short to hold one example.
    pub fn load(path: Option<&Path>) -> anyhow::Result<Self> {
        let Some(path) = path else {
            return Self::from_bytes(CORPUS);
        };
        let name = path.display();
        let file = fs::File::open(path).with_context(|| format!("cannot open the training text {name}"))?;
        let mut bytes = Vec::new();
        file.take(MAX_DATA_BYTES + 1)
            .read_to_end(&mut bytes)
            .with_context(|| format!("cannot read the training text {name}"))?;
        ensure!(
            bytes.len() as u64 <= MAX_DATA_BYTES,
            "the training text {name} is longer than {} MiB; give a shorter one",
            MAX_DATA_BYTES / (1024 * 1024)
        );
        Self::from_bytes(&bytes).with_context(|| format!("cannot use the training text {name}"))
    }

    /// # Errors
    /// The text is too short to hold one example.
    pub fn from_bytes(bytes: &[u8]) -> anyhow::Result<Self> {
        ensure!(
            bytes.len() > CONTEXT,
            "{} bytes are too few to learn from; at least {} are needed",
            bytes.len(),
            CONTEXT + 1
        );
        let mut index = [None::<u8>; 256];
        for &byte in bytes {
            index[usize::from(byte)] = Some(0);
        }
        let mut alphabet = Vec::new();
        for (byte, slot) in (0..=u8::MAX).zip(index.iter_mut()) {
            if slot.is_some() {
                // At most 256 bytes occur, so their count before this one fits a byte.
                *slot = Some(alphabet.len() as u8);
                alphabet.push(byte);
            }
        }
        let symbols = bytes.iter().filter_map(|&byte| index[usize::from(byte)]).collect();
        Ok(Data { symbols, alphabet, hash: *blake3::hash(bytes).as_bytes() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbols_and_alphabet_give_the_text_back() {
        let text: Vec<u8> = (0..=255).rev().chain(b"some text".iter().copied()).collect();
        let data = Data::from_bytes(&text).unwrap();
        let back: Vec<u8> = data.symbols.iter().map(|&s| data.alphabet[usize::from(s)]).collect();
        assert_eq!(back, text);
        assert_eq!(data.alphabet.len(), 256);
    }

    #[test]
    fn a_text_that_is_too_short_is_refused_with_the_length_needed() {
        let error = Data::from_bytes(&[b'a'; CONTEXT]).unwrap_err();
        assert!(error.to_string().contains("at least 17 are needed"), "{error}");
        assert!(Data::from_bytes(&[b'a'; CONTEXT + 1]).is_ok());
    }

    #[test]
    fn the_built_in_text_is_prose_of_the_promised_size() {
        let data = Data::load(None).unwrap();
        assert!((20_000..60_000).contains(&data.symbols.len()), "{} bytes", data.symbols.len());
        assert!(data.alphabet.len() < 100, "{} symbols", data.alphabet.len());
    }
}
