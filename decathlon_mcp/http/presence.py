"""Whether the client of a request is still there while the request is served, and when its reply is ready.

A connection that breaks says little about a client that only calls tools now and then. It says enough in
three cases, which are handled here:

- A reply that names a new episode was not delivered: nobody knows the episode, and it is closed.
- A request that waits for an episode to become ready is broken off: its client does not wait any more.
- The GET stream of a session that is an episode breaks: its client is lost unless another request of that
  session shows otherwise.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Self

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decathlon_mcp.background import background_tasks
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.lease import Hold
from decathlon_mcp.episodes.state import NOT_READY
from decathlon_mcp.protocol.context import RequestContext, wait_until_disconnected


async def serve_start(
    app: ASGIApp,
    request_context: RequestContext,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Serve a request that may start an episode; if its reply is not delivered, the episode ends."""
    reply = ReplyNaming(send, lambda: request_context.reply_names)

    def on_gone() -> None:
        reply.client_gone = True
        if not reply.delivered:
            request_context.abandon()

    async with watching_client(receive, on_gone):
        await app(scope, receive, reply)
    if not reply.delivered:
        request_context.abandon()


class Presence:
    """Serves requests that concern an episode; its lease does not expire while their clients are there."""

    def __init__(self) -> None:
        self._of_sessions: dict[str, set[RequestInProgress]] = {}

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
        hold = episode.lease.acquire(use=is_get or session is None)
        request = RequestInProgress(receive, hold, self._of_sessions, session if is_post else None)
        waits = is_post and episode.state.phase in NOT_READY

        def end() -> None:
            if request.release() and waits and not request.answered:
                episode.lease.lose_client(until_ready=True)

        with request:
            try:
                async with AsyncExitStack() as stack:
                    if waits:
                        # The SDK does not notice a disconnect when the reply is to be one JSON body.
                        await stack.enter_async_context(watching_client(receive, end))
                    await app(scope, receive, request.sending(send))
            finally:
                end()
        # A stream that the server ended is complete.
        if session is not None and is_get and request.is_stream and not request.answered:
            await self._lose_stream(session, episode)

    def holding(self, episode: Episode, receive: Receive, *, session: str | None) -> RequestInProgress:
        """As `serve`, for a request that uses an episode, and that the caller serves."""
        return RequestInProgress(receive, episode.lease.acquire(), self._of_sessions, session)

    async def _lose_stream(self, session: str, episode: Episode) -> None:
        """The GET stream of a session broke. Returns when its requests are answered or broken off."""
        episode.lease.lose_client()
        # A client that dies loses all its connections. But the SDK waits for the end of a call, however long
        # it takes, when the reply is to be one JSON body, and the call would hold the lease.
        async with anyio.create_task_group() as tasks:
            for request in self._of_sessions.get(session, ()):
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

    From `begin` to `end`, or as a context manager, it is one of the requests of its session; `_lose_stream`
    looks at these. `of_sessions`: those of all sessions, by their ids. `answered`: the whole response was
    sent while the client was there, as far as is known.
    """

    def __init__(
        self,
        receive: Receive,
        hold: Hold,
        of_sessions: dict[str, set[RequestInProgress]],
        session: str | None,
    ) -> None:
        self.receive = receive
        self.answered = False
        self._hold = hold
        self._of_sessions = of_sessions
        self._session = session
        self._headers: Iterable[tuple[bytes, bytes]] = ()

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def begin(self) -> None:
        """The request is about to be served."""
        if self._session is not None:
            self._of_sessions.setdefault(self._session, set()).add(self)

    def end(self) -> None:
        """The request has been served."""
        self.release()
        if self._session is not None and (requests := self._of_sessions.get(self._session)) is not None:
            requests.discard(self)
            if not requests:
                del self._of_sessions[self._session]

    @property
    def is_stream(self) -> bool:
        """Whether the response is a stream of events."""
        return any(value.startswith(b"text/event-stream") for _, value in self._headers)

    def sending(self, send: Send) -> Send:
        """A `send` that notes what is sent."""

        def send_noted(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                self._headers = message["headers"]
            elif message["type"] == "http.response.body" and not message.get("more_body"):
                self.answered = True
            return send(message)

        return send_noted

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
