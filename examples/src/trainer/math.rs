//! Numbers that come out the same everywhere: a generator of our own and functions built from add, multiply and divide.
//!
//! IEEE 754 fixes those operations to the last bit; the mathematical library of a platform is free in its last bits,
//! so nothing that reaches the model may call it.

/// xoshiro256++ (Blackman and Vigna), seeded by splitmix64. Our own so that no release of a library shifts the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rng {
    state: [u64; 4],
}

impl Rng {
    #[must_use]
    pub fn seeded(mut seed: u64) -> Self {
        let state = std::array::from_fn(|_| {
            seed = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
            mix(seed)
        });
        Rng { state }
    }

    /// Continues from a state that [`Rng::state`] gave.
    #[must_use]
    pub fn from_state(state: [u64; 4]) -> Self {
        Rng { state }
    }

    #[must_use]
    pub fn state(&self) -> [u64; 4] {
        self.state
    }

    pub fn next_u64(&mut self) -> u64 {
        let s = &mut self.state;
        let result = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// A number below `bound`, by the high half of a product; its bias is below 2⁻³² for the sizes used here.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// A number in [-1, 1) with 24 random bits, all that an f32 holds.
    pub fn symmetric(&mut self) -> f32 {
        self.unit() * 2.0 - 1.0
    }

    /// A number in [0, 1).
    pub fn unit(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / 16_777_216.0
    }
}

/// The finaliser of splitmix64: every bit of the input reaches every bit of the output.
#[must_use]
pub fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// e to the x, within 2 units of the last place or so; 0 below -87 and clamped above 88, where f32 ends.
#[must_use]
pub fn exp(x: f32) -> f32 {
    /// Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, with no call to a library.
    const ROUND: f32 = 12_582_912.0;
    /// ln 2 in two parts, so that the product with a small integer stays exact (Cody and Waite).
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    if x < -87.0 {
        return 0.0;
    }
    let x = x.min(88.0);
    let n = (x * std::f32::consts::LOG2_E + ROUND) - ROUND;
    let r = (x - n * LN2_HI) - n * LN2_LO;
    // The Taylor series to r^6: |r| <= ln 2 / 2, where the next term is below an f32's precision.
    let p = 1.0 / 720.0;
    let p = p * r + 1.0 / 120.0;
    let p = p * r + 1.0 / 24.0;
    let p = p * r + 1.0 / 6.0;
    let p = p * r + 0.5;
    let p = p * r + 1.0;
    let p = p * r + 1.0;
    // n is in [-126, 127] here, so the biased exponent is that of a normal number.
    p * f32::from_bits(((n as i32 + 127) as u32) << 23)
}

/// The hyperbolic tangent, from [`exp`].
#[must_use]
pub fn tanh(x: f32) -> f32 {
    // Beyond 9 the result is 1 to the last bit.
    let x = x.clamp(-9.0, 9.0);
    1.0 - 2.0 / (exp(2.0 * x) + 1.0)
}

/// `out += scale * row`; each element is a sum of its own, so the compiler may use vectors without changing a bit.
pub fn axpy(out: &mut [f32], scale: f32, row: &[f32]) {
    for (o, r) in out.iter_mut().zip(row) {
        *o += scale * r;
    }
}

/// The inner product, always summed in the same eight lanes and the same order.
#[must_use]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 8];
    let (a_chunks, a_rest) = a.as_chunks::<8>();
    let (b_chunks, b_rest) = b.as_chunks::<8>();
    for (x, y) in a_chunks.iter().zip(b_chunks) {
        for ((lane, x), y) in lanes.iter_mut().zip(x).zip(y) {
            *lane += x * y;
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(x, y)| x * y).sum();
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + b) + (c + d)) + ((e + f) + (g + h)) + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_and_tanh_agree_with_the_library_within_a_few_parts_in_a_million() {
        for i in -8_600..8_700 {
            let x = i as f32 / 100.0;
            let want = f64::from(x).exp();
            let got = f64::from(exp(x));
            assert!(((got - want) / want).abs() < 2e-6, "exp({x}) = {got}, want {want}");
            let want = f64::from(x).tanh();
            let got = f64::from(tanh(x));
            assert!((got - want).abs() < 2e-6, "tanh({x}) = {got}, want {want}");
        }
        assert_eq!(exp(-1000.0), 0.0);
        assert!(exp(1000.0).is_finite());
    }

    #[test]
    fn the_generator_is_the_published_one() {
        // First outputs of xoshiro256++ for the state 1, 2, 3, 4, as in the authors' reference code.
        let mut rng = Rng::from_state([1, 2, 3, 4]);
        let got: Vec<u64> = (0..4).map(|_| rng.next_u64()).collect();
        assert_eq!(got, [41_943_041, 58_720_359, 3_588_806_011_781_223, 3_591_011_842_654_386]);
    }

    #[test]
    fn dot_takes_every_element_once() {
        for n in 0..40u32 {
            let a: Vec<f32> = (0..n).map(|i| i as f32).collect();
            let want: u32 = (0..n).map(|i| i * i).sum();
            assert_eq!(dot(&a, &a), want as f32, "length {n}");
        }
    }
}
