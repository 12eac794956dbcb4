//! The simulated cloud as a program of its own. Other programs of spotq become it by their name instead.

use clap::Parser;
use spotq_provider_local::{CloudArgs, cloud_main};

fn main() -> anyhow::Result<()> {
    cloud_main(CloudArgs::parse())
}
