//! What a run exercised, so that coverage is visible: a fault that never happens proves nothing.

macro_rules! counts {
    ($($name:ident = $text:literal,)*) => {
        /// Something that a run counts.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Count { $(#[doc = $text] $name,)* }

        const NAMES: &[&str] = &[$($text,)*];
    };
}

counts! {
    SchedulerCrash = "scheduler crashes",
    Recovery = "recoveries",
    AppendSlow = "appends that took a while",
    AppendFailed = "appends failed by a broken store",
    AppendUnheard = "appends kept though nobody heard of it",
    AppendLost = "appends lost at a crash",
    AppendKept = "unacknowledged appends kept at a crash",
    Snapshot = "snapshots",
    ClockJump = "clock jumps",
    Impatient = "client calls given up before their answer",
    SubmitRepeated = "submits repeated with the same key",
    Partition = "partitions",
    OneWay = "one-way partitions",
    Hold = "links held",
    Lossy = "runs with lost messages",
    WorkerCrash = "worker crashes",
    WorkerBack = "workers started again on their node",
    WorkerLeft = "workers that left by themselves",
    Joined = "workers that joined",
    CallLost = "cloud calls lost",
    CallAnswerLost = "cloud answers lost",
    CallLate = "cloud answers late",
    CallDoubled = "cloud calls doubled",
    Refused = "launches refused",
    RefusedQuota = "launches refused for quota",
    LaunchRepeated = "launches repeated under one key",
    ListLagged = "lists that lagged",
    NewsLost = "news of ended nodes lost",
    PriceMoved = "price moves",
    NeverBooted = "nodes that never booted",
    Notice = "notices",
    NoticeWithdrawn = "notices withdrawn",
    Preempted = "nodes taken after a notice",
    LostWithoutNotice = "nodes taken without notice",
    NodeCrash = "nodes crashed",
    Expired = "nodes that reached their time to live",
    Silent = "nodes that vanished without closing a connection",
    PutFailed = "uploads failed",
    PutUnheard = "uploads kept though nobody heard of it",
    GetFailed = "reads of the checkpoint store failed",
    StoreSlow = "calls of the checkpoint store that took a while",
    Corrupted = "checkpoints corrupted",
    Quarantined = "checkpoints found damaged",
    Fenced = "generations that fenced the others out",
    Committed = "checkpoints committed",
    Started = "commands started",
    Resumed = "commands resumed from a checkpoint",
    SavedOnSignal = "saves on a signal",
    TermIgnored = "TERM ignored by a command",
    TermObeyed = "TERM obeyed by a command",
    Killed = "commands killed",
    Owed = "saves that a notice left time for",
    Undisturbed = "scheduler losses that training did not notice",
    Completed = "jobs completed",
    Failed = "jobs failed",
    Cancelled = "jobs cancelled",
    Timeout = "jobs stopped at their time limit",
    PreemptionBudget = "jobs out of preemptions",
    NodeFailure = "jobs lost with their nodes",
    OutOfMemory = "jobs out of memory",
    LaunchFailure = "jobs that could not start",
    Event = "events made durable",
}

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
