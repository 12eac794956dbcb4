//! `resources:` and the names of accelerators.
//!
//! An accelerator that the table does not know is passed on with a warning: the market decides what exists.

use crate::{Choice, Cloud, Resources, UsdPerHour};

use super::error::{Fault, FaultKind, Notes, Place, shown};
use super::keys;
use super::values::{MEMORY_UNITS, did_you_mean, expected, items, line, money, parse_at_least, text, truth};
use super::yaml::{Kind, Node};

/// Each candidate is compared with every offer.
const CHOICES_MAX: usize = 256;
/// No node has as many; catches a count that is really a price or a size.
const COUNT_MAX: u32 = 1024;
const WORD_CHARS_MAX: usize = 128;

/// What `resources:` says.
pub(super) struct Read {
    pub resources: Resources,
    pub use_spot: Option<bool>,
}

pub(super) fn read(node: &Node, notes: &mut Notes) -> Result<Read, Fault> {
    let mut base = Candidate::default();
    base.read("resources", node, notes)?;
    let max_hourly = base.max_hourly;
    let mut use_spot = base.use_spot;
    let mut any_of = Vec::new();
    match alternatives(node)? {
        None => base.choices(&mut any_of),
        Some((path, list)) => {
            for item in list {
                let mut candidate = base.clone();
                candidate.read(path, item, notes)?;
                // One candidate on spot is enough: on-demand is then the fallback of `spot-first`.
                use_spot = use_spot.max(candidate.use_spot);
                candidate.choices(&mut any_of);
            }
            if path == "resources.ordered" && list.len() > 1 {
                let message =
                    "the order of `resources.ordered` is not kept: the cheapest candidate with room is taken";
                notes.push(list[0].at, message);
            }
        }
    }
    if any_of.len() > CHOICES_MAX {
        let message = format!("`resources` has {} candidates, more than {CHOICES_MAX}", any_of.len());
        return Err(Fault::invalid(node.at, message, "name fewer kinds of node"));
    }
    // One candidate without a wish is no restriction at all.
    if any_of.contains(&Choice::default()) {
        any_of.clear();
    }
    Ok(Read { resources: Resources { any_of, max_hourly }, use_spot })
}

/// An accelerator by SkyPilot's spelling, from any common one; the second value is a known name that is near to one
/// that is not known.
///
/// `a100`, `A100 80GB`, `nvidia-tesla-t4` and `h100-sxm` read as `A100`, `A100-80GB`, `T4` and `H100`.
#[must_use]
pub fn accelerator_name(text: &str) -> (String, Option<Unknown>) {
    let mut plain = text.trim().to_ascii_lowercase().replace([' ', '_'], "-");
    for prefix in ["nvidia-", "tesla-"] {
        plain = plain.strip_prefix(prefix).unwrap_or(&plain).to_owned();
    }
    if let Some(name) = ACCELERATORS.iter().find(|name| name.eq_ignore_ascii_case(&plain)) {
        return ((*name).to_owned(), None);
    }
    if let Some((_, name)) = ALIASES.iter().find(|(alias, _)| *alias == plain) {
        return ((*name).to_owned(), None);
    }
    if let Some(tpu) = tpu_name(&plain) {
        return (tpu, None);
    }
    (text.trim().to_owned(), Some(Unknown { nearest: keys::nearest(&plain, ACCELERATORS.iter().copied()) }))
}

/// An accelerator that the table does not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unknown {
    /// A known name that may have been meant.
    pub nearest: Option<&'static str>,
}

/// The spellings of SkyPilot's catalogue.
const ACCELERATORS: &[&str] = &[
    "A10",
    "A100",
    "A100-80GB",
    "A10G",
    "A6000",
    "B200",
    "B300",
    "GB200",
    "GH200",
    "Gaudi",
    "H100",
    "H100-MEGA",
    "H200",
    "Inferentia",
    "Inferentia2",
    "K80",
    "L4",
    "L40",
    "L40S",
    "M60",
    "MI300X",
    "P100",
    "P4",
    "RTX6000",
    "T4",
    "T4g",
    "Trainium",
    "Trainium2",
    "V100",
    "V100-32GB",
];

/// Other spellings in use, in lower case with dashes.
const ALIASES: &[(&str, &str)] = &[
    ("a100-40gb", "A100"),
    ("a100-40g", "A100"),
    ("a100-sxm4", "A100"),
    ("a100-80g", "A100-80GB"),
    ("a100-80", "A100-80GB"),
    ("a10080gb", "A100-80GB"),
    ("a100-sxm4-80gb", "A100-80GB"),
    ("a100-pcie-80gb", "A100-80GB"),
    ("h100-80gb", "H100"),
    ("h100-80gb-hbm3", "H100"),
    ("h100-sxm", "H100"),
    ("h100-sxm5", "H100"),
    ("h200-141gb", "H200"),
    ("h200-sxm", "H200"),
    ("v100-16gb", "V100"),
    ("v100-16g", "V100"),
    ("v100-sxm2", "V100"),
    ("v100-32g", "V100-32GB"),
    ("v100-sxm2-32gb", "V100-32GB"),
    ("t4-16gb", "T4"),
    ("l4-24gb", "L4"),
    ("l40s-48gb", "L40S"),
    ("a10g-24gb", "A10G"),
    ("rtx-a6000", "A6000"),
    ("a6000-48gb", "A6000"),
    ("inf2", "Inferentia2"),
    ("trn1", "Trainium"),
    ("trn2", "Trainium2"),
];

/// Generations of TPU: what people write, and SkyPilot's spelling.
const TPUS: &[(&str, &str)] = &[
    ("v2", "v2"),
    ("v3", "v3"),
    ("v4", "v4"),
    ("v5e", "v5litepod"),
    ("v5lite", "v5litepod"),
    ("v5p", "v5p"),
    ("v5litepod", "v5litepod"),
    ("v6e", "v6e"),
];

/// `tpu-v5e-8` as `tpu-v5litepod-8`; without a number of chips the smallest slice, 8.
fn tpu_name(plain: &str) -> Option<String> {
    let mut parts = plain.strip_prefix("tpu-")?.split('-');
    let generation = parts.next()?;
    let (_, name) = TPUS.iter().find(|(alias, _)| *alias == generation)?;
    let chips = parts.next().unwrap_or("8").parse::<u32>().ok()?;
    parts.next().is_none().then(|| format!("tpu-{name}-{chips}"))
}

/// What one group of keys says; a field that is absent does not restrict.
#[derive(Debug, Clone, Default)]
struct Candidate {
    /// Any of these will do; empty: no wish.
    accelerators: Vec<(String, u32)>,
    cpus_min: u32,
    memory_gib_min: u32,
    cloud: Option<Cloud>,
    region: Option<String>,
    zone: Option<String>,
    instance_type: Option<String>,
    use_spot: Option<bool>,
    max_hourly: Option<UsdPerHour>,
}

impl Candidate {
    /// Reads the keys of a group over those that are set; `any_of` and `ordered` are left to the caller.
    fn read(&mut self, parent: &str, node: &Node, notes: &mut Notes) -> Result<(), Fault> {
        let Kind::Map(entries) = &node.kind else {
            return Err(expected(parent, "keys such as `accelerators` and `cpus`", node));
        };
        let top = parent == "resources";
        let mut infra = None;
        let mut location = None;
        for (key, value) in entries {
            let path = keys::join(parent, &key.text);
            let path = path.as_str();
            if value.is_null() && keys::RESOURCES.contains(&key.text.as_str()) {
                continue;
            }
            match key.text.as_str() {
                "accelerators" | "gpus" => self.accelerators = accelerators(path, value, notes)?,
                "cpus" => self.cpus_min = at_least(path, value, "CPUs such as 4 or 4+", &[])?,
                "memory" => {
                    self.memory_gib_min =
                        at_least(path, value, "memory in GiB such as 16 or 16+", MEMORY_UNITS)?;
                }
                "infra" => {
                    self.infra(path, value)?;
                    infra = Some(value.at);
                }
                "cloud" => {
                    self.cloud = cloud(path, value, text(path, value)?)?;
                    location = Some(value.at);
                }
                "region" => {
                    self.region = Some(word(path, value)?);
                    location = Some(value.at);
                }
                "zone" => {
                    self.zone = Some(word(path, value)?);
                    location = Some(value.at);
                }
                "use_spot" => self.use_spot = Some(truth(path, value)?),
                "max_hourly_cost" if top => self.max_hourly = Some(UsdPerHour(money(path, value)?)),
                "max_hourly_cost" => return Err(only_at_top(path, key.at)),
                "instance_type" => self.instance_type = Some(word(path, value)?),
                "any_of" | "ordered" if top => {}
                other => match keys::foreign("resources", other) {
                    Some(note) => notes.push(key.at, note),
                    None => return Err(keys::unknown("resources", other, key.at)),
                },
            }
        }
        match (infra, location) {
            (Some(at), Some(_)) => Err(Fault::invalid(
                at,
                format!("`{parent}` has both `infra` and `cloud`, `region` or `zone`"),
                "keep `infra: cloud/region/zone`",
            )),
            _ => Ok(()),
        }
    }

    /// `cloud`, `cloud/region` or `cloud/region/zone`, where `*` is any.
    fn infra(&mut self, path: &str, node: &Node) -> Result<(), Fault> {
        let value = line(path, node, 3 * WORD_CHARS_MAX)?;
        let parts: Vec<&str> = value.split('/').collect();
        if parts.len() > 3 || parts.iter().any(|part| part.is_empty()) {
            return Err(expected(path, "cloud, cloud/region or cloud/region/zone", node));
        }
        let part = |n: usize| parts.get(n).copied().filter(|part| *part != "*");
        let name = |n: usize| part(n).map(|p| word(path, &Node::scalar(node.at, p))).transpose();
        self.cloud = part(0).map(|p| cloud(path, node, p)).transpose()?.flatten();
        self.region = name(1)?;
        self.zone = name(2)?;
        Ok(())
    }

    fn choices(&self, out: &mut Vec<Choice>) {
        let choice = Choice {
            accelerator: None,
            accelerator_count: 0,
            cpus_min: self.cpus_min,
            memory_gib_min: self.memory_gib_min,
            cloud: self.cloud,
            region: self.region.clone(),
            zone: self.zone.clone(),
            instance_type: self.instance_type.clone(),
        };
        if self.accelerators.is_empty() {
            out.push(choice);
            return;
        }
        for (name, count) in &self.accelerators {
            out.push(Choice { accelerator: Some(name.clone()), accelerator_count: *count, ..choice.clone() });
        }
    }
}

/// The list below `any_of` or `ordered`, with its path.
fn alternatives(node: &Node) -> Result<Option<(&'static str, &[Node])>, Fault> {
    let Kind::Map(entries) = &node.kind else { return Ok(None) };
    let mut found: Option<(&'static str, &[Node])> = None;
    for (key, value) in entries {
        let path = match key.text.as_str() {
            "any_of" => "resources.any_of",
            "ordered" => "resources.ordered",
            _ => continue,
        };
        if value.is_null() {
            continue;
        }
        if found.is_some() {
            return Err(Fault::invalid(
                key.at,
                "`resources` has both `any_of` and `ordered`",
                "keep one of them",
            ));
        }
        let Kind::Seq(list) = &value.kind else { return Err(expected(path, "a list of candidates", value)) };
        if list.is_empty() || list.len() > CHOICES_MAX {
            let message = format!("`{path}` has {} candidates: expected 1 to {CHOICES_MAX}", list.len());
            return Err(Fault::invalid(value.at, message, "name the kinds of node that will do"));
        }
        found = Some((path, list));
    }
    Ok(found)
}

/// `A100`, `A100:8`, a list of those, or keys of the form `A100: 8`.
fn accelerators(path: &str, node: &Node, notes: &mut Notes) -> Result<Vec<(String, u32)>, Fault> {
    let mut out = Vec::new();
    match &node.kind {
        Kind::Scalar { text, .. } if text.eq_ignore_ascii_case("none") => {}
        Kind::Scalar { .. } | Kind::Seq(_) => {
            for item in items(path, node, CHOICES_MAX)? {
                out.push(accelerator(path, item, notes)?);
            }
        }
        Kind::Map(entries) => {
            for (key, value) in entries {
                // `{A100:1, V100:1}` is a set to YAML: `A100:1` is the key, and there is no value.
                let spelled = match &value.kind {
                    Kind::Scalar { .. } if value.is_null() => key.text.clone(),
                    Kind::Scalar { text, .. } => format!("{}:{text}", key.text),
                    Kind::Seq(_) | Kind::Map(_) => {
                        return Err(expected(path, "a count such as `A100: 8`", value));
                    }
                };
                out.push(accelerator(path, &Node::scalar(key.at, spelled), notes)?);
            }
        }
    }
    Ok(out)
}

fn accelerator(path: &str, node: &Node, notes: &mut Notes) -> Result<(String, u32), Fault> {
    let value = line(path, node, WORD_CHARS_MAX)?;
    let (name, count) = value.rsplit_once(':').unwrap_or((value, "1"));
    let count = match count.trim().parse::<u32>() {
        Ok(count) if (1..=COUNT_MAX).contains(&count) => count,
        _ => {
            let message = format!(
                "`{path}`: expected NAME or NAME:COUNT with a whole count from 1 to {COUNT_MAX}, found {}",
                shown(value)
            );
            return Err(Fault::invalid(node.at, message, "write for example A100-80GB:8"));
        }
    };
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ' ');
    if name.trim().is_empty() || !name.chars().all(allowed) {
        let message = format!("`{path}`: {} is not the name of an accelerator", shown(name));
        return Err(Fault::invalid(node.at, message, "write for example A100-80GB:8"));
    }
    let (name, unknown) = accelerator_name(name);
    if let Some(Unknown { nearest }) = unknown {
        let hint = nearest.map(|near| format!(", did you mean `{near}`?")).unwrap_or_default();
        notes.push(node.at, format!("`{path}`: {} is not in the table of accelerators{hint}", shown(&name)));
    }
    Ok((name, count))
}

/// Clouds that SkyPilot knows and spotq does not place on.
const OTHER_CLOUDS: &[&str] = &[
    "kubernetes",
    "k8s",
    "ssh",
    "slurm",
    "lambda",
    "runpod",
    "oci",
    "ibm",
    "cudo",
    "fluidstack",
    "paperspace",
    "do",
    "nebius",
    "vast",
    "vsphere",
    "scp",
    "hyperbolic",
    "primeintellect",
    "seeweb",
    "shadeform",
];

/// A cloud that is not ours is an error: to drop the wish would start the job, and a bill, somewhere else.
fn cloud(path: &str, node: &Node, name: &str) -> Result<Option<Cloud>, Fault> {
    match name.trim().parse::<Cloud>() {
        Ok(cloud) => Ok(Some(cloud)),
        Err(_) if OTHER_CLOUDS.contains(&name.to_ascii_lowercase().as_str()) => Err(Fault::new(
            FaultKind::Unsupported,
            node.at,
            format!("`{path}`: {} is not supported by this version", shown(name)),
            "use aws, gcp or azure, or remove it",
        )),
        Err(_) => Err(Fault::invalid(
            node.at,
            format!("`{path}`: expected aws, gcp or azure, found {}", shown(name)),
            did_you_mean(name, &["aws", "gcp", "azure"]),
        )),
    }
}

/// The name of a region, a zone or an instance type.
fn word(path: &str, node: &Node) -> Result<String, Fault> {
    let value = line(path, node, WORD_CHARS_MAX)?.trim();
    if !value.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.')) {
        return Err(expected(path, "a name of letters, digits, `-`, `_` and `.`", node));
    }
    Ok(value.to_owned())
}

fn at_least(path: &str, node: &Node, what: &str, units: &[(&str, f64)]) -> Result<u32, Fault> {
    parse_at_least(text(path, node)?, units).ok_or_else(|| expected(path, what, node))
}

fn only_at_top(path: &str, at: Place) -> Fault {
    Fault::new(
        FaultKind::Unsupported,
        at,
        format!("`{path}` is not supported by this version: one cap holds for all candidates"),
        "put `max_hourly_cost` directly below `resources:`",
    )
}
