//! A path or link target of any bytes is refused or stays below the directory that it is restored to.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (&[u8], &[u8])| spotq_checkpoint::fuzzing::paths(input.0, input.1));
