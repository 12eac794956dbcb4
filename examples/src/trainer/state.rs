//! The bytes of a checkpoint and of the final model.
//!
//! A checkpoint is read back only if it is whole, sound and of this very run; a guess at a damaged one would
//! give a different model. This module must never touch a file by itself.

use std::io::{self, Read, Write};

use thiserror::Error;

use super::{
    data::Data,
    math::Rng,
    model::{CONTEXT, EMBED, HIDDEN, TrainState, ballast_words, param_count},
};

const CHECKPOINT_MAGIC: &[u8; 8] = b"SPOTQCKP";
const MODEL_MAGIC: &[u8; 8] = b"SPOTQMDL";
const VERSION: u32 = 1;
const HASH_BYTES: usize = 32;
/// Numbers are converted this many at a time: enough to make hashing and writing cheap, and little memory.
const NUMBERS_PER_BLOCK: usize = 16 * 1024;

/// Why a checkpoint was not taken; in each case the next older one is tried.
#[derive(Debug, Error)]
pub enum StateError {
    #[error("it cannot be read: {0}")]
    Unreadable(#[from] io::Error),
    #[error("it is incomplete or damaged: {0}")]
    Damaged(&'static str),
    #[error("it belongs to another run: {0}")]
    OtherRun(&'static str),
}

/// Writes a checkpoint, its checksum last.
///
/// # Errors
/// Those of `out`.
pub fn write_checkpoint<W: Write>(state: &TrainState, data: &Data, out: W) -> io::Result<()> {
    let mut out = HashWriter::new(out);
    out.write_all(CHECKPOINT_MAGIC)?;
    out.write_all(&VERSION.to_le_bytes())?;
    out.write_all(&data.hash)?;
    out.write_all(&(state.params.len() as u64).to_le_bytes())?;
    out.write_all(&(state.ballast.len() as u64).to_le_bytes())?;
    out.write_all(&state.step.to_le_bytes())?;
    write_numbers(&mut out, &state.rng.state(), u64::to_le_bytes)?;
    write_numbers(&mut out, &state.decay, f32::to_le_bytes)?;
    for numbers in [&state.params, &state.first, &state.second] {
        write_numbers(&mut out, numbers, f32::to_le_bytes)?;
    }
    write_numbers(&mut out, &state.ballast, u64::to_le_bytes)?;
    out.finish()
}

/// Reads what [`write_checkpoint`] wrote, if it is whole and fits `data` and `state_mb`.
///
/// # Errors
/// [`StateError`], by reason. Memory use is bounded by the expected size, whatever the input says.
pub fn read_checkpoint<R: Read>(input: R, data: &Data, state_mb: u32) -> Result<TrainState, StateError> {
    let mut input = HashReader::new(input);
    if &input.array::<8>()? != CHECKPOINT_MAGIC {
        return Err(StateError::Damaged("it does not start like a checkpoint"));
    }
    if input.array()? != VERSION.to_le_bytes() {
        return Err(StateError::OtherRun("its format has another version"));
    }
    if input.array()? != data.hash {
        return Err(StateError::OtherRun("it was trained on another text"));
    }
    let (params, ballast) = (param_count(data.alphabet.len()), ballast_words(state_mb));
    if input.array()? != (params as u64).to_le_bytes() {
        return Err(StateError::OtherRun("its network has another size"));
    }
    if input.array()? != (ballast as u64).to_le_bytes() {
        return Err(StateError::OtherRun("--state-mb differs"));
    }
    let step = u64::from_le_bytes(input.array()?);
    let mut rng = [0; 4];
    for word in &mut rng {
        *word = u64::from_le_bytes(input.array()?);
    }
    let decay = [f32::from_le_bytes(input.array()?), f32::from_le_bytes(input.array()?)];
    let state = TrainState {
        step,
        rng: Rng::from_state(rng),
        decay,
        params: input.numbers(params, f32::from_le_bytes)?,
        first: input.numbers(params, f32::from_le_bytes)?,
        second: input.numbers(params, f32::from_le_bytes)?,
        ballast: input.numbers(ballast, u64::from_le_bytes)?,
    };
    input.finish()?;
    Ok(state)
}

/// Writes the final model: what it takes to use it, and the hash of the extra state so that a wrong restore of that shows.
///
/// # Errors
/// Those of `out`.
pub fn write_model<W: Write>(state: &TrainState, data: &Data, out: W) -> io::Result<()> {
    let mut ballast = HashWriter::new(io::sink());
    write_numbers(&mut ballast, &state.ballast, u64::to_le_bytes)?;
    let mut out = HashWriter::new(out);
    out.write_all(MODEL_MAGIC)?;
    out.write_all(&VERSION.to_le_bytes())?;
    out.write_all(&state.step.to_le_bytes())?;
    for size in [CONTEXT, EMBED, HIDDEN, data.alphabet.len()] {
        out.write_all(&(size as u64).to_le_bytes())?;
    }
    out.write_all(&data.alphabet)?;
    write_numbers(&mut out, &state.params, f32::to_le_bytes)?;
    out.write_all(ballast.hasher.finalize().as_bytes())?;
    out.finish()
}

fn write_numbers<T: Copy, const N: usize>(
    out: &mut impl Write,
    numbers: &[T],
    bytes: fn(T) -> [u8; N],
) -> io::Result<()> {
    let mut block = Vec::with_capacity(NUMBERS_PER_BLOCK.min(numbers.len()) * N);
    for part in numbers.chunks(NUMBERS_PER_BLOCK) {
        block.clear();
        for &number in part {
            block.extend_from_slice(&bytes(number));
        }
        out.write_all(&block)?;
    }
    Ok(())
}

struct HashWriter<W> {
    out: W,
    hasher: blake3::Hasher,
}

impl<W: Write> HashWriter<W> {
    fn new(out: W) -> Self {
        HashWriter { out, hasher: blake3::Hasher::new() }
    }

    fn finish(mut self) -> io::Result<()> {
        self.out.write_all(self.hasher.finalize().as_bytes())?;
        self.out.flush()
    }
}

impl<W: Write> Write for HashWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.out.write(bytes)?;
        self.hasher.update(&bytes[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

struct HashReader<R> {
    input: R,
    hasher: blake3::Hasher,
}

impl<R: Read> HashReader<R> {
    fn new(input: R) -> Self {
        HashReader { input, hasher: blake3::Hasher::new() }
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), StateError> {
        read_whole(&mut self.input, bytes)?;
        self.hasher.update(bytes);
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], StateError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn numbers<T, const N: usize>(
        &mut self,
        count: usize,
        number: fn([u8; N]) -> T,
    ) -> Result<Vec<T>, StateError> {
        let mut numbers = Vec::with_capacity(count);
        let mut block = vec![0; NUMBERS_PER_BLOCK.min(count) * N];
        while numbers.len() < count {
            let bytes = &mut block[..NUMBERS_PER_BLOCK.min(count - numbers.len()) * N];
            self.fill(bytes)?;
            numbers.extend(bytes.as_chunks::<N>().0.iter().map(|&bytes| number(bytes)));
        }
        Ok(numbers)
    }

    fn finish(mut self) -> Result<(), StateError> {
        let mut stored = [0; HASH_BYTES];
        read_whole(&mut self.input, &mut stored)?;
        if stored != *self.hasher.finalize().as_bytes() {
            return Err(StateError::Damaged("its checksum is wrong"));
        }
        if self.input.read(&mut [0])? != 0 {
            return Err(StateError::Damaged("something follows its end"));
        }
        Ok(())
    }
}

fn read_whole(input: &mut impl Read, bytes: &mut [u8]) -> Result<(), StateError> {
    input.read_exact(bytes).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => StateError::Damaged("it ends too early"),
        _ => StateError::Unreadable(error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trainer::model::Workspace;

    fn trained(data: &Data, state_mb: u32, steps: u64) -> TrainState {
        let mut state = TrainState::new(data.alphabet.len(), state_mb);
        let mut work = Workspace::new(data.alphabet.len());
        for _ in 0..steps {
            state.train_step(data, &mut work);
        }
        state
    }

    fn checkpoint(state: &TrainState, data: &Data) -> Vec<u8> {
        let mut bytes = Vec::new();
        write_checkpoint(state, data, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn a_run_through_checkpoints_ends_in_the_same_bytes_for_every_distance_between_them() {
        let data = Data::load(None).unwrap();
        let straight = trained(&data, 1, 24);
        for every in [1, 2, 3, 5, 7, 23] {
            let mut state = TrainState::new(data.alphabet.len(), 1);
            let mut work = Workspace::new(data.alphabet.len());
            while state.step < 24 {
                state.train_step(&data, &mut work);
                if state.step.is_multiple_of(every) {
                    state = read_checkpoint(&*checkpoint(&state, &data), &data, 1).unwrap();
                    work = Workspace::new(data.alphabet.len());
                }
            }
            let (mut a, mut b) = (Vec::new(), Vec::new());
            write_model(&straight, &data, &mut a).unwrap();
            write_model(&state, &data, &mut b).unwrap();
            assert!(a == b, "a checkpoint every {every} steps changes the model");
            assert!(checkpoint(&straight, &data) == checkpoint(&state, &data), "or its state");
        }
    }

    #[test]
    fn the_model_is_the_same_on_every_machine_and_in_every_build() {
        // A change of this hash changes every final model: do it on purpose, and say so in the change log.
        let data = Data::from_bytes(b"a fixed text, so that the built-in one may change").unwrap();
        let mut model = Vec::new();
        write_model(&trained(&data, 1, 20), &data, &mut model).unwrap();
        assert_eq!(
            blake3::hash(&model).to_hex().as_str(),
            "b52a88571c1f30b9ada1f474a146c3e5a45d43f72d9eb88470187481eccc1ebb"
        );
    }

    #[test]
    fn a_checkpoint_cut_anywhere_or_with_any_bit_flipped_is_refused() {
        let data = Data::from_bytes(b"a text of a few symbols").unwrap();
        let bytes = checkpoint(&trained(&data, 0, 2), &data);
        let cuts = (0..200).chain((200..bytes.len()).step_by(997));
        for cut in cuts.chain([bytes.len() - 1]) {
            let error = read_checkpoint(&bytes[..cut], &data, 0).unwrap_err();
            assert!(matches!(error, StateError::Damaged(_)), "cut at {cut}: {error}");
        }
        for at in (0..200).chain((200..bytes.len()).step_by(997)) {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << (at % 8);
            assert!(read_checkpoint(&*flipped, &data, 0).is_err(), "flipped at {at}");
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(read_checkpoint(&*longer, &data, 0).is_err());
        assert!(read_checkpoint(&*bytes, &data, 0).is_ok());
    }

    #[test]
    fn a_checkpoint_of_another_run_is_told_apart() {
        let data = Data::from_bytes(b"a text of a few symbols").unwrap();
        let bytes = checkpoint(&trained(&data, 0, 1), &data);
        let other = Data::from_bytes(b"a text of few a symbols").unwrap();
        for (data, state_mb) in [(&other, 0), (&data, 1)] {
            let error = read_checkpoint(&*bytes, data, state_mb).unwrap_err();
            assert!(matches!(error, StateError::OtherRun(_)), "{error}");
        }
    }

    #[test]
    fn extra_state_reaches_the_model_as_a_hash() {
        let data = Data::load(None).unwrap();
        let mut state = trained(&data, 1, 1);
        let (mut before, mut after) = (Vec::new(), Vec::new());
        write_model(&state, &data, &mut before).unwrap();
        state.ballast[77] ^= 1;
        write_model(&state, &data, &mut after).unwrap();
        assert!(before != after);
        assert_eq!(before.len(), after.len());
    }
}
