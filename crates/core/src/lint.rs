//! Checks a plan without trusting the planner. A fatal note keeps the old plan: nothing is placed.

use std::collections::{BTreeMap, BTreeSet};

use spotq_model::{Market, TaskId};
use spotq_policy::eligible;

use crate::plan::{FreeNode, Move, Plan, PlanInput, Waiting};

/// What is wrong with a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    pub severity: Severity,
    pub text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Worth knowing; the plan is adopted.
    Warning,
    /// The plan is not adopted.
    Fatal,
}

/// Everything that is wrong with `plan`.
#[must_use]
pub fn lint(input: &PlanInput<'_>, plan: &Plan) -> Vec<Note> {
    let waiting: BTreeMap<TaskId, &Waiting> = input.waiting.iter().map(|w| (w.task, w)).collect();
    let mut notes = Vec::new();
    let mut tasks = BTreeSet::new();
    let mut nodes = BTreeSet::new();
    for step in &plan.moves {
        let task = step.task();
        if !tasks.insert(task) {
            notes.push(fatal(format!("task {task} is placed twice")));
        }
        if !nodes.insert(step.node()) {
            notes.push(fatal(format!("node {} gets two tasks", step.node())));
        }
        match waiting.get(&task) {
            Some(waiting) => notes.extend(lint_move(input, waiting, step)),
            None => notes.push(fatal(format!("task {task} does not wait"))),
        }
    }
    for task in waiting.keys() {
        match (tasks.contains(task), plan.report.contains_key(task)) {
            (true, true) => notes.push(fatal(format!("task {task} is placed and waits"))),
            (false, false) => notes.push(fatal(format!("task {task} has no reason to wait"))),
            (true, false) | (false, true) => {}
        }
    }
    notes
}

fn lint_move(input: &PlanInput<'_>, waiting: &Waiting, step: &Move) -> Vec<Note> {
    let mut notes = Vec::new();
    let task = waiting.task;
    match step {
        Move::Use { node, generation, .. } => {
            if *generation < waiting.next_generation {
                notes.push(fatal(format!("task {task} gets an old generation {generation}")));
            }
            match input.free_nodes.iter().find(|free| free.node == *node).map(FreeNode::as_offer) {
                None => notes.push(fatal(format!("node {node} is not free"))),
                Some(offer) => {
                    if let Err(why) = eligible(&waiting.spec, &offer) {
                        notes.push(fatal(format!("node {node} will not do for task {task}: {why}")));
                    }
                }
            }
        }
        Move::Launch { node, generation, offer, key, expires_at, .. } => {
            if *generation < waiting.next_generation {
                notes.push(fatal(format!("task {task} gets an old generation {generation}")));
            }
            if *node < input.next_node {
                notes.push(fatal(format!("node number {node} is taken")));
            }
            if key.0.len() > 64 || !key.0.is_ascii() {
                notes.push(fatal(format!("launch key `{key}` is no client token")));
            }
            if *expires_at <= input.now {
                notes.push(fatal(format!("node {node} would be born expired")));
            }
            if let Err(why) = eligible(&waiting.spec, offer) {
                notes.push(fatal(format!("pool {} will not do for task {task}: {why}", offer.pool)));
            }
            if input.cool_downs.iter().any(|cool| cool.scope.covers(&offer.pool)) {
                notes.push(fatal(format!("pool {} refused lately", offer.pool)));
            }
            if offer.quote.price.0.0 <= 0 {
                notes.push(fatal(format!("pool {} has no price", offer.pool)));
            }
            if waiting.next_generation.0 > 1 && offer.pool.market == Market::OnDemand {
                let text = format!("task {task} falls back to on-demand in {}", offer.pool);
                notes.push(Note { severity: Severity::Warning, text });
            }
        }
    }
    notes
}

fn fatal(text: String) -> Note {
    Note { severity: Severity::Fatal, text }
}
