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
fn a_node_that_is_noticed_before_it_has_the_grant_is_not_waited_for() {
    let mut world = Running::start(job("train"));
    world.input(Input::LeaseExpired { node: NODE });
    world.node = world.place(Generation(2), true);
    let deadline = world.at + Span::secs(30);
    world.report(Report::Noticed { deadline, source: "imds".into() });
    world.input(Input::Tick);
    let end = world.c.task(TASK).unwrap().attempts[1].end.clone();
    assert_eq!(end, Some(AttemptEnd::Preempted { noticed: true }));
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
    let mut gone = Running::start(job("train"));
    gone.preempt();
    let cases = [
        ("a node that is not in it has died", Running::start(job("train")), vec![], "node_gone 1"),
        ("a launch that it does not show was never made", unneeded(), vec![], "node_refused 2"),
        (
            "an instance that it still shows was given up too early",
            gone,
            vec![seen(1, "i")],
            "node_orphaned 1",
        ),
    ];
    for (what, world, instances, told) in cases {
        assert_eq!(news(&world, lag, &instances), [""; 0], "{what}: the list may be older than it");
        assert!(news(&world, lag + Span(1), &instances).iter().any(|news| news == told), "{what}");
    }
}

#[test]
fn an_instance_in_a_list_belongs_to_the_node_that_it_was_launched_for_or_is_an_orphan() {
    let refused = || {
        let mut world = asked_for();
        world.later(Policies::default().launch_timeout + Span(1));
        world.input(Input::Tick);
        world
    };
    let gone = || {
        let mut world = Running::start(job("train"));
        world.preempt();
        world
    };
    let ended = |seen: InstanceSeen| InstanceSeen { gone: Some(GoneCause::Preempted), ..seen };
    let stranger = || InstanceSeen { key: EffectKey("who knows".into()), node: None, ..seen(9, "i9") };
    let old = || ended(seen(1, "i"));
    let cases = [
        ("the launch is still to be answered", asked_for(), vec![old(), seen(2, "i2")], vec!["node_gone 1"]),
        (
            "the launch is no longer needed",
            unneeded(),
            vec![old(), seen(2, "i2")],
            vec!["node_gone 1", "node_launched 2"],
        ),
        ("no longer needed, and over", unneeded(), vec![old(), ended(seen(2, "i2"))], vec!["node_gone 1"]),
        (
            "the launch was given up",
            refused(),
            vec![old(), seen(2, "i2")],
            vec!["node_orphaned 2", "node_gone 1"],
        ),
        (
            "given up, and there are two",
            refused(),
            vec![old(), seen(2, "i2"), seen(2, "i3")],
            vec!["node_orphaned 2", "node_orphaned 3", "node_gone 1"],
        ),
        (
            "another one with the key of a node",
            Running::start(job("a")),
            vec![seen(1, "i"), seen(1, "i5")],
            vec!["node_orphaned 2"],
        ),
        ("another one than the node had", gone(), vec![seen(1, "i5")], vec!["node_orphaned 2"]),
        ("nobody asked for it", unneeded(), vec![old(), stranger()], vec!["node_orphaned 3", "node_gone 1"]),
    ];
    for (what, world, instances, told) in cases {
        assert_eq!(news(&world, Span::ZERO, &instances), told, "{what}");
    }
}

/// What a list of this age says that is new, as kinds of facts and numbers of nodes.
fn news(world: &Running, age: Span, instances: &[InstanceSeen]) -> Vec<String> {
    let list = Input::Instances { asked_at: world.at + age, instances: instances.to_vec() };
    let facts = world.decided(&list).into_iter().map(|event| serde_json::to_value(&event.fact).unwrap());
    let nodes = facts.filter(|fact| fact["fact"].as_str().unwrap().starts_with("node_"));
    nodes.map(|fact| format!("{} {}", fact["fact"].as_str().unwrap(), fact["node"])).collect()
}

/// An instance of the node with this number, as a cloud lists it.
fn seen(node: u64, instance: &str) -> InstanceSeen {
    InstanceSeen {
        instance: InstanceId(instance.into()),
        key: EffectKey(format!("k{node}")),
        node: Some(NodeId(node)),
        pool: POOL.parse().unwrap(),
        launched_at: Timestamp(1_000_000),
        gone: None,
        gone_at: None,
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

/// The same after a cancel: the node is no longer needed.
fn unneeded() -> Running {
    let mut world = asked_for();
    world.input(Input::Cancel { job: JobId(1) });
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
