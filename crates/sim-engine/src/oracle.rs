//! What must hold, looked at from outside: from what became durable, from what the cloud and the checkpoint store really
//! hold, from what commands find in their directories, and from what users were told. It trusts no scheduler and no
//! worker, and uses the core only to apply events.

use std::collections::{BTreeMap, BTreeSet};

use spotq_checkpoint::{Action, LogEntry};
use spotq_core::{Cluster, Node, NodeState, Phase, apply, invariants};
use spotq_engine::decode_record;
use spotq_model::{AttemptEnd, EndWhy, Event, Fact, Generation, GoneCause, JobId, NodeId, Outcome, TaskId};
use spotq_provider::LaunchRequest;

use crate::cloud::Owed;
use crate::counts::Count;
use crate::draw::{MARKER, START};
use crate::world::{FIRST_NODE_HOST, Inner};

/// An instance to which no durable state refers is found and ended within this time, once faults have stopped.
const ORPHAN_MAX: u64 = 60_000;
/// What a notice must leave for a save to be owed: to be seen, to be uploaded from a slow store, and some to spare.
const OWED_AFTER_SAVE: u64 = 8000;

/// The outside view of one run.
#[derive(Debug, Default)]
pub(crate) struct Oracle {
    /// What is durable.
    pub shadow: Cluster,
    placed: BTreeMap<TaskId, Generation>,
    done: BTreeSet<TaskId>,
    /// Numbers of jobs by their plan.
    jobs: BTreeMap<JobId, usize>,
    unreferenced: BTreeMap<usize, u64>,
    /// Secrets of nodes and jobs that no record may hold.
    secrets: Vec<String>,
}

/// What a command found when it began.
#[derive(Debug)]
pub(crate) struct Resumed {
    pub inst: usize,
    pub job: u32,
    pub generation: u64,
    pub step: Option<u64>,
    /// The commit says the very step; else it may say less, as far as it was known from progress.
    pub exact: bool,
}

impl Oracle {
    /// Records became durable.
    pub(crate) fn durable(inner: &mut Inner, records: &[Vec<u8>]) {
        for record in records {
            let version = inner.oracle.shadow.version.0;
            let event = match decode_record(version, record) {
                Ok(event) => event,
                Err(error) => return inner.violated("INV-01", format!("a record cannot be read: {error}")),
            };
            check_secrets(inner, record, &event);
            before(inner, &event);
            inner.count(Count::Event);
            let t = inner.t;
            let text = format!("= {} {:?}", event.at.0.saturating_sub(START), event.fact);
            inner.trace.mark(t, &text);
            if let Err(illegal) = apply(&mut inner.oracle.shadow, &event) {
                return inner.violated("INV-12", format!("what is durable does not fit: {illegal}"));
            }
            after(inner, &event);
        }
        if let Some(broken) = invariants::check(&inner.oracle.shadow).into_iter().next() {
            inner.violated(broken.id, broken.text);
        }
    }

    /// A scheduler has recovered (INV-01): it knows all that was ever acknowledged, and nothing else.
    pub(crate) fn recovered(inner: &mut Inner, state: &Cluster) {
        inner.count(Count::Recovery);
        if *state != inner.oracle.shadow {
            inner.violated("INV-01", "a recovery gives another state than what was made durable".into());
        }
        let running = inner.cloud.insts.iter().map(|inst| inst.commands.len()).sum::<usize>();
        (0..running).for_each(|_| inner.count(Count::RanOn));
    }

    /// A user was told of a job (INV-01, INV-04): that is durable, and always the same.
    pub(crate) fn told(inner: &mut Inner, plan: usize, job: u32, uuid: &str) {
        let key = inner.d.jobs[plan].client_key.clone();
        let known = inner.oracle.shadow.by_client_key.get(key.as_str()).copied();
        if known != Some(JobId(job)) {
            inner.violated("INV-01", format!("`{key}` is told job {job}; durable is {known:?}"));
        }
        let told = (job, uuid.to_owned());
        match &inner.jobs[plan].told {
            Some(before) if *before != told => {
                let text = format!("`{key}` was told {before:?}, and now {told:?}");
                inner.violated("INV-04", text);
            }
            Some(_) => inner.count(Count::SubmitRepeated),
            None => inner.jobs[plan].told = Some(told),
        }
    }

    /// The cloud is asked for an instance (INV-04: the intent is durable).
    pub(crate) fn launching(inner: &mut Inner, request: &LaunchRequest) {
        let intent = inner.oracle.shadow.nodes.get(&request.node);
        if !intent.is_some_and(|known| known.key == request.key && known.pool == request.pool) {
            inner.violated("INV-04", format!("node {} is launched without a durable intent", request.node));
        }
        inner.oracle.secrets.push(request.bootstrap.join_secret.expose().to_owned());
        let text = format!("{:?} {:?}", request.key, request.tags);
        if text.contains(MARKER) || inner.d.jobs.iter().any(|job| text.contains(&job.client_key)) {
            inner.violated("INV-14", format!("a launch says too much: {text}"));
        }
    }

    /// INV-04: the same key is the same request.
    pub(crate) fn launched_again(inner: &mut Inner, inst: usize, request: &LaunchRequest) {
        let known = &inner.cloud.insts[inst];
        if known.node != request.node || known.pool != request.pool {
            let text = format!("launch key `{}` is used for two nodes", known.key);
            inner.violated("INV-04", text);
        }
    }

    /// INV-04: an instance is ended only after it was decided durably.
    pub(crate) fn terminating(inner: &mut Inner, inst: usize) {
        let id = inner.cloud.insts[inst].id.clone();
        let mut nodes = inner.oracle.shadow.nodes.values();
        let decided =
            nodes.any(|node| node.instance.as_ref() == Some(&id) && node.state >= NodeState::Ending);
        if !decided {
            inner.violated("INV-04", format!("{id} is ended without a durable decision"));
        }
    }

    /// INV-07: what a notice left time for is stored before the instance goes, whoever ends it.
    pub(crate) fn instance_ends(inner: &mut Inner, inst: usize, cause: GoneCause) {
        let host = FIRST_NODE_HOST + inner.cloud.insts[inst].slot;
        let trouble = inner.cloud.insts[inst].store_trouble_at;
        for owed in inner.cloud.insts[inst].owed.clone() {
            let c = &inner.oracle.shadow;
            let job = c.jobs.values().find(|job| job.uuid == owed.uuid).map(|job| TaskId::only(job.id));
            let mut attempts =
                job.and_then(|task| c.task(task)).map(|task| task.attempts.iter()).into_iter().flatten();
            let attempt = attempts.find(|attempt| attempt.generation.0 == owed.generation);
            let drained =
                matches!(attempt.and_then(|a| a.end.as_ref()), Some(AttemptEnd::Preempted { noticed: true }));
            let excused = trouble >= owed.since || inner.skews[host] != 0;
            if excused || cause != GoneCause::Preempted && !drained {
                continue;
            }
            inner.count(Count::Owed);
            let Owed { uuid, generation, step, .. } = owed;
            let log = inner.objects.logs.get(&uuid).map_or(&[][..], Vec::as_slice);
            let held = log.iter().any(|entry| {
                entry.generation >= Generation(generation)
                    && matches!(&entry.action, Action::Commit { step: Some(held), .. } if *held >= step)
            });
            let superseded = log.iter().any(|entry| entry.generation > Generation(generation));
            if !held && !superseded {
                let text = format!(
                    "generation {generation} of {uuid} had time to store step {step}, and i-{inst} is gone first"
                );
                inner.violated("INV-07", text);
            }
        }
    }

    /// An entry of a commit log was written.
    pub(crate) fn logged(inner: &mut Inner, uuid: &str, entry: &LogEntry) {
        let before = inner.objects.logs.get(uuid).map_or(&[][..], Vec::as_slice);
        if before.len() as u64 + 1 != entry.seq.0 {
            let text = format!("entry {} of {uuid} does not follow {}", entry.seq, before.len());
            return inner.violated("INV-02", text);
        }
        inner.count(match &entry.action {
            Action::Fence => Count::Fenced,
            Action::Commit { .. } => Count::Committed,
            Action::Quarantine { .. } | Action::Retire { .. } => Count::Quarantined,
        });
        let quarantine = matches!(entry.action, Action::Quarantine { .. });
        if quarantine && !inner.objects.damaged.contains(uuid) {
            inner.violated("INV-06", format!("a sound checkpoint of {uuid} is given up: {:?}", entry.action));
        }
        let t = inner.t;
        let job = inner.oracle.shadow.jobs.values().find(|job| job.uuid == uuid).map(|job| job.id.0);
        let text = format!("log of job {job:?}: {} {} {}", entry.seq, entry.generation, kind(&entry.action));
        inner.trace.mark(t, &text);
    }

    /// A worker starts a command (INV-02, INV-04): it was granted durably, to this node, and is the only one here.
    pub(crate) fn command_starts(inner: &mut Inner, inst: usize, job: u32, generation: u64) {
        let task = TaskId::only(JobId(job));
        let node = inner.cloud.insts[inst].node;
        let attempts = inner.oracle.shadow.task(task).map_or(&[][..], |task| &task.attempts);
        let granted = attempts.iter().any(|a| a.generation == Generation(generation) && a.node == node);
        if !granted {
            let text = format!("i-{inst} runs generation {generation} of job {job}, which is not durable");
            inner.violated("INV-04", text);
        }
        let grant = (job, generation);
        if inner.cloud.insts[inst].commands.contains(&grant) {
            inner.violated("INV-02", format!("generation {generation} of job {job} runs twice on i-{inst}"));
        }
        inner.count(Count::Started);
        inner.cloud.insts[inst].commands.push(grant);
    }

    /// A command has found a checkpoint, or none (INV-02, INV-05, INV-06).
    pub(crate) fn resumed(inner: &mut Inner, found: &Resumed) {
        let Some(job) = inner.oracle.shadow.jobs.get(&JobId(found.job)).cloned() else { return };
        let head = inner.objects.head(&job.uuid);
        // Whoever is newer owns the log by now, and may have written there.
        let log = inner.objects.logs.get(&job.uuid).map_or(&[][..], Vec::as_slice);
        if log.iter().any(|entry| entry.generation > Generation(found.generation)) {
            return;
        }
        let committed = head.and_then(|head| head.step);
        let fits = match (found.step, head) {
            (None, None) => true,
            // The step of a commit is that of its newest file, and which one that is the node's clock says.
            (Some(step), Some(_)) if found.exact && !inner.clocks_jump() => Some(step) == committed,
            (Some(step), Some(_)) => committed.is_none_or(|committed| committed <= step),
            (None, Some(_)) | (Some(_), None) => false,
        };
        if !fits {
            let id = if found.step < committed { "INV-06" } else { "INV-05" };
            let text = format!(
                "generation {} of job {} on i-{} resumes at {:?}, the log says {head:?}",
                found.generation, found.job, found.inst, found.step
            );
            inner.violated(id, text);
        }
        if found.step.is_some() {
            inner.count(Count::Resumed);
        }
    }

    /// INV-07: a command has saved since it was asked to. Where its notice leaves time, that is to be stored.
    pub(crate) fn saved_on_signal(inner: &mut Inner, inst: usize, job: u32, generation: u64, step: u64) {
        let node = &inner.cloud.insts[inst];
        let left = node.notice.map_or(0, |deadline| deadline.saturating_sub(inner.t));
        let Some(job) = inner.oracle.shadow.jobs.get(&JobId(job)) else { return };
        if step > 0 && left >= OWED_AFTER_SAVE {
            let owed = Owed { uuid: job.uuid.clone(), generation, step, since: inner.t };
            inner.cloud.insts[inst].owed.push(owed);
        }
    }

    /// INV-03: what we pay for is known, or is found soon.
    pub(crate) fn audit(inner: &mut Inner) {
        let t = inner.t;
        for inst in 0..inner.cloud.insts.len() {
            let seen = &inner.cloud.insts[inst];
            let by_tag = |node: &Node| node.key == seen.key && node.state != NodeState::Gone;
            let known = inner.oracle.shadow.nodes.get(&seen.node).is_some_and(|node| by_tag(node))
                || inner.oracle.shadow.live_nodes().any(|node| node.instance.as_ref() == Some(&seen.id));
            if known || !seen.is_up() {
                inner.oracle.unreferenced.remove(&inst);
                continue;
            }
            let since = *inner.oracle.unreferenced.entry(inst).or_insert(t);
            if inner.calm && t - since.max(inner.calm_from) > ORPHAN_MAX {
                inner.violated("INV-03", format!("i-{inst} is paid for and nobody knows it"));
            }
        }
    }

    /// Whether everything is over: each job has its end, nothing is up, nobody waits.
    pub(crate) fn is_over(inner: &Inner) -> bool {
        let c = &inner.oracle.shadow;
        inner.jobs.iter().all(|job| job.told.is_some() && job.user_is_done)
            && c.live.is_empty()
            && c.jobs.values().flat_map(|job| job.tasks.values()).all(|task| task.is_done())
            && inner.cloud.insts.iter().all(|inst| !inst.is_up())
    }

    /// What is not over yet, for people.
    pub(crate) fn what_is_left(inner: &Inner) -> String {
        let c = &inner.oracle.shadow;
        let tasks = c.jobs.values().flat_map(|job| job.tasks.values()).filter(|task| !task.is_done());
        let tasks: Vec<String> = tasks.map(|task| format!("{} {:?}", task.id, task.phase)).collect();
        let up = inner.cloud.insts.iter().filter(|inst| inst.is_up()).map(|inst| inst.id.to_string());
        let users = inner.jobs.iter().filter(|job| !job.user_is_done).count();
        format!(
            "tasks {tasks:?}, live nodes {:?}, up {:?}, {users} users wait",
            c.live,
            up.collect::<Vec<_>>()
        )
    }

    /// Everything is over.
    pub(crate) fn ended(inner: &mut Inner) {
        let ids: Vec<NodeId> = inner.oracle.shadow.nodes.keys().copied().collect();
        ids.into_iter().for_each(|id| check_lifetime(inner, id));
        check_outcomes(inner);
        if let Some(broken) = invariants::check_spend(&inner.oracle.shadow) {
            inner.violated(broken.id, broken.text);
        }
    }

    /// INV-14: no line of any log says a secret.
    pub(crate) fn check_log(inner: &mut Inner, text: &str) {
        let keys = inner.oracle.secrets.clone();
        let said = std::iter::once(MARKER).chain(keys.iter().map(String::as_str));
        if let Some(line) = said.filter_map(|secret| text.lines().find(|line| line.contains(secret))).next() {
            inner.violated("INV-14", format!("a log says a secret: {line}"));
        }
    }
}

fn kind(action: &Action) -> String {
    match action {
        Action::Fence => "fence".into(),
        Action::Commit { checkpoint, step, .. } => format!("commit {checkpoint} step {step:?}"),
        Action::Quarantine { checkpoint, .. } => format!("quarantine {checkpoint}"),
        Action::Retire { checkpoint } => format!("retire {checkpoint}"),
    }
}

/// INV-14: no record but the submit itself says a user's secret, and none a node's.
fn check_secrets(inner: &mut Inner, record: &[u8], event: &Event) {
    let text = String::from_utf8_lossy(record);
    let submit = matches!(event.fact, Fact::JobSubmitted { .. });
    if !submit && text.contains(MARKER) || inner.oracle.secrets.iter().any(|secret| text.contains(secret)) {
        inner.violated("INV-14", format!("a secret is in {text}"));
    }
}

/// What an event may not say about the state that it finds.
fn before(inner: &mut Inner, event: &Event) {
    match &event.fact {
        Fact::AttemptEnded { task, generation, end, .. } => attempt_ends(inner, *task, *generation, end),
        Fact::CheckpointCommitted { task, generation, checkpoint } => {
            let newest = inner.oracle.placed.get(task).copied();
            if newest != Some(*generation) || checkpoint.generation != *generation {
                let text = format!(
                    "a commit of generation {generation} of task {task} is taken; {newest:?} is newest"
                );
                inner.violated("INV-02", text);
            }
            check_commit(inner, *task, checkpoint);
        }
        Fact::AttemptPlaced { task, generation, .. } => {
            let before = inner.oracle.placed.insert(*task, *generation);
            if before.is_some_and(|before| before >= *generation) {
                inner.violated("INV-02", format!("generation {generation} of task {task} is not the newest"));
            }
        }
        Fact::TaskDone { task, .. } if !inner.oracle.done.insert(*task) => {
            inner.violated("INV-11", format!("task {task} was done twice"));
        }
        Fact::NodeJoined { .. } => inner.count(Count::Joined),
        _ => {}
    }
}

/// INV-02, INV-05: what counts as committed is in the store's log, as it says.
fn check_commit(inner: &mut Inner, task: TaskId, checkpoint: &spotq_model::Checkpoint) {
    let Some(job) = inner.oracle.shadow.jobs.get(&task.job) else { return };
    let log = inner.objects.logs.get(&job.uuid).map_or(&[][..], Vec::as_slice);
    let held = log.iter().any(|entry| {
        entry.seq.0 == checkpoint.log_sequence
            && entry.generation == checkpoint.generation
            && matches!(&entry.action, Action::Commit { checkpoint: held, step, .. }
                if held.0 == checkpoint.sequence && *step == checkpoint.step)
    });
    if !held {
        inner.violated("INV-05", format!("task {task} counts a commit that is not stored: {checkpoint:?}"));
    }
}

/// INV-12: an attempt is not given up while its command runs on a node that nothing happened to.
fn attempt_ends(inner: &mut Inner, task: TaskId, generation: Generation, end: &AttemptEnd) {
    // Each lost message may be of any connection, and ends it.
    if inner.clocks_jump() || inner.d.faults.message_loss_ppm > 0 {
        return;
    }
    let Some(attempt) = inner.oracle.shadow.attempt_under_way(task, generation) else { return };
    let excused = attempt.stop.is_some() || attempt.held_exit.is_some();
    let given_up =
        matches!(end, AttemptEnd::NodeLost { .. } | AttemptEnd::Requeued | AttemptEnd::Preempted { .. });
    if excused || !given_up {
        return;
    }
    let Some(instance) = inner.oracle.shadow.nodes.get(&attempt.node).and_then(|n| n.instance.clone()) else {
        return;
    };
    let inst = inner.cloud.insts.iter().find(|inst| inst.id == instance && inst.is_up());
    let Some(inst) = inst.filter(|inst| !inst.touched) else { return };
    if inst.commands.contains(&(task.job.0, generation.0)) {
        let text = format!(
            "generation {generation} of task {task} runs undisturbed on {instance} and is given up: {end:?}"
        );
        inner.violated("INV-12", text);
    }
}

fn after(inner: &mut Inner, event: &Event) {
    match &event.fact {
        Fact::JobSubmitted { job, client_key, .. } => {
            let plan = client_key.strip_prefix("client-").and_then(|n| n.parse().ok()).unwrap_or(0);
            inner.oracle.jobs.insert(*job, plan);
        }
        Fact::TaskDone { outcome, .. } => inner.count(match outcome {
            Outcome::Completed => Count::Completed,
            Outcome::Failed { .. } => Count::Failed,
            Outcome::Timeout => Count::Timeout,
            Outcome::Cancelled => Count::Cancelled,
            Outcome::PreemptionBudgetSpent => Count::PreemptionBudget,
            Outcome::NodeFailure => Count::NodeFailure,
            Outcome::OutOfMemory => Count::OutOfMemory,
            Outcome::LaunchFailure { .. } => Count::LaunchFailure,
            Outcome::BudgetExhausted => return inner.violated("INV-11", "no job has a budget".into()),
        }),
        _ => {}
    }
}

/// INV-09: the bill begins and ends where the cloud's own does, without gaps.
fn check_lifetime(inner: &mut Inner, id: NodeId) {
    let Some(node) = inner.oracle.shadow.nodes.get(&id).filter(|n| n.ending != Some(EndWhy::Orphan)) else {
        return;
    };
    let inst = inner.cloud.insts.iter().find(|inst| Some(&inst.id) == node.instance.as_ref());
    let (Some(inst), Some(first), Some(last)) =
        (inst, node.ledger.segments.first(), node.ledger.segments.last())
    else {
        return;
    };
    let whole = node.ledger.segments.windows(2).all(|pair| pair[0].end == Some(pair[1].start));
    let end = last.end.unwrap_or_default().0.saturating_sub(START);
    let start = first.start.0.saturating_sub(START);
    let gone_at = inst.gone_at().unwrap_or(u64::MAX);
    let text = format!(
        "node {id} is billed from {start} to {end} (whole: {whole}), the cloud has it from {} to {gone_at}",
        inst.launched_at
    );
    let wrong = !inner.clocks_jump() && (start != inst.launched_at || end < gone_at || end > inner.t);
    if !whole || wrong {
        inner.violated("INV-09", text);
    }
}

/// INV-11: one end for each job, none that nobody asked for; a completed job is stored to its last step.
fn check_outcomes(inner: &mut Inner) {
    let c = &inner.oracle.shadow;
    let mut broken = None;
    for job in c.jobs.values() {
        let Some(plan) = inner.oracle.jobs.get(&job.id).map(|plan| &inner.d.jobs[*plan]) else { continue };
        let Some(Phase::Done { outcome }) = job.tasks.values().next().map(|task| &task.phase) else {
            continue;
        };
        let wished = |wish| plan.wishes.iter().any(|(_, known)| *known == wish);
        let unexpected = match outcome {
            Outcome::Cancelled => !wished(crate::draw::Wish::Cancel),
            Outcome::Timeout => plan.spec.time_limit.is_none(),
            Outcome::PreemptionBudgetSpent => plan.spec.retry.preemptions.is_none(),
            Outcome::Completed => plan.end != crate::draw::End::Well,
            Outcome::LaunchFailure { .. } => plan.end != crate::draw::End::NeverStarts,
            _ => false,
        };
        if unexpected {
            broken = Some(("INV-11", format!("job {} ended as {outcome:?}, which nobody asked for", job.id)));
        }
        let head = inner.objects.head(&job.uuid);
        let undamaged = !inner.objects.damaged.contains(&job.uuid);
        let whole = |step: u64| inner.clocks_jump() || step + 1 >= plan.steps;
        let stored = head.is_some_and(|head| head.step.is_none_or(whole));
        if *outcome == Outcome::Completed && undamaged && !stored {
            broken = Some(("INV-05", format!("job {} completed with {head:?} stored", job.id)));
        }
    }
    if let Some((id, text)) = broken {
        inner.violated(id, text);
    }
}
