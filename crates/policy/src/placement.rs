//! Placement: may this pool be used, and is it better than that one?

use std::fmt;

use serde::{Deserialize, Serialize};
use spotq_model::{
    Choice, JobSpec, Market, Offer, PlacementPolicy, RefusalKind, Span, Timestamp, UsdPerHour,
};

/// Why a pool is not used for a task.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "why_not")]
pub enum WhyNot {
    OtherAccelerator {
        wanted: String,
    },
    TooFewAccelerators {
        wanted: u32,
        has: u32,
    },
    TooFewCpus {
        wanted: u32,
        has: u32,
    },
    TooLittleMemory {
        wanted_gib: u32,
        has_gib: u32,
    },
    OtherPlace {
        wanted: String,
    },
    OtherInstanceType {
        wanted: String,
    },
    MarketByPolicy {
        policy: String,
    },
    TooExpensive {
        limit: UsdPerHour,
    },
    /// Spot that costs at least on-demand is refused.
    SpotNotWorthIt,
    CoolingDown {
        kind: RefusalKind,
        until: Timestamp,
        message: String,
    },
}

impl fmt::Display for WhyNot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WhyNot::OtherAccelerator { wanted } => write!(f, "has no {wanted}"),
            WhyNot::TooFewAccelerators { wanted, has } => {
                write!(f, "has {has} accelerators, {wanted} wanted")
            }
            WhyNot::TooFewCpus { wanted, has } => write!(f, "has {has} CPUs, {wanted} wanted"),
            WhyNot::TooLittleMemory { wanted_gib, has_gib } => {
                write!(f, "has {has_gib} GiB of memory, {wanted_gib} wanted")
            }
            WhyNot::OtherPlace { wanted } => write!(f, "not in {wanted}"),
            WhyNot::OtherInstanceType { wanted } => write!(f, "not a {wanted}"),
            WhyNot::MarketByPolicy { policy } => write!(f, "not with `policy: {policy}`"),
            WhyNot::TooExpensive { limit } => write!(f, "above `max_hourly_cost` of ${limit:.4}/h"),
            WhyNot::SpotNotWorthIt => f.write_str("spot costs as much as on-demand"),
            WhyNot::CoolingDown { kind, message, .. } => write!(f, "refused lately, {kind}: {message}"),
        }
    }
}

/// Lower is better. The order of the fields is the policy: first the market that the job prefers, then what an hour
/// costs with its expected interruptions, then fewer interruptions. Equal ones go by the name of the pool, so that the
/// same offers always give the same choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Score {
    /// 0 for the preferred market, 1 for the fall-back.
    pub fall_back: u8,
    /// Nano-dollars for an hour of work, the time lost to expected interruptions included.
    pub expected_per_hour: i64,
    pub interruptions_per_hour_ppm: u64,
}

const PPM: i128 = 1_000_000;
const MS_PER_HOUR: i128 = 3_600_000;

/// Scores an offer for a job, or says why it will not do. `restart_overhead` is the time that an interruption costs.
pub fn score(spec: &JobSpec, offer: &Offer, restart_overhead: Span) -> Result<Score, WhyNot> {
    eligible(spec, offer)?;
    let price = i128::from(offer.quote.price.0.0);
    let lost_ms = i128::from(offer.interruptions_per_hour_ppm) * i128::from(restart_overhead.0);
    // Absurd figures must not wrap round to a bargain.
    let expected = price.saturating_add(price.saturating_mul(lost_ms) / (PPM * MS_PER_HOUR));
    let fall_back = match (spec.policy, offer.pool.market) {
        (PlacementPolicy::SpotFirst, Market::OnDemand) => 1,
        (PlacementPolicy::SpotFirst | PlacementPolicy::SpotOnly, Market::Spot)
        | (PlacementPolicy::SpotOnly | PlacementPolicy::OnDemand, Market::OnDemand)
        | (PlacementPolicy::OnDemand, Market::Spot) => 0,
    };
    Ok(Score {
        fall_back,
        expected_per_hour: i64::try_from(expected).unwrap_or(i64::MAX),
        interruptions_per_hour_ppm: offer.interruptions_per_hour_ppm,
    })
}

/// Whether a job may run in this pool at this price.
pub fn eligible(spec: &JobSpec, offer: &Offer) -> Result<(), WhyNot> {
    fits_any(&spec.resources.any_of, offer)?;
    let by_policy = || WhyNot::MarketByPolicy { policy: spec.policy.as_str().into() };
    match (spec.policy, offer.pool.market) {
        (PlacementPolicy::SpotOnly, Market::OnDemand) | (PlacementPolicy::OnDemand, Market::Spot) => {
            return Err(by_policy());
        }
        (PlacementPolicy::SpotFirst, Market::Spot | Market::OnDemand)
        | (PlacementPolicy::SpotOnly, Market::Spot)
        | (PlacementPolicy::OnDemand, Market::OnDemand) => {}
    }
    if offer.pool.market == Market::Spot && offer.quote.price >= offer.quote.on_demand {
        return Err(WhyNot::SpotNotWorthIt);
    }
    match spec.resources.max_hourly {
        Some(limit) if offer.quote.price > limit => Err(WhyNot::TooExpensive { limit }),
        Some(_) | None => Ok(()),
    }
}

/// The first choice that fits wins; if none does, the refusal of the choice that came closest is reported.
fn fits_any(choices: &[Choice], offer: &Offer) -> Result<(), WhyNot> {
    let mut closest: Option<WhyNot> = None;
    for choice in choices {
        match fits(choice, offer) {
            Ok(()) => return Ok(()),
            // The variants are in the order in which they are checked: a later one came further.
            Err(why) => closest = Some(closest.map_or(why.clone(), |known| known.max(why))),
        }
    }
    closest.map_or(Ok(()), Err)
}

fn fits(choice: &Choice, offer: &Offer) -> Result<(), WhyNot> {
    let (pool, shape) = (&offer.pool, &offer.shape);
    if let Some(wanted) = &choice.accelerator {
        if shape.accelerator.as_ref() != Some(wanted) {
            return Err(WhyNot::OtherAccelerator { wanted: wanted.clone() });
        }
        if shape.accelerator_count < choice.accelerator_count {
            let (wanted, has) = (choice.accelerator_count, shape.accelerator_count);
            return Err(WhyNot::TooFewAccelerators { wanted, has });
        }
    }
    if shape.cpus < choice.cpus_min {
        return Err(WhyNot::TooFewCpus { wanted: choice.cpus_min, has: shape.cpus });
    }
    if shape.memory_gib < choice.memory_gib_min {
        return Err(WhyNot::TooLittleMemory { wanted_gib: choice.memory_gib_min, has_gib: shape.memory_gib });
    }
    let elsewhere = |wanted: &str| WhyNot::OtherPlace { wanted: wanted.to_owned() };
    if choice.cloud.is_some_and(|cloud| cloud != pool.cloud) {
        return Err(elsewhere(choice.cloud.map_or("", |cloud| cloud.as_str())));
    }
    if let Some(region) = choice.region.as_ref().filter(|region| **region != pool.region) {
        return Err(elsewhere(region));
    }
    if let Some(zone) = choice.zone.as_ref().filter(|zone| **zone != pool.zone) {
        return Err(elsewhere(zone));
    }
    match choice.instance_type.as_ref().filter(|wanted| **wanted != pool.instance_type) {
        Some(wanted) => Err(WhyNot::OtherInstanceType { wanted: wanted.clone() }),
        None => Ok(()),
    }
}
