"""`run`: a command that ends, and its output."""

from __future__ import annotations

import time

from decathlon_sandbox import wire
from decathlon_sandbox.rpc import RequestError, describe_error
from decathlon_sandbox.streams import HeadBuffer, Reader, TailBuffer
from decathlon_sandbox.supervisor import child_environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from decathlon_sandbox.event_loop import EventLoop
    from decathlon_sandbox.rpc import Params, Request
    from decathlon_sandbox.supervisor import Child, ProcessSupervisor

CHANNEL_BYTES = 1 << 20
MAX_OUTPUT_BYTES = 4 << 20


class Run:
    """Runs one command and answers its request once the command and its process tree have ended."""

    def __init__(
        self, loop: EventLoop, supervisor: ProcessSupervisor, request: Request, params: Params
    ) -> None:
        self._supervisor = supervisor
        self._request = request
        self._timed_out = False
        self._cancelled = False
        output_bytes = params.integer("output_bytes", maximum=MAX_OUTPUT_BYTES)
        timeout_seconds = params.number("timeout_seconds")
        self._with_channel = params.boolean("channel")
        self._keep_background = params.boolean("leave")
        self._linger_seconds = params.optional_number("linger_seconds") or 0.0
        self._background_count = 0
        self._started_at = time.monotonic()
        self._child = self._spawn(params)
        self._stdout, self._stderr = TailBuffer(output_bytes), TailBuffer(output_bytes)
        self._channel = HeadBuffer(CHANNEL_BYTES)
        self._readers = [
            Reader(loop, self._child.stdout, self._stdout.feed),
            Reader(loop, self._child.stderr, self._stderr.feed),
        ]
        if self._with_channel:
            self._readers.append(Reader(loop, self._child.channel, self._channel.feed))
        self._deadline = loop.call_later(timeout_seconds, self._on_timeout)
        request.on_cancel = self._on_cancel

    def _spawn(self, params: Params) -> Child:
        argv = params.strings("argv")
        if not argv or not argv[0]:
            raise RequestError(wire.BAD_PARAMS, "`argv` must name a program")
        cwd = params.path("cwd")
        env = child_environment(params.one_of("inherit", "all", "minimal"), params.string_mapping("env"), cwd)
        try:
            return self._supervisor.spawn(
                argv, cwd=cwd, env=env, on_exit=self._on_exit, channel=self._with_channel
            )
        except (OSError, ValueError) as error:
            raise RequestError(wire.SPAWN, f"{argv[0]} cannot be run: {describe_error(error)}") from None

    def _on_timeout(self) -> None:
        self._timed_out = True
        self._supervisor.kill_tree(self._child, lambda: None)

    def _on_cancel(self) -> None:
        self._cancelled = True
        self._supervisor.kill_tree(self._child, lambda: None)

    def _on_exit(self, exit_code: int) -> None:
        self._deadline.cancel()
        self._seconds = time.monotonic() - self._started_at
        if self._keep_background and not (self._timed_out or self._cancelled):
            self._supervisor.keep_background(self._child, self._linger_seconds, self._on_background_counted)
        else:
            self._supervisor.kill_tree(self._child, self._on_tree_killed)

    def _on_background_counted(self, count: int) -> None:
        self._background_count = count
        # The readers stay open: a background process that writes to a closed pipe would be killed.
        for reader in self._readers:
            reader.read_available()
        self._respond()

    def _on_tree_killed(self) -> None:
        for reader in self._readers:
            reader.drain()
        self._respond()

    def _respond(self) -> None:
        if self._cancelled:
            self._request.fail(RequestError(wire.CANCELLED, "the run was cancelled"))
            return
        code = self._child.exit_code
        self._request.reply(
            {
                "exit_code": code if code is not None and code >= 0 else None,
                "signal": -code if code is not None and code < 0 else None,
                "timed_out": self._timed_out,
                "stdout": self._stdout.text(),
                "stderr": self._stderr.text(),
                "truncated": self._stdout.truncated or self._stderr.truncated or self._channel.truncated,
                "channel": self._channel.text() if self._with_channel else None,
                "seconds": round(self._seconds, 6),
                "background": self._background_count,
            }
        )
