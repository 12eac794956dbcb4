//! The tower layer before all services: finds out who calls, and lets through what the table allows.

use std::convert::Infallible;
use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use http::{Request, Response, header};
use spotq_proto::Method;
use tonic::body::Body;
use tonic::{Code, Status};
use tower::{Layer, Service};

use super::lasting::while_known;
use super::table::{Rule, is_audited, rule};
use super::tls::{Peer, Security};
use super::users::{Role, Users};
use super::{Caller, Who};
use crate::audit::{Entry, Outcome};

/// Methods beside ours: a probe may ask for our health, and who may look may see which methods there are.
const HEALTH: &str = "/grpc.health.v1.Health/";
const REFLECTION: &str = "/grpc.reflection.v1.ServerReflection/";

/// Wraps all services.
#[derive(Debug, Clone)]
pub(crate) struct AuthLayer {
    /// `None`: no authentication, which is for loopback alone.
    security: Option<Arc<Security>>,
}

impl AuthLayer {
    pub(crate) fn new(security: Option<Arc<Security>>) -> Self {
        AuthLayer { security }
    }
}

impl<S> Layer<S> for AuthLayer {
    type Service = Authenticated<S>;

    fn layer(&self, inner: S) -> Authenticated<S> {
        Authenticated { inner, security: self.security.clone() }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Authenticated<S> {
    inner: S,
    security: Option<Arc<Security>>,
}

type Answer<E> = Pin<Box<dyn Future<Output = Result<Response<Body>, E>> + Send>>;

impl<S> Service<Request<Body>> for Authenticated<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answer<Infallible>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let method = Method::from_path(request.uri().path());
        let Some(security) = self.security.clone() else {
            if let Some(method) = method {
                request.extensions_mut().insert(Caller::new(Who::Local, method, Arc::default()));
            }
            return Box::pin(self.inner.call(request));
        };
        let who = security.who(&request);
        let peer = peer(&request);
        let path = request.uri().path().to_owned();
        if let Err(refused) = admit(&security, &who, peer, method, &path) {
            if refused.code() == Code::PermissionDenied || refused.code() == Code::Unauthenticated {
                security.audit.note(Entry::new(&who, peer, path, 0, Outcome::Denied));
            }
            return Box::pin(std::future::ready(Ok(refused.into_http())));
        }
        // Health and reflection have no handler of ours that would look.
        let Some(method) = method else { return Box::pin(self.inner.call(request)) };
        let user = who.name().and_then(|name| security.users().named(name).cloned());
        if who.name().is_some() && user.is_none() {
            // Removed since it was looked up above.
            let gone = Status::unauthenticated("this user was removed; log in again with `spotq login`");
            return Box::pin(std::future::ready(Ok(gone.into_http())));
        }
        let about = Arc::new(AtomicU64::new(0));
        request.extensions_mut().insert(Caller::new(who.clone(), method, about.clone()));
        let answer = self.inner.call(request);
        Box::pin(async move {
            let mut response = answer.await?;
            let outcome = outcome(&response);
            if is_audited(method) || outcome == Outcome::Denied {
                let about = about.load(Ordering::Relaxed);
                security.audit.note(Entry::new(&who, peer, path, about, outcome));
            }
            if let Some(user) = user {
                response = response.map(|body| while_known(body, security, user));
            }
            Ok(response)
        })
    }
}

/// Whether the call may go to its handler. Handlers then check exact ids.
fn admit(
    security: &Security,
    who: &Who,
    peer: Option<IpAddr>,
    method: Option<Method>,
    path: &str,
) -> Result<(), Status> {
    security.limits.take(who, peer)?;
    let needed = match method.map(rule) {
        // Its first message says which worker it is.
        Some(Rule::Worker) => return Ok(()),
        Some(Rule::AtLeast(role)) => role,
        Some(Rule::OwnJob) => Role::User,
        None if path.starts_with(HEALTH) => return Ok(()),
        None if path.starts_with(REFLECTION) => Role::Viewer,
        None => return Err(Status::unimplemented("there is no such method")),
    };
    match who.role() {
        Some(role) if role >= needed => Ok(()),
        Some(role) => Err(Status::permission_denied(format!(
            "{} has the role {role}, and {path} needs {needed}; ask an admin of the cluster",
            who.name().unwrap_or("you"),
        ))),
        None => Err(Status::unauthenticated(
            "this scheduler wants to know who you are; log in with `spotq login --server URL --ca FILE`",
        )),
    }
}

fn peer(request: &Request<Body>) -> Option<IpAddr> {
    request.extensions().get::<Peer>()?.address
}

fn outcome(response: &Response<Body>) -> Outcome {
    // An error before the first message is told in the headers.
    let code = response.headers().get("grpc-status").map(|value| Code::from_bytes(value.as_bytes()));
    match code {
        None | Some(Code::Ok) => Outcome::Allowed,
        Some(Code::PermissionDenied | Code::Unauthenticated) => Outcome::Denied,
        Some(_) => Outcome::Failed,
    }
}

impl Security {
    fn who(&self, request: &Request<Body>) -> Who {
        let shown = match Credential::of(request) {
            Some(shown) => shown,
            None => return Who::Nobody,
        };
        let user = |users: &Users| {
            let user = match &shown {
                Credential::Token(token) => users.by_token(token),
                Credential::Certificate(der) => users.by_certificate(der),
            };
            user.map(|user| Who::User { name: user.name.clone(), role: user.role })
        };
        user(&self.users()).or_else(|| user(&self.newest_users())).unwrap_or(Who::Nobody)
    }
}

/// What a request shows to prove who sent it.
enum Credential<'a> {
    Token(&'a str),
    Certificate(&'a [u8]),
}

impl<'a> Credential<'a> {
    /// A token counts before a certificate: who shows both means the token.
    fn of(request: &'a Request<Body>) -> Option<Credential<'a>> {
        if let Some(value) = request.headers().get(header::AUTHORIZATION) {
            let token = value.to_str().ok().and_then(|text| text.strip_prefix("Bearer "));
            return Some(Credential::Token(token.unwrap_or_default()));
        }
        request.extensions().get::<Peer>()?.certificate.as_deref().map(Credential::Certificate)
    }
}
