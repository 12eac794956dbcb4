//! The cluster's secret, sealed in the data directory. Never printed.

use std::path::Path;

use spotq_engine::seal::{Sealer, random};

use crate::error::DaemonError;

/// From which every other secret of the cluster is derived; made on the first start, readable by its owner alone.
/// One that an older version left unsealed is sealed.
pub(crate) fn cluster_secret(data: &Path, sealer: &Sealer) -> Result<[u8; 32], DaemonError> {
    let path = data.join("secret");
    let fail = |detail: String| DaemonError::Data { path: path.clone(), detail };
    if !path.try_exists().map_err(|error| fail(error.to_string()))? {
        let secret = random().map_err(|error| fail(error.to_string()))?;
        sealer.write(&path, &secret).map_err(|error| fail(error.to_string()))?;
        return Ok(secret);
    }
    let (bytes, is_sealed) = match sealer.read(&path).map_err(|error| fail(error.to_string()))? {
        Ok(bytes) => (bytes, true),
        Err(bytes) => (bytes, false),
    };
    let secret: [u8; 32] = bytes.try_into().map_err(|bytes: Vec<u8>| {
        fail(format!("has {} bytes, expected 32; restore it from a backup", bytes.len()))
    })?;
    if !is_sealed {
        sealer.write(&path, &secret).map_err(|error| fail(error.to_string()))?;
    }
    Ok(secret)
}
