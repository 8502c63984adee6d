"""`define`, `start`, `call` and `freeze`: all of the task's MCP servers."""

from __future__ import annotations

import os
import time

from decathlon_sandbox import wire
from decathlon_sandbox.mcp_session import Handshake, ReplyHandler
from decathlon_sandbox.rpc import Params, RequestError, answer_in_thread, describe_error
from decathlon_sandbox.server import Server, ServerState
from decathlon_sandbox.strict_json import as_object, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from decathlon_sandbox.event_loop import EventLoop, Timer
    from decathlon_sandbox.rpc import Request
    from decathlon_sandbox.streams import Backpressure
    from decathlon_sandbox.supervisor import ProcessSupervisor

    Notify = Callable[[str, dict[str, Any]], object]

CLOSE_SECONDS = 1.0
"""How long a frozen server may take to exit after its stdin is closed, and again after SIGTERM."""
EXIT_POLL_SECONDS = 0.01
MAX_TEXT_GROWTH = 8
"""How much longer than a reply's line the text of its result can be (`9e15` becomes 9000000000000000.0)."""
CALLABLE_METHODS = ("tools/call", "tools/list")


class Servers:
    """All servers by name. A freeze is permanent."""

    def __init__(
        self, loop: EventLoop, supervisor: ProcessSupervisor, backpressure: Backpressure, notify: Notify
    ) -> None:
        self._loop = loop
        self._supervisor = supervisor
        self._backpressure = backpressure
        self._notify = notify
        self._definitions: dict[str, Params] = {}
        self._servers: dict[str, Server] = {}
        self._startups: set[Startup] = set()
        self._calls: dict[str, dict[int, RelayedCall]] = {}
        self._frozen = False

    def define(self, request: Request, params: Params) -> None:
        definitions = {settings.string("name"): settings for settings in params.objects("servers")}
        for settings in definitions.values():
            self._create(settings)
        self._definitions.update(definitions)
        request.reply({})

    def start(self, request: Request, params: Params) -> None:
        names = list(dict.fromkeys(params.strings("names")))
        deadline_seconds, again = params.number("deadline_seconds"), params.boolean("again")
        self._start(request, names, deadline_seconds, again)

    def _start(self, request: Request, names: Sequence[str], deadline_seconds: float, again: bool) -> None:
        self._check_not_frozen()
        for startup in self._startups:
            if not startup.names.isdisjoint(names):
                startup.waiting.append(
                    _WaitingStart(request, lambda: self._start(request, names, deadline_seconds, again))
                )
                return
        servers: list[Server] = []
        for name in names:
            if name not in self._definitions:
                raise RequestError(wire.BAD_PARAMS, f"no server named {name} is defined", {"server": name})
            known = self._servers.get(name)
            if known is None or known.state is ServerState.ENDED:
                if known is not None and known.was_running and not again:
                    data = {**known.error.data, "ended": True}
                    raise RequestError(known.error.code, known.error.message, data)
                servers.append(self._create(self._definitions[name]))
        self._servers.update({server.name: server for server in servers})
        startup = Startup(self._loop, request, servers, deadline_seconds, self._startups.discard)
        self._startups.add(startup)
        startup.begin()

    def call(self, request: Request, params: Params) -> None:
        self._check_not_frozen()
        name = params.string("server")
        server = self._servers.get(name)
        if server is None:
            raise RequestError(wire.BAD_PARAMS, f"there is no server named {name}")
        if server.state is not ServerState.RUNNING:
            raise server.error
        method = params.one_of("method", *CALLABLE_METHODS)
        timeout_seconds = params.optional_number("timeout_seconds")
        limits = ReplyLimits(params)
        running = self._calls.setdefault(server.name, {})
        call = RelayedCall(
            self._loop, request, server, limits, self._notify, lambda: running.pop(request.id, None)
        )
        running[request.id] = call
        call.begin(method, params.mapping("params"), timeout_seconds)

    def freeze(self, request: Request, params: Params) -> None:
        """Stop servers the way the MCP SDK does, then kill everything that is left."""
        self._supervisor.exempt_matching(params.strings("spare"))
        self._frozen = True
        processes = self._supervisor.all_processes() - self._supervisor.exempt
        frozen = RequestError(wire.FROZEN, "the sandbox is frozen")
        for startup in tuple(self._startups):
            startup.fail(frozen)
        closing = [server for server in self._servers.values() if server.state is not ServerState.ENDED]
        for server in closing:
            server.mark_ended(frozen)
            server.begin_close()

        def on_killed(alive: set[int]) -> None:
            if alive:
                message = f"{len(alive)} processes cannot be killed"
                request.fail(RequestError(wire.INTERNAL, message, {"pids": sorted(alive)}))
            else:
                logs = {name: server.stderr for name, server in self._servers.items() if server.stderr}
                request.reply({"killed": len(processes), "stderr": logs})

        self._wait_for_exit(closing, lambda: self._supervisor.kill_all(on_killed))

    def _create(self, settings: Params) -> Server:
        """A server that is not started yet. Raises RequestError if its specification is invalid."""
        server = Server(self._loop, self._supervisor, self._backpressure, settings)
        server.on_notification = self._on_notification
        return server

    def _check_not_frozen(self) -> None:
        if self._frozen:
            raise RequestError(wire.FROZEN, "the sandbox is frozen")

    def _wait_for_exit(self, closing: list[Server], on_done: Callable[[], object]) -> None:
        """Wait for servers whose stdin was closed; after CLOSE_SECONDS send SIGTERM, then wait once more."""
        started_at, terminated = time.monotonic(), False

        def poll() -> None:
            nonlocal terminated
            elapsed = time.monotonic() - started_at
            alive = [server for server in closing if server.alive]
            if not alive or elapsed >= 2 * CLOSE_SECONDS:
                on_done()
                return
            if elapsed >= CLOSE_SECONDS and not terminated:
                terminated = True
                for server in alive:
                    server.terminate()
            self._loop.call_later(EXIT_POLL_SECONDS, poll)

        poll()

    def _on_notification(self, server: Server, method: str, params: dict[str, Any]) -> None:
        if server.state is not ServerState.RUNNING:
            return
        if method == "notifications/tools/list_changed":
            self._notify(wire.CHANGED, {"server": server.name})
        elif method == "notifications/message":
            running = self._calls.get(server.name) or {}
            request_id = next(iter(running)) if len(running) == 1 else None
            self._notify(wire.MESSAGE, {"id": request_id, "server": server.name, "params": params})


class _WaitingStart:
    """A `start` request that waits for the end of another one, after which `begin` is called."""

    def __init__(self, request: Request, begin: Callable[[], object]) -> None:
        self._request = request
        self._begin = begin
        self._ended = False
        cancelled = RequestError(wire.CANCELLED, "the start was cancelled")
        request.on_cancel = lambda: self._fail(cancelled)

    def go_on(self, error: RequestError | None) -> None:
        """The other request has ended with this error, if any."""
        if self._ended:
            return
        # One that was cancelled says nothing about its servers.
        if error is not None and error.code != wire.CANCELLED:
            self._fail(error)
            return
        self._ended = True
        try:
            self._begin()
        except RequestError as begin_error:
            self._request.fail(begin_error)

    def _fail(self, error: RequestError) -> None:
        self._ended = True
        self._request.fail(error)


class Startup:
    """One `start` request: succeeds once all servers run, or stops all of them after the first failure.

    A few start at a time, each with `deadline_seconds` from the moment at which it may. `waiting`: requests
    that want some of the same servers, in the order of their arrival.
    """

    def __init__(
        self,
        loop: EventLoop,
        request: Request,
        servers: Sequence[Server],
        deadline_seconds: float,
        on_end: Callable[[Startup], object],
    ) -> None:
        self._loop = loop
        self._request = request
        self._servers = servers
        self._deadline_seconds = deadline_seconds
        self._on_end = on_end
        self.names = {server.name for server in servers}
        self.waiting: list[_WaitingStart] = []
        self._infos: dict[str, dict[str, Any]] = {}
        self._opened: list[Server] = []
        self._deadlines: dict[str, Timer] = {}
        self._ended = False

    def begin(self) -> None:
        cancelled = RequestError(wire.CANCELLED, "the start was cancelled")
        self._request.on_cancel = lambda: self.fail(cancelled)
        self._open_next()
        self._succeed_if_complete()

    def fail(self, error: RequestError) -> None:
        """Stop all servers of this request, then answer it with `error`."""
        if self._ended:
            return
        self._end()
        for server in self._servers:
            message = f"server {server.name} was stopped: {error.message}"
            server.mark_ended(RequestError(wire.SERVER, message, {"server": server.name}))
        remaining = len(self._opened)

        def on_stopped() -> None:
            nonlocal remaining
            remaining -= 1
            if remaining <= 0:
                self._request.fail(error)
                self._let_others_go_on(error)

        for server in self._opened:
            server.stop(on_stopped)
        if not self._opened:
            on_stopped()

    def _open_next(self) -> None:
        """Open servers until as many start as may."""
        while (
            not self._ended
            and len(self._opened) < len(self._servers)
            and len(self._opened) - len(self._infos) < wire.STARTS_AT_ONCE
        ):
            server = self._servers[len(self._opened)]
            server.on_lost = lambda lost: self.fail(_with_details(lost.error, lost))
            try:
                server.open()
            except RequestError as error:
                self.fail(error)
                return
            self._opened.append(server)
            self._deadlines[server.name] = self._loop.call_later(
                self._deadline_seconds, lambda silent=server: self._on_deadline(silent)
            )
            self._begin_handshake(server)

    def _begin_handshake(self, server: Server) -> None:
        def on_success(info: dict[str, Any]) -> None:
            if self._ended:
                return
            seconds = round(time.monotonic() - server.started_at, 6)
            self._infos[server.name] = {**info, "seconds": seconds}
            self._deadlines.pop(server.name).cancel()
            self._open_next()
            self._succeed_if_complete()

        def on_failure(error: RequestError) -> None:
            self.fail(_with_details(error, server))

        Handshake(server.session, on_success, on_failure).start()

    def _succeed_if_complete(self) -> None:
        if self._ended or len(self._infos) < len(self._servers):
            return
        self._end()
        for server in self._servers:
            server.state = ServerState.RUNNING
            server.was_running = True
        self._request.reply({"servers": self._infos})
        self._let_others_go_on(None)

    def _on_deadline(self, silent: Server) -> None:
        message = f"server {silent.name} was not up after {self._deadline_seconds:g} s"
        self.fail(_with_details(RequestError(wire.SERVER, message), silent))

    def _end(self) -> None:
        self._ended = True
        for deadline in self._deadlines.values():
            deadline.cancel()

    def _let_others_go_on(self, error: RequestError | None) -> None:
        self._on_end(self)
        for waiting in self.waiting:
            waiting.go_on(error)


class ReplyLimits:
    """How long a reply may be, and how a longer result is cut: the parameters `max_bytes` and `cut`.

    `characters` None: no result is cut. `folder` None: what is cut off is not saved.
    """

    def __init__(self, params: Params) -> None:
        self.max_bytes = wire.MAX_RESPONSE_BYTES - wire.ENVELOPE_BYTES
        if params.has("max_bytes"):
            self.max_bytes = params.integer("max_bytes", maximum=wire.MAX_LINE_BYTES)
        self.characters: int | None = None
        self.folder: str | None = None
        if params.has("cut"):
            cut = Params(params.mapping("cut"))
            self.characters = cut.integer("characters", maximum=wire.MAX_LINE_BYTES)
            self.folder = cut.path("folder") if cut.has("folder") else None


class RelayedCall(ReplyHandler):
    """One `call` request: ends with the server's reply, a timeout, a cancellation or the server's end."""

    def __init__(
        self,
        loop: EventLoop,
        request: Request,
        server: Server,
        limits: ReplyLimits,
        notify: Notify,
        on_end: Callable[[], object],
    ) -> None:
        self._loop = loop
        self._request = request
        self._server = server
        self._limits = limits
        self._notify = notify
        self._on_end = on_end
        self._deadline: Timer | None = None

    def begin(self, method: str, params: dict[str, Any], timeout_seconds: float | None) -> None:
        """Send the request. `timeout_seconds` None means the server's `request_seconds`, if it has one."""
        if timeout_seconds is None:
            timeout_seconds = self._server.request_seconds
        try:
            self._session_request_id = self._server.session.request(method, params, self)
        except RequestError as error:
            self.on_error(error)
            return
        if timeout_seconds is not None:
            message = f"server {self._server.name} has not answered within {timeout_seconds:g} s"
            timeout = RequestError(wire.TIMEOUT, message)
            self._deadline = self._loop.call_later(timeout_seconds, lambda: self._abandon(timeout))
        cancelled = RequestError(wire.CANCELLED, "the call was cancelled")
        self._request.on_cancel = lambda: self._abandon(cancelled)

    def on_reply(self, message: dict[str, Any], line: bytes) -> None:
        self._end()
        result = as_object(message.get("result"))
        limit = self._limits.characters
        # The text of content items is never longer than its JSON.
        growth = 1 if self._limits.folder is None else MAX_TEXT_GROWTH
        if limit is None or result is None or len(line) * growth <= limit:
            self._reply(line)
            return
        # In a thread: the text may have 64 MiB, and the other calls go on.
        answer_in_thread(self._loop, self._request, lambda: self._cut(result, line, limit))

    def _cut(self, result: dict[str, Any], line: bytes, limit_characters: int) -> Callable[[], object]:
        """Shorten the result if it is too long; returns what replies."""
        from decathlon_sandbox.truncation import cut, shorten

        folder = self._limits.folder
        shortened = (
            shorten(result, limit_characters) if folder is None else cut(result, folder, limit_characters)
        )
        if shortened is None:
            return lambda: self._reply(line)
        if shortened.path is not None and shortened.full_text is not None:
            try:
                os.makedirs(os.path.dirname(shortened.path), exist_ok=True)
                with open(shortened.path, "x", encoding="utf-8", errors="replace") as file:
                    file.write(shortened.full_text)
            except OSError as error:
                message = f"the whole reply cannot be saved: {describe_error(error)}"
                raise RequestError(wire.FILES, message) from None
        overlong = encode({"path": shortened.path, "characters": shortened.characters})
        text = encode({"result": shortened.result})
        return lambda: self._reply(text, overlong)

    def _reply(self, line: bytes, overlong: bytes | None = None) -> None:
        if len(line) > self._limits.max_bytes:
            message = (
                f"the reply has {len(line)} bytes, more than the limit of {self._limits.max_bytes} bytes"
            )
            self._request.fail(RequestError(wire.TOO_LONG, message))
            return
        self._request.max_bytes = self._limits.max_bytes + wire.ENVELOPE_BYTES
        if overlong is not None:
            self._request.max_bytes += len(overlong)
        self._request.reply_encoded(line, overlong)

    def on_error(self, error: RequestError) -> None:
        self._end()
        self._request.fail(error)

    def on_progress(self, params: dict[str, Any]) -> None:
        self._notify(wire.PROGRESS, {"id": self._request.id, "params": params})

    def _abandon(self, error: RequestError) -> None:
        self._server.session.abandon(self._session_request_id, error.message)
        self.on_error(error)

    def _end(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._on_end()


def _with_details(error: RequestError, server: Server) -> RequestError:
    """Add the server's name and exit details to an error that lacks them."""
    error.data = {"server": server.name, **server.exit_details(), **error.data}
    return error
