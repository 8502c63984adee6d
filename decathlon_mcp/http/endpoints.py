"""The addresses of MCP: what is checked before a message reaches a service."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple, Self

import anyio
from anyio.abc import TaskGroup
from starlette.datastructures import QueryParams
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from decathlon_mcp.background import background_tasks, run_alone, run_for_ever
from decathlon_mcp.catalogue.draws import TaskFilter
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.errors import BadRequestError, DecathlonError
from decathlon_mcp.events import RequestRead
from decathlon_mcp.http.authentication import AllowedHosts, Tokens
from decathlon_mcp.http.bodies import BodyDisconnectError, BodyReader
from decathlon_mcp.http.errors import REFUSALS, mcp_refusal, refusal, response_to
from decathlon_mcp.http.lines import TextLine
from decathlon_mcp.labels import merge_labels, parse_labels, read_label_header
from decathlon_mcp.protocol.episode_service import EpisodeService, TaskService
from decathlon_mcp.protocol.headers import SESSION, Headers
from decathlon_mcp.protocol.http import McpAddress
from decathlon_mcp.protocol.lobby import Lobby
from decathlon_mcp.protocol.lobby_tools import validate
from decathlon_mcp.protocol.messages import (
    INITIALIZE,
    McpError,
    Message,
    read_batch,
    read_message,
    readable_id,
)
from decathlon_mcp.protocol.requests import SCOPE_KEY, RequestContext, Service
from decathlon_mcp.protocol.sessions import AddressKind, Sessions, delete_unused
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.validation import quoted

log = logging.getLogger("decathlon.edge")

UNUSED_SECONDS = 60.0
"""Time between two searches for sessions that no client has used for the idle time."""
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


class _Place(NamedTuple):
    """An MCP address. `name`: the task's or the episode's in it; `path`: without a slash at the end."""

    kind: AddressKind
    name: str
    path: str


class McpEndpoints:
    """The ASGI application of all MCP addresses: `/mcp`, `/tasks/TASK/mcp` and `/episodes/EPISODE/mcp`."""

    def __init__(
        self,
        registry: EpisodeRegistry,
        tokens: Tokens,
        hosts: AllowedHosts,
        bodies: BodyReader,
        public_url: str | None = None,
        *,
        has_page: bool = False,
    ) -> None:
        self._registry = registry
        self._tokens = tokens
        self._hosts = hosts
        self._bodies = bodies
        self._public_url = public_url.rstrip("/") if public_url else None
        self._has_page = has_page
        self._tasks: TaskGroup | None = None
        services: dict[AddressKind, Service] = {
            "task": TaskService(registry),
            "episode": EpisodeService(registry),
            "lobby": Lobby(registry),
        }
        self._addresses: dict[AddressKind, McpAddress] = {
            kind: McpAddress(service, kind, registry, self._start_soon) for kind, service in services.items()
        }

    @property
    def _sessions(self) -> tuple[Sessions, ...]:
        return tuple(address.sessions for address in self._addresses.values())

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Sessions can be opened in the body; on exit all of them end."""
        async with background_tasks() as self._tasks:
            self._tasks.start_soon(run_alone, self._end_streams_after_drain)
            self._tasks.start_soon(run_for_ever, self._end_unused_sessions)
            try:
                yield
            finally:
                for sessions in self._sessions:
                    sessions.close_all()
        self._tasks = None

    def _start_soon(self, function: Callable[[], Awaitable[object]]) -> None:
        if self._tasks is not None:
            self._tasks.start_soon(run_alone, function)

    async def _end_streams_after_drain(self) -> None:
        # At shutdown uvicorn waits for open connections, and a client's GET stream never ends by itself.
        await self._registry.drained.wait()
        for sessions in self._sessions:
            sessions.end_streams()

    async def _end_unused_sessions(self) -> None:
        while True:
            await anyio.sleep(min(UNUSED_SECONDS, self._registry.options.limits.idle_seconds / 10))
            for sessions in self._sessions:
                sessions.end_idle()
            try:
                delete_unused(self._registry, self._sessions)
            except DecathlonError as error:
                log.warning("unused sessions could not be deleted", extra=fields(why=error.message))

    # a request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request at one of the addresses."""
        place, method, headers = place_of(scope), scope["method"], Headers(scope["headers"])
        assert place is not None
        context = RequestContext(
            path=place.path,
            headers=headers,
            asgi=(scope, receive, send),
            public_url=self._public_url,
            has_page=self._has_page,
        )
        scope[SCOPE_KEY] = context
        response: Response | None = None
        try:
            if (refused := self._hosts.refusal(method, scope["headers"])) is not None:
                response = TextLine(refused.message, refused.status)
            elif method == "POST":
                self._authenticate(place, context)
                async with self._bodies.read(headers, receive) as body:
                    self._registry.events.emit(RequestRead(len(body)))
                    response = await self._post(place, context, body)
            elif method not in _METHODS or headers.is_sessionless:
                self._bodies.check_length(headers)
                allowed = "POST" if headers.is_sessionless else ", ".join(_METHODS)
                response = mcp_refusal(405, McpError(-32600, "Method Not Allowed"), allow=allowed)
            else:
                self._bodies.check_length(headers)
                self._authenticate(place, context)
                self._find_subject(place, context)
                address = self._addresses[place.kind]
                await (address.get if method == "GET" else address.delete)(context)
        except BodyDisconnectError:
            pass
        except REFUSALS as error:
            response = response_to(error)
        if response is not None:
            await response(scope, receive, send)

    async def _post(self, place: _Place, context: RequestContext, body: bytes) -> Response | None:
        """Serve a body. Returns the response to one that is refused."""
        address = self._addresses[place.kind]
        message: Message | None = None
        try:
            batch = read_batch(body)
            message = None if batch is not None else read_message(body)
            self._find_subject(place, context)
            if message is None:
                await address.post_batch(batch or [], context)
                return None
            if message.method == INITIALIZE and SESSION not in context.headers and place.kind == "task":
                self._prepare_start(place, context)
            await address.post(message, context)
        except McpError as error:
            if error.request_id is None and message is not None and message.is_request:
                error.request_id = message.id
            return mcp_refusal(_status(error, context.headers), error)
        except DecathlonError as error:
            request_id = readable_id(body) if message is None or message.is_request else None
            return refusal(error, request_id)
        return None

    # what is known of a request

    def _authenticate(self, place: _Place, context: RequestContext) -> None:
        """Note whose request it is. Raises UnauthorizedError."""
        if place.kind == "episode":
            context.access = self._registry.agent_access(place.name)
            context.by_agent_id = context.access is not None
        # The agent id is enough, without a token: with a token an agent could start other episodes of the
        # task and evaluate guesses there.
        if not context.by_agent_id:
            context.principal = self._tokens.require(context.headers.text(b"authorization"))
        context.principal = context.principal.in_session(context.headers.text(SESSION))

    def _find_subject(self, place: _Place, context: RequestContext) -> None:
        """Find the episode or the task of the address. Raises UnknownEpisodeError, UnknownTaskError."""
        if place.kind == "episode" and context.access is None:
            context.access = self._registry.access(place.name, context.principal)
        if place.kind == "task" and SESSION not in context.headers and place.name != RANDOM_TASK:
            self._registry.catalogue.find(place.name)

    def _prepare_start(self, place: _Place, context: RequestContext) -> None:
        """Note the task that `initialize` starts, drawn at the random address, and its labels.

        Raises BadRequestError, AtCapacityError, NotRunnableError.
        """
        assert context.asgi is not None
        parameters = StartParameters.read(QueryParams(context.asgi[0]["query_string"]), place.name)
        context.task_id = place.name
        if place.name == RANDOM_TASK:
            context.task_id = self._registry.draw(parameters.draw, context.principal)
        context.labels = merge_labels(parameters.labels, read_label_header(context.label_header))
        # Before there is a session, so that a refusal leaves nothing behind.
        self._registry.refuse_unless_startable(context.task_id, context.principal)


def place_of(scope: Scope) -> _Place | None:
    """The MCP address of a request; None if it is at another one."""
    if scope["type"] != "http":
        return None
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    path = path.removesuffix("/") if path.endswith("/mcp/") else path
    if path == "/mcp":
        return _Place("lobby", "", path)
    if not path.endswith("/mcp"):
        return None
    parts = path.split("/")
    if len(parts) != 4 or not parts[2] or parts[1] not in ("tasks", "episodes"):
        return None
    return _Place("task" if parts[1] == "tasks" else "episode", parts[2], path)


def _status(error: McpError, headers: Headers) -> int:
    """The status of a refusal; 200 for one that a client with a handshake has to read."""
    if error.status is not None:
        return error.status
    if headers.is_sessionless:
        return {-32601: 404}.get(error.code, 400)
    return 400 if error.request_id is None else 200
