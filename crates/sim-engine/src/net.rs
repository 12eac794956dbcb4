//! The simulated network under the real gRPC: how a client dials, and what a server is given.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::Stream;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::Uri;
use tonic::transport::server::Connected;
use turmoil::net::{TcpListener, TcpStream};

/// Where the scheduler listens.
pub(crate) const SCHEDULER: &str = "scheduler";
pub(crate) const PORT: u16 = 7070;

/// The scheduler's address.
pub(crate) fn server_url() -> String {
    format!("http://{SCHEDULER}:{PORT}")
}

/// Dials hosts of the simulation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Dial;

impl tower::Service<Uri> for Dial {
    type Response = TokioIo<TcpStream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        Box::pin(async { Ok(TokioIo::new(TcpStream::connect((SCHEDULER, PORT)).await?)) })
    }
}

/// A connection as a server wants it.
#[derive(Debug)]
pub(crate) struct Accepted(TcpStream);

/// The connections of a listener.
pub(crate) fn incoming(listener: TcpListener) -> impl Stream<Item = io::Result<Accepted>> + Send {
    futures::stream::unfold(listener, async |listener| {
        let accepted = listener.accept().await.map(|(stream, _)| Accepted(stream));
        Some((accepted, listener))
    })
}

impl Connected for Accepted {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Accepted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for Accepted {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
