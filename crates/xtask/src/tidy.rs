//! Rules of style that a compiler does not check. Each is a function from text to violations.
//!
//! A rule that the tree cannot meet yet is held by a ratchet (`tidy-exceptions.txt`): what is listed may only shrink.

mod code;
mod manifest;
mod ratchet;
mod text;

use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};

use crate::Violation;
use crate::check_deps::PURE;

/// Larger files belong in a test's set-up, not in the history.
const MAX_FILE_BYTES: u64 = 1024 * 1024;
const EXCEPTIONS: &str = "crates/xtask/tidy-exceptions.txt";

/// Checks every file that git knows or would add.
///
/// # Errors
/// When git cannot list the files, one cannot be read, or the list of exceptions is malformed.
pub fn run(root: &Path) -> anyhow::Result<Vec<Violation>> {
    let mut violations = Vec::new();
    let mut sizes = Vec::new();
    for path in files(root)? {
        let full = root.join(&path);
        // A deleted file stays listed until the deletion is staged; a link's target is checked under its own name.
        let Ok(about) = full.symlink_metadata() else { continue };
        if !about.is_file() {
            continue;
        }
        if about.len() > MAX_FILE_BYTES {
            violations.push(too_large(&path, about.len()));
            continue;
        }
        let bytes = std::fs::read(&full).with_context(|| format!("reading {path}"))?;
        let Ok(content) = String::from_utf8(bytes) else { continue };
        violations.extend(text::check(&path, &content));
        if path.ends_with(".rs") {
            let purity = if is_pure(&path) { code::Purity::Required } else { code::Purity::Free };
            let found = code::check(&path, &content, purity);
            violations.extend(found.violations);
            sizes.extend(found.sizes);
        }
        if path.ends_with("Cargo.toml") && path != "Cargo.toml" {
            violations.extend(manifest::check(&path, &content));
        }
    }
    let exceptions =
        std::fs::read_to_string(root.join(EXCEPTIONS)).with_context(|| format!("reading {EXCEPTIONS}"))?;
    violations.extend(ratchet::check(&sizes, &ratchet::parse(&exceptions)?));
    Ok(violations)
}

fn files(root: &Path) -> anyhow::Result<Vec<String>> {
    let output = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard", "-z"])
        .current_dir(root)
        .output()
        .context("starting git, which lists the files to check")?;
    if !output.status.success() {
        bail!("git ls-files failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let names = String::from_utf8(output.stdout).context("a file name in the repository is not UTF-8")?;
    let mut names: Vec<String> = names.split('\0').filter(|name| !name.is_empty()).map(Into::into).collect();
    names.sort();
    names.dedup();
    Ok(names)
}

fn too_large(path: &str, bytes: u64) -> Violation {
    Violation {
        place: path.to_owned(),
        line: 0,
        rule: "file-size",
        message: format!(
            "has {bytes} bytes, over {MAX_FILE_BYTES}; make it in the test, or fetch it from a registry"
        ),
    }
}

/// Whether a file is of a crate that decides; its own tests may use what they like.
fn is_pure(path: &str) -> bool {
    PURE.iter().any(|name| path.starts_with(&format!("crates/{name}/src/")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn git(dir: &Path, args: &[&str]) {
        assert!(Command::new("git").args(args).current_dir(dir).status().unwrap().success());
    }

    #[test]
    fn a_tree_is_checked_file_by_file_and_ignored_files_are_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, content: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        };
        git(dir.path(), &["init", "-q"]);
        write(EXCEPTIONS, "# none\n");
        write(".gitignore", "/target/\n");
        write("target/junk.rs", "no header \n");
        write("crates/core/src/lib.rs", "//! Decides.\nuse std::collections::HashMap;\n");
        write("crates/core/Cargo.toml", "[package]\nname = \"spotq-core\"\n");
        write("big.bin", &"x".repeat(1024 * 1024 + 1));
        let mut rules: Vec<_> = run(dir.path()).unwrap().into_iter().map(|v| (v.place, v.rule)).collect();
        rules.sort();
        let expected = [
            ("big.bin", "file-size"),
            ("crates/core/Cargo.toml", "lints"),
            ("crates/core/src/lib.rs", "pure"),
        ];
        assert_eq!(rules, expected.map(|(place, rule)| (place.to_owned(), rule)));
    }

    #[test]
    fn only_the_sources_of_deciding_crates_are_pure() {
        assert!(is_pure("crates/policy/src/a.rs"));
        assert!(!is_pure("crates/policy/tests/a.rs"));
        assert!(!is_pure("crates/store/src/a.rs"));
    }
}
