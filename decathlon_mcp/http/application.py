"""The ASGI application: its routes, and what every request passes."""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from time import perf_counter
from typing import Protocol

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.events import Emit, ResponseOver
from decathlon_mcp.hooks import load, plugins
from decathlon_mcp.http.authentication import AllowedHosts, Tokens
from decathlon_mcp.http.bodies import MAX_BODY_BYTES, SMALL_BODY_BYTES, BodyReader
from decathlon_mcp.http.endpoints import McpEndpoints, address_of
from decathlon_mcp.http.health import PROBE_PATHS, health_routes
from decathlon_mcp.http.refusals import UnknownAddress, handle_refusal, json_line
from decathlon_mcp.protocol.headers import Headers
from decathlon_mcp.protocol.messages import McpError
from decathlon_mcp.protocol.requests import RequestContext

EXPOSED_HEADERS = ("Mcp-Session-Id", "Mcp-Protocol-Version", "Retry-After", "WWW-Authenticate")
"""Headers of a response that a page of an allowed origin may read."""
_CONTEXT_KEY = "decathlon.request_context"
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


class HttpApp:
    """Gives a request to what serves it: the page, the MCP addresses, or `others`, the other addresses.

    It reports each response, with the time that a call spends in this server. The page has no headers of
    CORS: no other page may read what it shows. Others have them, refusals of the check of `hosts` too, so
    that a page of an allowed origin can read these.
    """

    def __init__(
        self, mcp: McpEndpoints, others: ASGIApp, hosts: AllowedHosts, page: Page | None, emit: Emit
    ) -> None:
        self.running = mcp.running
        """The context in which sessions can be opened, for a program that has no lifespan of ASGI."""
        self._mcp = mcp
        self._emit = emit
        self._others = others
        self._hosts = hosts
        self._page = page
        self._with_cors = CORSMiddleware(
            self._serve,
            allow_origins=hosts.origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
            max_age=PREFLIGHT_SECONDS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._others(scope, receive, send)
            return
        arrived_at, status, sent_bytes = perf_counter(), 0, 0
        scope[_CONTEXT_KEY] = context = RequestContext(headers=Headers(scope["headers"]))

        # Not a coroutine itself: each of its two calls in a request would cost twice as much.
        def metered_send(message: Message) -> Awaitable[None]:
            nonlocal status, sent_bytes
            status = message.get("status", status)
            sent_bytes += len(message.get("body", b""))
            return send(message)

        app = self._with_cors if b"origin" in context.headers else self._serve
        if self._page is not None and self._page.serves(scope):
            app = self._page
        try:
            await app(scope, receive, metered_send)
        except Exception:
            # Starlette's outermost layer makes the response to an unexpected exception.
            status = status or 500
            raise
        finally:
            if status:
                replied_at, seconds = context.replied_at, None
                if replied_at:
                    seconds = context.called_at - arrived_at, perf_counter() - replied_at
                self._emit(ResponseOver(status, context.body_bytes, sent_bytes, seconds))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        context: RequestContext = scope[_CONTEXT_KEY]
        refused = self._hosts.refusal(scope["method"], context.headers)
        if refused is not None and scope["path"] not in PROBE_PATHS:
            response = PlainTextResponse(f"{refused.message}\n", refused.status)
            await response(scope, receive, send)
        elif (address := address_of(scope)) is not None:
            context.asgi, context.address = (scope, receive, send), address
            await self._mcp.serve(context)
        else:
            await self._others(scope, receive, send)


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
    endpoints = McpEndpoints(registry, tokens, bodies, public_url, has_page=page is not None)
    added = [
        load(part)(registry, tokens, bodies, public_url, has_page=page is not None)
        for plugin in plugins()
        for part in plugin.routes
    ]

    async def index(request: Request) -> Response:
        more = "".join(f"{route.path:<27}{route.name}\n" for route in added)
        return PlainTextResponse(INDEX_TEXT + more, headers={"Vary": "Accept"})

    async def public_key(request: Request) -> Response:
        return json_line(registry.signer.public.to_json())

    def lifespan(app: Starlette) -> AbstractAsyncContextManager[None]:
        return endpoints.running()

    # Nobody needs a token there: with the budget of all bodies, a stranger could use it up.
    unknown = UnknownAddress(BodyReader(SMALL_BODY_BYTES))
    others = Starlette(
        routes=[
            *added,
            Route("/", index),
            *health_routes(registry),
            Route("/.well-known/decathlon-key", public_key),
        ],
        exception_handlers={
            McpError: handle_refusal,
            DecathlonError: handle_refusal,
            404: unknown,
            405: unknown,
        },
        lifespan=lifespan,
    )
    return HttpApp(endpoints, others, hosts, page, registry.events.emit)
