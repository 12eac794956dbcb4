//! Between wire and model.
//!
//! Only translates: what a job may ask for is checked where job files are read, and what a message means is decided
//! in the core. A value that this version does not know is refused by its field's name, never replaced by a default.

use spotq_model as model;
use spotq_model::{Generation, JobId, Span, TaskId, Timestamp, Usd, UsdPerHour};

use crate::v1;

/// A message that cannot be taken as it is. The sender has to change it, or is of a newer version.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    #[error("message lacks `{field}`; send it, or update the side that sends")]
    Missing { field: &'static str },
    #[error("message has the unknown value {value} in `{field}`; update the side that reads it")]
    UnknownValue { field: &'static str, value: i32 },
    #[error("message has a bad `{field}`: {reason}")]
    Invalid { field: &'static str, reason: String },
}

impl From<&model::JobSpec> for v1::JobSpec {
    fn from(spec: &model::JobSpec) -> Self {
        v1::JobSpec {
            name: spec.name.clone(),
            user: spec.user.clone(),
            command: Some((&spec.command).into()),
            setup: spec.setup.clone(),
            workdir: spec.workdir.clone(),
            env: spec.env.clone().into_iter().collect(),
            resources: Some((&spec.resources).into()),
            checkpoint: Some((&spec.checkpoint).into()),
            policy: v1::PlacementPolicy::from(spec.policy).into(),
            budget_nano_usd: spec.budget.map(|usd| usd.0),
            project: spec.project.clone(),
            tags: spec.tags.clone().into_iter().collect(),
            time_limit_ms: spec.time_limit.map(|span| span.0),
            retry: Some((&spec.retry).into()),
            priority: spec.priority,
            begin_ms: spec.begin.map(|at| at.0),
            hold: spec.hold,
            outputs: spec.outputs.clone(),
        }
    }
}

impl TryFrom<v1::JobSpec> for model::JobSpec {
    type Error = WireError;

    fn try_from(wire: v1::JobSpec) -> Result<Self, WireError> {
        Ok(model::JobSpec {
            policy: known::<v1::PlacementPolicy>(wire.policy, "spec.policy")?.try_into()?,
            name: wire.name,
            user: wire.user,
            command: required(wire.command, "spec.command")?.try_into()?,
            setup: wire.setup,
            workdir: wire.workdir,
            env: wire.env.into_iter().collect(),
            resources: required(wire.resources, "spec.resources")?.try_into()?,
            checkpoint: required(wire.checkpoint, "spec.checkpoint")?.try_into()?,
            budget: wire.budget_nano_usd.map(Usd),
            project: wire.project,
            tags: wire.tags.into_iter().collect(),
            time_limit: wire.time_limit_ms.map(Span),
            retry: required(wire.retry, "spec.retry")?.into(),
            priority: wire.priority,
            begin: wire.begin_ms.map(Timestamp),
            hold: wire.hold,
            outputs: wire.outputs,
        })
    }
}

impl From<&model::Command> for v1::Command {
    fn from(command: &model::Command) -> Self {
        use v1::command::Kind;
        let kind = match command.clone() {
            model::Command::Shell { text } => Kind::Shell(text),
            model::Command::Argv { argv } => Kind::Argv(v1::Argv { argv }),
            model::Command::Script { text, args } => Kind::Script(v1::Script { text, args }),
        };
        v1::Command { kind: Some(kind) }
    }
}

impl TryFrom<v1::Command> for model::Command {
    type Error = WireError;

    fn try_from(wire: v1::Command) -> Result<Self, WireError> {
        use v1::command::Kind;
        Ok(match required(wire.kind, "spec.command.kind")? {
            Kind::Shell(text) => model::Command::Shell { text },
            Kind::Argv(v1::Argv { argv }) if argv.is_empty() => {
                return Err(invalid("spec.command.argv", "it is empty; name at least the program"));
            }
            Kind::Argv(v1::Argv { argv }) => model::Command::Argv { argv },
            Kind::Script(v1::Script { text, args }) => model::Command::Script { text, args },
        })
    }
}

impl From<&model::Resources> for v1::Resources {
    fn from(resources: &model::Resources) -> Self {
        v1::Resources {
            any_of: resources.any_of.iter().map(Into::into).collect(),
            max_hourly_nano_usd: resources.max_hourly.map(|price| price.0.0),
        }
    }
}

impl TryFrom<v1::Resources> for model::Resources {
    type Error = WireError;

    fn try_from(wire: v1::Resources) -> Result<Self, WireError> {
        Ok(model::Resources {
            any_of: wire.any_of.into_iter().map(TryInto::try_into).collect::<Result<_, _>>()?,
            max_hourly: wire.max_hourly_nano_usd.map(UsdPerHour::nanos),
        })
    }
}

impl From<&model::Choice> for v1::Choice {
    fn from(choice: &model::Choice) -> Self {
        v1::Choice {
            accelerator: choice.accelerator.clone(),
            accelerator_count: choice.accelerator_count,
            cpus_min: choice.cpus_min,
            memory_gib_min: choice.memory_gib_min,
            cloud: choice.cloud.map(|cloud| cloud.to_string()),
            region: choice.region.clone(),
            zone: choice.zone.clone(),
            instance_type: choice.instance_type.clone(),
        }
    }
}

impl TryFrom<v1::Choice> for model::Choice {
    type Error = WireError;

    fn try_from(wire: v1::Choice) -> Result<Self, WireError> {
        let cloud = wire.cloud.map(|text| text.parse()).transpose();
        Ok(model::Choice {
            accelerator: wire.accelerator,
            accelerator_count: wire.accelerator_count,
            cpus_min: wire.cpus_min,
            memory_gib_min: wire.memory_gib_min,
            cloud: cloud.map_err(|reason: String| invalid("spec.resources.any_of.cloud", reason))?,
            region: wire.region,
            zone: wire.zone,
            instance_type: wire.instance_type,
        })
    }
}

impl From<&model::CheckpointSpec> for v1::CheckpointSpec {
    fn from(spec: &model::CheckpointSpec) -> Self {
        v1::CheckpointSpec {
            dir: spec.dir.clone(),
            interval_ms: spec.interval.map(|span| span.0),
            signal: spec.signal.map_or(v1::SaveSignal::None, Into::into).into(),
            signal_target: v1::SignalTarget::from(spec.signal_target).into(),
            grace_ms: spec.grace.0,
            profile: v1::Profile::from(spec.profile).into(),
            complete_when: spec.complete_when.clone(),
            keep: spec.keep,
        }
    }
}

impl TryFrom<v1::CheckpointSpec> for model::CheckpointSpec {
    type Error = WireError;

    fn try_from(wire: v1::CheckpointSpec) -> Result<Self, WireError> {
        Ok(model::CheckpointSpec {
            signal: match known::<v1::SaveSignal>(wire.signal, "spec.checkpoint.signal")? {
                v1::SaveSignal::Unspecified => return Err(unspecified("spec.checkpoint.signal")),
                v1::SaveSignal::None => None,
                v1::SaveSignal::Usr1 => Some(model::Signal::Usr1),
                v1::SaveSignal::Usr2 => Some(model::Signal::Usr2),
                v1::SaveSignal::Term => Some(model::Signal::Term),
                v1::SaveSignal::Int => Some(model::Signal::Int),
                v1::SaveSignal::Hup => Some(model::Signal::Hup),
            },
            signal_target: known::<v1::SignalTarget>(wire.signal_target, "spec.checkpoint.signal_target")?
                .try_into()?,
            profile: known::<v1::Profile>(wire.profile, "spec.checkpoint.profile")?.try_into()?,
            dir: wire.dir,
            interval: wire.interval_ms.map(Span),
            grace: Span(wire.grace_ms),
            complete_when: wire.complete_when,
            keep: wire.keep,
        })
    }
}

impl From<&model::Retry> for v1::Retry {
    fn from(retry: &model::Retry) -> Self {
        v1::Retry {
            preemptions: retry.preemptions,
            failures: retry.failures,
            exit_codes: retry.exit_codes.clone(),
        }
    }
}

impl From<v1::Retry> for model::Retry {
    fn from(wire: v1::Retry) -> Self {
        model::Retry { preemptions: wire.preemptions, failures: wire.failures, exit_codes: wire.exit_codes }
    }
}

impl From<(TaskId, Generation)> for v1::Grant {
    fn from((task, generation): (TaskId, Generation)) -> Self {
        v1::Grant { job_id: task.job.0, task_index: task.index, generation: generation.0 }
    }
}

/// Refuses job 0 and generation 0: both mean "none", and nobody holds a grant of nothing.
impl TryFrom<v1::Grant> for (TaskId, Generation) {
    type Error = WireError;

    fn try_from(wire: v1::Grant) -> Result<Self, WireError> {
        if wire.job_id == 0 {
            return Err(invalid("grant.job_id", "0 is no job"));
        }
        if wire.generation == 0 {
            return Err(invalid("grant.generation", "0 means never placed"));
        }
        let task = TaskId { job: JobId(wire.job_id), index: wire.task_index };
        Ok((task, Generation(wire.generation)))
    }
}

impl From<model::Signal> for v1::SaveSignal {
    fn from(signal: model::Signal) -> Self {
        match signal {
            model::Signal::Usr1 => v1::SaveSignal::Usr1,
            model::Signal::Usr2 => v1::SaveSignal::Usr2,
            model::Signal::Term => v1::SaveSignal::Term,
            model::Signal::Int => v1::SaveSignal::Int,
            model::Signal::Hup => v1::SaveSignal::Hup,
        }
    }
}

impl From<model::SignalTarget> for v1::SignalTarget {
    fn from(target: model::SignalTarget) -> Self {
        match target {
            model::SignalTarget::Ranks => v1::SignalTarget::Ranks,
            model::SignalTarget::Launcher => v1::SignalTarget::Launcher,
            model::SignalTarget::All => v1::SignalTarget::All,
        }
    }
}

impl TryFrom<v1::SignalTarget> for model::SignalTarget {
    type Error = WireError;

    fn try_from(wire: v1::SignalTarget) -> Result<Self, WireError> {
        match wire {
            v1::SignalTarget::Unspecified => Err(unspecified("spec.checkpoint.signal_target")),
            v1::SignalTarget::Ranks => Ok(model::SignalTarget::Ranks),
            v1::SignalTarget::Launcher => Ok(model::SignalTarget::Launcher),
            v1::SignalTarget::All => Ok(model::SignalTarget::All),
        }
    }
}

impl From<model::Profile> for v1::Profile {
    fn from(profile: model::Profile) -> Self {
        match profile {
            model::Profile::Generic => v1::Profile::Generic,
            model::Profile::Rename => v1::Profile::Rename,
            model::Profile::Orbax => v1::Profile::Orbax,
        }
    }
}

impl TryFrom<v1::Profile> for model::Profile {
    type Error = WireError;

    fn try_from(wire: v1::Profile) -> Result<Self, WireError> {
        match wire {
            v1::Profile::Unspecified => Err(unspecified("spec.checkpoint.profile")),
            v1::Profile::Generic => Ok(model::Profile::Generic),
            v1::Profile::Rename => Ok(model::Profile::Rename),
            v1::Profile::Orbax => Ok(model::Profile::Orbax),
        }
    }
}

impl From<model::PlacementPolicy> for v1::PlacementPolicy {
    fn from(policy: model::PlacementPolicy) -> Self {
        match policy {
            model::PlacementPolicy::SpotFirst => v1::PlacementPolicy::SpotFirst,
            model::PlacementPolicy::SpotOnly => v1::PlacementPolicy::SpotOnly,
            model::PlacementPolicy::OnDemand => v1::PlacementPolicy::OnDemand,
        }
    }
}

impl TryFrom<v1::PlacementPolicy> for model::PlacementPolicy {
    type Error = WireError;

    fn try_from(wire: v1::PlacementPolicy) -> Result<Self, WireError> {
        match wire {
            v1::PlacementPolicy::Unspecified => Err(unspecified("spec.policy")),
            v1::PlacementPolicy::SpotFirst => Ok(model::PlacementPolicy::SpotFirst),
            v1::PlacementPolicy::SpotOnly => Ok(model::PlacementPolicy::SpotOnly),
            v1::PlacementPolicy::OnDemand => Ok(model::PlacementPolicy::OnDemand),
        }
    }
}

/// A sub-message that must be there.
fn required<T>(value: Option<T>, field: &'static str) -> Result<T, WireError> {
    value.ok_or(WireError::Missing { field })
}

/// An enum's number as a value that this version knows; 0 ("unspecified") is left to the caller's match.
fn known<E: TryFrom<i32>>(value: i32, field: &'static str) -> Result<E, WireError> {
    E::try_from(value).map_err(|_| WireError::UnknownValue { field, value })
}

fn unspecified(field: &'static str) -> WireError {
    WireError::Missing { field }
}

fn invalid(field: &'static str, reason: impl Into<String>) -> WireError {
    WireError::Invalid { field, reason: reason.into() }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::option;
    use proptest::prelude::*;

    use super::*;

    fn minimal() -> v1::JobSpec {
        v1::JobSpec {
            command: Some(v1::Command { kind: Some(v1::command::Kind::Shell("true".into())) }),
            resources: Some(v1::Resources::default()),
            checkpoint: Some((&model::CheckpointSpec::default()).into()),
            policy: v1::PlacementPolicy::SpotFirst.into(),
            retry: Some(v1::Retry::default()),
            ..v1::JobSpec::default()
        }
    }

    fn refused(change: impl FnOnce(&mut v1::JobSpec)) -> String {
        let mut wire = minimal();
        change(&mut wire);
        model::JobSpec::try_from(wire).unwrap_err().to_string()
    }

    #[test]
    fn a_missing_message_is_named() {
        assert!(model::JobSpec::try_from(minimal()).is_ok());
        assert!(refused(|w| w.command = None).contains("`spec.command`"));
        assert!(refused(|w| w.command = Some(v1::Command { kind: None })).contains("`spec.command.kind`"));
        assert!(refused(|w| w.resources = None).contains("`spec.resources`"));
        assert!(refused(|w| w.checkpoint = None).contains("`spec.checkpoint`"));
        assert!(refused(|w| w.retry = None).contains("`spec.retry`"));
    }

    #[test]
    fn an_unknown_or_unspecified_value_is_named_and_never_a_default() {
        for value in [0, 99] {
            assert!(refused(|w| w.policy = value).contains("`spec.policy`"));
            let with = |change: fn(&mut v1::CheckpointSpec, i32)| {
                refused(|w| {
                    let mut checkpoint = w.checkpoint.take().unwrap();
                    change(&mut checkpoint, value);
                    w.checkpoint = Some(checkpoint);
                })
            };
            assert!(with(|c, v| c.signal = v).contains("`spec.checkpoint.signal`"));
            assert!(with(|c, v| c.signal_target = v).contains("`spec.checkpoint.signal_target`"));
            assert!(with(|c, v| c.profile = v).contains("`spec.checkpoint.profile`"));
        }
        let cloud = |w: &mut v1::JobSpec| {
            let choice = v1::Choice { cloud: Some("ibm".into()), ..v1::Choice::default() };
            w.resources = Some(v1::Resources { any_of: vec![choice], max_hourly_nano_usd: None });
        };
        assert!(refused(cloud).contains("expected aws, gcp or azure"));
        let empty = |w: &mut v1::JobSpec| {
            w.command = Some(v1::Command { kind: Some(v1::command::Kind::Argv(v1::Argv::default())) });
        };
        assert!(refused(empty).contains("`spec.command.argv`"));
    }

    #[test]
    fn a_grant_names_a_job_and_a_generation() {
        let task = TaskId { job: JobId(7), index: 3 };
        let wire = v1::Grant::from((task, Generation(2)));
        assert_eq!(<(TaskId, Generation)>::try_from(wire), Ok((task, Generation(2))));
        assert!(<(TaskId, Generation)>::try_from(v1::Grant { job_id: 0, ..wire }).is_err());
        assert!(<(TaskId, Generation)>::try_from(v1::Grant { generation: 0, ..wire }).is_err());
    }

    fn command() -> impl Strategy<Value = model::Command> {
        prop_oneof![
            any::<String>().prop_map(|text| model::Command::Shell { text }),
            prop::collection::vec(any::<String>(), 1..4).prop_map(|argv| model::Command::Argv { argv }),
            (any::<String>(), prop::collection::vec(any::<String>(), 0..3))
                .prop_map(|(text, args)| model::Command::Script { text, args }),
        ]
    }

    fn choice() -> impl Strategy<Value = model::Choice> {
        let text = || option::of("[a-z0-9-]{1,9}");
        let numbers = (any::<u32>(), any::<u32>(), any::<u32>());
        (
            numbers,
            option::of(prop::sample::select(model::Cloud::ALL.to_vec())),
            text(),
            text(),
            text(),
            text(),
        )
            .prop_map(|((count, cpus, memory), cloud, accelerator, region, zone, instance_type)| {
                model::Choice {
                    accelerator,
                    accelerator_count: count,
                    cpus_min: cpus,
                    memory_gib_min: memory,
                    cloud,
                    region,
                    zone,
                    instance_type,
                }
            })
    }

    fn checkpoint() -> impl Strategy<Value = model::CheckpointSpec> {
        use model::{Profile, Signal, SignalTarget};
        let signals = vec![Signal::Usr1, Signal::Usr2, Signal::Term, Signal::Int, Signal::Hup];
        (
            (option::of(any::<String>()), option::of(any::<u64>()), option::of(any::<String>())),
            option::of(prop::sample::select(signals)),
            prop::sample::select(vec![SignalTarget::Ranks, SignalTarget::Launcher, SignalTarget::All]),
            prop::sample::select(vec![Profile::Generic, Profile::Rename, Profile::Orbax]),
            (any::<u64>(), any::<u32>()),
        )
            .prop_map(
                |((dir, interval, complete_when), signal, signal_target, profile, (grace, keep))| {
                    model::CheckpointSpec {
                        dir,
                        interval: interval.map(Span),
                        signal,
                        signal_target,
                        grace: Span(grace),
                        profile,
                        complete_when,
                        keep,
                    }
                },
            )
    }

    fn spec() -> impl Strategy<Value = model::JobSpec> {
        use model::PlacementPolicy as P;
        let map = || prop::collection::btree_map(any::<String>(), any::<String>(), 0..4);
        let texts =
            (any::<String>(), any::<String>(), option::of(any::<String>()), option::of(any::<String>()));
        let numbers =
            (option::of(any::<i64>()), option::of(any::<u64>()), option::of(any::<u64>()), any::<i32>());
        let retry = (option::of(any::<u32>()), any::<u32>(), prop::collection::vec(any::<i32>(), 0..3));
        let resources = (prop::collection::vec(choice(), 0..3), option::of(any::<i64>()));
        let policies = prop::sample::select(vec![P::SpotFirst, P::SpotOnly, P::OnDemand]);
        let rest = (
            prop::collection::vec(any::<String>(), 0..3),
            any::<bool>(),
            policies,
            option::of(any::<String>()),
        );
        (texts, command(), resources, checkpoint(), map(), map(), numbers, retry, rest).prop_map(
            |(texts, command, resources, checkpoint, env, tags, numbers, retry, rest)| model::JobSpec {
                name: texts.0,
                user: texts.1,
                setup: texts.2,
                workdir: texts.3,
                command,
                resources: model::Resources {
                    any_of: resources.0,
                    max_hourly: resources.1.map(UsdPerHour::nanos),
                },
                checkpoint,
                env: BTreeMap::from_iter(env),
                tags: BTreeMap::from_iter(tags),
                budget: numbers.0.map(Usd),
                time_limit: numbers.1.map(Span),
                begin: numbers.2.map(Timestamp),
                priority: numbers.3,
                retry: model::Retry { preemptions: retry.0, failures: retry.1, exit_codes: retry.2 },
                outputs: rest.0,
                hold: rest.1,
                policy: rest.2,
                project: rest.3,
            },
        )
    }

    proptest! {
        #[test]
        fn a_spec_survives_the_wire(spec in spec()) {
            use prost::Message as _;
            let bytes = v1::JobSpec::from(&spec).encode_to_vec();
            let back = v1::JobSpec::decode(bytes.as_slice()).unwrap();
            prop_assert_eq!(model::JobSpec::try_from(back), Ok(spec));
        }
    }
}
