//! Compiles the .proto files with protox, a compiler in Rust: nobody needs protoc installed.

use std::path::PathBuf;

const FILES: [&str; 3] = ["spotq/v1/types.proto", "spotq/v1/workers.proto", "spotq/v1/jobs.proto"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    use prost::Message as _;
    let descriptors = protox::compile(FILES, ["."])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("spotq_descriptor.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    for file in FILES {
        println!("cargo:rerun-if-changed={file}");
    }
    Ok(())
}
