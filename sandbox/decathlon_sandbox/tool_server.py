"""One of the task's MCP servers: a process, the session with it, and the calls that are relayed to it."""

from __future__ import annotations

import enum
import os
import signal
from collections.abc import Callable

from decathlon_sandbox import wire
from decathlon_sandbox.byte_streams import Backpressure, LineSplitter, Reader, TailBuffer, Writer
from decathlon_sandbox.child_processes import Child, ProcessSupervisor, child_environment, marked
from decathlon_sandbox.driver_requests import Notify, Request, RequestError, answer_in_thread, describe_error
from decathlon_sandbox.event_loop import EventLoop, Timer
from decathlon_sandbox.mcp_session import Handshake, McpSession, ReplyHandler
from decathlon_sandbox.strict_json import JsonObject, as_object, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from decathlon_sandbox.preloaded import PreloadedStarts

STDERR_BYTES = 8192
MAX_UNREAD_BYTES = wire.MAX_LINE_BYTES
"""Limit of what is queued for a server that does not read its stdin."""
EXIT_SECONDS = 1.0
"""How long a server that closed its stdout may take to exit before it counts as lost."""
ENVELOPE_BYTES = 1024
"""Upper limit of what a reply grows by when it is relayed."""
MAX_TEXT_GROWTH = 8
"""How much longer than a reply's line the text of its result can be (`9e15` becomes 9000000000000000.0)."""


class ServerState(enum.Enum):
    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"


class Server:
    """A server that is a child process: messages on its stdin and stdout, one per line."""

    def __init__(
        self,
        loop: EventLoop,
        supervisor: ProcessSupervisor,
        backpressure: Backpressure,
        settings: JsonObject,
        on_notification: Callable[[Server, str, JsonObject], object],
        preloaded: PreloadedStarts | None = None,
    ) -> None:
        """`preloaded`: may start it as a fork; None: it starts as a program."""
        self.name: str = settings["name"]
        self.request_seconds: float | None = settings.get("request_seconds")
        self.calls: set[int] = set()
        """The requests of the calls in progress."""
        self.state = ServerState.STARTING
        self.was_running = False
        self.error = RequestError(wire.SERVER, f"server {self.name} is not up")
        """Why the server cannot be called; meaningful while it is not running."""
        self.session = McpSession(
            self.name, self._send, lambda method, params: on_notification(self, method, params)
        )
        self._loop = loop
        self._supervisor = supervisor
        self._backpressure = backpressure
        self._argv: list[str] = [settings["command"], *settings["args"]]
        self._cwd: str = settings["cwd"]
        minimal = settings["inherit"] == "minimal"
        self._env = child_environment(settings["env"], self._cwd, minimal=minimal)
        self._stderr = TailBuffer(STDERR_BYTES)
        self._losing = False
        self._preloaded = preloaded
        self._child: Child | None = None
        self._cancel_fork: Callable[[], object] | None = None

    def start(
        self,
        deadline_seconds: float,
        on_tools: Callable[[list[JsonObject]], object],
        on_failure: Callable[[RequestError], object],
    ) -> None:
        """Start the process, initialize the session and list its tools; one of the two is called at the end.

        Raises RequestError if there is no process. `on_failure` is called again if the process ends later.
        """

        def fail(error: RequestError) -> None:
            deadline.cancel()
            error.data = {**self._exit_details(), **error.data}
            on_failure(error)

        def succeed(tools: list[JsonObject]) -> None:
            deadline.cancel()
            on_tools(tools)

        self._fail = fail
        env = {**self._supervisor.server_variables, **self._env}
        if self._preloaded is None:
            self._spawn(env)
        message = f"server {self.name} was not up after {deadline_seconds:g} s"
        deadline = self._loop.call_later(deadline_seconds, lambda: fail(RequestError(wire.SERVER, message)))
        handshake = Handshake(self.session, succeed, fail)
        if self._preloaded is None:
            handshake.start()
            return
        mark = self._supervisor.new_mark()

        def on_fork(pid: int, streams: tuple[int, int, int]) -> None:
            self._cancel_fork = None
            self._follow(self._supervisor.adopt(Child(pid, mark, self._on_exit, streams)))
            handshake.start()

        def on_cold() -> None:
            self._cancel_fork = None
            try:
                self._spawn(env)
            except RequestError as error:
                fail(error)
            else:
                handshake.start()

        self._cancel_fork = self._preloaded.start(
            self.name, self._argv, self._cwd, marked(env, mark), on_fork, on_cold
        )

    def _spawn(self, env: dict[str, str]) -> None:
        """Start it as a program. Raises RequestError."""
        try:
            child = self._supervisor.spawn(
                self._argv, cwd=self._cwd, env=env, on_exit=self._on_exit, stdin=True
            )
        except (OSError, ValueError) as error:
            message = f"server {self.name} cannot be started: {self._argv[0]}: {describe_error(error)}"
            data = {"server": self.name, "exit_code": None, "stderr": ""}
            raise RequestError(wire.SERVER, message, data) from None
        self._follow(child)

    def _follow(self, child: Child) -> None:
        """Read and write what the process writes and reads."""
        self._child = child
        lines = LineSplitter(
            wire.MAX_LINE_BYTES - ENVELOPE_BYTES, self.session.receive_line, self.session.receive_overlong
        )
        self._stdin = Writer(self._loop, child.stdin)
        self._stdout_reader = Reader(
            self._loop, child.stdout, lines.feed, self._on_stdout_closed, self._backpressure
        )
        self._stderr_reader = Reader(self._loop, child.stderr, self._stderr.feed)

    def begin_close(self) -> None:
        """Start a graceful shutdown: no more messages will be sent."""
        if self._cancel_fork is not None:
            self._cancel_fork()
        elif self._child is not None:
            self._stdin.close()

    def terminate(self) -> None:
        """Ask the server's processes to exit, with SIGTERM."""
        try:
            if self._child is not None:
                os.killpg(self._child.pid, signal.SIGTERM)
        except OSError:
            pass

    def stop(self, on_done: Callable[[], object]) -> None:
        """End the server and its process tree at once, then call `on_done`."""
        child = self._child
        if child is not None:
            self._supervisor.kill_tree(child, lambda: (self._close_pipes(), on_done()))
            return
        if self._cancel_fork is not None:
            self._cancel_fork()
        on_done()

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._child is not None and self._child.exit_code is None

    @property
    def stderr(self) -> str:
        """The last STDERR_BYTES that it wrote to stderr."""
        return self._stderr.text()

    def _exit_details(self) -> JsonObject:
        """Its name, the end of its `stderr` and its `exit_code` (None: it runs; negative: a signal)."""
        exit_code = None if self._child is None else self._child.exit_code
        return {"server": self.name, "exit_code": exit_code, "stderr": self.stderr}

    def mark_ended(self, error: RequestError) -> None:
        """The server is being stopped: fail its requests with `error`."""
        self.state = ServerState.ENDED
        self.error = error
        self.session.fail_all(error)

    def _send(self, data: bytes) -> None:
        if self._stdin.queued_bytes + len(data) > MAX_UNREAD_BYTES:
            message = f"server {self.name} does not read its input"
            raise RequestError(wire.SERVER, message, {"server": self.name})
        self._stdin.send(data + b"\n")

    def _on_stdout_closed(self) -> None:
        # No reply can come any more. Usually the process is about to exit, and its exit code says more than
        # the closed pipe.
        self._loop.call_later(EXIT_SECONDS, lambda: self._lose("closed its stdout"))

    def _on_exit(self, exit_code: int) -> None:
        self._lose(
            f"ended with exit code {exit_code}" if exit_code >= 0 else f"was ended by signal {-exit_code}"
        )

    def _lose(self, reason: str) -> None:
        """Kill what is left of the process tree, read the rest of its output, then report the loss."""
        child = self._child
        if child is None or self._losing or self.state is ServerState.ENDED:
            return
        self._losing = True

        def on_killed() -> None:
            self._close_pipes()
            if self.state is not ServerState.ENDED:
                message = f"server {self.name} {reason}"
                self.mark_ended(RequestError(wire.SERVER, message, self._exit_details()))
                self._fail(self.error)

        self._supervisor.kill_tree(child, on_killed)

    def _close_pipes(self) -> None:
        self._stdout_reader.drain()
        self._stderr_reader.drain()
        self._stdin.close()


class RelayedCall(ReplyHandler):
    """One `call` request: ends with the server's reply, a timeout, a cancellation or the server's end."""

    def __init__(
        self, loop: EventLoop, request: Request, server: Server, params: JsonObject, notify: Notify
    ) -> None:
        self._loop = loop
        self._request = request
        self._server = server
        self._params: JsonObject = params["params"]
        self._max_bytes: int = params["max_bytes"]
        self._cut: JsonObject | None = params.get("cut")
        self._notify = notify
        self._deadline: Timer | None = None

    def begin(self) -> None:
        self._session_request_id = self._server.session.request("tools/call", self._params, self)
        self._server.calls.add(self._request.id)
        seconds = self._server.request_seconds
        if seconds is not None:
            message = f"server {self._server.name} has not answered within {seconds:g} s"
            timeout = RequestError(wire.TIMEOUT, message)
            self._deadline = self._loop.call_later(seconds, lambda: self._abandon(timeout))
        cancelled = RequestError(wire.CANCELLED, "the call was cancelled")
        self._request.on_cancel = lambda: self._abandon(cancelled)

    def on_reply(self, message: JsonObject, line: bytes) -> None:
        self._end()
        result, cut = as_object(message.get("result")), self._cut
        # The text of content items is never longer than its JSON.
        growth = MAX_TEXT_GROWTH if cut and cut.get("folder") else 1
        if cut is None or result is None or len(line) * growth <= cut["characters"]:
            self._reply(line)
        else:
            # In a thread: the text may have 64 MiB, and the other calls go on.
            answer_in_thread(
                self._loop,
                self._request,
                lambda: self._shorten(result, cut, line),
                lambda shortened: self._reply(*shortened),
            )

    def _shorten(self, result: JsonObject, limit: JsonObject, line: bytes) -> tuple[bytes, bytes | None]:
        """Shorten the result if it is too long; returns the reply, and JSON about the result."""
        from decathlon_sandbox.truncation import cut, shorten

        folder, characters = limit.get("folder"), limit["characters"]
        shortened = shorten(result, characters) if folder is None else cut(result, folder, characters)
        if shortened is None:
            return line, None
        if shortened.path is not None and shortened.full_text is not None:
            try:
                os.makedirs(os.path.dirname(shortened.path), exist_ok=True)
                with open(shortened.path, "x", encoding="utf-8", errors="replace") as file:
                    file.write(shortened.full_text)
            except OSError as error:
                message = f"the whole reply cannot be saved: {describe_error(error)}"
                raise RequestError(wire.FILES, message) from None
        overlong = encode({"path": shortened.path, "characters": shortened.characters})
        return encode({"result": shortened.result}), overlong

    def _reply(self, line: bytes, overlong: bytes | None = None) -> None:
        if len(line) > self._max_bytes:
            message = f"the reply has {len(line)} bytes, more than the limit of {self._max_bytes} bytes"
            self._request.fail(RequestError(wire.TOO_LONG, message))
        else:
            self._request.reply_encoded(line, overlong)

    def on_error(self, error: RequestError) -> None:
        self._end()
        self._request.fail(error)

    def on_progress(self, params: JsonObject) -> None:
        self._notify(wire.PROGRESS, {"id": self._request.id, "params": params})

    def _abandon(self, error: RequestError) -> None:
        self._server.session.abandon(self._session_request_id, error.message)
        self.on_error(error)

    def _end(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._server.calls.discard(self._request.id)
