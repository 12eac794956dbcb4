//! A job file or script of any bytes is understood or refused with a message; what is understood survives the wire.

#![no_main]

use libfuzzer_sys::fuzz_target;
use spotq_model::jobfile::{Context, load};
use spotq_model::{JobSpec, Timestamp};
use spotq_proto::v1;

fuzz_target!(|input: (bool, &[u8])| {
    let (script, bytes) = input;
    let name = if script { "job.sh" } else { "job.yaml" };
    let context = Context { user: "fuzzer".into(), now: Timestamp(1_800_000_000_000) };
    match load(bytes, name, &[], &context) {
        Ok(parsed) => {
            assert!(!parsed.jobs.is_empty());
            for job in parsed.jobs {
                assert_eq!(JobSpec::try_from(v1::JobSpec::from(&job)), Ok(job));
            }
        }
        Err(error) => assert!(error.to_string().contains(name), "{error}"),
    }
});
