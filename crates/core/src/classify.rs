//! How an attempt ended, from all that is known about it. The order of the questions is the rule:
//! user cancel, time limit, money budget, notice or lease or cloud state, memory, launch failure, exit code.

use spotq_model::{AttemptEnd, Exit, StopWhy};

use crate::state::Attempt;

/// The signal with which the kernel's and other people's hard kills arrive.
const SIGKILL: i32 = 9;
/// Shells add this to a signal's number to make an exit code.
const SIGNAL_EXIT_BASE: i32 = 128;

/// What happened to the node, as far as we know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Loss {
    /// The node is there.
    None,
    /// The market took it back.
    Preempted,
    /// It is gone or silent for another reason.
    Lost { detail: String },
}

/// `exit` is absent if the node was lost before its worker could say how the command ended.
#[must_use]
pub fn classify(attempt: &Attempt, exit: Option<&Exit>, loss: &Loss) -> AttemptEnd {
    // A command that ended well before any of our signals reached it has completed, whatever was asked meanwhile.
    if exit.is_some_and(|e| e.exit_code == Some(0) && !e.signalled && e.launch_error.is_none()) {
        return AttemptEnd::Completed;
    }
    if let Some(stop) = attempt.stop {
        match stop.why {
            StopWhy::Cancel => return AttemptEnd::Cancelled,
            StopWhy::TimeLimit => return AttemptEnd::Timeout,
            StopWhy::Budget => return AttemptEnd::BudgetExhausted,
            StopWhy::Requeue | StopWhy::NodeExpires => return AttemptEnd::Requeued,
        }
    }
    let noticed = attempt.noticed_at.is_some();
    match loss {
        Loss::Preempted => return AttemptEnd::Preempted { noticed },
        Loss::None | Loss::Lost { .. } if noticed => return AttemptEnd::Preempted { noticed },
        Loss::Lost { detail } => return AttemptEnd::NodeLost { detail: detail.clone() },
        Loss::None => {}
    }
    match exit {
        Some(exit) => classify_exit(exit),
        None => AttemptEnd::NodeLost { detail: "its worker never said how the command ended".into() },
    }
}

fn classify_exit(exit: &Exit) -> AttemptEnd {
    if exit.out_of_memory {
        return AttemptEnd::OutOfMemory;
    }
    if let Some(message) = &exit.launch_error {
        return AttemptEnd::LaunchFailed { message: message.clone() };
    }
    if exit.worker_leaving {
        return AttemptEnd::NodeLost { detail: "its worker was told to leave the node".into() };
    }
    match (exit.exit_code, exit.signal) {
        (Some(0), _) => AttemptEnd::Completed,
        (Some(code), _) => AttemptEnd::Failed { exit_code: code },
        // Nobody of ours sent it and memory was not the reason: the host did, which is no fault of the job.
        (None, Some(SIGKILL)) if !exit.signalled => {
            AttemptEnd::NodeLost { detail: "the command was killed from outside (signal 9)".into() }
        }
        (None, Some(signal)) => AttemptEnd::Failed { exit_code: SIGNAL_EXIT_BASE.saturating_add(signal) },
        (None, None) => AttemptEnd::NodeLost {
            detail: exit.detail.clone().unwrap_or_else(|| "its worker lost the command".into()),
        },
    }
}
