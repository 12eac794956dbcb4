//! What the simulated clouds sell, at list prices of the real ones.
//!
//! On-demand prices, in micro-dollars per hour, of the region that is named first of each cloud:
//! AWS accelerators from karpenter-provider-aws `zz_generated.pricing_aws.go` (2026-07-20, us-east-1; AWS asks
//! the same in us-west-2), GCP accelerators from Cyclenerd/google-cloud-pricing-cost-calculator `pricing.yml`
//! (2026-07-30), Azure accelerators from karpenter-provider-azure `zz_generated.pricing.go` (2026-06-18).
//! The plain CPU types and GCP's N1 with a T4 are recalled from the public price pages and not verified; they
//! are good enough for a simulation, and nothing decides by them elsewhere. Which zone sells what is simplified:
//! every zone of a region sells every type of its cloud.

use spotq_model::{Cloud, Shape, UsdPerHour};

/// Two zones of a cloud that are priced alike.
#[derive(Debug)]
pub struct Region {
    pub cloud: Cloud,
    pub name: &'static str,
    /// Unique within the cloud, because the scope of a refusal names a zone without its region.
    pub zones: [&'static str; 2],
}

pub const REGIONS: [Region; 6] = [
    Region { cloud: Cloud::Aws, name: "us-east-1", zones: ["us-east-1a", "us-east-1b"] },
    Region { cloud: Cloud::Aws, name: "us-west-2", zones: ["us-west-2a", "us-west-2b"] },
    Region { cloud: Cloud::Gcp, name: "us-central1", zones: ["us-central1-a", "us-central1-c"] },
    Region { cloud: Cloud::Gcp, name: "us-east4", zones: ["us-east4-a", "us-east4-c"] },
    // Azure numbers its zones per region.
    Region { cloud: Cloud::Azure, name: "eastus", zones: ["eastus-1", "eastus-2"] },
    Region { cloud: Cloud::Azure, name: "westus2", zones: ["westus2-1", "westus2-2"] },
];

/// How the spot price of a type moves, in hundredths of its on-demand price.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpotBand {
    pub low_pct: u8,
    pub high_pct: u8,
}

/// Discounts of most accelerators, as clouds showed them in 2026.
const USUAL: SpotBand = SpotBand { low_pct: 25, high_pct: 70 };
/// Azure has listed H100 spot at the full on-demand price: a pool that a scheduler must learn not to take.
const NO_DISCOUNT: SpotBand = SpotBand { low_pct: 92, high_pct: 108 };

/// An instance type.
#[derive(Debug)]
pub struct Type {
    pub cloud: Cloud,
    pub name: &'static str,
    pub accelerator: Option<(&'static str, u32)>,
    pub cpus: u32,
    pub memory_gib: u32,
    /// On-demand price in micro-dollars per hour, in the cloud's first and second region.
    pub prices: [i64; 2],
    pub spot: SpotBand,
}

impl Type {
    pub fn shape(&self) -> Shape {
        Shape {
            accelerator: self.accelerator.map(|(name, _)| name.to_owned()),
            accelerator_count: self.accelerator.map_or(0, |(_, count)| count),
            cpus: self.cpus,
            memory_gib: self.memory_gib,
        }
    }

    /// The on-demand price in one of `REGIONS`.
    pub fn on_demand(&self, region: &Region) -> UsdPerHour {
        let first = REGIONS.iter().find(|r| r.cloud == region.cloud).is_none_or(|r| r.name == region.name);
        UsdPerHour::nanos(self.prices[usize::from(!first)] * 1_000)
    }
}

pub const TYPES: [Type; 17] = [
    cpu(Cloud::Aws, "c7i.xlarge", (4, 8), [178_500, 178_500]),
    cpu(Cloud::Aws, "c7i.4xlarge", (16, 32), [714_000, 714_000]),
    gpu(Cloud::Aws, "g4dn.xlarge", ("T4", 1), (4, 16), [526_000, 526_000]),
    gpu(Cloud::Aws, "p5.4xlarge", ("H100", 1), (16, 256), [6_880_000, 6_880_000]),
    gpu(Cloud::Aws, "p4de.24xlarge", ("A100-80GB", 8), (96, 1152), [27_447_050, 27_447_050]),
    gpu(Cloud::Aws, "p5.48xlarge", ("H100", 8), (192, 2048), [55_040_000, 55_040_000]),
    cpu(Cloud::Gcp, "n2-standard-4", (4, 16), [194_236, 218_744]),
    cpu(Cloud::Gcp, "n2-standard-16", (16, 64), [776_944, 874_976]),
    gpu(Cloud::Gcp, "n1-standard-4+t4", ("T4", 1), (4, 15), [540_000, 564_000]),
    gpu(Cloud::Gcp, "a2-ultragpu-1g", ("A100-80GB", 1), (12, 170), [5_068_800, 5_707_730]),
    gpu(Cloud::Gcp, "a2-ultragpu-8g", ("A100-80GB", 8), (96, 1360), [40_550_380, 45_661_860]),
    gpu(Cloud::Gcp, "a3-highgpu-8g", ("H100", 8), (208, 1872), [88_490_000, 88_555_760]),
    cpu(Cloud::Azure, "Standard_D4s_v5", (4, 16), [192_000, 192_000]),
    gpu(Cloud::Azure, "Standard_NC4as_T4_v3", ("T4", 1), (4, 28), [526_000, 526_000]),
    gpu(Cloud::Azure, "Standard_NC24ads_A100_v4", ("A100-80GB", 1), (24, 220), [3_673_000, 3_673_000]),
    gpu(Cloud::Azure, "Standard_ND96amsr_A100_v4", ("A100-80GB", 8), (96, 1800), [32_770_000, 32_770_000]),
    Type {
        spot: NO_DISCOUNT,
        ..gpu(Cloud::Azure, "Standard_ND96isr_H100_v5", ("H100", 8), (96, 1900), [98_320_000, 98_320_000])
    },
];

const fn cpu(cloud: Cloud, name: &'static str, (cpus, memory_gib): (u32, u32), prices: [i64; 2]) -> Type {
    Type { cloud, name, accelerator: None, cpus, memory_gib, prices, spot: USUAL }
}

const fn gpu(
    cloud: Cloud,
    name: &'static str,
    accelerator: (&'static str, u32),
    (cpus, memory_gib): (u32, u32),
    prices: [i64; 2],
) -> Type {
    Type { cloud, name, accelerator: Some(accelerator), cpus, memory_gib, prices, spot: USUAL }
}
