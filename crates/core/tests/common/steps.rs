//! Random steps of a world that is not honest: things come late, twice, out of order, about the wrong generation, or not
//! at all. Numbers in steps pick among what is there, so that every sequence of steps makes sense and shrinks well.

use std::sync::Arc;

use proptest::prelude::*;
use spotq_core::Task;
use spotq_model::{
    Checkpoint, Cloud as CloudName, EffectKey, Exit, Generation, GoneCause, Input, InstanceSeen, JobSpec,
    LaunchAnswer, Market, PlacementPolicy, Progress, Quote, Refusal, RefusalKind, Report, Retry, Scope, Span,
    Timestamp, Usd,
};
use spotq_testkit::job;

use super::workers::{exited, terminated};
use super::world::{FAILING, World, prices};

/// One thing that happens.
#[derive(Debug, Clone)]
pub enum Step {
    Submit {
        kind: u8,
        key: u8,
    },
    User {
        what: User,
        job: u8,
    },
    Answer {
        node: u8,
        how: Answer,
    },
    List {
        old: bool,
        lost: u8,
        stranger: bool,
        doubled: bool,
    },
    Gone {
        node: u8,
        cause: GoneCause,
        ago: u16,
    },
    Join {
        node: u8,
        forgets: bool,
    },
    Lease {
        node: u8,
    },
    Reported {
        task: u8,
        whose: Whose,
        what: What,
        n: u16,
    },
    Prices {
        level: u16,
    },
    Plan,
    Tick,
    Later {
        ms: u32,
    },
    ClockBack {
        ms: u32,
    },
    /// Everybody does for once what he should.
    Honest,
}

#[derive(Debug, Clone, Copy)]
pub enum User {
    Cancel,
    Hold,
    Release,
    Requeue,
    Drill,
}

#[derive(Debug, Clone, Copy)]
pub enum Answer {
    Launched,
    /// The instance is made, and the answer comes twice, and then a refusal.
    Doubled,
    Refused {
        kind: RefusalKind,
        scope: u8,
    },
    /// The instance is made, but nobody is told.
    Lost,
}

/// Who reports.
#[derive(Debug, Clone, Copy)]
pub enum Whose {
    Current,
    Older,
    Unborn,
    OtherNode,
}

#[derive(Debug, Clone, Copy)]
pub enum What {
    Accepted,
    Restored,
    Started,
    Progressed,
    Noticed,
    Withdrawn,
    Committed,
    /// The store has it, the scheduler is not told.
    CommittedUnheard,
    Finished,
    Superseded,
}

pub fn steps(most: usize) -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(step(), 1..most)
}

fn step() -> impl Strategy<Value = Step> {
    let user =
        prop::sample::select(vec![User::Cancel, User::Hold, User::Release, User::Requeue, User::Drill]);
    let cause = prop::sample::select(vec![
        GoneCause::Preempted,
        GoneCause::Terminated,
        GoneCause::Crashed,
        GoneCause::Expired,
    ]);
    prop_oneof![
        4 => (any::<u8>(), 0_u8..6).prop_map(|(kind, key)| Step::Submit { kind, key }),
        3 => (user, any::<u8>()).prop_map(|(what, job)| Step::User { what, job }),
        6 => (any::<u8>(), answer()).prop_map(|(node, how)| Step::Answer { node, how }),
        3 => (any::<bool>(), any::<u8>(), any::<bool>(), any::<bool>())
            .prop_map(|(old, lost, stranger, doubled)| Step::List { old, lost, stranger, doubled }),
        2 => (any::<u8>(), cause, any::<u16>()).prop_map(|(node, cause, ago)| Step::Gone { node, cause, ago }),
        6 => (any::<u8>(), any::<bool>()).prop_map(|(node, forgets)| Step::Join { node, forgets }),
        1 => any::<u8>().prop_map(|node| Step::Lease { node }),
        16 => (any::<u8>(), whose(), what(), any::<u16>())
            .prop_map(|(task, whose, what, n)| Step::Reported { task, whose, what, n }),
        2 => (0_u16..1300).prop_map(|level| Step::Prices { level }),
        6 => Just(Step::Plan),
        3 => Just(Step::Tick),
        2 => (0_u32..5_000).prop_map(|ms| Step::Later { ms }),
        1 => (0_u32..1_200_000).prop_map(|ms| Step::Later { ms }),
        1 => (0_u32..60_000).prop_map(|ms| Step::ClockBack { ms }),
        4 => Just(Step::Honest),
    ]
}

fn answer() -> impl Strategy<Value = Answer> {
    let kind = prop::sample::select(vec![
        RefusalKind::InsufficientCapacity,
        RefusalKind::QuotaExceeded,
        RefusalKind::PriceTooLow,
        RefusalKind::Denied,
    ]);
    prop_oneof![
        4 => Just(Answer::Launched),
        1 => Just(Answer::Doubled),
        2 => (kind, 0_u8..5).prop_map(|(kind, scope)| Answer::Refused { kind, scope }),
        1 => Just(Answer::Lost),
    ]
}

fn whose() -> impl Strategy<Value = Whose> {
    prop_oneof![
        8 => Just(Whose::Current),
        1 => Just(Whose::Older),
        1 => Just(Whose::Unborn),
        1 => Just(Whose::OtherNode),
    ]
}

fn what() -> impl Strategy<Value = What> {
    prop_oneof![
        4 => Just(What::Accepted),
        4 => Just(What::Restored),
        4 => Just(What::Started),
        2 => Just(What::Progressed),
        1 => Just(What::Noticed),
        1 => Just(What::Withdrawn),
        3 => Just(What::Committed),
        1 => Just(What::CommittedUnheard),
        2 => Just(What::Finished),
        1 => Just(What::Superseded),
    ]
}

impl World {
    pub fn step(&mut self, step: &Step) {
        match step {
            Step::Submit { kind, key } => self.submit(*kind, *key),
            Step::User { what, job } => self.user(*what, *job),
            Step::Answer { node, how } => self.answer(*node, *how),
            Step::List { old, lost, stranger, doubled } => self.list(*old, *lost, *stranger, *doubled),
            Step::Gone { node, cause, ago } => self.gone(*node, *cause, *ago),
            Step::Join { node, forgets } => {
                let Some(node) = pick(self.core.cluster.live.iter().copied(), *node) else { return };
                let held = if *forgets { Vec::new() } else { self.workers.held(node) };
                self.feed(&Input::WorkerJoined { node, held });
            }
            Step::Lease { node } => {
                if let Some(node) = pick(self.core.cluster.nodes.keys().copied(), *node) {
                    self.feed(&Input::LeaseExpired { node });
                }
            }
            Step::Reported { task, whose, what, n } => self.reported(*task, *whose, *what, *n),
            Step::Prices { level } => {
                self.offers = prices(u64::from(*level));
                self.feed(&Input::Offers { offers: self.offers.clone() });
                self.feed_in_vain(&Input::Offers { offers: self.offers.clone() }, "the same prices twice");
            }
            Step::Plan => {
                self.feed(&Input::Plan { offers: self.offers.clone() });
                self.every_waiting_task_has_a_reason();
            }
            Step::Tick => drop(self.feed(&Input::Tick)),
            Step::Later { ms } => self.clock = self.clock + Span(u64::from(*ms)),
            Step::ClockBack { ms } => self.clock = self.clock - Span(u64::from(*ms)),
            Step::Honest => self.round(),
        }
    }

    fn submit(&mut self, kind: u8, key: u8) {
        let input = Input::Submit {
            client_key: format!("key-{key}"),
            uuid: format!("{key:08x}"),
            spec: Arc::new(spec(kind, self.clock)),
        };
        self.feed(&input);
        let jobs = self.core.cluster.jobs.len();
        self.feed_in_vain(&input, "INV-04: one key, two jobs");
        assert_eq!(self.core.cluster.jobs.len(), jobs);
    }

    fn user(&mut self, what: User, job: u8) {
        let Some(job) = pick(self.core.cluster.jobs.keys().copied(), job) else { return };
        let notice = Span::secs(30);
        self.feed(&match what {
            User::Cancel => Input::Cancel { job },
            User::Hold => Input::Hold { job },
            User::Release => Input::Release { job },
            User::Requeue => Input::Requeue { job },
            User::Drill => Input::Drill { job, notice },
        });
    }

    fn answer(&mut self, node: u8, how: Answer) {
        // Those that were given up are in here too: an answer may be later than our patience.
        let open = self.core.cluster.nodes.values().filter(|node| node.launched_at.is_none());
        let Some(node) = pick(open.map(|node| node.id), node) else { return };
        let (key, pool) = {
            let node = &self.core.cluster.nodes[&node];
            (node.key.clone(), node.pool.clone())
        };
        let quote = Quote { as_of: self.clock, ..self.core.cluster.nodes[&node].quote.clone() };
        match how {
            Answer::Launched | Answer::Doubled => {
                let InstanceSeen { instance, launched_at, .. } =
                    self.cloud.launch(self.clock, &key, Some(node), &pool);
                let answer = LaunchAnswer::Launched { instance, quote, launched_at };
                let answer = Input::LaunchAnswered { node, answer };
                self.feed(&answer);
                if matches!(how, Answer::Doubled) {
                    self.feed_in_vain(&answer, "INV-04: a launch was answered twice");
                    let no =
                        Input::LaunchAnswered { node, answer: refused(&pool, RefusalKind::Transient, 0) };
                    self.feed_in_vain(&no, "INV-04: a launch was refused after it was answered");
                }
            }
            Answer::Refused { kind, scope } => {
                let answer = Input::LaunchAnswered { node, answer: refused(&pool, kind, scope) };
                self.feed(&answer);
                self.feed_in_vain(&answer, "INV-04: a launch was refused twice");
            }
            Answer::Lost => drop(self.cloud.launch(self.clock, &key, Some(node), &pool)),
        }
    }

    fn list(&mut self, old: bool, lost: u8, stranger: bool, doubled: bool) {
        if stranger {
            let n = self.cloud.instances.len();
            let pool = self.offers[n % self.offers.len()].pool.clone();
            self.cloud.launch(self.clock, &EffectKey(format!("stranger-{n}")), None, &pool);
        }
        let new = (self.clock, self.cloud.instances.clone());
        let (asked_at, mut instances) = if old { self.old_list.clone() } else { new.clone() };
        self.old_list = new;
        if usize::from(lost) < instances.len() {
            instances.remove(usize::from(lost));
        }
        if doubled {
            instances.extend(instances.clone());
        }
        let input = Input::Instances { asked_at, instances };
        self.feed(&input);
        self.feed_in_vain(&input, "INV-03: a list was news twice");
    }

    fn gone(&mut self, node: u8, cause: GoneCause, ago: u16) {
        let live = self.core.cluster.live_nodes().filter_map(|node| node.instance.clone());
        let Some(instance) = pick(live, node) else { return };
        let at = self.clock - Span(u64::from(ago));
        self.cloud.end(&instance, cause, at);
        let input = Input::InstanceGone { instance, cause, at };
        self.feed(&input);
        self.feed_in_vain(&input, "an instance ended twice");
    }

    fn reported(&mut self, task: u8, whose: Whose, what: What, n: u16) {
        let placed = self.core.cluster.jobs.values().flat_map(|job| job.tasks.values());
        let Some(task) = pick(placed.filter(|task| !task.attempts.is_empty()).map(|task| task.id), task)
        else {
            return;
        };
        let known: Task = self.core.cluster.task(task).unwrap().clone();
        let newest = known.last_attempt().unwrap();
        let (node, generation) = match whose {
            Whose::Current => (newest.node, newest.generation),
            Whose::Older => match known.attempts.iter().rev().nth(1) {
                Some(older) => (older.node, older.generation),
                None => (newest.node, Generation(0)),
            },
            Whose::Unborn => (newest.node, newest.generation.next()),
            Whose::OtherNode => (newest.node.next(), newest.generation),
        };
        let current = matches!(whose, Whose::Current) && newest.end.is_none();
        let report = if current {
            self.say(&known, what, n)
        } else {
            Some(self.voice_from_the_past(generation, what, n))
        };
        let Some(report) = report else { return };
        let input = Input::Reported { node, task, generation, report };
        if current {
            self.feed(&input);
            if may_not_repeat(&input) {
                self.feed_in_vain(&input, "a report came twice");
            }
        } else {
            self.feed_in_vain(&input, "INV-02: only the generation under way has a voice");
        }
    }

    /// What the worker of the attempt under way might say; `None` for what nobody hears.
    fn say(&mut self, task: &Task, what: What, n: u16) -> Option<Report> {
        let attempt = task.last_attempt()?;
        let store = self.stores.entry(task.id).or_default();
        let may_write = attempt.accepted_at.is_some();
        Some(match what {
            What::Restored if may_write && attempt.started_at.is_none() && attempt.held_exit.is_none() => {
                // One in eight stores has damage.
                let (from, fell_back) =
                    store.restore(if n.is_multiple_of(8) { usize::from(n / 8 % 3) } else { 0 });
                Report::Restored { from, fell_back }
            }
            // A worker restores before it starts.
            What::Started if attempt.resumed != store.log.last().cloned() => return None,
            What::Committed if may_write => {
                Report::Committed { checkpoint: store.commit(attempt.generation, self.clock) }
            }
            What::CommittedUnheard if may_write => {
                store.commit(attempt.generation, self.clock);
                return None;
            }
            What::Restored | What::Committed | What::CommittedUnheard => return None,
            What::Superseded => Report::Superseded { by: attempt.generation.next() },
            What::Accepted
            | What::Started
            | What::Progressed
            | What::Noticed
            | What::Withdrawn
            | What::Finished => self.voice_from_the_past(attempt.generation, what, n),
        })
    }

    fn voice_from_the_past(&self, generation: Generation, what: What, n: u16) -> Report {
        match what {
            What::Accepted => Report::Accepted,
            What::Restored => Report::Restored { from: Some(self.fabricated(generation, n)), fell_back: 0 },
            What::Started => Report::Started,
            What::Progressed => {
                Report::Progressed { progress: Progress { step: u64::from(n), total: Some(500) } }
            }
            What::Noticed => {
                let deadline = self.clock + Span(u64::from(n) * 2);
                Report::Noticed { deadline, source: "imds".into() }
            }
            What::Withdrawn => Report::NoticeWithdrawn,
            What::Committed | What::CommittedUnheard => {
                Report::Committed { checkpoint: self.fabricated(generation, n) }
            }
            What::Finished => Report::Finished { exit: exit(n, self.clock) },
            What::Superseded => Report::Superseded { by: Generation(u64::from(n) % 9) },
        }
    }

    fn fabricated(&self, generation: Generation, n: u16) -> Checkpoint {
        Checkpoint {
            sequence: 1000 + u64::from(n),
            log_sequence: 1000 + u64::from(n),
            generation,
            step: Some(1_000_000),
            bytes_total: 1,
            bytes_uploaded: 1,
            saved_at: self.clock,
            manifest_hash: "dead".into(),
        }
    }

    /// The planner leaves no task without a word: placed, or one reason other than not having been looked at.
    fn every_waiting_task_has_a_reason(&self) {
        let queue = &self.core.cluster.queue;
        let unexplained = queue.iter().filter_map(|key| self.core.cluster.task(key.task)).find(|task| {
            matches!(task.phase, spotq_core::Phase::Pending { reason: spotq_model::WaitReason::Queued, .. })
        });
        assert!(unexplained.is_none(), "planned, and nobody knows why it waits: {unexplained:?}");
    }
}

/// A restore of nothing looks like none, and is harmless twice.
fn may_not_repeat(input: &Input) -> bool {
    let Input::Reported { report, .. } = input else { return true };
    !matches!(report, Report::Restored { from: None, fell_back: 0 })
}

fn exit(n: u16, now: Timestamp) -> Exit {
    match n % 7 {
        0 => exited(0, now),
        1 => exited(3, now - Span(u64::from(n))),
        2 => terminated(now),
        3 => Exit { out_of_memory: true, exit_code: None, signal: Some(9), ..exited(0, now) },
        4 => Exit { launch_error: Some("no such file".into()), exit_code: None, ..exited(0, now) },
        5 => Exit { exit_code: None, signal: Some(9), ..exited(0, now + Span::secs(60)) },
        _ => Exit { signalled: true, ..exited(0, now) },
    }
}

fn refused(pool: &spotq_model::Pool, kind: RefusalKind, scope: u8) -> LaunchAnswer {
    let (cloud, region) = (pool.cloud, pool.region.clone());
    let scope = match scope {
        0 => Scope::Pool { pool: pool.clone() },
        1 => Scope::Zone { cloud, zone: pool.zone.clone() },
        2 => Scope::Region { cloud, region },
        3 => Scope::RegionMarket { cloud, region, market: Market::Spot },
        _ => Scope::Cloud { cloud: CloudName::Aws },
    };
    LaunchAnswer::Refused {
        refusal: Refusal { kind, scope, cool_down: Span::secs(10), message: "none left".into() },
    }
}

/// Jobs that each stretch another rule; all of them can end in an honest world.
fn spec(kind: u8, now: Timestamp) -> JobSpec {
    let plain = job("train");
    match kind % 11 {
        0 => JobSpec { policy: PlacementPolicy::SpotOnly, ..plain },
        1 => JobSpec { policy: PlacementPolicy::OnDemand, ..plain },
        2 => JobSpec { time_limit: Some(Span::secs(30)), ..plain },
        3 => JobSpec { budget: Some(Usd(5_000_000)), ..plain },
        4 => JobSpec { retry: Retry { preemptions: Some(1), failures: 2, exit_codes: vec![1, 3] }, ..plain },
        5 => JobSpec { priority: 5, hold: true, ..plain },
        6 => JobSpec { begin: Some(now + Span::secs(60)), ..plain },
        7 => JobSpec { name: FAILING.into(), retry: Retry { failures: 1, ..Retry::default() }, ..plain },
        8 => {
            let mut spec = plain;
            spec.resources.max_hourly = Some("0.5".parse().unwrap());
            spec
        }
        _ => plain,
    }
}

fn pick<T>(items: impl Iterator<Item = T>, number: u8) -> Option<T> {
    let mut items: Vec<T> = items.collect();
    if items.is_empty() { None } else { Some(items.swap_remove(usize::from(number) % items.len())) }
}
