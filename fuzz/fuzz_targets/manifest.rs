//! A manifest of any contents is refused, or all its entries lie below its directory and its sums hold.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|body: &[u8]| spotq_checkpoint::fuzzing::manifest(body));
