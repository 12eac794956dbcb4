//! Good and bad inputs as tables: each bad one names a fragment of its message with line and column.

use proptest::prelude::*;

use super::*;
use crate::{Choice, Cloud, PlacementPolicy, Profile, Signal, SignalTarget, Span, Usd, UsdPerHour};

/// 2027-01-15T08:00:00Z.
const NOW: Timestamp = Timestamp(1_800_000_000_000);

fn ctx() -> Context {
    Context { user: "ada".into(), now: NOW }
}

fn yaml(text: &str) -> Result<Parsed, JobFileError> {
    parse_yaml(text, "job.yaml", &ctx())
}

fn script(text: &str) -> Result<Parsed, JobFileError> {
    parse_script(text, "train.sh", &[], &ctx())
}

/// The only job of a file that must be good.
fn job(text: &str) -> JobSpec {
    let parsed = yaml(text).unwrap_or_else(|error| panic!("{error}\n--- of\n{text}"));
    assert_eq!(parsed.jobs.len(), 1, "{text}");
    parsed.jobs.into_iter().next().unwrap()
}

fn warnings(parsed: &Parsed) -> String {
    parsed.warnings.iter().map(|note| format!("{note}\n")).collect()
}

/// Checks that each text is refused with a message that holds every fragment.
fn refused(parse: impl Fn(&str) -> Result<Parsed, JobFileError>, table: &[(&str, &[&str])]) {
    for (text, fragments) in table {
        let start: String = text.chars().take(300).collect();
        let error = parse(text).expect_err(&start).to_string();
        for fragment in *fragments {
            assert!(error.contains(fragment), "`{fragment}` is not in\n{error}\n--- of\n{start}");
        }
    }
}

const FULL: &str = r#"
name: nightly ✨
workdir: src
setup: pip install -r requirements.txt
run: |
  python train.py
  echo done
envs: {MODEL: 13b, DEBUG: true, EMPTY: "", LR: 1e-3}
resources:
  accelerators: A100-80GB:8
  cpus: 4+
  memory: 16+
  infra: aws/us-east-1/us-east-1a
  instance_type: p4de.24xlarge
  use_spot: true
  max_hourly_cost: 12.5
checkpoint:
  dir: ckpt
  interval: 10m
  signal: SIGUSR1
  signal_target: launcher
  grace: 45s
  profile: orbax
  complete_when: "*/DONE"
  keep: 5
policy: spot-only
budget: $25.50
project: vision
tags: {team: nlp, empty: }
time_limit: 1h30m
retry: {preemptions: 20, failures: 3, exit_codes: [1, 139]}
priority: -5
begin: 2027-01-15T10:00:00+01:00
hold: yes
outputs: ["out/**", final.bin]
num_nodes: 1
"#;

#[test]
fn a_full_job_file_is_read_to_the_last_key() {
    let spec = job(FULL);
    assert_eq!((spec.name.as_str(), spec.user.as_str()), ("nightly ✨", "ada"));
    assert_eq!(spec.command, Command::Shell { text: "python train.py\necho done\n".into() });
    assert_eq!(spec.setup.as_deref(), Some("pip install -r requirements.txt"));
    assert_eq!(spec.workdir.as_deref(), Some("src"));
    let env: Vec<_> = spec.env.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    assert_eq!(env, [("DEBUG", "true"), ("EMPTY", ""), ("LR", "1e-3"), ("MODEL", "13b")]);
    let choice = Choice {
        accelerator: Some("A100-80GB".into()),
        accelerator_count: 8,
        cpus_min: 4,
        memory_gib_min: 16,
        cloud: Some(Cloud::Aws),
        region: Some("us-east-1".into()),
        zone: Some("us-east-1a".into()),
        instance_type: Some("p4de.24xlarge".into()),
    };
    assert_eq!(spec.resources.any_of, [choice]);
    assert_eq!(spec.resources.max_hourly, Some(UsdPerHour(Usd(12_500_000_000))));
    assert_eq!(spec.checkpoint.dir.as_deref(), Some("ckpt"));
    assert_eq!(spec.checkpoint.interval, Some(Span::secs(600)));
    assert_eq!(spec.checkpoint.signal, Some(Signal::Usr1));
    assert_eq!(spec.checkpoint.signal_target, SignalTarget::Launcher);
    assert_eq!((spec.checkpoint.grace, spec.checkpoint.keep), (Span::secs(45), 5));
    assert_eq!(spec.checkpoint.profile, Profile::Orbax);
    assert_eq!(spec.checkpoint.complete_when.as_deref(), Some("*/DONE"));
    assert_eq!(spec.policy, PlacementPolicy::SpotOnly);
    assert_eq!(spec.budget, Some(Usd(25_500_000_000)));
    assert_eq!(spec.project.as_deref(), Some("vision"));
    assert_eq!((spec.tags["team"].as_str(), spec.tags["empty"].as_str()), ("nlp", ""));
    assert_eq!(spec.time_limit, Some(Span::secs(5400)));
    assert_eq!((spec.retry.preemptions, spec.retry.failures), (Some(20), 3));
    assert_eq!(spec.retry.exit_codes, [1, 139]);
    assert_eq!((spec.priority, spec.hold), (-5, true));
    assert_eq!(spec.begin, Some(NOW + Span::secs(3600)));
    assert_eq!(spec.outputs, ["out/**", "final.bin"]);
}

#[test]
fn a_job_needs_no_more_than_a_command() {
    let spec = job("run: python train.py");
    assert_eq!(spec.name, "job");
    assert_eq!(spec.policy, PlacementPolicy::SpotFirst);
    assert_eq!(spec.resources, crate::Resources::default());
    assert_eq!(spec.retry, crate::Retry::default());
    assert_eq!(spec.checkpoint, crate::CheckpointSpec::default());
}

#[test]
fn a_key_without_a_value_is_as_good_as_absent() {
    let text =
        "run: x\nname:\nenvs:\nresources: ~\ncheckpoint: {dir: null, keep: }\nretry: {failures: }\nbudget:\n";
    let plain = job("run: x");
    assert_eq!(job(text), plain);
}

#[test]
fn every_known_key_is_read_and_none_is_called_unknown() {
    for (parent, known) in [
        ("", keys::TOP),
        ("resources", keys::RESOURCES),
        ("checkpoint", keys::CHECKPOINT),
        ("retry", keys::RETRY),
    ] {
        for key in known {
            let text = match parent {
                "" => format!("{key}: {{zz: 1}}\n"),
                _ => format!("{parent}:\n  {key}: {{zz: 1}}\n"),
            };
            let outcome =
                yaml(&text).expect_err("a group of keys under `zz` is wrong everywhere, or `run` is missing");
            assert!(!outcome.to_string().contains(&format!("unknown key `{key}`")), "{outcome}");
        }
    }
}

#[test]
fn accelerators_are_read_in_every_form_of_skypilot() {
    let read = |value: &str| -> Vec<(Option<String>, u32)> {
        job(&format!("run: x\nresources:\n  accelerators: {value}\n"))
            .resources
            .any_of
            .into_iter()
            .map(|choice| (choice.accelerator, choice.accelerator_count))
            .collect()
    };
    let gpu = |name: &str, count| (Some(name.to_owned()), count);
    for (value, want) in [
        ("A100", vec![gpu("A100", 1)]),
        ("A100-80GB", vec![gpu("A100-80GB", 1)]),
        ("A100-80GB:8", vec![gpu("A100-80GB", 8)]),
        ("a100 80gb", vec![gpu("A100-80GB", 1)]),
        ("nvidia-tesla-t4:2", vec![gpu("T4", 2)]),
        ("[H100:8, l4]", vec![gpu("H100", 8), gpu("L4", 1)]),
        ("{A100: 4, V100: 8}", vec![gpu("A100", 4), gpu("V100", 8)]),
        ("{A100:1, V100:1}", vec![gpu("A100", 1), gpu("V100", 1)]),
        ("tpu-v5e-16", vec![gpu("tpu-v5litepod-16", 1)]),
        ("TPU-V6E", vec![gpu("tpu-v6e-8", 1)]),
        ("none", vec![]),
    ] {
        assert_eq!(read(value), want, "{value}");
    }
}

#[test]
fn an_accelerator_that_nobody_knows_is_a_warning_with_the_nearest() {
    let parsed = yaml("run: x\nresources:\n  accelerators: [A100-8GB, Quantum9]\n").unwrap();
    assert_eq!(
        warnings(&parsed),
        "job.yaml:3:18: `resources.accelerators`: `A100-8GB` is not in the table of accelerators, did you mean \
         `A100-80GB`?\njob.yaml:3:28: `resources.accelerators`: `Quantum9` is not in the table of accelerators\n"
    );
    assert_eq!(parsed.jobs[0].resources.any_of[1].accelerator.as_deref(), Some("Quantum9"));
}

#[test]
fn candidates_take_what_they_do_not_say_from_the_group_above() {
    let spec = job("
run: x
resources:
  cpus: 8
  cloud: gcp
  any_of:
    - accelerators: [A100, H100]
    - accelerators: L4:4
      cloud: aws
      cpus: 16+
      region: us-west-2
");
    let short: Vec<_> = spec
        .resources
        .any_of
        .iter()
        .map(|c| (c.accelerator.as_deref().unwrap(), c.cpus_min, c.cloud.unwrap(), c.region.as_deref()))
        .collect();
    let want = [
        ("A100", 8, Cloud::Gcp, None),
        ("H100", 8, Cloud::Gcp, None),
        ("L4", 16, Cloud::Aws, Some("us-west-2")),
    ];
    assert_eq!(short, want);
}

#[test]
fn ordered_candidates_are_taken_with_a_warning_that_the_order_is_not_kept() {
    let parsed =
        yaml("run: x\nresources:\n  ordered:\n  - {infra: aws}\n  - {infra: gcp/*/us-central1-a}\n").unwrap();
    let clouds: Vec<_> = parsed.jobs[0].resources.any_of.iter().map(|c| (c.cloud, c.zone.clone())).collect();
    assert_eq!(clouds, [(Some(Cloud::Aws), None), (Some(Cloud::Gcp), Some("us-central1-a".into()))]);
    assert!(warnings(&parsed).contains("job.yaml:4:5: the order of `resources.ordered` is not kept"));
}

#[test]
fn one_candidate_that_restricts_nothing_lifts_all_restrictions() {
    assert!(job("run: x\nresources:\n  any_of: [{cloud: aws}, {}]\n").resources.any_of.is_empty());
}

#[test]
fn use_spot_yields_to_a_policy() {
    let policy = |text: &str| job(&format!("run: x\n{text}")).policy;
    assert_eq!(policy("resources: {use_spot: true}"), PlacementPolicy::SpotFirst);
    assert_eq!(policy("resources: {use_spot: false}"), PlacementPolicy::OnDemand);
    for mixed in [
        "{use_spot: no, cpus: 1}, {use_spot: yes, cpus: 1}",
        "{use_spot: yes, cpus: 1}, {use_spot: no, cpus: 1}",
    ] {
        assert_eq!(
            policy(&format!("resources: {{any_of: [{mixed}]}}")),
            PlacementPolicy::SpotFirst,
            "{mixed}"
        );
    }
    assert_eq!(policy("policy: spot_only\nresources: {use_spot: true}"), PlacementPolicy::SpotOnly);
    let parsed = yaml("run: x\npolicy: on-demand\nresources: {use_spot: true}").unwrap();
    assert_eq!(parsed.jobs[0].policy, PlacementPolicy::OnDemand);
    assert!(warnings(&parsed).contains("job.yaml:2:9: `policy: on-demand` and `use_spot: true` disagree"));
}

#[test]
fn sizes_are_lower_bounds_in_gib_and_rounded_up() {
    let read = |text: &str| {
        let spec = job(&format!("run: x\nresources: {{{text}}}"));
        (spec.resources.any_of[0].cpus_min, spec.resources.any_of[0].memory_gib_min)
    };
    assert_eq!(read("cpus: 4, memory: 16"), (4, 16));
    assert_eq!(read("cpus: 0.5+, memory: 16.5+"), (1, 17));
    assert_eq!(read("memory: 512MB+"), (0, 1));
    assert_eq!(read("memory: 2 TB"), (0, 2048));
    assert_eq!(read("memory: 64GiB"), (0, 64));
}

#[test]
fn several_documents_are_several_jobs() {
    let parsed = yaml("run: a\n---\n---\nname: b\nrun: b\n---\nrun: c\n").unwrap();
    let names: Vec<_> = parsed.jobs.iter().map(|job| job.name.as_str()).collect();
    assert_eq!(names, ["job-1", "b", "job-3"]);
    assert!(parsed.warnings.is_empty());
}

#[test]
fn a_first_document_with_only_a_name_names_the_pipeline() {
    let parsed = yaml("name: pipe\n---\nrun: a\n---\nname: eval\nrun: b\n").unwrap();
    let names: Vec<_> = parsed.jobs.iter().map(|job| job.name.as_str()).collect();
    assert_eq!(names, ["pipe-1", "eval"]);
    assert!(
        warnings(&parsed).contains("job.yaml:1:1: the tasks of a pipeline are queued as jobs of their own")
    );
    assert!(
        yaml("name: group\nexecution: parallel\n---\nrun: a\n---\nrun: b\n").unwrap().warnings.is_empty()
    );
}

#[test]
fn aliases_and_merged_groups_are_expanded() {
    let spec = job("
envs: &base {A: 1, B: 2}
run: x
tags: *base
retry: &r {failures: 2}
checkpoint: {<<: [{keep: 7}, {keep: 8, grace: 5s}], grace: 9s}
");
    assert_eq!(spec.tags["B"], "2");
    assert_eq!((spec.checkpoint.keep, spec.checkpoint.grace), (7, Span::secs(9)));
}

#[test]
fn keys_of_skypilot_without_effect_are_warnings_that_name_their_line() {
    let parsed = yaml(
        "
run: x
service: {readiness_probe: /}
config: {}
pool: p
volumes: {/mnt: v}
secrets: {TOKEN: t}
file_mounts:
  /ckpt: {source: 's3://bucket', mode: MOUNT}
  /data: {name: bucket}
  /code: ./code
resources:
  image_id: docker:x
  ports: 80
  disk_tier: best
  network_tier: best
  labels: {a: b}
  job_recovery: none
  accelerator_args: {}
  disk_size: 100
",
    )
    .unwrap();
    let text = warnings(&parsed);
    for (line, key) in [
        (3, "`service`"),
        (4, "`config`"),
        (5, "`pool`"),
        (6, "`volumes`"),
        (7, "`secrets`"),
        (8, "`file_mounts`"),
        (9, "the bucket mounted at `/ckpt`"),
        (10, "the bucket mounted at `/data`"),
        (13, "`resources.image_id`"),
        (14, "`resources.ports`"),
        (15, "`resources.disk_tier`"),
        (16, "`resources.network_tier`"),
        (17, "`resources.labels`"),
        (18, "`resources.job_recovery`"),
        (19, "`resources.accelerator_args`"),
        (20, "`resources.disk_size`"),
    ] {
        let note = text.lines().find(|note| note.starts_with(&format!("job.yaml:{line}:")));
        assert!(
            note.is_some_and(|note| note.contains(key) && note.contains("by this version")),
            "{key}: {text}"
        );
    }
    assert_eq!(parsed.warnings.len(), 16, "{text}");
}

#[test]
fn keys_of_ours_without_effect_yet_are_told_once_for_a_file() {
    let doc = "run: x\ncheckpoint: {interval: 5m, keep: 3}\nproject: p\ntags: {a: b}\n";
    let parsed = yaml(&format!("{doc}---\n{doc}")).unwrap();
    let text = warnings(&parsed);
    for (place, key, said) in [
        ("2:14", "`checkpoint.interval`", "triggers no saves by itself"),
        ("2:28", "`checkpoint.keep`", "all checkpoints are kept"),
        ("3:1", "`project`", "reports cannot be grouped by it yet"),
        ("4:1", "`tags`", "reports cannot be grouped by them yet"),
    ] {
        let notes: Vec<_> = text.lines().filter(|note| note.contains(key)).collect();
        let [note] = notes.as_slice() else { panic!("{key}: {text}") };
        assert!(note.starts_with(&format!("job.yaml:{place}: ")) && note.contains(said), "{note}");
    }
    assert_eq!(parsed.warnings.len(), 4, "{text}");
    assert_eq!(parsed.jobs[1].checkpoint.keep, 3, "they are kept with the job all the same");
    assert!(yaml("run: x\ncheckpoint: {interval: , keep: }\nproject:\ntags:\n").unwrap().warnings.is_empty());
}

#[test]
fn wrong_yaml_is_refused_with_its_place() {
    refused(
        yaml,
        &[
            ("", &["job.yaml:1:1: the file is empty", "run: COMMAND"]),
            ("# nothing\n---\n~\n", &["job.yaml:1:1: the file is empty"]),
            ("- run: x\n", &["job.yaml:1:1: expected keys", "found a list", "remove the leading `- `"]),
            ("python train.py", &["job.yaml:1:1: expected keys", "found `python train.py`", "`#!` line"]),
            ("run: x\nenvs:\n\tA: 1\n", &["job.yaml:3:2: not valid YAML", "tab", "indent with spaces"]),
            ("run: 'x\n", &["not valid YAML", "quote"]),
            ("run: [x\n", &["not valid YAML"]),
            ("run: a: b\n", &["job.yaml:1:", "not valid YAML", "quotes"]),
            ("run: *nowhere\n", &["job.yaml:1:6: not valid YAML", "unknown anchor", "`&name`"]),
            ("run: x\nname: a\nname: b\n", &["job.yaml:3:1: the key `name` is given twice", "line 2"]),
            ("run: x\nenvs: {A: 1, A: 2}\n", &["job.yaml:2:14: the key `A` is given twice"]),
            ("run: x\n[a]: b\n", &["job.yaml:2:1: a key is a list"]),
            (
                "run: !!python/object:os.system x\n",
                &["job.yaml:1:", "the tag `!!python/object:os.system` is not supported"],
            ),
            ("run: !x y\n", &["the tag `!x` is not supported"]),
            ("run: &a [*a]\n", &["job.yaml:1:10: an alias that contains itself"]),
            ("run: x\n<<: 5\n", &["`<<` expects a group of keys"]),
            (
                "run: x\nsetup: {}\n---\n- x\n",
                &["job.yaml:2:8: `setup`: expected text, found a group of keys"],
            ),
        ],
    );
    assert!(matches!(yaml("run: 'x"), Err(JobFileError::Syntax(_))));
}

#[test]
fn wrong_keys_are_refused_with_the_nearest() {
    refused(
        yaml,
        &[
            (
                "run: x\nchekpoint: {}\n",
                &["job.yaml:2:1: unknown key `chekpoint`", "did you mean `checkpoint`?"],
            ),
            ("run: x\nenv: {}\n", &["job.yaml:2:1: unknown key `env`", "did you mean `envs`?"]),
            ("run: x\ntime-limit: 1h\n", &["unknown key `time-limit`", "did you mean `time_limit`?"]),
            ("run: x\nName: y\n", &["unknown key `Name`", "did you mean `name`?"]),
            (
                "run: x\naccelerators: A100\n",
                &["job.yaml:2:1: unknown key `accelerators`", "belongs below `resources:`"],
            ),
            ("run: x\ninterval: 5m\n", &["`interval` belongs below `checkpoint:`"]),
            (
                "run: x\nresources: {budget: 5}\n",
                &["job.yaml:2:13: unknown key `budget` below `resources`", "belongs at the top"],
            ),
            (
                "run: x\nresources:\n  acelerators: A100\n",
                &["job.yaml:3:3: unknown key `acelerators` below `resources`", "`accelerators`?"],
            ),
            (
                "run: x\ncheckpoint:\n  intervall: 5m\n",
                &["job.yaml:3:3: unknown key `intervall` below `checkpoint`", "`interval`?"],
            ),
            (
                "run: x\nretry: {failure: 1}\n",
                &["job.yaml:2:9: unknown key `failure` below `retry`", "`failures`?"],
            ),
            ("run: x\nxyzzy: 1\n", &["unknown key `xyzzy`", "known keys here: name, workdir"]),
            ("run: x\n? {a: b}\n: c\n", &["job.yaml:2:3: a key is a list or a group of keys"]),
            ("run: x\n\"a\\nb\": 1\n", &["unknown key `a\\nb`"]),
        ],
    );
}

const WRONG_VALUES: &[(&str, &[&str])] = &[
    ("name: x\n", &["job.yaml:1:1: `run` is missing: there is nothing to run"]),
    ("setup: x\n", &["`run` is missing: `setup` alone is no job"]),
    ("run: ''\n", &["job.yaml:1:6: `run` is empty"]),
    ("run:\n", &["`run` is missing"]),
    ("run: [a, b]\n", &["job.yaml:1:6: `run`: expected a command, found a list", "write `run: |`"]),
    ("run: \"a\\0b\"\n", &["`run`: the text holds a NUL character"]),
    ("run: x\nname: [a]\n", &["job.yaml:2:7: `name`: expected text, found a list"]),
    ("run: x\nname: ''\n", &["`name` is empty"]),
    ("run: x\nname: \"a\\nb\"\n", &["job.yaml:2:7: `name` holds the control character \\n: `a\\nb`"]),
    ("run: x\nname: \"a\\e[31mb\"\n", &["`name` holds the control character \\u{1b}"]),
    ("run: x\nworkdir: s3://b/c\n", &["job.yaml:2:10: `workdir`: expected a directory, not a URL"]),
    ("run: x\nworkdir: {url: u}\n", &["`workdir` from a git repository is not supported"]),
    (
        "run: x\nenvs: [A=1]\n",
        &["job.yaml:2:7: `envs`: expected keys of the form `NAME: value`, found a list"],
    ),
    ("run: x\nenvs: {1A: x}\n", &["job.yaml:2:8: `1A` is not the name of a variable"]),
    ("run: x\nenvs: {A-B: x}\n", &["`A-B` is not the name of a variable"]),
    ("run: x\nenvs: {SPOTQ_X: x}\n", &["job.yaml:2:8: the variable `SPOTQ_X` is reserved"]),
    ("run: x\nenvs:\n  A:\n", &["`envs.A` has no value", "write `A: \"\"`"]),
    ("run: x\nenvs:\n  A: {b: c}\n", &["job.yaml:3:6: `envs.A`: expected text", "found a group of keys"]),
    (
        "run: x\npolicy: spotfirst\n",
        &["job.yaml:2:9: `policy`: expected spot-first", "did you mean `spot-first`?"],
    ),
    (
        "run: x\nbudget: lots\n",
        &["job.yaml:2:9: `budget`: expected an amount of US dollars above zero", "found `lots`"],
    ),
    ("run: x\nbudget: 0\n", &["`budget`: expected an amount"]),
    ("run: x\nbudget: -5\n", &["`budget`: expected an amount"]),
    ("run: x\nbudget: 1e3\n", &["`budget`: expected an amount"]),
    ("run: x\ntime_limit: soon\n", &["job.yaml:2:13: `time_limit`: expected a length of time such as 30s"]),
    ("run: x\ntime_limit: 0s\n", &["`time_limit`: expected a length of time above zero"]),
    ("run: x\npriority: high\n", &["job.yaml:2:11: `priority`: expected a whole number from"]),
    ("run: x\npriority: 99999999999\n", &["`priority`: expected a whole number from"]),
    ("run: x\nbegin: tomorrow\n", &["job.yaml:2:8: `begin`: expected a moment such as", "found `tomorrow`"]),
    ("run: x\nbegin: 2027-01-31T18:00:00\n", &["`begin`: expected a moment such as 2027-01-31T18:00:00Z"]),
    ("run: x\nhold: maybe\n", &["job.yaml:2:7: `hold`: expected true or false, found `maybe`"]),
    ("run: x\noutputs: [/etc/passwd]\n", &["job.yaml:2:11: `outputs`: expected a path below its directory"]),
    ("run: x\noutputs: [a/../../b]\n", &["`outputs`: expected a path below its directory"]),
    ("run: x\noutputs: {a: b}\n", &["`outputs`: expected a list"]),
    ("run: x\ntags: x\n", &["`tags`: expected keys of the form `name: value`"]),
    (
        "run: x\ncheckpoint: ckpt\n",
        &["job.yaml:2:13: `checkpoint`: expected keys such as `dir`", "found `ckpt`", "below `checkpoint:`"],
    ),
    (
        "run: x\ncheckpoint: {signal: KILL}\n",
        &["job.yaml:2:22: `checkpoint.signal`: expected a signal: USR1", "found `KILL`"],
    ),
    ("run: x\ncheckpoint: {signal_target: boss}\n", &["expected ranks, launcher or all, found `boss`"]),
    ("run: x\ncheckpoint: {profile: magic}\n", &["expected generic, rename or orbax"]),
    (
        "run: x\ncheckpoint: {keep: 0}\n",
        &["`checkpoint.keep`: expected a whole number from 1 to 1000, found `0`"],
    ),
    ("run: x\ncheckpoint: {keep: 1.5}\n", &["found `1.5`"]),
    ("run: x\ncheckpoint: {grace: 25h}\n", &["`checkpoint.grace`: expected at most 24h"]),
    ("run: x\ncheckpoint: {dir: 's3://b'}\n", &["`checkpoint.dir`: expected a directory, not a URL"]),
    ("run: x\nretry: 3\n", &["job.yaml:2:8: `retry`: expected keys such as `preemptions`", "found `3`"]),
    ("run: x\nretry: {failures: -1}\n", &["`retry.failures`: expected a whole number from 0"]),
    (
        "run: x\nretry: {failures: 1, exit_codes: [0]}\n",
        &["job.yaml:2:35: `retry.exit_codes`: expected a whole number from 1 to 255"],
    ),
    ("run: x\nretry: {exit_codes: [7]}\n", &["`retry.exit_codes` has no effect without `retry.failures`"]),
    ("run: x\nresources: A100\n", &["`resources`: expected keys such as `accelerators`"]),
    (
        "run: x\nresources:\n  accelerators: A100:0\n",
        &["job.yaml:3:17: `resources.accelerators`: expected NAME or NAME:COUNT", "A100:0"],
    ),
    ("run: x\nresources: {accelerators: 'A100:0.5'}\n", &["with a whole count from 1 to 1024"]),
    ("run: x\nresources: {accelerators: '💥'}\n", &["`💥` is not the name of an accelerator"]),
    (
        "run: x\nresources: {cpus: four}\n",
        &["job.yaml:2:19: `resources.cpus`: expected CPUs such as 4 or 4+, found `four`"],
    ),
    ("run: x\nresources: {memory: 16XB}\n", &["`resources.memory`: expected memory in GiB", "`16XB`"]),
    ("run: x\nresources: {memory: -1}\n", &["`resources.memory`: expected memory"]),
    (
        "run: x\nresources: {cloud: awz}\n",
        &["`resources.cloud`: expected aws, gcp or azure, found `awz`", "did you mean `aws`?"],
    ),
    (
        "run: x\nresources: {infra: aws/a/b/c}\n",
        &["`resources.infra`: expected cloud, cloud/region or cloud/region/zone"],
    ),
    ("run: x\nresources: {infra: aws//b}\n", &["`resources.infra`: expected cloud"]),
    ("run: x\nresources: {infra: aws, region: r}\n", &["`resources` has both `infra` and `cloud`"]),
    ("run: x\nresources: {region: 'a b'}\n", &["`resources.region`: expected a name of letters"]),
    ("run: x\nresources: {use_spot: 2}\n", &["`resources.use_spot`: expected true or false"]),
    ("run: x\nresources: {any_of: {}}\n", &["`resources.any_of`: expected a list of candidates"]),
    ("run: x\nresources: {any_of: []}\n", &["`resources.any_of` has 0 candidates"]),
    (
        "run: x\nresources: {any_of: [A100]}\n",
        &["job.yaml:2:22: `resources.any_of`: expected keys", "found `A100`"],
    ),
    ("run: x\nresources: {any_of: [{}], ordered: [{}]}\n", &["has both `any_of` and `ordered`"]),
    ("run: x\nnum_nodes: none\n", &["`num_nodes`: expected a whole number"]),
];

#[test]
fn wrong_values_are_refused_with_what_was_expected() {
    refused(yaml, WRONG_VALUES);
}

#[test]
fn what_this_version_cannot_do_is_refused_and_says_what_to_do() {
    let table: &[(&str, &[&str])] = &[
        (
            "run: x\nnum_nodes: 4\n",
            &["job.yaml:2:1: `num_nodes` is not supported by this version", "set it to 1"],
        ),
        ("run: x\narray: 0-9\n", &["job.yaml:2:1: `array` is not supported", "a job of its own"]),
        ("run: x\ndependencies: [3]\n", &["`dependencies` is not supported", "spotq wait"]),
        ("run: x\ndeadline: 5h\n", &["`deadline` is not supported", "time_limit"]),
        ("run: x\nwork: {total: 5}\n", &["`work` is not supported", "SPOTQ_PROGRESS_FILE"]),
        ("run: x\npolicy: deadline\n", &["job.yaml:2:9: `policy: deadline` is not supported", "on-demand"]),
        ("run: x\ninputs: [{url: 's3://b'}]\n", &["`inputs` is not supported", "`setup`"]),
        ("run: x\nresources: {infra: kubernetes}\n", &["`kubernetes` is not supported", "aws, gcp or azure"]),
        (
            "run: x\nresources: {any_of: [{cpus: 1, max_hourly_cost: 3}]}\n",
            &["one cap holds for all candidates"],
        ),
    ];
    refused(yaml, table);
    for (text, _) in table {
        assert!(matches!(yaml(text), Err(JobFileError::Unsupported(_))), "{text}");
    }
}

#[test]
fn an_error_shows_the_line_with_a_caret_and_a_hint() {
    let error = yaml("name: x\nchekpoint: {}\nrun: x\n").unwrap_err();
    assert_eq!(
        error.to_string(),
        "job.yaml:2:1: unknown key `chekpoint`\n  2 | chekpoint: {}\n    | ^\n  hint: did you mean `checkpoint`?"
    );
    assert_eq!(error.problem().place, Place { line: 2, column: 1 });
}

#[test]
fn a_long_line_is_shown_around_its_place_only() {
    let text = format!("run: x\nenvs: {{A: {}, B-: 1}}\n", "é".repeat(5000));
    let error = yaml(&text).unwrap_err().to_string();
    assert!(error.contains("job.yaml:2:5013: `B-` is not"), "{error}");
    let lines: Vec<_> = error.lines().collect();
    let caret = lines[2].chars().position(|c| c == '^').unwrap();
    assert_eq!(lines[1].chars().nth(caret), Some('B'), "{error}");
    assert!(error.chars().count() < 400, "{error}");
}

#[test]
fn a_name_has_at_most_255_characters_of_any_script() {
    let name = |text: &str| yaml(&format!("run: x\nname: '{text}'\n"));
    let emoji = "🚀".repeat(255);
    assert_eq!(name(&emoji).unwrap().jobs[0].name, emoji);
    let error = name(&"n".repeat(300)).unwrap_err().to_string();
    assert!(error.contains("job.yaml:2:7: `name` has 300 characters, more than 255"), "{error}");
    assert!(error.len() < 400, "{error}");
    assert!(name("a\u{2028}b").is_err());
}

#[test]
fn an_environment_of_500_kb_is_taken_and_one_beyond_the_systems_limit_is_not() {
    let file = |count: usize, bytes: usize| {
        let mut text = String::from("run: x\nenvs:\n");
        for n in 0..count {
            text.push_str(&format!("  V{n}: {}\n", "x".repeat(bytes)));
        }
        yaml(&text)
    };
    assert_eq!(file(50_000, 8).unwrap().jobs[0].env.len(), 50_000);
    assert_eq!(file(5, 100_000).unwrap().jobs[0].env.len(), 5);
    let error = file(11, 100_000).unwrap_err().to_string();
    assert!(error.contains("`envs` has 1100045 bytes, more than the limit of 1048576"), "{error}");
    let error = file(1, 131_072).unwrap_err().to_string();
    assert!(
        error.contains("job.yaml:3:3: `envs.V0` has 131076 bytes, more than the limit of 131071"),
        "{error}"
    );
}

#[test]
fn commands_and_scripts_of_a_megabyte_are_taken() {
    let body = "echo 0123456789\n".repeat(70_000);
    let run: String = body.lines().map(|line| format!("  {line}\n")).collect();
    assert_eq!(job(&format!("run: |\n{run}")).command, Command::Shell { text: body.clone() });
    let text = format!("#!/bin/bash\n{body}");
    let args = vec!["--epochs".to_owned(), "3".to_owned()];
    let parsed = load(text.as_bytes(), "dir/train.v2.sh", &args, &ctx()).unwrap();
    assert_eq!(parsed.jobs[0].command, Command::Script { text, args });
    assert_eq!(parsed.jobs[0].name, "train.v2");
}

#[test]
fn bombs_are_refused_before_they_grow() {
    let mut bomb = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x]\n");
    for n in 1..12 {
        let previous = format!("*a{}", n - 1);
        bomb.push_str(&format!("a{n}: &a{n} [{}]\n", vec![previous; 9].join(", ")));
    }
    let wide = format!("a: &a \"{}\"\nb: [{}]\n", "x".repeat(1 << 20), vec!["*a"; 100].join(", "));
    let deep = format!("run: {}{}", "[".repeat(200), "]".repeat(200));
    let deeper = format!("run: {}", "[".repeat(100_000));
    let blocks: String = (0..200).map(|n| format!("{}a:\n", " ".repeat(n))).collect();
    refused(
        yaml,
        &[
            (&bomb, &["the file expands to more than 250000 values or 8 MiB", "fewer aliases"]),
            (&wide, &["the file expands to more than"]),
            (&deep, &["job.yaml:1:", "nested more than 32 levels deep"]),
            (&deeper, &["job.yaml:1:", "nested more than 32 levels deep"]),
            (&blocks, &["nested more than 32 levels deep"]),
            (&"---\nrun: x\n".repeat(1002), &["more than 1000 documents"]),
        ],
    );
}

#[test]
fn a_file_that_is_no_text_is_refused_with_its_reason() {
    let load = |bytes: &[u8], name: &str| load(bytes, name, &[], &ctx()).unwrap_err();
    for (bytes, name, fragment) in [
        (&b"\x7fELF\x02\x01\x01\0\0"[..], "a.out", "a.out: the file is binary (a NUL at byte 7)"),
        (b"run: x\nname: \xe9t\xe9\n", "j.yaml", "j.yaml:2:7: the byte 0xe9 is not UTF-8 text"),
        (b"\xff\xfer\0u\0n\0", "j.yaml", "j.yaml: the file is UTF-16 text"),
        (b"echo hi\n", "x.sh", "x.sh:1:1: expected a script that starts with `#!`"),
        (b"#!/bin/bash\r\necho\r\n", "x", "x:1:1: the lines of the script end in CR LF"),
        (b"#!\necho\n", "x", "x:1:1: expected a script that starts with `#!` and a program"),
        (b"run: x\nbad\n", "a\nb.yaml", "a\\nb.yaml:"),
    ] {
        let error = load(bytes, name).to_string();
        assert!(error.starts_with(fragment), "{fragment}: {error}");
    }
    let large = load(&vec![b'#'; FILE_BYTES_MAX + 1], "big.yaml").to_string();
    assert!(
        large.starts_with("big.yaml: the file has 4194305 bytes, more than the limit of 4 MiB"),
        "{large}"
    );
}

#[test]
fn marks_and_line_ends_of_windows_do_not_change_a_job_file() {
    let parsed = load(b"\xef\xbb\xbfrun: x\r\nname: y\r\n", "job.yaml", &[], &ctx()).unwrap();
    assert_eq!(
        (parsed.jobs[0].name.as_str(), &parsed.jobs[0].command),
        ("y", &Command::Shell { text: "x".into() })
    );
}

#[test]
fn arguments_after_a_job_file_are_refused() {
    let error = load(b"run: x", "job.yaml", &["a".into()], &ctx()).unwrap_err().to_string();
    assert!(error.contains("a job file takes no arguments"), "{error}");
}

#[test]
fn directives_carry_every_key_of_a_job_file() {
    let parsed = script(
        "#!/bin/bash -l
# a comment
#SPOTQ --name='my run' --workdir=src --env=A=1,2 --envs=B= --envs-C=3   # trailing
#SPOTQ --accelerators=A100:8,H100:8 --cpus=4+ --memory 16+ --infra=gcp --use-spot
#SPOTQ --max-hourly-cost=9 --resources-instance-type=a2
#SPOTQ --checkpoint-dir=\"my ckpt\" --checkpoint-interval=10m --checkpoint-signal=USR2
#SPOTQ --checkpoint-signal-target=all --checkpoint_grace=20s --checkpoint-profile=rename
#SPOTQ --checkpoint-complete-when=DONE --checkpoint-keep=2
#SPOTQ --policy=on-demand --policy=spot-only --budget=20 --project=p --tag=team=nlp --tags-x=y
#SPOTQ --time-limit=2h --retry-preemptions=5 --retry-failures=1 --retry-exit-codes=1,2
#SPOTQ --priority=7 --begin=now+1h --hold --outputs={a,b}/* --outputs=c --num-nodes=1

python train.py
",
    )
    .unwrap();
    let told: Vec<_> = parsed.warnings.iter().filter_map(|note| note.message.split('`').nth(1)).collect();
    assert_eq!(told, ["checkpoint.interval", "checkpoint.keep", "project", "tags"]);
    let from_yaml = job("
name: my run
workdir: src
envs: {A: '1,2', B: '', C: 3}
resources: {accelerators: ['A100:8', 'H100:8'], cpus: 4+, memory: 16+, infra: gcp, use_spot: true,
  max_hourly_cost: 9, instance_type: a2}
checkpoint: {dir: my ckpt, interval: 10m, signal: USR2, signal_target: all, grace: 20s, profile: rename,
  complete_when: DONE, keep: 2}
policy: spot-only
budget: 20
project: p
tags: {team: nlp, x: y}
time_limit: 2h
retry: {preemptions: 5, failures: 1, exit_codes: [1, 2]}
priority: 7
begin: +1h
hold: true
outputs: ['{a,b}/*', c]
run: x
");
    let spec = &parsed.jobs[0];
    assert_eq!(*spec, JobSpec { command: spec.command.clone(), ..from_yaml });
}

#[test]
fn every_key_has_an_option_and_every_option_has_a_key() {
    let paths: Vec<String> = script::OPTIONS.iter().map(|option| option.path.join(".")).collect();
    for (parent, known) in [
        ("", keys::TOP),
        ("resources", keys::RESOURCES),
        ("checkpoint", keys::CHECKPOINT),
        ("retry", keys::RETRY),
    ] {
        for key in known {
            // The script itself is `run`; groups have an option for each key; candidates are lists of groups.
            let group =
                ["run", "resources", "checkpoint", "retry", "any_of", "ordered", "gpus"].contains(key);
            assert!(group || paths.contains(&keys::join(parent, key)), "{parent} {key}");
        }
    }
    for path in paths {
        let (parent, key) = path.split_once('.').unwrap_or(("", &path));
        let known = match parent {
            "" => keys::TOP,
            "resources" => keys::RESOURCES,
            "checkpoint" => keys::CHECKPOINT,
            _ => keys::RETRY,
        };
        assert!(known.contains(&key), "{path}");
    }
}

#[test]
fn wrong_directives_are_refused_with_their_place() {
    refused(
        script,
        &[
            (
                "#!/bin/sh\n#SPOTQ --polcy=x\n",
                &["train.sh:2:8: unknown option `--polcy`", "did you mean `--policy`?"],
            ),
            (
                "#!/bin/sh\n#SPOTQ  --xyzzy\n",
                &["train.sh:2:9: unknown option `--xyzzy`", "keys of a job file"],
            ),
            ("#!/bin/sh\n#SPOTQ budget=5\n", &["train.sh:2:8: expected an option such as `--budget=20`"]),
            ("#!/bin/sh\n#SPOTQ --budget\n", &["train.sh:2:8: the option `--budget` has no value"]),
            ("#!/bin/sh\n#SPOTQ --budget --hold\n", &["the option `--budget` has no value"]),
            ("#!/bin/sh\n#SPOTQ --hold --budget=none\n", &["train.sh:2:15: `budget`: expected an amount"]),
            ("#!/bin/sh\n#SPOTQ --env=A\n", &["`--env`: expected NAME=VALUE, found `A`"]),
            ("#!/bin/sh\n#SPOTQ --env=A=1 --env=A=2\n", &["train.sh:2:18: `A` is given twice"]),
            ("#!/bin/sh\n#SPOTQ --array=0-9\n", &["train.sh:2:8: `array` is not supported by this version"]),
            ("#!/bin/sh\n#SPOTQ --deadline=5h\n", &["`deadline` is not supported by this version"]),
            ("#!/bin/sh\n#SPOTQ --inputs=s3://b\n", &["`inputs` is not supported by this version"]),
            ("#!/bin/sh\n#SPOTQ --work-total=5\n", &["`work` is not supported by this version"]),
            (
                "#!/bin/sh\n#SBATCH --time=soon\n",
                &["train.sh:2:9: #SBATCH --time: expected a time such as 30"],
            ),
            (
                "#!/bin/sh\n#SBATCH -N 4\n",
                &["train.sh:2:9: #SBATCH --nodes: a job of several nodes is not supported"],
            ),
            ("#!/bin/sh\n#SBATCH --array=0-9\n", &["#SBATCH --array: an array is not supported"]),
            (
                "#!/bin/sh\n#SBATCH -d afterok:5\n",
                &["#SBATCH --dependency: a dependency is not supported", "spotq wait"],
            ),
            (
                "#!/bin/sh\n#SBATCH --gres=gpu:4\n",
                &["`--gres=gpu:4` names no model of GPU", "#SPOTQ --accelerators=A100:4"],
            ),
            ("#!/bin/sh\n#SBATCH -G 2\n", &["names no model of GPU"]),
            ("#!/bin/sh\n#SBATCH --job-name=\"\"\n", &["`name` is empty"]),
        ],
    );
}

#[test]
fn the_sbatch_options_that_are_understood_are_mapped() {
    let parsed = script(
        "#!/bin/bash
##SBATCH --job-name=commented
#SBATCH --job-name=\"gpt 2\"   # a name
#SBATCH -t 1-12:00:00 -N1
#SBATCH --gres=gpu:a100:8,nvme:100
#SBATCH --nodes 1
srun python train.py
",
    )
    .unwrap();
    let spec = &parsed.jobs[0];
    assert_eq!((spec.name.as_str(), spec.time_limit), ("gpt 2", Some(Span::secs(36 * 3600))));
    let choice = &spec.resources.any_of[0];
    assert_eq!((choice.accelerator.as_deref(), choice.accelerator_count), (Some("A100"), 8));
    assert_eq!(
        warnings(&parsed),
        "train.sh:5:9: #SBATCH --gres=`nvme:100` is not honoured by this version\n"
    );
}

#[test]
fn gpus_of_sbatch_are_read_in_every_form_and_yield_to_ours() {
    let read = |line: &str| {
        let spec = script(&format!("#!/bin/sh\n{line}\n")).unwrap_or_else(|e| panic!("{e}")).jobs.remove(0);
        spec.resources.any_of.first().map(|c| (c.accelerator.clone().unwrap(), c.accelerator_count))
    };
    for (line, want) in [
        ("#SBATCH --gpus=v100:2", Some(("V100", 2))),
        ("#SBATCH -G h100", Some(("H100", 1))),
        ("#SBATCH --gpus-per-node=l40s:4", Some(("L40S", 4))),
        ("#SBATCH --gres gpu:t4:1(S:0-1)", Some(("T4", 1))),
        ("#SBATCH --gres=gpu:0", None),
        ("#SBATCH --gres=gpu:4\n#SPOTQ --accelerators=A100:2", Some(("A100", 2))),
    ] {
        assert_eq!(read(line), want.map(|(name, count)| (name.to_owned(), count)), "{line}");
    }
}

#[test]
fn every_other_sbatch_option_is_one_warning_with_its_line() {
    let parsed = script(
        "#!/bin/bash
#SBATCH --partition=gpu --qos high
#SBATCH -c 8
#SBATCH --output=%x-%j.out
#SBATCH --exclusive
#SPOTQ --name=mine
#SBATCH -J theirs
#SBATCH stray
echo hi
#SBATCH --time=1
#SPOTQ --budget=5
",
    )
    .unwrap();
    assert_eq!(
        (parsed.jobs[0].name.as_str(), parsed.jobs[0].time_limit, parsed.jobs[0].budget),
        ("mine", None, None)
    );
    let want = "\
train.sh:2:9: #SBATCH `--partition=gpu` is not honoured by this version
train.sh:2:25: #SBATCH `--qos` is not honoured by this version
train.sh:3:9: #SBATCH `-c` is not honoured by this version
train.sh:4:9: #SBATCH `--output=%x-%j.out` is not honoured by this version
train.sh:5:9: #SBATCH `--exclusive` is not honoured by this version
train.sh:8:9: `stray` is no option of sbatch: it has no effect
train.sh:10:1: this #SBATCH line has no effect: it stands after the first command
train.sh:11:1: this #SPOTQ line has no effect: it stands after the first command
";
    assert_eq!(warnings(&parsed), want);
}

#[test]
fn warnings_without_end_are_counted() {
    let parsed = script(&format!("#!/bin/sh\n{}", "#SBATCH --x\n".repeat(5000))).unwrap();
    assert_eq!(parsed.warnings.len(), 101);
    assert_eq!(parsed.warnings[100].to_string(), "train.sh: 4900 more warnings are left out");
}

#[test]
fn slurm_times_have_six_forms() {
    for (text, secs) in [
        ("15", 900),
        ("5:30", 330),
        ("0:05:00", 300),
        ("100:00:00", 360_000),
        ("2-12", 216_000),
        ("2-12:30", 217_800),
        ("1-00:00:01", 86_401),
    ] {
        assert_eq!(parse_slurm_time(text), Ok(Some(Span::secs(secs))), "{text}");
    }
    for text in ["0", "UNLIMITED", "infinite", "00:00:00"] {
        assert_eq!(parse_slurm_time(text), Ok(None), "{text}");
    }
    for text in ["", "1:2:3:4", "1-", "-1", "1h", "1-2:3:4:5", "999999999", "١"] {
        assert!(parse_slurm_time(text).is_err(), "{text}");
    }
}

#[test]
fn options_of_the_command_line_win_over_the_file() {
    let options = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let load = |file: &str, name: &str, given: &str| {
        let parsed = load_with(file.as_bytes(), name, &[], &options(given), &ctx());
        parsed.unwrap_or_else(|error| panic!("{error}")).jobs.remove(0)
    };
    let file = "
run: x
name: old
budget: 5
tags: {a: old, b: old}
checkpoint: {keep: 9, dir: d}
resources:
  cloud: gcp
  gpus: T4
  cpus: 2
  any_of: [{accelerators: V100}, {region: r, cpus: 3}]
";
    let given = "--name new --tag=a=new --checkpoint-keep=1 --accelerators=A100:8 --infra=aws --hold";
    let spec = load(file, "job.yaml", given);
    assert_eq!((spec.name.as_str(), spec.budget, spec.hold), ("new", Some(Usd(5_000_000_000)), true));
    assert_eq!((spec.tags["a"].as_str(), spec.tags["b"].as_str()), ("new", "old"));
    assert_eq!((spec.checkpoint.keep, spec.checkpoint.dir.as_deref()), (1, Some("d")));
    let choices: Vec<_> =
        spec.resources.any_of.iter().map(|c| (c.accelerator_count, c.cloud, c.cpus_min)).collect();
    assert_eq!(choices, [(8, Some(Cloud::Aws), 2), (8, Some(Cloud::Aws), 3)]);
    assert_eq!(spec.resources.any_of[1].region, None);

    let spec = load("#!/bin/sh\n#SPOTQ --budget=5 --policy=on-demand\n", "a.sh", "--budget=7");
    assert_eq!((spec.budget, spec.policy), (Some(Usd(7_000_000_000)), PlacementPolicy::OnDemand));
    let parsed = from_command_with(&options("python a.py"), &options("--retry-failures=2"), &ctx()).unwrap();
    assert_eq!((parsed.jobs[0].name.as_str(), parsed.jobs[0].retry.failures), ("a", 2));
}

#[test]
fn wrong_options_of_the_command_line_are_named_as_such() {
    let load = |given: &str| load_with(b"run: x", "job.yaml", &[], &[given.to_owned()], &ctx());
    for (given, fragment) in [
        ("--budgt=5", "command line: unknown option `--budgt`\n  hint: did you mean `--budget`?"),
        ("--budget=lots", "command line: `budget`: expected an amount"),
        ("--env=SPOTQ_X=1", "command line: the variable `SPOTQ_X` is reserved"),
        ("--array=0-9", "command line: `array` is not supported by this version"),
        ("--policy", "command line: the option `--policy` has no value"),
    ] {
        let error = load(given).expect_err(given).to_string();
        assert!(error.starts_with(fragment), "{fragment}: {error}");
    }
    let note = &load("--accelerators=Quantum9").unwrap().warnings[0];
    assert!(note.to_string().starts_with("command line: `resources.accelerators`: `Quantum9`"), "{note}");
    assert!(option_names().any(|name| name == "time-limit"));
}

#[test]
fn options_without_end_are_refused() {
    let text = format!("#!/bin/sh\n#SPOTQ {}\n", "--hold ".repeat(5001));
    let error = script(&text).unwrap_err().to_string();
    assert!(error.contains("train.sh:2:1: more than 5000 options in one script"), "{error}");
}

#[test]
fn a_command_runs_without_a_shell_and_is_named_after_its_script() {
    let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let name = |text: &str| from_command(&words(text), &ctx()).unwrap().jobs.remove(0).name;
    assert_eq!(name("python3 -u dir/train.py --lr 1"), "train");
    assert_eq!(name("/usr/bin/env"), "env");
    assert_eq!(name("./.hidden"), ".hidden");
    let argv = words("python3 train.py");
    assert_eq!(from_command(&argv, &ctx()).unwrap().jobs[0].command, Command::Argv { argv });
    for (argv, fragment) in [
        (vec![], "command line: there is no command"),
        (vec![" ".to_owned()], "there is no command"),
        (vec!["x".to_owned(), "a\0b".to_owned()], "argument 1 holds a NUL character"),
        (
            vec!["x".to_owned(), "y".repeat(131_072)],
            "argument 1 has 131072 bytes, more than the limit of 131071",
        ),
        (vec!["y".repeat(100_000); 11], "the command line has 1100011 bytes, more than the limit of 1048576"),
    ] {
        let error = from_command(&argv, &ctx()).unwrap_err().to_string();
        assert!(error.contains(fragment), "{fragment}: {error}");
    }
}

/// Text that gets past the first checks more often than random bytes do.
fn yaml_like() -> impl Strategy<Value = String> {
    let word = prop_oneof![
        proptest::sample::select(keys::TOP).prop_map(str::to_owned),
        proptest::sample::select(keys::RESOURCES).prop_map(str::to_owned),
        proptest::sample::select(keys::CHECKPOINT).prop_map(str::to_owned),
        proptest::sample::select(vec![
            ": ",
            ":\n",
            "\n",
            "\n  ",
            "- ",
            "[",
            "]",
            "{",
            "}",
            ", ",
            "&a ",
            "*a",
            "<<",
            "!!str ",
            "'",
            "\"",
            "|\n",
            ">-\n",
            "#",
            "---\n",
            "...\n",
            "%YAML 1.2\n",
            "\t",
            "A100:8",
            "4+",
            "10m",
            "now+1h",
            "-1",
            "~",
            "é",
            "🚀",
            "\u{85}",
            "\u{feff}",
            "#!/bin/sh\n",
            "#SPOTQ --",
            "#SBATCH -",
            "=",
        ])
        .prop_map(str::to_owned),
    ];
    proptest::collection::vec(word, 0..60).prop_map(|words| words.concat())
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400), name in "[ -~]{0,12}") {
        if let Err(error) = load(&bytes, &name, &[], &ctx()) {
            prop_assert!(!error.to_string().is_empty());
        }
    }

    #[test]
    fn no_text_like_a_job_file_makes_it_panic(text in yaml_like()) {
        let outcomes = [load(text.as_bytes(), "job.yaml", &[], &ctx()), script(&format!("#!/bin/sh\n{text}"))];
        for outcome in outcomes {
            match outcome {
                Ok(parsed) => prop_assert!(!parsed.jobs.is_empty()),
                Err(error) => prop_assert!(error.to_string().lines().count() <= 4, "{error}"),
            }
        }
    }

    #[test]
    fn a_scalar_written_as_a_quoted_text_is_read_as_it_was(value in "\\PC{0,80}") {
        let quoted = serde_json::to_string(&value).unwrap();
        let spec = job(&format!("run: x\nenvs: {{A: {quoted}}}\n"));
        prop_assert_eq!(&spec.env["A"], &value);
    }
}
