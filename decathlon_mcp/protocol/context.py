"""One request's way in: who asks, which episode the address leads to, how its reply may travel."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from mcp.server.connection import Connection
from mcp.server.context import ServerRequestContext

from decathlon_mcp.episodes.access import Principal
from decathlon_mcp.episodes.episode import EpisodeAccess

Context = ServerRequestContext[Any, Any]

SCOPE_KEY = "decathlon.visit"


@dataclass(slots=True)
class RequestContext:
    """`streams`: may notifications go before this request's result? `public_url`: ours, if known.

    `refused`: its `initialize` failed, and the session that the SDK made for it leads nowhere.
    """

    principal: Principal = field(default_factory=Principal)
    path: str = ""
    public_url: str | None = None
    task_id: str | None = None
    access: EpisodeAccess | None = None
    streams: bool = True
    refused: bool = False


current_request_context: ContextVar[RequestContext | None] = ContextVar("visiting", default=None)
"""The visit whose HTTP request is being served: for what the SDK asks without a context."""

_WITHOUT_REQUEST = RequestContext()


def request_context_of(ctx: Context) -> RequestContext:
    """The visit behind a request; over a pipe there is none, and a plain one stands in."""
    if ctx.request is None:
        return current_request_context.get() or _WITHOUT_REQUEST
    return ctx.request.scope[SCOPE_KEY]


def base_url_of(ctx: Context) -> str | None:
    """Ours, as it is known or as it was called; None over a pipe."""
    if ctx.request is None:
        return None
    return request_context_of(ctx).public_url or str(ctx.request.base_url).rstrip("/")


def connection_of(ctx: Context) -> Connection:
    """The connection: its `state`, and its standalone stream. The SDK has no public way to it."""
    return ctx.session._connection  # pyright: ignore[reportPrivateUsage]


async def notify(ctx: Context, method: str, params: dict[str, Any], *, with_reply: bool) -> None:
    """Send a notification as it is: before this request's reply, or on the connection's own stream."""
    session = ctx.session
    channel = session._request_outbound if with_reply else session._connection.outbound  # pyright: ignore[reportPrivateUsage]
    await channel.notify(method, params)
