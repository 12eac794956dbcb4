//! What is done in each round, drawn from the seed alone: neither time nor the state of the system has a say.

use std::time::Duration;

use spotq_testkit::Rng;

/// The longest wait before a kill, in milliseconds: a few of a job's checkpoints, or its whole way from the queue to
/// the first step.
const MOMENT_MAX_MS: u64 = 1500;
/// The longest time without a scheduler.
const AWAY_MAX_MS: u64 = 1000;
/// A scheduler that is killed again while it starts is killed within this time; a start takes about as long.
const STARTING_MAX_MS: u64 = 200;
/// How often a scheduler is killed again while it starts, in per cent.
const AGAIN_PCT: u64 = 25;

/// Who is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Victim {
    Scheduler,
    Worker,
    Trainer,
}

impl Victim {
    pub(crate) const ALL: [Victim; 3] = [Victim::Scheduler, Victim::Worker, Victim::Trainer];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Victim::Scheduler => "scheduler",
            Victim::Worker => "worker",
            Victim::Trainer => "trainer",
        }
    }
}

/// One kill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Round {
    pub victim: Victim,
    /// From the start of the round to the kill.
    pub moment: Duration,
    /// Which of several processes: this modulo their number.
    pub which: u64,
    /// How long a killed scheduler stays away.
    pub away: Duration,
    /// A scheduler is killed once more, so long after it was started.
    pub again: Option<Duration>,
}

/// The rounds of a seed, from the first on, without end.
pub(crate) fn rounds(seed: u64) -> impl Iterator<Item = Round> {
    let mut rng = Rng::new(seed);
    std::iter::repeat_with(move || {
        let victim = *rng.pick(&Victim::ALL).unwrap_or(&Victim::Scheduler);
        let moment = Duration::from_millis(rng.below(MOMENT_MAX_MS + 1));
        let which = rng.next_u64();
        let away = Duration::from_millis(rng.below(AWAY_MAX_MS + 1));
        let starting = Duration::from_millis(rng.below(STARTING_MAX_MS + 1));
        let again = rng.chance(AGAIN_PCT).then_some(starting);
        Round { victim, moment, which, away, again }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_one_plan_that_kills_everyone() {
        let plan: Vec<Round> = rounds(7).take(200).collect();
        assert_eq!(plan, rounds(7).take(200).collect::<Vec<_>>());
        assert_ne!(plan, rounds(8).take(200).collect::<Vec<_>>());
        for victim in Victim::ALL {
            let count = plan.iter().filter(|round| round.victim == victim).count();
            assert!((40..=95).contains(&count), "{} is killed {count} times in 200", victim.name());
        }
        assert!(plan.iter().any(|round| round.again.is_some()));
        assert!(plan.iter().all(|round| round.moment <= Duration::from_millis(MOMENT_MAX_MS)));
    }
}
