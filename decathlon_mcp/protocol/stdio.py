"""MCP over lines: this process's stdin and stdout, or an in-memory client.

A line is one message, in revision 2025-03-26 also a batch. What was sent before the input ended is answered.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup
from msgspec import Raw

from decathlon_mcp.background import background_tasks
from decathlon_mcp.episodes.episode import EpisodeAccess
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.protocol.episode_service import EpisodeService
from decathlon_mcp.protocol.lobby import Lobby
from decathlon_mcp.protocol.messages import (
    BATCH_VERSION,
    CANCELLED,
    DISCOVER,
    HANDSHAKE_VERSIONS,
    INITIALIZE,
    INVALID_PARAMS,
    INVALID_REQUEST,
    MAX_BATCH,
    PING,
    VERSION_KEY,
    McpError,
    Message,
    check_version,
    read_batch,
    read_line,
    readable_id,
)
from decathlon_mcp.protocol.requests import (
    Request,
    RequestContext,
    Respond,
    Service,
    error_message,
    require_room,
)
from decathlon_mcp.protocol.responses import Connection
from decathlon_mcp.protocol.results import wire_error
from decathlon_mcp.protocol.sessions import Session
from decathlon_mcp.types import JsonObject, as_json

MAX_LINE_BYTES = 17 << 20
"""Longest line: what `StdinPump` passes on, and some."""
MAX_BATCH_ANSWER_BYTES = 16 << 20
"""All answers to a batch together, which wait for the last of them: four of the longest replies."""
SMALL_ANSWER_BYTES = 16 << 10
"""Answers up to this length have room in every batch, such as errors for answers without room."""
READER_SECONDS = 1.0
"""Time between two looks at whether anybody reads stdout, once stdin has ended."""


class LineRequest(Request):
    """A request whose notifications are messages of their own, apart from its answer.

    `connection`: of a batch over HTTP. Its requests end with its response, by `LineServer.end_batch`.
    """

    def __init__(
        self,
        message: Message,
        context: RequestContext,
        session: Session | None,
        version: str,
        send: Callable[[bytes], Awaitable[None]],
        connection: Connection | None = None,
    ) -> None:
        super().__init__(message, context, session, version)
        self._send = send
        self._connection = connection
        self._scope = anyio.CancelScope()
        self.succeeded = False
        if session is not None:
            # From now on: the next message may cancel it.
            session.requests[self] = None

    async def serve(self, respond: Respond) -> bytes | None:
        """The answer; None if the request was cancelled."""
        answer = None
        try:
            with self._scope:
                answer, error = await self.outcome(respond)
                self.succeeded = error is None
        finally:
            if self._connection is None:
                self.end(handed_over=True)
        return answer

    async def is_gone(self) -> bool:
        return self._connection is not None and await self._connection.is_gone()

    def cancel(self, *, session_ended: bool = False) -> None:
        self._scope.cancel()

    async def notify(self, method: str, params: JsonObject, *, with_reply: bool = True) -> None:
        await self._send(as_json({"jsonrpc": "2.0", "method": method, "params": params}))


class _StreamSession(Session):
    """The session of a process or an in-memory client: its messages go where answers go."""

    def __init__(self, version: str, send_soon: Callable[[bytes], object]) -> None:
        super().__init__(None, version)
        self._send_soon = send_soon

    def send(self, message: bytes) -> None:
        self._send_soon(message)


def batch_fault(items: Sequence[object], session: Session | None) -> str:
    """Why a batch cannot be served; empty if it can."""
    if session is None or session.version != BATCH_VERSION:
        return f"batches are of revision {BATCH_VERSION}: send one message at a time"
    return "" if 1 <= len(items) <= MAX_BATCH else f"a batch has 1 to {MAX_BATCH} messages"


class LineServer:
    """Serves the messages of one client, or of one batch over HTTP.

    `write` writes a line, one at a time; it raises OSError once the client does not read any more.
    `new_context` makes the context of a request. `session`: the client's, if it has one already.
    `connection`: of the batch.
    """

    def __init__(
        self,
        service: Service,
        write: Callable[[bytes], Awaitable[None]],
        new_context: Callable[[], RequestContext],
        session: Session | None = None,
        connection: Connection | None = None,
    ) -> None:
        self._service = service
        self._write = write
        self._writing = anyio.Lock()
        self._new_context = new_context
        self._session = session
        self._connection = connection
        self._batch: list[LineRequest] = []
        self._running: dict[LineRequest, None] = {}
        self._tasks: TaskGroup | None = None
        self._scope: anyio.CancelScope | None = None

    async def serve(self, lines: AsyncIterator[bytes], *, finishes: bool) -> None:
        """Serve until the lines end, and with `finishes` until all that they asked for is answered."""
        async with background_tasks() as self._tasks, anyio.create_task_group() as requests:
            self._scope = requests.cancel_scope
            async for line in lines:
                await self._on_line(line, requests)
            if not finishes:
                requests.cancel_scope.cancel()

    def leave(self) -> None:
        """The client does not read any more: nothing needs an answer."""
        if self._scope is not None:
            self._scope.cancel()

    async def _on_line(self, line: bytes, requests: TaskGroup) -> None:
        if not line.strip():
            return
        batch = read_batch(line)
        if batch is None:
            answer = await self._prepare(line)
            if isinstance(answer, bytes):
                await self._send(answer)
            elif answer is not None:
                requests.start_soon(self._answer, partial(self._serve, answer))
        elif fault := batch_fault(batch, self._session):
            # Its client waits for an answer to each request.
            ids = [each for item in batch[:MAX_BATCH] if (each := readable_id(bytes(item))) is not None]
            for request_id in ids or [None]:
                await self._send(error_message(McpError(INVALID_REQUEST, fault), request_id))
        else:
            requests.start_soon(self._answer, await self.begin_batch(batch))

    async def begin_batch(self, items: Sequence[Raw]) -> Callable[[], Awaitable[bytes]]:
        """Accept the messages of a batch. Returns what serves them and gives all answers, empty for none."""
        prepared = [await self._prepare(bytes(item), in_batch=True) for item in items]
        answers = [each for each in prepared if isinstance(each, bytes)]

        async def serve(request: LineRequest) -> None:
            if (answer := await self._serve(request)) is not None:
                left_bytes = max(MAX_BATCH_ANSWER_BYTES - sum(map(len, answers)), 0)
                if len(answer) > max(left_bytes, SMALL_ANSWER_BYTES):
                    answer = request.too_long(len(answer), left_bytes, "its batch has left")
                answers.append(answer)

        async def serve_all() -> bytes:
            async with anyio.create_task_group() as tasks:
                for request in prepared:
                    if isinstance(request, LineRequest):
                        tasks.start_soon(serve, request)
            return b"[%b]" % b",".join(answers) if answers else b""

        return serve_all

    def end_batch(self, *, handed_over: bool) -> None:
        """The response with the answers to a batch over HTTP is over. `handed_over`: see `Request.end`."""
        for request in self._batch:
            request.end(handed_over=handed_over)

    async def _answer(self, serve: Callable[[], Awaitable[bytes | None]]) -> None:
        if answer := await serve():
            await self._send(answer)

    async def _prepare(self, line: bytes, *, in_batch: bool = False) -> LineRequest | bytes | None:
        """A request to serve, the answer to one that was refused or served, or None for no answer."""
        request_id = None
        try:
            message = read_line(line)
            if (request_id := message.request_id) is None:
                self._on_notification(message)
                return None
            request = self._request_of(message, in_batch=in_batch)
        except McpError as error:
            return error_message(error, error.request_id if request_id is None else request_id)
        except DecathlonError as error:
            return error_message(wire_error(error), request_id)
        if request.method == INITIALIZE:
            # Served before the next message is read, which may rely on it.
            return await self._serve(request)
        self._running[request] = None
        return request

    def _request_of(self, message: Message, *, in_batch: bool) -> LineRequest:
        """Raises McpError, AtCapacityError."""
        if in_batch and message.method == INITIALIZE:
            raise McpError(INVALID_REQUEST, "`initialize` is in no batch")
        session = self._session
        # A batch over HTTP has a server of its own, and its session has other requests.
        require_room(max(len(self._running), len(session.requests) if session else 0))
        if VERSION_KEY in message.meta or message.method == DISCOVER:
            version = message.meta.get(VERSION_KEY)
            if not isinstance(version, str):
                raise McpError(INVALID_PARAMS, f"params._meta is missing the required {VERSION_KEY!r}")
            check_version(version)
            return self._new_request(message, None, version)
        if message.method == INITIALIZE:
            version = message.handshake_version
            session = session or _StreamSession(version, self._send_soon)
            session.version = version
        elif session is None:
            if message.method != PING:
                raise McpError(INVALID_REQUEST, "send `initialize` first")
            session = _StreamSession(HANDSHAKE_VERSIONS[-1], self._send_soon)
        return self._new_request(message, session, session.version)

    def _new_request(self, message: Message, session: Session | None, version: str) -> LineRequest:
        request = LineRequest(message, self._new_context(), session, version, self._send, self._connection)
        if self._connection is not None:
            self._batch.append(request)
        return request

    def _on_notification(self, message: Message) -> None:
        if message.method == CANCELLED and message.params is not None:
            request_id = message.params.request_id
            if self._session is not None:
                self._session.cancel(request_id)
            for request in tuple(self._running):
                if request.session is None and request.id == request_id and type(request_id) in (int, str):
                    request.cancel()

    async def _serve(self, request: LineRequest) -> bytes | None:
        try:
            answer = await request.serve(self._service.respond)
        finally:
            self._running.pop(request, None)
        if request.method == INITIALIZE and request.succeeded:
            self._session = self._session or request.session
        return answer

    def _send_soon(self, line: bytes) -> None:
        if self._tasks is not None:
            self._tasks.start_soon(self._send, line)

    async def _send(self, line: bytes) -> None:
        try:
            async with self._writing:
                await self._write(line)
        except OSError:
            self.leave()


async def serve_lines(
    registry: EpisodeRegistry,
    lines: AsyncIterator[bytes],
    write: Callable[[bytes], Awaitable[None]],
    *,
    task: str | None = None,
    episode: str | None = None,
    labels: Mapping[str, str] | None = None,
    finishes: bool = False,
    on_begin: Callable[[LineServer], object] = lambda server: None,
) -> None:
    """Serve until the lines end, and with `finishes` until all that they asked for is answered.

    With `task`: a new episode of that task, closed at the end. With `episode`: the episode with this handle
    or agent id, left open. With neither: the lobby. `labels`: of each new episode. `on_begin` is called with
    the server before the first line. Raises UnknownTaskError, NotRunnableError, AtCapacityError,
    UnknownEpisodeError before anything is served.
    """
    access, started = None, None
    if episode is not None:
        access = registry.access(episode, Principal())
    elif task is not None:
        started = registry.start(task, Principal(), labels=labels or {})
        access = EpisodeAccess.by_session(started, Principal())
    service = Lobby(registry, labels=labels) if access is None else EpisodeService(registry)
    server = LineServer(service, write, lambda: RequestContext(access=access))
    on_begin(server)
    try:
        with nullcontext() if access is None else access.episode.lease.hold():
            await server.serve(lines, finishes=finishes)
    finally:
        if started is not None:
            started.close()


async def serve_stdio(
    registry: EpisodeRegistry,
    stdin: socket.socket,
    *,
    task: str | None = None,
    labels: Mapping[str, str] | None = None,
) -> None:
    """`serve_lines` over a socket with this process's input, and stdout."""
    reader, writer = await asyncio.open_connection(sock=stdin, limit=MAX_LINE_BYTES)
    with _stdout() as output:
        async with background_tasks() as tasks:
            is_written = anyio.Event()
            is_written.set()

            async def write(line: bytes) -> None:
                nonlocal is_written
                # One whose request was cancelled is written to its end: the next one would break it.
                await is_written.wait()
                is_written, faults = anyio.Event(), list[OSError]()
                tasks.start_soon(_write_line, output, line, faults, is_written)
                await is_written.wait()
                if faults:
                    raise faults[0]

            def watch(server: LineServer) -> None:
                tasks.start_soon(_watch_reader, reader, output, server)

            try:
                await serve_lines(
                    registry, reader, write, task=task, labels=labels, finishes=True, on_begin=watch
                )
            finally:
                writer.close()


async def _watch_reader(reader: asyncio.StreamReader, output: int, server: LineServer) -> None:
    """Notice, once the input has ended, that no process reads the output: no client waits for an answer."""
    poll = select.poll()
    poll.register(output, 0)
    while True:
        await anyio.sleep(READER_SECONDS)
        if reader.at_eof() and any(state & (select.POLLERR | select.POLLHUP) for _, state in poll.poll(0)):
            server.leave()


@contextmanager
def _stdout() -> Generator[int]:
    """A descriptor of stdout, which only messages reach: what else is printed goes to stderr."""
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        yield output
    finally:
        sys.stdout.flush()
        os.dup2(output, 1)
        os.close(output)


async def _write_line(output: int, line: bytes, faults: list[OSError], is_written: anyio.Event) -> None:
    try:
        await anyio.to_thread.run_sync(_write_all, output, line + b"\n", abandon_on_cancel=True)
    except OSError as error:
        faults.append(error)
    finally:
        is_written.set()


def _write_all(output: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(output, view) :]
        except BlockingIOError:
            # The parent process shares the descriptor's flags.
            select.select([], [output], [])
