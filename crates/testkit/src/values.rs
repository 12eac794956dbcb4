//! Values of the model with everything filled in, so that a test sets only what matters to it.

use std::collections::BTreeMap;

use spotq_model::{
    Checkpoint, CheckpointSpec, Command, Exit, Fact, Generation, JobSpec, Market, Offer, PlacementPolicy,
    Pool, Quote, Resources, Retry, Shape, Timestamp, UsdPerHour,
};

/// A job that runs `true` on any node. Change fields by struct update:
/// `JobSpec { priority: 5, ..spotq_testkit::job("train") }`.
#[must_use]
pub fn job(name: &str) -> JobSpec {
    JobSpec {
        name: name.into(),
        user: "tester".into(),
        command: Command::Argv { argv: vec!["true".into()] },
        setup: None,
        workdir: None,
        env: BTreeMap::new(),
        resources: Resources::default(),
        checkpoint: CheckpointSpec::default(),
        policy: PlacementPolicy::default(),
        budget: None,
        project: None,
        tags: BTreeMap::new(),
        time_limit: None,
        retry: Retry::default(),
        priority: 0,
        begin: None,
        hold: false,
        outputs: Vec::new(),
    }
}

/// An offer of `pool`, such as `aws/us-east-1/us-east-1a/t4/spot`, at `price` dollars an hour, such as `0.31`.
/// On demand it costs three times that unless said otherwise; an on-demand pool costs its own price.
///
/// # Panics
/// When `pool` or `price` does not parse: the test itself is wrong.
#[must_use]
pub fn offer(pool: &str, price: &str) -> OfferBuilder {
    let pool: Pool = pool.parse().unwrap_or_else(|e: String| panic!("{e}"));
    let price: UsdPerHour = price.parse().unwrap_or_else(|e: String| panic!("{e}"));
    let on_demand = match pool.market {
        Market::Spot => UsdPerHour::nanos(price.0.0.saturating_mul(3)),
        Market::OnDemand => price,
    };
    OfferBuilder {
        offer: Offer {
            pool,
            shape: Shape { accelerator: None, accelerator_count: 0, cpus: 8, memory_gib: 32 },
            quote: Quote { price, on_demand, source: "test".into(), as_of: Timestamp(0) },
            interruptions_per_hour_ppm: 50_000,
        },
    }
}

/// Fills in an [`Offer`]; made by [`offer`].
#[derive(Debug, Clone)]
pub struct OfferBuilder {
    offer: Offer,
}

impl OfferBuilder {
    /// What the same node costs on demand, in dollars an hour.
    ///
    /// # Panics
    /// When `price` does not parse: the test itself is wrong.
    #[must_use]
    pub fn on_demand(mut self, price: &str) -> OfferBuilder {
        self.offer.quote.on_demand = price.parse().unwrap_or_else(|e: String| panic!("{e}"));
        self
    }

    /// Accelerator by SkyPilot's spelling, such as `T4`, and how many a node has.
    #[must_use]
    pub fn accelerator(mut self, name: &str, count: u32) -> OfferBuilder {
        self.offer.shape.accelerator = Some(name.into());
        self.offer.shape.accelerator_count = count;
        self
    }

    #[must_use]
    pub fn cpus(mut self, cpus: u32) -> OfferBuilder {
        self.offer.shape.cpus = cpus;
        self
    }

    #[must_use]
    pub fn memory_gib(mut self, memory_gib: u32) -> OfferBuilder {
        self.offer.shape.memory_gib = memory_gib;
        self
    }

    /// When the price was true.
    #[must_use]
    pub fn as_of(mut self, at: Timestamp) -> OfferBuilder {
        self.offer.quote.as_of = at;
        self
    }

    /// Expected interruptions per node-hour in millionths.
    #[must_use]
    pub fn interruptions_per_hour_ppm(mut self, ppm: u64) -> OfferBuilder {
        self.offer.interruptions_per_hour_ppm = ppm;
        self
    }

    #[must_use]
    pub fn build(self) -> Offer {
        self.offer
    }
}

/// A checkpoint that stands at `sequence` in its log, of the tenfold step.
#[must_use]
pub fn checkpoint(sequence: u64, generation: Generation, saved_at: Timestamp) -> Checkpoint {
    Checkpoint {
        sequence,
        log_sequence: sequence,
        generation,
        step: Some(sequence * 10),
        bytes_total: 1,
        bytes_uploaded: 1,
        saved_at,
        manifest_hash: "00".into(),
    }
}

/// A command that ended by itself with this code.
#[must_use]
pub fn exit(code: i32, stopped_at: Timestamp) -> Exit {
    Exit {
        exit_code: Some(code),
        signal: None,
        out_of_memory: false,
        launch_error: None,
        signalled: false,
        worker_leaving: false,
        stopped_at,
        last_progress: None,
        detail: None,
    }
}

/// How many kinds of fact there are.
pub const FACT_KINDS: usize = 27;

/// Numbers the kinds of fact, below [`FACT_KINDS`]. Exhaustive on purpose: a new one needs a number, and with it a row in
/// every table of them.
#[must_use]
pub fn fact_kind(fact: &Fact) -> usize {
    match fact {
        Fact::JobSubmitted { .. } => 0,
        Fact::TaskHeld { .. } => 1,
        Fact::TaskReleased { .. } => 2,
        Fact::TaskWaits { .. } => 3,
        Fact::AttemptPlaced { .. } => 4,
        Fact::AttemptAccepted { .. } => 5,
        Fact::AttemptRestored { .. } => 6,
        Fact::AttemptStarted { .. } => 7,
        Fact::AttemptProgressed { .. } => 8,
        Fact::CheckpointCommitted { .. } => 9,
        Fact::StopAsked { .. } => 10,
        Fact::AttemptExited { .. } => 11,
        Fact::AttemptEnded { .. } => 12,
        Fact::TaskDone { .. } => 13,
        Fact::NodeRequested { .. } => 14,
        Fact::NodeLaunched { .. } => 15,
        Fact::NodeRefused { .. } => 16,
        Fact::NodeJoined { .. } => 17,
        Fact::NodeNoticed { .. } => 18,
        Fact::NoticeWithdrawn { .. } => 19,
        Fact::NodeEnding { .. } => 20,
        Fact::NodeGone { .. } => 21,
        Fact::NodeOrphaned { .. } => 22,
        Fact::NodeRepriced { .. } => 23,
        Fact::DrillAsked { .. } => 24,
        Fact::DrillAnswered { .. } => 25,
        Fact::PoolCooled { .. } => 26,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spot_offer_is_cheaper_than_on_demand_unless_the_test_says_so() {
        let spot = offer("aws/us-east-1/us-east-1a/t4/spot", "0.31").build();
        assert_eq!(spot.quote.on_demand, "0.93".parse().unwrap());
        let dear = offer("gcp/us-central1/us-central1-a/l4/on-demand", "0.70").build();
        assert_eq!(dear.quote.on_demand, dear.quote.price);
        let set =
            offer("aws/us-east-1/us-east-1a/t4/spot", "0.31").on_demand("0.30").accelerator("T4", 2).build();
        assert!(set.quote.on_demand < set.quote.price);
        assert_eq!((set.shape.accelerator.as_deref(), set.shape.accelerator_count), (Some("T4"), 2));
    }

    #[test]
    fn a_job_keeps_its_name_and_survives_json() {
        let spec = JobSpec { priority: 5, ..job("train") };
        let text = serde_json::to_string(&spec).unwrap();
        assert_eq!(serde_json::from_str::<JobSpec>(&text).unwrap(), spec);
        assert_eq!((spec.name.as_str(), spec.priority), ("train", 5));
    }
}
