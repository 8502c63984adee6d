"""`define`, `start`, `call` and `freeze`: all of the task's MCP servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from decathlon_sandbox import wire
from decathlon_sandbox.byte_streams import Backpressure
from decathlon_sandbox.child_processes import ProcessSupervisor
from decathlon_sandbox.driver_requests import SMALL_RESPONSE_BYTES, Notify, Request, RequestError
from decathlon_sandbox.event_loop import EventLoop
from decathlon_sandbox.strict_json import JsonObject, encode
from decathlon_sandbox.tool_server import ENVELOPE_BYTES, STDERR_BYTES, RelayedCall, Server, ServerState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from decathlon_sandbox.preloaded import PreloadedStarts

CLOSE_SECONDS = 1.0
"""How long a frozen server may take to exit after its stdin is closed, and again after SIGTERM."""
EXIT_POLL_SECONDS = 0.01


class Servers:
    """All servers by name. A freeze is permanent."""

    def __init__(
        self,
        loop: EventLoop,
        supervisor: ProcessSupervisor,
        backpressure: Backpressure,
        notify: Notify,
        preloaded: PreloadedStarts | None = None,
    ) -> None:
        self._preloaded = preloaded
        self._loop = loop
        self._supervisor = supervisor
        self._backpressure = backpressure
        self._notify = notify
        self._definitions: dict[str, JsonObject] = {}
        self._servers: dict[str, Server] = {}
        self._startups: set[Startup] = set()
        self._frozen = False

    def define(self, request: Request, params: JsonObject) -> None:
        self._definitions.update({settings["name"]: settings for settings in params["servers"]})
        request.reply({})

    def start(self, request: Request, params: JsonObject) -> None:
        self._check_not_frozen()
        names: list[str] = list(dict.fromkeys(params["names"]))
        for startup in self._startups:
            if not startup.names.isdisjoint(names):
                self._start_after(startup, request, params)
                return
        servers: list[Server] = []
        for name in names:
            if name not in self._definitions:
                raise RequestError(wire.BAD_PARAMS, f"no server named {name} is defined", {"server": name})
            known = self._servers.get(name)
            if known is None or known.state is ServerState.ENDED:
                if known is not None and known.was_running and not params.get("again"):
                    data = {**known.error.data, "ended": True}
                    raise RequestError(known.error.code, known.error.message, data)
                parts = self._loop, self._supervisor, self._backpressure
                definition = self._definitions[name]
                servers.append(Server(*parts, definition, self._on_notification, self._preloaded))
        self._servers.update({server.name: server for server in servers})
        startup = Startup(self._loop, request, servers, params["deadline_seconds"], self._startups.discard)
        self._startups.add(startup)
        startup.begin()

    def _start_after(self, startup: Startup, request: Request, params: JsonObject) -> None:
        """Start once another request, for some of the same servers, has ended; fails with that request."""

        def go_on(error: RequestError | None) -> None:
            # A cancelled request says nothing about its servers.
            if error is not None and error.code != wire.CANCELLED:
                request.fail(error)
            elif not request.answered:
                try:
                    self.start(request, params)
                except RequestError as failure:
                    request.fail(failure)

        startup.followers.append(go_on)
        request.on_cancel = lambda: request.fail(RequestError(wire.CANCELLED, "the start was cancelled"))

    def call(self, request: Request, params: JsonObject) -> None:
        self._check_not_frozen()
        server = self._servers.get(params["server"])
        if server is None:
            raise RequestError(wire.BAD_PARAMS, f"there is no server named {params['server']}")
        if server.state is not ServerState.RUNNING:
            raise server.error
        RelayedCall(self._loop, request, server, params, self._notify).begin()

    def freeze(self, request: Request, params: JsonObject) -> None:
        """Stop servers the way the MCP SDK does, then kill everything that is left."""
        self._supervisor.exempt_matching(params.get("spare", ()))
        self._frozen = True
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
                request.reply({"stderr": self._logs(SMALL_RESPONSE_BYTES - ENVELOPE_BYTES)})

        self._wait_for_exit(closing, lambda: self._supervisor.kill_all(on_killed))

    def _logs(self, max_bytes: int) -> dict[str, str]:
        """The ends of what servers wrote to stderr, as long as they may be to have so many bytes together."""
        logs = {name: server.stderr for name, server in self._servers.items() if server.stderr}
        characters = STDERR_BYTES
        # A control character has six bytes.
        while characters > 1 and len(encode(logs)) > max_bytes:
            characters //= 2
            logs = {name: text[-characters:] for name, text in logs.items()}
        return logs

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

    def _on_notification(self, server: Server, method: str, params: JsonObject) -> None:
        if server.state is not ServerState.RUNNING:
            return
        if method == "notifications/tools/list_changed":
            self._notify(wire.CHANGED, {"server": server.name})
        elif method == "notifications/message":
            request_id = next(iter(server.calls)) if len(server.calls) == 1 else None
            self._notify(wire.MESSAGE, {"id": request_id, "server": server.name, "params": params})


class Startup:
    """One `start` request: succeeds once all servers run, or stops all of them after the first failure.

    A few start at a time, each with `deadline_seconds` from the moment at which it may. `followers` are
    called after its end, with the error if it failed.
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
        self.followers: list[Callable[[RequestError | None], object]] = []
        self._tools: dict[str, list[JsonObject]] = {}
        self._opened: list[Server] = []
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
        self._ended = True
        for server in self._servers:
            message = f"server {server.name} was stopped: {error.message}"
            server.mark_ended(RequestError(wire.SERVER, message, {"server": server.name}))
        remaining = len(self._opened)

        def on_stopped() -> None:
            nonlocal remaining
            remaining -= 1
            if remaining <= 0:
                self._request.fail(error)
                self._let_followers_go_on(error)

        for server in self._opened:
            server.stop(on_stopped)
        if not self._opened:
            on_stopped()

    def _open_next(self) -> None:
        """Open servers until as many start as may."""
        while (
            not self._ended
            and len(self._opened) < len(self._servers)
            and len(self._opened) - len(self._tools) < wire.STARTS_AT_ONCE
        ):
            server = self._servers[len(self._opened)]
            self._opened.append(server)
            try:
                server.start(self._deadline_seconds, partial(self._on_tools, server), self.fail)
            except RequestError as error:
                self._opened.remove(server)
                self.fail(error)

    def _on_tools(self, server: Server, tools: list[JsonObject]) -> None:
        if not self._ended:
            self._tools[server.name] = tools
            self._open_next()
            self._succeed_if_complete()

    def _succeed_if_complete(self) -> None:
        if self._ended or len(self._tools) < len(self._servers):
            return
        self._ended = True
        for server in self._servers:
            server.state = ServerState.RUNNING
            server.was_running = True
        self._request.reply({"servers": {name: {"tools": tools} for name, tools in self._tools.items()}})
        self._let_followers_go_on(None)

    def _let_followers_go_on(self, error: RequestError | None) -> None:
        self._on_end(self)
        for follow in self.followers:
            follow(error)
