//! The fake cloud with launches that can be broken one by one. It notes every call whose reason was not durable when
//! it came.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use spotq_model::{Cloud, Fact, InstanceId, Offer, Refusal, RefusalKind, Scope, Span, Usd};
use spotq_provider::{
    Billable, Call, CloudProvider, FakeProvider, Instance, InstanceChange, LaunchRequest, Launched,
    TerminateState,
};
use tokio::sync::broadcast;

use super::store::TestStore;

/// What happens to one launch.
#[derive(Debug)]
pub enum LaunchFault {
    Refuse(RefusalKind),
    /// Done, but the caller hears of a fault.
    LoseAnswer,
    /// Done, but the caller never hears anything.
    NoAnswer,
    /// Neither done nor answered, until `land_hung`.
    Hang,
}

#[derive(Debug, Clone)]
pub struct TestCloud {
    pub fake: FakeProvider,
    store: TestStore,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    faults: VecDeque<LaunchFault>,
    hung: Vec<LaunchRequest>,
    launches: Vec<LaunchRequest>,
    early: Vec<String>,
}

impl TestCloud {
    pub fn new(store: &TestStore) -> TestCloud {
        TestCloud { fake: FakeProvider::with_small_market(), store: store.clone(), state: Arc::default() }
    }

    /// The next launch without a fault of its own gets this one.
    pub fn next_launch(&self, fault: LaunchFault) {
        self.state.lock().unwrap().faults.push_back(fault);
    }

    /// What hung is done now, long after anybody waited for it.
    pub async fn land_hung(&self) {
        let hung = std::mem::take(&mut self.state.lock().unwrap().hung);
        for request in hung {
            self.fake.launch(request).await.unwrap();
        }
    }

    pub fn launches(&self) -> Vec<LaunchRequest> {
        self.state.lock().unwrap().launches.clone()
    }

    pub fn terminations(&self, of: &InstanceId) -> usize {
        let calls = self.fake.calls();
        calls.iter().filter(|call| matches!(call, Call::Terminate { instance } if instance == of)).count()
    }

    /// How often the cloud was asked for its instances.
    pub fn lists(&self) -> usize {
        self.fake.calls().iter().filter(|call| matches!(call, Call::ListOwned { .. })).count()
    }

    /// INV-04: no call was made before what asked for it was durable.
    pub fn assert_nothing_early(&self) {
        assert_eq!(self.state.lock().unwrap().early, Vec::<String>::new());
    }

    fn check(&self, call: &str, is_reason: impl Fn(&Fact) -> bool) {
        if !self.store.events().iter().any(|event| is_reason(&event.fact)) {
            self.state.lock().unwrap().early.push(call.to_owned());
        }
    }
}

#[async_trait]
impl CloudProvider for TestCloud {
    fn name(&self) -> &str {
        "test"
    }

    async fn offers(&self) -> Result<Vec<Offer>, Refusal> {
        self.fake.offers().await
    }

    async fn launch(&self, request: LaunchRequest) -> Result<Launched, Refusal> {
        self.check(
            &format!("launch {}", request.key),
            |fact| matches!(fact, Fact::NodeRequested { key, .. } if *key == request.key),
        );
        let fault = {
            let mut state = self.state.lock().unwrap();
            state.launches.push(request.clone());
            state.faults.pop_front()
        };
        let refused = |kind| Refusal {
            kind,
            scope: Scope::Pool { pool: request.pool.clone() },
            cool_down: Span::secs(60),
            message: "told to".into(),
        };
        match fault {
            None => self.fake.launch(request).await,
            Some(LaunchFault::Refuse(kind)) => Err(refused(kind)),
            Some(LaunchFault::LoseAnswer) => {
                self.fake.launch(request.clone()).await?;
                Err(refused(RefusalKind::Transient))
            }
            Some(LaunchFault::NoAnswer) => {
                self.fake.launch(request).await?;
                std::future::pending().await
            }
            Some(LaunchFault::Hang) => {
                self.state.lock().unwrap().hung.push(request);
                std::future::pending().await
            }
        }
    }

    async fn list_owned(&self, cluster: &str) -> Result<Vec<Instance>, Refusal> {
        self.fake.list_owned(cluster).await
    }

    async fn terminate(&self, instance: &InstanceId) -> Result<TerminateState, Refusal> {
        self.check(&format!("terminate {instance}"), |fact| {
            matches!(fact, Fact::NodeEnding { .. } | Fact::NodeOrphaned { .. })
        });
        self.fake.terminate(instance).await
    }

    async fn simulate_interruption(&self, instance: &InstanceId, notice: Span) -> Result<(), Refusal> {
        self.check(&format!("interrupt {instance}"), |fact| matches!(fact, Fact::DrillAsked { .. }));
        self.fake.simulate_interruption(instance, notice).await
    }

    fn changes(&self) -> broadcast::Receiver<InstanceChange> {
        self.fake.changes()
    }

    fn billed(&self, stretch: &Billable) -> Usd {
        self.fake.billed(stretch)
    }
}

/// A refusal of all of one cloud.
pub fn cloud_refusal(kind: RefusalKind) -> Refusal {
    Refusal {
        kind,
        scope: Scope::Cloud { cloud: Cloud::Aws },
        cool_down: Span::secs(60),
        message: "told to".into(),
    }
}
