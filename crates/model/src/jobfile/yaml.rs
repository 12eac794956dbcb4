//! YAML text to a tree in which every key and value knows its line and column.
//!
//! Bounded in depth, in the number of nodes and in the bytes that aliases may expand to, so that a small file
//! cannot make a large tree. A key that is given twice is an error: the one that a reader overlooks would win.

use std::collections::BTreeMap;

use granit_parser::{ErrorKind, Event, Options, Parser, ScalarStyle, ScanError, Span, Tag};

use super::error::{Fault, FaultKind, Place, shown};

/// A value and where it starts.
#[derive(Debug, Clone)]
pub(super) struct Node {
    pub at: Place,
    pub kind: Kind,
}

#[derive(Debug, Clone)]
pub(super) enum Kind {
    /// `plain`: neither quoted nor a block, so that `~`, `null` and nothing at all mean "no value".
    Scalar {
        text: String,
        plain: bool,
    },
    Seq(Vec<Node>),
    Map(Vec<(Key, Node)>),
}

#[derive(Debug, Clone)]
pub(super) struct Key {
    pub at: Place,
    pub text: String,
    plain: bool,
}

impl Key {
    pub(super) fn new(at: Place, text: impl Into<String>) -> Key {
        Key { at, text: text.into(), plain: false }
    }
}

impl Node {
    pub(super) fn scalar(at: Place, text: impl Into<String>) -> Node {
        Node { at, kind: Kind::Scalar { text: text.into(), plain: false } }
    }

    pub(super) fn is_null(&self) -> bool {
        matches!(&self.kind, Kind::Scalar { text, plain: true }
            if matches!(text.as_str(), "" | "~" | "null" | "Null" | "NULL"))
    }

    /// What it is, for messages.
    pub(super) fn what(&self) -> String {
        match &self.kind {
            Kind::Scalar { .. } if self.is_null() => "nothing".into(),
            Kind::Scalar { text, .. } => shown(text),
            Kind::Seq(_) => "a list".into(),
            Kind::Map(_) => "a group of keys".into(),
        }
    }
}

/// Deeper than any job file; keeps recursion over the tree shallow.
const DEPTH_MAX: usize = 32;
/// Room for an environment of 100 000 variables; a larger tree is an alias bomb or not a job.
const NODES_MAX: usize = 250_000;
/// Twice the largest file: aliases that expand beyond are a bomb.
const BYTES_MAX: usize = 2 * super::FILE_BYTES_MAX;
/// More jobs than this in one file are a mistake.
const DOCUMENTS_MAX: usize = 1000;

/// The documents of `text` that are not empty.
pub(super) fn documents(text: &str) -> Result<Vec<Node>, Fault> {
    let mut options = Options::default();
    options.set_emit_comments(false);
    let mut builder = Builder::default();
    for item in Parser::new_from_str_with_options(text, options) {
        let (event, span) = item.map_err(|error| syntax(&error))?;
        builder.event(event, &span)?;
        if builder.documents.len() > DOCUMENTS_MAX {
            let at = builder.documents[DOCUMENTS_MAX].at;
            return Err(Fault::invalid(
                at,
                format!("more than {DOCUMENTS_MAX} documents in one file"),
                "split the file",
            ));
        }
    }
    builder.documents.retain(|node| !node.is_null());
    Ok(builder.documents)
}

#[derive(Default)]
struct Builder {
    documents: Vec<Node>,
    open: Vec<Open>,
    anchors: BTreeMap<usize, Node>,
    nodes: usize,
    bytes: usize,
}

/// A list or a map whose end has not come yet.
struct Open {
    at: Place,
    anchor: usize,
    inner: OpenKind,
}

enum OpenKind {
    Seq(Vec<Node>),
    Map { entries: Vec<(Key, Node)>, seen: BTreeMap<String, Place>, key: Option<Key>, merges: Vec<Node> },
}

impl Builder {
    fn event(&mut self, event: Event<'_>, span: &Span) -> Result<(), Fault> {
        let at = place(span);
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                check_tag(tag.as_deref(), at)?;
                let plain = style == ScalarStyle::Plain && tag.is_none();
                let node = Node { at, kind: Kind::Scalar { text: text.into_owned(), plain } };
                self.charge(&node, at)?;
                self.finish(node, anchor)
            }
            Event::SequenceStart(_, anchor, tag) => {
                check_tag(tag.as_deref(), at)?;
                self.start(Open { at, anchor, inner: OpenKind::Seq(Vec::new()) })
            }
            Event::MappingStart(_, anchor, tag) => {
                check_tag(tag.as_deref(), at)?;
                let inner = OpenKind::Map {
                    entries: Vec::new(),
                    seen: BTreeMap::new(),
                    key: None,
                    merges: Vec::new(),
                };
                self.start(Open { at, anchor, inner })
            }
            Event::SequenceEnd | Event::MappingEnd => match self.open.pop() {
                Some(Open { at, anchor, inner: OpenKind::Seq(items) }) => {
                    self.finish(Node { at, kind: Kind::Seq(items) }, anchor)
                }
                Some(Open { at, anchor, inner: OpenKind::Map { mut entries, mut seen, merges, .. } }) => {
                    for merge in merges {
                        merge_into(&mut entries, &mut seen, merge)?;
                    }
                    self.finish(Node { at, kind: Kind::Map(entries) }, anchor)
                }
                None => Ok(()),
            },
            Event::Alias(id) => {
                let Some(target) = self.anchors.get(&id) else {
                    return Err(Fault::invalid(at, "an alias that contains itself", "write the value out"));
                };
                let node = target.clone();
                self.charge(&node, at)?;
                self.finish(node, 0)
            }
            // Names of anchors are local to their document.
            Event::DocumentStart(..) => {
                self.anchors.clear();
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn start(&mut self, open: Open) -> Result<(), Fault> {
        if self.open.len() >= DEPTH_MAX {
            return Err(too_deep(open.at));
        }
        self.nodes += 1;
        self.open.push(open);
        Ok(())
    }

    /// Puts a complete node where it belongs.
    fn finish(&mut self, node: Node, anchor: usize) -> Result<(), Fault> {
        if anchor != 0 {
            self.charge(&node, node.at)?;
            self.anchors.insert(anchor, node.clone());
        }
        let Some(open) = self.open.last_mut() else {
            self.documents.push(node);
            return Ok(());
        };
        match &mut open.inner {
            OpenKind::Seq(items) => items.push(node),
            OpenKind::Map { entries, seen, key, merges } => match key.take() {
                None => *key = Some(as_key(node)?),
                Some(k) if k.plain && k.text == "<<" => merges.push(node),
                Some(k) => {
                    if let Some(first) = seen.insert(k.text.clone(), k.at) {
                        return Err(Fault::invalid(
                            k.at,
                            format!("the key {} is given twice", shown(&k.text)),
                            format!("the first is on line {}: keep one of them", first.line),
                        ));
                    }
                    entries.push((k, node));
                }
            },
        }
        Ok(())
    }

    /// Counts what a node adds to the tree, and refuses what is beyond the limits.
    fn charge(&mut self, node: &Node, at: Place) -> Result<(), Fault> {
        let (nodes, bytes) = weight(node);
        self.nodes += nodes;
        self.bytes += bytes;
        // An alias brings a subtree below those that are open.
        if self.open.len() + depth(node) > DEPTH_MAX {
            return Err(too_deep(at));
        }
        if self.nodes > NODES_MAX || self.bytes > BYTES_MAX {
            return Err(Fault::invalid(
                at,
                format!("the file expands to more than {NODES_MAX} values or {} MiB", BYTES_MAX >> 20),
                "use fewer aliases (`*name`) of large values",
            ));
        }
        Ok(())
    }
}

fn as_key(node: Node) -> Result<Key, Fault> {
    match node.kind {
        Kind::Scalar { text, plain } => Ok(Key { at: node.at, text, plain }),
        Kind::Seq(_) | Kind::Map(_) => Err(Fault::invalid(
            node.at,
            "a key is a list or a group of keys: expected a word",
            "put text that holds `{` or `[` in quotes",
        )),
    }
}

/// `<<: *base`: takes the keys of `base` that are not given here.
fn merge_into(
    entries: &mut Vec<(Key, Node)>,
    seen: &mut BTreeMap<String, Place>,
    merge: Node,
) -> Result<(), Fault> {
    let at = merge.at;
    let maps = match merge.kind {
        Kind::Map(map) => vec![map],
        Kind::Seq(items) => items
            .into_iter()
            .map(|item| match item.kind {
                Kind::Map(map) => Ok(map),
                Kind::Scalar { .. } | Kind::Seq(_) => Err(bad_merge(item.at)),
            })
            .collect::<Result<_, _>>()?,
        Kind::Scalar { .. } => return Err(bad_merge(at)),
    };
    for (key, value) in maps.into_iter().flatten() {
        if !seen.contains_key(&key.text) {
            seen.insert(key.text.clone(), key.at);
            entries.push((key, value));
        }
    }
    Ok(())
}

fn bad_merge(at: Place) -> Fault {
    Fault::invalid(at, "`<<` expects a group of keys", "write `<<: *name` with an anchor on a group of keys")
}

fn too_deep(at: Place) -> Fault {
    Fault::invalid(at, format!("nested more than {DEPTH_MAX} levels deep"), "a job file needs four levels")
}

fn weight(node: &Node) -> (usize, usize) {
    let add = |a: (usize, usize), b: (usize, usize)| (a.0 + b.0, a.1 + b.1);
    match &node.kind {
        Kind::Scalar { text, .. } => (1, text.len()),
        Kind::Seq(items) => items.iter().map(weight).fold((1, 0), add),
        Kind::Map(entries) => {
            entries.iter().map(|(k, v)| add(weight(v), (1, k.text.len()))).fold((1, 0), add)
        }
    }
}

fn depth(node: &Node) -> usize {
    match &node.kind {
        Kind::Scalar { .. } => 0,
        Kind::Seq(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        Kind::Map(entries) => 1 + entries.iter().map(|(_, v)| depth(v)).max().unwrap_or(0),
    }
}

/// Only the tags of plain YAML are known; others ask a loader to build an object of some language.
fn check_tag(tag: Option<&Tag>, at: Place) -> Result<(), Fault> {
    const KNOWN: [&str; 7] = ["bool", "float", "int", "map", "null", "seq", "str"];
    match tag {
        Some(tag) if !tag.core_suffix().is_some_and(|suffix| KNOWN.contains(&suffix)) => Err(Fault::invalid(
            at,
            format!("the tag {} is not supported", shown(&tag.original())),
            "remove it, or put text that starts with `!` in quotes",
        )),
        _ => Ok(()),
    }
}

fn place(span: &Span) -> Place {
    Place::new(span.start.line(), span.start.col() + 1)
}

fn syntax(error: &ScanError) -> Fault {
    let mark = error.marker();
    let at = Place::new(mark.line(), mark.col() + 1);
    // The scanner runs ahead of the events and has a limit of its own.
    if matches!(error.kind(), ErrorKind::RecursionLimitExceeded) {
        return too_deep(at);
    }
    let hint = match error.kind() {
        ErrorKind::TabNotAllowed
        | ErrorKind::TabInIndentation
        | ErrorKind::TabInBlockIndentation
        | ErrorKind::TabAtBlockScalarStart
        | ErrorKind::TabInPlainScalar => "indent with spaces: YAML does not allow tabs here",
        ErrorKind::UnclosedQuotedScalar => "close the quote, or put the text below `key: |`",
        ErrorKind::UnknownAnchor => {
            "define the anchor (`&name`) above, or put text that starts with `*` in quotes"
        }
        _ => {
            "expected lines of `key: value`; put text that holds `: `, `#`, `{` or `[` in quotes or below `key: |`"
        }
    };
    Fault::new(FaultKind::Syntax, at, format!("not valid YAML: {}", error.info()), hint)
}
