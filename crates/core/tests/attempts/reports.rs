//! What reports of workers change, and what they do not.

use super::*;

#[test]
fn progress_is_made_durable_at_first_at_the_end_and_not_too_often_between() {
    let mut world = Running::start(job("train"));
    let every = Policies::default().progress_every;
    let heard: [(Span, u64, bool); 8] = [
        (Span::ZERO, 1, true),
        (every, 1, false),
        (Span::ZERO, 2, true),
        (every.saturating_sub(Span(1)), 3, false),
        (Span(1), 3, true),
        (Span(1), 4, false),
        (Span::ZERO, 5, true),
        (every, 5, false),
    ];
    for (n, (later, step, durable)) in heard.into_iter().enumerate() {
        world.later(later);
        let total = if step < 5 { Some(9) } else { Some(5) };
        let progress = Progress { step, total };
        assert_eq!(world.hears(Report::Progressed { progress }), durable, "report {n}");
        assert_eq!(world.c.task(TASK).unwrap().progress == Some(progress), durable || step == 1 || n == 7);
    }
}

#[test]
fn a_restore_is_news_once_and_again_only_when_it_fell_back_further() {
    let mut world = Running::start(job("train"));
    world.report(Report::Committed { checkpoint: checkpoint(2) });
    world.preempt();
    world.accept_again(Generation(2));
    let told: [(Option<Checkpoint>, u32, bool); 7] = [
        (Some(checkpoint(2)), 0, true),
        (Some(checkpoint(2)), 0, false),
        (Some(checkpoint(1)), 1, true),
        (Some(checkpoint(1)), 1, false),
        (None, 2, true),
        (None, 2, false),
        (None, 3, true),
    ];
    for (from, fell_back, news) in told {
        let report = Report::Restored { from: from.clone(), fell_back };
        assert_eq!(world.hears(report), news, "{from:?} {fell_back}");
        let attempt = &world.c.task(TASK).unwrap().attempts[1];
        assert_eq!((&attempt.resumed, attempt.fell_back), (&from, fell_back));
    }
    let mut first = Running::start(job("train"));
    first.preempt();
    first.accept_again(Generation(2));
    assert!(
        first.hears(Report::Restored { from: None, fell_back: 0 }),
        "nothing was restored, and that is said"
    );
}

#[test]
fn what_was_restored_replaces_the_newest_checkpoint_only_where_that_was_damaged() {
    for (fell_back, newest) in [(0, 1), (1, 5)] {
        let mut world = Running::start(job("train"));
        world.report(Report::Committed { checkpoint: checkpoint(1) });
        world.preempt();
        world.accept_again(Generation(2));
        // Committed too, and never heard of.
        world.report(Report::Restored { from: Some(checkpoint(5)), fell_back });
        assert_eq!(
            world.c.task(TASK).unwrap().checkpoint,
            Some(checkpoint(newest)),
            "{fell_back} passed over"
        );
    }
}

#[test]
fn a_restored_checkpoint_is_the_one_that_its_own_attempt_committed() {
    for (generation, uploaded) in [(FIRST, 7), (Generation(2), 0)] {
        let mut world = Running::start(job("train"));
        world.report(Report::Committed { checkpoint: Checkpoint { bytes_uploaded: 7, ..checkpoint(1) } });
        world.preempt();
        world.accept_again(Generation(2));
        // A restore cannot tell how much of it was uploaded.
        let from = Some(Checkpoint { generation, bytes_uploaded: 0, ..checkpoint(1) });
        world.report(Report::Restored { from, fell_back: 0 });
        let resumed = world.c.task(TASK).unwrap().attempts[1].resumed.clone().unwrap();
        assert_eq!((resumed.generation, resumed.bytes_uploaded), (generation, uploaded));
    }
}

#[test]
fn a_notice_is_news_once_and_again_when_its_deadline_moves() {
    let mut world = Running::start(job("train"));
    let at = world.at;
    for (seconds, news) in [(30, true), (30, false), (60, true), (60, false)] {
        let deadline = at + Span::secs(seconds);
        assert_eq!(world.hears(Report::Noticed { deadline, source: "imds".into() }), news, "{seconds} s");
        assert_eq!(*world.phase(), Phase::Draining { node: NODE, deadline });
    }
}

#[test]
fn a_row_of_losses_ends_with_a_checkpoint_that_is_further() {
    let at = |sequence, step| Checkpoint { step, ..checkpoint(sequence) };
    let cases = [
        (Some(10), Some(11), 0),
        (Some(10), Some(10), 1),
        (Some(10), Some(9), 1),
        (Some(10), None, 0),
        (None, Some(1), 0),
    ];
    for (before, after, losses) in cases {
        let mut world = Running::start(job("train"));
        world.report(Report::Committed { checkpoint: at(1, before) });
        world.input(Input::LeaseExpired { node: world.node });
        world.accept_again(Generation(2));
        world.report(Report::Restored { from: Some(at(1, before)), fell_back: 0 });
        world.report(Report::Started);
        assert_eq!(world.c.task(TASK).unwrap().fruitless, 1);
        let checkpoint = Checkpoint { generation: Generation(2), ..at(2, after) };
        assert!(world.hears(Report::Committed { checkpoint }));
        assert_eq!(world.c.task(TASK).unwrap().fruitless, losses, "step {after:?} after {before:?}");
    }
}

#[test]
fn a_notice_that_is_withdrawn_takes_back_no_stop() {
    let mut world = Running::start(job("train"));
    world.input(Input::Requeue { job: JobId(1) });
    let deadline = world.at + Span::secs(30);
    world.report(Report::Noticed { deadline, source: "imds".into() });
    world.report(Report::NoticeWithdrawn);
    assert!(matches!(world.phase(), Phase::Draining { .. }), "{:?}", world.phase());
    assert_eq!((world.stop(), world.c.nodes[&NODE].notice.is_some()), (Some(StopWhy::Requeue), false));

    let mut ended = Running::start(job("train"));
    ended.report(Report::Noticed { deadline, source: "imds".into() });
    ended.report(Report::NoticeWithdrawn);
    ended.report(Report::Finished { exit: exit(1) });
    assert!(matches!(ended.phase(), Phase::Completing { .. }), "{:?}", ended.phase());
    ended.report(Report::Noticed { deadline, source: "imds".into() });
    ended.report(Report::NoticeWithdrawn);
    assert!(matches!(ended.phase(), Phase::Completing { .. }), "its command does not run again");
}

#[test]
fn a_node_goes_with_its_attempt_only_where_it_has_no_future() {
    type Told = fn(&mut Running);
    let cancel: Told = |world| world.input(Input::Cancel { job: JobId(1) });
    let notice: Told = |world| {
        let deadline = world.at + Span::secs(30);
        world.report(Report::Noticed { deadline, source: "imds".into() });
    };
    let expire: Told = |world| {
        world.later(LIFE);
        world.input(Input::Tick);
    };
    let cases = [
        ("its command runs", None, cancel, None),
        ("up, the grant on its way", Some(true), cancel, None),
        ("asked for", Some(false), cancel, Some(EndWhy::Unneeded)),
        ("noticed", None, notice, Some(EndWhy::Noticed)),
        ("too old", None, expire, Some(EndWhy::Expires)),
    ];
    for (what, placed_up, tell, why) in cases {
        let mut world = Running::start(job("train"));
        if let Some(up) = placed_up {
            world.preempt();
            world.node = world.place(Generation(2), up);
        }
        tell(&mut world);
        let exit = Exit { exit_code: None, signal: Some(15), signalled: true, ..exit(0) };
        world.report(Report::Finished { exit });
        assert_eq!(world.c.task(TASK).unwrap().under_way(), None, "{what}");
        let node = &world.c.nodes[&world.node];
        assert_eq!((node.ending, node.idle_since.is_some()), (why, true), "{what}");
    }
}

#[test]
fn a_worker_that_comes_back_keeps_what_it_still_holds_and_has_lost_the_rest() {
    let mut world = Running::start(job("train"));
    let joins = |world: &mut Running, held: &[(TaskId, Generation)]| {
        world.input(Input::WorkerJoined { node: world.node, held: held.to_vec() });
    };
    joins(&mut world, &[(TASK, FIRST)]);
    assert!(matches!(world.phase(), Phase::Running { .. }), "{:?}", world.phase());
    joins(&mut world, &[(TASK, Generation(0))]);
    assert_eq!(world.c.task(TASK).unwrap().fruitless, 1);
    // A grant that it has not accepted yet is sent again.
    world.node = world.place(Generation(2), true);
    joins(&mut world, &[]);
    assert!(matches!(world.phase(), Phase::Provisioning { .. }), "{:?}", world.phase());
}

/// INV-02: who asks is told whether it still acts for the task.
#[test]
fn only_the_node_of_the_attempt_under_way_may_act_for_it() {
    let mut world = Running::start(job("train"));
    let current = |world: &Running, node, generation| is_current(&world.c, node, TASK, generation);
    assert!(current(&world, NODE, FIRST));
    assert!(!current(&world, NodeId(2), FIRST) && !current(&world, NODE, Generation(0)));
    world.preempt();
    assert!(!current(&world, NODE, FIRST));
    world.run_again(Generation(2));
    assert!(current(&world, NodeId(2), Generation(2)) && !current(&world, NODE, FIRST));
}
