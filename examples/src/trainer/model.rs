//! The network: the last characters, embedded, through one hidden layer, to the next character; trained by Adam.
//!
//! Every sum has a fixed order and there are no threads, so the same steps give the same bits, whatever happened
//! between them. Nothing here reads a clock, a file or the environment.

use super::{
    data::Data,
    math::{Rng, axpy, dot, exp, mix, tanh},
};

/// Characters that the network sees.
pub const CONTEXT: usize = 16;
/// Numbers per character.
pub const EMBED: usize = 16;
/// Width of the hidden layer.
pub const HIDDEN: usize = 192;
/// Examples per step; with the sizes above a step takes a few milliseconds.
pub const BATCH: usize = 64;

const INPUT: usize = CONTEXT * EMBED;
const LEARNING_RATE: f32 = 2e-3;
const BETA1: f32 = 0.9;
const BETA2: f32 = 0.999;
const EPSILON: f32 = 1e-8;
/// Any constant will do; it must only never change, or every final model does.
const SEED: u64 = 0x5350_4F54;
/// Words of the extra state that change per step: 4 MiB, about as long to write as the step itself takes.
const BALLAST_WORDS_PER_STEP: usize = 4 * 1024 * 1024 / 8;

/// Everything that a later step depends on, and so everything that a checkpoint holds.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainState {
    /// Steps done.
    pub step: u64,
    pub rng: Rng,
    /// BETA1 and BETA2 to the power of `step`, multiplied up so that no library's `pow` is involved.
    pub decay: [f32; 2],
    pub params: Vec<f32>,
    /// Adam's first and second moments.
    pub first: Vec<f32>,
    pub second: Vec<f32>,
    /// Extra state for benchmarks; it changes with each step.
    pub ballast: Vec<u64>,
}

impl TrainState {
    /// The state before the first step.
    #[must_use]
    pub fn new(vocab: usize, state_mb: u32) -> Self {
        let mut rng = Rng::seeded(SEED);
        let shape = Shape::new(vocab);
        let mut params = vec![0.0; shape.len()];
        let [embed, w1, _, w2, _] = shape.split_mut(&mut params);
        for p in embed {
            *p = rng.symmetric();
        }
        // Uniform within sqrt(3 / inputs) keeps the variance of a layer's input (LeCun's rule); both are exact here.
        let bound = (3.0 / INPUT as f32).sqrt();
        for p in w1 {
            *p = rng.symmetric() * bound;
        }
        let bound = (3.0 / HIDDEN as f32).sqrt();
        for p in w2 {
            *p = rng.symmetric() * bound;
        }
        let ballast = (0..ballast_words(state_mb) as u64).map(|i| mix(SEED ^ i)).collect();
        let zeros = vec![0.0; params.len()];
        TrainState { step: 0, rng, decay: [1.0, 1.0], first: zeros.clone(), second: zeros, params, ballast }
    }

    /// Trains one step and gives its mean loss in nats. The loss is for display: nothing depends on it.
    pub fn train_step(&mut self, data: &Data, work: &mut Workspace) -> f32 {
        let loss = self.gradient(data, work);
        self.adam(&work.grads);
        self.step += 1;
        self.stir_ballast();
        loss
    }

    /// Writes `count` characters, each drawn from the model's own distribution. The state is left as it is.
    #[must_use]
    pub fn sample(&self, data: &Data, count: usize) -> Vec<u8> {
        let mut rng = Rng::seeded(SEED);
        let mut context = data.symbols[..CONTEXT].to_vec();
        let mut work = Workspace::new(data.alphabet.len());
        let mut text = Vec::with_capacity(count);
        for _ in 0..count {
            forward(&self.params, &context, &mut work);
            let mut left = rng.unit();
            let drawn = work.probs.iter().position(|p| {
                left -= p;
                left < 0.0
            });
            // Rounding may leave a rest after the last probability; then the last symbol is meant.
            let symbol = drawn.unwrap_or(data.alphabet.len() - 1);
            text.push(data.alphabet[symbol]);
            context.rotate_left(1);
            context[CONTEXT - 1] = symbol as u8;
        }
        text
    }

    fn gradient(&mut self, data: &Data, work: &mut Workspace) -> f32 {
        work.grads.fill(0.0);
        let starts = (data.symbols.len() - CONTEXT) as u64;
        let mut loss = 0.0;
        for _ in 0..BATCH {
            let start = self.rng.below(starts) as usize;
            let context = &data.symbols[start..start + CONTEXT];
            let target = usize::from(data.symbols[start + CONTEXT]);
            forward(&self.params, context, work);
            loss -= work.probs[target].max(f32::MIN_POSITIVE).ln();
            backward(&self.params, context, target, work);
        }
        loss / BATCH as f32
    }

    fn adam(&mut self, grads: &[f32]) {
        self.decay = [self.decay[0] * BETA1, self.decay[1] * BETA2];
        let correct1 = 1.0 / (1.0 - self.decay[0]);
        let correct2 = 1.0 / (1.0 - self.decay[1]);
        let moments = self.first.iter_mut().zip(self.second.iter_mut());
        for ((p, g), (m, v)) in self.params.iter_mut().zip(grads).zip(moments) {
            let g = g / BATCH as f32;
            *m = BETA1 * *m + (1.0 - BETA1) * g;
            *v = BETA2 * *v + (1.0 - BETA2) * g * g;
            *p -= LEARNING_RATE * (*m * correct1) / ((*v * correct2).sqrt() + EPSILON);
        }
    }

    fn stir_ballast(&mut self) {
        let len = self.ballast.len();
        if len == 0 {
            return;
        }
        let count = BALLAST_WORDS_PER_STEP.min(len);
        // The window moves on by its own length, so that all of the ballast changes every len / count steps.
        let start = (u128::from(self.step) * count as u128 % len as u128) as usize;
        for i in 0..count {
            let word = &mut self.ballast[(start + i) % len];
            *word = mix(*word ^ self.step);
        }
    }
}

/// Scratch memory of a step, kept between steps.
#[derive(Debug, Clone)]
pub struct Workspace {
    grads: Vec<f32>,
    hidden: Vec<f32>,
    hidden_grad: Vec<f32>,
    probs: Vec<f32>,
}

impl Workspace {
    #[must_use]
    pub fn new(vocab: usize) -> Self {
        Workspace {
            grads: vec![0.0; Shape::new(vocab).len()],
            hidden: vec![0.0; HIDDEN],
            hidden_grad: vec![0.0; HIDDEN],
            probs: vec![0.0; vocab],
        }
    }
}

/// Parameters of a network over `vocab` symbols.
#[must_use]
pub fn param_count(vocab: usize) -> usize {
    Shape::new(vocab).len()
}

/// Words of extra state for `--state-mb`.
#[must_use]
pub fn ballast_words(state_mb: u32) -> usize {
    state_mb as usize * (1024 * 1024 / 8)
}

/// Where each layer lies in the flat parameters: embedding, first weights and bias, second weights and bias.
/// Weights are stored input by input, so that the inner loops run over the outputs, which lie side by side.
#[derive(Debug, Clone, Copy)]
struct Shape {
    sizes: [usize; 5],
}

impl Shape {
    fn new(vocab: usize) -> Self {
        Shape { sizes: [vocab * EMBED, INPUT * HIDDEN, HIDDEN, HIDDEN * vocab, vocab] }
    }

    fn len(self) -> usize {
        self.sizes.iter().sum()
    }

    fn split(self, flat: &[f32]) -> [&[f32]; 5] {
        let mut rest = flat;
        self.sizes.map(|n| {
            let (part, tail) = rest.split_at(n);
            rest = tail;
            part
        })
    }

    fn split_mut(self, flat: &mut [f32]) -> [&mut [f32]; 5] {
        let mut rest = flat;
        self.sizes.map(|n| {
            let (part, tail) = std::mem::take(&mut rest).split_at_mut(n);
            rest = tail;
            part
        })
    }
}

fn forward(params: &[f32], context: &[u8], work: &mut Workspace) {
    let vocab = work.probs.len();
    let [embed, w1, b1, w2, b2] = Shape::new(vocab).split(params);
    work.hidden.copy_from_slice(b1);
    for (slot, &symbol) in context.iter().enumerate() {
        let input = row(embed, usize::from(symbol), EMBED);
        for (i, &x) in input.iter().enumerate() {
            axpy(&mut work.hidden, x, row(w1, slot * EMBED + i, HIDDEN));
        }
    }
    for h in &mut work.hidden {
        *h = tanh(*h);
    }
    work.probs.copy_from_slice(b2);
    for (j, &h) in work.hidden.iter().enumerate() {
        axpy(&mut work.probs, h, row(w2, j, vocab));
    }
    let max = work.probs.iter().copied().fold(f32::MIN, f32::max);
    let mut sum = 0.0;
    for p in &mut work.probs {
        *p = exp(*p - max);
        sum += *p;
    }
    for p in &mut work.probs {
        *p /= sum;
    }
}

/// Adds one example's gradient; `work` holds that example's forward pass, and its probabilities are used up.
fn backward(params: &[f32], context: &[u8], target: usize, work: &mut Workspace) {
    let vocab = work.probs.len();
    let shape = Shape::new(vocab);
    let [embed, w1, _, w2, _] = shape.split(params);
    let [g_embed, g_w1, g_b1, g_w2, g_b2] = shape.split_mut(&mut work.grads);
    // The gradient of the loss by the logits is the probabilities, less one at the target.
    work.probs[target] -= 1.0;
    axpy(g_b2, 1.0, &work.probs);
    for (j, &h) in work.hidden.iter().enumerate() {
        axpy(row_mut(g_w2, j, vocab), h, &work.probs);
        work.hidden_grad[j] = dot(row(w2, j, vocab), &work.probs) * (1.0 - h * h);
    }
    axpy(g_b1, 1.0, &work.hidden_grad);
    for (slot, &symbol) in context.iter().enumerate() {
        let symbol = usize::from(symbol);
        for i in 0..EMBED {
            let input = slot * EMBED + i;
            axpy(row_mut(g_w1, input, HIDDEN), embed[symbol * EMBED + i], &work.hidden_grad);
            g_embed[symbol * EMBED + i] += dot(row(w1, input, HIDDEN), &work.hidden_grad);
        }
    }
}

fn row(matrix: &[f32], index: usize, width: usize) -> &[f32] {
    &matrix[index * width..(index + 1) * width]
}

fn row_mut(matrix: &mut [f32], index: usize, width: usize) -> &mut [f32] {
    &mut matrix[index * width..(index + 1) * width]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gradient_is_that_of_the_loss() {
        let data = Data::load(None).unwrap();
        let vocab = data.alphabet.len();
        let state = TrainState::new(vocab, 0);
        let mut work = Workspace::new(vocab);
        state.clone().gradient(&data, &mut work);
        let grads = work.grads.clone();
        // A central difference on some parameters of each layer, found by their offset.
        let sizes = Shape::new(vocab).sizes;
        let mut offset = 0;
        for size in sizes {
            for k in [size / 3, size / 2, size - 1] {
                let at = offset + k;
                let mut loss_at = |delta: f32| {
                    let mut moved = state.clone();
                    moved.params[at] += delta;
                    moved.gradient(&data, &mut work)
                };
                let numeric = (loss_at(0.05) - loss_at(-0.05)) / 0.1;
                let exact = grads[at] / BATCH as f32;
                assert!(
                    (numeric - exact).abs() < 1e-3 + exact.abs() * 0.05,
                    "at {at}: {numeric} against {exact}"
                );
            }
            offset += size;
        }
    }

    #[test]
    fn the_loss_falls_clearly() {
        let data = Data::load(None).unwrap();
        let vocab = data.alphabet.len();
        let (mut state, mut work) = (TrainState::new(vocab, 0), Workspace::new(vocab));
        let losses: Vec<f32> = (0..250).map(|_| state.train_step(&data, &mut work)).collect();
        let mean = |part: &[f32]| part.iter().sum::<f32>() / part.len() as f32;
        let (before, after) = (mean(&losses[..5]), mean(&losses[230..]));
        assert!(before > 3.0, "an untrained model guesses: {before}");
        assert!(after < before - 1.0, "loss {before} fell only to {after}");
    }

    #[test]
    fn the_ballast_changes_with_every_step_and_all_of_it_in_the_end() {
        let data = Data::load(None).unwrap();
        let vocab = data.alphabet.len();
        let (mut state, mut work) = (TrainState::new(vocab, 9), Workspace::new(vocab));
        let first = state.ballast.clone();
        for step in 1..=3 {
            let before = state.ballast.clone();
            state.train_step(&data, &mut work);
            assert_ne!(before, state.ballast, "step {step}");
        }
        assert_eq!(first.iter().zip(&state.ballast).filter(|(a, b)| a == b).count(), 0);
    }

    #[test]
    fn a_sample_is_text_over_the_alphabet_and_leaves_the_state_alone() {
        let data = Data::load(None).unwrap();
        let state = TrainState::new(data.alphabet.len(), 0);
        let before = state.clone();
        let text = state.sample(&data, 50);
        assert_eq!(text.len(), 50);
        assert!(text.iter().all(|b| data.alphabet.contains(b)));
        assert_eq!(before, state);
    }
}
