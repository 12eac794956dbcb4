//! Notices by the clouds' own protocols, and the drain that follows, with real workers and trainers.

#![expect(clippy::unwrap_used, reason = "a test says what went wrong by its panic")]

mod common;

use std::time::{Duration, SystemTime};

use common::metadata::{Metadata, events};
use common::{LIMIT, Scheduler, Worker, WorkerOptions, shell, trainer};
use spotq_model::{JobSpec, Profile, Span};
use spotq_proto::v1::{self, StopReason, report::What};
use spotq_testkit::wait_until;

struct Bed {
    dir: tempfile::TempDir,
    metadata: Metadata,
    scheduler: Scheduler,
    worker: Worker,
}

impl Bed {
    fn new(cloud: &str, more: &[&str]) -> Bed {
        let dir = tempfile::tempdir().unwrap();
        let (metadata, scheduler) = (Metadata::start(), Scheduler::start());
        let url = metadata.url();
        let mut args = vec!["--cloud", cloud, "--metadata", &url];
        args.extend(more);
        let options = WorkerOptions { args: &args, ..Default::default() };
        let worker = Worker::start(&scheduler, &dir.path().join("node"), &options);
        Bed { dir, metadata, scheduler, worker }
    }

    /// A job that runs and has said `ready` or `starting`.
    fn running(&self, spec: &JobSpec) -> v1::Grant {
        let grant = self.scheduler.grant(1, 1, spec, &self.dir.path().join("store"));
        self.scheduler.started(grant);
        let up = || ["ready", "starting"].iter().any(|word| self.scheduler.log(grant).contains(word));
        wait_until(LIMIT, up, "the trainer").unwrap();
        grant
    }

    fn noticed(&self, grant: v1::Grant) -> v1::Noticed {
        self.scheduler.wait_report(grant, "the notice", |what| match what {
            What::Noticed(noticed) => Some(noticed.clone()),
            _ => None,
        })
    }

    fn aws_notice(&self, ahead: Duration) {
        let at = jiff::Timestamp::try_from(SystemTime::now() + ahead).unwrap();
        let at = at.round(jiff::Unit::Second).unwrap();
        self.metadata.say(|says| says.aws = Some(format!("{{\"action\":\"terminate\",\"time\":\"{at}\"}}")));
    }
}

fn rfc1123(ahead: Duration) -> String {
    let at = jiff::Timestamp::try_from(SystemTime::now() + ahead).unwrap();
    at.strftime("%a, %d %b %Y %H:%M:%S GMT").to_string()
}

#[test]
fn a_notice_of_ec2_leads_to_a_save_that_is_committed_and_a_stop_long_before_the_deadline() {
    let bed = Bed::new("aws", &[]);
    let grant = bed.running(&trainer(&[]));
    bed.aws_notice(Duration::from_secs(120));
    let end = bed.scheduler.finished(grant);
    assert_eq!((end.stopped(), end.signalled), (StopReason::Notice, true));
    let committed = bed.scheduler.committed(grant);
    assert_eq!(committed.len(), 1);
    let noticed = bed.noticed(grant);
    assert_eq!(noticed.source, "aws:spot/instance-action");
    assert!(end.stopped_at_ms + 60_000 < noticed.deadline_ms, "long before");
    assert_eq!(bed.metadata.tokens(), 1, "one token serves many polls");
    bed.scheduler.wait_log(grant, "saved step");
}

#[test]
fn a_refused_token_is_replaced_and_the_notice_still_arrives() {
    let bed = Bed::new("aws", &[]);
    let grant = bed.running(&trainer(&[]));
    bed.metadata.revoke_tokens();
    bed.aws_notice(Duration::from_secs(60));
    assert_eq!(bed.scheduler.finished(grant).stopped(), StopReason::Notice);
    assert_eq!(bed.metadata.refused_tokens(), 1);
}

#[test]
fn the_flag_of_compute_engine_is_a_notice_without_waiting_for_a_poll() {
    let bed = Bed::new("gcp", &["--poll", "20s"]);
    let grant = bed.running(&trainer(&[]));
    wait_until(LIMIT, || bed.metadata.polls() >= 2, "the long poll").unwrap();
    bed.metadata.say(|says| says.gcp = "TRUE".into());
    let end = bed.scheduler.finished(grant);
    assert_eq!(end.stopped(), StopReason::Notice);
    assert_eq!(bed.noticed(grant).source, "gcp:instance/preempted");
    assert_eq!(bed.scheduler.committed(grant).len(), 1);
}

#[test]
fn an_event_of_azure_gets_consent_only_after_everything_is_saved() {
    let bed = Bed::new("azure", &[]);
    let grant = bed.running(&trainer(&[]));
    let document = events(&[("E-1", "Scheduled", &rfc1123(Duration::from_secs(30)))]);
    bed.metadata.say(|says| says.azure = document);
    let end = bed.scheduler.finished(grant);
    assert_eq!(end.stopped(), StopReason::Notice);
    assert_eq!(bed.scheduler.committed(grant).len(), 1);
    wait_until(LIMIT, || !bed.metadata.consents().is_empty(), "consent").unwrap();
    assert!(bed.metadata.consents()[0].contains("E-1"));
}

#[test]
fn a_withdrawn_notice_is_forgotten_and_training_goes_on() {
    let bed = Bed::new("azure", &[]);
    // Never saves by itself, so the drain waits.
    let mut spec = shell(
        "echo ready; while [ ! -e $SPOTQ_NOTICE_FILE ]; do sleep 0.02; done; echo seen; while [ -e $SPOTQ_NOTICE_FILE ]; do sleep 0.02; done; echo gone; exit 0",
    );
    spec.checkpoint.profile = Profile::Rename;
    let grant = bed.running(&spec);
    let document = events(&[("E-1", "Scheduled", &rfc1123(Duration::from_secs(60)))]);
    bed.metadata.say(|says| says.azure = document);
    bed.scheduler.wait_log(grant, "seen");
    bed.metadata.say(|says| says.azure = events(&[]));
    let end = bed.scheduler.finished(grant);
    assert_eq!((end.stopped(), end.signalled, end.exit_code), (StopReason::None, false, Some(0)));
    let kinds = bed.scheduler.reports(grant);
    assert!(kinds.iter().any(|r| matches!(r.what, Some(What::NoticeWithdrawn(_)))));
    assert!(bed.metadata.consents().is_empty());
}

#[test]
fn errors_garbage_and_other_machines_events_are_no_notice() {
    for cloud in ["aws", "gcp", "azure"] {
        let bed = Bed::new(cloud, &["--poll", "20ms"]);
        let grant = bed.running(&shell("echo ready; sleep 600"));
        let garbage = ["", "TRUEISH", "<html></html>", "{\"action\":1}", "{\"Events\":[{}]}", "\u{0}\u{1}"];
        for (status, body) in garbage.iter().map(|b| (200, *b)).chain([(500, "TRUE"), (403, "x"), (302, "y")])
        {
            let polls = bed.metadata.polls();
            bed.metadata.say(|says| says.broken = Some((status, body.to_owned())));
            wait_until(LIMIT, || bed.metadata.polls() > polls + 2, "polls").unwrap();
        }
        let reports = bed.scheduler.reports(grant);
        assert!(
            !reports.iter().any(|r| matches!(r.what, Some(What::Noticed(_) | What::Finished(_)))),
            "{reports:?}"
        );
        bed.metadata.say(|says| says.broken = None);
        // And a real notice after all that still counts.
        bed.aws_notice(Duration::from_secs(3));
        let document = events(&[("E-1", "Scheduled", &rfc1123(Duration::from_secs(3)))]);
        bed.metadata.say(|says| (says.gcp, says.azure) = ("TRUE".into(), document));
        bed.noticed(grant);
    }
}

#[test]
fn the_save_signal_goes_to_the_ranks_within_a_poll_and_fifty_milliseconds() {
    let bed = Bed::new("aws", &[]);
    // The launcher ends if it is signalled; the rank below it saves.
    let rank = "trap 'date +%s%3N > \"$SPOTQ_CHECKPOINT_DIR/.at.tmp\"; mv $SPOTQ_CHECKPOINT_DIR/.at.tmp $SPOTQ_CHECKPOINT_DIR/at; echo saved' USR1; echo ready; while true; do read -t 0.005 <> <(:); done";
    let mut spec = shell(&format!("bash -c '{}'; true", rank.replace('\'', "'\\''")));
    spec.checkpoint.signal = Some(spotq_model::Signal::Usr1);
    spec.checkpoint.profile = Profile::Rename;
    let grant = bed.running(&spec);
    let asked = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis() as u64;
    bed.aws_notice(Duration::from_secs(60));
    let end = bed.scheduler.finished(grant);
    assert_eq!(end.stopped(), StopReason::Notice);
    let committed = bed.scheduler.committed(grant);
    assert_eq!(committed.len(), 1);
    // A poll of a simulated cloud is 250 ms; the rest is for two cores that run other tests too.
    let took = committed[0].saved_at_ms.saturating_sub(asked);
    assert!(took < 250 + 50 + 700, "the signal took {took} ms");
}

#[test]
fn a_job_without_signal_is_stopped_in_time_and_what_it_saves_on_term_is_uploaded() {
    let bed = Bed::new("aws", &[]);
    let text = "D=$SPOTQ_CHECKPOINT_DIR; trap 'echo 7 > $D/.s.tmp; mv $D/.s.tmp $D/step-7; echo saved; exit 143' TERM; echo ready; while true; do sleep 0.02; done";
    let mut spec = shell(text);
    spec.checkpoint.profile = Profile::Rename;
    let grant = bed.running(&spec);
    bed.aws_notice(Duration::from_secs(4));
    let end = bed.scheduler.finished(grant);
    let noticed = bed.noticed(grant);
    assert_eq!((end.stopped(), end.exit_code, end.signalled), (StopReason::Notice, Some(143), true));
    assert!(end.stopped_at_ms <= noticed.deadline_ms, "before the deadline");
    assert_eq!(bed.scheduler.committed(grant).last().unwrap().step, Some(7));
}

#[test]
fn a_command_that_ends_by_itself_during_a_drain_has_ended_by_itself() {
    let bed = Bed::new("aws", &[]);
    let mut spec = shell(
        "echo ready; while [ ! -e $SPOTQ_NOTICE_FILE ]; do sleep 0.02; done; cat $SPOTQ_NOTICE_FILE; exit 0",
    );
    spec.checkpoint.profile = Profile::Rename;
    let grant = bed.running(&spec);
    bed.aws_notice(Duration::from_secs(60));
    let end = bed.scheduler.finished(grant);
    assert_eq!((end.exit_code, end.signalled), (Some(0), false));
    bed.scheduler.wait_log(grant, "\"source\":\"aws:spot/instance-action\"");
}

#[test]
fn a_trainer_that_dies_of_the_save_signal_is_known_to_have_been_signalled() {
    let bed = Bed::new("aws", &[]);
    let mut spec = shell("echo ready; while true; do sleep 0.02; done");
    spec.checkpoint.signal = Some(spotq_model::Signal::Usr1);
    spec.checkpoint.signal_target = spotq_model::SignalTarget::All;
    let grant = bed.running(&spec);
    bed.aws_notice(Duration::from_secs(60));
    let end = bed.scheduler.finished(grant);
    assert_eq!((end.signal, end.signalled, end.stopped()), (Some(10), true, StopReason::Notice));
}

#[test]
fn a_trainer_that_ignores_term_is_killed_before_the_deadline() {
    let bed = Bed::new("aws", &[]);
    let mut spec = shell("trap '' TERM; echo ready; while true; do sleep 0.02; done");
    spec.checkpoint.grace = Span::secs(60);
    let grant = bed.running(&spec);
    bed.aws_notice(Duration::from_secs(4));
    let end = bed.scheduler.finished(grant);
    let noticed = bed.noticed(grant);
    assert_eq!((end.signal, end.stopped()), (Some(9), StopReason::Notice));
    assert!(end.stopped_at_ms < noticed.deadline_ms);
    wait_until(LIMIT, || bed.worker.leftovers().is_empty(), "the end of all processes").unwrap();
}

#[test]
fn a_grant_on_a_noticed_node_does_not_start() {
    let bed = Bed::new("aws", &[]);
    let first = bed.running(&shell("echo ready; sleep 600"));
    bed.aws_notice(Duration::from_secs(300));
    bed.noticed(first);
    let second = bed.scheduler.grant(2, 1, &shell("echo must not run"), &bed.dir.path().join("other"));
    let end = bed.scheduler.finished(second);
    assert_eq!((end.stopped(), end.exit_code), (StopReason::Notice, None));
    assert!(!bed.scheduler.log(second).contains("must not run"));
}
