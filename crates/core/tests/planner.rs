//! Who is placed where, why the others wait, what the lint stops, and what people are told.
#![expect(clippy::unwrap_used, reason = "a test, helpers included, ends at the first surprise")]

use std::sync::Arc;

use spotq_core::{
    Cluster, FreeNode, Move, Plan, PlanInput, Policies, Severity, Waiting, apply, decide, explain, lint,
    plan, plan_input,
};
use spotq_model::{
    Choice, Cloud, EffectKey, Event, Fact, Generation, Input, JobId, JobSpec, Market, NodeId, Offer,
    PlacementPolicy, Pool, Refusal, RefusalKind, Resources, Scope, Span, TaskId, Timestamp, UsdPerHour,
    WaitReason,
};
use spotq_policy::WhyNot;
use spotq_testkit::{job, offer};

const SPOT: &str = "aws/us-east-1/us-east-1a/t4/spot";
const OTHER_SPOT: &str = "gcp/us-central1/us-central1-a/l4/spot";
const ON_DEMAND: &str = "aws/us-east-1/us-east-1a/t4/on-demand";
const NOW: Timestamp = Timestamp(1_000_000);
const SOON: Timestamp = Timestamp(1_001_000);

#[test]
fn the_cheapest_eligible_spot_pool_is_chosen() {
    let market = [at(SPOT, "0.31"), at(OTHER_SPOT, "0.29"), at(ON_DEMAND, "0.10")];
    assert_eq!(chosen(&[job("a")], &market), [OTHER_SPOT], "spot first, whatever on-demand costs");
}

#[test]
fn expected_interruptions_count_as_money() {
    let calm = offer(SPOT, "0.31").interruptions_per_hour_ppm(0).build();
    let stormy = offer(OTHER_SPOT, "0.30").interruptions_per_hour_ppm(2_000_000).build();
    // Two interruptions an hour of three minutes each: an hour of work takes 1.1 hours.
    assert_eq!(chosen(&[job("a")], &[stormy.clone(), calm.clone()]), [SPOT]);
    let fast = Policies { restart_overhead: Span::secs(10), ..Policies::default() };
    assert_eq!(pools(&planned(&[job("a")], &[stormy, calm], &fast)), [OTHER_SPOT]);
}

#[test]
fn equal_pools_go_by_name_in_whatever_order_they_are_offered() {
    let (first, second) = (at(SPOT, "0.3"), at(OTHER_SPOT, "0.3"));
    for market in [[first.clone(), second.clone()], [second, first]] {
        assert_eq!(chosen(&[job("a")], &market), [SPOT]);
        let told = explain(&waiting(&[job("a")]), &Policies::default(), NOW, &market, task(1)).unwrap();
        assert_eq!(told.pools[0].pool.to_string(), SPOT);
    }
}

#[test]
fn spot_that_costs_as_much_as_on_demand_is_refused() {
    let dear = offer(SPOT, "0.90").on_demand("0.90").build();
    assert_eq!(chosen(&[job("a")], &[dear.clone(), at(ON_DEMAND, "0.90")]), [ON_DEMAND]);
    assert_eq!(waits(&spot_only(), &[dear, at(ON_DEMAND, "0.90")]), (WaitReason::SpotNotWorthIt, SOON));
}

#[test]
fn spot_only_waits_and_on_demand_never_takes_spot() {
    let (reason, _) = waits(&spot_only(), &[at(ON_DEMAND, "0.50")]);
    assert!(matches!(&reason, WaitReason::NoSuchPool { hint } if hint.contains("spot-only")), "{reason:?}");
    let safe = JobSpec { policy: PlacementPolicy::OnDemand, ..job("a") };
    assert_eq!(chosen(&[safe], &[at(SPOT, "0.10"), at(ON_DEMAND, "0.90")]), [ON_DEMAND]);
}

#[test]
fn a_node_above_the_hourly_limit_is_not_taken() {
    let mut capped = job("a");
    capped.resources.max_hourly = Some("0.30".parse().unwrap());
    assert_eq!(
        chosen(std::slice::from_ref(&capped), &[at(SPOT, "0.30")]),
        [SPOT],
        "the limit itself is within"
    );
    let (reason, _) = waits(&capped, &[at(SPOT, "0.35"), at(OTHER_SPOT, "0.32")]);
    assert_eq!(reason, WaitReason::TooExpensive { cheapest: "0.32".parse().unwrap() });
}

#[test]
fn a_cool_down_holds_for_its_scope_and_until_its_end() {
    let here: Pool = SPOT.parse().unwrap();
    let (cloud, region) = (Cloud::Aws, "us-east-1".to_owned());
    let spot_alone = [at(SPOT, "0.2"), at(OTHER_SPOT, "0.3")];
    let scopes = [
        Scope::Pool { pool: here.clone() },
        Scope::Zone { cloud, zone: here.zone.clone() },
        Scope::Region { cloud, region: region.clone() },
        Scope::RegionMarket { cloud, region, market: Market::Spot },
        Scope::Cloud { cloud },
    ];
    for scope in scopes {
        let mut c = waiting(&[job("a")]);
        let until = NOW + Span::secs(60);
        fact(
            &mut c,
            Fact::PoolCooled { scope, kind: RefusalKind::QuotaExceeded, until, message: "no".into() },
        );
        let plan_at = |now, offers: &[Offer]| {
            plan(&plan_input(&c, &Policies::default(), now, offers), &Policies::default())
        };
        assert_eq!(pools(&plan_at(NOW, &spot_alone)), [OTHER_SPOT], "another cloud is free");
        let only = &spot_alone[..1];
        let rests = WaitReason::CoolingDown { pools: 1, last: RefusalKind::QuotaExceeded };
        assert_eq!(plan_at(NOW, only).report[&task(1)], (rests, until));
        assert_eq!(pools(&plan_at(until, only)), [SPOT], "it is over");
    }
    let mut c = waiting(&[job("a")]);
    let scope = Scope::RegionMarket { cloud, region: "us-east-1".into(), market: Market::OnDemand };
    let until = NOW + Span::secs(60);
    fact(&mut c, Fact::PoolCooled { scope, kind: RefusalKind::QuotaExceeded, until, message: "no".into() });
    assert_eq!(pools(&plan_of(&c, &[at(SPOT, "0.2")])), [SPOT], "a quota of on-demand is not one of spot");
}

#[test]
fn a_refusal_that_repeats_rests_twice_as_long_and_one_long_after_starts_anew() {
    let mut c = waiting(&[job("a")]);
    let (p, offers) = (Policies::default(), [at(SPOT, "0.2")]);
    let mut now = NOW;
    for rest in [60, 120, 240] {
        assert_eq!(refuse(&mut c, &p, now, &offers), now + Span::secs(rest));
        now = now + Span::secs(rest);
    }
    now = now + Span::secs(7200);
    for rest in [60, 120] {
        assert_eq!(refuse(&mut c, &p, now, &offers), now + Span::secs(rest), "after two quiet hours");
        now = now + Span::secs(rest);
    }
}

#[test]
fn a_free_node_that_fits_is_used_before_a_new_one_is_asked_for() {
    let mut input = input(&[job("a"), job("b")]);
    let offers = [at(OTHER_SPOT, "0.30")];
    input.offers = &offers;
    input.free_nodes = vec![free(4, SPOT, "0.50"), free(5, SPOT, "0.40")];
    let plan = plan(&input, &Policies::default());
    let uses: Vec<_> = plan.moves.iter().map(|step| (step.task(), step.node())).collect();
    assert_eq!(uses, [(task(1), NodeId(5)), (task(2), NodeId(4))], "the cheaper one first, each once");
    input.free_nodes.truncate(1);
    input.waiting[0].spec = Arc::new(JobSpec { policy: PlacementPolicy::OnDemand, ..job("a") });
    let plan = spotq_core::plan(&input, &Policies::default());
    assert_eq!(
        plan.moves.iter().map(Move::task).collect::<Vec<_>>(),
        [task(2)],
        "a node that does not fit is left"
    );
}

#[test]
fn a_free_node_that_costs_far_more_than_a_new_one_is_left() {
    let mut input = input(&[job("a")]);
    let offers = [at(OTHER_SPOT, "0.10")];
    input.offers = &offers;
    input.free_nodes = vec![free(4, SPOT, "0.50")];
    let plan = plan(&input, &Policies::default());
    assert!(matches!(plan.moves[..], [Move::Launch { .. }]), "{:?}", plan.moves);
    let full = Policies { nodes_max: 0, ..Policies::default() };
    let plan = spotq_core::plan(&input, &full);
    assert!(matches!(plan.moves[..], [Move::Use { .. }]), "nothing else may be had: {:?}", plan.moves);
}

#[test]
fn tasks_that_sleep_do_not_take_the_place_of_one_that_can_start() {
    let later = JobSpec { begin: Some(NOW + Span::secs(3600)), ..job("later") };
    let mut c = waiting(&[later.clone(), later, job("now")]);
    let policies = Policies { plan_width: 2, ..Policies::default() };
    let offers = vec![at(SPOT, "0.2")];
    for _ in 0..2 {
        for event in decide(&c, &policies, NOW, &Input::Plan { offers: offers.clone() }) {
            apply(&mut c, &event).unwrap();
        }
    }
    assert_eq!(c.active.len(), 1, "the third task was never looked at");
}

#[test]
fn the_node_limit_holds_for_new_nodes_alone() {
    let policies = Policies { nodes_max: 2, ..Policies::default() };
    let jobs = [job("a"), job("b"), job("c")];
    let plan = planned(&jobs, &[at(SPOT, "0.3")], &policies);
    assert_eq!(plan.moves.len(), 2);
    assert_eq!(plan.report[&task(3)], (WaitReason::NodeLimit { limit: 2 }, SOON));
    let mut full = input(&jobs[..1]);
    let offers = [at(SPOT, "0.3")];
    (full.offers, full.nodes_live, full.free_nodes) = (&offers, 2, vec![free(1, SPOT, "0.3")]);
    assert_eq!(spotq_core::plan(&full, &policies).moves.len(), 1, "a node that is there counts already");
}

#[test]
fn a_job_with_a_begin_time_waits_for_it() {
    let begin = NOW + Span::secs(100);
    let later = JobSpec { begin: Some(begin), ..job("a") };
    assert_eq!(waits(&later, &[at(SPOT, "0.3")]), (WaitReason::BeginTime { at: begin }, begin));
    let past = JobSpec { begin: Some(NOW), ..job("a") };
    assert_eq!(chosen(&[past], &[at(SPOT, "0.3")]), [SPOT]);
}

#[test]
fn higher_priority_comes_first_and_equal_ones_in_order() {
    let jobs = [job("a"), JobSpec { priority: 3, ..job("b") }, job("c")];
    let policies = Policies { nodes_max: 2, ..Policies::default() };
    let plan = planned(&jobs, &[at(SPOT, "0.3")], &policies);
    assert_eq!(plan.moves.iter().map(Move::task).collect::<Vec<_>>(), [task(2), task(1)]);
    assert!(plan.report.contains_key(&task(3)));
}

#[test]
fn every_waiting_task_is_placed_or_has_exactly_one_reason() {
    let impossible =
        JobSpec { resources: Resources { any_of: vec![gpu("H100", 8)], max_hourly: None }, ..job("b") };
    let jobs = [job("a"), impossible, spot_only(), JobSpec { begin: Some(NOW + Span(1)), ..job("d") }];
    let markets = [vec![], vec![at(ON_DEMAND, "0.9")], vec![at(SPOT, "0.2")], vec![at(SPOT, "0")]];
    for market in markets {
        let c = waiting(&jobs);
        let p = Policies { nodes_max: 1, ..Policies::default() };
        let input = plan_input(&c, &p, NOW, &market);
        let plan = plan(&input, &p);
        let placed: Vec<TaskId> = plan.moves.iter().map(Move::task).collect();
        for number in 1..=4 {
            let (moves, waits) = (placed.contains(&task(number)), plan.report.contains_key(&task(number)));
            assert!(moves != waits, "task {number} in {market:?}");
        }
        assert_eq!(lint(&input, &plan), []);
    }
}

#[test]
fn an_offer_without_a_price_does_not_stop_the_others() {
    assert_eq!(chosen(&[job("a")], &[at(SPOT, "0"), at(OTHER_SPOT, "0.4")]), [OTHER_SPOT]);
    assert_eq!(waits(&job("a"), &[at(SPOT, "0")]).0, WaitReason::NoOffers);
}

#[test]
fn launch_keys_are_client_tokens_and_differ_between_generations() {
    let p = Policies { cluster: "a very long name of a cluster, with blanks".into(), ..Policies::default() };
    let offers = [at(SPOT, "0.3")];
    let mut input = input(&[job("a")]);
    input.offers = &offers;
    let key_of = |input: &PlanInput<'_>| match &plan(input, &p).moves[..] {
        [Move::Launch { key, .. }] => key.0.clone(),
        other => panic!("{other:?}"),
    };
    let first = key_of(&input);
    assert_eq!(first, key_of(&input), "the same intent has the same key");
    input.waiting[0].next_generation = Generation(2);
    assert_ne!(first, key_of(&input), "another attempt is another node");
    input.waiting[0].next_generation = Generation(1 << 32);
    input.next_node = NodeId(u64::from(u32::MAX));
    let longest = key_of(&input);
    assert!(longest.len() <= 64 && longest.is_ascii(), "{longest}");
}

#[test]
fn lint_stops_each_kind_of_bad_plan() {
    let offers = [at(SPOT, "0.3"), at(ON_DEMAND, "0.9")];
    let mut input = input(&[job("a"), spot_only()]);
    (input.offers, input.next_node, input.free_nodes) = (&offers, NodeId(9), vec![free(4, SPOT, "0.3")]);
    let good = [launch(1, 9, &offers[0]), launch(2, 10, &offers[0])];
    let mut waits = Plan { moves: vec![good[0].clone()], ..Plan::default() };
    waits.report.insert(task(2), (WaitReason::NoOffers, NOW));
    assert_eq!(lint(&input, &Plan { moves: good.to_vec(), ..Plan::default() }), []);
    assert_eq!(lint(&input, &waits), []);

    let with = |step: Move| Plan { moves: vec![step, good[1].clone()], ..Plan::default() };
    let change = |change: fn(&mut Move)| {
        let mut step = launch(1, 9, &at(SPOT, "0.3"));
        change(&mut step);
        with(step)
    };
    let reuse = |node, generation| {
        with(Move::Use { task: task(1), generation: Generation(generation), node: NodeId(node) })
    };
    assert_eq!(lint(&input, &reuse(4, 3)), [], "using the free node is fine");
    assert_eq!(lint(&input, &change(|m| set(m, |l| l.key.0 = "x".repeat(64)))), [], "the longest key");
    let mut both = waits.clone();
    both.moves.push(good[1].clone());
    let bad: Vec<(&str, Plan)> = vec![
        ("is placed twice", with(launch(2, 11, &offers[0]))),
        ("gets two tasks", with(launch(1, 10, &offers[0]))),
        (
            "does not wait",
            Plan {
                moves: vec![good[0].clone(), good[1].clone(), launch(3, 11, &offers[0])],
                ..Plan::default()
            },
        ),
        ("is placed and waits", both),
        ("has no reason to wait", Plan { moves: good[..1].to_vec(), ..Plan::default() }),
        ("gets an old generation 2", reuse(4, 2)),
        ("node 5 is not free", reuse(5, 3)),
        ("gets an old generation 0", change(|m| set(m, |l| *l.generation = Generation(0)))),
        ("node number 8 is taken", change(|m| set(m, |l| *l.node = NodeId(8)))),
        ("is no client token", change(|m| set(m, |l| l.key.0 = "x".repeat(65)))),
        ("is no client token", change(|m| set(m, |l| l.key.0 = "schlüssel".into()))),
        ("born expired", change(|m| set(m, |l| *l.expires_at = NOW))),
        ("has no price", change(|m| set(m, |l| l.offer.quote.price = UsdPerHour::default()))),
        ("will not do for task 1", change(|m| set(m, |l| l.offer.quote.on_demand = l.offer.quote.price))),
        (
            "will not do for task 2",
            Plan { moves: vec![good[0].clone(), launch(2, 10, &offers[1])], ..Plan::default() },
        ),
    ];
    for (text, plan) in bad {
        let notes = lint(&input, &plan);
        let fatal = notes.iter().any(|note| note.severity == Severity::Fatal && note.text.contains(text));
        assert!(fatal, "`{text}` was not found: {notes:?}");
    }
    input.free_nodes = vec![free(4, SPOT, "0.3")];
    input.waiting[0].spec = Arc::new(JobSpec { policy: PlacementPolicy::OnDemand, ..job("a") });
    assert!(fatal(&input, &reuse(4, 3), "node 4 will not do for task 1"));
    let mut c = waiting(&[job("a")]);
    let (scope, until) = (Scope::Cloud { cloud: Cloud::Aws }, NOW + Span(1));
    fact(
        &mut c,
        Fact::PoolCooled { scope, kind: RefusalKind::Throttled, until, message: "slow down".into() },
    );
    let cooling = plan_input(&c, &Policies::default(), NOW, &offers);
    assert!(fatal(
        &cooling,
        &Plan { moves: vec![launch(1, 9, &offers[0])], ..Plan::default() },
        "refused lately"
    ));
}

#[test]
fn a_return_to_on_demand_is_a_warning_and_no_more() {
    let offers = [at(ON_DEMAND, "0.9")];
    let mut input = input(&[job("a")]);
    input.offers = &offers;
    let plan = plan(&input, &Policies::default());
    let notes = lint(&input, &plan);
    assert_eq!(notes.iter().map(|note| note.severity).collect::<Vec<_>>(), [Severity::Warning], "{notes:?}");
    // Once it has had an attempt, it is placed there all the same.
    let mut c = waiting(&[job("a")]);
    for event in decide(&c, &Policies::default(), NOW, &Input::Plan { offers: offers.to_vec() }) {
        apply(&mut c, &event).unwrap();
    }
    let (task, end) = (task(1), spotq_model::AttemptEnd::Requeued);
    fact(&mut c, Fact::AttemptEnded { task, generation: Generation(1), end, exit: None, floor: None });
    fact(&mut c, Fact::NodeEnding { node: NodeId(1), why: spotq_model::EndWhy::Unneeded });
    let again = decide(&c, &Policies::default(), NOW, &Input::Plan { offers: offers.to_vec() });
    assert!(matches!(again[0].fact, Fact::NodeRequested { .. }), "{again:?}");
}

#[test]
fn what_waits_for_the_same_reason_is_not_news_again() {
    let mut c = waiting(&[spot_only()]);
    let offers = vec![at(ON_DEMAND, "0.9")];
    let plan_now = |c: &Cluster, seconds| {
        decide(c, &Policies::default(), NOW + Span::secs(seconds), &Input::Plan { offers: offers.clone() })
    };
    let first = plan_now(&c, 0);
    assert!(matches!(first[0].fact, Fact::TaskWaits { .. }), "{first:?}");
    first.iter().for_each(|event| apply(&mut c, event).unwrap());
    for later in [1, 2, 60] {
        assert_eq!(plan_now(&c, later), [], "after {later} s");
    }
}

#[test]
fn a_later_end_of_a_cool_down_is_news_and_a_little_later_one_is_not() {
    let mut c = waiting(&[job("a")]);
    let offers = vec![at(SPOT, "0.2")];
    let mut until = NOW + Span::secs(60);
    for (later, news) in [
        (Span::ZERO, true),
        (Span(1000), false),
        (Span(1), true),
        (Span::secs(90), true),
        (Span::ZERO, false),
    ] {
        until = until + later;
        cool(&mut c, NOW, SPOT, until);
        let events = decide(&c, &Policies::default(), NOW, &Input::Plan { offers: offers.clone() });
        assert_eq!(!events.is_empty(), news, "{later} later: {events:?}");
        events.iter().for_each(|event| apply(&mut c, event).unwrap());
    }
}

#[test]
fn a_cool_down_that_is_over_is_forgotten_when_the_next_one_comes() {
    let mut c = waiting(&[job("a")]);
    for (seconds, pool, kept) in [
        (0, SPOT, vec![SPOT]),
        (59, OTHER_SPOT, vec![SPOT, OTHER_SPOT]),
        (60, ON_DEMAND, vec![OTHER_SPOT, ON_DEMAND]),
        (600, SPOT, vec![SPOT]),
    ] {
        let now = NOW + Span::secs(seconds);
        cool(&mut c, now, pool, now + Span::secs(60));
        let scopes: Vec<Scope> = c.cool_downs.iter().map(|rest| rest.scope.clone()).collect();
        let kept: Vec<_> = kept.into_iter().map(|pool| Scope::Pool { pool: pool.parse().unwrap() }).collect();
        assert_eq!(scopes, kept, "after {seconds} s");
    }
}

#[test]
fn refusals_count_as_a_row_while_the_pause_between_them_is_shorter_than_the_rest() {
    for (pause, strikes) in [(Span::secs(60).saturating_sub(Span(1)), 2), (Span::secs(60), 1)] {
        let mut c = waiting(&[job("a")]);
        cool(&mut c, NOW, SPOT, NOW + Span::secs(60));
        let again = NOW + Span::secs(60) + pause;
        cool(&mut c, again, SPOT, again + Span::secs(60));
        assert_eq!(c.cool_downs.iter().map(|rest| rest.strikes).collect::<Vec<_>>(), [strikes], "{pause}");
        // The next rest is as long as the row says.
        let (p, offers) = (Policies::default(), [at(SPOT, "0.2")]);
        let third = again + Span::secs(60);
        assert_eq!(refuse(&mut c, &p, third, &offers), third + Span::secs(60 * (1 << strikes)));
        let late = third + Span::secs(60 * (1 << strikes)) + Span::secs(60);
        assert_eq!(refuse(&mut c, &p, late, &offers), late + Span::secs(60), "the pause was as long");
    }
}

#[test]
fn a_pause_that_ends_now_is_over() {
    let mut c = waiting(&[job("a")]);
    let (reason, next_try) = (WaitReason::BackOff { failures: 1 }, NOW + Span::secs(60));
    fact(&mut c, Fact::TaskWaits { task: task(1), reason, next_try });
    for (now, looked_at) in [(next_try - Span(1), 0), (next_try, 1)] {
        assert_eq!(plan_input(&c, &Policies::default(), now, &[]).waiting.len(), looked_at, "{now:?}");
    }
}

#[test]
fn a_node_that_is_about_to_expire_is_not_free() {
    let mut c = waiting(&[]);
    let p = Policies::default();
    for (number, life) in [(1, p.node_ttl_margin), (2, p.node_ttl_margin + Span(1))] {
        let (node, Offer { pool, shape, quote, .. }) = (NodeId(number), at(SPOT, "0.2"));
        let (key, expires_at) = (EffectKey(format!("k{number}")), NOW + life);
        fact(&mut c, Fact::NodeRequested { node, key, pool, shape, quote: quote.clone(), expires_at });
        let instance = spotq_model::InstanceId(format!("i{number}"));
        fact(&mut c, Fact::NodeLaunched { node, instance, quote, billed_from: None });
        fact(&mut c, Fact::NodeJoined { node });
    }
    let free: Vec<_> = plan_input(&c, &p, NOW, &[]).free_nodes.iter().map(|free| free.node).collect();
    assert_eq!(free, [NodeId(2)]);
}

#[test]
fn explain_orders_the_pools_and_names_each_reason() {
    let mut c = waiting(&[JobSpec {
        resources: Resources { any_of: vec![gpu("T4", 1)], max_hourly: Some("0.5".parse().unwrap()) },
        policy: PlacementPolicy::SpotOnly,
        ..job("a")
    }]);
    let t4 = |pool: &str, price: &str| offer(pool, price).accelerator("T4", 1);
    let rests: Pool = "aws/us-east-1/us-east-1c/t4/spot".parse().unwrap();
    let offers = vec![
        at(OTHER_SPOT, "0.1"),
        t4(ON_DEMAND, "0.4").build(),
        t4("aws/us-east-1/us-east-1b/t4/spot", "0.6").build(),
        t4("aws/us-east-1/us-east-1d/t4/spot", "0.4").on_demand("0.4").build(),
        t4(&rests.to_string(), "0.2").build(),
        t4("gcp/us-central1/us-central1-a/t4/spot", "0.35").build(),
        t4(SPOT, "0.31").build(),
    ];
    let (scope, until) = (Scope::Pool { pool: rests }, NOW + Span::secs(60));
    fact(
        &mut c,
        Fact::PoolCooled {
            scope,
            kind: RefusalKind::InsufficientCapacity,
            until,
            message: "sold out".into(),
        },
    );
    let told = explain(&c, &Policies::default(), NOW, &offers, task(1)).unwrap();
    let lines: Vec<String> = told
        .pools
        .iter()
        .map(|line| {
            format!(
                "{}: {}",
                line.pool,
                line.verdict.as_ref().map_or_else(WhyNot::to_string, |_| "fits".into())
            )
        })
        .collect();
    assert_eq!(
        lines,
        [
            "aws/us-east-1/us-east-1a/t4/spot: fits",
            "gcp/us-central1/us-central1-a/t4/spot: fits",
            "aws/us-east-1/us-east-1c/t4/spot: refused lately, insufficient capacity: sold out",
            "aws/us-east-1/us-east-1d/t4/spot: spot costs as much as on-demand",
            "aws/us-east-1/us-east-1b/t4/spot: above `max_hourly_cost` of $0.5000/h",
            "aws/us-east-1/us-east-1a/t4/on-demand: not with `policy: spot-only`",
            "gcp/us-central1/us-central1-a/l4/spot: has no T4",
        ]
    );
    assert!(told.headline.starts_with("waits: "), "{}", told.headline);
    assert_eq!(explain(&c, &Policies::default(), NOW, &offers, task(2)), None);
}

#[test]
fn a_waiting_task_is_told_when_the_planner_looks_again_and_what_would_help() {
    let limit = "1".parse().unwrap();
    let cases = [
        (WaitReason::Queued, ""),
        (WaitReason::NoOffers, ""),
        (
            WaitReason::NoSuchPool { hint: "none".into() },
            "; change `resources:` to something on `spotq offers`",
        ),
        (
            WaitReason::TooExpensive { cheapest: limit },
            "; a higher `max_hourly_cost` or a lower price would let it start",
        ),
        (WaitReason::SpotNotWorthIt, "; `policy: spot-first` would take on-demand meanwhile"),
        (WaitReason::NodeLimit { limit: 1 }, "; it starts when another node ends"),
    ];
    for (reason, hint) in cases {
        let mut c = waiting(&[job("a")]);
        let (task, next_try) = (task(1), NOW + Span::secs(60));
        fact(&mut c, Fact::TaskWaits { task, reason: reason.clone(), next_try });
        for (now, when) in [(NOW, format!("in {}", Span::secs(60))), (next_try, "at once".to_owned())] {
            let told = explain(&c, &Policies::default(), now, &[], task).unwrap();
            assert_eq!(told.headline, format!("waits: {reason}"));
            assert_eq!(told.next, format!("the planner looks again {when}{hint}"));
        }
    }
}

/// What a launch says, to be changed by a test.
struct Launch<'a> {
    generation: &'a mut Generation,
    node: &'a mut NodeId,
    key: &'a mut EffectKey,
    offer: &'a mut Offer,
    expires_at: &'a mut Timestamp,
}

fn set(step: &mut Move, change: fn(Launch<'_>)) {
    if let Move::Launch { generation, node, key, offer, expires_at, .. } = step {
        change(Launch { generation, node, key, offer, expires_at });
    }
}

fn launch(number: u32, node: u64, offer: &Offer) -> Move {
    Move::Launch {
        task: task(number),
        generation: Generation(3),
        node: NodeId(node),
        key: EffectKey(format!("spotq-feed-g3-n{node}")),
        offer: offer.clone(),
        expires_at: NOW + Span::secs(3600),
    }
}

fn fatal(input: &PlanInput<'_>, plan: &Plan, text: &str) -> bool {
    lint(input, plan).iter().any(|note| note.severity == Severity::Fatal && note.text.contains(text))
}

/// Has `pool` refuse at `now`, to rest until then.
fn cool(c: &mut Cluster, now: Timestamp, pool: &str, until: Timestamp) {
    let scope = Scope::Pool { pool: pool.parse().unwrap() };
    let fact = Fact::PoolCooled {
        scope,
        kind: RefusalKind::InsufficientCapacity,
        until,
        message: "none left".into(),
    };
    apply(c, &Event { at: now, fact }).unwrap();
}

/// Plans, and has the cloud refuse the launch; until when the pool rests.
fn refuse(c: &mut Cluster, p: &Policies, now: Timestamp, offers: &[Offer]) -> Timestamp {
    let step = |c: &mut Cluster, input: &Input| {
        decide(c, p, now, input).iter().for_each(|event| apply(c, event).unwrap());
    };
    step(c, &Input::Plan { offers: offers.to_vec() });
    let node = *c.nodes.last_key_value().unwrap().0;
    assert!(c.live.contains(&node), "nothing was asked for at {now:?}");
    let refusal = Refusal {
        kind: RefusalKind::InsufficientCapacity,
        scope: Scope::Pool { pool: offers[0].pool.clone() },
        cool_down: Span::secs(60),
        message: "none left".into(),
    };
    step(c, &Input::LaunchAnswered { node, answer: spotq_model::LaunchAnswer::Refused { refusal } });
    c.cool_down(&offers[0].pool, now).unwrap().until
}

/// Tasks that wait with two attempts behind them, as the planner sees them.
fn input(specs: &[JobSpec]) -> PlanInput<'static> {
    let waiting = specs.iter().zip(1..).map(|(spec, number)| Waiting {
        task: task(number),
        uuid: format!("feed{number:04}"),
        next_generation: Generation(3),
        spec: Arc::new(spec.clone()),
        reason: WaitReason::Queued,
        next_try: NOW,
    });
    PlanInput {
        now: NOW,
        waiting: waiting.collect(),
        free_nodes: Vec::new(),
        offers: &[],
        cool_downs: Vec::new(),
        nodes_live: 0,
        next_node: NodeId(1),
    }
}

/// A cluster in which these jobs, numbered from 1, have just been submitted.
fn waiting(specs: &[JobSpec]) -> Cluster {
    let mut c = Cluster::default();
    for (spec, number) in specs.iter().zip(1..) {
        let (uuid, client_key) = (format!("feed{number:04}"), format!("key-{number}"));
        fact(
            &mut c,
            Fact::JobSubmitted { job: JobId(number), uuid, client_key, spec: Arc::new(spec.clone()) },
        );
    }
    c
}

fn fact(c: &mut Cluster, fact: Fact) {
    apply(c, &Event { at: NOW, fact }).unwrap();
}

fn planned(specs: &[JobSpec], offers: &[Offer], p: &Policies) -> Plan {
    let c = waiting(specs);
    let input = plan_input(&c, p, NOW, offers);
    let plan = plan(&input, p);
    let notes = lint(&input, &plan);
    assert!(notes.iter().all(|note| note.severity < Severity::Fatal), "{notes:?}");
    plan
}

fn plan_of(c: &Cluster, offers: &[Offer]) -> Plan {
    plan(&plan_input(c, &Policies::default(), NOW, offers), &Policies::default())
}

fn chosen(specs: &[JobSpec], offers: &[Offer]) -> Vec<String> {
    pools(&planned(specs, offers, &Policies::default()))
}

fn pools(plan: &Plan) -> Vec<String> {
    let launched = plan.moves.iter().filter_map(|step| match step {
        Move::Launch { offer, .. } => Some(offer.pool.to_string()),
        Move::Use { .. } => None,
    });
    launched.collect()
}

fn waits(spec: &JobSpec, offers: &[Offer]) -> (WaitReason, Timestamp) {
    let plan = planned(std::slice::from_ref(spec), offers, &Policies::default());
    plan.report.get(&task(1)).unwrap_or_else(|| panic!("it does not wait: {plan:?}")).clone()
}

fn at(pool: &str, price: &str) -> Offer {
    offer(pool, price).build()
}

fn free(node: u64, pool: &str, price: &str) -> FreeNode {
    let Offer { pool, shape, quote, .. } = at(pool, price);
    FreeNode { node: NodeId(node), pool, shape, quote }
}

fn gpu(accelerator: &str, accelerator_count: u32) -> Choice {
    Choice { accelerator: Some(accelerator.into()), accelerator_count, ..Choice::default() }
}

fn spot_only() -> JobSpec {
    JobSpec { policy: PlacementPolicy::SpotOnly, ..job("spot-only") }
}

fn task(number: u32) -> TaskId {
    TaskId::only(JobId(number))
}
