//! The decisions of spotq, as synchronous functions of (state, input, now).
//!
//! ```text
//! decide(&Cluster, &Policies, now, &Input) -> Vec<Event>     what becomes true
//! apply(&mut Cluster, &Event)                                 the only way state changes; replay is recovery
//! due(&Cluster, now) -> Vec<Effect>                           what the world still owes this state
//! plan(&PlanInput, &Policies) -> Plan                         who goes where, and why the others wait
//! lint(&PlanInput, &Plan) -> Vec<Note>                        a fatal note keeps the old plan
//! ```
//!
//! This crate is deaf and blind: no I/O, no clock, no randomness, no async, nothing whose order is left to chance.
#![warn(clippy::wildcard_enum_match_arm)]

mod apply;
mod classify;
mod decide;
mod due;
mod explain;
pub mod invariants;
mod ledger;
mod lint;
mod plan;
mod policies;
mod state;

pub use apply::{IllegalEvent, apply, replay};
pub use classify::{Loss, classify};
pub use decide::{decide, is_current};
pub use due::{due, owes_effects};
pub use explain::{Explanation, PoolVerdict, explain};
pub use ledger::Segment;
pub use lint::{Note, Severity, lint};
pub use plan::{FreeNode, Move, Plan, PlanInput, Waiting, plan, plan_input, wakes_planner};
pub use policies::Policies;
pub use state::{
    Attempt, Cluster, CoolDown, Drill, Job, Node, NodeState, NoticeSeen, Phase, QueueKey, Stop, Task,
};
