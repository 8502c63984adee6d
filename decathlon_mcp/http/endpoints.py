"""The addresses of MCP over HTTP: from a request's head to the service that answers it, and its session."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

import anyio
from anyio.abc import TaskGroup
from msgspec import Raw
from starlette.datastructures import QueryParams
from starlette.types import Scope, Send

from decathlon_mcp.background import LazyTimer, background_tasks, run_alone, run_for_ever
from decathlon_mcp.catalogue.draws import TaskFilter
from decathlon_mcp.episodes.call import check_operation
from decathlon_mcp.episodes.episode import EpisodeAccess
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.state import NOT_READY
from decathlon_mcp.errors import BadRequestError, DecathlonError
from decathlon_mcp.http.authentication import Tokens
from decathlon_mcp.http.bodies import BodyDisconnectError, BodyReader
from decathlon_mcp.http.refusals import refusal
from decathlon_mcp.labels import merge_labels, parse_labels, read_label_header
from decathlon_mcp.protocol.episode_service import EPISODE_KEY, EpisodeService, TaskService
from decathlon_mcp.protocol.headers import SESSION, VERSION, Headers, check_argument_headers, check_routing
from decathlon_mcp.protocol.lobby import Lobby
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
    Result,
    Service,
    require_room,
)
from decathlon_mcp.protocol.responses import (
    CONNECTION_KEY,
    PING,
    PING_SECONDS,
    Connection,
    HttpRequest,
    event_frame,
    note_client_gone,
    send_body,
    send_event_head,
    send_whole,
)
from decathlon_mcp.protocol.sessions import Address, AddressKind, Session, Sessions, Stream
from decathlon_mcp.protocol.stdio import LineServer, batch_fault
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.validation import quoted, read_arguments

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


def _read_query(query: QueryParams, task: str) -> tuple[Mapping[str, str], TaskFilter]:
    """The labels of the episode that starts at a task's address, and the filters of a draw.

    Raises BadRequestError for parameters that do not fit.
    """
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
    return parse_labels(query.getlist(LABEL)), read_arguments(TaskFilter, RANDOM_TASK, values)


def address_of(scope: Scope) -> Address | None:
    """The MCP address of an HTTP request; None if it is at another address."""
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
        self._sessions = Sessions(registry)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Sessions can be opened in the body; on exit all of them end."""
        async with background_tasks() as self._tasks:
            self._tasks.start_soon(run_alone, self._end_streams_after_drain)
            self._tasks.start_soon(run_for_ever, self._end_unused_sessions)
            try:
                yield
            finally:
                self._sessions.close_all()
        self._tasks = None

    def _start_soon(self, function: Callable[[], Awaitable[object]]) -> None:
        if self._tasks is not None:
            self._tasks.start_soon(run_alone, function)

    async def _end_streams_after_drain(self) -> None:
        # At shutdown uvicorn waits for open connections, and a client's GET stream never ends by itself.
        await self._registry.shutdown.drained.wait()
        self._sessions.end_streams()

    async def _end_unused_sessions(self) -> None:
        while True:
            await anyio.sleep(min(UNUSED_SECONDS, self._registry.options.limits.idle_seconds / 10))
            try:
                self._sessions.end_unused()
            except DecathlonError as error:
                log.warning("unused sessions could not be deleted", extra=fields(why=error.message))

    # a request

    async def serve(self, context: RequestContext) -> None:
        """Serve a request at `context.address`."""
        scope, receive, send = context.http
        method, headers, message = scope["method"], context.headers, None
        context.public_url, context.has_page = self._public_url, self._has_page
        try:
            if method == "POST":
                self._authenticate(context)
                async with self._bodies.read(headers, receive, context.share_key) as body:
                    context.body_bytes = len(body)
                    batch = read_batch(body)
                    message = read_message(body) if batch is None else None
                    self._find_subject(context)
                    if message is None:
                        await self._serve_batch(context, batch or [])
                    elif message.request_id is not None:
                        await self._serve_request(context, message)
                    else:
                        await self._serve_notification(context, message)
                return
            self._bodies.check_length(headers)
            if method in _METHODS and not headers.is_sessionless:
                self._authenticate(context)
                self._find_subject(context)
                session = self._session_of(context)
                if method == "GET":
                    await self._get(context, session)
                else:
                    self._sessions.end(session)
                    await send_whole(send, session=session)
                return
            allow = "POST" if headers.is_sessionless else ", ".join(_METHODS)
            response = refusal(McpError(INVALID_REQUEST, "Method Not Allowed", status=405), allow=allow)
        except BodyDisconnectError:
            return
        except (McpError, DecathlonError) as error:
            request_id = None if message is None else message.request_id
            response = refusal(error, request_id, is_sessionless=headers.is_sessionless)
        await response(*context.http)

    # what is known of a request

    def _authenticate(self, context: RequestContext) -> None:
        """Note whose request it is. Raises McpError."""
        kind, name, _ = context.address
        if kind == "episode":
            context.access = self._registry.agent_access(name)
            context.by_agent_id = context.access is not None
        # The agent id is enough, without a token: with a token an agent could start other episodes of the
        # task and evaluate guesses there.
        if not context.by_agent_id:
            context.principal = self._tokens.require(context.headers.text(b"authorization"))

    def _find_subject(self, context: RequestContext) -> None:
        """Find the episode or the task of the address. Raises UnknownEpisodeError, UnknownTaskError."""
        kind, name, _ = context.address
        if kind == "episode" and context.access is None:
            episode = self._registry.find(name, context.principal)
            context.access = EpisodeAccess.by_handle(episode, context.principal)
        if kind == "task" and SESSION not in context.headers and name != RANDOM_TASK:
            self._registry.catalogue.find(name)

    def _session_of(self, context: RequestContext) -> Session:
        """The session that a request names. Raises McpError."""
        session_id = context.headers.text(SESSION)
        if session_id is None:
            raise McpError(INVALID_REQUEST, "Bad Request: Missing session ID", status=400)
        session = self._sessions.find(session_id, context)
        if session is None:
            # The same for a session of another path or token: a client must not be able to tell. On 404 it
            # initializes a new session, as the protocol requires; 403 would make it give up.
            raise McpError(INVALID_REQUEST, "Session not found", status=404)
        if context.address.kind == "task":
            context.access = session.access
        return session

    # messages

    async def _serve_request(self, context: RequestContext, message: Message) -> None:
        kind, headers, session = context.address.kind, context.headers, None
        service = self._services[kind]
        _check_accepts(headers)
        if headers.is_sessionless:
            check_routing(message, headers)
            version = headers.text(VERSION) or ""
        elif message.method != INITIALIZE:
            session = self._session_of(context)
            version = session.version
        else:
            version = message.handshake_version
            if SESSION not in headers:
                await self._open_session(context, message, version)
                return
            session = self._session_of(context)
        request = self._request(message, context, session, version)
        if session is None and request.method == CALL:
            schema = service.schema_with_headers(context, request.name)
            if schema is not None:
                await check_argument_headers(schema, request.arguments, headers, request.id)
        request.starts_episode = request.name == START_TOOL and context.access is None
        # At a task's address clients send some requests before they know whether anybody will play.
        await request.serve(
            service.respond, is_use=kind != "task" or request.method not in (INITIALIZE, DISCOVER)
        )
        if request.call is not None:
            # A call whose client has left goes on, and its arguments count as a body that is in flight.
            await request.call.ended()

    async def _open_session(self, context: RequestContext, message: Message, version: str) -> None:
        """Serve `initialize` of a client without a session."""
        is_task = context.address.kind == "task"
        if is_task:
            self._prepare_start(context)
        opened = self._sessions.create(version, context)

        async def respond(request: Request) -> Result:
            result = await self._services[context.address.kind].respond(request)
            opened.access = context.access if is_task else None
            self._sessions.add(opened)
            return result

        request = self._request(message, context, opened, version)
        request.starts_episode = is_task
        await request.serve(respond, is_use=not is_task)
        if context.abandoned:
            self._sessions.end(opened)

    def _prepare_start(self, context: RequestContext) -> None:
        """Note the episode that `initialize` starts, of a drawn task at the random address, and its labels.

        Raises BadRequestError, AtCapacityError, NotRunnableError.
        """
        name, principal = context.address.name, context.principal
        labels, draw = _read_query(QueryParams(context.http[0]["query_string"]), name)
        task = self._registry.draw(draw, principal) if name == RANDOM_TASK else name
        labels = merge_labels(labels, read_label_header(context.label_header))
        # Before there is a session, so that a refusal leaves nothing behind.
        self._registry.refuse_unless_startable(task, principal)
        context.start = partial(self._registry.start, task, principal, labels=labels)

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

    async def _serve_notification(self, context: RequestContext, message: Message) -> None:
        """Serve a notification or a response. Raises McpError, BadRequestError, UnknownEpisodeError."""
        session = None
        _check_accepts(context.headers)
        if not context.headers.is_sessionless:
            session = self._session_of(context)
        elif not message.method:
            fault = "the body must be one JSON-RPC request or notification"
            raise McpError(INVALID_REQUEST, fault, status=400)
        else:
            check_version(context.headers.text(VERSION))
        if (access := context.access) is not None:
            access.episode.lease.acquire(use=context.address.kind != "task").release()
        if message.method == CANCELLED and OPERATION_KEY in message.meta:
            # At the lobby the notification names the operation's episode.
            operation = check_operation(message.meta[OPERATION_KEY])
            if access is None:
                access = self._registry.access(str(message.meta.get(EPISODE_KEY)), context.principal)
            access.episode.calls.cancel(operation)
        if message.method == CANCELLED and session is not None and message.params is not None:
            session.cancel(message.params.request_id)
        await send_whole(context.http[2], status=202, session=session)

    async def _serve_batch(self, context: RequestContext, items: list[Raw]) -> None:
        """Serve a batch: one body with all answers."""
        session = None if context.headers.is_sessionless else self._session_of(context)
        fault = batch_fault(items, session)
        if session is None or fault:
            raise McpError(INVALID_REQUEST, fault, status=400)

        async def write(line: bytes) -> None:
            session.send(line)

        scope, _, send = context.http
        connection: Connection = scope[CONNECTION_KEY]
        lines = LineServer(self._services[context.address.kind], write, lambda: context, session, connection)
        hold, waits, is_sent = None, False, False
        if context.access is not None:
            hold = context.access.episode.lease.acquire()
            waits = context.access.episode.state.phase in NOT_READY
        connection.watch(partial(note_client_gone, context, hold, waits=waits))
        try:
            answer = await (await lines.begin_batch(items))()
            if not await connection.is_gone():
                await send_whole(send, answer, status=200 if answer else 202, session=session)
                is_sent = not connection.is_lost
        finally:
            connection.on_lost = None
            lines.end_batch(handed_over=is_sent)
            if hold is not None:
                hold.release(answered=is_sent)
            elif not is_sent and not context.abandoned:
                context.abandon()

    # streams

    async def _get(self, context: RequestContext, session: Session) -> None:
        """Serve a session's stream, or a client that comes back for an answer."""
        send = context.http[2]
        if not context.headers.accepts[1]:
            raise _not_acceptable("text/event-stream")
        last = context.headers.text(b"last-event-id")
        if not last:
            await self._serve_stream(context, session)
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
        message = Message(jsonrpc="2.0", id=event_id.request, method=method, params=Params(name=""))
        request = self._request(message, context, session, session.version, event_id)
        request.starts_episode = event_id.kind is Kind.START
        service = self._services[context.address.kind]
        await request.serve(partial(service.serve_again, kind=event_id.kind, agent=event_id.agent))

    async def _serve_stream(self, context: RequestContext, session: Session) -> None:
        """Serve a session's own stream until its client leaves, or it is ended."""
        scope, _, send = context.http
        access = context.access
        hold = None if access is None else access.episode.lease.acquire()
        stream = session.open_stream()
        scope[CONNECTION_KEY].watch(stream.lose)
        timer = LazyTimer(stream.end)
        if session.ends_stream:
            session.ends_stream = False
            timer.set(asyncio.get_running_loop().time() + END_STREAM_SECONDS)
        try:
            await send_event_head(send, session)
            await _send_messages(stream, send)
            if not stream.is_lost:
                await send_body(send, b"", more=False)
        finally:
            timer.stop()
            session.close_stream(stream)
            if hold is not None:
                hold.release(answered=not stream.is_lost)
        if stream.is_lost and access is not None and context.address.kind == "task" and not session.streams:
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
