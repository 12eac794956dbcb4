//! Store addresses: `file:///dir` and `s3://bucket/prefix`.
//!
//! Must never read the process environment itself, and never speak plain HTTP to another machine unasked.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{BackoffConfig, ClientOptions, ObjectStore, RetryConfig};
use url::{Host, Url};

use crate::error::CheckpointError;
use crate::key::JobKey;
use crate::repo::{Options, Repository};

/// A whole request with its body. The client's default of 30 s would cut off a 32 MiB chunk below 1.1 MB/s.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);
/// A host that does not answer a connect in this time is down or wrong.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The client's own retries of one request. The default, ten in three minutes, is longer than any notice.
const RETRIES: usize = 4;
const RETRY_TIMEOUT: Duration = Duration::from_secs(30);

impl Repository {
    /// Opens the store that `url` names: `file:///dir` (created if absent) or `s3://bucket/prefix`.
    ///
    /// `env` is searched for `AWS_…` settings; the process environment is the usual choice. Plain HTTP is
    /// allowed to this machine, and elsewhere only with `AWS_ALLOW_HTTP=true`.
    ///
    /// # Errors
    /// `Invalid` for an address or setting that cannot be used, `Denied` or `NoSpace` for a directory that
    /// cannot be created.
    pub fn from_url(
        url: &str,
        key: JobKey,
        env: impl IntoIterator<Item = (String, String)>,
        options: Options,
    ) -> Result<Self, CheckpointError> {
        let bad =
            |why: &str| CheckpointError::invalid(format!("store address `{}`", without_secrets(url)), why);
        let parsed = Url::parse(url).map_err(|_| bad("expected file:///directory or s3://bucket/prefix"))?;
        if !parsed.username().is_empty() || parsed.password().is_some() {
            return Err(bad("it holds credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead"));
        }
        if parsed.query().is_some() || parsed.fragment().is_some() {
            return Err(bad("`?` and `#` have no meaning in it; write them as %3F and %23"));
        }
        let (store, prefix) = match parsed.scheme() {
            "file" => {
                let dir = parsed
                    .to_file_path()
                    .map_err(|()| bad("a directory is written file:///absolute/path"))?;
                (local(dir)?, Path::default())
            }
            "s3" => {
                let bucket = parsed.host_str().filter(|host| !host.is_empty());
                let bucket = bucket.ok_or_else(|| bad("the bucket is missing: s3://bucket/prefix"))?;
                let prefix = Path::from_url_path(parsed.path().trim_matches('/'))
                    .map_err(|e| bad(&format!("its prefix cannot be used: {e}")))?;
                (s3(bucket, env)?, prefix)
            }
            other => return Err(bad(&format!("`{other}` is not a kind of store; use file:// or s3://"))),
        };
        Ok(Self::open(store, prefix, key, options))
    }
}

fn local(dir: PathBuf) -> Result<Arc<dyn ObjectStore>, CheckpointError> {
    std::fs::create_dir_all(&dir).map_err(|e| CheckpointError::io("create store directory", &dir, e))?;
    let store = LocalFileSystem::new_with_prefix(&dir)
        .map_err(|e| CheckpointError::store("open", &dir.display().to_string(), e))?;
    // A commit that was reported must survive a power cut.
    Ok(Arc::new(store.with_fsync(true)))
}

fn s3(
    bucket: &str,
    env: impl IntoIterator<Item = (String, String)>,
) -> Result<Arc<dyn ObjectStore>, CheckpointError> {
    let mut builder = AmazonS3Builder::new();
    let mut endpoint = None;
    for (name, value) in env.into_iter().filter(|(name, _)| name.starts_with("AWS_")) {
        if let Ok(key) = name.to_ascii_lowercase().parse::<AmazonS3ConfigKey>() {
            if matches!(key, AmazonS3ConfigKey::Endpoint | AmazonS3ConfigKey::S3Endpoint) {
                endpoint = Some(value.clone());
            }
            builder = builder.with_config(key, value);
        }
    }
    let plain_is_safe = endpoint.as_deref().is_some_and(is_this_machine);
    if builder.get_config_value(&AmazonS3ConfigKey::Region).is_none() {
        builder = builder.with_region("us-east-1");
    }
    let mut client = ClientOptions::new().with_timeout(REQUEST_TIMEOUT).with_connect_timeout(CONNECT_TIMEOUT);
    if plain_is_safe
        || builder
            .get_config_value(&AmazonS3ConfigKey::Client(object_store::ClientConfigKey::AllowHttp))
            .as_deref()
            == Some("true")
    {
        client = client.with_allow_http(true);
    }
    let retry = RetryConfig {
        backoff: BackoffConfig { max_backoff: Duration::from_secs(2), ..BackoffConfig::default() },
        max_retries: RETRIES,
        retry_timeout: RETRY_TIMEOUT,
    };
    let store = builder.with_client_options(client).with_retry(retry).with_bucket_name(bucket).build();
    Ok(Arc::new(store.map_err(|e| CheckpointError::invalid(format!("s3://{bucket}"), e.to_string()))?))
}

fn is_this_machine(endpoint: &str) -> bool {
    match Url::parse(endpoint).ok().as_ref().and_then(Url::host) {
        Some(Host::Domain(name)) => name == "localhost",
        Some(Host::Ipv4(ip)) => ip.is_loopback(),
        Some(Host::Ipv6(ip)) => ip.is_loopback(),
        None => false,
    }
}

/// An address as it may be printed: what stands before an `@` may be a password.
fn without_secrets(url: &str) -> String {
    match (url.find("://"), url.rfind('@')) {
        (Some(scheme), Some(at)) if at > scheme => format!("{}://…@{}", &url[..scheme], &url[at + 1..]),
        _ => url.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(url: &str, env: &[(&str, &str)]) -> Result<Repository, CheckpointError> {
        let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Repository::from_url(url, JobKey([0; 32]), env, Options::default())
    }

    #[test]
    fn addresses_that_cannot_be_used_are_refused_with_a_hint() {
        for (url, hint) in [
            ("", "file:///directory"),
            ("relative/dir", "file:///directory"),
            ("gs://bucket/x", "s3://"),
            ("s3://", "bucket"),
            ("s3:///prefix", "bucket"),
            ("s3://bucket/a?b=c", "%3F"),
            ("file://host/dir", "file:///absolute"),
        ] {
            let error = open(url, &[]).unwrap_err();
            assert!(matches!(error, CheckpointError::Invalid { .. }), "{url}: {error:?}");
            let text = error.to_string();
            assert!(text.contains(hint) && text.contains(&format!("`{url}`")), "{url}: {error}");
        }
    }

    #[test]
    fn credentials_in_an_address_are_refused_and_not_repeated() {
        for url in ["s3://AKIAXXX:hunter2@bucket/x", "s3://AKIAXXX@bucket/x", "s3://:hunter2@bucket/x"] {
            let error = open(url, &[]).unwrap_err().to_string();
            assert!(!error.contains("hunter2") && !error.contains("AKIA"), "{error}");
            assert!(error.contains("AWS_SECRET_ACCESS_KEY") && error.contains("s3://…@bucket/x"), "{error}");
        }
        assert_eq!(without_secrets("a@b://c"), "a@b://c", "nothing before the scheme is a password");
    }

    /// Whether anything arrives at a port of this machine when a store with this endpoint is read.
    async fn reaches(host: &str, env: &[(&str, &str)]) -> bool {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{host}:{}", listener.local_addr().unwrap().port());
        listener.set_nonblocking(true).unwrap();
        let own = [
            ("AWS_ENDPOINT_URL", endpoint.as_str()),
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"),
        ];
        let repo = open("s3://bucket/x", &[&own, env].concat()).unwrap();
        let mut head = std::pin::pin!(repo.head());
        let arrived = std::future::poll_fn(|cx| {
            if listener.accept().is_ok() {
                return std::task::Poll::Ready(true);
            }
            // An answer without a connection can only be a refusal to speak.
            let refused = head.as_mut().poll(cx).is_ready();
            cx.waker().wake_by_ref();
            if refused { std::task::Poll::Ready(false) } else { std::task::Poll::Pending }
        });
        arrived.await
    }

    #[tokio::test]
    async fn plain_http_is_spoken_to_this_machine_and_elsewhere_only_when_asked_for() {
        assert!(reaches("127.0.0.1", &[]).await);
        // Another address than loopback by its name, though it leads here.
        assert!(!reaches("0.0.0.0", &[]).await);
        assert!(!reaches("0.0.0.0", &[("AWS_ALLOW_HTTP", "false")]).await);
        assert!(reaches("0.0.0.0", &[("AWS_ALLOW_HTTP", "true")]).await);
    }

    #[test]
    fn a_prefix_keeps_its_parts_and_odd_characters() {
        let repo = open("s3://bucket/a%20b/%C3%A9/", &[("AWS_ENDPOINT_URL", "http://127.0.0.1:1")]).unwrap();
        assert_eq!(repo.objects.path("log/1").as_ref(), "a b/\u{e9}/log/1");
    }

    #[test]
    fn a_local_directory_is_created() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("a b/c");
        open(Url::from_directory_path(&deep).unwrap().as_str(), &[]).unwrap();
        assert!(deep.is_dir());
    }

    #[test]
    fn only_this_machine_is_spoken_to_without_tls() {
        for (endpoint, here) in [
            ("http://127.0.0.1:9", true),
            ("http://127.9.9.9", true),
            ("http://localhost:9", true),
            ("http://[::1]:9", true),
            ("http://10.0.0.1:9", false),
            ("http://127.0.0.1.example.com", false),
            ("nonsense", false),
        ] {
            assert_eq!(is_this_machine(endpoint), here, "{endpoint}");
        }
    }
}
