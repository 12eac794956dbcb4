//! The client's side of TLS: dials a scheduler and trusts the cluster's own CA and nobody else.
//!
//! Speaks TLS 1.3 only, and never falls back to plain text: an `https` address without a CA is an error.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::{CryptoProvider, aws_lc_rs};
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, version};
use tonic::transport::{Channel, Endpoint, Uri};

/// What a client must know beside the address.
#[derive(Clone, Default)]
pub struct Trust {
    /// Certificates of the CA in PEM; several during a rotation.
    pub ca_pem: String,
    /// The client's own certificate and key in PEM, if it is known by one.
    pub identity_pem: Option<String>,
}

/// The key in `identity_pem` is nobody's business.
impl std::fmt::Debug for Trust {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trust").field("ca_pem", &self.ca_pem.len()).finish_non_exhaustive()
    }
}

/// Why a TLS connection cannot even be tried.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("the CA certificate cannot be used: {0}; take `ca.pem` of the scheduler's data directory")]
    Ca(String),
    #[error("the client certificate cannot be used: {0}; take the file that `spotqd user add --cert` wrote")]
    Identity(String),
    #[error("`{0}` names no host that a certificate could be for")]
    Host(String),
    #[error(transparent)]
    Connect(#[from] tonic::transport::Error),
}

/// Connects. `endpoint` has the address and the limits; `https` needs a CA, `http` ignores `trust`.
///
/// # Errors
/// The certificates are unusable, nobody answers, or the scheduler is not the one that the CA vouches for.
pub async fn connect(endpoint: Endpoint, trust: &Trust) -> Result<Channel, TlsError> {
    if endpoint.uri().scheme_str() != Some("https") {
        return Ok(endpoint.connect().await?);
    }
    let connector = Connector::new(endpoint.uri(), trust)?;
    Ok(endpoint.connect_with_connector(Dial(connector)).await?)
}

/// As [`connect`], but dials on the first call.
///
/// # Errors
/// The certificates are unusable.
pub fn connect_lazy(endpoint: Endpoint, trust: &Trust) -> Result<Channel, TlsError> {
    if endpoint.uri().scheme_str() != Some("https") {
        return Ok(endpoint.connect_lazy());
    }
    let connector = Connector::new(endpoint.uri(), trust)?;
    Ok(endpoint.connect_with_connector_lazy(Dial(connector)))
}

/// The certificates of a PEM text; none is an error of its own.
///
/// # Errors
/// The text is no PEM, or has no certificate.
pub fn certificates(pem: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    let all = all.map_err(|e| e.to_string().to_lowercase())?;
    if all.is_empty() { Err("it has no certificate in PEM".to_owned()) } else { Ok(all) }
}

/// Roots that trust these certificates and no others.
///
/// # Errors
/// As [`certificates`], or one is no CA's certificate.
pub fn roots(pem: &str) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(pem)? {
        roots.add(certificate).map_err(|e| e.to_string().to_lowercase())?;
    }
    Ok(roots)
}

/// The cryptography of both sides, named so that a second one in the tree changes nothing.
#[must_use]
pub fn crypto() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

#[derive(Clone)]
struct Connector {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
    host: String,
    port: u16,
}

/// A handshake that takes longer is no handshake: the peer is not a scheduler.
const HANDSHAKE_MAX: Duration = Duration::from_secs(5);
/// Where `https` is without a port.
const PORT: u16 = 443;

impl Connector {
    fn new(uri: &Uri, trust: &Trust) -> Result<Self, TlsError> {
        let config = ClientConfig::builder_with_provider(crypto())
            .with_protocol_versions(&[&version::TLS13])
            .map_err(|e| TlsError::Ca(e.to_string()))?
            .with_root_certificates(roots(&trust.ca_pem).map_err(TlsError::Ca)?);
        let mut config = match &trust.identity_pem {
            None => config.with_no_client_auth(),
            Some(pem) => {
                let chain = certificates(pem).map_err(TlsError::Identity)?;
                let key = PrivateKeyDer::from_pem_slice(pem.as_bytes())
                    .map_err(|e| TlsError::Identity(e.to_string().to_lowercase()))?;
                config.with_client_auth_cert(chain, key).map_err(|e| TlsError::Identity(e.to_string()))?
            }
        };
        config.alpn_protocols = vec![b"h2".to_vec()];
        let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
        let name =
            ServerName::try_from(host.clone()).map_err(|_| TlsError::Host(uri.to_string()))?.to_owned();
        let port = uri.port_u16().unwrap_or(PORT);
        Ok(Connector { config: Arc::new(config), name, host, port })
    }

    async fn dial(self) -> io::Result<TokioIo<TlsStream<TcpStream>>> {
        let tcp = TcpStream::connect((self.host.as_str(), self.port)).await?;
        tcp.set_nodelay(true)?;
        let handshake = TlsConnector::from(self.config).connect(self.name, tcp);
        let tls = tokio::time::timeout(HANDSHAKE_MAX, handshake).await;
        let late = || io::Error::new(io::ErrorKind::TimedOut, "the TLS handshake took too long");
        Ok(TokioIo::new(tls.map_err(|_| late())??))
    }
}

#[derive(Clone)]
struct Dial(Connector);

impl tower::Service<Uri> for Dial {
    type Response = TokioIo<TlsStream<TcpStream>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        Box::pin(self.0.clone().dial())
    }
}
