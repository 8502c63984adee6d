"""The addresses of MCP over HTTP: from a request's head to the service that answers it, and its session."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple, Self

import anyio
from anyio.abc import TaskGroup
from msgspec import Raw
from starlette.datastructures import QueryParams
from starlette.types import Scope, Send

from decathlon_mcp.background import LazyTimer, background_tasks, run_alone, run_for_ever
from decathlon_mcp.catalogue.draws import TaskFilter
from decathlon_mcp.episodes.call import check_operation
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.errors import BadRequestError, DecathlonError
from decathlon_mcp.events import RequestRead
from decathlon_mcp.http.authentication import Tokens
from decathlon_mcp.http.bodies import BodyDisconnectError, BodyReader
from decathlon_mcp.http.errors import refusal
from decathlon_mcp.labels import merge_labels, parse_labels, read_label_header
from decathlon_mcp.protocol.episode_service import EPISODE_KEY, EpisodeService, TaskService
from decathlon_mcp.protocol.headers import SESSION, VERSION, Headers, check_argument_headers, check_routing
from decathlon_mcp.protocol.lobby import Lobby
from decathlon_mcp.protocol.lobby_tools import validate
from decathlon_mcp.protocol.messages import (
    CALL,
    CANCELLED,
    DISCOVER,
    INITIALIZE,
    INVALID_REQUEST,
    LIST,
    OPERATION_KEY,
    EventId,
    Kind,
    McpError,
    Message,
    Params,
    check_version,
    read_batch,
    read_message,
)
from decathlon_mcp.protocol.requests import (
    START_TOOL,
    Request,
    RequestContext,
    Respond,
    Result,
    Service,
    require_room,
)
from decathlon_mcp.protocol.responses import (
    PING,
    PING_SECONDS,
    HttpRequest,
    event_frame,
    send_body,
    send_event_head,
    send_whole,
    wait_until_disconnected,
)
from decathlon_mcp.protocol.sessions import AddressKind, Session, Sessions, Stream, delete_unused
from decathlon_mcp.protocol.stdio import LineServer, batch_fault
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.validation import quoted

log = logging.getLogger("decathlon.edge")

UNUSED_SECONDS = 60.0
"""Time between two searches for sessions that no client has used for the idle time."""
END_STREAM_SECONDS = 1.0
"""Time after which the first GET stream of a revived session is ended. Clients of the Python SDK give up a
stream that broke twice, unless it ended by itself in between."""
RANDOM_TASK = "random"
"""Name in a task's address that stands for a drawn task."""
LABEL = "label"
"""Parameter of a task's address, `NAME=VALUE`; it can be repeated."""
LIST_PARAMETERS = frozenset({"needs", "without"})
MAX_PARAMETERS = 100
"""Parameters in a query. To group them takes quadratic time."""
_METHODS = ("GET", "POST", "DELETE")


@dataclass(frozen=True, slots=True)
class StartParameters:
    """What the query of a task's address says about the episode that starts there.

    `draw`: the filters of the random address.
    """

    labels: Mapping[str, str]
    draw: TaskFilter

    @classmethod
    def read(cls, query: QueryParams, task: str) -> Self:
        """Raises BadRequestError for parameters that do not fit."""
        if len(query.multi_items()) > MAX_PARAMETERS:
            raise BadRequestError(f"{quoted(task)}: more than {MAX_PARAMETERS} parameters")
        values: Mapping[str, object] = {
            name: items if name in LIST_PARAMETERS or len(items) > 1 else items[0]
            for name, items in ((name, query.getlist(name)) for name in query if name != LABEL)
        }
        if values and task != RANDOM_TASK:
            raise BadRequestError(
                f"a task's address has no parameter {', '.join(map(quoted, values))}; it takes `{LABEL}`"
            )
        return cls(parse_labels(query.getlist(LABEL)), validate(TaskFilter, RANDOM_TASK, values))


class Address(NamedTuple):
    """An MCP address. `name`: the task's or the episode's in it; `path`: without a slash at the end."""

    kind: AddressKind
    name: str
    path: str


def address_of(scope: Scope) -> Address | None:
    """The MCP address of an HTTP request; None if it is at another one."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    path = path.removesuffix("/") if path.endswith("/mcp/") else path
    match path.split("/"):
        case ["", "mcp"]:
            return Address("lobby", "", path)
        case ["", "tasks" | "episodes" as folder, name, "mcp"] if name:
            return Address("task" if folder == "tasks" else "episode", name, path)
        case _:
            return None


class McpEndpoints:
    """Serves all MCP addresses: `/mcp`, `/tasks/TASK/mcp` and `/episodes/EPISODE/mcp`."""

    def __init__(
        self,
        registry: EpisodeRegistry,
        tokens: Tokens,
        bodies: BodyReader,
        public_url: str | None = None,
        *,
        has_page: bool = False,
    ) -> None:
        self._registry = registry
        self._tokens = tokens
        self._bodies = bodies
        self._public_url = public_url.rstrip("/") if public_url else None
        self._has_page = has_page
        self._tasks: TaskGroup | None = None
        self._services: dict[AddressKind, Service] = {
            "task": TaskService(registry),
            "episode": EpisodeService(registry),
            "lobby": Lobby(registry),
        }
        self._sessions = {kind: Sessions(registry, kind) for kind in self._services}

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Sessions can be opened in the body; on exit all of them end."""
        async with background_tasks() as self._tasks:
            self._tasks.start_soon(run_alone, self._end_streams_after_drain)
            self._tasks.start_soon(run_for_ever, self._end_unused_sessions)
            try:
                yield
            finally:
                for sessions in self._sessions.values():
                    sessions.close_all()
        self._tasks = None

    def _start_soon(self, function: Callable[[], Awaitable[object]]) -> None:
        if self._tasks is not None:
            self._tasks.start_soon(run_alone, function)

    async def _end_streams_after_drain(self) -> None:
        # At shutdown uvicorn waits for open connections, and a client's GET stream never ends by itself.
        await self._registry.shutdown.drained.wait()
        for sessions in self._sessions.values():
            sessions.end_streams()

    async def _end_unused_sessions(self) -> None:
        while True:
            await anyio.sleep(min(UNUSED_SECONDS, self._registry.options.limits.idle_seconds / 10))
            for sessions in self._sessions.values():
                sessions.end_idle()
            try:
                delete_unused(self._registry, self._sessions.values())
            except DecathlonError as error:
                log.warning("unused sessions could not be deleted", extra=fields(why=error.message))

    # a request

    async def serve(self, address: Address, context: RequestContext) -> None:
        """Serve a request at one of the addresses."""
        scope, receive, _ = context.http
        method, headers, message = scope["method"], context.headers, None
        context.path, context.public_url, context.has_page = address.path, self._public_url, self._has_page
        try:
            if method == "POST":
                self._authenticate(address, context)
                async with self._bodies.read(headers, receive) as body:
                    self._registry.events.emit(RequestRead(len(body)))
                    batch = read_batch(body)
                    message = read_message(body) if batch is None else None
                    self._find_subject(address, context)
                    if message is None:
                        await self._serve_batch(address, context, batch or [])
                    elif message.is_request:
                        await self._serve_request(address, context, message)
                    else:
                        await self._serve_notification(address, context, message)
                return
            self._bodies.check_length(headers)
            if method in _METHODS and not headers.is_sessionless:
                self._authenticate(address, context)
                self._find_subject(address, context)
                await (self._get if method == "GET" else self._delete)(address, context)
                return
            allow = "POST" if headers.is_sessionless else ", ".join(_METHODS)
            response = refusal(McpError(INVALID_REQUEST, "Method Not Allowed", status=405), allow=allow)
        except BodyDisconnectError:
            return
        except (McpError, DecathlonError) as error:
            request_id = message.id if message is not None and message.is_request else None
            response = refusal(error, request_id, is_sessionless=headers.is_sessionless)
        await response(*context.http)

    # what is known of a request

    def _authenticate(self, address: Address, context: RequestContext) -> None:
        """Note whose request it is. Raises McpError."""
        if address.kind == "episode":
            context.access = self._registry.agent_access(address.name)
            context.by_agent_id = context.access is not None
        # The agent id is enough, without a token: with a token an agent could start other episodes of the
        # task and evaluate guesses there.
        if not context.by_agent_id:
            context.principal = self._tokens.require(context.headers.text(b"authorization"))
        context.principal = context.principal.in_session(context.headers.text(SESSION))

    def _find_subject(self, address: Address, context: RequestContext) -> None:
        """Find the episode or the task of the address. Raises UnknownEpisodeError, UnknownTaskError."""
        if address.kind == "episode" and context.access is None:
            context.access = self._registry.access(address.name, context.principal)
        if address.kind == "task" and SESSION not in context.headers and address.name != RANDOM_TASK:
            self._registry.catalogue.find(address.name)

    def _prepare_start(self, name: str, context: RequestContext) -> None:
        """Note the task that `initialize` starts, drawn at the random address, and its labels.

        Raises BadRequestError, AtCapacityError, NotRunnableError.
        """
        parameters = StartParameters.read(QueryParams(context.http[0]["query_string"]), name)
        context.task_id = name
        if name == RANDOM_TASK:
            context.task_id = self._registry.draw(parameters.draw, context.principal)
        context.labels = merge_labels(parameters.labels, read_label_header(context.label_header))
        # Before there is a session, so that a refusal leaves nothing behind.
        self._registry.refuse_unless_startable(context.task_id, context.principal)

    def _session_of(self, address: Address, context: RequestContext) -> Session:
        """The session that a request names. Raises McpError."""
        session_id = context.headers.text(SESSION)
        if session_id is None:
            raise McpError(INVALID_REQUEST, "Bad Request: Missing session ID", status=400)
        session = self._sessions[address.kind].find(session_id, context)
        if session is None:
            # The same for a session of another path or token: a client must not be able to tell. On 404 it
            # initializes a new session, as the protocol requires; 403 would make it give up.
            raise McpError(INVALID_REQUEST, "Session not found", status=404)
        if address.kind == "task":
            context.access = session.access
        return session

    # messages

    async def _serve_request(self, address: Address, context: RequestContext, message: Message) -> None:
        service, headers, session = self._services[address.kind], context.headers, None
        _check_accepts(headers)
        if headers.is_sessionless:
            await check_routing(message, headers)
        elif message.method != INITIALIZE or SESSION in headers:
            session = self._session_of(address, context)
        else:
            await self._open_session(address, context, message)
            return
        version = headers.text(VERSION) or "" if session is None else session.version
        if message.method == INITIALIZE and session is not None:
            version = message.handshake_version
        request = self._request(message, context, session, version)
        if session is None and request.method == CALL:
            schema = service.schema_with_headers(context, request.name)
            if schema is not None:
                await check_argument_headers(schema, request.arguments, headers, request.id)
        request.starts_episode = request.name == START_TOOL and context.access is None
        await self._serve(request, address, service.respond)

    async def _open_session(self, address: Address, context: RequestContext, message: Message) -> None:
        """Serve `initialize` of a client without a session."""
        service, sessions = self._services[address.kind], self._sessions[address.kind]
        if address.kind == "task":
            self._prepare_start(address.name, context)
        version = message.handshake_version
        opened = sessions.create(version, context)

        async def respond(request: Request) -> Result:
            result = await service.respond(request)
            opened.access = context.access if address.kind == "task" else None
            sessions.add(opened)
            return result

        request = self._request(message, context, opened, version)
        request.starts_episode = address.kind == "task"
        await self._serve(request, address, respond)
        if context.abandoned:
            sessions.end(opened)

    def _request(
        self,
        message: Message,
        context: RequestContext,
        session: Session | None,
        version: str,
        resumed: EventId | None = None,
    ) -> HttpRequest:
        if session is not None:
            require_room(len(session.requests))
        return HttpRequest(message, context, session, version, start_soon=self._start_soon, resumed=resumed)

    async def _serve(self, request: HttpRequest, address: Address, respond: Respond) -> None:
        # At a task's address clients send some requests before they know whether anybody will play.
        is_use = address.kind != "task" or request.method not in (INITIALIZE, DISCOVER)
        try:
            await request.serve(respond, is_use=is_use)
        finally:
            if request.session is not None:
                self._sessions[address.kind].save(request.session)

    async def _serve_notification(self, address: Address, context: RequestContext, message: Message) -> None:
        """Serve a notification or a response. Raises McpError, BadRequestError, UnknownEpisodeError."""
        session, access = None, context.access
        _check_accepts(context.headers)
        if not context.headers.is_sessionless:
            session, access = self._session_of(address, context), context.access
        elif message.is_response:
            fault = "the body must be one JSON-RPC request or notification"
            raise McpError(INVALID_REQUEST, fault, status=400)
        else:
            check_version(context.headers.text(VERSION))
        if access is not None:
            access.episode.lease.acquire(use=address.kind != "task").release()
        if message.method == CANCELLED and OPERATION_KEY in message.meta:
            # At the lobby the notification names the operation's episode.
            operation = check_operation(message.meta[OPERATION_KEY])
            if access is None:
                access = self._registry.access(str(message.meta.get(EPISODE_KEY)), context.principal)
            access.episode.calls.cancel(operation)
        if message.method == CANCELLED and session is not None and message.params is not None:
            session.cancel(message.params.request_id)
        await send_whole(context.http[2], status=202, session=session)

    async def _serve_batch(self, address: Address, context: RequestContext, items: list[Raw]) -> None:
        """Serve a batch: one body with all answers."""
        session = None if context.headers.is_sessionless else self._session_of(address, context)
        fault = batch_fault(items, session)
        if session is None or fault:
            raise McpError(INVALID_REQUEST, fault, status=400)

        async def write(line: bytes) -> None:
            session.send(line)

        lines = LineServer(self._services[address.kind], write, lambda: context, session)
        hold = None if context.access is None else context.access.episode.lease.acquire()
        try:
            answer = await (await lines.begin_batch(items))()
        finally:
            if hold is not None:
                hold.release()
        self._sessions[address.kind].save(session)
        await send_whole(context.http[2], answer, status=200 if answer else 202, session=session)

    # streams

    async def _delete(self, address: Address, context: RequestContext) -> None:
        """End a session."""
        session = self._session_of(address, context)
        self._sessions[address.kind].end(session)
        await send_whole(context.http[2], session=session)

    async def _get(self, address: Address, context: RequestContext) -> None:
        """Serve a session's stream, or a client that comes back for an answer."""
        session, send = self._session_of(address, context), context.http[2]
        if not context.headers.accepts[1]:
            raise _not_acceptable("text/event-stream")
        last = context.headers.text(b"last-event-id")
        if not last:
            await self._serve_stream(address, context, session)
            return
        event_id = EventId.parse(last)
        if event_id is None or not session.generation:
            text = "Last-Event-ID: this is no id of an event of this server"
            raise McpError(INVALID_REQUEST, text, status=400)
        if event_id.is_answer:
            # That was all.
            await send_event_head(send, session)
            await send_body(send, b"", more=False)
            return
        method = LIST if event_id.kind is Kind.LIST else CALL
        message = Message(id=event_id.request, method=method, params=Params(name=""))
        request = self._request(message, context, session, session.version, event_id)
        request.starts_episode = event_id.kind is Kind.START
        service = self._services[address.kind]
        await self._serve(request, address, service.respond_again(event_id.kind, event_id.agent))

    async def _serve_stream(self, address: Address, context: RequestContext, session: Session) -> None:
        """Serve a session's own stream until its client leaves, or it is ended."""
        _, receive, send = context.http
        access = context.access
        hold = None if access is None else access.episode.lease.acquire()
        stream = session.open_stream()
        timer = LazyTimer(stream.end)
        if session.ends_stream:
            session.ends_stream = False
            timer.set(asyncio.get_running_loop().time() + END_STREAM_SECONDS)
        try:
            await send_event_head(send, session)
            async with background_tasks() as tasks:
                tasks.start_soon(run_alone, wait_until_disconnected, receive, stream.lose)
                await _send_messages(stream, send)
            if not stream.is_lost:
                await send_body(send, b"", more=False)
        finally:
            timer.stop()
            session.close_stream(stream)
            if hold is not None:
                hold.release(answered=not stream.is_lost)
        if stream.is_lost and access is not None and address.kind == "task" and not session.streams:
            # A client that dies loses all its connections.
            access.episode.lease.lose_client()


def _check_accepts(headers: Headers) -> None:
    """Raise McpError for a POST whose client does not take the answer."""
    takes_json, takes_events = headers.accepts
    if not takes_json or (headers.is_sessionless and not takes_events):
        raise _not_acceptable("both application/json and text/event-stream")


def _not_acceptable(media_types: str) -> McpError:
    return McpError(INVALID_REQUEST, f"Not Acceptable: Client must accept {media_types}", status=406)


async def _send_messages(stream: Stream, send: Send) -> None:
    """Send a stream's messages until it is over, and comments while there are none."""
    while True:
        message, is_silent = None, True
        with anyio.move_on_after(PING_SECONDS):
            message, is_silent = await stream.next(), False
        if message is None and not is_silent:
            return
        await send_body(send, PING if message is None else event_frame(message), more=True)
