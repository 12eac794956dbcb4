//! What becomes true when an input arrives. Nothing here acts and nothing here changes state.

mod attempt;
mod node;
mod time;
mod user;

use spotq_model::{Event, Fact, Generation, Input, NodeId, TaskId, Timestamp};

use crate::plan::{lint_and_place, plan_input};
use crate::policies::Policies;
use crate::state::Cluster;

/// The events that follow from `input`. An input that repeats something known gives none.
#[must_use]
pub fn decide(c: &Cluster, p: &Policies, now: Timestamp, input: &Input) -> Vec<Event> {
    let now = now.max(c.now);
    let facts = match input {
        Input::Submit { client_key, uuid, spec } => user::submit(c, client_key, uuid, spec),
        Input::Cancel { job } => user::cancel(c, p, now, *job),
        Input::Hold { job } => user::hold(c, *job),
        Input::Release { job } => user::release(c, *job),
        Input::Requeue { job } => user::requeue(c, p, now, *job),
        Input::Drill { job, notice } => user::drill(c, *job, *notice),
        Input::LaunchAnswered { node, answer } => node::launch_answered(c, now, *node, answer),
        Input::DrillAnswered { node, error } => node::drill_answered(c, *node, error.as_ref()),
        Input::Instances { asked_at, instances } => node::instances(c, p, now, *asked_at, instances),
        Input::InstanceGone { instance, cause, at } => node::instance_gone(c, p, now, instance, *cause, *at),
        Input::WorkerJoined { node, held } => node::worker_joined(c, p, now, *node, held),
        Input::LeaseExpired { node } => node::lease_expired(c, p, now, *node),
        Input::Reported { node, task, generation, report } => {
            attempt::reported(c, p, now, (*node, *task, *generation), report)
        }
        Input::Offers { offers } => node::offers(c, offers),
        Input::Plan { offers } => lint_and_place(&plan_input(c, p, now, offers), p),
        Input::Tick => time::tick(c, p, now),
    };
    facts.into_iter().map(|fact| Event { at: now, fact }).collect()
}

/// Whether `node` may still act for this generation of the task. Workers that hold anything else are told to stop it.
#[must_use]
pub fn is_current(c: &Cluster, node: NodeId, task: TaskId, generation: Generation) -> bool {
    c.attempt_under_way(task, generation).is_some_and(|attempt| attempt.node == node)
}

type Facts = Vec<Fact>;
