//! Pools, offers and the ways a cloud says no.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Span, Timestamp, UsdPerHour};

/// Which cloud. The simulated clouds of `provider-local` carry the same names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cloud {
    Aws,
    Gcp,
    Azure,
}

impl Cloud {
    pub const ALL: [Cloud; 3] = [Cloud::Aws, Cloud::Gcp, Cloud::Azure];

    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Cloud::Aws => "aws",
            Cloud::Gcp => "gcp",
            Cloud::Azure => "azure",
        }
    }
}

impl fmt::Display for Cloud {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Cloud {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, Self::Err> {
        match s.to_ascii_lowercase().as_str() {
            "aws" => Ok(Cloud::Aws),
            "gcp" => Ok(Cloud::Gcp),
            "azure" => Ok(Cloud::Azure),
            _ => Err(format!("`{s}` is not a cloud: expected aws, gcp or azure")),
        }
    }
}

/// How the capacity is bought.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Market {
    #[serde(rename = "spot")]
    Spot,
    #[serde(rename = "on-demand")]
    OnDemand,
}

impl Market {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Market::Spot => "spot",
            Market::OnDemand => "on-demand",
        }
    }
}

impl fmt::Display for Market {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Market {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, Self::Err> {
        match s {
            "spot" => Ok(Market::Spot),
            "on-demand" => Ok(Market::OnDemand),
            _ => Err(format!("`{s}` is not a market: expected spot or on-demand")),
        }
    }
}

/// A pool: capacity that is priced, sold out and reclaimed together.
/// Prints as `aws/us-east-1/us-east-1a/g5.xlarge/spot`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Pool {
    pub cloud: Cloud,
    pub region: String,
    pub zone: String,
    pub instance_type: String,
    pub market: Market,
}

impl fmt::Display for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}/{}/{}", self.cloud, self.region, self.zone, self.instance_type, self.market)
    }
}

impl FromStr for Pool {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let parts: Vec<&str> = s.split('/').collect();
        let [cloud, region, zone, instance_type, market] = parts[..] else {
            return Err(format!("`{s}` is not a pool: expected cloud/region/zone/instance-type/market"));
        };
        Ok(Pool {
            cloud: cloud.parse()?,
            region: region.into(),
            zone: zone.into(),
            instance_type: instance_type.into(),
            market: market.parse()?,
        })
    }
}

impl From<Pool> for String {
    fn from(pool: Pool) -> String {
        pool.to_string()
    }
}

impl TryFrom<String> for Pool {
    type Error = String;
    fn try_from(s: String) -> Result<Self, String> {
        s.parse()
    }
}

/// What one node of a pool has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Accelerator by SkyPilot's spelling, such as `A100-80GB`; `None` for a plain CPU node.
    pub accelerator: Option<String>,
    pub accelerator_count: u32,
    pub cpus: u32,
    pub memory_gib: u32,
}

/// A price with where it comes from and when it was true. Frozen into a ledger segment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quote {
    /// What an hour of the node costs in this pool.
    pub price: UsdPerHour,
    /// What the same node costs on demand; equals `price` for an on-demand pool.
    pub on_demand: UsdPerHour,
    /// Who said so, such as `local-market` or `aws:DescribeSpotPriceHistory`.
    pub source: String,
    pub as_of: Timestamp,
}

/// A pool at a price at a time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    pub pool: Pool,
    pub shape: Shape,
    pub quote: Quote,
    /// Expected interruptions per node-hour in millionths (an integer, so that decisions replay exactly).
    pub interruptions_per_hour_ppm: u64,
}

/// What a refusal is true for; a cool-down holds for all pools within.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "scope")]
pub enum Scope {
    Pool {
        pool: Pool,
    },
    Zone {
        cloud: Cloud,
        zone: String,
    },
    Region {
        cloud: Cloud,
        region: String,
    },
    /// Quota of one market in a region.
    RegionMarket {
        cloud: Cloud,
        region: String,
        market: Market,
    },
    Cloud {
        cloud: Cloud,
    },
}

impl Scope {
    #[must_use]
    pub fn covers(&self, pool: &Pool) -> bool {
        match self {
            Scope::Pool { pool: p } => p == pool,
            Scope::Zone { cloud, zone } => *cloud == pool.cloud && *zone == pool.zone,
            Scope::Region { cloud, region } => *cloud == pool.cloud && *region == pool.region,
            Scope::RegionMarket { cloud, region, market } => {
                *cloud == pool.cloud && *region == pool.region && *market == pool.market
            }
            Scope::Cloud { cloud } => *cloud == pool.cloud,
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scope::Pool { pool } => write!(f, "pool {pool}"),
            Scope::Zone { cloud, zone } => write!(f, "zone {cloud}/{zone}"),
            Scope::Region { cloud, region } => write!(f, "region {cloud}/{region}"),
            Scope::RegionMarket { cloud, region, market } => write!(f, "{market} in region {cloud}/{region}"),
            Scope::Cloud { cloud } => write!(f, "cloud {cloud}"),
        }
    }
}

/// Why a cloud refused, sorted by what we can do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefusalKind {
    /// No capacity now; another pool may have some.
    InsufficientCapacity,
    /// Our limit is reached; waiting does not help, ending nodes or a higher quota does.
    QuotaExceeded,
    /// The market is above what we offered.
    PriceTooLow,
    /// Too many calls; the same call may pass later.
    Throttled,
    /// The thing does not exist.
    NotFound,
    /// Our credentials may not do this.
    Denied,
    /// The request can never pass; the job has to change.
    InvalidRequest,
    /// A fault of the moment; the outcome may be unknown.
    Transient,
}

impl fmt::Display for RefusalKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RefusalKind::InsufficientCapacity => "insufficient capacity",
            RefusalKind::QuotaExceeded => "quota exceeded",
            RefusalKind::PriceTooLow => "price too low",
            RefusalKind::Throttled => "throttled",
            RefusalKind::NotFound => "not found",
            RefusalKind::Denied => "denied",
            RefusalKind::InvalidRequest => "invalid request",
            RefusalKind::Transient => "transient fault",
        })
    }
}

/// A cloud's refusal: what, where it holds, how long to leave it alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    pub kind: RefusalKind,
    pub scope: Scope,
    pub cool_down: Span,
    /// The cloud's own words, for people.
    pub message: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_survives_a_round_trip() {
        let text = "aws/us-east-1/us-east-1a/g5.xlarge/spot";
        let pool: Pool = text.parse().unwrap();
        assert_eq!(pool.to_string(), text);
        assert!("aws/us-east-1".parse::<Pool>().is_err());
        assert!("ibm/r/z/t/spot".parse::<Pool>().is_err());
    }

    #[test]
    fn a_refusal_covers_the_pools_within_its_scope_only() {
        let pool: Pool = "aws/us-east-1/us-east-1a/g5.xlarge/spot".parse().unwrap();
        let quota =
            Scope::RegionMarket { cloud: Cloud::Aws, region: "us-east-1".into(), market: Market::Spot };
        assert!(quota.covers(&pool));
        assert!(!quota.covers(&Pool { market: Market::OnDemand, ..pool.clone() }));
        assert!(!Scope::Cloud { cloud: Cloud::Gcp }.covers(&pool));
        assert!(Scope::Zone { cloud: Cloud::Aws, zone: "us-east-1a".into() }.covers(&pool));
    }
}
