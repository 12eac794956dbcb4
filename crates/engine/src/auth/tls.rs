//! The server's side of TLS, and everything that is read again without a restart: certificates, CA, users.
//!
//! Speaks TLS 1.3 only. A reload that fails keeps what was there, and says so.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, PoisonError, RwLock};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use spotq_proto::tls::{certificates, crypto, roots};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{ServerConfig, version};
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;

use super::limits::Limits;
use super::users::{UserError, Users};
use crate::audit::{AuditError, AuditLog};
use crate::config::ClusterSecret;
use crate::seal::{SealError, Sealer};

/// A client that does not finish its handshake by then is none.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// Handshakes at once: each costs some processor time, and strangers can begin as many as they like.
const HANDSHAKES: usize = 256;
/// After a failed accept, such as with too many open files.
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);
/// How often the files are looked at. A removed user is out within a second or two.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Why a secured scheduler cannot be.
#[derive(Debug, thiserror::Error)]
pub enum SecurityError {
    #[error(transparent)]
    Seal(#[from] SealError),
    #[error(transparent)]
    Users(#[from] UserError),
    #[error(transparent)]
    Audit(#[from] AuditError),
    #[error("{path}: {detail}; `spotqd rotate` makes a new certificate", path = path.display())]
    Certificate { path: PathBuf, detail: String },
}

/// Identities, certificates, limits and the audit log of a scheduler that serves beyond one person's machine.
pub struct Security {
    data: PathBuf,
    secret: ClusterSecret,
    sealer: Sealer,
    now: RwLock<Now>,
    pub(crate) audit: AuditLog,
    pub(super) limits: Limits,
}

/// What a reload changes.
struct Now {
    users: Arc<Users>,
    tls: Arc<ServerConfig>,
    ca_pem: Arc<str>,
    seen: Vec<Option<Stamp>>,
}

/// Differs when a file was written anew.
type Stamp = (SystemTime, u64, u64);

impl fmt::Debug for Security {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Security").field("data", &self.data).finish_non_exhaustive()
    }
}

impl Security {
    /// The directory of certificates; there after `spotqd init`.
    #[must_use]
    pub fn directory(data: &Path) -> PathBuf {
        data.join("tls")
    }

    /// Certificates of the CA, for everybody; the newest first.
    #[must_use]
    pub fn ca_path(data: &Path) -> PathBuf {
        Security::directory(data).join("ca.pem")
    }

    /// The server's chain and key, sealed.
    #[must_use]
    pub fn server_path(data: &Path) -> PathBuf {
        Security::directory(data).join("server.sealed")
    }

    /// Reads everything.
    ///
    /// # Errors
    /// Something is missing or damaged.
    pub fn open(data: &Path, secret: &ClusterSecret, sealer: Sealer) -> Result<Self, SecurityError> {
        let now = read(data, secret, &sealer)?;
        Ok(Security {
            data: data.to_owned(),
            secret: secret.clone(),
            sealer,
            now: RwLock::new(now),
            audit: AuditLog::open(data, secret)?,
            limits: Limits::default(),
        })
    }

    pub(super) fn users(&self) -> Arc<Users> {
        self.now().users.clone()
    }

    /// The users, read again if their file has changed: somebody unknown may have been added a moment ago.
    pub(super) fn newest_users(&self) -> Arc<Users> {
        if stamps(&self.data) != self.now().seen
            && let Err(error) = self.reload()
        {
            tracing::error!(%error, "the changed users or certificates are not used");
        }
        self.users()
    }

    pub(crate) fn user_views(&self) -> Arc<Users> {
        self.users()
    }

    /// Whom workers and clients are to trust.
    #[must_use]
    pub fn ca_pem(&self) -> Arc<str> {
        self.now().ca_pem.clone()
    }

    /// Reads everything again. What serves already goes on with what it has; new connections get the new.
    ///
    /// # Errors
    /// Something is missing or damaged; then everything stays as it was.
    pub fn reload(&self) -> Result<(), SecurityError> {
        let now = read(&self.data, &self.secret, &self.sealer)?;
        *self.now.write().unwrap_or_else(PoisonError::into_inner) = now;
        tracing::info!("users and certificates were read again");
        Ok(())
    }

    /// Reloads when a file changes, for as long as it is polled.
    pub async fn watch(&self) {
        let mut failed = None;
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let stamps = stamps(&self.data);
            if stamps == self.now().seen || failed.as_ref() == Some(&stamps) {
                continue;
            }
            if let Err(error) = self.reload() {
                tracing::error!(%error, "the changed users or certificates are not used");
                failed = Some(stamps);
            }
        }
    }

    fn now(&self) -> std::sync::RwLockReadGuard<'_, Now> {
        // It is replaced in one statement.
        self.now.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Who is at the other end of a connection.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    pub(super) address: Option<IpAddr>,
    /// In DER; our CA has signed it.
    pub(super) certificate: Option<CertificateDer<'static>>,
}

/// One connection after its handshake.
#[derive(Debug)]
pub(crate) struct Connection(TlsStream<TcpStream>);

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        let (tcp, tls) = self.0.get_ref();
        let chain = tls.peer_certificates().unwrap_or_default();
        Peer {
            address: tcp.peer_addr().ok().map(|address| address.ip()),
            certificate: chain.first().cloned(),
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, into)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, from)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(cx, from)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }
}

/// The connections of a listener, after their handshakes. Ends when the stream is dropped.
pub(crate) fn incoming(
    listener: TcpListener,
    security: Arc<Security>,
) -> ReceiverStream<io::Result<Connection>> {
    let (tx, rx) = mpsc::channel(HANDSHAKES);
    tokio::spawn(async move {
        let room = Arc::new(Semaphore::new(HANDSHAKES));
        loop {
            let accepted = tokio::select! {
                () = tx.closed() => return,
                accepted = listener.accept() => accepted,
            };
            let tcp = match accepted {
                Ok((tcp, _)) => tcp,
                Err(error) => {
                    tracing::warn!(%error, "a connection was not accepted");
                    tokio::time::sleep(ACCEPT_AGAIN).await;
                    continue;
                }
            };
            let Ok(permit) = room.clone().acquire_owned().await else { return };
            let (tx, tls) = (tx.clone(), security.now().tls.clone());
            tokio::spawn(async move {
                let _permit = permit;
                // Answers are small and waited for.
                let _ = tcp.set_nodelay(true);
                match tokio::time::timeout(HANDSHAKE_MAX, TlsAcceptor::from(tls).accept(tcp)).await {
                    Ok(Ok(tls)) => drop(tx.send(Ok(Connection(tls))).await),
                    Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
                    Err(_) => tracing::debug!("a TLS handshake took too long"),
                }
            });
        }
    });
    ReceiverStream::new(rx)
}

fn read(data: &Path, secret: &ClusterSecret, sealer: &Sealer) -> Result<Now, SecurityError> {
    // Before the files: one that changes meanwhile is read again.
    let seen = stamps(data);
    let users = Users::load(data, secret)?;
    let ca = Security::ca_path(data);
    let fail = |path: &Path, detail: String| SecurityError::Certificate { path: path.to_owned(), detail };
    let ca_pem = std::fs::read_to_string(&ca).map_err(|error| fail(&ca, error.to_string()))?;
    let trusted = roots(&ca_pem).map_err(|detail| fail(&ca, detail))?;
    let server = Security::server_path(data);
    let pem = sealer.read(&server)?.map_err(|_| fail(&server, "it is not sealed".into()))?;
    let pem = String::from_utf8(pem).map_err(|_| fail(&server, "it is no PEM".into()))?;
    let chain = certificates(&pem).map_err(|detail| fail(&server, detail))?;
    let key = PrivateKeyDer::from_pem_slice(pem.as_bytes()).map_err(|e| fail(&server, e.to_string()))?;
    let clients = WebPkiClientVerifier::builder_with_provider(Arc::new(trusted), crypto())
        .allow_unauthenticated()
        .build()
        .map_err(|e| fail(&ca, e.to_string()))?;
    let mut tls = ServerConfig::builder_with_provider(crypto())
        .with_protocol_versions(&[&version::TLS13])
        .map_err(|e| fail(&server, e.to_string()))?
        .with_client_cert_verifier(clients)
        .with_single_cert(chain, key)
        .map_err(|e| fail(&server, e.to_string()))?;
    tls.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Now { users: Arc::new(users), tls: Arc::new(tls), ca_pem: ca_pem.into(), seen })
}

fn stamps(data: &Path) -> Vec<Option<Stamp>> {
    use std::os::unix::fs::MetadataExt as _;
    let paths = [Users::path(data), Security::ca_path(data), Security::server_path(data)];
    let stamp = |path: &PathBuf| {
        let seen = std::fs::metadata(path).ok()?;
        Some((seen.modified().ok()?, seen.len(), seen.ino()))
    };
    paths.iter().map(stamp).collect()
}
