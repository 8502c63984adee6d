"""The ASGI application: its routes, and what is checked before a request reaches an MCP server."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

import anyio
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from decathlon_mcp.background import background_tasks, run_alone, run_for_ever
from decathlon_mcp.episodes.access import Principal
from decathlon_mcp.episodes.operations import check_operation
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.http.authentication import AllowedHosts, Tokens
from decathlon_mcp.http.bodies import (
    MAX_BODY_BYTES,
    SMALL_BODY_BYTES,
    SMALL_DECODED_BYTES,
    BodyDisconnectError,
    BodyError,
    BodyReader,
    decoded_bytes,
    replay,
)
from decathlon_mcp.http.direct import DirectResponse, HttpApp
from decathlon_mcp.http.errors import (
    Refusals,
    UnauthorizedError,
    handle_body_error,
    handle_unauthorized,
    refuse,
    session_not_found,
)
from decathlon_mcp.http.health import PROBE_PATHS, HealthEndpoints
from decathlon_mcp.http.held import HeldEpisodes
from decathlon_mcp.http.metering import MeteredResponses
from decathlon_mcp.http.presence import Presence, serve_start
from decathlon_mcp.http.requests import RANDOM_TASK, RawEndpoint, draw_from_query
from decathlon_mcp.protocol.context import (
    SCOPE_KEY,
    AddressResolver,
    RequestContext,
    TaskSessionResolver,
    current_request_context,
)
from decathlon_mcp.protocol.envelopes import CANCELLED, Envelope
from decathlon_mcp.protocol.episode_server import EpisodeServer
from decathlon_mcp.protocol.fast_calls import FastCall
from decathlon_mcp.protocol.fast_path import FastPath, read_headers
from decathlon_mcp.protocol.lobby import Lobby
from decathlon_mcp.protocol.relay import EPISODE_KEY, OPERATION_KEY
from decathlon_mcp.protocol.results import is_sessionless
from decathlon_mcp.protocol.revival import AddressKind, SavedSession, SavedSessions, delete_unused
from decathlon_mcp.protocol.sdk import RESUMABLE_KEY, use_json_response
from decathlon_mcp.protocol.sessions import SessionManager
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject

log = logging.getLogger("decathlon.edge")

SESSION_HEADER = "mcp-session-id"
EXPOSED_HEADERS = ("Mcp-Session-Id", "Mcp-Protocol-Version", "Retry-After", "WWW-Authenticate")
"""Headers of a response that a page of an allowed origin may read."""
PREFLIGHT_SECONDS = 7_200
"""How long a browser may rely on the answer to OPTIONS."""
UNUSED_SECONDS = 60.0
"""Time between two searches for stored sessions that no client has used for the idle time."""
INDEX_TEXT = """decathlon-mcp: Toolathlon as an environment for MCP clients.

/mcp                       the lobby: list tasks, start episodes
/tasks/TASK/mcp            one task; the MCP session is the episode
/tasks/random/mcp          a task drawn at random (?split=NAME&needs=WORD&without=WORD&seed=N&order=ORDER)
/episodes/EPISODE/mcp      an episode's own address
/episodes                  POST: an episode that ends with the response
/healthz                   whether the server works, and its state
/readyz                    whether an episode can be started now
/metrics                   metrics for Prometheus
/.well-known/decathlon-key the public key that verdicts are signed with
"""


class McpEndpoints:
    """ASGI endpoints of the three kinds of MCP address: task, episode and lobby."""

    def __init__(
        self,
        registry: EpisodeRegistry,
        tokens: Tokens,
        hosts: AllowedHosts,
        bodies: BodyReader,
        public_url: str | None = None,
        *,
        fast_path: bool = True,
    ) -> None:
        self._registry = registry
        self._tokens = tokens
        self._hosts = hosts
        self._bodies = bodies
        self._public_url = public_url.rstrip("/") if public_url else None
        # Only at a task's address does the episode end with its session.
        self._tasks = self._manager("task", EpisodeServer(TaskSessionResolver(registry)))
        self._episodes = self._manager("episode", EpisodeServer(AddressResolver()))
        self._lobby = self._manager("lobby", Lobby(registry))
        self.managers = (self._tasks, self._episodes, self._lobby)
        self._presence = Presence()
        self._fast_paths: dict[SessionManager, FastPath] = {}
        if fast_path:
            for manager in (self._tasks, self._episodes):
                sessionless = manager is self._episodes
                self._fast_paths[manager] = FastPath(manager, self._accepts, sessionless=sessionless)

    def _accepts(self, headers: Mapping[bytes, bytes]) -> bool:
        return self._hosts.refusal("POST", headers.items()) is None

    def _manager(self, address: AddressKind, server: EpisodeServer | Lobby) -> SessionManager:
        store = self._registry.store
        return SessionManager(
            server.server,
            idle_seconds=self._registry.idle_seconds,
            max_body_bytes=self._bodies.max_bytes,
            max_sessions=self._registry.options.max_sessions,
            share_per_token=self._registry.admission.share_per_token,
            on_close=_close_episode if address == "task" else lambda request_context: None,
            saved=None if store is None else SavedSessions(store, self._registry, address),
        )

    def serve_directly(self, scope: Scope, body: bytes) -> Callable[[DirectResponse], None] | None:
        """A `DirectHandler`: what serves a call that needs no task to begin; None for all other requests.

        Those include all that are refused, so that there is one place for each refusal.
        """
        _, kind, name, *rest = (*scope["path"].split("/"), "", "")[:5]
        manager = {"tasks": self._tasks, "episodes": self._episodes}.get(kind)
        fast_path = None if manager is None else self._fast_paths.get(manager)
        if manager is None or fast_path is None or rest != ["mcp", ""] or scope["root_path"]:
            return None
        headers = read_headers(scope)
        # The responses to requests of pages have further headers.
        if headers is None or b"origin" in headers or b"last-event-id" in headers:
            return None
        try:
            if decoded_bytes(body) > SMALL_DECODED_BYTES:
                return None
            request_context = self._direct_context(manager, scope["path"], name, headers)
        except (BodyError, DecathlonError, UnauthorizedError):
            return None
        session_id = request_context.principal.session
        if session_id is not None and (
            not manager.is_live(session_id) or manager.belongs_to_other(session_id, request_context)
        ):
            return None
        call = fast_path.prepare(headers, body, request_context)
        if call is None:
            return None
        scope[SCOPE_KEY] = request_context
        self._registry.metrics.request_bytes.inc(len(body))
        return partial(self._begin_call, manager, call)

    def _direct_context(
        self, manager: SessionManager, path: str, name: str, headers: Mapping[bytes, bytes]
    ) -> RequestContext:
        """The context of a request to an episode, or of a session at a task's address, if there is one.

        `name`: that of the task, or the episode's id. Raises UnauthorizedError, UnknownEpisodeError.
        """
        authorization, session = (
            None if value is None else value.decode("latin-1")
            for value in (headers.get(b"authorization"), headers.get(SESSION_HEADER.encode()))
        )
        if manager is self._episodes:
            return self._episode_context(name, path, authorization, session)
        request_context = self._context(path, self._principal(authorization), session)
        opener = manager.opener(session)
        request_context.access = None if opener is None else opener.access
        return request_context

    def _begin_call(self, manager: SessionManager, call: FastCall, response: DirectResponse) -> None:
        """Serve a call without the SDK, and without a task as far as possible."""
        in_progress = self._presence.holding(
            call.access.episode,
            response.receive,
            session=self._episode_session(manager, call.request_context),
        )
        in_progress.begin()
        call.begin(response, in_progress)

    async def serve_task(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve `/tasks/{task_id}/mcp`."""
        request = Request(scope, receive)
        request_context = self._request_context(request)
        session_id = request.headers.get(SESSION_HEADER)
        await self._tasks.revive(session_id, request_context, request)
        opener = self._tasks.opener(session_id)
        if opener is not None:
            request_context.access = opener.access
        elif SESSION_HEADER not in request.headers and request.method == "POST":
            starts_episode = _has_handshake(request)
            request_context.task_id = self._task_id(request, request_context.principal, draw=starts_episode)
            if starts_episode:
                # Before the SDK makes a session, so that a refusal leaves nothing behind.
                self._registry.refuse_unless_startable(request_context.task_id, request_context.principal)
        await self._serve(self._tasks, request_context, request, send)

    async def serve_episode(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve `/episodes/{episode_id}/mcp`, where the id is a handle or an agent id."""
        request = Request(scope, receive)
        request_context = self._episode_context(
            request.path_params["episode_id"],
            scope["path"],
            request.headers.get("authorization"),
            request.headers.get(SESSION_HEADER),
        )
        await self._serve(self._episodes, request_context, request, send)

    async def serve_lobby(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve `/mcp`."""
        request = Request(scope, receive)
        await self._serve(self._lobby, self._request_context(request), request, send)

    def _request_context(self, request: Request) -> RequestContext:
        """A context for the request. Raises UnauthorizedError."""
        headers = request.headers
        return self._context(
            request.scope["path"], self._principal(headers.get("authorization")), headers.get(SESSION_HEADER)
        )

    def _episode_context(
        self, episode_id: str, path: str, authorization: str | None, session: str | None
    ) -> RequestContext:
        """A context with access to the episode of this handle or agent id.

        Raises UnauthorizedError, UnknownEpisodeError.
        """
        access = self._registry.agent_access(episode_id)
        by_agent_id = access is not None
        # The agent id is enough, without a token: with a token an agent could start other episodes of the
        # task and evaluate guesses there.
        principal = Principal() if by_agent_id else self._principal(authorization)
        request_context = self._context(path, principal, session)
        request_context.access = access or self._registry.access(episode_id, request_context.principal)
        request_context.by_agent_id = by_agent_id
        return request_context

    def _principal(self, authorization: str | None) -> Principal:
        """The principal of a request with this header. Raises UnauthorizedError."""
        principal = self._tokens.principal(authorization)
        if principal is None:
            raise UnauthorizedError
        return principal

    def _context(self, path: str, principal: Principal, session: str | None) -> RequestContext:
        return RequestContext(principal=principal.in_session(session), path=path, public_url=self._public_url)

    def _task_id(self, request: Request, principal: Principal, *, draw: bool) -> str:
        """The id of the task in the address, drawn for `random` if `draw` is set.

        Raises UnknownTaskError, BadRequestError, AtCapacityError.
        """
        task_id = request.path_params["task_id"]
        if task_id != RANDOM_TASK:
            self._registry.catalogue.find(task_id)
        elif draw:
            return self._registry.draw(draw_from_query(request.query_params), principal)
        return task_id

    async def _serve(
        self, manager: SessionManager, request_context: RequestContext, request: Request, send: Send
    ) -> None:
        """Serve a request in its request context."""
        session_id = request_context.principal.session
        await manager.revive(session_id, request_context, request)
        if manager.belongs_to_other(session_id, request_context):
            await session_not_found()(request.scope, request.receive, send)
            return
        request.scope[SCOPE_KEY] = request_context
        current_request_context.set(request_context)
        if session_id is None and request.method == "POST" and _has_handshake(request):
            # Before the SDK does, which would answer with a status.
            manager.refuse_if_full(request_context)
        if request.method != "POST":
            self._bodies.check_length(request)
            await self._serve_present(manager, manager.handle_request, request_context, request, send)
            return
        with suppress(BodyDisconnectError):
            async with self._bodies.read(request) as body:
                self._registry.metrics.request_bytes.inc(len(body))
                await self._serve_post(manager, request_context, request, body, send)

    async def _serve_post(
        self,
        manager: SessionManager,
        request_context: RequestContext,
        request: Request,
        body: bytes,
        send: Send,
    ) -> None:
        fast_path = self._fast_paths.get(manager)
        call = None
        if fast_path is not None:
            call = fast_path.prepare(read_headers(request.scope), body, request_context)
        if call is not None:
            await self._serve_call(manager, call, request, send)
            return

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            # Here and not further out: what waits for the client's disconnect must not receive the body.
            await manager.handle_request(scope, replay(body, receive), send)

        envelope = Envelope.read(body)
        if envelope.method == CANCELLED and OPERATION_KEY in envelope.meta:
            try:
                self._cancel_call(envelope.meta, request_context)
            except DecathlonError as error:
                await refuse(error)(request.scope, request.receive, send)
                return
        resumable = manager.open_stream(request, body, envelope.method)
        if resumable is not None:
            request.scope[RESUMABLE_KEY], request_context.stream = resumable, resumable.stream
        request_context.can_stream = resumable is not None or (
            envelope.prefers_sse and "text/event-stream" in request.headers.get("accept", "")
        )
        use_json_response(not request_context.can_stream)
        if request_context.access is None and (
            request_context.task_id is not None or envelope.starts_episode
        ):
            grace_seconds = self._registry.options.limits.grace_seconds
            await serve_start(
                app, request_context, request.scope, request.receive, send, grace_seconds=grace_seconds
            )
        else:
            await self._serve_present(manager, app, request_context, request, send)
        if request_context.initialize_failed or request_context.abandoned:
            await manager.discard_opened_by(request_context)
        elif len(body) > SMALL_BODY_BYTES and (session_id := request.headers.get(SESSION_HEADER)):
            manager.forget_message(session_id, SCOPE_KEY, request_context)

    def _cancel_call(self, meta: JsonObject, request_context: RequestContext) -> None:
        """Cancel the call of the operation that a notification names, at the lobby with its episode.

        Raises BadRequestError, UnknownEpisodeError.
        """
        operation, access = check_operation(meta[OPERATION_KEY]), request_context.access
        if access is None:
            access = self._registry.access(str(meta.get(EPISODE_KEY)), request_context.principal)
        access.episode.cancel_call(operation)

    async def _serve_present(
        self,
        manager: SessionManager,
        app: ASGIApp,
        request_context: RequestContext,
        request: Request,
        send: Send,
    ) -> None:
        """Serve a request; the lease of the episode that it concerns does not expire meanwhile."""
        if request_context.access is None:
            await app(request.scope, request.receive, send)
            return
        await self._presence.serve(
            app,
            request_context.access.episode,
            request.scope,
            request.receive,
            send,
            session=self._episode_session(manager, request_context),
        )

    async def _serve_call(
        self, manager: SessionManager, call: FastCall, request: Request, send: Send
    ) -> None:
        """Serve a call without the SDK."""
        session = self._episode_session(manager, call.request_context)
        in_progress = self._presence.holding(call.access.episode, request.receive, session=session)
        in_progress.begin()
        await call.serve(request.receive, send, in_progress)

    def _episode_session(self, manager: SessionManager, request_context: RequestContext) -> str | None:
        """The id of the request's session if the session is the episode."""
        session_id = request_context.principal.session
        return session_id if manager is self._tasks and manager.opener(session_id) is not None else None


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
                app = PlainTextResponse(refused.message, refused.status)
        await app(scope, receive, send)


def _has_handshake(request: Request) -> bool:
    """Whether the request is of a protocol revision with a handshake, as far as its headers say."""
    return not is_sessionless(request.headers.get("mcp-protocol-version", ""))


def _close_episode(request_context: RequestContext) -> None:
    if request_context.access is not None:
        request_context.access.episode.close()


def http_app(
    registry: EpisodeRegistry,
    *,
    tokens: Tokens | None = None,
    hosts: AllowedHosts | None = None,
    public_url: str | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    fast_path: bool = True,
) -> HttpApp:
    """The ASGI application. The caller keeps ownership of `registry`.

    `fast_path`: serve tool calls without the SDK where that makes no difference to clients.
    """
    bodies = BodyReader(max_body_bytes)
    tokens, hosts = tokens or Tokens(), hosts or AllowedHosts()
    endpoints = McpEndpoints(registry, tokens, hosts, bodies, public_url, fast_path=fast_path)
    health = HealthEndpoints(registry, tokens)
    held = HeldEpisodes(registry, tokens, bodies, public_url)

    async def index(request: Request) -> Response:
        return PlainTextResponse(INDEX_TEXT)

    async def public_key(request: Request) -> Response:
        return JSONResponse(registry.signer.public.to_json())

    async def close_streams_after_drain() -> None:
        # At shutdown uvicorn waits for open connections, and a client's GET stream never ends by itself.
        await registry.drained.wait()
        for manager in endpoints.managers:
            manager.close_standalone_streams()

    async def delete_unused_sessions() -> None:
        while True:
            await anyio.sleep(min(UNUSED_SECONDS, registry.idle_seconds))
            is_open: dict[str, SavedSession] = {}
            for manager in endpoints.managers:
                is_open |= manager.saved
            try:
                delete_unused(registry, is_open)
            except DecathlonError as error:
                log.warning("unused sessions could not be deleted", extra=fields(why=error.message))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            for manager in endpoints.managers:
                await stack.enter_async_context(manager.run())
            tasks = await stack.enter_async_context(background_tasks())
            tasks.start_soon(run_alone, close_streams_after_drain)
            if registry.store is not None:
                tasks.start_soon(run_for_ever, delete_unused_sessions)
                for manager in endpoints.managers:
                    tasks.start_soon(run_for_ever, manager.expire_answers)
            yield

    app = HttpApp(
        # Calls first: the routes are tried one after the other.
        routes=[
            Route("/tasks/{task_id}/mcp", RawEndpoint(endpoints.serve_task)),
            Route("/episodes/{episode_id}/mcp", RawEndpoint(endpoints.serve_episode)),
            Route("/mcp", RawEndpoint(endpoints.serve_lobby)),
            Route("/episodes", held.serve, methods=["POST"]),
            Route("/", index),
            *health.routes(),
            Route("/.well-known/decathlon-key", public_key),
        ],
        middleware=[
            Middleware(MeteredResponses, metrics=registry.metrics),
            Middleware(
                Cors,
                allow_origins=hosts.origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=EXPOSED_HEADERS,
                max_age=PREFLIGHT_SECONDS,
            ),
            # After the headers of CORS, with which a page of an allowed origin can read the refusal.
            Middleware(RequestCheck, hosts=hosts),
        ],
        exception_handlers={
            DecathlonError: Refusals(bodies),
            UnauthorizedError: handle_unauthorized,
            BodyError: handle_body_error,
        },
        lifespan=lifespan,
    )
    app.direct = endpoints.serve_directly if fast_path else None
    return app
