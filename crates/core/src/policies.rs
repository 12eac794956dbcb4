//! What the operator wants: limits and times that the decisions use.

use serde::{Deserialize, Serialize};
use spotq_model::Span;

/// All of it is configuration; the defaults suit the public clouds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Policies {
    /// Name of this cluster; part of every launch key and tag.
    pub cluster: String,
    /// A worker that is silent this long has lost its node.
    pub lease_ttl: Span,
    /// A cloud that has not answered a launch for this long has failed it.
    pub launch_timeout: Span,
    /// A cloud's list may be older than its own answers: a node is not called missing before it has this age.
    pub list_lag: Span,
    /// A node whose worker has not joined this long after the launch is ended.
    pub boot_timeout: Span,
    /// How long a bad exit is held, in case the node turns out to be going away: a cloud that shuts a node down ends
    /// its processes first.
    pub settle: Span,
    /// A node without work is kept this long for the next task.
    pub idle_ttl: Span,
    /// Nodes are ended, and their tasks moved, at this age. The cloud enforces it too, where it can.
    pub node_ttl: Span,
    /// How long before `node_ttl` the task is asked to save and move.
    pub node_ttl_margin: Span,
    /// Past the deadline of a notice or of a stop, this much later the node counts as lost.
    pub drain_grace: Span,
    /// A pool that took a node back is left alone for this long.
    pub preempted_cool_down: Span,
    /// After a failure the task pauses this long, twice as long after each further one.
    pub back_off: Span,
    pub back_off_max: Span,
    /// A task whose nodes are lost this often without any new checkpoint has `node failure` as its outcome.
    pub fruitless_losses_max: u32,
    /// Nodes that may live at once.
    pub nodes_max: u32,
    /// How many waiting tasks one plan looks at; the rest keep their place in the queue.
    pub plan_width: u32,
    /// Progress is made durable at most this often per task.
    pub progress_every: Span,
    /// Expected time from a preemption to the same step again; turns an interruption rate into money.
    pub restart_overhead: Span,
}

impl Default for Policies {
    fn default() -> Self {
        Policies {
            cluster: "spotq".into(),
            lease_ttl: Span::secs(20),
            launch_timeout: Span::secs(300),
            list_lag: Span::secs(60),
            boot_timeout: Span::secs(900),
            settle: Span::secs(2),
            idle_ttl: Span::secs(60),
            node_ttl: Span::secs(7 * 86_400),
            node_ttl_margin: Span::secs(600),
            drain_grace: Span::secs(10),
            preempted_cool_down: Span::secs(300),
            back_off: Span::secs(1),
            back_off_max: Span::secs(300),
            fruitless_losses_max: 8,
            nodes_max: 100,
            plan_width: 1000,
            progress_every: Span::secs(5),
            restart_overhead: Span::secs(180),
        }
    }
}
