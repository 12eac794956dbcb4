//! Ways in for the fuzz targets: what reads answers of metadata services. Must never be part of a product build.

/// Gives `body` to every parser of a cloud's notices, as if its service had answered it.
pub fn notices(body: &str) {
    crate::notice::understand(body);
}
