"""One of the task's MCP servers: a process, and the session with it."""

from __future__ import annotations

import enum
import os
import signal
import time

from decathlon_sandbox import wire
from decathlon_sandbox.mcp_session import McpSession
from decathlon_sandbox.rpc import RequestError, describe_error
from decathlon_sandbox.streams import LineSplitter, Reader, TailBuffer, Writer
from decathlon_sandbox.supervisor import child_environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from decathlon_sandbox.event_loop import EventLoop
    from decathlon_sandbox.rpc import Params
    from decathlon_sandbox.streams import Backpressure
    from decathlon_sandbox.supervisor import Child, ProcessSupervisor

STDERR_BYTES = 8192
MAX_UNREAD_BYTES = wire.MAX_LINE_BYTES
"""Limit of what is queued for a server that does not read its stdin."""
EXIT_SECONDS = 1.0
"""How long a server that closed its stdout may take to exit before it counts as lost."""
ENVELOPE_BYTES = 1024
"""Upper limit of what a reply grows by when it is relayed."""


class ServerState(enum.Enum):
    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"


class Server:
    """A server that is a child process: messages on its stdin and stdout, one per line.

    It ends by itself (`on_lost` is called once) or is stopped.
    """

    def __init__(
        self, loop: EventLoop, supervisor: ProcessSupervisor, backpressure: Backpressure, settings: Params
    ) -> None:
        self.name = settings.string("name")
        self.request_seconds = settings.optional_number("request_seconds")
        self.state = ServerState.STARTING
        self.was_running = False
        self.started_at = time.monotonic()
        # Why the server cannot be called; meaningful while it is not running.
        self.error = RequestError(wire.SERVER, f"server {self.name} is not up")
        self.on_lost: Callable[[Server], object] = lambda server: None
        self.on_notification: Callable[[Server, str, dict[str, Any]], object] = (
            lambda server, method, params: None
        )
        self.session = McpSession(
            self.name, self._send, lambda method, params: self.on_notification(self, method, params)
        )
        self._loop = loop
        self._supervisor = supervisor
        self._backpressure = backpressure
        path = settings.string("path") if settings.has("path") else None
        self._argv = [settings.string("command"), *settings.strings("args")]
        self._cwd = settings.path("cwd")
        self._env = child_environment(
            settings.one_of("inherit", "all", "minimal"), settings.string_mapping("env"), self._cwd, path
        )
        self._stderr = TailBuffer(STDERR_BYTES)
        self._losing = False

    def open(self) -> None:
        """Start the process. Raises RequestError."""
        try:
            self._child: Child = self._supervisor.spawn(
                self._argv,
                cwd=self._cwd,
                env={**self._supervisor.server_variables, **self._env},
                on_exit=self._on_exit,
                stdin=True,
            )
        except (OSError, ValueError) as error:
            message = f"server {self.name} cannot be started: {self._argv[0]}: {describe_error(error)}"
            data = {"server": self.name, "exit_code": None, "stderr": ""}
            raise RequestError(wire.SERVER, message, data) from None
        lines = LineSplitter(
            wire.MAX_LINE_BYTES - ENVELOPE_BYTES, self.session.receive_line, self.session.receive_overlong
        )
        self._stdin = Writer(self._loop, self._child.stdin)
        self._stdout_reader = Reader(
            self._loop, self._child.stdout, lines.feed, self._on_stdout_closed, self._backpressure
        )
        self._stderr_reader = Reader(self._loop, self._child.stderr, self._stderr.feed)

    def begin_close(self) -> None:
        """Start a graceful shutdown: no more messages will be sent."""
        self._stdin.close()

    def terminate(self) -> None:
        """Ask the server's processes to exit, with SIGTERM."""
        try:
            os.killpg(self._child.pid, signal.SIGTERM)
        except OSError:
            pass

    def stop(self, on_done: Callable[[], object]) -> None:
        """End the server and its process tree at once, then call `on_done`."""
        self._supervisor.kill_tree(self._child, lambda: (self._close_pipes(), on_done()))

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._child.exit_code is None

    @property
    def stderr(self) -> str:
        """The last STDERR_BYTES that it wrote to stderr."""
        return self._stderr.text()

    def exit_details(self) -> dict[str, Any]:
        """The end of its `stderr` and its `exit_code` (None: it runs; negative: a signal)."""
        return {"exit_code": self._child.exit_code, "stderr": self.stderr}

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
        if self._losing or self.state is ServerState.ENDED:
            return
        self._losing = True

        def on_killed() -> None:
            self._close_pipes()
            if self.state is not ServerState.ENDED:
                data = {"server": self.name, **self.exit_details()}
                self.mark_ended(RequestError(wire.SERVER, f"server {self.name} {reason}", data))
                self.on_lost(self)

        self._supervisor.kill_tree(self._child, on_killed)

    def _close_pipes(self) -> None:
        self._stdout_reader.drain()
        self._stderr_reader.drain()
        self._stdin.close()
