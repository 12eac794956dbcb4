//! What spotq asks of a cloud: offers, launches, endings, and news of both.
//!
//! `CloudProvider` is the only way the scheduler reaches a cloud. Every call is idempotent, because each is
//! repeated after a crash; every "no" is a `Refusal` that says where it holds and for how long. This crate
//! must never decide where a job runs, and must never print or store a join secret.

pub mod conformance;
mod fake;
mod instance;
mod launch;

use std::fmt;

use async_trait::async_trait;
use spotq_model::{InstanceId, Offer, Refusal, Span, Usd};
use tokio::sync::broadcast;

pub use fake::{Call, FakeProvider};
pub use instance::{Billable, Instance, InstanceChange, InstanceState, TerminateState};
pub use launch::{Bootstrap, LaunchRequest, Launched, Secret, TAG_CLUSTER, TAG_NODE};
pub use spotq_model::GoneCause;

/// How many changes a slow subscriber may fall behind before it loses the oldest ones. Losing some is harmless
/// because `list_owned` is polled as well; a thousand is more nodes than one account of a cloud ends in a second.
pub const CHANGES_KEPT: usize = 1024;

/// A cloud, or several behind one door (the local provider simulates three).
#[async_trait]
pub trait CloudProvider: Send + Sync + fmt::Debug {
    /// One word for logs and reports, such as `aws` or `local`.
    fn name(&self) -> &str;

    /// Every pool that this account may use, at its price of this moment.
    async fn offers(&self) -> Result<Vec<Offer>, Refusal>;

    /// Starts a node. The same key always answers with the same instance, also when that instance has ended;
    /// a refused key may be tried again.
    async fn launch(&self, request: LaunchRequest) -> Result<Launched, Refusal>;

    /// Every instance that carries the tag `cluster`, with those that ended lately.
    async fn list_owned(&self, cluster: &str) -> Result<Vec<Instance>, Refusal>;

    /// Ends an instance. To be repeated until it answers `Gone`; an unknown instance is `Gone`.
    async fn terminate(&self, instance: &InstanceId) -> Result<TerminateState, Refusal>;

    /// A drill: the instance is preempted after `notice`, as if the market had done it.
    async fn simulate_interruption(&self, instance: &InstanceId, notice: Span) -> Result<(), Refusal>;

    /// News as it happens. Lossy: a receiver that lags or a provider that restarts may miss some.
    fn changes(&self) -> broadcast::Receiver<InstanceChange>;

    /// What the cloud charges for a stretch of node time, by its own rules.
    fn billed(&self, stretch: &Billable) -> Usd;
}
