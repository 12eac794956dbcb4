//! About the scheduler itself.

use std::sync::Arc;

use spotq_core::NodeState;
use spotq_proto::v1;
use tonic::{Request, Response, Status};

use crate::auth::{Caller, Security};
use crate::handle::Shared;
use crate::view;

#[derive(Debug)]
pub(super) struct Admin {
    shared: Shared,
    started_ms: u64,
    security: Option<Arc<Security>>,
}

impl Admin {
    pub(super) fn new(shared: Shared, started_ms: u64, security: Option<Arc<Security>>) -> Self {
        Self { shared, started_ms, security }
    }
}

#[tonic::async_trait]
impl v1::admin_server::Admin for Admin {
    async fn info(&self, _: Request<v1::InfoRequest>) -> Result<Response<v1::InfoReply>, Status> {
        let config = self.shared.config.clone();
        let connected = u32::try_from(self.shared.sessions.connected()).unwrap_or(u32::MAX);
        let started_ms = self.started_ms;
        let reply = self.shared.handle.query(move |seen| {
            let done = seen.cluster.jobs.values().filter(|job| job.tasks.values().all(|task| task.is_done()));
            let done = u32::try_from(done.count()).unwrap_or(u32::MAX);
            let all = u32::try_from(seen.cluster.jobs.len()).unwrap_or(u32::MAX);
            v1::InfoReply {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                cluster: config.policies.cluster.clone(),
                epoch: seen.epoch.0,
                started_ms,
                jobs_active: all - done,
                jobs_done: done,
                nodes_live: u32::try_from(seen.cluster.live.len()).unwrap_or(u32::MAX),
                workers_connected: connected,
                store_url: config.checkpoint_root.clone(),
            }
        });
        Ok(Response::new(reply.await?))
    }

    async fn nodes(&self, request: Request<v1::NodesRequest>) -> Result<Response<v1::NodesReply>, Status> {
        let all = request.into_inner().include_gone;
        let nodes = self.shared.handle.query(move |seen| {
            let wanted = seen.cluster.nodes.values().filter(|node| all || node.state != NodeState::Gone);
            wanted.map(|node| view::node(node)).collect()
        });
        Ok(Response::new(v1::NodesReply { nodes: nodes.await? }))
    }
    async fn who_am_i(&self, request: Request<v1::WhoAmIRequest>) -> Result<Response<v1::UserView>, Status> {
        let caller = Caller::of(&request)?;
        let role = caller.who().role().map_or_else(String::new, |role| role.to_string());
        let name = caller.who().name().unwrap_or_default().to_owned();
        Ok(Response::new(v1::UserView { name, role }))
    }

    async fn users(&self, _: Request<v1::UsersRequest>) -> Result<Response<v1::UsersReply>, Status> {
        let users = self.security.as_ref().map(|security| security.user_views());
        let view =
            |user: &crate::auth::User| v1::UserView { name: user.name.clone(), role: user.role.to_string() };
        let users = users.iter().flat_map(|users| users.all().iter().map(view)).collect();
        Ok(Response::new(v1::UsersReply { users }))
    }
}
