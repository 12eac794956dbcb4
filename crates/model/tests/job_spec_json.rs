//! The JSON of a job spec is read by programs and by later versions: it is compared with a file, byte by byte.

use spotq_model::jobfile::{Context, load, parse_yaml};
use spotq_model::{Command, JobSpec, Timestamp};

/// 2027-01-15T08:00:00Z.
const NOW: Timestamp = Timestamp(1_800_000_000_000);

#[test]
fn the_json_of_a_job_spec_stays_as_it_is() {
    let ctx = Context { user: "ada".into(), now: NOW };
    let parsed = parse_yaml(include_str!("golden/full.yaml"), "full.yaml", &ctx).unwrap();
    let mut json = serde_json::to_string_pretty(&parsed.jobs).unwrap();
    json.push('\n');
    assert_eq!(
        json,
        include_str!("golden/full.json"),
        "if this is meant, write the new JSON to golden/full.json"
    );
}

#[test]
fn a_job_spec_survives_a_round_trip_through_json() {
    let golden: Vec<JobSpec> = serde_json::from_str(include_str!("golden/full.json")).unwrap();
    let again: Vec<JobSpec> = serde_json::from_slice(&serde_json::to_vec(&golden).unwrap()).unwrap();
    assert_eq!(golden, again);
    let ctx = Context { user: "ada".into(), now: NOW };
    assert_eq!(golden, parse_yaml(include_str!("golden/full.yaml"), "full.yaml", &ctx).unwrap().jobs);
}

#[test]
fn each_kind_of_command_survives_a_round_trip_through_json() {
    let ctx = Context { user: "ada".into(), now: NOW };
    let script =
        load(b"#!/bin/sh\nexit 0\n", "a.sh", &["x\"y\n".into()], &ctx).unwrap().jobs.remove(0).command;
    for (command, kind) in [
        (Command::Shell { text: "a\tb".into() }, "\"kind\":\"shell\""),
        (Command::Argv { argv: vec!["é".into(), String::new()] }, "\"kind\":\"argv\""),
        (script, "\"kind\":\"script\""),
    ] {
        let json = serde_json::to_string(&command).unwrap();
        assert!(json.contains(kind), "{json}");
        assert_eq!(serde_json::from_str::<Command>(&json).unwrap(), command);
    }
}
