//! Rules on the manifest of a crate: lints and versions come from the workspace's tables.

use toml::{Table, Value};

use crate::Violation;

const KINDS: &[&str] = &["dependencies", "dev-dependencies", "build-dependencies"];

/// Checks the manifest of a member.
pub fn check(path: &str, content: &str) -> Vec<Violation> {
    let complain =
        |rule: &'static str, message: String| Violation { place: path.to_owned(), line: 0, rule, message };
    let manifest: Table = match content.parse() {
        Ok(manifest) => manifest,
        Err(error) => return vec![complain("manifest", format!("is not TOML: {error}"))],
    };
    if manifest.contains_key("workspace") {
        // A workspace of its own, such as the fuzz targets', cannot take anything from this one's tables.
        return Vec::new();
    }
    let mut violations = Vec::new();
    if !from_workspace(manifest.get("lints")) {
        violations.push(complain("lints", "has no `[lints] workspace = true`; add it".into()));
    }
    let targets = manifest.get("target").and_then(Value::as_table);
    let per_target = targets.into_iter().flat_map(Table::values).filter_map(Value::as_table);
    for table in std::iter::once(&manifest).chain(per_target) {
        for kind in KINDS {
            for (name, dependency) in table.get(*kind).and_then(Value::as_table).into_iter().flatten() {
                if !from_workspace(Some(dependency)) {
                    let message = format!(
                        "`{name}` in [{kind}] has a version of its own; put it into the workspace's table, with its reason, and write `{name}.workspace = true`"
                    );
                    violations.push(complain("own-version", message));
                }
            }
        }
    }
    violations
}

fn from_workspace(entry: Option<&Value>) -> bool {
    entry.and_then(|e| e.get("workspace")).and_then(Value::as_bool) == Some(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(content: &str) -> Vec<&'static str> {
        check("crates/x/Cargo.toml", content).into_iter().map(|v| v.rule).collect()
    }

    const GOOD: &str = "[lints]\nworkspace = true\n[dependencies]\nserde.workspace = true\n\
        tokio = { workspace = true, features = [\"rt\"] }\n";

    #[test]
    fn a_workspace_of_its_own_has_its_own_tables() {
        assert_eq!(rules("[workspace]\n[dependencies]\nsyn = \"2\"\n"), [""; 0]);
    }

    #[test]
    fn a_manifest_that_takes_all_from_the_workspace_passes() {
        assert_eq!(rules(GOOD), [""; 0]);
    }

    #[test]
    fn missing_lints_are_found() {
        assert_eq!(rules("[package]\nname = \"x\"\n"), ["lints"]);
        assert_eq!(rules("[lints]\nworkspace = false\n"), ["lints"]);
    }

    #[test]
    fn own_versions_are_found_in_every_table() {
        for table in ["dev-dependencies", "build-dependencies", "target.'cfg(unix)'.dependencies"] {
            assert_eq!(rules(&format!("{GOOD}[{table}]\nsyn = \"2\"\n")), ["own-version"], "{table}");
        }
        assert_eq!(rules(&format!("{GOOD}other = {{ path = \"../other\" }}\n")), ["own-version"]);
    }

    #[test]
    fn a_manifest_that_is_no_toml_is_found() {
        assert_eq!(rules("[lints\n"), ["manifest"]);
    }
}
