//! The identity token of a GCE instance: a JWT that Google signs for an audience, with the facts of the instance.

use aws_lc_rs::signature::{RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::{CLOCK_SKEW_MS, Expected, NodeProof, ProofError};

/// A token of an instance has about two kilobytes.
const TOKEN_BYTES_MAX: usize = 16 * 1024;
/// Google's are good for an hour; one that claims much more is none of them.
const LIFETIME_MAX_S: u64 = 2 * 3600;
const ISSUERS: [&str; 2] = ["https://accounts.google.com", "accounts.google.com"];

/// Google's public keys, from its JWKS document.
#[derive(Debug, Clone)]
pub struct GceIdentity {
    keys: Vec<Key>,
}

#[derive(Debug, Clone, Deserialize)]
struct Key {
    kid: String,
    kty: String,
    n: String,
    e: String,
}

#[derive(Deserialize)]
struct Jwks {
    keys: Vec<Key>,
}

#[derive(Deserialize)]
struct Header {
    alg: String,
    kid: String,
}

#[derive(Deserialize)]
struct Claims {
    iss: String,
    aud: String,
    iat: u64,
    exp: u64,
    google: Google,
}

#[derive(Deserialize)]
struct Google {
    compute_engine: ComputeEngine,
}

#[derive(Deserialize)]
struct ComputeEngine {
    project_id: String,
    instance_id: String,
}

impl GceIdentity {
    /// From the text of the JWKS document.
    ///
    /// # Errors
    /// It is none.
    pub fn new(jwks: &str) -> Result<Self, ProofError> {
        let jwks: Jwks = serde_json::from_str(jwks).map_err(|_| ProofError::Malformed("the keys"))?;
        Ok(GceIdentity { keys: jwks.keys })
    }
}

impl NodeProof for GceIdentity {
    fn kind(&self) -> &'static str {
        "gcp-instance-identity"
    }

    fn verify(&self, proof: &str, expected: &Expected) -> Result<(), ProofError> {
        if proof.len() > TOKEN_BYTES_MAX {
            return Err(ProofError::Malformed("it is too long"));
        }
        let (signed, signature) = proof.rsplit_once('.').ok_or(ProofError::Malformed("no JWT"))?;
        let (header, claims) = signed.split_once('.').ok_or(ProofError::Malformed("no JWT"))?;
        let header: Header = decode(header)?;
        // The algorithm is ours to choose, never the token's.
        let key = self.keys.iter().find(|key| key.kid == header.kid && key.kty == "RSA");
        let key = key.filter(|_| header.alg == "RS256").ok_or(ProofError::Signature)?;
        let signature = bytes(signature)?;
        let public = RsaPublicKeyComponents { n: bytes(&key.n)?, e: bytes(&key.e)? };
        public
            .verify(&RSA_PKCS1_2048_8192_SHA256, signed.as_bytes(), &signature)
            .map_err(|_| ProofError::Signature)?;
        check(&decode(claims)?, expected)
    }
}

fn check(claims: &Claims, expected: &Expected) -> Result<(), ProofError> {
    if !ISSUERS.contains(&claims.iss.as_str()) {
        return Err(ProofError::Other("issuer"));
    }
    if claims.aud != expected.audience {
        return Err(ProofError::Other("audience"));
    }
    let now = expected.now.0;
    let from = claims.iat.saturating_mul(1000).saturating_sub(CLOCK_SKEW_MS);
    let until = claims.exp.saturating_mul(1000);
    if now < from || now >= until || claims.exp.saturating_sub(claims.iat) > LIFETIME_MAX_S {
        return Err(ProofError::Time);
    }
    let seen = &claims.google.compute_engine;
    if seen.project_id != expected.account {
        return Err(ProofError::Other("project"));
    }
    if seen.instance_id != expected.instance {
        return Err(ProofError::Other("instance"));
    }
    Ok(())
}

fn bytes(text: &str) -> Result<Vec<u8>, ProofError> {
    URL_SAFE_NO_PAD.decode(text).map_err(|_| ProofError::Malformed("no base64"))
}

fn decode<T: DeserializeOwned>(part: &str) -> Result<T, ProofError> {
    serde_json::from_slice(&bytes(part)?).map_err(|_| ProofError::Malformed("a part is missing"))
}

#[cfg(test)]
mod tests {
    use aws_lc_rs::rand::SystemRandom;
    use aws_lc_rs::rsa::{KeyPair, KeySize};
    use aws_lc_rs::signature::{KeyPair as _, RSA_PKCS1_SHA256};
    use serde_json::{Value, json};
    use spotq_model::{NodeId, Timestamp};

    use super::*;
    use crate::cloud_proof::audience;

    const NOW_S: u64 = 1_700_000_000;

    /// A signer that stands in for Google.
    struct Signer {
        pair: KeyPair,
        kid: &'static str,
    }

    impl Signer {
        fn new(kid: &'static str) -> Self {
            let pair = KeyPair::generate(KeySize::Rsa2048).unwrap();
            Signer { pair, kid }
        }

        fn jwks(&self) -> String {
            // SEQUENCE { INTEGER n, INTEGER e }: 2048 bits after a zero, then 65537.
            let der = self.pair.public_key().as_ref();
            let (n, e) = (&der[9..265], &der[267..]);
            assert_eq!(e, [1, 0, 1]);
            let text = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
            let key = json!({"kid": self.kid, "kty": "RSA", "alg": "RS256", "n": text(n), "e": text(e)});
            json!({ "keys": [key] }).to_string()
        }

        fn sign(&self, header: &Value, claims: &Value) -> String {
            let text = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
            let signed = format!("{}.{}", text(header), text(claims));
            let mut signature = vec![0; self.pair.public_modulus_len()];
            self.pair
                .sign(&RSA_PKCS1_SHA256, &SystemRandom::new(), signed.as_bytes(), &mut signature)
                .unwrap();
            format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature))
        }

        fn header(&self) -> Value {
            json!({"alg": "RS256", "kid": self.kid, "typ": "JWT"})
        }
    }

    /// In the form of a token with `format=full`.
    fn claims() -> Value {
        json!({
            "iss": "https://accounts.google.com", "aud": audience("lab", NodeId(7)), "sub": "1", "azp": "1",
            "iat": NOW_S, "exp": NOW_S + 3600, "email": "nodes@lab.iam.gserviceaccount.com", "email_verified": true,
            "google": {"compute_engine": {
                "project_id": "lab", "project_number": 1, "zone": "us-east4-a", "instance_id": "42",
                "instance_name": "node-7", "instance_creation_timestamp": NOW_S - 60,
            }},
        })
    }

    fn expected() -> Expected {
        Expected {
            audience: audience("lab", NodeId(7)),
            instance: "42".into(),
            account: "lab".into(),
            now: Timestamp(NOW_S * 1000),
        }
    }

    #[test]
    fn a_token_counts_for_its_instance_audience_and_time_alone() {
        let google = Signer::new("one");
        let verifier = GceIdentity::new(&google.jwks()).unwrap();
        let good = google.sign(&google.header(), &claims());
        assert_eq!(verifier.verify(&good, &expected()), Ok(()));
        let at = |ms: u64| verifier.verify(&good, &Expected { now: Timestamp(ms), ..expected() });
        assert_eq!(at((NOW_S + 3600) * 1000), Err(ProofError::Time));
        assert_eq!(at((NOW_S - 61) * 1000), Err(ProofError::Time));
        assert_eq!(at((NOW_S - 59) * 1000), Ok(()));
        for (pointer, value, error) in [
            ("/aud", json!("spotq:lab:8"), ProofError::Other("audience")),
            ("/iss", json!("https://accounts.example.com"), ProofError::Other("issuer")),
            ("/exp", json!(NOW_S + 10 * 3600), ProofError::Time),
            ("/google/compute_engine/project_id", json!("other"), ProofError::Other("project")),
            ("/google/compute_engine/instance_id", json!("43"), ProofError::Other("instance")),
            ("/google", json!({}), ProofError::Malformed("a part is missing")),
        ] {
            let mut changed = claims();
            *changed.pointer_mut(pointer).unwrap() = value;
            let token = google.sign(&google.header(), &changed);
            assert_eq!(verifier.verify(&token, &expected()), Err(error), "{pointer}");
        }
    }

    #[test]
    fn only_google_signs_and_only_with_its_algorithm() {
        let (google, other) = (Signer::new("one"), Signer::new("one"));
        let verifier = GceIdentity::new(&google.jwks()).unwrap();
        let forged = other.sign(&other.header(), &claims());
        assert_eq!(verifier.verify(&forged, &expected()), Err(ProofError::Signature));
        for header in [json!({"alg": "none", "kid": "one"}), json!({"alg": "HS256", "kid": "one"})] {
            let token = google.sign(&header, &claims());
            assert_eq!(verifier.verify(&token, &expected()), Err(ProofError::Signature));
        }
        let unknown = google.sign(&json!({"alg": "RS256", "kid": "two"}), &claims());
        assert_eq!(verifier.verify(&unknown, &expected()), Err(ProofError::Signature));
        let good = google.sign(&google.header(), &claims());
        let (signed, _) = good.rsplit_once('.').unwrap();
        for bad in ["", ".", "..", "a.b.c", signed, &format!("{signed}."), &"x".repeat(20_000)] {
            assert!(verifier.verify(bad, &expected()).is_err(), "{bad}");
        }
        assert!(GceIdentity::new("{}").is_err());
    }
}
