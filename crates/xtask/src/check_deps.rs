//! Who may use whom. The order of the crates keeps the core free of I/O and the first build of the CLI short.
//!
//! Reads what cargo says of the workspace; it never resolves anything itself.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};
use serde::Deserialize;

use crate::Violation;

/// Each crate may use only those before it, leaving aside what its tests use. Names without `spotq-`.
const ORDER: &[&str] = &[
    "model",
    "host",
    "proto",
    "policy",
    "core",
    "store",
    "store-sled",
    "store-postgres",
    "provider",
    "provider-local",
    "provider-aws",
    "provider-gcp",
    "provider-azure",
    "provider-static",
    "provider-kubernetes",
    "checkpoint",
    "finops",
    "slurm",
    "engine",
    "sim",
    "notify",
    "bills",
    "web",
    "testkit",
    "worker",
    "sim-engine",
    "examples",
    "scheduler",
    "cli",
    "tests",
    "chaos",
    "xtask",
];

/// Crates that decide, and so must give the same answer to the same question on every machine.
pub const PURE: &[&str] = &["model", "policy", "core"];

/// What a pure crate must not reach, directly or through others: runtimes, randomness, files, network.
const IMPURE: &[&str] = &[
    "async-std",
    "axum",
    "fastrand",
    "fs4",
    "getrandom",
    "hyper",
    "mio",
    "nix",
    "object_store",
    "rand",
    "rand_chacha",
    "rand_core",
    "reqwest",
    "rustix",
    "sled",
    "smol",
    "socket2",
    "tempfile",
    "tokio",
    "tonic",
    "walkdir",
];

/// Cloud SDKs take minutes to build; `spotq demo` must build without them.
const CLOUD_SDKS: &[&str] = &["aws-sdk-", "google-cloud-", "azure_"];

/// Runs all checks on the workspace at `root`.
///
/// # Errors
/// When cargo cannot say what the workspace looks like.
pub fn run(root: &Path) -> anyhow::Result<Vec<Violation>> {
    let metadata = cargo(root, &["metadata", "--no-deps", "--format-version", "1", "--locked"])?;
    let metadata: Metadata =
        serde_json::from_str(&metadata).context("reading the output of cargo metadata")?;
    let mut violations = check_order(&metadata.packages);
    for package in &metadata.packages {
        let name = short(&package.name);
        let forbidden: Forbidden = if PURE.contains(&name) {
            Forbidden::Named(IMPURE)
        } else if name == "cli" {
            Forbidden::Prefixed(CLOUD_SDKS)
        } else {
            continue;
        };
        let args = [
            "tree",
            "--locked",
            "-p",
            &package.name,
            "-e",
            "normal,build",
            "--prefix",
            "depth",
            "-f",
            " {p}",
        ];
        violations.extend(check_tree(&package.name, &cargo(root, &args)?, forbidden)?);
    }
    Ok(violations)
}

#[derive(Debug, Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Debug, Deserialize)]
struct Package {
    name: String,
    dependencies: Vec<Dependency>,
}

#[derive(Debug, Deserialize)]
struct Dependency {
    name: String,
    /// `None` for a normal dependency, else `dev` or `build`.
    kind: Option<String>,
}

#[derive(Debug, Clone, Copy)]
enum Forbidden {
    Named(&'static [&'static str]),
    Prefixed(&'static [&'static str]),
}

impl Forbidden {
    fn matches(self, package: &str) -> bool {
        match self {
            Forbidden::Named(names) => names.contains(&package),
            Forbidden::Prefixed(prefixes) => prefixes.iter().any(|prefix| package.starts_with(prefix)),
        }
    }

    fn hint(self) -> &'static str {
        match self {
            Forbidden::Named(_) => {
                "a crate that decides does no I/O and draws no numbers; move the code that needs this out of it"
            }
            Forbidden::Prefixed(_) => {
                "the CLI must build without a cloud SDK; put it behind a feature that the CLI leaves off"
            }
        }
    }
}

fn check_order(packages: &[Package]) -> Vec<Violation> {
    let place: BTreeMap<&str, usize> = ORDER.iter().enumerate().map(|(at, name)| (*name, at)).collect();
    let members: Vec<&str> = packages.iter().map(|p| p.name.as_str()).collect();
    let mut violations = Vec::new();
    let mut complain = |package: &str, message: String| {
        violations.push(Violation { place: package.to_owned(), line: 0, rule: "order", message });
    };
    for package in packages {
        let Some(own) = place.get(short(&package.name)) else {
            complain(
                &package.name,
                "has no place in the order of crates; add it to ORDER in check_deps.rs".into(),
            );
            continue;
        };
        for dependency in &package.dependencies {
            let for_tests = dependency.kind.as_deref() == Some("dev");
            if for_tests || !members.contains(&dependency.name.as_str()) {
                continue;
            }
            if place.get(short(&dependency.name)).is_none_or(|other| other >= own) {
                let message = format!(
                    "uses {}, which comes after it in the order of crates; move what both need into an earlier crate",
                    dependency.name
                );
                complain(&package.name, message);
            }
        }
    }
    violations
}

/// Reads `cargo tree --prefix depth`: each line is a depth, a blank, a name, and more.
fn check_tree(package: &str, tree: &str, forbidden: Forbidden) -> anyhow::Result<Vec<Violation>> {
    let mut path: Vec<&str> = Vec::new();
    let mut violations = Vec::new();
    for line in tree.lines().filter(|line| !line.trim().is_empty()) {
        let mut words = line.split_whitespace();
        let depth = words.next().and_then(|word| word.parse::<usize>().ok());
        let (Some(depth), Some(name)) = (depth, words.next()) else {
            bail!("cargo tree printed `{line}`: expected a depth and a name");
        };
        path.truncate(depth);
        path.push(name);
        if forbidden.matches(name) {
            let message = format!("reaches {name} ({}); {}", path.join(" -> "), forbidden.hint());
            violations.push(Violation { place: package.to_owned(), line: 0, rule: "reach", message });
        }
    }
    violations.sort();
    violations.dedup();
    Ok(violations)
}

fn short(package: &str) -> &str {
    package.strip_prefix("spotq-").unwrap_or(package)
}

fn cargo(root: &Path, args: &[&str]) -> anyhow::Result<String> {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(program).args(args).current_dir(root).output().context("starting cargo")?;
    if !output.status.success() {
        bail!("cargo {} failed: {}", args.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8(output.stdout).context("cargo printed something that is not UTF-8")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, dependencies: &[(&str, Option<&str>)]) -> Package {
        let dependencies = dependencies
            .iter()
            .map(|(name, kind)| Dependency { name: (*name).into(), kind: kind.map(Into::into) })
            .collect();
        Package { name: name.into(), dependencies }
    }

    #[test]
    fn a_crate_that_uses_a_later_one_is_reported() {
        let packages = [
            package("spotq-core", &[("spotq-engine", None), ("spotq-model", None), ("serde", None)]),
            package("spotq-engine", &[]),
            package("spotq-model", &[("spotq-core", Some("build"))]),
        ];
        let found: Vec<String> = check_order(&packages).into_iter().map(|v| v.to_string()).collect();
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].starts_with("spotq-core: [order] uses spotq-engine"), "{found:?}");
        assert!(found[1].starts_with("spotq-model: [order] uses spotq-core"), "{found:?}");
    }

    #[test]
    fn what_only_tests_use_may_come_later() {
        let packages =
            [package("spotq-store", &[("spotq-testkit", Some("dev"))]), package("spotq-testkit", &[])];
        assert_eq!(check_order(&packages), []);
    }

    #[test]
    fn a_crate_without_a_place_is_reported() {
        let found = check_order(&[package("spotq-novel", &[])]);
        assert!(found[0].message.contains("no place"), "{found:?}");
    }

    #[test]
    fn a_pure_crate_that_reaches_a_runtime_is_reported_with_the_way_there() {
        let tree =
            "0 spotq-core v0.1.0 (/x)\n1 serde v1.0.1\n1 middle v2.0.0\n2 tokio v1.54.0\n2 rand v0.9.0 (*)\n";
        let found = check_tree("spotq-core", tree, Forbidden::Named(IMPURE)).unwrap();
        assert_eq!(found.len(), 2);
        assert!(found.iter().any(|v| v.message.contains("spotq-core -> middle -> tokio")), "{found:?}");
        assert_eq!(
            check_tree("spotq-core", "0 spotq-core v1\n1 tokio-like v1\n", Forbidden::Named(IMPURE)).unwrap(),
            []
        );
    }

    #[test]
    fn a_cli_that_reaches_a_cloud_sdk_is_reported() {
        let tree = "0 spotq-cli v0.1.0\n1 aws-sdk-ec2 v1.0.0\n1 google-cloud-compute-v1 v1.0.0\n1 azure_core v0.3.0\n1 tokio v1\n";
        assert_eq!(check_tree("spotq-cli", tree, Forbidden::Prefixed(CLOUD_SDKS)).unwrap().len(), 3);
    }

    #[test]
    fn a_line_that_is_no_tree_is_an_error() {
        assert!(check_tree("spotq-cli", "warning: something\n", Forbidden::Named(IMPURE)).is_err());
    }
}
