//! Who may call what: identities, the table of all methods, and the layer that enforces it before any handler.
//!
//! Denies by default: a method without a row does not compile, a path that is no method is refused, and a handler
//! that finds no caller refuses by itself. Never logs a token, and compares secrets in constant time only.

mod caller;
mod lasting;
mod layer;
mod limits;
mod table;
mod tls;
mod users;
mod workers;

pub(crate) use caller::Caller;
pub(crate) use layer::AuthLayer;
pub(crate) use tls::incoming;
pub(crate) use users::replace;
pub(crate) use workers::{Admission, IDENTITY_TTL, Joins, Refused, Shown, Unbound};

pub use table::{Rule, rule};
pub use tls::{Security, SecurityError};
pub use users::{Role, TOKEN_PREFIX, User, UserError, Users};

/// As whom a request came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Who {
    /// Without authentication: the one person of this machine.
    Local,
    User {
        name: String,
        role: Role,
    },
    Nobody,
}

impl Who {
    /// `None` for nobody, who has no role at all.
    pub(crate) fn role(&self) -> Option<Role> {
        match self {
            Who::Local => Some(Role::Admin),
            Who::User { role, .. } => Some(*role),
            Who::Nobody => None,
        }
    }

    /// The name as it is known here.
    pub(crate) fn name(&self) -> Option<&str> {
        match self {
            Who::User { name, .. } => Some(name),
            Who::Local | Who::Nobody => None,
        }
    }
}
