//! What a run exercised, so that coverage is visible: a fault that never happens proves nothing.

/// Makes `Count`, one variant for each thing that a run counts, and `Counts`, how often each happened.
#[macro_export]
macro_rules! counts {
    ($($name:ident = $text:literal,)*) => {
        /// Something that a run counts.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Count { $(#[doc = $text] $name,)* }

        const NAMES: &[&str] = &[$($text,)*];

        /// How often each of them happened.
        #[derive(Debug, Clone)]
        pub struct Counts([u64; NAMES.len()]);

        impl Default for Counts {
            fn default() -> Self {
                Counts([0; NAMES.len()])
            }
        }

        impl Counts {
            pub(crate) fn add(&mut self, what: Count) {
                self.0[what as usize] += 1;
            }

            /// How often `what` happened.
            #[must_use]
            pub fn of(&self, what: Count) -> u64 {
                self.0[what as usize]
            }

            /// Takes over the figures of another run.
            pub fn merge(&mut self, other: &Counts) {
                self.0.iter_mut().zip(other.0).for_each(|(mine, more)| *mine += more);
            }

            /// Each figure with its name.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
                NAMES.iter().copied().zip(self.0)
            }
        }
    };
}

counts! {
    SchedulerCrash = "scheduler crashes",
    CrashBeforeAppend = "crashes between decide and append",
    CrashAppending = "crashes with an append in the air",
    CrashBeforeAnswer = "crashes between durable and answer",
    CrashBetweenEffects = "crashes between two effects",
    TakeOver = "takeovers from a leader that still runs",
    Recovery = "recoveries",
    SnapshotUsed = "recoveries from a snapshot",
    SnapshotLost = "snapshots lost or set aside",
    AppendLost = "appends lost at a crash",
    AppendTorn = "appends torn at a crash",
    AppendKept = "unacknowledged appends kept at a crash",
    AppendFenced = "appends of a deposed leader refused",
    AppendFailed = "appends failed by a broken store",
    AppendConflict = "appends refused for their version",
    ClockJump = "clock jumps",
    RequestLost = "client requests lost",
    AnswerLost = "client answers lost",
    RequestDoubled = "client requests doubled",
    RequestRepeated = "client requests repeated",
    StreamBroken = "streams broken",
    HalfOpen = "streams half-open",
    Partition = "partitions of a worker",
    CloudCallLost = "cloud calls lost",
    CloudAnswerLost = "cloud answers lost",
    CloudAnswerDoubled = "cloud answers doubled",
    CloudAnswerLate = "cloud answers late",
    LaunchRepeated = "launches repeated under one key",
    Refused = "launches refused",
    RefusedQuota = "launches refused for quota",
    LaunchUnknown = "launches with an unknown outcome",
    ListLagged = "lists that lagged",
    PriceMoved = "price moves",
    Notice = "notices",
    NoticeWithdrawn = "notices withdrawn",
    NoticeDoubled = "notices doubled or moved",
    LostWithoutNotice = "nodes taken without notice",
    NodeCrash = "nodes crashed",
    NewsLost = "news of ended nodes lost",
    WorkerCrash = "worker crashes",
    TrainerKilled = "commands killed from outside",
    Zombie = "commands that ran on after their attempt was given up",
    BlindCommit = "commits by a writer that did not look at the fence",
    Corrupted = "checkpoints corrupted",
    FellBack = "restores that fell back",
    LyingRestore = "restores that kept a newer checkpoint to themselves",
    PutLost = "log entries lost to another writer",
    UploadFailed = "uploads failed",
    Superseded = "writers refused by the fence",
    Dialled = "streams opened by workers",
    Committed = "checkpoints committed",
    Attempts = "attempts placed",
    DrainSaved = "notices whose save was owed and committed",
    RanOn = "commands that ran while a scheduler recovered",
    Orphan = "orphans ended",
    Completed = "jobs completed",
    Failed = "jobs failed",
    Cancelled = "jobs cancelled",
    Timeout = "jobs stopped at their time limit",
    PreemptionBudget = "jobs out of preemptions",
    NodeFailure = "jobs lost with their nodes",
    OutOfMemory = "jobs out of memory",
    LaunchFailure = "jobs that could not start",
    BudgetExhausted = "jobs out of money",
    FullCheck = "checks of the whole state",
    Event = "events made durable",
}
