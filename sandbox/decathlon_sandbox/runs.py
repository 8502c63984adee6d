"""`run`: a command that ends, and its output."""

from __future__ import annotations

from decathlon_sandbox import wire
from decathlon_sandbox.event_loop import EventLoop
from decathlon_sandbox.requests import Request, RequestError, describe_error
from decathlon_sandbox.streams import Reader, TailBuffer
from decathlon_sandbox.strict_json import JsonObject
from decathlon_sandbox.supervisor import ProcessSupervisor, child_environment

CHANNEL_BYTES = 1 << 20


class Run:
    """Runs one command and answers its request once the command and its process tree have ended."""

    def __init__(
        self, loop: EventLoop, supervisor: ProcessSupervisor, request: Request, params: JsonObject
    ) -> None:
        self._supervisor = supervisor
        self._request = request
        self._timed_out = False
        self._cancelled = False
        self._keep_background: bool = params.get("leave", False)
        self._linger_seconds: float = params.get("linger_seconds", 0.0)
        argv, cwd = params["argv"], params["cwd"]
        env = child_environment("all", params["env"], cwd)
        try:
            self._child = supervisor.spawn(
                argv, cwd=cwd, env=env, on_exit=self._on_exit, channel=params["channel"]
            )
        except (OSError, ValueError) as error:
            raise RequestError(wire.SPAWN, f"{argv[0]} cannot be run: {describe_error(error)}") from None
        self._stdout = TailBuffer(params["output_bytes"])
        self._stderr = TailBuffer(params["output_bytes"])
        self._channel = bytearray() if params["channel"] else None
        self._readers = [
            Reader(loop, self._child.stdout, self._stdout.feed),
            Reader(loop, self._child.stderr, self._stderr.feed),
        ]
        if self._channel is not None:
            self._readers.append(Reader(loop, self._child.channel, self._on_channel))
        self._deadline = loop.call_later(params["timeout_seconds"], self._on_timeout)
        request.on_cancel = self._on_cancel

    def _on_channel(self, chunk: bytes) -> None:
        if self._channel is not None:
            self._channel += chunk[: CHANNEL_BYTES - len(self._channel)]

    def _on_timeout(self) -> None:
        self._timed_out = True
        self._supervisor.kill_tree(self._child, lambda: None)

    def _on_cancel(self) -> None:
        self._cancelled = True
        self._supervisor.kill_tree(self._child, lambda: None)

    def _on_exit(self, exit_code: int) -> None:
        self._deadline.cancel()
        if self._keep_background and not (self._timed_out or self._cancelled):
            self._supervisor.keep_background(self._child, self._linger_seconds, self._on_background_counted)
        else:
            self._supervisor.kill_tree(self._child, self._on_tree_killed)

    def _on_background_counted(self, count: int) -> None:
        # The readers stay open: a background process that writes to a closed pipe would be killed.
        for reader in self._readers:
            reader.read_available()
        self._respond(count)

    def _on_tree_killed(self) -> None:
        for reader in self._readers:
            reader.drain()
        self._respond(0)

    def _respond(self, background_count: int) -> None:
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
                "channel": None if self._channel is None else self._channel.decode("utf-8", "replace"),
                "background": background_count,
            }
        )
