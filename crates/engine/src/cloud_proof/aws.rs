//! A presigned `GetCallerIdentity` of STS, the way that `aws-iam-authenticator` and Vault know nodes of AWS.
//!
//! AWS alone can tell whether the signature is good, so this part only decides whether the request may be sent to it:
//! the right host, the right call, fresh, and bound to our audience by a signed header. The role in the answer is
//! checked by [`check_answer`].

use url::Url;

use super::{CLOCK_SKEW_MS, Expected, ProofError};

/// Carries the audience; it must be among the signed headers, or anybody could add it.
pub const AUDIENCE_HEADER: &str = "x-spotq-audience";
/// A presigned request that is good for longer could be used again by whoever sees it.
const EXPIRES_MAX_S: u64 = 900;
const URL_BYTES_MAX: usize = 16 * 1024;
/// Of an instance's session in its role: `…:assumed-role/ROLE/INSTANCE`.
const ASSUMED_ROLE: &str = "assumed-role";

/// A request that may be sent: a GET of `url` with [`AUDIENCE_HEADER`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StsRequest {
    pub url: Url,
    pub audience: String,
}

/// Decides whether a presigned URL may be called.
///
/// # Errors
/// It is none of STS, stale, does something else, or is bound to another audience.
pub fn check_request(presigned: &str, expected: &Expected) -> Result<StsRequest, ProofError> {
    if presigned.len() > URL_BYTES_MAX {
        return Err(ProofError::Malformed("it is too long"));
    }
    let url = Url::parse(presigned).map_err(|_| ProofError::Malformed("no URL"))?;
    if !is_sts(&url) {
        return Err(ProofError::Host);
    }
    if one(&url, "Action")? != "GetCallerIdentity" {
        return Err(ProofError::Malformed("it calls something else"));
    }
    if one(&url, "X-Amz-Algorithm")? != "AWS4-HMAC-SHA256" {
        return Err(ProofError::Malformed("its signature is of another kind"));
    }
    one(&url, "X-Amz-Credential")?;
    one(&url, "X-Amz-Signature")?;
    let signed = one(&url, "X-Amz-SignedHeaders")?;
    let is_signed = |name: &str| signed.split(';').any(|header| header == name);
    if !is_signed("host") || !is_signed(AUDIENCE_HEADER) {
        return Err(ProofError::Malformed("host and audience are not signed"));
    }
    let lifetime: u64 =
        one(&url, "X-Amz-Expires")?.parse().map_err(|_| ProofError::Malformed("no lifetime"))?;
    let made = made_at(&one(&url, "X-Amz-Date")?)?;
    let until = made.saturating_add(lifetime.saturating_mul(1000));
    let now = expected.now.0;
    if lifetime > EXPIRES_MAX_S || now.saturating_add(CLOCK_SKEW_MS) < made || now >= until {
        return Err(ProofError::Time);
    }
    Ok(StsRequest { url, audience: expected.audience.clone() })
}

/// Whether STS, when asked, said that the caller is the expected instance in the expected account.
///
/// # Errors
/// The role's session is not that of the instance.
pub fn check_answer(arn: &str, account: &str, expected: &Expected) -> Result<(), ProofError> {
    if account != expected.account {
        return Err(ProofError::Other("account"));
    }
    // arn:PARTITION:sts::ACCOUNT:assumed-role/ROLE/INSTANCE
    let parts: Vec<&str> = arn.splitn(6, ':').collect();
    let [_, _, "sts", _, of, resource] = parts.as_slice() else {
        return Err(ProofError::Malformed("no role's session"));
    };
    let session: Vec<&str> = resource.split('/').collect();
    match session.as_slice() {
        [kind, _, instance] if *kind == ASSUMED_ROLE && *of == account => {
            if *instance == expected.instance {
                Ok(())
            } else {
                Err(ProofError::Other("instance"))
            }
        }
        _ => Err(ProofError::Malformed("no role's session")),
    }
}

/// `https://sts.amazonaws.com/` or `https://sts.REGION.amazonaws.com[.cn]/`, and nothing that only looks like it.
fn is_sts(url: &Url) -> bool {
    let plain = url.scheme() == "https"
        && url.port().is_none()
        && url.username().is_empty()
        && url.password().is_none()
        && url.path() == "/"
        && url.fragment().is_none();
    let region = |middle: &str| {
        !middle.is_empty()
            && middle.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    };
    let host = url.host_str().unwrap_or_default();
    let known = host == "sts.amazonaws.com"
        || host.strip_prefix("sts.").is_some_and(|rest| {
            let rest = rest.strip_suffix(".cn").unwrap_or(rest);
            rest.strip_suffix(".amazonaws.com").is_some_and(region)
        });
    plain && known
}

/// The only value of a parameter; with two, we and AWS might look at different ones.
fn one(url: &Url, name: &str) -> Result<String, ProofError> {
    let mut values = url.query_pairs().filter(|(key, _)| key.eq_ignore_ascii_case(name));
    match (values.next(), values.next()) {
        (Some((key, value)), None) if key == name => Ok(value.into_owned()),
        _ => Err(ProofError::Malformed("a parameter is missing or there twice")),
    }
}

/// `20231114T221320Z`
fn made_at(text: &str) -> Result<u64, ProofError> {
    let bad = || ProofError::Malformed("no time");
    let time = jiff::civil::DateTime::strptime("%Y%m%dT%H%M%SZ", text).map_err(|_| bad())?;
    let at = jiff::tz::TimeZone::UTC.to_timestamp(time).map_err(|_| bad())?;
    u64::try_from(at.as_millisecond()).map_err(|_| bad())
}

#[cfg(test)]
mod tests {
    use spotq_model::{NodeId, Timestamp};

    use super::*;
    use crate::cloud_proof::audience;

    const NOW_MS: u64 = 1_700_000_000_000;

    fn expected() -> Expected {
        Expected {
            audience: audience("lab", NodeId(7)),
            instance: "i-0123456789abcdef0".into(),
            account: "123456789012".into(),
            now: Timestamp(NOW_MS),
        }
    }

    /// In the form that the SDKs make; the signature is nobody's.
    fn sample() -> String {
        "https://sts.us-east-1.amazonaws.com/?Action=GetCallerIdentity&Version=2011-06-15&X-Amz-Algorithm=AWS4-HMAC-SHA256&\
         X-Amz-Credential=ASIAEXAMPLE%2F20231114%2Fus-east-1%2Fsts%2Faws4_request&X-Amz-Date=20231114T221320Z&\
         X-Amz-Expires=60&X-Amz-SignedHeaders=host%3Bx-spotq-audience&X-Amz-Security-Token=token&X-Amz-Signature=00ff"
            .to_owned()
    }

    #[test]
    fn a_fresh_request_to_sts_may_be_sent_and_no_other() {
        let request = check_request(&sample(), &expected()).unwrap();
        assert_eq!(request.audience, "spotq:lab:7");
        for (from, to) in [
            ("https://", "http://"),
            ("sts.us-east-1.amazonaws.com", "sts.us-east-1.amazonaws.com.example.com"),
            ("sts.us-east-1.amazonaws.com", "example.com"),
            ("sts.us-east-1.amazonaws.com", "sts.us-east-1.amazonaws.com:8443"),
            ("sts.us-east-1.amazonaws.com", "sts.amazonaws.com@example.com"),
            ("sts.us-east-1.amazonaws.com", "sts.a.b.amazonaws.com"),
            ("sts.us-east-1.amazonaws.com", "169.254.169.254"),
            (".com/?", ".com/other?"),
            ("GetCallerIdentity", "AssumeRole"),
            ("Action=GetCallerIdentity", "Action=GetCallerIdentity&Action=AssumeRole"),
            ("Action=GetCallerIdentity", "Action=GetCallerIdentity&action=AssumeRole"),
            ("%3Bx-spotq-audience", ""),
            ("host%3B", ""),
            ("AWS4-HMAC-SHA256", "AWS4-ECDSA-P256-SHA256"),
            ("&X-Amz-Signature=00ff", ""),
            ("X-Amz-Expires=60", "X-Amz-Expires=3600"),
            ("X-Amz-Expires=60", "X-Amz-Expires=-1"),
            ("20231114T221320Z", "20231114T221420Z "),
            ("20231114T221320Z", "yesterday"),
        ] {
            let changed = sample().replace(from, to);
            assert_ne!(changed, sample(), "{from}");
            assert!(check_request(&changed, &expected()).is_err(), "{changed}");
        }
        for good in ["sts.amazonaws.com", "sts.cn-north-1.amazonaws.com.cn"] {
            let changed = sample().replace("sts.us-east-1.amazonaws.com", good);
            assert!(check_request(&changed, &expected()).is_ok(), "{good}");
        }
        for (ms, fresh) in [(0, true), (59_999, true), (60_000, false)] {
            let expected = Expected { now: Timestamp(NOW_MS + ms), ..expected() };
            assert_eq!(check_request(&sample(), &expected).is_ok(), fresh, "{ms}");
        }
        let early = Expected { now: Timestamp(NOW_MS - CLOCK_SKEW_MS - 1), ..expected() };
        assert_eq!(check_request(&sample(), &early), Err(ProofError::Time));
    }

    #[test]
    fn the_answer_has_to_name_the_instance_in_its_role() {
        let account = "123456789012";
        let arn = |end: &str| format!("arn:aws:sts::123456789012:{end}");
        let good = arn("assumed-role/spotq-node/i-0123456789abcdef0");
        assert_eq!(check_answer(&good, account, &expected()), Ok(()));
        assert_eq!(check_answer(&good, "210987654321", &expected()), Err(ProofError::Other("account")));
        let other = arn("assumed-role/spotq-node/i-1");
        assert_eq!(check_answer(&other, account, &expected()), Err(ProofError::Other("instance")));
        for bad in [
            "user/i-0123456789abcdef0",
            "assumed-role/i-0123456789abcdef0",
            "assumed-role/a/b/i-0123456789abcdef0",
        ] {
            assert!(check_answer(&arn(bad), account, &expected()).is_err(), "{bad}");
        }
        assert!(check_answer("", account, &expected()).is_err());
        let elsewhere = good.replace("123456789012", "210987654321");
        assert!(check_answer(&elsewhere, account, &expected()).is_err());
    }
}
