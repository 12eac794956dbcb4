//! Which pools will do for a job, what is said of the others, and which pool is better.

use spotq_model::{Choice, Cloud, JobSpec, Offer, PlacementPolicy, RefusalKind, Span, Timestamp};
use spotq_policy::{WhyNot, eligible, score};
use spotq_testkit::{job, offer};

const SPOT: &str = "aws/us-east-1/us-east-1a/g5.xlarge/spot";
const OVERHEAD: Span = Span::secs(180);

#[test]
fn each_wish_is_checked_and_named() {
    let node = offer(SPOT, "0.30").accelerator("A10G", 1).cpus(4).memory_gib(16).build();
    let cases: Vec<(Choice, Option<WhyNot>)> = vec![
        (Choice::default(), None),
        (Choice { accelerator: Some("A10G".into()), accelerator_count: 1, ..Choice::default() }, None),
        (
            Choice { accelerator: Some("H100".into()), accelerator_count: 1, ..Choice::default() },
            Some(WhyNot::OtherAccelerator { wanted: "H100".into() }),
        ),
        (
            Choice { accelerator: Some("A10G".into()), accelerator_count: 2, ..Choice::default() },
            Some(WhyNot::TooFewAccelerators { wanted: 2, has: 1 }),
        ),
        (Choice { cpus_min: 4, ..Choice::default() }, None),
        (Choice { cpus_min: 5, ..Choice::default() }, Some(WhyNot::TooFewCpus { wanted: 5, has: 4 })),
        (Choice { memory_gib_min: 16, ..Choice::default() }, None),
        (
            Choice { memory_gib_min: 17, ..Choice::default() },
            Some(WhyNot::TooLittleMemory { wanted_gib: 17, has_gib: 16 }),
        ),
        (Choice { cloud: Some(Cloud::Gcp), ..Choice::default() }, Some(elsewhere("gcp"))),
        (Choice { region: Some("us-west-2".into()), ..Choice::default() }, Some(elsewhere("us-west-2"))),
        (Choice { zone: Some("us-east-1b".into()), ..Choice::default() }, Some(elsewhere("us-east-1b"))),
        (
            Choice { instance_type: Some("p5".into()), ..Choice::default() },
            Some(WhyNot::OtherInstanceType { wanted: "p5".into() }),
        ),
    ];
    for (choice, why) in cases {
        assert_eq!(eligible(&wanting(vec![choice.clone()]), &node).err(), why, "{choice:?}");
    }
}

#[test]
fn each_refusal_says_what_is_wanted_and_what_there_is() {
    let limit = "0.3".parse().unwrap();
    let rests = WhyNot::CoolingDown {
        kind: RefusalKind::QuotaExceeded,
        until: Timestamp(1),
        message: "8 of 8 in use".into(),
    };
    let told = [
        (WhyNot::OtherAccelerator { wanted: "H100".into() }, "has no H100"),
        (WhyNot::TooFewAccelerators { wanted: 2, has: 1 }, "has 1 accelerators, 2 wanted"),
        (WhyNot::TooFewCpus { wanted: 5, has: 4 }, "has 4 CPUs, 5 wanted"),
        (WhyNot::TooLittleMemory { wanted_gib: 17, has_gib: 16 }, "has 16 GiB of memory, 17 wanted"),
        (elsewhere("us-west-2"), "not in us-west-2"),
        (WhyNot::OtherInstanceType { wanted: "p5".into() }, "not a p5"),
        (WhyNot::MarketByPolicy { policy: "spot-only".into() }, "not with `policy: spot-only`"),
        (WhyNot::TooExpensive { limit }, "above `max_hourly_cost` of $0.3000/h"),
        (WhyNot::SpotNotWorthIt, "spot costs as much as on-demand"),
        (rests, "refused lately, quota exceeded: 8 of 8 in use"),
    ];
    for (why, text) in told {
        assert_eq!(why.to_string(), text);
    }
}

#[test]
fn any_of_the_choices_will_do_and_the_closest_refusal_is_told() {
    let node = offer(SPOT, "0.30").cpus(4).build();
    let too_big = Choice { cpus_min: 64, ..Choice::default() };
    let other = Choice { accelerator: Some("H100".into()), accelerator_count: 8, ..Choice::default() };
    assert_eq!(eligible(&wanting(vec![other.clone(), Choice::default()]), &node), Ok(()));
    let why = eligible(&wanting(vec![too_big, other]), &node);
    assert_eq!(
        why,
        Err(WhyNot::TooFewCpus { wanted: 64, has: 4 }),
        "it came further than the other accelerator"
    );
    assert_eq!(eligible(&wanting(Vec::new()), &node), Ok(()), "no wish is any node");
}

#[test]
fn the_market_follows_the_policy() {
    let spot = offer(SPOT, "0.30").build();
    let on_demand = offer("aws/us-east-1/us-east-1a/g5.xlarge/on-demand", "0.90").build();
    let by = |policy| JobSpec { policy, ..job("train") };
    let cases = [
        (PlacementPolicy::SpotFirst, true, true),
        (PlacementPolicy::SpotOnly, true, false),
        (PlacementPolicy::OnDemand, false, true),
    ];
    for (policy, takes_spot, takes_on_demand) in cases {
        assert_eq!(eligible(&by(policy), &spot).is_ok(), takes_spot, "{policy:?}");
        assert_eq!(eligible(&by(policy), &on_demand).is_ok(), takes_on_demand, "{policy:?}");
    }
    let first = score(&by(PlacementPolicy::SpotFirst), &spot, OVERHEAD).unwrap();
    let second = score(&by(PlacementPolicy::SpotFirst), &on_demand, OVERHEAD).unwrap();
    assert!(first < second && (first.fall_back, second.fall_back) == (0, 1));
    assert_eq!(score(&by(PlacementPolicy::OnDemand), &on_demand, OVERHEAD).unwrap().fall_back, 0);
}

#[test]
fn spot_is_worth_it_only_below_on_demand_and_the_limit_includes_itself() {
    for (price, ok) in [("0.8999", true), ("0.90", false), ("1.20", false)] {
        let node = offer(SPOT, price).on_demand("0.90").build();
        assert_eq!(
            eligible(&job("train"), &node),
            if ok { Ok(()) } else { Err(WhyNot::SpotNotWorthIt) },
            "{price}"
        );
    }
    let mut capped = job("train");
    let limit = "0.30".parse().unwrap();
    capped.resources.max_hourly = Some(limit);
    assert_eq!(eligible(&capped, &offer(SPOT, "0.30").build()), Ok(()));
    let above = offer(SPOT, "0.300000001").build();
    assert_eq!(eligible(&capped, &above), Err(WhyNot::TooExpensive { limit }));
}

#[test]
fn scores_order_by_money_with_interruptions_then_interruptions() {
    let at = |pool: &str, price, ppm| offer(pool, price).interruptions_per_hour_ppm(ppm).build();
    // One interruption an hour costs three minutes: five per cent.
    let steady = at("aws/us-east-1/us-east-1a/t4/spot", "1.04", 0);
    let stormy = at("gcp/us-central1/us-central1-a/l4/spot", "1.00", 1_000_000);
    let score_of = |offer: &Offer| score(&job("train"), offer, OVERHEAD).unwrap();
    assert_eq!(score_of(&stormy).expected_per_hour, 1_050_000_000);
    assert!(score_of(&steady) < score_of(&stormy));
    let equal = at("aws/us-east-1/us-east-1a/t4/spot", "1.05", 0);
    assert!(score_of(&equal) < score_of(&stormy), "the same money, fewer interruptions");
}

#[test]
fn the_largest_prices_and_rates_do_not_overflow() {
    let mut dear = offer(SPOT, "9000000000").build();
    dear.quote.on_demand.0.0 = i64::MAX;
    dear.interruptions_per_hour_ppm = u64::MAX;
    assert_eq!(score(&job("train"), &dear, Span(u64::from(u32::MAX))).unwrap().expected_per_hour, i64::MAX);
}

fn wanting(any_of: Vec<Choice>) -> JobSpec {
    let mut spec = job("train");
    spec.resources.any_of = any_of;
    spec
}

fn elsewhere(wanted: &str) -> WhyNot {
    WhyNot::OtherPlace { wanted: wanted.into() }
}
