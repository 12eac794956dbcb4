//! Each subcommand: asks the scheduler, and hands the answer to the views.

use std::path::Path;
use std::process::ExitCode;

use clap::CommandFactory as _;
use spotq_model::{Span, TaskId};
use spotq_proto::v1;
use tonic::Response;

use crate::args::{
    Cli, Command, Global, LogsArgs, OffersArgs, PreemptArgs, QueueArgs, ReportArgs, SubmitArgs,
};
use crate::client::{Client, job_request};
use crate::config::{self, Surroundings};
use crate::error::ExpectedError;
use crate::out::{Format, Out, plain};
use crate::submit::{self, Around, Understood};
use crate::{follow, json, pull, report, views, words};

/// Runs a command and gives the exit code of the process.
pub fn run(command: Command, global: &Global, out: &Out) -> Result<ExitCode, ExpectedError> {
    match command {
        Command::Demo(args) => crate::demo::run(&args, out),
        Command::Train(args) => train(args),
        Command::Completions { shell } => completions(shell),
        Command::Man { dir } => man(&dir, out),
        Command::Login(args) => block_on(crate::login::login(&args, global.server.as_deref(), out)),
        Command::Context(command) => crate::login::context(&command, out),
        Command::Submit(args) => submit_or_run(&args, global, out, Then::Return),
        Command::Run(args) => submit_or_run(&args, global, out, Then::Follow),
        other => {
            let target = config::target(global.server.as_deref(), &Surroundings::of_process())?;
            block_on(async {
                let client = Client::connect_as(&target).await?;
                ask(&client, other, out).await.map(ExitCode::from)
            })
        }
    }
}

/// What comes after a submit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    Return,
    Follow,
}

/// What is asked of several jobs alike.
#[derive(Debug, Clone, Copy)]
enum Order {
    Cancel,
    Hold,
    Release,
    Requeue,
}

/// One thread is enough for a program that waits; it starts only for commands that ask a scheduler.
fn block_on<T>(work: impl Future<Output = Result<T, ExpectedError>>) -> Result<T, ExpectedError> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| ExpectedError::Internal(format!("cannot start: {}", e.to_string().to_lowercase())))?
        .block_on(work)
}

/// The commands that ask a scheduler something.
async fn ask(client: &Client, command: Command, out: &Out) -> Result<u8, ExpectedError> {
    match command {
        Command::Queue(args) => queue(client, &args, out).await?,
        Command::Show(arg) => {
            let view = client.get(arg.job).await?;
            match out.format {
                Format::Json => out.json(&json::Job::from(&view))?,
                Format::Csv => out.grid(&views::attempts(&view.attempts, words::now()), || ())?,
                Format::Table | Format::Wide => out.data(&views::show(&view, words::now(), out))?,
            }
        }
        Command::Explain(arg) => explain(client, arg.job, out).await?,
        Command::Logs(args) => logs(client, &args, out).await?,
        Command::Cancel(arg) => return order(client, Order::Cancel, &arg.jobs, out).await,
        Command::Hold(arg) => return order(client, Order::Hold, &arg.jobs, out).await,
        Command::Release(arg) => return order(client, Order::Release, &arg.jobs, out).await,
        Command::Requeue(arg) => return order(client, Order::Requeue, &arg.jobs, out).await,
        Command::Wait(arg) => return follow::wait(client, &arg.jobs, out).await,
        Command::Preempt(args) => preempt(client, &args, out).await?,
        Command::Offers(args) => offers(client, &args, out).await?,
        Command::Report(args) => reports(client, &args, out).await?,
        Command::Pull(args) => pull::pull(client, &args, out).await?,
        Command::Info => {
            let reply = answer(
                client,
                "ask the scheduler about itself",
                client.admin().info(v1::InfoRequest {}).await,
            )?;
            match out.format {
                Format::Table | Format::Wide => {
                    out.data(&views::info(&client.server, &reply, words::now()))?;
                }
                Format::Json | Format::Csv => out.json(&json::Info::new(&client.server, &reply))?,
            }
        }
        Command::Nodes(args) => {
            let request = v1::NodesRequest { include_gone: args.all };
            let reply = answer(client, "list the nodes", client.admin().nodes(request).await)?;
            let grid = views::nodes(&reply.nodes, words::now());
            out.grid(&grid, || reply.nodes.iter().map(json::Node::from).collect::<Vec<_>>())?;
            if grid.is_empty() {
                out.say("no node costs anything at present");
            }
        }
        Command::Demo(_)
        | Command::Login(_)
        | Command::Context(_)
        | Command::Train(_)
        | Command::Completions { .. }
        | Command::Man { .. }
        | Command::Submit(_)
        | Command::Run(_) => {
            return Err(ExpectedError::Internal(
                "a command that asks nobody was sent to the scheduler".into(),
            ));
        }
    }
    Ok(0)
}

fn submit_or_run(
    args: &SubmitArgs,
    global: &Global,
    out: &Out,
    then: Then,
) -> Result<ExitCode, ExpectedError> {
    let understood = submit::understand(args, &Around::of_process()?)?;
    for warning in &understood.warnings {
        out.say(&format!("warning: {}", plain(warning)));
    }
    if args.dry_run {
        return dry_run(&understood, out).map(|()| ExitCode::SUCCESS);
    }
    if then == Then::Follow && understood.jobs.len() > 1 {
        return Err(ExpectedError::Usage(format!(
            "`run` follows one job and the file holds {}\n  hint: `spotq submit` takes several",
            understood.jobs.len()
        )));
    }
    let target = config::target(global.server.as_deref(), &Surroundings::of_process())?;
    block_on(async {
        let client = Client::connect_as(&target).await?;
        let tasks = send(&client, args, understood, out, then).await?;
        match (then, tasks.as_slice()) {
            (Then::Follow, [task]) => follow::run(&client, *task, out).await.map(ExitCode::from),
            _ => Ok(ExitCode::SUCCESS),
        }
    })
}

/// Submits in the order of the file. What was accepted before a failure is printed: it is in the queue.
async fn send(
    client: &Client,
    args: &SubmitArgs,
    understood: Understood,
    out: &Out,
    then: Then,
) -> Result<Vec<TaskId>, ExpectedError> {
    let base = args.client_key.clone().unwrap_or_else(|| uuid::Uuid::new_v4().to_string());
    let mut accepted = Vec::new();
    let mut failure = None;
    for (index, job) in understood.jobs.iter().enumerate() {
        let request =
            v1::SubmitRequest { client_key: submit::client_key(&base, index), spec: Some(job.into()) };
        match client.submit(request).await {
            Ok(reply) => accepted.push(json::Submitted {
                job_id: reply.job_id,
                job_uuid: reply.job_uuid,
                name: job.name.clone(),
                created: reply.created,
                checkpoint_url: reply.checkpoint_url,
                warnings: understood.warnings.clone(),
            }),
            Err(error) => {
                failure = Some(error);
                break;
            }
        }
    }
    match then {
        Then::Return => print_submitted(&accepted, understood.jobs.len(), out)?,
        Then::Follow => {
            for job in &accepted {
                out.say(&format!("spotq: job {} submitted ({})", job.job_id, plain(&job.name)));
            }
        }
    }
    match failure {
        Some(error) => Err(error),
        None => Ok(accepted.iter().map(|job| TaskId::only(spotq_model::JobId(job.job_id))).collect()),
    }
}

fn print_submitted(accepted: &[json::Submitted], asked: usize, out: &Out) -> Result<(), ExpectedError> {
    match (out.format, accepted) {
        (Format::Json, [one]) if asked == 1 => out.json_line(one),
        (Format::Json, several) => out.json(&several),
        (Format::Csv, several) => {
            let mut text = String::from("job_id,job_uuid,created\n");
            for job in several {
                text.push_str(&format!("{},{},{}\n", job.job_id, job.job_uuid, job.created));
            }
            out.data(&text)
        }
        (Format::Table | Format::Wide, several) => {
            for job in several {
                let known = if job.created { "" } else { " (known already by its key)" };
                // With -q only the number, for `$(spotq submit -q …)`.
                let line = if out.quiet {
                    format!("{}\n", job.job_id)
                } else {
                    format!("job {} submitted: {}{known}\n", job.job_id, plain(&job.name))
                };
                out.data(&line)?;
            }
            if let Some(last) = several.last() {
                out.say(&format!("follow it with `spotq logs -f {0}`, or `spotq wait {0}`", last.job_id));
            }
            Ok(())
        }
    }
}

/// Prints jobs as understood.
fn dry_run(understood: &Understood, out: &Out) -> Result<(), ExpectedError> {
    let value = json::Understood { jobs: &understood.jobs, warnings: understood.warnings.clone() };
    if out.format == Format::Json {
        return out.json(&value);
    }
    for (index, job) in understood.jobs.iter().enumerate() {
        if index > 0 {
            out.data("\n")?;
        }
        out.data(&views::spec(job))?;
    }
    out.say("nothing was submitted (--dry-run)");
    Ok(())
}

async fn queue(client: &Client, args: &QueueArgs, out: &Out) -> Result<(), ExpectedError> {
    let request = v1::ListRequest { include_done: args.all, user: args.user.clone(), limit: args.limit };
    let reply = answer(client, "list the jobs", client.jobs().list(request).await)?;
    let grid = views::queue(&reply.jobs, words::now(), out);
    out.grid(&grid, || reply.jobs.iter().map(json::Job::from).collect::<Vec<_>>())?;
    if matches!(out.format, Format::Table | Format::Wide) {
        let shown = reply.jobs.len() as u64;
        if shown == 0 && !args.all {
            out.say("no job is active; `spotq queue --all` lists those that are done, too");
        } else if shown < reply.total {
            out.say(&format!("{shown} of {} jobs; `-n {}` lists all", reply.total, reply.total));
        }
    }
    Ok(())
}

async fn explain(client: &Client, task: TaskId, out: &Out) -> Result<(), ExpectedError> {
    let view = client.get(task).await?;
    let what = format!("explain job {task}");
    let mut reply = answer(client, &what, client.jobs().explain(job_request(task)).await)?;
    let for_people = matches!(out.format, Format::Table | Format::Wide);
    if words::is_done(&view) {
        // Which pool would be next is no question any more.
        reply.pools.clear();
        if for_people {
            let outcome = if view.outcome_text.is_empty() { "over" } else { &view.outcome_text };
            out.data(&format!("job {task} is done: {}\n", plain(outcome)))?;
            out.say(&format!("`spotq show {task}` has all about it, `spotq report {task}` what it cost"));
            return Ok(());
        }
    } else if for_people {
        out.data(&format!("{}\n", plain(&reply.headline)))?;
        if !reply.next.is_empty() {
            out.data(&format!("{}\n", plain(&reply.next)))?;
        }
        if reply.pools.is_empty() {
            return Ok(());
        }
        out.data("\n")?;
        let reasons = views::reasons(&reply);
        if !reasons.is_empty() {
            out.data(&format!("{reasons}\n"))?;
        }
    }
    let grid = views::verdicts(&reply, words::now(), out);
    out.grid(&grid, || json::Explained::new(task, &reply))?;
    if out.format == Format::Table && reply.pools.len() > views::RANKED_MAX {
        out.say(&format!("… and {} more; `-o wide` lists all", reply.pools.len() - views::RANKED_MAX));
    }
    Ok(())
}

async fn logs(client: &Client, args: &LogsArgs, out: &Out) -> Result<(), ExpectedError> {
    let request = v1::LogsRequest {
        job_id: args.job.job.0,
        task_index: args.job.index,
        follow: args.follow,
        generation: args.generation,
    };
    follow::logs(client, request, out).await
}

/// Gives the same order to several jobs: one that is refused does not keep the others from it.
async fn order(client: &Client, order: Order, tasks: &[TaskId], out: &Out) -> Result<u8, ExpectedError> {
    let mut jobs = client.jobs();
    let mut views = Vec::new();
    let mut code = 0;
    for task in tasks {
        let request = job_request(*task);
        let (verb, reply) = match order {
            Order::Cancel => ("cancel", jobs.cancel(request).await),
            Order::Hold => ("hold", jobs.hold(request).await),
            Order::Release => ("release", jobs.release(request).await),
            Order::Requeue => ("requeue", jobs.requeue(request).await),
        };
        match answer(client, &format!("{verb} job {task}"), reply) {
            Ok(reply) => views.extend(reply.job),
            Err(error @ ExpectedError::Unavailable(_)) => return Err(error),
            Err(error) => {
                crate::out::talk(&format!("spotq: {error}"));
                code = if code == 0 { error.exit_code() } else { code };
            }
        }
    }
    print_ordered(&views, out)?;
    Ok(code)
}

fn print_ordered(views: &[v1::JobView], out: &Out) -> Result<(), ExpectedError> {
    if matches!(out.format, Format::Json | Format::Csv) {
        let grid = views::queue(views, words::now(), out);
        return out.grid(&grid, || views.iter().map(json::Job::from).collect::<Vec<_>>());
    }
    for view in views {
        let reason = if view.reason.is_empty() { String::new() } else { format!(" ({})", view.reason) };
        out.say(&plain(&format!("job {} is {}{reason}", words::task(view), view.phase)));
    }
    Ok(())
}

async fn preempt(client: &Client, args: &PreemptArgs, out: &Out) -> Result<(), ExpectedError> {
    let request =
        v1::PreemptRequest { job_id: args.job.job.0, task_index: args.job.index, notice_ms: args.notice.0 };
    let what = format!("preempt job {}", args.job);
    let reply = answer(client, &what, client.jobs().preempt(request).await)?;
    if out.format == Format::Json {
        return out.json(&reply.job.as_ref().map(json::Job::from));
    }
    let notice =
        if args.notice == Span::ZERO { "no notice".into() } else { format!("{} of notice", args.notice) };
    out.say(&format!(
        "job {0} is being preempted with {notice}; `spotq wait {0}` shows what comes",
        args.job
    ));
    Ok(())
}

async fn offers(client: &Client, args: &OffersArgs, out: &Out) -> Result<(), ExpectedError> {
    let (accelerator, accelerator_count) = match &args.gpus {
        None => (None, 0),
        Some(text) => {
            let (name, count) = gpus(text)?;
            (Some(name), count)
        }
    };
    let request = v1::OffersRequest { accelerator, accelerator_count };
    let reply = answer(client, "list the offers", client.jobs().offers(request).await)?;
    let grid = views::offers(&reply.offers, words::now());
    out.grid(&grid, || reply.offers.iter().map(json::Offer::from).collect::<Vec<_>>())?;
    if reply.offers.is_empty() {
        out.say("no pool has such nodes; `spotq offers` lists all");
    }
    Ok(())
}

/// `NAME` or `NAME:COUNT`.
fn gpus(text: &str) -> Result<(String, u32), ExpectedError> {
    let (name, count) = text.rsplit_once(':').unwrap_or((text, "1"));
    let count: u32 =
        count.trim().parse().ok().filter(|n| *n > 0 && !name.trim().is_empty()).ok_or_else(|| {
            ExpectedError::BadInput(format!(
                "--gpus {}: expected NAME or NAME:COUNT\n  hint: write for example A100-80GB:8",
                crate::out::short(text, 80)
            ))
        })?;
    Ok((spotq_model::jobfile::accelerator_name(name).0, count))
}

async fn reports(client: &Client, args: &ReportArgs, out: &Out) -> Result<(), ExpectedError> {
    let request = v1::ReportRequest { job_id: args.job.map(|task| task.job.0) };
    let reply = answer(client, "make the report", client.reports().report(request).await)?;
    match (out.format, args.job, reply.jobs.first()) {
        (Format::Table | Format::Wide, Some(_), Some(job)) => {
            out.data(&report::page(job, &reply.segments, reply.as_of_ms, out))
        }
        (Format::Csv, Some(_), _) => out.grid(&report::ledger(&reply.segments), || ()),
        _ => {
            out.grid(&report::jobs(&reply, out), || json::Report::from(&reply))?;
            if report::is_dear(&reply) && matches!(out.format, Format::Table | Format::Wide) {
                out.say("a job with less than $0 SAVED cost more than on demand");
            }
            Ok(())
        }
    }
}

fn answer<T>(
    client: &Client,
    what: &str,
    reply: Result<Response<T>, tonic::Status>,
) -> Result<T, ExpectedError> {
    reply.map(Response::into_inner).map_err(|status| client.failed(what, &status))
}

fn train(args: spotq_examples::TrainArgs) -> Result<ExitCode, ExpectedError> {
    spotq_examples::run(args).map_err(|e| ExpectedError::Internal(format!("{e:#}")))
}

fn completions(shell: clap_complete::Shell) -> Result<ExitCode, ExpectedError> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "spotq", &mut text);
    crate::out::write_stdout(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn man(dir: &Path, out: &Out) -> Result<ExitCode, ExpectedError> {
    let written = std::fs::create_dir_all(dir).and_then(|()| clap_mangen::generate_to(Cli::command(), dir));
    written.map_err(|e| ExpectedError::writing(dir, &e))?;
    out.say(&format!("man pages are in {}", dir.display()));
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accelerators_are_named_with_or_without_a_count() {
        assert_eq!(gpus("a100-80gb:8").unwrap(), ("A100-80GB".into(), 8));
        assert_eq!(gpus("T4").unwrap(), ("T4".into(), 1));
        for bad in ["T4:0", "T4:x", ":8", ""] {
            assert_eq!(gpus(bad).unwrap_err().exit_code(), 64, "{bad}");
        }
    }
}
