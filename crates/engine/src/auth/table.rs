//! The table: every method of the wire with who may call it. The only place that says so.

use spotq_proto::Method;

use super::users::Role;

/// Who may call a method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// A worker of a live node, which shows who it is in the first message of its stream.
    Worker,
    /// Anyone with this role or a higher one.
    AtLeast(Role),
    /// The user whose job the request names; operators and admins any job.
    OwnJob,
}

/// The rule of a method. A new method without a line here does not compile.
#[must_use]
pub fn rule(method: Method) -> Rule {
    match method {
        Method::WorkersSession => Rule::Worker,
        Method::JobsSubmit => Rule::AtLeast(Role::User),
        Method::JobsCancel
        | Method::JobsHold
        | Method::JobsRelease
        | Method::JobsRequeue
        | Method::JobsPreempt => Rule::OwnJob,
        // What a job prints and keeps may hold anything of its user's, secrets among it.
        Method::JobsLogs | Method::JobsOutputs => Rule::OwnJob,
        // States and costs; the environments of others' jobs are left out of them.
        Method::JobsGet
        | Method::JobsList
        | Method::JobsWatch
        | Method::JobsExplain
        | Method::JobsOffers
        | Method::ReportsReport
        | Method::AdminInfo
        | Method::AdminNodes
        | Method::AdminWhoAmI => Rule::AtLeast(Role::Viewer),
        // The whole history has every job's environment in it.
        Method::ReportsEvents => Rule::AtLeast(Role::Operator),
        Method::AdminUsers => Rule::AtLeast(Role::Admin),
    }
}

/// Whether a call that was allowed goes to the audit log; one that was refused always does.
pub(crate) fn is_audited(method: Method) -> bool {
    match method {
        Method::JobsSubmit
        | Method::JobsCancel
        | Method::JobsHold
        | Method::JobsRelease
        | Method::JobsRequeue
        | Method::JobsPreempt
        | Method::JobsLogs
        | Method::JobsOutputs
        | Method::ReportsEvents
        | Method::AdminUsers
        | Method::WorkersSession => true,
        // Asked for many times a minute by everybody who waits; they show states and money only.
        Method::JobsGet
        | Method::JobsList
        | Method::JobsWatch
        | Method::JobsExplain
        | Method::JobsOffers
        | Method::ReportsReport
        | Method::AdminInfo
        | Method::AdminNodes
        | Method::AdminWhoAmI => false,
    }
}
