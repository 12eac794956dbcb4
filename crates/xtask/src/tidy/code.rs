//! Rules on Rust source, checked on its tokens and its syntax tree, so that strings and comments are never mistaken
//! for code.

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::spanned::Spanned;
use syn::visit::Visit;

use super::ratchet::Size;
use crate::Violation;

/// Whether a file is of a crate that may know no clock, no randomness, no runtime and no order of hashing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purity {
    Required,
    Free,
}

/// What a file has to say for itself.
#[derive(Debug, Default)]
pub struct Found {
    pub violations: Vec<Violation>,
    pub sizes: Vec<Size>,
}

/// Names that a pure crate must not use, each with its reason.
const IMPURE: &[(&str, &str)] = &[
    ("HashMap", "its order differs from run to run; use BTreeMap"),
    ("HashSet", "its order differs from run to run; use BTreeSet"),
    ("SystemTime", "a decision reads no clock; take the time as an argument"),
    ("Instant", "a decision reads no clock; take the time as an argument"),
    ("tokio", "a decision runs in no runtime; move the code into the engine"),
    ("rand", "a decision draws no number; take it as an argument"),
];

/// Macros that mark a hole.
const HOLES: &[&str] = &["todo", "unimplemented"];

/// Checks one Rust file.
pub fn check(path: &str, content: &str, purity: Purity) -> Found {
    let mut found = Found::default();
    if !starts_with_header(content) {
        let message =
            "does not start with `//!`; say what the module is for and what it must never do".into();
        found.violations.push(Violation { place: path.to_owned(), line: 1, rule: "header", message });
    }
    let parsed = content.parse::<TokenStream>().map_err(|e| e.to_string());
    let file = syn::parse_file(content).map_err(|e| e.to_string());
    let (tokens, file) = match (parsed, file) {
        (Ok(tokens), Ok(file)) => (tokens, file),
        (Err(error), _) | (_, Err(error)) => {
            let message = format!("does not parse: {error}");
            found.violations.push(Violation { place: path.to_owned(), line: 0, rule: "syntax", message });
            return found;
        }
    };
    let mut scan = TokenScan { path, purity, violations: Vec::new() };
    scan.stream(tokens);
    found.violations.extend(scan.violations);

    let mut functions = Functions { path, sizes: Vec::new() };
    functions.visit_file(&file);
    found.sizes = functions.sizes;
    if !is_test_file(path) {
        let lines = content.lines().count() - test_lines(&file);
        found.sizes.push(Size { path: path.to_owned(), function: None, line: 0, lines });
    }
    found
}

fn starts_with_header(content: &str) -> bool {
    let mut lines = content.lines().skip_while(|line| line.starts_with("#!") && !line.starts_with("#!["));
    lines.next().is_some_and(|line| line.starts_with("//!"))
}

/// Tests are as long as the rules that they check; their functions are measured all the same.
fn is_test_file(path: &str) -> bool {
    path.split('/').any(|part| part == "tests" || part == "tests.rs")
}

/// Lines of the items that are built for tests only.
fn test_lines(file: &syn::File) -> usize {
    file.items
        .iter()
        .filter(|item| item_attributes(item).iter().any(is_cfg_test))
        .map(|item| item.span().end().line - item.span().start().line + 1)
        .sum()
}

fn item_attributes(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::Use(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        syn::Item::Macro(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        syn::Item::Const(item) => &item.attrs,
        _ => &[],
    }
}

fn is_cfg_test(attribute: &syn::Attribute) -> bool {
    attribute.path().is_ident("cfg")
        && attribute.parse_args::<syn::Path>().is_ok_and(|condition| condition.is_ident("test"))
}

struct Functions<'a> {
    path: &'a str,
    sizes: Vec<Size>,
}

impl Functions<'_> {
    fn measure(&mut self, signature: &syn::Signature, block: &syn::Block) {
        let first = signature.span().start().line;
        let last = block.span().end().line;
        let function = Some(signature.ident.to_string());
        self.sizes.push(Size { path: self.path.to_owned(), function, line: first, lines: last - first + 1 });
    }
}

impl<'ast> Visit<'ast> for Functions<'_> {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.measure(&item.sig, &item.block);
        syn::visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.measure(&item.sig, &item.block);
        syn::visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(block) = &item.default {
            self.measure(&item.sig, block);
        }
        syn::visit::visit_trait_item_fn(self, item);
    }
}

/// Looks at every token, also inside macros, where the syntax tree has none.
struct TokenScan<'a> {
    path: &'a str,
    purity: Purity,
    violations: Vec<Violation>,
}

impl TokenScan<'_> {
    fn stream(&mut self, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        for (at, token) in tokens.iter().enumerate() {
            match token {
                TokenTree::Ident(ident) => self.word(&tokens, at, &ident.to_string()),
                TokenTree::Group(group) => {
                    if group.delimiter() == Delimiter::Bracket && is_attribute(&tokens[..at]) {
                        self.attribute(group.stream());
                    }
                    self.stream(group.stream());
                }
                TokenTree::Punct(_) | TokenTree::Literal(_) => {}
            }
        }
    }

    fn word(&mut self, tokens: &[TokenTree], at: usize, word: &str) {
        let line = tokens[at].span().start().line;
        if HOLES.contains(&word) && is_punct(tokens.get(at + 1), '!') {
            self.complain(
                line,
                "hole",
                format!("calls `{word}!`; write the code, or an error that says what is missing"),
            );
        }
        if self.purity == Purity::Free {
            return;
        }
        if let Some((_, reason)) = IMPURE.iter().find(|(name, _)| *name == word) {
            self.complain(line, "pure", format!("uses `{word}` in a crate that decides: {reason}"));
        }
        let is_path_end = at >= 2 && is_punct(tokens.get(at - 1), ':') && is_punct(tokens.get(at - 2), ':');
        if word == "now" && is_path_end {
            self.complain(
                line,
                "pure",
                "reads the clock in a crate that decides; take the time as an argument".into(),
            );
        }
    }

    fn attribute(&mut self, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let Some(TokenTree::Ident(name)) = tokens.first() else { return };
        if name == "allow" {
            let message =
                "silences a lint by `allow`; write `#[expect(…, reason = \"…\")]`, which ends with its cause";
            self.complain(name.span().start().line, "allow", message.into());
        }
        if name == "cfg_attr"
            && let Some(TokenTree::Group(group)) = tokens.get(1)
        {
            // The attribute follows the condition and its comma.
            let inner: Vec<TokenTree> = group.stream().into_iter().collect();
            if let Some(comma) = inner.iter().position(|token| is_punct(Some(token), ',')) {
                self.attribute(inner[comma + 1..].iter().cloned().collect());
            }
        }
    }

    fn complain(&mut self, line: usize, rule: &'static str, message: String) {
        self.violations.push(Violation { place: self.path.to_owned(), line, rule, message });
    }
}

fn is_punct(token: Option<&TokenTree>, wanted: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == wanted)
}

/// Whether a bracket after these tokens is an attribute: `#[…]` or `#![…]`.
fn is_attribute(before: &[TokenTree]) -> bool {
    match before {
        [.., hash, bang] if is_punct(Some(bang), '!') => is_punct(Some(hash), '#'),
        [.., hash] => is_punct(Some(hash), '#'),
        [] => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(content: &str, purity: Purity) -> Vec<(usize, &'static str)> {
        check("src/a.rs", content, purity).violations.into_iter().map(|v| (v.line, v.rule)).collect()
    }

    fn lines_of(path: &str, content: &str) -> Vec<(Option<String>, usize)> {
        check(path, content, Purity::Free).sizes.into_iter().map(|s| (s.function, s.lines)).collect()
    }

    #[test]
    fn a_file_without_a_header_is_found() {
        assert_eq!(rules("// a\nfn f() {}\n", Purity::Free), [(1, "header")]);
        assert_eq!(rules("", Purity::Free), [(1, "header")]);
        assert_eq!(rules("#!/usr/bin/env run\n//! Fine.\n", Purity::Free), []);
        assert_eq!(rules("#![no_std]\n//! Late.\n", Purity::Free), [(1, "header")]);
    }

    #[test]
    fn holes_are_found_also_inside_macros_and_not_in_strings() {
        let code = "//! A.\nfn f() { todo!() }\nfn g() { assert!(unimplemented!(\"x\")); }\nconst A: &str = \"todo!()\";\n";
        assert_eq!(rules(code, Purity::Free), [(2, "hole"), (3, "hole")]);
    }

    #[test]
    fn silenced_lints_are_found_in_every_form() {
        let code = "//! A.\n#![allow(dead_code)]\n#[allow(unused)]\nfn f() {}\n#[cfg_attr(test, allow(unused))]\nfn g() {}\n\
            #[expect(unused, reason = \"r\")]\nfn allow() { let _ = [1, allow(2)]; }\n";
        assert_eq!(rules(code, Purity::Free), [(2, "allow"), (3, "allow"), (5, "allow")]);
    }

    #[test]
    fn impurity_is_found_in_crates_that_decide_alone() {
        let code = "//! A. tokio in a comment is fine.\nuse std::collections::{BTreeMap, HashMap, HashSet};\n\
            use std::time::SystemTime;\nuse std::time::Instant;\nfn f() { tokio::spawn(g()); }\nfn g() { rand::random() }\n\
            fn h(now: u64) { Zoned::now(); let _ = now; }\n";
        let lines: Vec<usize> = rules(code, Purity::Required).into_iter().map(|(line, _)| line).collect();
        assert_eq!(lines, [2, 2, 3, 4, 5, 6, 7]);
        assert_eq!(rules(code, Purity::Free), []);
    }

    #[test]
    fn functions_of_every_kind_are_measured_from_their_signature() {
        let code = "//! A.\n/// Doc.\n#[inline]\nfn free(\n    a: u8,\n) {\n}\nstruct S;\nimpl S {\n    pub fn method() {\n    }\n}\n\
            trait T {\n    fn given() {\n        fn inner() {}\n    }\n    fn bare();\n}\n";
        let named = |name: &str, lines| (Some(name.to_owned()), lines);
        let expected =
            [named("free", 4), named("method", 2), named("given", 3), named("inner", 1), (None, 18)];
        assert_eq!(lines_of("src/a.rs", code), expected);
    }

    #[test]
    fn tests_do_not_count_to_the_length_of_a_file() {
        let code = "//! A.\nuse a::b;\n#[cfg(test)]\nmod tests {\n    // long\n}\n";
        assert_eq!(lines_of("src/a.rs", code), [(None, 2)]);
        assert_eq!(lines_of("tests/a.rs", code), []);
        assert_eq!(lines_of("src/a.rs", "//! A.\n#[cfg(not(test))]\nmod a {\n}\n"), [(None, 4)]);
    }

    #[test]
    fn a_file_that_does_not_parse_is_found() {
        assert_eq!(rules("//! A.\nfn f( {\n", Purity::Free), [(0, "syntax")]);
        assert_eq!(rules("//! A.\nfn f() -> {}\n", Purity::Free), [(0, "syntax")]);
    }
}
