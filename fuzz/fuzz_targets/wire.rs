//! Messages of any bytes are refused or understood; a job that is understood is the same after another trip.

#![no_main]

use libfuzzer_sys::fuzz_target;
use prost::Message as _;
use spotq_model::JobSpec;
use spotq_proto::v1;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(request) = v1::SubmitRequest::decode(bytes)
        && let Some(Ok(job)) = request.spec.map(JobSpec::try_from)
    {
        assert_eq!(JobSpec::try_from(v1::JobSpec::from(&job)), Ok(job));
    }
    let _ = v1::WorkerMessage::decode(bytes).map(|message| message.encode_to_vec());
    let _ = v1::SchedulerMessage::decode(bytes).map(|message| message.encode_to_vec());
});
