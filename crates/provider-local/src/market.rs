//! The simulated market: a pure function of (seed, pool, time since the market opened).
//!
//! Prices move smoothly within a band below on-demand, pools sell out for windows of time in the way of their
//! cloud, and each spot node has a lifetime drawn from its number. Asking twice gives the same answer. This
//! module reads no clock and keeps no state.

use serde::{Deserialize, Serialize};
use spotq_model::{
    Cloud, Market as Tenure, NodeId, Offer, Pool, Quote, Refusal, RefusalKind, Scope, Span, Timestamp,
    UsdPerHour,
};

use crate::MarketConfig;
use crate::catalog::{REGIONS, Region, SpotBand, TYPES, Type};

/// Source of every quote.
pub const SOURCE: &str = "local-market";

/// The market of one seed.
#[derive(Debug, Clone)]
pub struct Market {
    seed: u64,
    config: MarketConfig,
}

/// What the market does to a spot node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fate {
    /// From the end of its boot to the moment that it is taken away.
    pub lifetime: Span,
    /// How long before that moment the node is told.
    pub notice: Span,
}

impl Market {
    #[must_use]
    pub fn new(seed: u64, config: MarketConfig) -> Self {
        Market { seed, config }
    }

    /// Every pool at its price of `age` after the market opened at `epoch`.
    #[must_use]
    pub fn offers(&self, epoch: Timestamp, age: Span) -> Vec<Offer> {
        let mut offers = Vec::new();
        for region in &REGIONS {
            for zone in region.zones {
                for kind in TYPES.iter().filter(|t| t.cloud == region.cloud) {
                    for market in [Tenure::Spot, Tenure::OnDemand] {
                        let pool = Pool {
                            cloud: region.cloud,
                            region: region.name.into(),
                            zone: zone.into(),
                            instance_type: kind.name.into(),
                            market,
                        };
                        offers.push(self.offer(pool, (region, kind), epoch, age));
                    }
                }
            }
        }
        offers
    }

    /// The price of one pool, or `None` if nobody sells it.
    #[must_use]
    pub fn quote(&self, pool: &Pool, epoch: Timestamp, age: Span) -> Option<Quote> {
        let (region, kind) = find(pool)?;
        let on_demand = kind.on_demand(region);
        let step = self.config.price_step_s * 1000;
        let tick = age.0 / step;
        let (price, as_of) = match pool.market {
            Tenure::Spot => (self.spot_price(pool, on_demand, kind.spot, tick), epoch + Span(tick * step)),
            Tenure::OnDemand => (on_demand, epoch),
        };
        Some(Quote { price, on_demand, source: SOURCE.into(), as_of })
    }

    /// The market's "no" to a launch at this moment, if it is one.
    #[must_use]
    pub fn refusal(&self, pool: &Pool, age: Span) -> Option<Refusal> {
        let window = age.0 / (self.config.capacity_window_s * 1000);
        let pct = match pool.market {
            Tenure::Spot => self.config.capacity_errors_spot_pct,
            Tenure::OnDemand => self.config.capacity_errors_on_demand_pct,
        };
        let share = f64::from(pct) / 100.0;
        // Of all refusals one in ten is a quota of the region and, in GCP, three in ten are a whole zone.
        let region = format!("{}/{}/{}", pool.cloud, pool.region, pool.market);
        if self.unit("quota", &region, window) < share * 0.1 {
            return Some(self.quota_refusal(pool));
        }
        let zone_share = if pool.cloud == Cloud::Gcp { 0.3 } else { 0.0 };
        let zone = format!("{}/{}/{}", pool.cloud, pool.zone, pool.market);
        if self.unit("zone", &zone, window) < share * zone_share {
            return Some(self.stockout(pool));
        }
        let sold_out = self.unit("capacity", &pool.to_string(), window) < share * (0.9 - zone_share);
        sold_out.then(|| self.capacity_refusal(pool))
    }

    /// What the market does to this node; `None` for on-demand nodes and where nothing is ever preempted.
    #[must_use]
    pub fn fate(&self, node: NodeId, pool: &Pool) -> Option<Fate> {
        let mean = self.mean_lifetime_s(pool)?;
        let draw = self.unit("lifetime", &node.to_string(), 0);
        // The inverse of the exponential distribution; 1 - draw is never 0.
        let lifetime = Span((-(1.0 - draw).ln() * mean * 1000.0) as u64);
        Some(Fate { lifetime, notice: self.notice(node, pool.cloud) })
    }

    fn offer(&self, pool: Pool, (region, kind): (&Region, &Type), epoch: Timestamp, age: Span) -> Offer {
        let on_demand = kind.on_demand(region);
        let quote = self.quote(&pool, epoch, age).unwrap_or(Quote {
            price: on_demand,
            on_demand,
            source: SOURCE.into(),
            as_of: epoch,
        });
        let per_hour = self.mean_lifetime_s(&pool).map_or(0.0, |mean| 3600.0 / mean);
        Offer { shape: kind.shape(), quote, interruptions_per_hour_ppm: (per_hour * 1e6) as u64, pool }
    }

    /// Two octaves of smooth noise stretched over the band: a slow swing of an hour and a quick one of ten minutes.
    fn spot_price(&self, pool: &Pool, on_demand: UsdPerHour, band: SpotBand, tick: u64) -> UsdPerHour {
        let seconds = (tick * self.config.price_step_s) as f64;
        let name = pool.to_string();
        let level = 0.65 * self.noise("price-slow", &name, seconds / 3600.0)
            + 0.35 * self.noise("price-quick", &name, seconds / 600.0);
        let (low, high) = (f64::from(band.low_pct) / 100.0, f64::from(band.high_pct) / 100.0);
        let nanos = on_demand.0.0 as f64 * (low + (high - low) * level);
        // Clouds quote spot prices in hundredths of a cent.
        UsdPerHour::nanos((nanos / 100_000.0).round() as i64 * 100_000)
    }

    fn noise(&self, what: &str, name: &str, at: f64) -> f64 {
        let cell = at.floor();
        let x = at - cell;
        let ease = x * x * (3.0 - 2.0 * x);
        let (a, b) = (self.unit(what, name, cell as u64), self.unit(what, name, cell as u64 + 1));
        a + (b - a) * ease
    }

    fn mean_lifetime_s(&self, pool: &Pool) -> Option<f64> {
        let spot = pool.market == Tenure::Spot && self.config.mean_lifetime_s > 0;
        let factor = 2.0_f64.powf(2.0 * self.unit("hazard", &pool.to_string(), 0) - 1.0);
        spot.then_some(self.config.mean_lifetime_s as f64 * factor)
    }

    fn notice(&self, node: NodeId, cloud: Cloud) -> Span {
        if let Some(ms) = self.config.notice_ms {
            return Span(ms);
        }
        let draw = self.unit("notice", &node.to_string(), 0) * 100.0;
        let none = f64::from(self.config.no_notice_pct);
        if draw < none {
            Span::ZERO
        } else if draw < none + f64::from(self.config.short_notice_pct) {
            Span::secs(10)
        } else {
            match cloud {
                Cloud::Aws => Span::secs(120),
                Cloud::Gcp | Cloud::Azure => Span::secs(30),
            }
        }
    }

    fn cool_down(&self, seconds: u64) -> Span {
        Span::secs(seconds.min(self.config.max_cool_down_s))
    }

    /// Karpenter leaves a pool alone for 3 minutes on AWS and for an hour on Azure.
    fn capacity_refusal(&self, pool: &Pool) -> Refusal {
        let (cool_down, message) = match (pool.cloud, pool.market) {
            (Cloud::Aws, _) => (
                180,
                format!(
                    "InsufficientInstanceCapacity: We currently do not have sufficient {} capacity in the \
                     Availability Zone you requested ({}).",
                    pool.instance_type, pool.zone
                ),
            ),
            (Cloud::Gcp, _) => (
                180,
                format!(
                    "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS: The zone '{}' does not have enough resources \
                     available to fulfill the request, '(resource type:compute)'.",
                    pool.zone
                ),
            ),
            (Cloud::Azure, Tenure::Spot) => (
                3600,
                format!(
                    "SkuNotAvailable: The requested VM size {} is currently not available in location {}.",
                    pool.instance_type, pool.region
                ),
            ),
            (Cloud::Azure, Tenure::OnDemand) => (
                3600,
                format!(
                    "ZonalAllocationFailed: Allocation failed. We do not have sufficient capacity for the \
                     requested VM size in zone {}.",
                    pool.zone
                ),
            ),
        };
        Refusal {
            kind: RefusalKind::InsufficientCapacity,
            scope: Scope::Pool { pool: pool.clone() },
            cool_down: self.cool_down(cool_down),
            message,
        }
    }

    fn stockout(&self, pool: &Pool) -> Refusal {
        Refusal {
            kind: RefusalKind::InsufficientCapacity,
            scope: Scope::Zone { cloud: pool.cloud, zone: pool.zone.clone() },
            cool_down: self.cool_down(180),
            message: format!("ZONE_RESOURCE_POOL_EXHAUSTED: The zone '{}' has no capacity left.", pool.zone),
        }
    }

    fn quota_refusal(&self, pool: &Pool) -> Refusal {
        let message = match (pool.cloud, pool.market) {
            (Cloud::Aws, Tenure::Spot) => {
                "MaxSpotInstanceCountExceeded: Max spot instance count exceeded".into()
            }
            (Cloud::Aws, Tenure::OnDemand) => {
                "VcpuLimitExceeded: You have requested more vCPU capacity than your current limit".into()
            }
            (Cloud::Gcp, _) => format!("QUOTA_EXCEEDED: Quota 'CPUS' exceeded in region {}.", pool.region),
            (Cloud::Azure, Tenure::Spot) => format!(
                "OperationNotAllowed: Operation could not be completed as it results in exceeding approved \
                 LowPriorityCores quota. Location: {}",
                pool.region
            ),
            (Cloud::Azure, Tenure::OnDemand) => format!(
                "OperationNotAllowed: Operation could not be completed as it results in exceeding approved \
                 Total Regional Cores quota. Location: {}",
                pool.region
            ),
        };
        Refusal {
            kind: RefusalKind::QuotaExceeded,
            scope: Scope::RegionMarket {
                cloud: pool.cloud,
                region: pool.region.clone(),
                market: pool.market,
            },
            cool_down: self.cool_down(600),
            message,
        }
    }

    /// A number in [0, 1) that depends on nothing but its arguments and the seed.
    fn unit(&self, what: &str, name: &str, index: u64) -> f64 {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.seed.to_le_bytes());
        hasher.update(&index.to_le_bytes());
        hasher.update(what.as_bytes());
        hasher.update(&[0]);
        hasher.update(name.as_bytes());
        let mut first = [0; 8];
        first.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
        // 53 bits are what a double holds exactly.
        (u64::from_le_bytes(first) >> 11) as f64 / (1_u64 << 53) as f64
    }
}

fn find(pool: &Pool) -> Option<(&'static Region, &'static Type)> {
    let region = REGIONS
        .iter()
        .find(|r| r.cloud == pool.cloud && r.name == pool.region && r.zones.contains(&pool.zone.as_str()))?;
    let kind = TYPES.iter().find(|t| t.cloud == pool.cloud && t.name == pool.instance_type)?;
    Some((region, kind))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const EPOCH: Timestamp = Timestamp(1_700_000_000_000);

    fn spot_pool(name: &str) -> Pool {
        name.parse().unwrap()
    }

    #[test]
    fn every_pool_is_offered_once_and_each_cloud_has_two_regions_of_two_zones() {
        let offers = Market::new(1, MarketConfig::default()).offers(EPOCH, Span::ZERO);
        let mut pools: Vec<_> = offers.iter().map(|o| o.pool.clone()).collect();
        assert_eq!(pools.len(), 4 * TYPES.len() * 2);
        pools.sort();
        pools.dedup();
        assert_eq!(pools.len(), offers.len());
        for wanted in [(None, 0), (Some("T4"), 1), (Some("A100-80GB"), 8), (Some("H100"), 8)] {
            for cloud in Cloud::ALL {
                let sold = offers.iter().any(|o| {
                    o.pool.cloud == cloud
                        && (o.shape.accelerator.as_deref(), o.shape.accelerator_count) == wanted
                });
                assert!(sold, "{cloud} sells {wanted:?}");
            }
        }
    }

    #[test]
    fn lifetimes_have_the_mean_of_their_pool() {
        let market = Market::new(5, MarketConfig::default());
        let pool = spot_pool("aws/us-east-1/us-east-1a/c7i.xlarge/spot");
        let lives: Vec<f64> =
            (0..4000).map(|n| market.fate(NodeId(n), &pool).unwrap().lifetime.as_secs_f64()).collect();
        let mean = lives.iter().sum::<f64>() / lives.len() as f64;
        let expected = market.mean_lifetime_s(&pool).unwrap();
        assert!((mean / expected - 1.0).abs() < 0.06, "mean {mean}, expected {expected}");
    }

    #[test]
    fn notices_are_those_of_the_cloud_with_some_short_and_some_absent() {
        let market = Market::new(5, MarketConfig::default());
        for (name, own) in [
            ("aws/us-east-1/us-east-1a/c7i.xlarge/spot", 120),
            ("gcp/us-east4/us-east4-a/n2-standard-4/spot", 30),
            ("azure/eastus/eastus-1/Standard_D4s_v5/spot", 30),
        ] {
            let mut count = std::collections::BTreeMap::new();
            for n in 0..1000 {
                *count.entry(market.fate(NodeId(n), &spot_pool(name)).unwrap().notice).or_insert(0) += 1;
            }
            assert_eq!(
                count.keys().copied().collect::<Vec<_>>(),
                [Span::ZERO, Span::secs(10), Span::secs(own)]
            );
            assert!((150..250).contains(&count[&Span::ZERO]), "{count:?}");
            assert!((150..250).contains(&count[&Span::secs(10)]), "{count:?}");
        }
    }

    #[test]
    fn nothing_is_preempted_where_the_mean_is_zero_or_the_node_is_on_demand() {
        let never = Market::new(1, MarketConfig { mean_lifetime_s: 0, ..MarketConfig::default() });
        let pool = spot_pool("aws/us-east-1/us-east-1a/c7i.xlarge/spot");
        assert_eq!(never.fate(NodeId(1), &pool), None);
        let on_demand = Pool { market: Tenure::OnDemand, ..pool };
        assert_eq!(Market::new(1, MarketConfig::default()).fate(NodeId(1), &on_demand), None);
    }

    #[test]
    fn the_share_of_refusals_is_the_configured_one_and_each_covers_its_pool() {
        let market = Market::new(3, MarketConfig::default());
        for cloud in Cloud::ALL {
            let pools: Vec<_> = market
                .offers(EPOCH, Span::ZERO)
                .into_iter()
                .map(|o| o.pool)
                .filter(|p| p.cloud == cloud && p.market == Tenure::Spot)
                .collect();
            let (mut refused, mut asked) = (0, 0);
            for pool in &pools {
                for window in 0..400 {
                    asked += 1;
                    if let Some(refusal) = market.refusal(pool, Span::secs(120 * window)) {
                        refused += 1;
                        assert!(refusal.scope.covers(pool), "{refusal:?}");
                        assert!(refusal.cool_down <= Span::secs(60));
                    }
                }
            }
            let share = f64::from(refused) / f64::from(asked);
            assert!((0.05..0.11).contains(&share), "{cloud}: {share}");
        }
    }

    #[test]
    fn one_type_is_sold_on_the_spot_market_above_its_on_demand_price_at_times() {
        let market = Market::new(1, MarketConfig::default());
        let pool = spot_pool("azure/eastus/eastus-1/Standard_ND96isr_H100_v5/spot");
        let above = (0..1440).filter(|minute| {
            let quote = market.quote(&pool, EPOCH, Span::secs(minute * 60)).unwrap();
            quote.price >= quote.on_demand
        });
        assert!((100..1340).contains(&above.count()));
    }

    proptest! {
        #[test]
        fn spot_prices_stay_in_their_band_and_move_smoothly(seed: u64, minute in 0_u64..100_000) {
            let market = Market::new(seed, MarketConfig::default());
            let pool = spot_pool("gcp/us-central1/us-central1-a/a2-ultragpu-8g/spot");
            let at = |m: u64| market.quote(&pool, EPOCH, Span::secs(m * 60)).unwrap();
            let (now, next) = (at(minute), at(minute + 1));
            let ratio = now.price.0.as_f64() / now.on_demand.0.as_f64();
            prop_assert!((0.2499..=0.7001).contains(&ratio), "{ratio}");
            let step = (next.price.0.as_f64() / now.on_demand.0.as_f64() - ratio).abs();
            prop_assert!(step < 0.04, "a step of {step} of on-demand in a minute");
        }

        #[test]
        fn the_market_answers_the_same_twice_and_differs_by_seed(seed: u64, second in 0_u64..10_000_000, n: u64) {
            let pool = spot_pool("aws/us-west-2/us-west-2b/g4dn.xlarge/spot");
            let ask = |seed: u64| {
                let market = Market::new(seed, MarketConfig::default());
                (market.offers(EPOCH, Span::secs(second)), market.refusal(&pool, Span::secs(second)),
                 market.fate(NodeId(n), &pool))
            };
            prop_assert_eq!(ask(seed), ask(seed));
            prop_assert_ne!(ask(seed), ask(seed.wrapping_add(1)));
        }

        #[test]
        fn a_price_holds_for_its_whole_step_and_says_since_when(seed: u64, second in 0_u64..1_000_000) {
            let market = Market::new(seed, MarketConfig::default());
            let pool = spot_pool("aws/us-west-2/us-west-2b/g4dn.xlarge/spot");
            let quote = market.quote(&pool, EPOCH, Span::secs(second)).unwrap();
            let start = quote.as_of.since(EPOCH);
            prop_assert!(start <= Span::secs(second) && start + Span::secs(60) > Span::secs(second));
            prop_assert_eq!(market.quote(&pool, EPOCH, start), Some(quote));
        }
    }
}
