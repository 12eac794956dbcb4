//! The state as users see it. Only translation: every figure comes from the core or from finops.

use spotq_core::{Attempt, Cluster, Job, Node, Phase, Task, explain};
use spotq_finops::{JobCost, job_cost, job_report};
use spotq_model::{Checkpoint, Offer, TaskId, Timestamp};
use spotq_proto::v1;

use crate::config::EngineConfig;
use crate::handle::Seen;

pub(crate) fn job(config: &EngineConfig, seen: &Seen<'_>, id: TaskId) -> Option<v1::JobView> {
    let job = seen.cluster.jobs.get(&id.job)?;
    let task = job.tasks.get(&id.index)?;
    let mut view = job_facts(config, job, task);
    let progress = seen.progress.get(&id).copied().max(task.progress);
    view.progress = progress.map(|p| v1::Progress { step: p.step, total: p.total });
    view.attempts = task.attempts.iter().map(|a| attempt(seen.cluster, task, a, seen.now)).collect();
    view.cost = Some(cost(&job_cost(seen.cluster, id, seen.now)));
    view.node = task.phase.node().and_then(|id| seen.cluster.nodes.get(&id)).map(|held| node(held));
    Some(view)
}

fn job_facts(config: &EngineConfig, job: &Job, task: &Task) -> v1::JobView {
    let outcome = match &task.phase {
        Phase::Done { outcome } => Some(outcome),
        Phase::Held { .. }
        | Phase::Pending { .. }
        | Phase::Provisioning { .. }
        | Phase::Restoring { .. }
        | Phase::Running { .. }
        | Phase::Draining { .. }
        | Phase::Completing { .. } => None,
    };
    let (reason, next_try, deadline) = match &task.phase {
        Phase::Held { .. } => ("held by its user".to_owned(), None, None),
        Phase::Pending { reason, next_try } => (reason.to_string(), Some(next_try.0), None),
        Phase::Draining { deadline, .. } => (drain_reason(task), None, Some(deadline.0)),
        Phase::Completing { until, .. } => {
            ("it ended badly; looking whether its node was lost".to_owned(), None, Some(until.0))
        }
        Phase::Provisioning { .. } | Phase::Restoring { .. } | Phase::Running { .. } | Phase::Done { .. } => {
            (String::new(), None, None)
        }
    };
    v1::JobView {
        job_id: job.id.0,
        task_index: task.id.index,
        job_uuid: job.uuid.clone(),
        name: job.spec.name.clone(),
        user: job.spec.user.clone(),
        phase: task.phase.name().to_owned(),
        reason,
        next_try_ms: next_try,
        deadline_ms: deadline,
        outcome: outcome.map(|o| o.name().to_owned()),
        exit_code: outcome.map(spotq_model::Outcome::exit_code),
        outcome_text: outcome.map(ToString::to_string).unwrap_or_default(),
        submitted_ms: job.submitted_at.0,
        started_ms: task.attempts.iter().find_map(|a| a.started_at).map(|at| at.0),
        ended_ms: outcome.map(|_| task.phase_since.0),
        generation: task.generation.0,
        attempts: Vec::new(),
        progress: None,
        checkpoint: task.checkpoint.as_ref().map(checkpoint),
        preemptions: task.preemptions,
        failures: task.failures,
        cost: None,
        node: None,
        spec: Some(job.spec.as_ref().into()),
        checkpoint_url: config.checkpoint_url(&job.uuid),
    }
}

fn drain_reason(task: &Task) -> String {
    match task.under_way().and_then(|a| a.stop) {
        Some(stop) => format!("asked to stop: {:?}", stop.why).to_lowercase(),
        None => "the cloud takes its node back".to_owned(),
    }
}

fn attempt(c: &Cluster, task: &Task, a: &Attempt, now: Timestamp) -> v1::AttemptView {
    let mine = c.segments_of(task.id).filter(|(_, s)| s.holder == Some((task.id, a.generation)));
    let billed: spotq_model::Usd = mine.map(|(_, segment)| segment.amount_at(now)).sum();
    let known = match &a.end {
        Some(spotq_model::AttemptEnd::NodeLost { detail }) => detail.clone(),
        Some(spotq_model::AttemptEnd::LaunchFailed { message }) => message.clone(),
        Some(spotq_model::AttemptEnd::Failed { exit_code }) => format!("exit code {exit_code}"),
        Some(spotq_model::AttemptEnd::Preempted { noticed: false }) => "without notice".to_owned(),
        Some(_) | None => c
            .nodes
            .get(&a.node)
            .and_then(|n| n.refused.clone())
            .map_or_else(String::new, |(k, m)| format!("{k}: {m}")),
    };
    // What the worker had to add, such as a last upload that failed.
    let added = a.exit.as_ref().and_then(|exit| exit.detail.clone()).filter(|text| !known.contains(text));
    let detail =
        [Some(known).filter(|text| !text.is_empty()), added].into_iter().flatten().collect::<Vec<_>>();
    v1::AttemptView {
        generation: a.generation.0,
        node_id: a.node.0,
        pool: a.pool.to_string(),
        placed_ms: a.placed_at.0,
        started_ms: a.started_at.map(|at| at.0),
        stopped_ms: a.stopped_at.map(|at| at.0),
        ended_ms: a.ended_at.map(|at| at.0),
        end: a.end.as_ref().map(|end| end.name().to_owned()).unwrap_or_default(),
        detail: detail.join("; "),
        resumed_step: a.resumed.as_ref().and_then(|from| from.step),
        last_step: a.progress.map(|p| p.step),
        committed_step: a.committed.as_ref().and_then(|committed| committed.step),
        noticed_ms: a.noticed_at.map(|at| at.0),
        billed_nano_usd: u64::try_from(billed.0).unwrap_or(0),
    }
}

pub(crate) fn checkpoint(known: &Checkpoint) -> v1::Checkpoint {
    v1::Checkpoint {
        sequence: known.sequence,
        log_sequence: known.log_sequence,
        generation: known.generation.0,
        step: known.step,
        bytes_total: known.bytes_total,
        bytes_uploaded: known.bytes_uploaded,
        saved_at_ms: known.saved_at.0,
        manifest_hash: known.manifest_hash.clone(),
    }
}

pub(crate) fn cost(cost: &JobCost) -> v1::Cost {
    v1::Cost {
        billed_nano_usd: cost.billed.0,
        on_demand_useful_nano_usd: cost.on_demand_useful.0,
        on_demand_billed_nano_usd: cost.on_demand_billed.0,
        wasted_nano_usd: cost.wasted.0,
        saved_net_nano_usd: cost.saved_net().0,
        saved_gross_nano_usd: cost.saved_gross().0,
    }
}

pub(crate) fn node(node: &Node) -> v1::NodeView {
    let detail = match (&node.refused, node.ending, node.gone) {
        (Some((kind, message)), _, _) => format!("refused, {kind}: {message}"),
        (None, Some(why), _) => format!("{why:?}").to_lowercase(),
        (None, None, Some(cause)) => format!("{cause:?}").to_lowercase(),
        (None, None, None) => {
            node.notice.as_ref().map_or_else(String::new, |n| format!("notice from {}", n.source))
        }
    };
    v1::NodeView {
        node_id: node.id.0,
        instance_id: node.instance.as_ref().map(ToString::to_string).unwrap_or_default(),
        pool: node.pool.to_string(),
        state: node.state.name().to_owned(),
        price_nano_usd_h: node.quote.price.0.0,
        on_demand_nano_usd_h: node.quote.on_demand.0.0,
        requested_ms: node.requested_at.0,
        ended_ms: node.gone_at.map(|at| at.0),
        detail,
        job_id: node.holder.map_or(0, |(task, _)| task.job.0),
    }
}

pub(crate) fn explanation(seen: &Seen<'_>, id: TaskId) -> Option<v1::ExplainReply> {
    let explained = explain(seen.cluster, seen.policies, seen.now, seen.offers, id)?;
    let pools = (1..).zip(explained.pools).map(|(rank, pool)| {
        let retry = match &pool.verdict {
            Err(spotq_policy::WhyNot::CoolingDown { until, .. }) => Some(until.0),
            Ok(_) | Err(_) => None,
        };
        v1::PoolVerdict {
            pool: pool.pool.to_string(),
            price_nano_usd_h: pool.quote.price.0.0,
            on_demand_nano_usd_h: pool.quote.on_demand.0.0,
            eligible: pool.verdict.is_ok(),
            rank: if pool.verdict.is_ok() { rank } else { 0 },
            why: match &pool.verdict {
                Ok(_) if rank == 1 => "would be taken next".to_owned(),
                Ok(_) => String::new(),
                Err(why) => why.to_string(),
            },
            retry_ms: retry,
        }
    });
    Some(v1::ExplainReply { headline: explained.headline, next: explained.next, pools: pools.collect() })
}

pub(crate) fn offer(seen: &Seen<'_>, offer: &Offer) -> v1::OfferView {
    let cooling = seen.cluster.cool_down(&offer.pool, seen.now);
    v1::OfferView {
        cloud: offer.pool.cloud.to_string(),
        region: offer.pool.region.clone(),
        zone: offer.pool.zone.clone(),
        instance_type: offer.pool.instance_type.clone(),
        market: offer.pool.market.to_string(),
        accelerator: offer.shape.accelerator.clone(),
        accelerator_count: offer.shape.accelerator_count,
        cpus: offer.shape.cpus,
        memory_gib: offer.shape.memory_gib,
        price_nano_usd_h: offer.quote.price.0.0,
        on_demand_nano_usd_h: offer.quote.on_demand.0.0,
        price_source: offer.quote.source.clone(),
        price_as_of_ms: offer.quote.as_of.0,
        interruptions_per_hour_ppm: offer.interruptions_per_hour_ppm,
        cooling_down: cooling.map(|cool| format!("{}: {}", cool.kind, cool.message)),
        retry_ms: cooling.map(|cool| cool.until.0),
    }
}

/// One job's report and its segments.
pub(crate) fn report(seen: &Seen<'_>, id: TaskId) -> Option<(v1::JobReport, Vec<v1::SegmentView>)> {
    let job = seen.cluster.jobs.get(&id.job)?;
    let task = job.tasks.get(&id.index)?;
    let report = job_report(seen.cluster, id, seen.now)?;
    let outcome = match &task.phase {
        Phase::Done { outcome } => Some(outcome.name().to_owned()),
        _ => None,
    };
    let waste = report.cost.waste.iter().map(|line| v1::Waste {
        cause: line.cause.as_str().to_owned(),
        ms: line.time.0,
        nano_usd: line.amount.0,
    });
    let view = v1::JobReport {
        job_id: id.job.0,
        name: job.spec.name.clone(),
        phase: task.phase.name().to_owned(),
        outcome,
        cost: Some(cost(&report.cost)),
        attempts: report.attempts,
        preemptions: report.preemptions,
        preemptions_without_notice: report.preemptions_without_notice,
        steps_done: report.steps_done,
        steps_repeated: report.steps_repeated,
        billed_ms: report.cost.billed_time.0,
        useful_ms: report.cost.useful_time.0,
        waste: waste.collect(),
    };
    Some((view, segments(seen, id)))
}

fn segments(seen: &Seen<'_>, id: TaskId) -> Vec<v1::SegmentView> {
    let views = seen.cluster.segments_of(id).map(|(node, segment)| v1::SegmentView {
        node_id: node.id.0,
        pool: node.pool.to_string(),
        market: node.pool.market.to_string(),
        job_id: id.job.0,
        generation: segment.holder.map_or(0, |(_, generation)| generation.0),
        start_ms: segment.start.0,
        end_ms: segment.end.map(|end| end.0),
        price_nano_usd_h: segment.quote.price.0.0,
        on_demand_nano_usd_h: segment.quote.on_demand.0.0,
        price_source: segment.quote.source.clone(),
        price_as_of_ms: segment.quote.as_of.0,
        amount_nano_usd: segment.amount_at(seen.now).0,
    });
    views.collect()
}
