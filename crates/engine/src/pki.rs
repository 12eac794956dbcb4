//! The cluster's own CA: makes it, signs servers and users with it, and replaces it while everything runs.
//!
//! A new CA is also signed by the one before it, so that whoever trusts only the old one still trusts a server of the
//! new one. The CA's key is sealed, and leaves the machine never.

use std::fmt;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, date_time_ymd,
};
use serde::{Deserialize, Serialize};
use spotq_proto::tls::certificates;

use crate::auth::{Security, replace};
use crate::seal::{SealError, Sealer, hex, random};

/// Years. A CA is replaced long before, by `spotqd rotate --ca`.
const CA_YEARS: i16 = 10;
/// Years that the certificate of a server or a user counts.
const LEAF_YEARS: i16 = 2;
/// Who has trusted the old CA has heard of the new one after this: workers hear of it twice an hour.
pub const OVERLAP_MS: u64 = 2 * 3600 * 1000;
/// Always in a server's certificate: the machine itself.
const LOOPBACK: [&str; 3] = ["localhost", "127.0.0.1", "::1"];

/// Why a certificate cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    #[error("{path} is there already: this cluster has a CA; `spotqd rotate` makes new certificates", path = path.display())]
    Exists { path: PathBuf },
    #[error("{path} is not there: this cluster has no CA; `spotqd init` makes one", path = path.display())]
    Missing { path: PathBuf },
    #[error("`{0}` is no host name or IP address")]
    Host(String),
    #[error(
        "the CA was replaced less than two hours ago, and workers may not have heard of it; wait, or add --force"
    )]
    TooEarly,
    #[error("{path}: {detail}", path = path.display())]
    File { path: PathBuf, detail: String },
    #[error("make a certificate: {0}")]
    Make(#[from] rcgen::Error),
    #[error(transparent)]
    Seal(#[from] SealError),
}

/// A certificate with its key, in PEM, for a user.
pub struct Certified {
    pub pem: String,
    /// The certificate alone, in DER.
    pub der: Vec<u8>,
}

/// It has a private key.
impl fmt::Debug for Certified {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Certified(…)")
    }
}

/// The CA of one data directory.
pub struct Pki {
    data: PathBuf,
    sealer: Sealer,
    kept: Kept,
}

#[derive(Clone, Serialize, Deserialize)]
struct Kept {
    /// Of the newest CA; a name of its own, so that two are never taken for each other.
    name: String,
    key_pem: String,
    /// Certificates that are trusted, the newest first.
    trusted: Vec<String>,
    /// Newer CAs signed by older ones, the newest first.
    crossed: Vec<String>,
    hosts: Vec<String>,
    /// When the CA was last replaced.
    replaced_ms: u64,
}

impl fmt::Debug for Pki {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pki")
            .field("data", &self.data)
            .field("hosts", &self.kept.hosts)
            .finish_non_exhaustive()
    }
}

impl Pki {
    /// Makes a CA, and a certificate for this machine and `hosts`.
    ///
    /// # Errors
    /// There is one already, or it cannot be written.
    pub fn init(data: &Path, sealer: Sealer, hosts: &[String]) -> Result<Self, PkiError> {
        let path = ca_key_path(data);
        if path.try_exists().unwrap_or(true) {
            return Err(PkiError::Exists { path });
        }
        let dir = Security::directory(data);
        std::fs::create_dir_all(&dir).map_err(|e| file(&dir, &e))?;
        let (name, key) = (ca_name()?, KeyPair::generate()?);
        let certificate = ca_params(&name).self_signed(&key)?;
        let kept = Kept {
            name,
            key_pem: key.serialize_pem(),
            trusted: vec![certificate.pem()],
            crossed: Vec::new(),
            hosts: checked(hosts)?,
            replaced_ms: 0,
        };
        let pki = Pki { data: data.to_owned(), sealer, kept };
        pki.write_trusted()?;
        pki.write_kept()?;
        pki.write_server()?;
        Ok(pki)
    }

    /// That of this directory.
    ///
    /// # Errors
    /// There is none, or it cannot be read.
    pub fn open(data: &Path, sealer: Sealer) -> Result<Self, PkiError> {
        let path = ca_key_path(data);
        if !path.try_exists().map_err(|e| file(&path, &e))? {
            return Err(PkiError::Missing { path });
        }
        let bytes = sealer.read(&path)?.map_err(|_| SealError::Wrong { path: path.clone() })?;
        let kept = serde_json::from_slice(&bytes).map_err(|_| SealError::Wrong { path })?;
        Ok(Pki { data: data.to_owned(), sealer, kept })
    }

    /// A new key and certificate for the server; `hosts` are added to those that it had.
    ///
    /// # Errors
    /// It cannot be made or written.
    pub fn renew_server(&mut self, hosts: &[String]) -> Result<(), PkiError> {
        for host in checked(hosts)? {
            if !self.kept.hosts.contains(&host) {
                self.kept.hosts.push(host);
            }
        }
        self.write_kept()?;
        self.write_server()
    }

    /// A new CA. The old ones are trusted as well, until [`Pki::forget_old`].
    ///
    /// # Errors
    /// It cannot be made or written.
    pub fn renew_ca(&mut self, now_ms: u64) -> Result<(), PkiError> {
        let (name, key) = (ca_name()?, KeyPair::generate()?);
        let params = ca_params(&name);
        let crossed = params.signed_by(&key, &self.issuer()?)?;
        let certificate = params.self_signed(&key)?;
        self.kept.trusted.insert(0, certificate.pem());
        self.kept.crossed.insert(0, crossed.pem());
        (self.kept.name, self.kept.key_pem, self.kept.replaced_ms) = (name, key.serialize_pem(), now_ms);
        // First everybody is to trust it, then it signs.
        self.write_trusted()?;
        self.write_kept()?;
        self.write_server()
    }

    /// Trusts the newest CA alone. Users' certificates of older ones count no more.
    ///
    /// # Errors
    /// It cannot be written, or workers may not know the newest yet.
    pub fn forget_old(&mut self, now_ms: u64, overlap_ms: u64) -> Result<(), PkiError> {
        if now_ms < self.kept.replaced_ms.saturating_add(overlap_ms) {
            return Err(PkiError::TooEarly);
        }
        self.kept.trusted.truncate(1);
        self.kept.crossed.clear();
        self.write_kept()?;
        self.write_server()?;
        self.write_trusted()
    }

    /// A certificate by which a user is known.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn user(&self, name: &str) -> Result<Certified, PkiError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(Vec::new())?;
        leaf(&mut params, name, ExtendedKeyUsagePurpose::ClientAuth);
        let certificate = params.signed_by(&key, &self.issuer()?)?;
        let pem = format!("{}{}", certificate.pem(), key.serialize_pem());
        Ok(Certified { pem, der: certificate.der().to_vec() })
    }

    /// Names and addresses in the server's certificate.
    #[must_use]
    pub fn hosts(&self) -> Vec<String> {
        LOOPBACK.iter().map(|host| (*host).to_owned()).chain(self.kept.hosts.iter().cloned()).collect()
    }

    fn issuer(&self) -> Result<Issuer<'static, KeyPair>, PkiError> {
        Ok(Issuer::new(ca_params(&self.kept.name), KeyPair::from_pem(&self.kept.key_pem)?))
    }

    fn write_trusted(&self) -> Result<(), PkiError> {
        let path = Security::ca_path(&self.data);
        let pem = self.kept.trusted.concat();
        certificates(&pem).map_err(|detail| PkiError::File { path: path.clone(), detail })?;
        replace(&path, pem.as_bytes()).map_err(|e| file(&path, &e))?;
        // It is for everybody.
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        std::fs::set_permissions(&path, mode).map_err(|e| file(&path, &e))
    }

    fn write_kept(&self) -> Result<(), PkiError> {
        let path = ca_key_path(&self.data);
        let text = serde_json::to_vec(&self.kept)
            .map_err(|e| PkiError::File { path: path.clone(), detail: e.to_string() })?;
        Ok(self.sealer.write(&path, &text)?)
    }

    fn write_server(&self) -> Result<(), PkiError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(self.hosts())?;
        leaf(&mut params, "spotqd", ExtendedKeyUsagePurpose::ServerAuth);
        let certificate = params.signed_by(&key, &self.issuer()?)?;
        let pem = format!("{}{}{}", certificate.pem(), self.kept.crossed.concat(), key.serialize_pem());
        Ok(self.sealer.write(&Security::server_path(&self.data), pem.as_bytes())?)
    }
}

fn ca_key_path(data: &Path) -> PathBuf {
    Security::directory(data).join("ca.sealed")
}

fn ca_name() -> Result<String, PkiError> {
    Ok(format!("spotq CA {}", hex(&random()?[..8])))
}

/// The same parameters for the same name: they are made anew each time that the CA signs.
fn ca_params(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = named(name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    counts_for(&mut params, CA_YEARS);
    params
}

fn leaf(params: &mut CertificateParams, name: &str, usage: ExtendedKeyUsagePurpose) {
    params.distinguished_name = named(name);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![usage];
    params.use_authority_key_identifier_extension = true;
    counts_for(params, LEAF_YEARS);
}

fn named(name: &str) -> DistinguishedName {
    let mut named = DistinguishedName::new();
    named.push(DnType::CommonName, name);
    named
}

/// From the day before yesterday, since clocks differ.
fn counts_for(params: &mut CertificateParams, years: i16) {
    let today = jiff::Timestamp::now().to_zoned_datetime(jiff::tz::TimeZone::UTC).date();
    let first = today.saturating_sub(jiff::Span::new().days(2));
    let last = today.saturating_add(jiff::Span::new().years(years));
    let ymd = |date: jiff::civil::Date| {
        date_time_ymd(date.year().into(), date.month().unsigned_abs(), date.day().unsigned_abs())
    };
    params.not_before = ymd(first);
    params.not_after = ymd(last);
}

fn checked(hosts: &[String]) -> Result<Vec<String>, PkiError> {
    let good = |c: char| c.is_ascii_alphanumeric() || ".-:*".contains(c);
    for host in hosts {
        if host.is_empty() || host.len() > 253 || !host.chars().all(good) {
            return Err(PkiError::Host(host.escape_debug().take(80).collect()));
        }
    }
    Ok(hosts.to_vec())
}

fn file(path: &Path, error: &std::io::Error) -> PkiError {
    PkiError::File { path: path.to_owned(), detail: error.to_string() }
}
