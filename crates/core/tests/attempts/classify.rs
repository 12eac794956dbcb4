//! How an attempt's end is classified, and what follows from it for the task.

use super::*;

#[test]
fn the_first_question_that_applies_decides() {
    let stops = [
        (StopWhy::Cancel, AttemptEnd::Cancelled),
        (StopWhy::TimeLimit, AttemptEnd::Timeout),
        (StopWhy::Budget, AttemptEnd::BudgetExhausted),
        (StopWhy::Requeue, AttemptEnd::Requeued),
        (StopWhy::NodeExpires, AttemptEnd::Requeued),
    ];
    let lost = || Loss::Lost { detail: "silent".into() };
    let everything_wrong = Exit { out_of_memory: true, launch_error: Some("no".into()), ..exit(9) };
    for (why, end) in stops {
        let told = attempt(Some(why), true);
        for loss in [Loss::None, Loss::Preempted, lost()] {
            assert_eq!(
                classify(&told, Some(&everything_wrong), &loss),
                end,
                "{why:?} before a notice and {loss:?}"
            );
            assert_eq!(classify(&told, None, &loss), end, "{why:?} before a notice and {loss:?}");
        }
    }
    for (noticed, loss) in
        [(true, Loss::None), (true, lost()), (true, Loss::Preempted), (false, Loss::Preempted)]
    {
        let end = classify(&attempt(None, noticed), Some(&everything_wrong), &loss);
        assert_eq!(end, AttemptEnd::Preempted { noticed }, "the market before memory: {noticed} {loss:?}");
    }
    let alone = attempt(None, false);
    assert_eq!(name(&classify(&alone, Some(&everything_wrong), &lost())), "node_lost");
    assert_eq!(classify(&alone, Some(&everything_wrong), &Loss::None), AttemptEnd::OutOfMemory);
    let not_started = Exit { out_of_memory: false, ..everything_wrong };
    let failed_launch = AttemptEnd::LaunchFailed { message: "no".into() };
    assert_eq!(classify(&alone, Some(&not_started), &Loss::None), failed_launch);
    assert_eq!(classify(&alone, Some(&exit(9)), &Loss::None), AttemptEnd::Failed { exit_code: 9 });
}

#[test]
fn exits_without_any_other_reason() {
    let signal = |number, signalled| Exit { exit_code: None, signal: Some(number), signalled, ..exit(0) };
    let cases = [
        (exit(0), "completed"),
        (exit(1), "failed"),
        (signal(11, false), "failed"),
        // Nobody of ours sent it: somebody outside ended the command, which is no fault of the job.
        (signal(9, false), "node_lost"),
        (signal(9, true), "failed"),
        (Exit { worker_leaving: true, ..exit(1) }, "node_lost"),
        (Exit { exit_code: None, ..exit(0) }, "node_lost"),
    ];
    for (exit, end) in cases {
        assert_eq!(name(&classify(&attempt(None, false), Some(&exit), &Loss::None)), end, "{exit:?}");
    }
    let segfault = classify(&attempt(None, false), Some(&signal(11, false)), &Loss::None);
    assert_eq!(segfault, AttemptEnd::Failed { exit_code: 139 }, "as shells say it");
    assert_eq!(name(&classify(&attempt(None, false), None, &Loss::None)), "node_lost");
}

#[test]
fn exit_code_0_counts_only_if_nobody_asked_the_command_to_stop() {
    let signalled = Exit { signalled: true, ..exit(0) };
    for noticed in [false, true] {
        for stop in [None, Some(StopWhy::Cancel), Some(StopWhy::TimeLimit)] {
            let end = classify(&attempt(stop, noticed), Some(&exit(0)), &Loss::None);
            assert_eq!(end, AttemptEnd::Completed, "it was done before it was told: {stop:?} {noticed}");
        }
    }
    // The trainer saved and left because of the notice: its work is not done.
    let end = classify(&attempt(None, true), Some(&signalled), &Loss::None);
    assert_eq!(end, AttemptEnd::Preempted { noticed: true });
    let cancelled = classify(&attempt(Some(StopWhy::Cancel), false), Some(&signalled), &Loss::None);
    assert_eq!(cancelled, AttemptEnd::Cancelled);
}

#[test]
fn a_bad_exit_whose_node_goes_within_the_settle_time_is_a_preemption() {
    let mut world = Running::start(job("train"));
    world.report(Report::Finished { exit: exit(1) });
    assert!(matches!(world.phase(), Phase::Completing { .. }), "{:?}", world.phase());
    world.later(Span::secs(1));
    world.input(Input::InstanceGone {
        instance: InstanceId("i".into()),
        cause: GoneCause::Preempted,
        at: world.at,
    });
    assert!(matches!(world.phase(), Phase::Pending { .. }), "{:?}", world.phase());
    let task = world.c.task(TASK).unwrap();
    assert_eq!(task.attempts[0].end, Some(AttemptEnd::Preempted { noticed: false }));
    assert_eq!((task.preemptions, task.failures), (1, 0), "the budgets are separate");
}

#[test]
fn a_bad_exit_whose_node_stays_is_a_failure_after_the_settle_time() {
    let mut world = Running::start(job("train"));
    world.report(Report::Finished { exit: exit(3) });
    world.later(Policies::default().settle.saturating_sub(Span(1)));
    world.input(Input::Tick);
    assert!(matches!(world.phase(), Phase::Completing { .. }), "too early: {:?}", world.phase());
    world.later(Span(1));
    world.input(Input::Tick);
    assert_eq!(*world.phase(), Phase::Done { outcome: Outcome::Failed { exit_code: 3 } });
}

#[test]
fn failures_pause_longer_each_time_and_only_listed_codes_are_tried_again() {
    let retry = Retry { failures: 2, exit_codes: vec![3], ..Retry::default() };
    let mut world = Running::start(JobSpec { retry: retry.clone(), ..job("train") });
    for (failures, pause) in [(1, Span::secs(1)), (2, Span::secs(2))] {
        world.fail(3);
        let next_try = world.at + pause;
        assert_eq!(*world.phase(), Phase::Pending { reason: WaitReason::BackOff { failures }, next_try });
        world.run_again(Generation(u64::from(failures) + 1));
    }
    world.fail(3);
    assert_eq!(
        *world.phase(),
        Phase::Done { outcome: Outcome::Failed { exit_code: 3 } },
        "the third is too many"
    );
    let mut world = Running::start(JobSpec { retry, ..job("train") });
    world.fail(4);
    assert_eq!(*world.phase(), Phase::Done { outcome: Outcome::Failed { exit_code: 4 } }, "not in the list");
}

#[test]
fn the_preemption_budget_counts_preemptions_alone() {
    let retry = Retry { preemptions: Some(1), ..Retry::default() };
    let mut world = Running::start(JobSpec { retry, ..job("train") });
    world.preempt();
    assert!(matches!(world.phase(), Phase::Pending { .. }), "{:?}", world.phase());
    world.run_again(Generation(2));
    world.preempt();
    assert_eq!(*world.phase(), Phase::Done { outcome: Outcome::PreemptionBudgetSpent });
}

#[test]
fn a_spot_pool_that_took_a_node_back_is_left_alone_for_a_while() {
    let mut world = Running::start(job("train"));
    world.preempt();
    let pool = &world.c.nodes[&NODE].pool;
    let until = world.at + Policies::default().preempted_cool_down;
    assert_eq!(world.c.cool_down(pool, world.at).map(|rest| rest.until), Some(until));
    assert_eq!(world.c.cool_down(pool, until), None);
}

#[test]
fn losses_without_progress_end_and_a_refused_launch_is_no_loss() {
    let mut world = Running::start(job("train"));
    let most = u64::from(Policies::default().fruitless_losses_max);
    for loss in 1..=most {
        world.input(Input::LeaseExpired { node: world.node });
        // The first loss is tried again at once, the others after longer and longer pauses.
        let failures = u32::try_from(loss - 1).unwrap();
        let expected = match failures {
            0 => (WaitReason::Queued, world.at),
            _ => (WaitReason::BackOff { failures }, world.at + Span::secs(1 << (failures - 1))),
        };
        let Phase::Pending { reason, next_try } = world.phase() else { panic!("{:?}", world.phase()) };
        assert_eq!((reason.clone(), *next_try), expected, "loss {loss}");
        if loss < most {
            world.run_again(Generation(loss + 1));
        }
    }
    let node = world.place(Generation(most + 1), false);
    world.later(Policies::default().launch_timeout + Span(1));
    world.input(Input::Tick);
    assert!(world.c.nodes[&node].refused.is_some());
    assert!(
        matches!(world.phase(), Phase::Pending { reason: WaitReason::Queued, .. }),
        "{:?}",
        world.phase()
    );
    world.run_again(Generation(most + 2));
    world.input(Input::LeaseExpired { node: world.node });
    assert_eq!(*world.phase(), Phase::Done { outcome: Outcome::NodeFailure });
}

#[test]
fn a_cancel_overrides_any_other_stop_and_nothing_overrides_a_cancel() {
    let mut world = Running::start(job("train"));
    world.input(Input::Requeue { job: JobId(1) });
    world.input(Input::Cancel { job: JobId(1) });
    assert_eq!(world.stop(), Some(StopWhy::Cancel));
    world.input(Input::Requeue { job: JobId(1) });
    assert_eq!(world.stop(), Some(StopWhy::Cancel));
    world.report(Report::Finished {
        exit: Exit { exit_code: None, signal: Some(15), signalled: true, ..exit(0) },
    });
    assert_eq!(*world.phase(), Phase::Done { outcome: Outcome::Cancelled });
}

#[test]
fn a_node_that_overstays_its_notice_or_its_stop_is_given_up() {
    let policies = Policies::default();
    let mut noticed = Running::start(job("train"));
    let deadline = noticed.at + Span::secs(30);
    noticed.report(Report::Noticed { deadline, source: "imds".into() });
    assert_eq!(*noticed.phase(), Phase::Draining { node: NODE, deadline });
    noticed.at = deadline + policies.drain_grace;
    noticed.input(Input::Tick);
    assert!(matches!(noticed.phase(), Phase::Draining { .. }), "it has its grace");
    noticed.later(Span(1));
    noticed.input(Input::Tick);
    assert_eq!(noticed.c.task(TASK).unwrap().attempts[0].end, Some(AttemptEnd::Preempted { noticed: true }));

    let mut told = Running::start(job("train"));
    told.input(Input::Requeue { job: JobId(1) });
    told.later(Span::secs(10) + policies.drain_grace + policies.lease_ttl);
    told.input(Input::Tick);
    assert!(matches!(told.phase(), Phase::Draining { .. }), "it has its grace");
    told.later(Span(1));
    told.input(Input::Tick);
    assert!(matches!(told.phase(), Phase::Pending { .. }), "{:?}", told.phase());
    assert_eq!(told.c.nodes[&NODE].state.name(), "ending");
}

#[test]
fn a_fence_of_a_newer_generation_raises_the_next_one_above_it() {
    let mut world = Running::start(job("train"));
    world.report(Report::Superseded { by: Generation(7) });
    assert_eq!(world.c.task(TASK).unwrap().next_generation(), Generation(8));
    let offers = vec![offer("gcp/us-central1/us-central1-a/l4/spot", "0.2").build()];
    world.input(Input::Plan { offers });
    assert_eq!(world.c.task(TASK).unwrap().generation, Generation(8));
}

#[test]
fn only_a_damaged_checkpoint_may_be_passed_over_and_it_is_not_asked_for_again() {
    let mut world = Running::start(job("train"));
    let (old, new) = (checkpoint(1), checkpoint(2));
    world.report(Report::Committed { checkpoint: old.clone() });
    world.report(Report::Committed { checkpoint: new });
    world.preempt();
    world.accept_again(Generation(2));
    world.report(Report::Restored { from: Some(old.clone()), fell_back: 0 });
    let ended = world.c.task(TASK).unwrap().attempts[1].end.clone().unwrap();
    assert_eq!(name(&ended), "node_lost", "INV-06: the newer one was not damaged");
    world.accept_again(Generation(3));
    world.report(Report::Restored { from: Some(old.clone()), fell_back: 1 });
    world.report(Report::Started);
    assert!(matches!(world.phase(), Phase::Running { .. }), "{:?}", world.phase());
    world.preempt();
    world.accept_again(Generation(4));
    world.report(Report::Restored { from: Some(old), fell_back: 0 });
    world.report(Report::Started);
    assert!(
        matches!(world.phase(), Phase::Running { .. }),
        "the damaged one is out of the way: {:?}",
        world.phase()
    );
    assert_eq!(spotq_core::invariants::check(&world.c), []);
}

/// An attempt as it is when its end is classified.
fn attempt(stop: Option<StopWhy>, noticed: bool) -> Attempt {
    let world = Running::start(job("train"));
    let mut attempt = world.c.task(TASK).unwrap().attempts[0].clone();
    let at = world.at;
    attempt.stop = stop.map(|why| Stop { why, asked_at: at, deadline: at });
    attempt.noticed_at = noticed.then_some(at);
    attempt
}

fn name(end: &AttemptEnd) -> &'static str {
    end.name()
}
