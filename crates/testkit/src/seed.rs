//! Randomness that can be run again: one seed per test, printed with the command to repeat it when the test fails.

use std::time::{SystemTime, UNIX_EPOCH};

/// Set to a number to run a seeded test again.
const SEED: &str = "SPOTQ_SEED";

/// The seed of one test. Keep it alive to the end of the test: it prints itself when it is dropped in a panic.
#[derive(Debug)]
pub struct Seed {
    value: u64,
    test: String,
}

impl Seed {
    /// From `SPOTQ_SEED`, else a fresh one. Call it on the test's own thread: its name is the test's.
    ///
    /// # Panics
    /// When `SPOTQ_SEED` is not a number: running another seed than was asked for would mislead.
    #[must_use]
    pub fn for_test() -> Seed {
        let test = std::thread::current().name().unwrap_or("main").to_owned();
        let value = match std::env::var(SEED) {
            Ok(text) => text.trim().parse().expect("SPOTQ_SEED must be a number from 0 to 2^64-1"),
            Err(_) => fresh(),
        };
        Seed { value, test }
    }

    /// A given seed, for tests that go through a list of them.
    #[must_use]
    pub fn fixed(value: u64) -> Seed {
        Seed { value, test: std::thread::current().name().unwrap_or("main").to_owned() }
    }

    #[must_use]
    pub fn value(&self) -> u64 {
        self.value
    }

    /// A generator from this seed; each call starts the same sequence again.
    #[must_use]
    pub fn rng(&self) -> Rng {
        Rng::new(self.value)
    }

    /// The command that runs this test with this seed.
    #[must_use]
    pub fn rerun(&self) -> String {
        let package = std::env::var("CARGO_PKG_NAME").map(|p| format!(" -p {p}")).unwrap_or_default();
        format!("{SEED}={} cargo nextest run{package} -E 'test(={})'", self.value, self.test)
    }
}

impl Drop for Seed {
    #[expect(clippy::print_stderr, reason = "a failing test must say how to run it again")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("seed {}; run again with: {}", self.value, self.rerun());
        }
    }
}

/// SplitMix64: small, fast, and the same on every machine and in every version. Not for secrets.
#[derive(Debug, Clone)]
pub struct Rng {
    state: u64,
}

impl Rng {
    #[must_use]
    pub fn new(seed: u64) -> Rng {
        Rng { state: seed }
    }

    pub fn next_u64(&mut self) -> u64 {
        // The constants are those of Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`; 0 when `bound` is 0. The bias of at most `bound` in 2^64 does not matter to tests.
    pub fn below(&mut self, bound: u64) -> u64 {
        let wide = u128::from(self.next_u64()) * u128::from(bound);
        u64::try_from(wide >> 64).expect("a product shifted by 64 bits fits 64 bits")
    }

    /// A number of the half-open range; its start when the range is empty.
    pub fn range(&mut self, range: std::ops::Range<u64>) -> u64 {
        range.start + self.below(range.end.saturating_sub(range.start))
    }

    /// True in `percent` of 100 draws.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// One of the items; `None` of an empty slice.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> Option<&'a T> {
        let index = self.below(items.len() as u64);
        items.get(usize::try_from(index).expect("an index below a length fits usize"))
    }

    /// Reorders the items (Fisher–Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = self.below(last as u64 + 1);
            items.swap(last, usize::try_from(other).expect("an index below a length fits usize"));
        }
    }

    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = Vec::with_capacity(count + 8);
        while bytes.len() < count {
            bytes.extend_from_slice(&self.next_u64().to_le_bytes());
        }
        bytes.truncate(count);
        bytes
    }
}

fn fresh() -> u64 {
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos());
    let low = u64::try_from(nanos & u128::from(u64::MAX)).expect("masked to 64 bits");
    // Tests start within the same clock tick in different processes; the process id tells them apart.
    Rng::new(low ^ (u64::from(std::process::id()) << 32)).next_u64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_of_a_seed_never_changes() {
        let mut rng = Rng::new(0);
        assert_eq!([rng.next_u64(), rng.next_u64()], [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4]);
    }

    #[test]
    fn draws_stay_in_their_range_and_reach_both_ends() {
        let mut rng = Rng::new(7);
        let drawn: std::collections::BTreeSet<u64> = (0..500).map(|_| rng.range(3..6)).collect();
        assert_eq!(drawn.into_iter().collect::<Vec<_>>(), [3, 4, 5]);
        assert_eq!(rng.range(4..4), 4);
        assert_eq!(rng.pick::<u8>(&[]), None);
    }

    #[test]
    fn a_shuffle_keeps_every_item() {
        let mut items: Vec<u32> = (0..50).collect();
        Rng::new(1).shuffle(&mut items);
        assert_ne!(items, (0..50).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..50).collect::<Vec<_>>());
        assert_eq!(Rng::new(3).bytes(13).len(), 13);
    }

    #[test]
    fn a_seed_tells_how_to_run_its_test_again() {
        let seed = Seed::fixed(42);
        let command = seed.rerun();
        assert!(command.starts_with("SPOTQ_SEED=42 cargo nextest run"), "{command}");
        assert!(command.contains("a_seed_tells_how_to_run_its_test_again"), "{command}");
    }

    #[test]
    fn one_seed_makes_one_sequence() {
        let seed = Seed::for_test();
        assert_eq!(seed.rng().bytes(64), seed.rng().bytes(64));
    }
}
