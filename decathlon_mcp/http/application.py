"""The ASGI application: its routes and middleware."""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.events import CallServed, Emit, ResponseBegun, ResponseSent
from decathlon_mcp.hooks import load, plugins
from decathlon_mcp.http.authentication import AllowedHosts, Tokens
from decathlon_mcp.http.bodies import MAX_BODY_BYTES, BodyReader
from decathlon_mcp.http.endpoints import McpEndpoints, place_of
from decathlon_mcp.http.errors import REFUSALS, UnknownAddress, handle_refusal
from decathlon_mcp.http.health import PROBE_PATHS, HealthEndpoints
from decathlon_mcp.http.lines import JsonLine, TextLine
from decathlon_mcp.protocol.requests import SCOPE_KEY, RequestContext

EXPOSED_HEADERS = ("Mcp-Session-Id", "Mcp-Protocol-Version", "Retry-After", "WWW-Authenticate")
"""Headers of a response that a page of an allowed origin may read."""
PREFLIGHT_SECONDS = 7_200
"""How long a browser may rely on the answer to OPTIONS."""
INDEX_TEXT = """decathlon-mcp: Toolathlon as an environment for MCP clients.

/                          in a browser: what plays and what was played
/mcp                       the lobby: list tasks, start episodes
/tasks/TASK/mcp            one task; the MCP session is the episode
/tasks/random/mcp          a task drawn at random (?split=NAME&needs=WORD&without=WORD&seed=N&order=ORDER)
/episodes/EPISODE/mcp      an episode's own address
/healthz                   whether the server works, and its state
/readyz                    whether an episode can be started now
/.well-known/decathlon-key the public key that verdicts are signed with
"""


class HttpApp(Starlette):
    """The application. `mcp`: of the MCP addresses, whose requests do not pass its middleware and routes."""

    def __init__(self, mcp: ASGIApp, **options: Any) -> None:
        super().__init__(**options)
        self._mcp = mcp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if place_of(scope) is None:
            await super().__call__(scope, receive, send)
        else:
            await self._mcp(scope, receive, send)


class Cors(CORSMiddleware):
    """Starlette's, for requests with an origin only: others do not come from a page."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and all(name != b"origin" for name, _ in scope["headers"]):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


class RequestCheck:
    """Refuses requests of foreign pages, before any endpoint. The probes' paths answer to everyone."""

    def __init__(self, app: ASGIApp, hosts: AllowedHosts) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._app
        if scope["type"] == "http" and scope["path"] not in PROBE_PATHS:
            refused = self._hosts.refusal(scope["method"], scope["headers"])
            if refused is not None:
                app = TextLine(refused.message, refused.status)
        await app(scope, receive, send)


class MeteredResponses:
    """ASGI middleware that reports each response's status and bytes, and the time that a call
    spends in this server."""

    def __init__(self, app: ASGIApp, emit: Emit) -> None:
        self._app = app
        self._emit = emit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        emit, arrived_at, has_started = self._emit, perf_counter(), False

        # Not a coroutine itself: each of its two calls in a request would cost twice as much.
        def metered_send(message: Message) -> Awaitable[None]:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                emit(ResponseBegun(message["status"]))
                return send(message)
            emit(ResponseSent(len(message.get("body", b""))))
            context: RequestContext | None = scope.get(SCOPE_KEY)
            if context is not None and context.replied_at and not message.get("more_body"):
                emit(CallServed(context.called_at - arrived_at, perf_counter() - context.replied_at))
            return send(message)

        try:
            await self._app(scope, receive, metered_send)
        except Exception:
            if not has_started:
                # Starlette's outermost layer makes the response to an unexpected exception.
                emit(ResponseBegun(500))
            raise


class Page(Protocol):
    """An ASGI application with what people see of the server, at paths of its own."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    def serves(self, scope: Scope) -> bool:
        """Whether a request is the page's."""
        ...

    def shown_address(self, url: str, *, to_person: bool, path: str = "/") -> str:
        """Where people look, on a server at this URL. `to_person`: with the key, which no log may have."""
        ...


def page_for(
    registry: EpisodeRegistry,
    state: Path,
    tokens: Tokens,
    hosts: AllowedHosts,
    public_url: str | None = None,
) -> Page | None:
    """What people see of a server on a state folder, if a plug-in has it. Raises SettingsError."""
    for plugin in plugins():
        if plugin.page:
            return load(plugin.page)(registry, state, tokens, hosts, public_url)
    return None


class PageRequests:
    """ASGI middleware that gives the requests of people to the page."""

    def __init__(self, app: ASGIApp, page: Page) -> None:
        self._app = app
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._page if self._page.serves(scope) else self._app)(scope, receive, send)


def http_app(
    registry: EpisodeRegistry,
    *,
    tokens: Tokens | None = None,
    hosts: AllowedHosts | None = None,
    public_url: str | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    page: Page | None = None,
) -> HttpApp:
    """The ASGI application. The caller keeps ownership of `registry`. `page`: what people see, if any."""
    bodies = BodyReader(max_body_bytes)
    tokens, hosts = tokens or Tokens(), hosts or AllowedHosts()
    endpoints = McpEndpoints(registry, tokens, hosts, bodies, public_url, has_page=page is not None)
    health = HealthEndpoints(registry)
    added = [
        load(part)(registry, tokens, bodies, public_url, has_page=page is not None)
        for plugin in plugins()
        for part in plugin.routes
    ]

    async def index(request: Request) -> Response:
        more = "".join(f"{route.path:<27}{route.name}\n" for route in added)
        return PlainTextResponse(INDEX_TEXT + more, headers={"Vary": "Accept"})

    async def public_key(request: Request) -> Response:
        return JsonLine(registry.signer.public.to_json())

    def lifespan(app: Starlette) -> AbstractAsyncContextManager[None]:
        return endpoints.running()

    outer = [
        Middleware(MeteredResponses, emit=registry.events.emit),
        # Before CORS: no other page may read what this one shows.
        *([] if page is None else [Middleware(PageRequests, page=page)]),
        Middleware(
            Cors,
            allow_origins=hosts.origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
            max_age=PREFLIGHT_SECONDS,
        ),
    ]
    mcp: ASGIApp = endpoints
    for layer in reversed(outer):
        mcp = layer.cls(mcp, *layer.args, **layer.kwargs)
    return HttpApp(
        mcp,
        routes=[
            *added,
            Route("/", index),
            *health.routes(),
            Route("/.well-known/decathlon-key", public_key),
        ],
        # The check comes after the headers of CORS, with which a page of an allowed origin can read the
        # refusal.
        middleware=[*outer, Middleware(RequestCheck, hosts=hosts)],
        exception_handlers={
            **dict.fromkeys(REFUSALS, handle_refusal),
            404: UnknownAddress(bodies),
            405: UnknownAddress(bodies),
        },
        lifespan=lifespan,
    )
