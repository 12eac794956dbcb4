//! Whatever a metadata service answers, the watchers understand it or pass over it.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|body: &str| spotq_worker::fuzzing::notices(body));
