//! A TCP relay on loopback that breaks connections the way networks do: late, silent, cut or reset.
//!
//! It carries bytes and never looks into them.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

/// Connections at one time. A test has a handful; more means a client that reconnects without a pause.
const MAX_CONNECTIONS: usize = 256;
/// Bytes on their way in one direction of one connection.
const BUFFER: usize = 16 * 1024;

/// What happens to bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// They pass, after the delay.
    Pass,
    /// They wait, and the senders feel back pressure; nothing is lost when they pass again.
    Pause,
    /// They vanish, and so do closes: each side sees a peer that is connected and silent (half-open). A stream that
    /// has lost bytes cannot be mended; cut it before passing again.
    Swallow,
    /// As `Swallow` for what is open; a new connection is reset at once, as by a host with no listener.
    Refuse,
}

/// How a connection is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// Both sides see an orderly end (FIN).
    Close,
    /// Both sides see a reset (RST).
    Reset,
}

/// A running relay; dropping it ends every connection through it. Needs a tokio runtime.
#[derive(Debug)]
pub struct Relay {
    address: SocketAddr,
    control: watch::Sender<Control>,
    accepted: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

#[derive(Debug, Clone, Copy)]
struct Control {
    delay: Duration,
    flow: Flow,
    /// Goes up with each cut; a connection ends when it sees another number than at its start.
    cuts: u64,
    last_cut: Cut,
}

impl Relay {
    /// Listens on a free loopback port and carries each connection to `target`.
    ///
    /// # Errors
    /// When loopback has no free port.
    pub async fn start(target: SocketAddr) -> std::io::Result<Relay> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let start = Control { delay: Duration::ZERO, flow: Flow::Pass, cuts: 0, last_cut: Cut::Close };
        let (control, watched) = watch::channel(start);
        let accepted = Arc::new(AtomicU64::new(0));
        let task = tokio::spawn(accept(listener, target, watched, Arc::clone(&accepted)));
        Ok(Relay { address, control, accepted, task })
    }

    /// Where clients connect to.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// How many connections were accepted so far.
    #[must_use]
    pub fn accepted(&self) -> u64 {
        self.accepted.load(Ordering::SeqCst)
    }

    /// Delays each piece of data by this much, in each direction.
    pub fn set_delay(&self, delay: Duration) {
        self.control.send_modify(|c| c.delay = delay);
    }

    pub fn set_flow(&self, flow: Flow) {
        self.control.send_modify(|c| c.flow = flow);
    }

    /// Ends every open connection; new ones are accepted as before.
    pub fn cut(&self, cut: Cut) {
        self.control.send_modify(|c| {
            c.cuts += 1;
            c.last_cut = cut;
        });
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(
    listener: TcpListener,
    target: SocketAddr,
    control: watch::Receiver<Control>,
    accepted: Arc<AtomicU64>,
) {
    let mut open = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        accepted.fetch_add(1, Ordering::SeqCst);
        while open.try_join_next().is_some() {}
        if control.borrow().flow == Flow::Refuse || open.len() >= MAX_CONNECTIONS {
            reset(&client);
            continue;
        }
        open.spawn(carry(client, target, control.clone()));
    }
}

async fn carry(mut client: TcpStream, target: SocketAddr, mut control: watch::Receiver<Control>) {
    let Ok(mut server) = TcpStream::connect(target).await else {
        return reset(&client);
    };
    let cuts_at_start = control.borrow().cuts;
    let cut = {
        let (from_client, to_client) = client.split();
        let (from_server, to_server) = server.split();
        let up = pump(from_client, to_server, control.clone());
        let down = pump(from_server, to_client, control.clone());
        tokio::select! {
            _ = async { tokio::join!(up, down) } => Cut::Close,
            seen = control.wait_for(|c| c.cuts != cuts_at_start) => seen.map_or(Cut::Close, |c| c.last_cut),
        }
    };
    if cut == Cut::Reset {
        reset(&client);
        reset(&server);
    }
}

/// Carries one direction until it ends; an orderly end is passed on.
async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut control: watch::Receiver<Control>,
) {
    let mut buffer = vec![0; BUFFER];
    loop {
        let count = from.read(&mut buffer).await.unwrap_or(0);
        let Ok(now) = control.wait_for(|c| c.flow != Flow::Pause).await.map(|c| *c) else { return };
        if matches!(now.flow, Flow::Swallow | Flow::Refuse) {
            if count == 0 {
                // Not even the end is passed on: only a cut ends a half-open connection.
                return std::future::pending().await;
            }
            continue;
        }
        tokio::time::sleep(now.delay).await;
        if count == 0 {
            let _ = to.shutdown().await;
            return;
        }
        if to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
    }
}

/// Makes the kernel send RST instead of FIN when the stream is dropped. It fails only on a socket that has ended.
fn reset(stream: &TcpStream) {
    let _ = stream.set_zero_linger();
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind;
    use tokio::time::{Instant, timeout};

    const LIMIT: Duration = Duration::from_secs(10);
    /// Long beside a loopback round trip, short beside a test: how long silence is watched.
    const SILENCE: Duration = Duration::from_millis(50);

    /// A relay in front of a server that sends back what it gets.
    async fn echo() -> Relay {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let target = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let (mut read, mut write) = stream.split();
                    let _ = tokio::io::copy(&mut read, &mut write).await;
                });
            }
        });
        Relay::start(target).await.unwrap()
    }

    async fn connected(relay: &Relay) -> TcpStream {
        let mut stream = TcpStream::connect(relay.address()).await.unwrap();
        assert_eq!(round_trip(&mut stream, b"hi").await.unwrap(), b"hi");
        stream
    }

    async fn round_trip(stream: &mut TcpStream, data: &[u8]) -> std::io::Result<Vec<u8>> {
        stream.write_all(data).await?;
        let mut back = vec![0; data.len()];
        timeout(LIMIT, stream.read_exact(&mut back)).await??;
        Ok(back)
    }

    async fn is_silent(stream: &mut TcpStream) -> bool {
        timeout(SILENCE, stream.read_u8()).await.is_err()
    }

    #[tokio::test]
    async fn bytes_and_ends_pass_and_a_delay_delays() {
        let relay = echo().await;
        let mut stream = connected(&relay).await;
        relay.set_delay(Duration::from_millis(30));
        let start = Instant::now();
        assert_eq!(round_trip(&mut stream, b"slow").await.unwrap(), b"slow");
        assert!(start.elapsed() >= Duration::from_millis(60), "{:?}", start.elapsed());
        stream.shutdown().await.unwrap();
        assert_eq!(timeout(LIMIT, stream.read(&mut [0; 1])).await.unwrap().unwrap(), 0);
        assert_eq!(relay.accepted(), 1);
    }

    #[tokio::test]
    async fn a_pause_loses_nothing() {
        let relay = echo().await;
        let mut stream = connected(&relay).await;
        relay.set_flow(Flow::Pause);
        stream.write_all(b"x").await.unwrap();
        assert!(is_silent(&mut stream).await);
        relay.set_flow(Flow::Pass);
        assert_eq!(timeout(LIMIT, stream.read_u8()).await.unwrap().unwrap(), b'x');
    }

    #[tokio::test]
    async fn a_half_open_connection_is_silent_until_it_is_cut() {
        let relay = echo().await;
        let mut stream = connected(&relay).await;
        relay.set_flow(Flow::Swallow);
        stream.write_all(b"x").await.unwrap();
        assert!(is_silent(&mut stream).await);
        relay.cut(Cut::Close);
        assert_eq!(timeout(LIMIT, stream.read(&mut [0; 1])).await.unwrap().unwrap(), 0);
        relay.set_flow(Flow::Pass);
        connected(&relay).await;
    }

    #[tokio::test]
    async fn a_reset_is_seen_as_one() {
        let relay = echo().await;
        let mut stream = connected(&relay).await;
        relay.cut(Cut::Reset);
        let error = timeout(LIMIT, stream.read(&mut [0; 1])).await.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }

    #[tokio::test]
    async fn a_refusing_relay_resets_new_connections() {
        let relay = echo().await;
        relay.set_flow(Flow::Refuse);
        let refused = match TcpStream::connect(relay.address()).await {
            Ok(mut stream) => timeout(LIMIT, stream.read(&mut [0; 1])).await.unwrap().is_err(),
            Err(_) => true,
        };
        assert!(refused);
    }

    #[tokio::test]
    async fn a_dropped_relay_takes_its_connections_along() {
        let relay = echo().await;
        let mut stream = connected(&relay).await;
        drop(relay);
        let end = timeout(LIMIT, stream.read(&mut [0; 1])).await.unwrap();
        assert!(matches!(end, Ok(0) | Err(_)));
    }
}
