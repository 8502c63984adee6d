"""The addresses: what is checked before a request reaches MCP, and to which server it goes."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass

from mcp.server.transport_security import TransportSecuritySettings
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decathlon_mcp.background import background_tasks
from decathlon_mcp.catalogue.draws import Draw
from decathlon_mcp.episodes.access import Principal
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.http.authentication import Tokens
from decathlon_mcp.protocol.context import SCOPE_KEY, RequestContext, current_request_context
from decathlon_mcp.protocol.episode_server import EpisodeServer
from decathlon_mcp.protocol.errors import INVALID_PARAMS, error_code, error_data
from decathlon_mcp.protocol.lobby import Lobby
from decathlon_mcp.protocol.lobby_tools import parsed
from decathlon_mcp.protocol.resolvers import AddressResolver, TaskSessionResolver
from decathlon_mcp.protocol.results import is_modern
from decathlon_mcp.protocol.sessions import SessionManager, answer_as_json, wants_stream

log = logging.getLogger("decathlon.edge")

MAX_BODY_BYTES = 64 << 20
SESSION_HEADER = "mcp-session-id"
RANDOM = "random"
STATUS = {
    "unknown_task": 404,
    "unknown_episode": 404,
    "bad_request": 400,
    "not_runnable": 409,
    "at_capacity": 503,
    "access_denied": 403,
}
FRONT = """decathlon-mcp: Toolathlon as an environment for MCP clients.

/mcp                       the lobby: list tasks, start episodes
/tasks/TASK/mcp            one task; the MCP session is the episode
/tasks/random/mcp          a task drawn at random (?split=NAME&needs=WORD&without=WORD&seed=N&order=ORDER)
/episodes/EPISODE/mcp      an episode's own address
/healthz                   is the server up
/.well-known/decathlon-key the key that verdicts are signed with
"""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Names this server answers to, for the check of Host and Origin against DNS rebinding."""

    names: tuple[str, ...] = ("127.0.0.1", "localhost", "[::1]")

    def security(self) -> TransportSecuritySettings:
        hosts = [pattern for name in self.names for pattern in (name, f"{name}:*")]
        origins = [f"{scheme}://{host}" for scheme in ("http", "https") for host in hosts]
        return TransportSecuritySettings(
            enable_dns_rebinding_protection=True, allowed_hosts=hosts, allowed_origins=origins
        )


class Addresses:
    """The ASGI endpoints over the three servers: task, episode, lobby."""

    def __init__(
        self, episodes: EpisodeRegistry, tokens: Tokens, hosts: Hosts, public_url: str | None = None
    ) -> None:
        self._episodes = episodes
        self._tokens = tokens
        self._public_url = public_url.rstrip("/") if public_url else None
        idle = episodes.idle_seconds

        def managed(server: EpisodeServer | Lobby, *, owns: bool) -> SessionManager:
            return SessionManager(
                server.server,
                security=hosts.security(),
                idle_seconds=idle,
                max_body_bytes=MAX_BODY_BYTES,
                ended=_let_go if owns else lambda request_context: None,
            )

        self.tasks = managed(EpisodeServer(TaskSessionResolver(episodes)), owns=True)
        self.attached = managed(EpisodeServer(AddressResolver()), owns=False)
        self.lobby = managed(Lobby(episodes), owns=False)

    async def serve_task(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        request_context = self._visit(request)
        opener = self.tasks.opening_request_context(request.headers.get(SESSION_HEADER))
        if opener is not None:
            request_context.access = opener.access
        elif SESSION_HEADER not in request.headers and request.method == "POST":
            # Only the handshake opens sessions.
            opens = not is_modern(request.headers.get("mcp-protocol-version", ""))
            request_context.task_id = self._task_id(request, request_context.principal, draws=opens)
            if opens:
                self._episodes.refuse_unless_startable(request_context.task_id)
        await self._serve(self.tasks, request_context, request, send)
        if request_context.refused:
            await self.tasks.forget(request_context)

    async def serve_episode(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        handle = request.path_params["episode_id"]
        access = self._episodes.agent_access(handle)
        request_context = self._visit(request, is_known=access is not None)
        request_context.access = access or self._episodes.access(handle, request_context.principal)
        await self._serve(self.attached, request_context, request, send)

    async def serve_lobby(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        await self._serve(self.lobby, self._visit(request), request, send)

    def _visit(self, request: Request, *, is_known: bool = False) -> RequestContext:
        """`is_known`: by an address that only an agent has been given; then it needs no token."""
        principal = self._tokens.principal(request.headers.get("authorization"))
        if is_known:
            principal = Principal()
        if principal is None:
            raise _Unauthorized
        session = request.headers.get(SESSION_HEADER)
        return RequestContext(
            principal=Principal(token=principal.token, role=principal.role, session=session),
            path=request.scope["path"],
            public_url=self._public_url,
        )

    def _task_id(self, request: Request, principal: Principal, *, draws: bool) -> str:
        """The task that the address names, or draws where one is to be opened.

        Raises UnknownTaskError, BadRequestError, AtCapacityError.
        """
        task_id = request.path_params["task_id"]
        if task_id != RANDOM:
            self._episodes.catalogue.find(task_id)
        elif draws:
            return self._episodes.draw(_asked(request.query_params), principal)
        return task_id

    async def _serve(
        self, manager: SessionManager, request_context: RequestContext, request: Request, send: Send
    ) -> None:
        session = request.headers.get(SESSION_HEADER)
        opener = manager.opening_request_context(session)
        if opener is not None and (opener.path, opener.principal.token) != (
            request_context.path,
            request_context.principal.token,
        ):
            await _refusal(404, INVALID_PARAMS, "Session not found")(request.scope, request.receive, send)
            return
        receive = request.receive
        if request.method == "POST":
            body, receive = await _read(receive)
            request_context.streams = wants_stream(body, request.headers.get("accept", ""))
            answer_as_json(not request_context.streams)
        request.scope[SCOPE_KEY] = request_context
        current_request_context.set(request_context)
        with request_context.access.episode.hold() if request_context.access is not None else nullcontext():
            await manager.handle_request(request.scope, receive, send)


class _Unauthorized(Exception):  # noqa: N818
    """No token, or none we know."""


def _asked(parameters: QueryParams) -> Draw:
    """What an address's parameters ask for; lists with commas, or a parameter more than once."""
    said = {name: parameters.getlist(name) for name in parameters}
    lists = ("needs", "without")
    return parsed(
        Draw,
        RANDOM,
        {name: each if name in lists or len(each) > 1 else each[0] for name, each in said.items()},
    )


def _let_go(request_context: RequestContext) -> None:
    if request_context.access is not None:
        request_context.access.episode.close()


async def _read(receive: Receive) -> tuple[bytes, Receive]:
    """The body, and a `receive` that gives it again; what is too large is left for the SDK to refuse."""
    messages: list[Message] = []
    size = 0
    while True:
        message = await receive()
        messages.append(message)
        size += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body") or size > MAX_BODY_BYTES:
            break
    body = b"".join(message.get("body", b"") for message in messages)
    replay = iter(messages)

    async def again() -> Message:
        return next(replay, None) or await receive()

    return body, again


def _refusal(status: int, code: int, message: str, data: object = None, **headers: str) -> Response:
    """A JSON-RPC error as an HTTP response; clients show its message, and never a header."""
    error = {"code": code, "message": message, **({"data": data} if data is not None else {})}
    return JSONResponse(
        {"jsonrpc": "2.0", "id": None, "error": error},
        status_code=status,
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, DecathlonError)
    headers = {"Retry_After": f"{error.data['retryAfterSeconds']:.0f}"} if error.code == "at_capacity" else {}
    return _refusal(
        STATUS.get(error.code, 500), error_code(error), error.message, error_data(error), **headers
    )


async def _unauthorized(request: Request, error: Exception) -> Response:
    message = "a token is needed: send it as `Authorization: Bearer TOKEN`"
    return _refusal(401, -32001, message, WWW_Authenticate="Bearer")


def http_app(
    episodes: EpisodeRegistry,
    *,
    tokens: Tokens | None = None,
    hosts: Hosts | None = None,
    public_url: str | None = None,
) -> Starlette:
    """The server as an ASGI application; it borrows `episodes`, whose end is its caller's business."""
    addresses = Addresses(episodes, tokens or Tokens(), hosts or Hosts(), public_url)

    async def front(request: Request) -> Response:
        return PlainTextResponse(FRONT)

    async def health(request: Request) -> Response:
        admission = episodes.admission
        return JSONResponse(
            {
                "status": "draining" if episodes.closing else "ok",
                "episodes": len(episodes.live),
                "sandboxes": admission.active,
                "waiting": admission.queued,
            }
        )

    async def key(request: Request) -> Response:
        return JSONResponse(episodes.signer.public.to_json())

    managers = (addresses.tasks, addresses.attached, addresses.lobby)

    async def end_streams() -> None:
        """Before the server waits for its connections to close: these never would by themselves."""
        await episodes.drained.wait()
        for manager in managers:
            manager.end_streams()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        async with AsyncExitStack() as running:
            for manager in managers:
                await running.enter_async_context(manager.run())
            (await running.enter_async_context(background_tasks())).start_soon(end_streams)
            yield

    return Starlette(
        routes=[
            Route("/", front),
            Route("/healthz", health),
            Route("/.well-known/decathlon-key", key),
            Route("/mcp", _Endpoint(addresses.serve_lobby)),
            Route("/tasks/{task_id}/mcp", _Endpoint(addresses.serve_task)),
            Route("/episodes/{episode_id}/mcp", _Endpoint(addresses.serve_episode)),
        ],
        exception_handlers={DecathlonError: _refused, _Unauthorized: _unauthorized},
        lifespan=lifespan,
    )


class _Endpoint:
    """An ASGI callable that Starlette routes to as it is, whatever the method.

    Spaces around a header's value are no part of it (RFC 9110 5.5). Of uvicorn's two parsers httptools, which
    it takes where it is installed, leaves those behind the value, and the SDK compares values as they are.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["headers"] = [(name, value.strip(b" \t")) for name, value in scope["headers"]]
        await self._app(scope, receive, send)
