//! A power cut at any moment loses nothing that was acknowledged.
//!
//! The store is on an ext4 file system in an image file. The writer is stopped, the image is copied (it holds what the
//! device was given; what the kernel still has in memory is lost), the copy is mounted, which recovers its journal,
//! and the store in it is checked. Needs root and loop devices; says so where it cannot run.

#![expect(clippy::unwrap_used, reason = "a test, helpers included, ends at the first surprise")]

mod common;

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use common::records::Load;
use common::{Acks, Writer, check};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

const ROUNDS_OF_EACH: u64 = 8;
const IMAGE_BYTES: u64 = 192 * 1024 * 1024;

/// On a machine that is busy with other things the test ends early, but never before this many rounds.
const TIME: Duration = Duration::from_secs(80);
const LEAST_ROUNDS_OF_EACH: u64 = 7;

/// Set to a number, this many rounds of each are run, however long they take.
const ROUNDS_VARIABLE: &str = "SPOTQ_POWER_CUTS";

/// A mounted image; it is unmounted when the test lets go of it, also when it fails. The loop device goes with it.
struct Mounted(PathBuf);

impl Mounted {
    fn new(image: &Path, at: PathBuf) -> Result<Self, String> {
        std::fs::create_dir_all(&at).unwrap();
        sh("mount", &["-o".as_ref(), "loop".as_ref(), image.as_os_str(), at.as_os_str()])?;
        Ok(Self(at))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if sh("umount", &[self.0.as_os_str()]).is_err() {
            sh("umount", &["-l".as_ref(), self.0.as_os_str()]).ok();
        }
    }
}

#[tokio::test]
async fn a_power_cut_loses_no_acknowledged_record() {
    let temporary = tempfile::tempdir().unwrap();
    if let Some(reason) = why_not(temporary.path()) {
        println!("skipped: {reason}");
        return;
    }
    let begin = Instant::now();
    let wanted = std::env::var(ROUNDS_VARIABLE).ok().map(|rounds| rounds.parse::<u64>().unwrap());
    let late = |round: u64| match wanted {
        Some(wanted) => round >= wanted,
        None => round >= ROUNDS_OF_EACH || round >= LEAST_ROUNDS_OF_EACH && begin.elapsed() > TIME,
    };
    let mut rounds = 0;
    for load in [Load::Small, Load::Mixed] {
        let mut cut = Cut::new(&temporary.path().join(format!("warm-{}", load.name())), load, "device");
        for round in 0.. {
            if late(round) {
                break;
            }
            let lost = cut.power_cut(40 + 370 * (round % ROUNDS_OF_EACH)).await;
            lost.unwrap_or_else(|lost| panic!("warm store, {load:?}, round {round}: {lost}"));
            rounds += 1;
        }
    }
    for round in 0.. {
        if late(round) {
            break;
        }
        let fresh = temporary.path().join(format!("fresh-{round}"));
        // The first rounds hit the very creation of the store.
        let more = [0, 0, 1, 2, 5, 30, 300, 2000][round as usize % 8];
        let lost = Cut::new(&fresh, Load::Small, "device").power_cut(more).await;
        lost.unwrap_or_else(|lost| panic!("fresh store, round {round}: {lost}"));
        rounds += 1;
    }
    println!("{rounds} power cuts in {:?}", begin.elapsed());
}

/// Shows that the test above can fail: sled's own `flush()` is not enough. Run it by hand:
/// `cargo nextest run -p spotq-store-sled --run-ignored only`.
#[tokio::test]
#[ignore = "shows that the power-cut test notices a missing fdatasync; run by hand as root"]
async fn without_fdatasync_a_power_cut_loses_acknowledged_records() {
    let temporary = tempfile::tempdir().unwrap();
    if let Some(reason) = why_not(temporary.path()) {
        println!("skipped: {reason}");
        return;
    }
    let mut cut = Cut::new(&temporary.path().join("bites"), Load::Small, "flush-only");
    let mut losses = 0;
    for round in 0..5 {
        match cut.power_cut(300).await {
            Ok(()) => println!("round {round}: nothing lost"),
            Err(lost) => {
                println!("round {round}: {lost}");
                losses += 1;
            }
        }
    }
    assert!(losses > 0, "a store without fdatasync came through 5 power cuts");
}

/// A writer on an image.
struct Cut {
    base: PathBuf,
    load: Load,
    acks: PathBuf,
    /// Dropped before the file system that it writes to.
    writer: Writer,
    _mounted: Mounted,
}

impl Cut {
    fn new(base: &Path, load: Load, sync: &str) -> Self {
        std::fs::create_dir_all(base).unwrap();
        let image = base.join("image");
        make_image(&image).unwrap();
        let mounted = Mounted::new(&image, base.join("mnt")).unwrap();
        let acks = base.join("acks");
        let writer = Writer::start(&mounted.0.join("store"), &acks, 32, load, sync);
        Self { base: base.to_owned(), load, acks, writer, _mounted: mounted }
    }

    /// Cuts the power after `more` acknowledged records and checks what is left; the writer goes on afterwards.
    async fn power_cut(&mut self, more: u64) -> Result<(), String> {
        let wanted = Acks::read(&self.acks).version + more;
        self.writer.wait_until("acknowledgements", |acks| acks.opening > 0 && acks.version >= wanted);
        let writer = Pid::from_child(&self.writer.child);
        kill_process(writer, Signal::STOP).unwrap();
        // Once it has stopped it does nothing any more.
        let status = waitpid(Some(writer), WaitOptions::UNTRACED).unwrap().unwrap().1;
        assert!(status.stopped(), "the writer ended instead of stopping: {status:?}");
        let acks = self.writer.acks();
        let copy = self.base.join("copy");
        let copied =
            sh("cp", &["--sparse=always".as_ref(), self.base.join("image").as_os_str(), copy.as_os_str()]);
        kill_process(writer, Signal::CONT).unwrap();
        copied.unwrap();
        let mounted = Mounted::new(&copy, self.base.join("after"))?;
        let found = check(&mounted.0.join("store"), self.load, &acks).await;
        drop(mounted);
        std::fs::remove_file(copy).unwrap();
        found.map(drop)
    }
}

fn make_image(image: &Path) -> Result<(), String> {
    File::create(image).and_then(|file| file.set_len(IMAGE_BYTES)).map_err(|error| error.to_string())?;
    sh("mkfs.ext4", &["-q".as_ref(), "-F".as_ref(), image.as_os_str()])
}

/// Why this machine cannot run the test.
fn why_not(scratch: &Path) -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("mounting needs root".to_owned());
    }
    let image = scratch.join("probe");
    let tried = make_image(&image).and_then(|()| Mounted::new(&image, scratch.join("probe-mnt")).map(drop));
    std::fs::remove_file(image).ok();
    tried.err().map(|error| format!("cannot mount an image here: {error}"))
}

fn sh(program: &str, arguments: &[&OsStr]) -> Result<(), String> {
    let output =
        Command::new(program).args(arguments).output().map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}
