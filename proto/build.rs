//! Compiles the .proto files with protox, a compiler in Rust: nobody needs protoc installed.

use std::path::PathBuf;

const FILES: [&str; 3] = ["spotq/v1/types.proto", "spotq/v1/workers.proto", "spotq/v1/jobs.proto"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    use prost::Message as _;
    let descriptors = protox::compile(FILES, ["."])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("spotq_descriptor.bin"), descriptors.encode_to_vec())?;
    std::fs::write(out.join("methods.rs"), methods(&descriptors))?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    for file in FILES {
        println!("cargo:rerun-if-changed={file}");
    }
    Ok(())
}

/// Every method as an enum: a `match` over it cannot forget one.
fn methods(descriptors: &prost_types::FileDescriptorSet) -> String {
    let mut all = Vec::new();
    for file in &descriptors.file {
        for service in &file.service {
            for method in &service.method {
                let variant = format!("{}{}", service.name(), method.name());
                all.push((variant, format!("/{}.{}/{}", file.package(), service.name(), method.name())));
            }
        }
    }
    let lines = |line: &dyn Fn(&str, &str) -> String| -> String {
        all.iter().map(|(variant, path)| line(variant, path)).collect()
    };
    let variants = lines(&|variant, path| format!("    /// `{path}`\n    {variant},\n"));
    let list = lines(&|variant, _| format!("        Method::{variant},\n"));
    let paths = lines(&|variant, path| format!("            Method::{variant} => {path:?},\n"));
    let found = lines(&|variant, path| format!("            {path:?} => Method::{variant},\n"));
    format!(
        "/// Every method of `spotq.v1`, made from the descriptor.\n\
         #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]\npub enum Method {{\n{variants}}}\n\n\
         impl Method {{\n    pub const ALL: &[Method] = &[\n{list}    ];\n\n\
         \x20   /// As in the path of a request.\n    #[must_use]\n    pub fn path(self) -> &'static str {{\n\
         \x20       match self {{\n{paths}        }}\n    }}\n\n\
         \x20   #[must_use]\n    pub fn from_path(path: &str) -> Option<Method> {{\n\
         \x20       Some(match path {{\n{found}            _ => return None,\n        }})\n    }}\n}}\n"
    )
}
