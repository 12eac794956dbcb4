//! What the user's command finds in its environment: the trainer contract, rank variables, the Slurm set, its own.
//!
//! Pure. The join secret never passes (INV-14), and a job cannot override what the contract says.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use spotq_model::JobSpec;

use crate::ids::AttemptId;
use crate::tree::MARK;

/// Given to the worker by whoever launches the node; must not reach the job.
pub const JOIN_SECRET: &str = "SPOTQ_JOIN_SECRET";
/// What the checkpoint store's client needs comes under this prefix. A job must not get it: the same rights reach the
/// checkpoints of other jobs (INV-14).
pub const STORE_PREFIX: &str = "SPOTQ_STORE_";

/// Where things of one attempt are.
#[derive(Debug, Clone)]
pub struct Places {
    pub dir: PathBuf,
    pub work: PathBuf,
    pub checkpoint: PathBuf,
    pub notice: PathBuf,
    pub progress: PathBuf,
    pub log: PathBuf,
    /// Why the command could not be started.
    pub status: PathBuf,
    pub script: PathBuf,
}

impl Places {
    #[must_use]
    pub fn below(attempts: &Path, id: AttemptId) -> Places {
        let dir = attempts.join(id.to_string());
        Places {
            work: dir.join("work"),
            checkpoint: dir.join("ckpt"),
            notice: dir.join("notice.json"),
            progress: dir.join("progress.jsonl"),
            log: dir.join("log"),
            status: dir.join("launch-error"),
            script: dir.join("script"),
            dir,
        }
    }
}

/// What the environment depends on beside the job.
#[derive(Debug, Clone)]
pub struct Facts<'a> {
    pub id: AttemptId,
    pub spec: &'a JobSpec,
    pub places: &'a Places,
    pub cwd: &'a Path,
    /// Finds the processes of the attempt.
    pub mark: &'a str,
    /// Whether a checkpoint was restored.
    pub resumed: bool,
    /// A free port for the ranks to meet.
    pub port: u16,
    pub cpus: usize,
    /// Where spotq's own programs are, so that a job finds them without a path.
    pub programs: &'a Path,
}

/// The whole environment of the command, on top of what the worker itself was started with.
#[must_use]
pub fn build(
    inherited: impl IntoIterator<Item = (OsString, OsString)>,
    facts: &Facts<'_>,
) -> BTreeMap<OsString, OsString> {
    let mut env: BTreeMap<OsString, OsString> =
        inherited.into_iter().filter(|(name, _)| !is_ours(name)).collect();
    let path = search_path(env.get(OsStr::new("PATH")), facts.programs);
    let mut set = |key: &str, value: &OsStr| {
        env.insert(key.into(), value.into());
    };
    set("PATH", &path);
    for (key, value) in ranks(facts).into_iter().chain(slurm(facts)) {
        set(key, value.as_ref());
    }
    for (key, value) in facts.spec.env.iter().filter(|(key, _)| passes(key)) {
        set(key, value.as_ref());
    }
    for (key, value) in contract(facts) {
        set(key, &value);
    }
    env
}

fn is_ours(name: &OsStr) -> bool {
    name == JOIN_SECRET || name.to_string_lossy().starts_with(STORE_PREFIX)
}

/// The environment of the checkpoint store's client: the worker's own, and over it what came under the prefix.
#[must_use]
pub fn of_store(inherited: impl IntoIterator<Item = (OsString, OsString)>) -> BTreeMap<String, String> {
    // A variable that is not text is none that a store's client reads.
    let texts =
        inherited.into_iter().filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)));
    let (given, own): (Vec<_>, Vec<_>) = texts.partition(|(name, _)| name.starts_with(STORE_PREFIX));
    let given = given.into_iter().map(|(name, value)| (name[STORE_PREFIX.len()..].to_owned(), value));
    own.into_iter().chain(given).collect()
}

/// The node's own search path, with our programs last: they never hide one of the node's.
fn search_path(inherited: Option<&OsString>, programs: &Path) -> OsString {
    let mut path = inherited.cloned().unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    if !path.is_empty() {
        path.push(":");
    }
    path.push(programs);
    path
}

/// A name that the system can pass on and that the contract does not own.
fn passes(key: &str) -> bool {
    !key.is_empty() && !key.contains(['=', '\0']) && !key.starts_with("SPOTQ_")
}

fn contract(facts: &Facts<'_>) -> Vec<(&'static str, OsString)> {
    let places = facts.places;
    let resume = if facts.resumed { places.checkpoint.clone().into_os_string() } else { OsString::new() };
    vec![
        ("SPOTQ_CHECKPOINT_DIR", places.checkpoint.clone().into()),
        ("SPOTQ_RESUME_FROM", resume),
        ("SPOTQ_ATTEMPT", facts.id.generation.to_string().into()),
        ("SPOTQ_NOTICE_FILE", places.notice.clone().into()),
        ("SPOTQ_PROGRESS_FILE", places.progress.clone().into()),
        ("SPOTQ_JOB_ID", facts.id.task.job.to_string().into()),
        ("SPOTQ_TASK_INDEX", facts.id.task.index.to_string().into()),
        ("SPOTQ_NUM_NODES", "1".into()),
        ("SPOTQ_NODE_RANK", "0".into()),
        (MARK, facts.mark.into()),
    ]
}

/// One node with one rank: torchrun, JAX and MPI programs start without a launcher.
fn ranks(facts: &Facts<'_>) -> Vec<(&'static str, String)> {
    let port = facts.port.to_string();
    vec![
        ("MASTER_ADDR", "127.0.0.1".into()),
        ("MASTER_PORT", port.clone()),
        ("WORLD_SIZE", "1".into()),
        ("RANK", "0".into()),
        ("LOCAL_RANK", "0".into()),
        ("LOCAL_WORLD_SIZE", "1".into()),
        ("NODE_RANK", "0".into()),
        ("GROUP_RANK", "0".into()),
        ("JAX_COORDINATOR_ADDRESS", format!("127.0.0.1:{port}")),
        ("JAX_NUM_PROCESSES", "1".into()),
        ("JAX_PROCESS_ID", "0".into()),
        ("OMPI_COMM_WORLD_SIZE", "1".into()),
        ("OMPI_COMM_WORLD_RANK", "0".into()),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "0".into()),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "1".into()),
    ]
}

fn slurm(facts: &Facts<'_>) -> Vec<(&'static str, String)> {
    let job = facts.id.task.job.to_string();
    vec![
        ("SLURM_JOB_ID", job.clone()),
        ("SLURM_JOBID", job),
        ("SLURM_JOB_NAME", facts.spec.name.clone()),
        ("SLURM_JOB_USER", facts.spec.user.clone()),
        ("SLURM_NNODES", "1".into()),
        ("SLURM_JOB_NUM_NODES", "1".into()),
        ("SLURM_NTASKS", "1".into()),
        ("SLURM_NPROCS", "1".into()),
        ("SLURM_PROCID", "0".into()),
        ("SLURM_LOCALID", "0".into()),
        ("SLURM_NODEID", "0".into()),
        ("SLURM_TASKS_PER_NODE", "1".into()),
        ("SLURM_JOB_NODELIST", "localhost".into()),
        ("SLURM_NODELIST", "localhost".into()),
        ("SLURMD_NODENAME", "localhost".into()),
        ("SLURM_SUBMIT_DIR", facts.cwd.to_string_lossy().into_owned()),
        ("SLURM_CPUS_ON_NODE", facts.cpus.to_string()),
        ("SLURM_RESTART_COUNT", facts.id.generation.0.saturating_sub(1).to_string()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use spotq_model::{Generation, JobId, TaskId};

    fn built(job_env: &[(&str, &str)], resumed: bool) -> BTreeMap<OsString, OsString> {
        let mut spec = spotq_testkit::job("train");
        spec.env = job_env.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let id = AttemptId { task: TaskId::only(JobId(7)), generation: Generation(3) };
        let places = Places::below(Path::new("/n/attempts"), id);
        let facts = Facts {
            id,
            spec: &spec,
            places: &places,
            cwd: Path::new("/w"),
            mark: "1-7-3",
            resumed,
            port: 29500,
            cpus: 2,
            programs: Path::new("/opt/spotq"),
        };
        let inherited = [
            (JOIN_SECRET, "hush"),
            ("SPOTQ_STORE_AWS_SECRET_ACCESS_KEY", "hush"),
            ("HOME", "/root"),
            ("SPOTQ_NODE", "i-1"),
        ];
        build(inherited.map(|(k, v)| (k.into(), v.into())), &facts)
    }

    fn get<'a>(env: &'a BTreeMap<OsString, OsString>, key: &str) -> Option<&'a str> {
        env.get(OsStr::new(key)).and_then(|v| v.to_str())
    }

    #[test]
    fn a_job_cannot_override_the_contract_but_can_override_the_rest() {
        let env = built(
            &[("SPOTQ_ATTEMPT", "9"), ("MASTER_PORT", "1"), ("HOME", "/h"), ("BAD=KEY", "x"), ("L", "a\nb")],
            false,
        );
        assert_eq!(get(&env, "SPOTQ_ATTEMPT"), Some("3"));
        assert_eq!(get(&env, "MASTER_PORT"), Some("1"));
        assert_eq!(get(&env, "HOME"), Some("/h"));
        assert_eq!(get(&env, "L"), Some("a\nb"));
        assert!(!env.keys().any(|k| k.to_string_lossy().contains('=')));
    }

    #[test]
    fn the_join_secret_stays_with_the_worker_and_the_node_mark_passes() {
        let env = built(&[], false);
        assert_eq!(get(&env, JOIN_SECRET), None);
        assert_eq!(get(&env, "SPOTQ_NODE"), Some("i-1"));
    }

    #[test]
    fn our_programs_are_found_last() {
        assert_eq!(search_path(Some(&"/bin".into()), Path::new("/opt/spotq")), "/bin:/opt/spotq");
        assert_eq!(search_path(None, Path::new("/p")), "/usr/local/bin:/usr/bin:/bin:/p");
    }

    #[test]
    fn the_store_gets_what_the_job_must_not() {
        let inherited =
            [("AWS_REGION", "a"), ("SPOTQ_STORE_AWS_REGION", "b"), ("SPOTQ_STORE_AWS_X", "c"), ("HOME", "/")];
        let env = of_store(inherited.map(|(k, v)| (k.into(), v.into())));
        let expected = [("AWS_REGION", "b"), ("AWS_X", "c"), ("HOME", "/")];
        assert_eq!(env, expected.map(|(k, v)| (k.to_owned(), v.to_owned())).into());
    }

    #[test]
    fn resume_is_empty_on_a_first_start_and_the_checkpoint_directory_later() {
        assert_eq!(get(&built(&[], false), "SPOTQ_RESUME_FROM"), Some(""));
        assert_eq!(get(&built(&[], true), "SPOTQ_RESUME_FROM"), Some("/n/attempts/7-3/ckpt"));
        assert_eq!(get(&built(&[], true), "SLURM_RESTART_COUNT"), Some("2"));
    }
}
