//! What time alone does, and how old a list may be before it is believed.

use super::*;

#[test]
fn what_takes_too_long_ends_at_its_limit_and_not_before() {
    let p = Policies::default();
    let limit = Span::secs(100);
    let price = offer(POOL, "0.31").build().quote.price;
    let budget = price.cost(limit) + price.cost(Span::secs(1));
    let cases = [
        ("a launch without an answer", asked_for(), p.launch_timeout + Span(1)),
        ("a boot without a worker", booting(), p.boot_timeout + Span(1)),
        ("a node without work", idle(), p.idle_ttl),
        (
            "a command with a time limit",
            Running::start(JobSpec { time_limit: Some(limit), ..job("a") }),
            limit,
        ),
        ("a task with a budget", Running::start(JobSpec { budget: Some(budget), ..job("a") }), limit),
        ("a node near its age", Running::start(job("a")), LIFE.saturating_sub(p.node_ttl_margin)),
    ];
    for (what, mut world, limit) in cases {
        world.later(limit.saturating_sub(Span(1)));
        assert_eq!(world.decided(&Input::Tick), [], "{what}: too early");
        world.later(Span(1));
        assert_ne!(world.decided(&Input::Tick), [], "{what}: not in time");
    }
}

#[test]
fn a_pool_rests_after_a_node_that_never_came_up_and_after_a_launch_that_nobody_answered() {
    let p = Policies::default();
    for (mut world, patience) in [(booting(), p.boot_timeout), (asked_for(), p.launch_timeout)] {
        let pool = POOL.parse().unwrap();
        world.later(patience + Span(1));
        world.input(Input::Tick);
        let until = world.c.cool_down(&pool, world.at).map(|rest| rest.until);
        assert_eq!(until, Some(world.at + p.preempted_cool_down));
        assert!(matches!(world.phase(), Phase::Pending { .. }), "{:?}", world.phase());
        assert!(world.c.nodes[&world.node].state >= NodeState::Ending);
    }
}

#[test]
fn time_before_the_attempt_counts_towards_a_limit_of_running_time() {
    let mut world = Running::start(JobSpec { time_limit: Some(Span::secs(100)), ..job("train") });
    world.later(Span::secs(60));
    world.preempt();
    world.later(Span::secs(500));
    world.run_again(Generation(2));
    for (later, ends) in [(Span::secs(39), false), (Span::secs(1), true)] {
        world.later(later);
        assert_eq!(!world.decided(&Input::Tick).is_empty(), ends, "time in the queue does not count");
    }
}

#[test]
fn a_list_is_believed_once_it_is_younger_than_what_it_does_not_show() {
    let lag = Policies::default().list_lag;
    let mut unneeded = asked_for();
    unneeded.input(Input::Cancel { job: JobId(1) });
    let mut gone = Running::start(job("train"));
    gone.preempt();
    let seen = InstanceSeen {
        instance: InstanceId("i".into()),
        key: EffectKey(format!("k{NODE}")),
        node: Some(NODE),
        pool: POOL.parse().unwrap(),
        launched_at: gone.at,
        gone: None,
        gone_at: None,
    };
    let cases = [
        ("a node that is not in it has died", Running::start(job("train")), vec![]),
        ("a launch that it does not show was never made", unneeded, vec![]),
        ("an instance that it still shows was given up too early", gone, vec![seen]),
    ];
    for (what, world, instances) in cases {
        let list = |age: Span| {
            let instances = instances.clone();
            world.decided(&Input::Instances { asked_at: world.at + age, instances })
        };
        assert_eq!(list(lag), [], "{what}: the list may be older than it");
        assert!(!list(lag + Span(1)).is_empty(), "{what}");
    }
}

#[test]
fn either_price_that_moves_is_a_new_price_and_the_same_ones_are_none() {
    let world = Running::start(job("train"));
    for (price, on_demand, moved) in
        [("0.31", "0.93", false), ("0.32", "0.93", true), ("0.31", "0.92", true), ("0.3", "0.9", true)]
    {
        let offers = vec![offer(POOL, price).on_demand(on_demand).build()];
        assert_eq!(!world.decided(&Input::Offers { offers }).is_empty(), moved, "{price} {on_demand}");
    }
}

/// The task waits for a node whose launch the cloud has not answered.
fn asked_for() -> Running {
    let mut world = Running::start(job("train"));
    world.input(Input::LeaseExpired { node: NODE });
    world.node = world.place(Generation(2), false);
    world
}

/// The task waits for a node whose worker has not joined.
fn booting() -> Running {
    let mut world = asked_for();
    let (node, instance, quote) = (world.node, InstanceId("i2".into()), offer(POOL, "0.31").build().quote);
    world.fact(Fact::NodeLaunched { node, instance, quote, billed_from: None });
    world
}

/// The task is done; its node is kept for the next.
fn idle() -> Running {
    let mut world = Running::start(job("train"));
    world.report(Report::Finished { exit: exit(0) });
    world
}
