//! Commit logs of any entries: an object that is no entry is refused, and the fold never brings back what was given up.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|lines: &str| spotq_checkpoint::fuzzing::commit_log(lines));
