//! Options of the command line over what a file says: an option wins, and takes what it contradicts away.

use super::error::Fault;
use super::script::option_tree;
use super::yaml::{Key, Kind, Node};

/// Options in the form of `#SPOTQ` lines, ready to be laid over documents.
pub(super) struct Overlay {
    entries: Vec<(Key, Node)>,
}

impl Overlay {
    pub(super) fn new(options: &[String]) -> Result<Overlay, Fault> {
        Ok(Overlay { entries: option_tree(options)? })
    }

    /// Lays the options over a document. One that is no group of keys is left as it is, to be refused as such.
    pub(super) fn lay_over(&self, doc: &mut Node) {
        let Kind::Map(entries) = &mut doc.kind else { return };
        for (key, value) in &self.entries {
            match (entries.iter_mut().find(|(k, _)| k.text == key.text), &value.kind) {
                (Some((_, Node { kind: Kind::Map(below), .. })), Kind::Map(above)) => {
                    let resources = key.text == "resources";
                    for (key, value) in above {
                        let gone = if resources { contradicted(&key.text) } else { &[] };
                        remove(below, &key.text, gone);
                        below.push((key.clone(), value.clone()));
                    }
                }
                (Some(slot), _) => *slot = (key.clone(), value.clone()),
                (None, _) => entries.push((key.clone(), value.clone())),
            }
        }
    }
}

/// Keys of `resources:` that say the same thing as `key` in another way.
fn contradicted(key: &str) -> &'static [&'static str] {
    match key {
        "accelerators" => &["gpus"],
        "infra" => &["cloud", "region", "zone"],
        "cloud" | "region" | "zone" => &["infra"],
        _ => &[],
    }
}

/// Removes keys from a group, and from the candidates below it.
fn remove(entries: &mut Vec<(Key, Node)>, key: &str, others: &[&str]) {
    let goes = |k: &Key| k.text == key || others.contains(&k.text.as_str());
    entries.retain(|(k, _)| !goes(k));
    for (k, value) in entries {
        let Kind::Seq(candidates) = &mut value.kind else { continue };
        if !matches!(k.text.as_str(), "any_of" | "ordered") {
            continue;
        }
        for candidate in candidates {
            if let Kind::Map(inner) = &mut candidate.kind {
                inner.retain(|(k, _)| !goes(k));
            }
        }
    }
}
