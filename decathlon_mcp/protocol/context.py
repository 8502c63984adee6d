"""The context of one request: who sends it, which episode it concerns, and how its reply can be sent."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import anyio
import msgspec
from starlette.types import Receive

from decathlon_mcp.episodes.access import EpisodeAccess
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.lease import Hold
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.episodes.state import Ending
from decathlon_mcp.protocol.sdk import Context

SCOPE_KEY = "decathlon.request_context"
"""Key of the `RequestContext` in the ASGI scope."""


class RequestContext(msgspec.Struct, eq=False):
    """What the HTTP layer knows about a request.

    `task_id`: the task to start when the request is an `initialize` at a task's address, and `labels` those
    of the new episode. `label_header`: the header with labels, which counts only where an episode starts.
    `by_agent_id`: the address has an agent id, which needs no token. `has_page`: the server shows its
    episodes to people.
    `can_stream`: notifications can be sent before this request's result.
    `initialize_failed`: the session that the SDK made for this request must be discarded.
    `started`: the episodes that the request has started, which only its reply makes known. `awaited`: the
    episode that it waits for, and its hold on the lease, if its client may send it again on any connection.
    `abandoned`: its client went away without a reply. `may_return`: it can come back for the reply.
    `called_at`, `replied_at`: when a tool call was passed to its episode, and when the episode had the reply,
    as times of `perf_counter`; 0 without a call or reply.
    """

    principal: Principal = msgspec.field(default_factory=Principal)
    path: str = ""
    public_url: str | None = None
    has_page: bool = False
    task_id: str | None = None
    labels: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    label_header: str = ""
    access: EpisodeAccess | None = None
    by_agent_id: bool = False
    can_stream: bool = True
    initialize_failed: bool = False
    started: list[Episode] = msgspec.field(default_factory=list[Episode])
    awaited: tuple[Episode, Hold] | None = None
    abandoned: bool = False
    may_return: bool = False
    called_at: float = 0.0
    replied_at: float = 0.0

    def add_started(self, episode: Episode) -> None:
        """The request has started an episode, which only its reply makes known."""
        self.started.append(episode)
        if self.abandoned:
            self.abandon()

    @contextmanager
    def awaiting(self, episode: Episode) -> Generator[None]:
        """Hold the lease of an episode that the request waits for, as long as its client is there."""
        hold = episode.lease.acquire(use=False)
        self.awaited = episode, hold
        if self.abandoned:
            self.abandon()
        try:
            yield
        finally:
            hold.release()

    @property
    def reply_names(self) -> list[str]:
        """The ids of episodes of which one is in the reply, if it is delivered."""
        awaited = [] if self.awaited is None else [self.awaited[0]]
        return [name for episode in self.started + awaited for name in (episode.id, episode.agent_id)]

    def abandon(self) -> None:
        """The client gets no reply: end the episodes that nobody knows.

        One that the client may ask for again ends after the grace.
        """
        self.abandoned = True
        for episode in self.started:
            if self.may_return:
                episode.lease.lose_client()
            else:
                episode.close(Ending.CLIENT_LOST)
        if self.awaited is not None:
            episode, hold = self.awaited
            hold.release(answered=False)
            if episode not in self.started:
                episode.lease.lose_client(until_ready=True)


# The SDK asks for a tool's input schema without passing a context, and opens sessions without the request.
current_request_context: ContextVar[RequestContext | None] = ContextVar(
    "current_request_context", default=None
)


def request_context_of(ctx: Context) -> RequestContext:
    """The context of an MCP request. A request that did not come over HTTP gets a default one."""
    if ctx.request is None:
        return current_request_context.get() or RequestContext()
    return ctx.request.scope[SCOPE_KEY]


async def client_is_gone(ctx: Context) -> bool:
    """Whether the connection broke on which the client waits for the reply; False without HTTP."""
    return False if ctx.request is None else await is_disconnected(ctx.request.receive)


async def is_disconnected(receive: Receive) -> bool:
    """Whether the client of a request, whose body has been read, is gone or has the whole response."""
    # What comes next is the disconnect, without waiting if it has come.
    with anyio.CancelScope() as scope:
        scope.cancel()
        return (await receive())["type"] == "http.disconnect"
    return False


async def wait_until_disconnected(receive: Receive, on_gone: Callable[[], object]) -> None:
    """Wait until the client is gone or has the whole response, then call `on_gone`."""
    # uvicorn wakes all callers of `receive` at a disconnect, so that the SDK may wait for it as well.
    while (await receive())["type"] != "http.disconnect":
        pass
    on_gone()


def base_url_of(ctx: Context) -> str | None:
    """The server's public URL if configured, otherwise the URL the client used; None without HTTP."""
    if ctx.request is None:
        return None
    return request_context_of(ctx).public_url or str(ctx.request.base_url).rstrip("/")


def episode_address(base_url: str | None, episode_id: str) -> str | None:
    """URL at which an episode is served to every revision and any connection; None without HTTP."""
    return f"{base_url}/episodes/{episode_id}/mcp" if base_url else None


def page_address(base_url: str | None, public_id: str, *, has_page: bool) -> str | None:
    """URL of the page that shows an episode to people; None if the server has none, or without HTTP."""
    return f"{base_url}/e/{public_id}" if base_url and has_page else None
