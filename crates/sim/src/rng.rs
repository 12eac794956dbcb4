//! The one source of chance. Every draw of a run comes from here, in an order that the seed alone fixes.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore as _, SeedableRng as _};

/// Draws of one run.
#[derive(Debug)]
pub struct Rng(ChaCha8Rng);

/// A chance in millionths.
pub type Ppm = u32;

impl Rng {
    #[must_use]
    pub fn new(seed: u64) -> Rng {
        Rng(ChaCha8Rng::seed_from_u64(seed))
    }

    /// A number below `n`; 0 if `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        // The high half of a product: fair enough for faults, and without a division.
        ((u128::from(self.0.next_u64()) * u128::from(n)) >> 64) as u64
    }

    /// A number within `low..=high`.
    pub fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low) + 1)
    }

    pub fn chance(&mut self, ppm: Ppm) -> bool {
        ppm > 0 && self.below(1_000_000) < u64::from(ppm)
    }

    pub fn percent(&mut self, percent: u32) -> bool {
        self.chance(percent * 10_000)
    }

    /// A time until the next of events that come `mean` apart on average, between a tenth and three times of it.
    pub fn gap(&mut self, mean: u64) -> u64 {
        let low = self.within(mean / 10, mean * 3);
        let high = self.within(mean / 10, mean * 3);
        low.min(high).max(1)
    }

    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len() as u64) as usize]
    }
}
