"""The endpoints of the three kinds of MCP address: what is checked before a request reaches an MCP server."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

import anyio
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from decathlon_mcp.background import background_tasks, run_alone, run_for_ever
from decathlon_mcp.episodes.operations import check_operation
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.episodes.state import NOT_READY
from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.http.authentication import AllowedHosts, Tokens
from decathlon_mcp.http.bodies import (
    SMALL_BODY_BYTES,
    SMALL_DECODED_BYTES,
    BodyDisconnectError,
    BodyError,
    BodyReader,
    decoded_bytes,
    is_short,
    read_short,
    replay,
)
from decathlon_mcp.http.errors import (
    UnauthorizedError,
    refuse,
    session_not_found,
)
from decathlon_mcp.http.metering import ResponseMeter
from decathlon_mcp.http.presence import Presence, serve_start
from decathlon_mcp.http.requests import RANDOM_TASK, StartParameters
from decathlon_mcp.labels import LABEL_HEADER, merge_labels, read_label_header
from decathlon_mcp.protocol.context import SCOPE_KEY, RequestContext, current_request_context
from decathlon_mcp.protocol.episode_server import AddressResolver, EpisodeServer, TaskSessionResolver
from decathlon_mcp.protocol.exchanges import Exchange, Serve, send_body, send_event_head
from decathlon_mcp.protocol.lobby import EPISODE_KEY, Lobby
from decathlon_mcp.protocol.recognition import LABELS, SESSION, Recognition, read_headers
from decathlon_mcp.protocol.requests import CANCELLED, LAST_EVENT_KEY, OPERATION_KEY, Envelope, EventId
from decathlon_mcp.protocol.results import is_sessionless
from decathlon_mcp.protocol.sdk import use_json_response
from decathlon_mcp.protocol.sessions import (
    AddressKind,
    SavedSession,
    SavedSessions,
    SessionManager,
    delete_unused,
)
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject

log = logging.getLogger("decathlon.edge")

SESSION_HEADER = SESSION.decode()
UNUSED_SECONDS = 60.0
"""Time between two searches for stored sessions that no client has used for the idle time."""


@dataclass(frozen=True, slots=True)
class _Address:
    """One of the three kinds of MCP address. `recognition`: None if the SDK is to serve all requests."""

    manager: SessionManager
    server: EpisodeServer | Lobby
    recognition: Recognition | None


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
        has_page: bool = False,
        exchanges: bool = True,
    ) -> None:
        self._registry = registry
        self._tokens = tokens
        self._hosts = hosts
        self._bodies = bodies
        self._public_url = public_url.rstrip("/") if public_url else None
        self._has_page = has_page
        self._exchanges = exchanges
        # Only at a task's address does the episode end with its session.
        self._tasks = self._address("task", EpisodeServer(TaskSessionResolver(registry), registry.spans))
        self._episodes = self._address("episode", EpisodeServer(AddressResolver(), registry.spans))
        self._lobby = self._address("lobby", Lobby(registry))
        self._by_kind = {"tasks": self._tasks, "episodes": self._episodes}
        self.managers = tuple(each.manager for each in (self._tasks, self._episodes, self._lobby))
        self._presence = Presence()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Sessions can be opened in the body; on exit all of them end."""
        async with AsyncExitStack() as stack:
            for manager in self.managers:
                await stack.enter_async_context(manager.run())
            tasks = await stack.enter_async_context(background_tasks())
            tasks.start_soon(run_alone, self._close_streams_after_drain)
            if self._registry.store is not None:
                tasks.start_soon(run_for_ever, self._delete_unused_sessions)
            yield

    async def _close_streams_after_drain(self) -> None:
        # At shutdown uvicorn waits for open connections, and a client's GET stream never ends by itself.
        await self._registry.drained.wait()
        for manager in self.managers:
            manager.close_standalone_streams()

    async def _delete_unused_sessions(self) -> None:
        while True:
            await anyio.sleep(min(UNUSED_SECONDS, self._registry.idle_seconds))
            is_open: dict[str, SavedSession] = {}
            for manager in self.managers:
                is_open |= manager.saved
            try:
                delete_unused(self._registry, is_open)
            except DecathlonError as error:
                log.warning("unused sessions could not be deleted", extra=fields(why=error.message))

    def _accepts(self, headers: Mapping[bytes, bytes]) -> bool:
        return self._hosts.refusal("POST", headers.items()) is None

    def _address(self, kind: AddressKind, server: EpisodeServer | Lobby) -> _Address:
        store = self._registry.store
        manager = SessionManager(
            server.server,
            idle_seconds=self._registry.idle_seconds,
            max_body_bytes=self._bodies.max_bytes,
            max_sessions=self._registry.options.max_sessions,
            share_per_token=self._registry.admission.share_per_token,
            on_close=_close_episode if kind == "task" else lambda request_context: None,
            saved=None if store is None else SavedSessions(store, self._registry, kind),
        )
        recognition = Recognition(
            manager, self._accepts, sessionless=kind != "task", of_episode=kind != "lobby"
        )
        return _Address(manager, server, recognition if self._exchanges else None)

    async def serve_first(self, scope: Scope, receive: Receive, send: Send, app: ASGIApp) -> None:
        """Serve a short request for tools, as most are; `app` serves all others.

        Those include all that are refused, so that there is one place for each refusal.
        """
        candidate = self._candidate(scope)
        if candidate is None:
            await app(scope, receive, send)
            return
        address, recognition, context, headers = candidate
        try:
            body = await read_short(receive)
        except BodyDisconnectError:
            return
        exchange = None
        with suppress(BodyError):
            if decoded_bytes(body) <= SMALL_DECODED_BYTES:
                exchange = recognition.prepare(headers, body, context, scope)
        if exchange is None:
            await app(scope, replay(body, receive), send)
            return
        meter = ResponseMeter(self._registry.metrics, scope)
        self._registry.metrics.request_bytes.inc(len(body))
        await self._serve_exchange(address, exchange, scope, receive, meter.metered(send))

    def _candidate(
        self, scope: Scope
    ) -> tuple[_Address, Recognition, RequestContext, Mapping[bytes, bytes]] | None:
        """What is known of a request that may be served first, by address and headers; None for others."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["root_path"]:
            return None
        _, kind, name, *rest = (*scope["path"].split("/"), "", "")[:5]
        is_lobby = (kind, name) == ("mcp", "")
        address = self._lobby if is_lobby else self._by_kind.get(kind)
        if address is None or address.recognition is None or (not is_lobby and rest != ["mcp", ""]):
            return None
        headers = read_headers(scope)
        # The responses to requests of pages have further headers.
        if headers is None or b"origin" in headers or not is_short(headers):
            return None
        try:
            context = self._direct_context(address, scope["path"], name, headers)
        except (DecathlonError, UnauthorizedError):
            return None
        session_id = context.principal.session
        if session_id is not None and (
            not address.manager.is_live(session_id) or address.manager.belongs_to_other(session_id, context)
        ):
            return None
        return address, address.recognition, context, headers

    def _direct_context(
        self, address: _Address, path: str, name: str, headers: Mapping[bytes, bytes]
    ) -> RequestContext:
        """The context of a request to an episode or to the lobby, or in a session at a task's address.

        `name`: that of the task, or the episode's id. Raises UnauthorizedError, UnknownEpisodeError.
        """
        authorization, session = (
            None if value is None else value.decode("latin-1")
            for value in (headers.get(b"authorization"), headers.get(SESSION))
        )
        if address is self._episodes:
            return self._episode_context(name, path, authorization, session)
        context = self._context(path, self._principal(authorization), session)
        context.label_header = headers.get(LABELS, b"").decode("latin-1")
        opener = address.manager.opener(session)
        context.access = None if opener is None else opener.access
        return context

    async def _serve_exchange(
        self, address: _Address, exchange: Exchange, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Serve a request for tools without the SDK."""
        context, resumed = exchange.context, exchange.resumed
        scope[SCOPE_KEY] = context
        serve = address.server.respond
        if resumed is not None:
            serve = partial(address.server.serve_again, kind=resumed.kind, agent=resumed.agent)
        if address is self._lobby:
            await self._serve_at_lobby(exchange, serve, receive, send)
            return
        if context.access is None:
            # A session of an earlier server, whose episode this one does not know.
            await exchange.serve(serve, receive, send)
            return
        episode = context.access.episode
        waits = exchange.watched = episode.state.phase in NOT_READY
        session = self._episode_session(address.manager, context)
        with self._presence.holding(episode, receive, session=session) as in_progress:

            def on_gone() -> None:
                if in_progress.release() and waits:
                    episode.lease.lose_client(until_ready=True)

            exchange.on_gone = on_gone
            try:
                await exchange.serve(serve, receive, send)
            finally:
                in_progress.answered = exchange.answered

    async def _serve_at_lobby(self, exchange: Exchange, serve: Serve, receive: Receive, send: Send) -> None:
        starts = exchange.starts_episode
        exchange.watched = starts
        try:
            await exchange.serve(serve, receive, send)
        finally:
            if starts and not exchange.answered and not exchange.context.abandoned:
                exchange.context.abandon()
            if exchange.connection is not None and exchange.session_id is not None:
                self._lobby.manager.save_state(exchange.session_id, exchange.connection)

    async def serve_task(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve `/tasks/{task_id}/mcp`."""
        request = Request(scope, receive)
        request_context = self._request_context(request)
        session_id = request.headers.get(SESSION_HEADER)
        await self._tasks.manager.revive(session_id, request_context)
        opener = self._tasks.manager.opener(session_id)
        if opener is not None:
            request_context.access = opener.access
        elif SESSION_HEADER not in request.headers and request.method == "POST":
            starts_episode = _has_handshake(request)
            parameters = StartParameters.read(request) if starts_episode else None
            request_context.task_id = self._task_id(request, request_context.principal, parameters)
            if parameters is not None:
                header = read_label_header(request_context.label_header)
                request_context.labels = merge_labels(parameters.labels, header)
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
        context = self._context(
            request.scope["path"], self._principal(headers.get("authorization")), headers.get(SESSION_HEADER)
        )
        context.label_header = ",".join(headers.getlist(LABEL_HEADER))
        return context

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
        return RequestContext(
            principal=principal.in_session(session),
            path=path,
            public_url=self._public_url,
            has_page=self._has_page,
        )

    def _task_id(self, request: Request, principal: Principal, parameters: StartParameters | None) -> str:
        """The id of the task in the address, drawn for `random` if an episode starts with these parameters.

        Raises UnknownTaskError, BadRequestError, AtCapacityError.
        """
        task_id = request.path_params["task_id"]
        if task_id != RANDOM_TASK:
            self._registry.catalogue.find(task_id)
        elif parameters is not None:
            return self._registry.draw(parameters.draw, principal)
        return task_id

    async def _serve(
        self, address: _Address, request_context: RequestContext, request: Request, send: Send
    ) -> None:
        """Serve a request in its request context."""
        manager, session_id = address.manager, request_context.principal.session
        await manager.revive(session_id, request_context)
        if manager.belongs_to_other(session_id, request_context):
            await session_not_found()(request.scope, request.receive, send)
            return
        request.scope[SCOPE_KEY] = request_context
        current_request_context.set(request_context)
        if session_id is None and request.method == "POST" and _has_handshake(request):
            # Before the SDK does, which would answer with a status.
            manager.refuse_if_full(request_context)
        if request.method == "POST":
            with suppress(BodyDisconnectError):
                async with self._bodies.read(request) as body:
                    self._registry.metrics.request_bytes.inc(len(body))
                    await self._serve_post(address, request_context, request, body, send)
            return
        self._bodies.check_length(request)
        event_id = EventId.parse(request.scope.get(LAST_EVENT_KEY, ""))
        if request.method == "GET" and event_id is not None and session_id is not None:
            await self._resume(address, event_id, session_id, request_context, request, send)
            return
        await self._serve_present(manager, manager.handle_request, request_context, request, send)

    async def _resume(
        self,
        address: _Address,
        event_id: EventId,
        session_id: str,
        request_context: RequestContext,
        request: Request,
        send: Send,
    ) -> None:
        """Serve a client that comes back for the answer to an earlier request of its session."""
        exchange = None
        if address.recognition is not None:
            exchange = address.recognition.resume(session_id, event_id, request_context, request.scope)
        if exchange is None:
            await session_not_found()(request.scope, request.receive, send)
        elif event_id.is_answer:
            # That was all.
            await send_event_head(send, session_id)
            await send_body(send, b"", more=False)
        else:
            await self._serve_exchange(address, exchange, request.scope, request.receive, send)

    async def _serve_post(
        self,
        address: _Address,
        request_context: RequestContext,
        request: Request,
        body: bytes,
        send: Send,
    ) -> None:
        manager = address.manager
        if address.recognition is not None:
            headers = read_headers(request.scope)
            exchange = address.recognition.prepare(headers, body, request_context, request.scope)
            if exchange is not None:
                await self._serve_exchange(address, exchange, request.scope, request.receive, send)
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
        request_context.can_stream = envelope.prefers_sse and (
            "text/event-stream" in request.headers.get("accept", "")
        )
        use_json_response(not request_context.can_stream)
        if request_context.access is None and (
            request_context.task_id is not None or envelope.starts_episode
        ):
            await serve_start(app, request_context, request.scope, request.receive, send)
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
        access.episode.calls.cancel(operation)

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

    def _episode_session(self, manager: SessionManager, request_context: RequestContext) -> str | None:
        """The id of the request's session if the session is the episode."""
        session_id = request_context.principal.session
        return (
            session_id if manager is self._tasks.manager and manager.opener(session_id) is not None else None
        )


def _has_handshake(request: Request) -> bool:
    """Whether the request is of a protocol revision with a handshake, as far as its headers say."""
    return not is_sessionless(request.headers.get("mcp-protocol-version", ""))


def _close_episode(request_context: RequestContext) -> None:
    if request_context.access is not None:
        request_context.access.episode.close()
