//! What the scheduler answers, as tables and pages for people. Pure: a view, the time, and out comes text.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use spotq_model::{Choice, JobSpec, Resources, Span, Timestamp, Usd, UsdPerHour};
use spotq_proto::v1;

use crate::out::{Cell, Column, Format, Grid, Out, Tone, plain, short};
use crate::words::{self, price, usd};

/// Pools in the table of `explain`: who is next matters, not who is hundredth.
pub const RANKED_MAX: usize = 10;
/// A cloud's own words can fill a screen; a table has their beginning.
const WHY_MAX: usize = 60;
/// Longer names are cut in tables; `show` has them whole.
const NAME_MAX: usize = 20;

/// `spotq queue`.
#[must_use]
pub fn queue(jobs: &[v1::JobView], now: Timestamp, out: &Out) -> Grid {
    let mut grid = Grid::new(&[
        Column::right("JOB", "job_id"),
        Column::left("NAME", "name"),
        Column::left("USER", "user").wide(),
        Column::left("PHASE", "phase"),
        Column::right("TRY", "generation"),
        Column::right("STEP", "step"),
        Column::right("$/H", "price_usd_h").wide(),
        Column::right("COST", "billed_usd"),
        Column::right("SAVED", "saved_net_usd"),
        Column::right("PREEMPTED", "preemptions").wide(),
        Column::right("AGE", "age_ms").wide(),
        Column::left("WHERE / WHY", "where").wraps(),
    ]);
    let name_max = if out.format == Format::Wide { usize::MAX } else { NAME_MAX };
    for job in jobs {
        let cost = job.cost.unwrap_or_default();
        let age = words::age(job, now);
        let rate = job.node.as_ref().map(|node| UsdPerHour::nanos(node.price_nano_usd_h));
        grid.row(vec![
            Cell::new(words::task(job).to_string()),
            Cell::new(short(&job.name, name_max)).exact(plain(&job.name)),
            Cell::new(&job.user),
            phase(&job.phase, job.outcome.as_deref()),
            Cell::new(job.generation.to_string()),
            Cell::new(words::steps(job.progress.as_ref()))
                .exact(job.progress.map_or(String::new(), |p| p.step.to_string())),
            Cell::new(rate.map(words::rate).unwrap_or_default())
                .exact(rate.map(|r| r.to_string()).unwrap_or_default()),
            Cell::new(usd(Usd(cost.billed_nano_usd))).exact(Usd(cost.billed_nano_usd)),
            Cell::new(usd(Usd(cost.saved_net_nano_usd))).exact(Usd(cost.saved_net_nano_usd)),
            Cell::new(job.preemptions.to_string()),
            Cell::new(age.to_string()).exact(age.0),
            Cell::new(whereabouts(job, now)),
        ]);
    }
    grid
}

/// `spotq show`.
#[must_use]
pub fn show(job: &v1::JobView, now: Timestamp, out: &Out) -> String {
    let cost = job.cost.unwrap_or_default();
    let mut page = Page::default();
    page.line("job", &format!("{}  {}", words::task(job), job.name));
    page.line("phase", &phase_sentence(job, now));
    if let Some(node) = &job.node {
        let rate = price(UsdPerHour::nanos(node.price_nano_usd_h));
        let full = price(UsdPerHour::nanos(node.on_demand_nano_usd_h));
        page.line("node", &format!("{} at {rate} (on demand {full})", node.pool));
    }
    if job.progress.is_some() {
        page.line("step", &words::steps(job.progress.as_ref()));
    }
    if let Some(checkpoint) = &job.checkpoint {
        page.line("checkpoint", &checkpoint_sentence(checkpoint, now));
    }
    page.line("attempts", &attempts_sentence(job));
    page.line("cost", &cost_sentence(&cost));
    page.line("submitted", &format!("{} by {}", words::rfc3339(Timestamp(job.submitted_ms)), job.user));
    if let Some(at) = job.started_ms {
        page.line("started", &words::rfc3339(Timestamp(at)));
    }
    if let Some(at) = job.ended_ms {
        page.line("ended", &words::rfc3339(Timestamp(at)));
    }
    if let Some(spec) = &job.spec {
        page.line("runs", &short(&command(spec), 200));
    }
    page.line("kept at", &job.checkpoint_url);
    page.line("uuid", &job.job_uuid);
    let mut text = page.text;
    if !job.attempts.is_empty() {
        text.push('\n');
        text.push_str(&attempts(&job.attempts, now).table(out));
    }
    text
}

/// A job as understood, for `--dry-run`.
#[must_use]
pub fn spec(job: &JobSpec) -> String {
    let mut page = Page::default();
    let opt = |text: &Option<String>| text.clone().unwrap_or_default();
    page.line("name", &job.name);
    page.line("runs", &short(&command(&job.into()), 200));
    page.line("setup", &short(&opt(&job.setup), 200));
    page.line("in", &opt(&job.workdir));
    page.line("on", &resources(&job.resources));
    page.line("policy", job.policy.as_str());
    page.line("budget", &job.budget.map(usd).unwrap_or_default());
    page.line("time limit", &job.time_limit.map(|span| span.to_string()).unwrap_or_default());
    let checkpoint = &job.checkpoint;
    page.line("checkpoint", &opt(&checkpoint.dir));
    page.line("save signal", &checkpoint.signal.map(|s| format!("{s:?}").to_uppercase()).unwrap_or_default());
    let preemptions = job.retry.preemptions.map_or_else(|| "any number of".to_owned(), |n| n.to_string());
    page.line("survives", &format!("{preemptions} preemptions, {} failures", job.retry.failures));
    page.line("env", &short(&job.env.keys().cloned().collect::<Vec<_>>().join(" "), 200));
    page.line("outputs", &short(&job.outputs.join(" "), 200));
    page.line("begin", &job.begin.map(words::rfc3339).unwrap_or_default());
    page.line("held", if job.hold { "until `spotq release`" } else { "" });
    page.text
}

/// The attempts of a job.
#[must_use]
pub fn attempts(attempts: &[v1::AttemptView], now: Timestamp) -> Grid {
    let mut grid = Grid::new(&[
        Column::right("TRY", "generation"),
        Column::left("POOL", "pool").wraps(),
        Column::right("RAN", "ran_ms"),
        Column::right("FROM", "resumed_step"),
        Column::right("STEP", "last_step"),
        Column::right("SAVED", "committed_step"),
        Column::right("COST", "billed_usd"),
        Column::left("END", "end"),
        Column::left("DETAIL", "detail").wide(),
    ]);
    let step = |step: Option<u64>| Cell::new(step.map(|s| s.to_string()).unwrap_or_default());
    for attempt in attempts {
        let end = attempt.stopped_ms.or(attempt.ended_ms).map_or(now, Timestamp);
        let ran = attempt.started_ms.map_or(Span::ZERO, |at| end.since(Timestamp(at)));
        let billed = Usd(i64::try_from(attempt.billed_nano_usd).unwrap_or(i64::MAX));
        grid.row(vec![
            Cell::new(attempt.generation.to_string()),
            Cell::new(words::place(&attempt.pool)).exact(plain(&attempt.pool)),
            Cell::new(ran.to_string()).exact(ran.0),
            step(attempt.resumed_step),
            step(attempt.last_step),
            step(attempt.committed_step),
            Cell::new(usd(billed)).exact(billed),
            attempt_end(attempt),
            Cell::new(&attempt.detail),
        ]);
    }
    grid
}

/// The pools of `spotq explain`, best first.
#[must_use]
pub fn verdicts(reply: &v1::ExplainReply, now: Timestamp, out: &Out) -> Grid {
    let mut grid = Grid::new(&[
        Column::right("RANK", "rank"),
        Column::left("POOL", "pool"),
        Column::right("$/H", "price_usd_h"),
        Column::right("ON DEMAND", "on_demand_usd_h").wide(),
        Column::left("WHY", "why").wraps(),
        Column::left("RETRY", "retry_ms"),
    ]);
    let mut pools: Vec<&v1::PoolVerdict> = reply.pools.iter().collect();
    // The scheduler has those that come closest first.
    pools.sort_by_key(|p| (p.rank == 0, p.rank));
    if out.format == Format::Table {
        pools.truncate(RANKED_MAX);
    }
    for pool in pools {
        let rate = UsdPerHour::nanos(pool.price_nano_usd_h);
        let full = UsdPerHour::nanos(pool.on_demand_nano_usd_h);
        let tone = if pool.eligible { Tone::Good } else { Tone::Waiting };
        grid.row(vec![
            Cell::new(if pool.rank == 0 { "-".to_owned() } else { pool.rank.to_string() }).exact(pool.rank),
            Cell::new(words::place(&pool.pool)).exact(plain(&pool.pool)),
            Cell::new(words::rate(rate)).exact(rate),
            Cell::new(words::rate(full)).exact(full),
            Cell::new(if out.format == Format::Table { short(&pool.why, WHY_MAX) } else { pool.why.clone() })
                .exact(plain(&pool.why))
                .tone(tone),
            Cell::new(pool.retry_ms.map(|at| words::until(Timestamp(at), now)).unwrap_or_default())
                .exact(pool.retry_ms.map(|at| at.to_string()).unwrap_or_default()),
        ]);
    }
    grid
}

/// Why no pool will do, by how many pools each reason keeps away; nothing if one will.
#[must_use]
pub fn reasons(reply: &v1::ExplainReply) -> String {
    if reply.pools.is_empty() || reply.pools.iter().any(|p| p.eligible) {
        return String::new();
    }
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for pool in &reply.pools {
        *counts.entry(reason(&pool.why)).or_default() += 1;
    }
    let mut counts: Vec<(String, usize)> = counts.into_iter().collect();
    // Stable, so that equal counts stay in the order of the alphabet.
    counts.sort_by_key(|(_, n)| std::cmp::Reverse(*n));
    let mut text = format!("None of {} would do:\n", words::count(reply.pools.len() as u64, "pool"));
    for (reason, n) in counts {
        let _ = writeln!(text, "{n:>5}  {}", short(&reason, WHY_MAX));
    }
    text
}

/// `spotq offers`, cheapest first.
#[must_use]
pub fn offers(offers: &[v1::OfferView], now: Timestamp) -> Grid {
    let mut grid = Grid::new(&[
        Column::left("POOL", "pool").wraps(),
        Column::left("REGION", "region").wide(),
        Column::left("MARKET", "market").wide(),
        Column::left("GPUS", "accelerator"),
        Column::right("CPUS", "cpus").wide(),
        Column::right("GIB", "memory_gib").wide(),
        Column::right("$/H", "price_usd_h"),
        Column::right("ON DEMAND", "on_demand_usd_h").wide(),
        Column::right("OFF", "discount_pct"),
        Column::right("LOST/H", "interruptions_per_hour"),
        Column::left("SOURCE", "price_source").wide(),
        Column::left("NOW", "cooling_down").wraps(),
    ]);
    let mut sorted: Vec<&v1::OfferView> = offers.iter().collect();
    sorted.sort_by(|a, b| {
        (a.price_nano_usd_h, &a.cloud, &a.zone).cmp(&(b.price_nano_usd_h, &b.cloud, &b.zone))
    });
    for offer in sorted {
        let rate = UsdPerHour::nanos(offer.price_nano_usd_h);
        let full = UsdPerHour::nanos(offer.on_demand_nano_usd_h);
        let saved = offer.on_demand_nano_usd_h.saturating_sub(offer.price_nano_usd_h);
        let off = words::percent(saved, offer.on_demand_nano_usd_h).map(|pct| format!("{pct:.0}%"));
        let lost = offer.interruptions_per_hour_ppm as f64 / 1e6;
        let gpus = match &offer.accelerator {
            None => String::new(),
            Some(name) => format!("{name}:{}", offer.accelerator_count),
        };
        let cooling = offer.cooling_down.as_ref().map(|why| match offer.retry_ms {
            Some(at) => format!("{why}, again {}", words::until(Timestamp(at), now)),
            None => why.clone(),
        });
        let parts = [&offer.cloud, &offer.region, &offer.zone, &offer.instance_type, &offer.market];
        let pool = parts.map(String::as_str).join("/");
        grid.row(vec![
            Cell::new(words::place(&pool)).exact(plain(&pool)),
            Cell::new(&offer.region),
            Cell::new(&offer.market),
            Cell::new(gpus),
            Cell::new(offer.cpus.to_string()),
            Cell::new(offer.memory_gib.to_string()),
            Cell::new(words::rate(rate)).exact(rate),
            Cell::new(words::rate(full)).exact(full),
            Cell::new(off.clone().unwrap_or_default()).exact(off.unwrap_or_default().trim_end_matches('%')),
            Cell::new(format!("{lost:.2}")).exact(lost),
            Cell::new(&offer.price_source),
            match cooling {
                None => Cell::new("free").exact("").tone(Tone::Good),
                Some(why) => Cell::new(why).tone(Tone::Waiting),
            },
        ]);
    }
    grid
}

/// `spotq nodes`.
#[must_use]
pub fn nodes(nodes: &[v1::NodeView], now: Timestamp) -> Grid {
    let mut grid = Grid::new(&[
        Column::right("NODE", "node"),
        Column::left("STATE", "state"),
        Column::left("POOL", "pool"),
        Column::right("$/H", "price_usd_h"),
        Column::right("AGE", "age_ms"),
        Column::right("JOB", "job_id"),
        Column::left("INSTANCE", "instance_id").wide(),
        Column::left("DETAIL", "detail").wide(),
    ]);
    for node in nodes {
        let rate = UsdPerHour::nanos(node.price_nano_usd_h);
        let age = node.ended_ms.map_or(now, Timestamp).since(Timestamp(node.requested_ms));
        let tone = match node.state.as_str() {
            "ready" => Tone::Good,
            "requested" | "booting" => Tone::Busy,
            "ending" => Tone::Waiting,
            _ => Tone::Plain,
        };
        let job = if node.job_id == 0 { "idle".to_owned() } else { node.job_id.to_string() };
        grid.row(vec![
            Cell::new(node.node_id.to_string()),
            Cell::new(&node.state).tone(tone),
            Cell::new(words::place(&node.pool)).exact(plain(&node.pool)),
            Cell::new(words::rate(rate)).exact(rate),
            Cell::new(age.to_string()).exact(age.0),
            Cell::new(job).exact(if node.job_id == 0 { String::new() } else { node.job_id.to_string() }),
            Cell::new(&node.instance_id),
            Cell::new(&node.detail),
        ]);
    }
    grid
}

/// `spotq info`.
#[must_use]
pub fn info(server: &str, info: &v1::InfoReply, now: Timestamp) -> String {
    let started = Timestamp(info.started_ms);
    let mut page = Page::default();
    page.line("server", server);
    page.line("version", &format!("{} (this is {})", info.version, env!("CARGO_PKG_VERSION")));
    page.line("cluster", &format!("{}, epoch {}", info.cluster, info.epoch));
    page.line("up", &format!("{} (since {})", now.since(started), words::rfc3339(started)));
    page.line("jobs", &format!("{} active, {} done", info.jobs_active, info.jobs_done));
    page.line("nodes", &format!("{} live, {} workers connected", info.nodes_live, info.workers_connected));
    page.line("store", &info.store_url);
    page.text
}

/// A page of `word  text` lines.
#[derive(Debug, Default)]
pub struct Page {
    pub text: String,
}

impl Page {
    /// Adds a line; nothing where there is nothing to say.
    pub fn line(&mut self, word: &str, text: &str) {
        if !text.is_empty() {
            let _ = writeln!(self.text, "{word:<11} {}", plain(text));
        }
    }
}

/// A phase in its colour; of a done job its outcome.
#[must_use]
pub fn phase(phase: &str, outcome: Option<&str>) -> Cell {
    let text = outcome.filter(|_| phase == "done").unwrap_or(phase).replace('_', " ");
    Cell::new(text).exact(phase).tone(words::tone(phase, outcome))
}

/// A verdict without what is the one pool's own: `has 8 CPUs, 64 wanted` is `fewer than 64 CPUs`.
fn reason(why: &str) -> String {
    let wanted = || {
        let (has, wanted) = why.strip_prefix("has ")?.split_once(", ")?;
        let (_, what) = has.split_once(' ')?;
        let less = if what.starts_with("GiB") { "less" } else { "fewer" };
        Some(format!("{less} than {} {what}", wanted.strip_suffix(" wanted")?))
    };
    if let Some(text) = wanted() {
        return text;
    }
    // What a cloud said of one pool comes after the kind of its refusal.
    let kind = why.split(": ").next().filter(|_| why.starts_with("refused lately"));
    kind.unwrap_or(why).to_owned()
}

/// Where the job runs, or why it does not.
fn whereabouts(job: &v1::JobView, now: Timestamp) -> String {
    if words::is_done(job) {
        return job.outcome_text.clone();
    }
    if !job.reason.is_empty() {
        return match job.next_try_ms {
            Some(at) if at > now.0 => format!("{}, again {}", job.reason, words::until(Timestamp(at), now)),
            _ => job.reason.clone(),
        };
    }
    job.node.as_ref().map(|node| words::place(&node.pool)).unwrap_or_default()
}

fn phase_sentence(job: &v1::JobView, now: Timestamp) -> String {
    let mut text = job.phase.clone();
    let detail = if words::is_done(job) { job.outcome_text.clone() } else { job.reason.clone() };
    if !detail.is_empty() {
        let _ = write!(text, ": {detail}");
    }
    if let Some(at) = job.next_try_ms.filter(|_| !words::is_done(job)) {
        let _ = write!(text, "; next try {}", words::until(Timestamp(at), now));
    }
    if let Some(at) = job.deadline_ms.filter(|_| job.phase == "draining") {
        let _ = write!(text, "; the node goes {}", words::until(Timestamp(at), now));
    }
    text
}

fn checkpoint_sentence(checkpoint: &v1::Checkpoint, now: Timestamp) -> String {
    let step = checkpoint.step.map_or_else(String::new, |step| format!("at step {step}, "));
    let age = now.since(Timestamp(checkpoint.saved_at_ms));
    format!("number {} {step}{}, saved {age} ago", checkpoint.sequence, words::bytes(checkpoint.bytes_total))
}

/// Those that reached a node; refused launches have numbers, too.
fn attempts_sentence(job: &v1::JobView) -> String {
    let refused = job.attempts.iter().filter(|a| words::is_refused(a)).count() as u64;
    let and = match refused {
        0 => String::new(),
        1 => " and 1 refused launch".to_owned(),
        n => format!(" and {n} refused launches"),
    };
    let reached = job.generation.saturating_sub(refused);
    format!("{reached}{and} ({} preempted, {} failed)", job.preemptions, job.failures)
}

fn cost_sentence(cost: &v1::Cost) -> String {
    format!(
        "{} billed, {}, {} wasted",
        usd(Usd(cost.billed_nano_usd)),
        words::saved(cost),
        usd(Usd(cost.wasted_nano_usd))
    )
}

fn attempt_end(attempt: &v1::AttemptView) -> Cell {
    let tone = match attempt.end.as_str() {
        "completed" => Tone::Good,
        "" => Tone::Busy,
        "preempted" | "requeued" | "cancelled" => Tone::Waiting,
        _ => Tone::Bad,
    };
    let text = match attempt.end.as_str() {
        "" => "running".to_owned(),
        // A cloud that refused is no fault of the job; its own words are in `-o wide`.
        "requeued" if words::is_refused(attempt) => {
            short(attempt.detail.split(':').next().unwrap_or_default(), 24)
        }
        "preempted" if attempt.noticed_ms.is_none() => "preempted without notice".into(),
        end => end.replace('_', " "),
    };
    Cell::new(text).exact(&attempt.end).tone(tone)
}

fn resources(resources: &Resources) -> String {
    let choice = |c: &Choice| {
        let mut parts = Vec::new();
        if let Some(name) = &c.accelerator {
            parts.push(format!("{name}:{}", c.accelerator_count));
        }
        if c.cpus_min > 0 {
            parts.push(format!("{}+ CPUs", c.cpus_min));
        }
        if c.memory_gib_min > 0 {
            parts.push(format!("{}+ GiB", c.memory_gib_min));
        }
        parts.extend(c.instance_type.clone());
        let place = [c.cloud.map(|cloud| cloud.to_string()), c.region.clone(), c.zone.clone()];
        let place: Vec<String> = place.into_iter().flatten().collect();
        if !place.is_empty() {
            parts.push(format!("in {}", place.join("/")));
        }
        if parts.is_empty() { "any node".to_owned() } else { parts.join(" ") }
    };
    let mut text = match resources.any_of.as_slice() {
        [] => "any node".to_owned(),
        choices => choices.iter().map(choice).collect::<Vec<_>>().join(", or "),
    };
    if let Some(max) = resources.max_hourly {
        let _ = write!(text, ", at most {}", price(max));
    }
    text
}

fn command(spec: &v1::JobSpec) -> String {
    use v1::command::Kind;
    match spec.command.as_ref().and_then(|command| command.kind.as_ref()) {
        Some(Kind::Shell(text)) => text.trim().to_owned(),
        Some(Kind::Argv(argv)) => argv.argv.join(" "),
        Some(Kind::Script(script)) => format!("a script of {}", words::bytes(script.text.len() as u64)),
        None => String::new(),
    }
}

#[cfg(test)]
pub mod test {
    use super::*;
    use crate::out::test::out;

    pub const NOW: Timestamp = Timestamp(1_700_000_100_000);
    const T0: u64 = 1_700_000_000_000;
    const POOL: &str = "aws/us-east-1/us-east-1a/g5.xlarge/spot";

    pub fn cost() -> v1::Cost {
        v1::Cost {
            billed_nano_usd: 973_100_000,
            on_demand_useful_nano_usd: 3_000_000_000,
            on_demand_billed_nano_usd: 3_500_000_000,
            wasted_nano_usd: 50_000_000,
            saved_net_nano_usd: 2_026_900_000,
            saved_gross_nano_usd: 2_526_900_000,
        }
    }

    /// Running its second attempt, after a preemption.
    pub fn job() -> v1::JobView {
        v1::JobView {
            job_id: 7,
            job_uuid: "0b7e".into(),
            name: "train".into(),
            user: "ada".into(),
            phase: "running".into(),
            submitted_ms: T0,
            started_ms: Some(T0 + 10_000),
            generation: 2,
            attempts: vec![
                v1::AttemptView {
                    generation: 1,
                    node_id: 1,
                    pool: POOL.into(),
                    placed_ms: T0 + 1000,
                    started_ms: Some(T0 + 10_000),
                    stopped_ms: Some(T0 + 40_000),
                    ended_ms: Some(T0 + 41_000),
                    end: "preempted".into(),
                    last_step: Some(600),
                    committed_step: Some(600),
                    noticed_ms: Some(T0 + 35_000),
                    billed_nano_usd: 100_000_000,
                    ..Default::default()
                },
                v1::AttemptView {
                    generation: 2,
                    node_id: 2,
                    pool: POOL.into(),
                    placed_ms: T0 + 42_000,
                    started_ms: Some(T0 + 50_000),
                    resumed_step: Some(600),
                    last_step: Some(1200),
                    ..Default::default()
                },
            ],
            progress: Some(v1::Progress { step: 1200, total: Some(5000) }),
            checkpoint: Some(v1::Checkpoint {
                sequence: 4,
                generation: 2,
                step: Some(1100),
                bytes_total: 12_300_000,
                saved_at_ms: T0 + 95_000,
                ..Default::default()
            }),
            preemptions: 1,
            cost: Some(cost()),
            node: Some(v1::NodeView {
                node_id: 2,
                pool: POOL.into(),
                state: "ready".into(),
                price_nano_usd_h: 310_000_000,
                on_demand_nano_usd_h: 1_006_000_000,
                requested_ms: T0,
                job_id: 7,
                ..Default::default()
            }),
            checkpoint_url: "file:///c/7".into(),
            ..Default::default()
        }
    }

    pub fn report() -> v1::ReportReply {
        v1::ReportReply {
            jobs: vec![v1::JobReport {
                job_id: 7,
                name: "train".into(),
                phase: "done".into(),
                outcome: Some("completed".into()),
                cost: Some(cost()),
                attempts: 2,
                preemptions: 1,
                steps_done: 5000,
                steps_repeated: 40,
                billed_ms: 3_600_000,
                useful_ms: 3_400_000,
                waste: vec![v1::Waste { cause: "boot".into(), ms: 8000, nano_usd: 700_000 }],
                ..Default::default()
            }],
            segments: vec![v1::SegmentView {
                node_id: 1,
                pool: POOL.into(),
                market: "spot".into(),
                job_id: 7,
                generation: 1,
                start_ms: T0,
                end_ms: Some(T0 + 1000),
                price_nano_usd_h: 310_000_000,
                on_demand_nano_usd_h: 1_006_000_000,
                price_source: "local-market".into(),
                price_as_of_ms: T0,
                amount_nano_usd: 86_111,
            }],
            as_of_ms: NOW.0,
        }
    }

    #[test]
    fn the_queue_says_where_jobs_run_and_why_they_wait() {
        let mut waiting =
            v1::JobView { job_id: 8, name: "evil\u{1b}[2J\nname".into(), phase: "pending".into(), ..job() };
        waiting.node = None;
        waiting.progress = None;
        waiting.generation = 0;
        waiting.cost = None;
        waiting.reason = "no prices from any cloud yet".into();
        waiting.next_try_ms = Some(NOW.0 + 12_000);
        let out = out(Format::Table);
        let table = queue(&[job(), waiting], NOW, &out).table(&out);
        let expected = "\
JOB  NAME       PHASE    TRY       STEP     COST  SAVED  WHERE / WHY
  7  train      running    2  1200/5000  $0.9731  $2.03  aws/us-east-1a
                                                         g5.xlarge
  8  evil name  pending    0                  $0     $0  no prices from any
                                                         cloud yet, again in
                                                         12s
";
        assert_eq!(table, expected, "\n{table}");
    }

    #[test]
    fn a_queue_in_an_empty_house_is_only_its_head() {
        let out = out(Format::Table);
        assert_eq!(queue(&[], NOW, &out).table(&out).lines().count(), 1);
    }

    #[test]
    fn a_job_is_shown_with_its_attempts() {
        let page = show(&job(), NOW, &out(Format::Table));
        for line in [
            "job         7  train",
            "phase       running",
            "node        aws/us-east-1/us-east-1a/g5.xlarge/spot at $0.3100/h (on demand $1.01/h)",
            "step        1200/5000",
            "checkpoint  number 4 at step 1100, 12.3 MB, saved 5s ago",
            "attempts    2 (1 preempted, 0 failed)",
            "cost        $0.9731 billed, $2.03 saved (68%) against on demand, $0.0500 wasted",
            "submitted   2023-11-14T22:13:20Z by ada",
        ] {
            assert!(page.lines().any(|l| l == line), "no line `{line}` in\n{page}");
        }
        assert!(page.contains("preempted") && page.contains("FROM"), "{page}");
    }

    #[test]
    fn a_drain_says_when_the_node_goes() {
        let draining = v1::JobView { phase: "draining".into(), deadline_ms: Some(NOW.0 + 30_000), ..job() };
        assert_eq!(phase_sentence(&draining, NOW), "draining; the node goes in 30s");
    }

    #[test]
    fn offers_come_cheapest_first_and_say_what_cools_down() {
        let offer = |zone: &str, price: i64, cooling: Option<&str>| v1::OfferView {
            cloud: "aws".into(),
            zone: zone.into(),
            instance_type: "g5.xlarge".into(),
            market: "spot".into(),
            accelerator: Some("A10G".into()),
            accelerator_count: 1,
            price_nano_usd_h: price,
            on_demand_nano_usd_h: 1_000_000_000,
            interruptions_per_hour_ppm: 150_000,
            cooling_down: cooling.map(Into::into),
            retry_ms: cooling.map(|_| NOW.0 + 30_000),
            ..Default::default()
        };
        let table = offers(&[offer("b", 400_000_000, None), offer("a", 300_000_000, Some("sold out"))], NOW)
            .table(&out(Format::Table));
        let expected = "\
POOL             GPUS        $/H  OFF  LOST/H  NOW
aws/a g5.xlarge  A10G:1  $0.3000  70%    0.15  sold out, again in 30s
aws/b g5.xlarge  A10G:1  $0.4000  60%    0.15  free
";
        assert_eq!(table, expected, "\n{table}");
    }

    #[test]
    fn every_table_fits_80_columns() {
        let explained = v1::ExplainReply {
            pools: vec![v1::PoolVerdict {
                pool: POOL.into(),
                why: "spot costs as much as on-demand here, and the policy of the job is spot-only".into(),
                ..Default::default()
            }],
            ..Default::default()
        };
        let out = out(Format::Table);
        for table in [
            attempts(&job().attempts, NOW).table(&out),
            verdicts(&explained, NOW, &out).table(&out),
            nodes(&[job().node.unwrap()], NOW).table(&out),
            show(&v1::JobView { node: None, ..job() }, NOW, &out),
        ] {
            assert!(table.lines().all(|line| line.chars().count() <= 80), "\n{table}");
        }
    }
}
