//! What was paid, saved and wasted, as tables. Pure; the figures are the scheduler's, only sums of a column are ours.

use std::fmt::Write as _;

use spotq_model::{Span, Usd};
use spotq_proto::v1;

use crate::out::{Cell, Column, Format, Grid, Out, plain, short};
use crate::views::{Page, phase};
use crate::words::{count, more, percent, rfc3339, usd};

/// Names and phases are cut until each row is one line; `-o wide` has them whole.
const NAME_AND_PHASE_MAX: [(usize, usize); 5] = [(16, 23), (16, 13), (12, 13), (10, 10), (6, 9)];

/// One row per job, and one line per row.
#[must_use]
pub fn jobs(reply: &v1::ReportReply, out: &Out) -> Grid {
    let mut grid = jobs_within(reply, out, (usize::MAX, usize::MAX));
    if out.format == Format::Table {
        for max in NAME_AND_PHASE_MAX {
            if grid.is_one_line_a_row(out) {
                break;
            }
            grid = jobs_within(reply, out, max);
        }
    }
    grid
}

fn jobs_within(reply: &v1::ReportReply, out: &Out, (name_max, phase_max): (usize, usize)) -> Grid {
    let mut grid = Grid::new(&[
        Column::right("JOB", "job_id"),
        Column::left("NAME", "name"),
        Column::left("PHASE", "phase"),
        Column::right("BILLED", "billed_usd"),
        Column::right("ON DEMAND", "on_demand_useful_usd").wide(),
        Column::right("SAVED", "saved_net_usd"),
        Column::right("%", "saved_net_pct"),
        Column::right("GROSS", "saved_gross_usd").wide(),
        Column::right("WASTED", "wasted_usd"),
        Column::right("TRIES", "attempts").wide(),
        Column::right("LOST", "preemptions"),
        Column::right("UNNOTICED", "preemptions_without_notice").wide(),
        Column::right("STEPS", "steps_done").wide(),
        Column::right("REDONE", "steps_repeated").wide(),
    ]);
    for job in &reply.jobs {
        let cost = job.cost.unwrap_or_default();
        let mut cells = vec![
            Cell::new(job.job_id.to_string()),
            Cell::new(short(&job.name, name_max)).exact(plain(&job.name)),
            phase(&job.phase, job.outcome.as_deref()).shortened(phase_max),
        ];
        cells.extend(money(&cost));
        cells.extend([
            Cell::new(job.attempts.to_string()),
            Cell::new(job.preemptions.to_string()),
            Cell::new(job.preemptions_without_notice.to_string()),
            Cell::new(job.steps_done.to_string()),
            Cell::new(job.steps_repeated.to_string()),
        ]);
        grid.row(cells);
    }
    // A sum in a CSV would be counted as a job.
    if reply.jobs.len() > 1 && out.format != Format::Csv {
        let mut cells = vec![Cell::default(), Cell::new("all"), Cell::default()];
        cells.extend(money(&total(&reply.jobs)));
        let sum = |f: fn(&v1::JobReport) -> u64| Cell::new(reply.jobs.iter().map(f).sum::<u64>().to_string());
        cells.extend([
            sum(|j| u64::from(j.attempts)),
            sum(|j| u64::from(j.preemptions)),
            sum(|j| u64::from(j.preemptions_without_notice)),
            sum(|j| j.steps_done),
            sum(|j| j.steps_repeated),
        ]);
        grid.row(cells);
    }
    grid
}

/// All about the money of one job.
#[must_use]
pub fn page(job: &v1::JobReport, segments: &[v1::SegmentView], as_of_ms: u64, out: &Out) -> String {
    let cost = job.cost.unwrap_or_default();
    let state = job.outcome.as_deref().unwrap_or(&job.phase).replace('_', " ");
    let share = |part: i64| {
        percent(part, cost.on_demand_useful_nano_usd).map_or_else(String::new, |p| format!("  ({p:.1}%)"))
    };
    let mut page = Page::default();
    page.line("job", &format!("{}  {}  {state}", job.job_id, job.name));
    let open = segments.iter().any(|segment| segment.end_ms.is_none());
    let so_far = if open { "  so far; a node still costs something" } else { "" };
    page.line("billed", &format!("{}  for {}{so_far}", usd(Usd(cost.billed_nano_usd)), Span(job.billed_ms)));
    let useful = Usd(cost.on_demand_useful_nano_usd);
    page.line("on demand", &format!("{}  for the useful {}", usd(useful), Span(job.useful_ms)));
    let net = cost.saved_net_nano_usd;
    if net < 0 {
        page.line("saved", &format!("nothing: it cost {}{}", more(net), share(net.saturating_neg())));
    } else {
        page.line("saved", &format!("{}{}  net of waste", usd(Usd(net)), share(net)));
    }
    let gross = cost.saved_gross_nano_usd;
    let gross = if gross < 0 { format!("cost {}", more(gross)) } else { usd(Usd(gross)) };
    page.line("gross", &format!("{gross}  by price alone"));
    page.line("wasted", &usd(Usd(cost.wasted_nano_usd)));
    let notice = match job.preemptions_without_notice {
        0 => String::new(),
        n => format!(", {n} without notice"),
    };
    page.line(
        "preempted",
        &format!("{}{notice}, in {}", job.preemptions, count(u64::from(job.attempts), "attempt")),
    );
    page.line("steps", &format!("{} done, {} repeated", job.steps_done, job.steps_repeated));
    let _ = writeln!(page.text, "as of       {}", rfc3339(spotq_model::Timestamp(as_of_ms)));
    let mut text = page.text;
    if !job.waste.is_empty() {
        text.push('\n');
        text.push_str(&waste(&job.waste).table(out));
    }
    if !segments.is_empty() {
        text.push('\n');
        text.push_str(&ledger(segments).table(out));
    }
    text
}

/// Whether a job cost more than it would have on demand.
#[must_use]
pub fn is_dear(reply: &v1::ReportReply) -> bool {
    reply.jobs.iter().filter_map(|job| job.cost).any(|cost| cost.saved_net_nano_usd < 0)
}

/// Segments of node time at one price: the bill, line by line.
#[must_use]
pub fn ledger(segments: &[v1::SegmentView]) -> Grid {
    let mut grid = Grid::new(&[
        Column::right("NODE", "node"),
        Column::right("JOB", "job_id").wide(),
        Column::right("TRY", "generation"),
        Column::left("POOL", "pool").wraps(),
        Column::left("MARKET", "market").wide(),
        Column::left("START", "start").wide(),
        Column::left("END", "end").wide(),
        Column::right("TIME", "ms"),
        Column::right("$/H", "price_usd_h"),
        Column::right("ON DEMAND", "on_demand_usd_h").wide(),
        Column::left("SOURCE", "price_source").wide(),
        Column::right("AMOUNT", "amount_usd"),
    ]);
    for s in segments {
        let at = |ms: u64| rfc3339(spotq_model::Timestamp(ms));
        let span = s.end_ms.map(|end| Span(end.saturating_sub(s.start_ms)));
        let (rate, full) = (Usd(s.price_nano_usd_h), Usd(s.on_demand_nano_usd_h));
        grid.row(vec![
            Cell::new(s.node_id.to_string()),
            Cell::new(s.job_id.to_string()),
            Cell::new(s.generation.to_string()),
            Cell::new(crate::words::place(&s.pool)).exact(plain(&s.pool)),
            Cell::new(&s.market),
            Cell::new(at(s.start_ms)),
            Cell::new(s.end_ms.map(at).unwrap_or_default()),
            Cell::new(span.map_or_else(|| "open".to_owned(), |span| span.to_string()))
                .exact(span.map(|span| span.0.to_string()).unwrap_or_default()),
            Cell::new(crate::words::rate(spotq_model::UsdPerHour(rate))).exact(rate),
            Cell::new(crate::words::rate(spotq_model::UsdPerHour(full))).exact(full),
            Cell::new(&s.price_source),
            Cell::new(usd(Usd(s.amount_nano_usd))).exact(Usd(s.amount_nano_usd)),
        ]);
    }
    grid
}

fn waste(waste: &[v1::Waste]) -> Grid {
    let mut grid = Grid::new(&[
        Column::left("WASTED BY", "cause"),
        Column::right("TIME", "ms"),
        Column::right("AMOUNT", "amount_usd"),
    ]);
    for w in waste {
        grid.row(vec![
            Cell::new(w.cause.replace('_', " ")),
            Cell::new(Span(w.ms).to_string()),
            Cell::new(usd(Usd(w.nano_usd))),
        ]);
    }
    grid
}

fn money(cost: &v1::Cost) -> [Cell; 6] {
    let amount = |nanos: i64| Cell::new(usd(Usd(nanos))).exact(Usd(nanos));
    let pct = percent(cost.saved_net_nano_usd, cost.on_demand_useful_nano_usd);
    [
        amount(cost.billed_nano_usd),
        amount(cost.on_demand_useful_nano_usd),
        amount(cost.saved_net_nano_usd),
        Cell::new(pct.map(|p| format!("{p:.0}")).unwrap_or_default())
            .exact(pct.map(|p| format!("{p:.2}")).unwrap_or_default()),
        amount(cost.saved_gross_nano_usd),
        amount(cost.wasted_nano_usd),
    ]
}

fn total(jobs: &[v1::JobReport]) -> v1::Cost {
    let mut sum = v1::Cost::default();
    for cost in jobs.iter().filter_map(|job| job.cost) {
        let add = |to: &mut i64, more: i64| *to = to.saturating_add(more);
        add(&mut sum.billed_nano_usd, cost.billed_nano_usd);
        add(&mut sum.on_demand_useful_nano_usd, cost.on_demand_useful_nano_usd);
        add(&mut sum.on_demand_billed_nano_usd, cost.on_demand_billed_nano_usd);
        add(&mut sum.wasted_nano_usd, cost.wasted_nano_usd);
        add(&mut sum.saved_net_nano_usd, cost.saved_net_nano_usd);
        add(&mut sum.saved_gross_nano_usd, cost.saved_gross_nano_usd);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::out::test::out;
    use crate::views::test::report;

    #[test]
    fn several_jobs_have_a_sum_for_people_and_none_for_programs() {
        let mut reply = report();
        reply.jobs.push(v1::JobReport { job_id: 8, ..reply.jobs[0].clone() });
        let table = jobs(&reply, &out(Format::Table)).table(&out(Format::Table));
        let expected = "\
JOB  NAME   PHASE       BILLED  SAVED   %   WASTED  LOST
  7  train  completed  $0.9731  $2.03  68  $0.0500     1
  8  train  completed  $0.9731  $2.03  68  $0.0500     1
     all                 $1.95  $4.05  68  $0.1000     2
";
        assert_eq!(table, expected, "\n{table}");
        let csv = jobs(&reply, &out(Format::Csv));
        assert_eq!(csv.table(&out(Format::Wide)).lines().count(), 3);
    }

    #[test]
    fn a_report_fits_80_columns_in_one_line_for_a_job_whatever_happened() {
        let mut reply = report();
        let dear = v1::Cost {
            billed_nano_usd: 99_999_990_000_000,
            wasted_nano_usd: 99_999_990_000_000,
            saved_net_nano_usd: -99_999_990_000_000,
            on_demand_useful_nano_usd: 50_000_000_000_000,
            ..Default::default()
        };
        for outcome in ["preemption_budget_spent", "budget_exhausted", "launch_failure", "out_of_memory"] {
            reply.jobs.push(v1::JobReport {
                job_id: 99_999,
                name: "a-name-that-is-rather-long".into(),
                outcome: Some(outcome.into()),
                cost: Some(dear),
                preemptions: 1000,
                ..reply.jobs[0].clone()
            });
        }
        let table = jobs(&reply, &out(Format::Table)).table(&out(Format::Table));
        assert_eq!(table.lines().count(), 2 + reply.jobs.len(), "\n{table}");
        assert!(table.lines().all(|line| line.chars().count() <= 80), "\n{table}");
        assert!(table.contains("a-name-th…") && table.contains("out of me…"), "\n{table}");
        assert!(
            jobs(&reply, &out(Format::Wide)).table(&out(Format::Wide)).contains("preemption budget spent")
        );
        assert!(is_dear(&reply) && !is_dear(&report()));
    }

    #[test]
    fn a_job_that_cost_more_than_on_demand_and_one_whose_node_is_not_returned_say_so() {
        let mut reply = report();
        reply.jobs[0].cost = Some(v1::Cost {
            saved_net_nano_usd: -1_200_000,
            saved_gross_nano_usd: -1_000_000,
            on_demand_useful_nano_usd: 10_000_000,
            ..Default::default()
        });
        reply.segments[0].end_ms = None;
        let page = page(&reply.jobs[0], &reply.segments, reply.as_of_ms, &out(Format::Table));
        for line in [
            "billed      $0  for 1h 0m  so far; a node still costs something",
            "saved       nothing: it cost $0.00120 more than on demand  (12.0%)",
            "gross       cost $0.00100 more than on demand  by price alone",
        ] {
            assert!(page.lines().any(|l| l == line), "no line `{line}` in\n{page}");
        }
        assert!(!page.contains("-$"), "{page}");
    }

    #[test]
    fn one_job_says_where_the_money_went() {
        let reply = report();
        let page = page(&reply.jobs[0], &reply.segments, reply.as_of_ms, &out(Format::Table));
        for line in [
            "billed      $0.9731  for 1h 0m",
            "saved       $2.03  (67.6%)  net of waste",
            "preempted   1, in 2 attempts",
            "steps       5000 done, 40 repeated",
            "boot         8s  $0.00070",
        ] {
            assert!(page.lines().any(|l| l == line), "no line `{line}` in\n{page}");
        }
        assert!(page.lines().all(|line| line.chars().count() <= 80), "{page}");
    }

    #[test]
    fn the_same_report_twice_is_the_same_text() {
        let reply = report();
        let print = || page(&reply.jobs[0], &reply.segments, reply.as_of_ms, &out(Format::Table));
        assert_eq!(print(), print());
    }
}
