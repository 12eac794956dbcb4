//! Every (phase, input) pair against a reviewed table, the rules of the drain one by one, and properties over random
//! histories.

use super::*;
use proptest::prelude::*;

const START: Timestamp = Timestamp(1_000_000);
const PHASES: [Phase; 9] = [
    Phase::Restoring,
    Phase::Preparing,
    Phase::Starting,
    Phase::Running,
    Phase::Draining,
    Phase::Terminating,
    Phase::Sweeping,
    Phase::Finishing,
    Phase::Done,
];

fn rules(signal: Option<Signal>, setup: bool) -> Rules {
    Rules { signal, grace: Span::secs(10), setup }
}

fn end(code: Option<i32>, signal: Option<i32>) -> End {
    End { code, signal, out_of_memory: false, at: START }
}

fn notice(seconds: u64) -> Input {
    Input::Notice { deadline: START + Span::secs(seconds), source: "test".into() }
}

fn stop(reason: Stop) -> Input {
    Input::Stop { reason, deadline: None }
}

/// A machine that went straight to `phase`.
fn at(phase: Phase, rules: Rules) -> Machine {
    let (mut machine, _) = Machine::start(Rules { setup: phase == Phase::Preparing, ..rules });
    let way: Vec<Input> = match phase {
        Phase::Restoring => vec![],
        Phase::Preparing | Phase::Starting => vec![Input::Restored],
        Phase::Running => vec![Input::Restored, Input::Spawned { pid: 7 }],
        Phase::Draining => vec![Input::Restored, Input::Spawned { pid: 7 }, notice(120)],
        Phase::Terminating => vec![Input::Restored, Input::Spawned { pid: 7 }, stop(Stop::Cancel)],
        Phase::Sweeping => {
            vec![Input::Restored, Input::Spawned { pid: 7 }, Input::Exited(end(Some(0), None))]
        }
        Phase::Finishing => vec![
            Input::Restored,
            Input::Spawned { pid: 7 },
            Input::Exited(end(Some(0), None)),
            Input::TreeGone { leftover: None },
        ],
        Phase::Done => vec![Input::RestoreFailed { message: "x".into(), blame: Blame::Job }],
    };
    for input in way {
        machine.step(START, input);
    }
    assert_eq!(machine.phase(), phase);
    machine
}

fn inputs() -> Vec<(&'static str, Input)> {
    vec![
        ("restored", Input::Restored),
        ("restore-failed", Input::RestoreFailed { message: "x".into(), blame: Blame::Job }),
        ("spawned", Input::Spawned { pid: 7 }),
        ("spawn-failed", Input::SpawnFailed { message: "x".into() }),
        ("exit-0", Input::Exited(end(Some(0), None))),
        ("exit-1", Input::Exited(end(Some(1), None))),
        ("killed", Input::Exited(end(None, Some(9)))),
        ("notice", notice(60)),
        ("notice-short", notice(0)),
        ("withdrawn", Input::NoticeWithdrawn),
        ("cancel", stop(Stop::Cancel)),
        ("time-limit", stop(Stop::TimeLimit)),
        ("budget", stop(Stop::Budget)),
        ("requeue", stop(Stop::Requeue)),
        ("superseded", stop(Stop::Superseded)),
        ("leaving", stop(Stop::WorkerLeaving)),
        ("fenced", Input::Fenced { by: 9 }),
        ("saved", Input::Saved { at: START }),
        ("pushed-new", Input::Pushed(Pushed::Held { saved_at: START })),
        ("pushed-old", Input::Pushed(Pushed::Held { saved_at: Timestamp(5) })),
        ("push-failed", Input::Pushed(Pushed::Failed)),
        ("push-superseded", Input::Pushed(Pushed::Superseded { by: 9 })),
        ("tree-empty", Input::TreeEmpty),
        ("tree-gone", Input::TreeGone { leftover: None }),
        ("final-done", Input::FinalDone { problem: None }),
        ("final-failed", Input::FinalFailed { problem: "away".into() }),
        ("final-lost", Input::FinalDone { problem: Some("refused".into()) }),
        ("estimate", Input::UploadEstimate(Span::secs(1))),
        ("tick", Input::Tick),
    ]
}

fn name(action: &Action) -> String {
    match action {
        Action::Report(News::Finished(finish)) => format!(
            "Finished[{}{}{}{}]",
            finish.stopped.map_or("none", Stop::name),
            if finish.signalled { " signalled" } else { "" },
            if finish.launch_error.is_some() { " launch-error" } else { "" },
            if finish.unstored.is_some() { " unstored" } else { "" }
        ),
        Action::Report(news) => format!("{news:?}").split([' ', '{']).next().unwrap_or_default().to_owned(),
        Action::WriteNotice { .. } => "WriteNotice".to_owned(),
        other => format!("{other:?}"),
    }
}

/// One line per pair: what it leads to.
fn table() -> String {
    let mut out = String::new();
    for phase in PHASES {
        for (label, input) in inputs() {
            let mut machine = at(phase, rules(Some(Signal::Usr1), false));
            let actions: Vec<String> = machine.step(START, input).iter().map(name).collect();
            let line = format!("{phase:?} {label} -> {:?} {}", machine.phase(), actions.join(" "));
            out.push_str(line.trim_end());
            out.push('\n');
        }
    }
    out
}

#[test]
fn every_pair_of_phase_and_input_does_what_the_reviewed_table_says() {
    let table = table();
    let reviewed = include_str!("table.txt");
    for (is, should) in table.lines().zip(reviewed.lines()) {
        assert_eq!(is, should);
    }
    assert_eq!(
        table,
        reviewed,
        "the table has lines for {} phases and {} inputs",
        PHASES.len(),
        inputs().len()
    );
}

#[test]
fn a_stop_after_the_commands_own_end_is_not_why_it_ended() {
    for reason in [stop(Stop::Cancel), notice(60), stop(Stop::WorkerLeaving)] {
        let mut machine = at(Phase::Sweeping, rules(None, false));
        machine.step(START, reason);
        let finish = run_down(&mut machine, START);
        assert_eq!((finish.stopped, finish.signalled), (None, false));
    }
}

#[test]
fn a_store_that_is_away_costs_the_attempt_and_not_the_job() {
    let mut machine = at(Phase::Restoring, rules(None, false));
    let away = Input::RestoreFailed { message: "the store is away".into(), blame: Blame::Surroundings };
    let actions = machine.step(START, away);
    let Some(Action::Report(News::Finished(finish))) = actions.last() else { panic!("{actions:?}") };
    assert_eq!(finish.launch_error, None);
    assert_eq!(finish.detail.as_deref(), Some("the store is away"));
}

#[test]
fn a_drain_ends_with_the_first_checkpoint_that_was_saved_after_the_notice() {
    let mut machine = at(Phase::Draining, rules(Some(Signal::Usr1), false));
    let before = Input::Pushed(Pushed::Held { saved_at: START - Span::secs(1) });
    assert_eq!(machine.step(START, before), vec![]);
    assert_eq!(machine.step(START, Input::Saved { at: START }), vec![Action::Push]);
    let after = Input::Pushed(Pushed::Held { saved_at: START + Span(100) });
    assert_eq!(machine.step(START, after), vec![Action::SendTerm]);
}

#[test]
fn without_a_save_the_stop_leaves_time_for_the_upload_and_a_second_to_spare() {
    let mut machine = at(Phase::Draining, rules(None, false));
    machine.step(START, Input::UploadEstimate(Span::secs(20)));
    let deadline = START + Span::secs(120);
    let grace = Span::secs(10);
    assert_eq!(machine.wake_at(), Some(deadline - Span::secs(20) - UPLOAD_MARGIN - grace));
    let stop_at = machine.wake_at().unwrap();
    assert_eq!(machine.step(stop_at - Span(1), Input::Tick), vec![]);
    assert_eq!(machine.step(stop_at, Input::Tick), vec![Action::SendTerm]);
    assert_eq!(machine.wake_at(), Some(stop_at + grace), "the job's grace");
}

#[test]
fn a_short_notice_signals_at_once_and_kills_no_later_than_half_a_second_after_the_stop() {
    let mut machine = at(Phase::Running, rules(Some(Signal::Usr1), false));
    let actions: Vec<String> = machine.step(START, notice(0)).iter().map(name).collect();
    assert_eq!(actions, ["Noticed", "WriteNotice", "SendSave", "SendTerm"]);
    assert_eq!(machine.wake_at(), Some(START + GRACE_MIN));
}

#[test]
fn an_own_stop_gives_all_of_its_time_to_the_save_and_the_grace_follows() {
    let mut machine = at(Phase::Running, rules(Some(Signal::Usr1), false));
    machine.step(START, stop(Stop::Budget));
    assert_eq!(machine.wake_at(), Some(START + Span::secs(10)));
    machine.step(START + Span::secs(10), Input::Tick);
    assert_eq!(machine.wake_at(), Some(START + Span::secs(20)));
}

#[test]
fn the_stronger_reason_is_reported_and_the_nearer_deadline_counts() {
    let mut machine = at(Phase::Draining, rules(None, false));
    machine.step(START, Input::Stop { reason: Stop::WorkerLeaving, deadline: Some(START + Span::secs(5)) });
    assert!(machine.wake_at().unwrap() < START + Span::secs(5));
    let actions = machine.step(START, stop(Stop::Cancel));
    assert_eq!(actions, vec![Action::SendTerm]);
    let finish = run_down(&mut machine, START);
    assert_eq!(finish.stopped, Some(Stop::Cancel));
}

#[test]
fn signals_that_may_have_ended_the_command_are_told_apart_from_its_own_end() {
    let ended = |signal, input: Input| {
        let mut machine = at(Phase::Draining, rules(signal, false));
        machine.step(START, input);
        run_down(&mut machine, START).signalled
    };
    assert!(!ended(None, Input::Exited(end(Some(0), None))));
    assert!(!ended(None, Input::Exited(end(Some(1), None))));
    assert!(!ended(Some(Signal::Usr1), Input::Exited(end(Some(0), None))));
    assert!(ended(Some(Signal::Usr1), Input::Exited(end(None, Some(10)))));
    assert!(ended(Some(Signal::Term), Input::Exited(end(Some(0), None))));
}

#[test]
fn saves_that_come_during_an_upload_are_taken_by_one_more() {
    let mut machine = at(Phase::Running, rules(None, false));
    assert_eq!(machine.step(START, Input::Saved { at: START }), vec![Action::Push]);
    assert_eq!(machine.step(START, Input::Saved { at: START }), vec![]);
    assert_eq!(machine.step(START, Input::Saved { at: START }), vec![]);
    assert_eq!(machine.step(START, Input::Pushed(Pushed::Failed)), vec![Action::Push]);
    assert_eq!(machine.step(START, Input::Pushed(Pushed::Failed)), vec![]);
}

/// The end of a machine that finishes, after this history and the time that it then still has.
fn finish_after(code: i32, history: Vec<Input>) -> (Timestamp, Finish) {
    let mut machine = at(Phase::Finishing, rules(None, false));
    machine.end = Some(end(Some(code), None));
    for input in history {
        machine.step(START, input);
    }
    let until = machine.wake_at().unwrap();
    assert_eq!(machine.step(until - Span(1), Input::Tick), vec![]);
    match machine.step(until, Input::Tick).pop() {
        Some(Action::Report(News::Finished(finish))) => (until, finish),
        other => panic!("{other:?}"),
    }
}

#[test]
fn uploads_that_fail_are_waited_for_until_somebody_needs_the_node() {
    let away = Input::FinalFailed { problem: "away".into() };
    let until = |history: Vec<Input>| finish_after(0, history).0;
    assert_eq!(until(vec![away.clone()]), START + FINISH_LIMIT);
    assert_eq!(until(vec![away.clone(), notice(60)]), START + Span::secs(60) - GRACE_MIN);
    assert_eq!(until(vec![away.clone(), notice(0)]), START + RESERVE);
    assert_eq!(until(vec![away.clone(), notice(60), Input::NoticeWithdrawn]), START + FINISH_LIMIT);
    let soon = Input::Stop { reason: Stop::Cancel, deadline: Some(START + Span::secs(5)) };
    assert_eq!(until(vec![away.clone(), soon.clone()]), START + Span::secs(5));
    assert_eq!(until(vec![soon, away.clone(), stop(Stop::WorkerLeaving)]), START + Span::secs(5));
    assert_eq!(until(vec![away.clone(), stop(Stop::Cancel)]), START + Span::secs(10), "the job's grace");
    let mut machine = at(Phase::Finishing, rules(None, false));
    machine.step(START, notice(0));
    machine.step(START + Span(500), away.clone());
    assert_eq!(machine.wake_at(), Some(START + RESERVE), "a failure wins no time");
    let uploading = until(vec![stop(Stop::Cancel)]);
    assert_eq!(uploading, START + FINISH_LIMIT_STOPPED, "an upload that has not failed is let end");
    let mut sweeping = at(Phase::Sweeping, rules(None, false));
    for input in [stop(Stop::Cancel), Input::TreeGone { leftover: None }, away] {
        sweeping.step(START, input);
    }
    assert_eq!(sweeping.wake_at(), Some(START + Span::secs(10)), "stopped between the end and the uploads");
}

#[test]
fn a_stopped_command_gives_its_uploads_a_minute() {
    let mut machine = at(Phase::Terminating, rules(None, false));
    machine.step(START, Input::Exited(end(Some(143), None)));
    machine.step(START, Input::TreeEmpty);
    machine.step(START, Input::TreeGone { leftover: None });
    assert_eq!(machine.wake_at(), Some(START + FINISH_LIMIT_STOPPED));
}

#[test]
fn a_success_without_its_results_is_lost_and_a_failure_stays_a_failure() {
    let away = Input::FinalFailed { problem: "away".into() };
    let (_, finish) = finish_after(0, vec![away.clone()]);
    let ended = finish.end.unwrap();
    assert_eq!((ended.code, ended.signal, finish.launch_error, finish.stopped), (None, None, None, None));
    let detail = finish.detail.unwrap();
    assert!(detail.contains("exit code 0") && detail.contains("away"), "{detail}");
    let (_, finish) = finish_after(0, vec![]);
    assert_eq!(finish.end.unwrap().code, None, "an upload without an end is none");
    let (_, finish) = finish_after(3, vec![away.clone()]);
    assert_eq!(finish.end.unwrap().code, Some(3));
    let mut machine = at(Phase::Finishing, rules(None, false));
    machine.step(START, away);
    match machine.step(START, Input::FinalDone { problem: None }).pop() {
        Some(Action::Report(News::Finished(finish))) => {
            assert_eq!((finish.end.unwrap().code, finish.detail), (Some(0), None));
        }
        other => panic!("{other:?}"),
    }
}

/// Lets everything answer at once and time pass, until the end is reported.
fn run_down(machine: &mut Machine, start: Timestamp) -> Finish {
    let mut now = start;
    let mut todo = std::collections::VecDeque::new();
    for _ in 0..1000 {
        let input = todo.pop_front().unwrap_or_else(|| {
            now = machine.wake_at().unwrap_or(now).max(now);
            match machine.phase() {
                // What was asked for before this began is answered too.
                Phase::Restoring => Input::Restored,
                Phase::Starting => Input::Spawned { pid: 7 },
                Phase::Preparing | Phase::Running => Input::Exited(end(Some(0), None)),
                Phase::Sweeping if machine.end.is_none() => Input::Exited(end(None, Some(9))),
                Phase::Sweeping => Input::TreeGone { leftover: None },
                Phase::Finishing => Input::FinalDone { problem: None },
                Phase::Draining | Phase::Terminating | Phase::Done => Input::Tick,
            }
        });
        for action in machine.step(now, input) {
            match action {
                Action::Report(News::Finished(finish)) => return finish,
                Action::KillTree => {
                    todo.extend([Input::Exited(end(None, Some(9))), Input::TreeGone { leftover: None }]);
                }
                Action::Push => todo.push_back(Input::Pushed(Pushed::Failed)),
                _ => {}
            }
        }
    }
    panic!("never ended: {machine:?}");
}

fn any_input() -> impl Strategy<Value = Input> {
    let all: Vec<Input> = inputs().into_iter().map(|(_, input)| input).collect();
    prop_oneof![
        4 => proptest::sample::select(all),
        1 => (0_u64..200).prop_map(notice),
        1 => (0_u64..100_000).prop_map(|ms| Input::Saved { at: START + Span(ms) }),
        1 => (0_u64..100_000).prop_map(|ms| Input::Pushed(Pushed::Held { saved_at: START + Span(ms) })),
    ]
}

fn any_rules() -> impl Strategy<Value = Rules> {
    let signal = proptest::sample::select(vec![None, Some(Signal::Usr1), Some(Signal::Term)]);
    (signal, any::<bool>()).prop_map(|(signal, setup)| rules(signal, setup))
}

proptest! {
    #[test]
    fn whatever_happens_the_end_is_told_once_and_last_and_nothing_is_done_for_a_superseded_attempt(
        rules in any_rules(),
        history in proptest::collection::vec((any_input(), 0_u64..5000), 0..40),
    ) {
        let (mut machine, mut actions) = Machine::start(rules);
        let mut now = START;
        let mut superseded_after = None;
        for (input, ms) in history {
            now = now + Span(ms);
            actions.extend(machine.step(now, input));
            if machine.stopped == Some(Stop::Superseded) && superseded_after.is_none() {
                superseded_after = Some(actions.len());
            }
        }
        let ended = actions.iter().any(|a| matches!(a, Action::Report(News::Finished(_))));
        prop_assert_eq!(ended, machine.phase() == Phase::Done);
        if !ended {
            let finish = run_down(&mut machine, now);
            prop_assert_eq!(finish.stopped, machine.stopped);
        }
        prop_assert!(machine.step(now, Input::Tick).is_empty());
        let count = |wanted: fn(&Action) -> bool| actions.iter().filter(|a| wanted(a)).count();
        prop_assert!(count(|a| matches!(a, Action::Report(News::Finished(_)))) <= 1);
        prop_assert!(count(|a| matches!(a, Action::SpawnCommand)) <= 1);
        prop_assert!(count(|a| matches!(a, Action::SpawnSetup)) <= 1);
        prop_assert!(count(|a| matches!(a, Action::FinalPush)) <= 1);
        prop_assert!(count(|a| matches!(a, Action::KillTree)) <= 1);
        if let Some(from) = superseded_after {
            let saves = |a: &Action| matches!(a, Action::Push | Action::FinalPush | Action::SpawnCommand);
            prop_assert!(!actions[from..].iter().any(saves));
        }
        if let Some(last) = actions.iter().position(|a| matches!(a, Action::Report(News::Finished(_)))) {
            prop_assert_eq!(last + 1, actions.len());
        }
    }

    #[test]
    fn a_noticed_command_is_gone_a_second_before_its_deadline_if_there_is_time(
        rules in any_rules(),
        seconds in 4_u64..200,
        history in proptest::collection::vec((0_u64..1000).prop_map(|ms| START + Span(ms)), 0..5),
    ) {
        let mut machine = at(Phase::Running, rules);
        machine.step(START, notice(seconds));
        for at in history {
            machine.step(at, Input::Saved { at: START - Span::secs(9) });
        }
        let mut now = START;
        while machine.phase() != Phase::Sweeping {
            now = machine.wake_at().unwrap();
            machine.step(now, Input::Tick);
        }
        prop_assert!(now + RESERVE <= START + Span::secs(seconds), "killed at {now:?}");
    }
}
