"""Whether the client of a request is still there while the request is served, and when its reply is ready.

A connection that breaks says little about a client that only calls tools now and then. It says enough in
three cases, which are handled here:

- A reply that names a new episode was not delivered: nobody knows the episode, and it is closed.
- A request that waits for an episode to become ready is broken off: its client does not wait any more.
- The GET stream of a session that is an episode breaks: its client is lost unless another request of that
  session shows otherwise.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decathlon_mcp.background import background_tasks
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.lease import Hold
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.protocol.context import RequestContext, wait_until_disconnected

NOT_READY = frozenset({Phase.QUEUED, Phase.OPENING})


async def serve_start(
    app: ASGIApp,
    request_context: RequestContext,
    scope: Scope,
    receive: Receive,
    send: Send,
    *,
    grace_seconds: float,
) -> None:
    """Serve a request that may start an episode; if its reply is not delivered, the episode ends.

    A client that can come back for the reply has `grace_seconds` to do so.
    """
    stream = request_context.stream
    reply = ReplyNaming(send, lambda: request_context.reply_names)

    def on_gone() -> None:
        reply.client_gone = True
        if not reply.delivered and stream is None:
            request_context.abandon()

    async with watching_client(receive, on_gone):
        await app(scope, receive, reply)
    if not reply.delivered and (stream is None or await stream.is_abandoned(grace_seconds)):
        request_context.abandon()


class Presence:
    """Serves requests that concern an episode; its lease does not expire while their clients are there."""

    def __init__(self) -> None:
        self._in_progress: dict[str, set[RequestInProgress]] = {}

    async def serve(
        self,
        app: ASGIApp,
        episode: Episode,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        session: str | None,
    ) -> None:
        """Serve a request. `session`: the id of the session that is the episode, None for other sessions.

        Where the session is the episode, it depends on the MCP method whether a POST is a use of it, which
        the MCP server decides.
        """
        is_get, is_post = scope["method"] == "GET", scope["method"] == "POST"
        request = RequestInProgress(receive, send, episode.lease.acquire(use=is_get or session is None))
        waits = is_post and episode.state.phase in NOT_READY

        def end() -> None:
            if request.release() and waits and not request.answered:
                episode.lease.lose_client(until_ready=True)

        with self._registered(request, session if is_post else None):
            try:
                async with AsyncExitStack() as stack:
                    if waits:
                        # The SDK does not notice a disconnect when the reply is to be one JSON body.
                        await stack.enter_async_context(watching_client(receive, end))
                    await app(scope, receive, request.send)
            finally:
                end()
        # A stream that the server ended is complete.
        if session is not None and is_get and request.is_stream and not request.answered:
            await self._lose_stream(session, episode)

    @contextmanager
    def holding(
        self, episode: Episode, receive: Receive, send: Send, *, session: str | None
    ) -> Generator[RequestInProgress]:
        """As `serve`, for a request that uses an episode which is ready, and that the body serves."""
        request = RequestInProgress(receive, send, episode.lease.acquire())
        with self._registered(request, session):
            try:
                yield request
            finally:
                request.release()

    @contextmanager
    def _registered(self, request: RequestInProgress, session: str | None) -> Generator[None]:
        """The request is one of those that `_lose_stream` looks at."""
        if session is None:
            yield
            return
        requests = self._in_progress.setdefault(session, set())
        requests.add(request)
        try:
            yield
        finally:
            requests.discard(request)
            if not requests:
                self._in_progress.pop(session, None)

    async def _lose_stream(self, session: str, episode: Episode) -> None:
        """The GET stream of a session broke. Returns when its requests are answered or broken off."""
        episode.lease.lose_client()
        # A client that dies loses all its connections. But the SDK waits for the end of a call, however long
        # it takes, when the reply is to be one JSON body, and the call would hold the lease.
        async with anyio.create_task_group() as tasks:
            for request in self._in_progress.get(session, ()):
                tasks.start_soon(wait_until_disconnected, request.receive, request.release)


class ReplyNaming:
    """A `send` that notices whether a reply with one of `names` was sent to a client that is there."""

    def __init__(self, send: Send, names: Callable[[], Collection[str]]) -> None:
        self._send = send
        self._names = names
        self.delivered = False
        self.client_gone = False

    async def __call__(self, message: Message) -> None:
        # Not the end of the response: a client may close a stream of events as soon as it has the reply.
        if not self.client_gone and (body := message.get("body")):
            self.delivered = self.delivered or any(name.encode() in body for name in self._names())
        await self._send(message)


class RequestInProgress:
    """A request with a hold on an episode's lease, which ends early if its client is gone.

    `answered`: the whole response was sent while the client was there, as far as is known. `is_stream`: the
    response is a stream of events.
    """

    def __init__(self, receive: Receive, send: Send, hold: Hold) -> None:
        self.receive = receive
        self.answered = False
        self.is_stream = False
        self._send = send
        self._hold = hold

    async def send(self, message: Message) -> None:
        """Pass a message of the response on."""
        if message["type"] == "http.response.start":
            self.is_stream = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
        elif message["type"] == "http.response.body" and not message.get("more_body"):
            self.answered = True
        await self._send(message)

    def release(self) -> bool:
        """End the hold, as that of a client that is gone unless it has its answer; False if it had ended."""
        return self._hold.release(answered=self.answered)


@asynccontextmanager
async def watching_client(receive: Receive, on_gone: Callable[[], object]) -> AsyncGenerator[None]:
    """Call `on_gone` once if the client disconnects, or has the whole response, in the body of the context.

    The request's body must have been read.
    """
    async with background_tasks() as tasks:
        tasks.start_soon(wait_until_disconnected, receive, on_gone)
        yield
