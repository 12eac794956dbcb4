//! Inside v1 only additions are made: compares the compiled descriptor with the blessed one.
//!
//! After an addition, `SPOTQ_BLESS=1 cargo nextest run -p spotq-proto compat` writes the blessed file anew. It refuses
//! to bless a change that breaks: such a change needs a v2.

use std::collections::BTreeMap;
use std::path::Path;

use prost::Message as _;
use prost_types::{DescriptorProto, EnumDescriptorProto, FileDescriptorSet};

#[test]
fn v1_only_grows() {
    let now = FileDescriptorSet::decode(spotq_proto::DESCRIPTOR).unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("descriptors/v1.bin");
    let bless = std::env::var_os("SPOTQ_BLESS").is_some();
    let blessed = match std::fs::read(&path) {
        Ok(bytes) => FileDescriptorSet::decode(bytes.as_slice()).unwrap(),
        Err(e) if bless && e.kind() == std::io::ErrorKind::NotFound => FileDescriptorSet::default(),
        Err(e) => panic!("cannot read {}: {e}", path.display()),
    };
    let broken = broken(&surface(&blessed), &surface(&now));
    assert!(broken.is_empty(), "these break clients of v1:\n{}", broken.join("\n"));
    if bless {
        let mut plain = now;
        for file in &mut plain.file {
            file.source_code_info = None;
        }
        std::fs::write(&path, plain.encode_to_vec()).unwrap();
    }
}

#[test]
fn the_blessed_descriptor_is_the_current_one_or_older() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("descriptors/v1.bin");
    let blessed = FileDescriptorSet::decode(std::fs::read(path).unwrap().as_slice()).unwrap();
    let surface = surface(&blessed);
    assert!(
        surface.keys().any(|name| name == "rpc spotq.v1.Jobs.Submit"),
        "the blessed file lost its services"
    );
    assert!(surface.len() > 200, "only {} entries: the blessed file was cut", surface.len());
}

/// The check itself: each kind of break is found, and an addition is not one.
#[test]
fn removals_renumberings_and_new_types_are_breaks_and_additions_are_not() {
    let now = FileDescriptorSet::decode(spotq_proto::DESCRIPTOR).unwrap();
    let old = surface(&now);
    let breaks = |change: &dyn Fn(&mut FileDescriptorSet)| {
        let mut changed = now.clone();
        change(&mut changed);
        broken(&old, &surface(&changed))
    };
    assert_eq!(breaks(&|_| {}), Vec::<String>::new());

    let removed = breaks(&|set| {
        message(set, "SubmitReply").field.pop();
    });
    assert_eq!(removed.len(), 1, "{removed:?}");
    assert!(removed[0].contains("spotq.v1.SubmitReply") && removed[0].contains("is gone"), "{removed:?}");

    assert_eq!(breaks(&|set| message(set, "SubmitReply").field[0].number = Some(99)).len(), 1);
    assert_eq!(breaks(&|set| message(set, "SubmitReply").field[0].r#type = Some(9)).len(), 1);
    assert_eq!(breaks(&|set| message(set, "SubmitReply").field[0].name = Some("other".into())).len(), 1);
    assert_eq!(breaks(&|set| message(set, "SubmitReply").field[0].label = Some(3)).len(), 1);

    let service = breaks(&|set| {
        for file in &mut set.file {
            for service in &mut file.service {
                if service.name() == "Admin" {
                    service.method[0].server_streaming = Some(true);
                    service.method.pop();
                }
            }
        }
    });
    assert_eq!(service.len(), 2, "{service:?}");

    let addition = breaks(&|set| {
        let mut field = message(set, "SubmitReply").field[0].clone();
        field.name = Some("later".into());
        field.number = Some(77);
        message(set, "SubmitReply").field.push(field);
    });
    assert_eq!(addition, Vec::<String>::new());
}

fn message<'a>(set: &'a mut FileDescriptorSet, name: &str) -> &'a mut DescriptorProto {
    set.file
        .iter_mut()
        .flat_map(|file| &mut file.message_type)
        .find(|m| m.name() == name)
        .expect("the message exists")
}

/// Every field, enum value and method by its identity on the wire, with what must stay as it is.
type Surface = BTreeMap<String, String>;

fn broken(old: &Surface, new: &Surface) -> Vec<String> {
    let mut out = Vec::new();
    for (name, was) in old {
        match new.get(name) {
            None => out.push(format!("{name} ({was}) is gone")),
            Some(is) if is != was => out.push(format!("{name} was {was}, is {is}")),
            Some(_) => {}
        }
    }
    out
}

fn surface(set: &FileDescriptorSet) -> Surface {
    let mut out = Surface::new();
    for file in &set.file {
        let package = file.package();
        for message in &file.message_type {
            add_message(package, message, &mut out);
        }
        for item in &file.enum_type {
            add_enum(package, item, &mut out);
        }
        for service in &file.service {
            for method in &service.method {
                out.insert(
                    format!("rpc {package}.{}.{}", service.name(), method.name()),
                    format!(
                        "{}{} -> {}{}",
                        stream(method.client_streaming()),
                        method.input_type(),
                        stream(method.server_streaming()),
                        method.output_type()
                    ),
                );
            }
        }
    }
    out
}

fn stream(yes: bool) -> &'static str {
    if yes { "stream " } else { "" }
}

fn add_message(scope: &str, message: &DescriptorProto, out: &mut Surface) {
    let name = format!("{scope}.{}", message.name());
    for field in &message.field {
        let oneof = field.oneof_index.map_or("", |i| message.oneof_decl[i as usize].name());
        out.insert(
            format!("field {name} #{}", field.number()),
            format!(
                "{} {:?} {:?} {} {oneof}",
                field.name(),
                field.label(),
                field.r#type(),
                field.type_name()
            ),
        );
    }
    for nested in &message.nested_type {
        add_message(&name, nested, out);
    }
    for item in &message.enum_type {
        add_enum(&name, item, out);
    }
}

fn add_enum(scope: &str, item: &EnumDescriptorProto, out: &mut Surface) {
    for value in &item.value {
        out.insert(format!("enum {scope}.{} #{}", item.name(), value.number()), value.name().to_owned());
    }
}
