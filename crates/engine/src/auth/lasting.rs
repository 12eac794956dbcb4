//! Answers that last: a stream ends soon after its user was removed, not only when somebody closes it.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use http_body::{Body as _, Frame};
use http_body_util::{BodyStream, StreamBody};
use tonic::Status;
use tonic::body::Body;

use super::tls::Security;
use super::users::User;

/// As often as users are read again, at the most.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// `body`, until `user` is no longer as it was when the call was let in. A short answer is over before the first look.
pub(super) fn while_known(body: Body, security: Arc<Security>, user: User) -> Body {
    if body.is_end_stream() {
        // An error: its status is in the headers, and there must be nothing after them.
        return body;
    }
    let removed = Box::pin(async move {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            if !security.users().all().contains(&user) {
                return;
            }
        }
    });
    let open = Some((BodyStream::new(body), removed));
    Body::new(StreamBody::new(futures::stream::unfold(open, async |open| {
        let (mut frames, mut removed) = open?;
        tokio::select! {
            biased;
            () = &mut removed => Some((Ok(goodbye()), None)),
            frame = frames.next() => frame.map(|frame| (frame, Some((frames, removed)))),
        }
    })))
}

/// The end of a stream, as gRPC tells it.
fn goodbye<D>() -> Frame<D> {
    let mut trailers = http::HeaderMap::new();
    let status = Status::unauthenticated("this user was removed or changed; log in again with `spotq login`");
    // What cannot be told in a header is left out; the stream ends all the same.
    let _ = status.add_header(&mut trailers);
    Frame::trailers(trailers)
}
