"""A server that is a process of ours: messages on its stdin and stdout, one a line."""

from __future__ import annotations

import os
import signal

from decathlon_sandbox import params as read
from decathlon_sandbox import wire
from decathlon_sandbox.family import environment
from decathlon_sandbox.fault import Fault, reason
from decathlon_sandbox.lines import Lines
from decathlon_sandbox.server import Server, State
from decathlon_sandbox.streams import Sink, Source, Tail

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from decathlon_sandbox.family import Child, Family
    from decathlon_sandbox.loop import Loop
    from decathlon_sandbox.streams import Gate

STDERR_BYTES = 8192
UNREAD_BYTES = wire.MAX_LINE_BYTES
"""What may wait for a server that does not read its stdin."""
EXIT_SECONDS = 1.0
"""How long one that closed its stdout may take to exit by itself."""
ENVELOPE_BYTES = 1024
"""What a reply grows by when it is relayed."""


class StdioServer(Server):
    def __init__(self, loop: Loop, family: Family, gate: Gate, settings: dict[str, Any]) -> None:
        super().__init__(read.text(settings, "name"), read.optional_number(settings, "request_seconds"))
        self._loop = loop
        self._family = family
        self._gate = gate
        path = read.text(settings, "path") if settings.get("path") is not None else None
        self._argv = [read.text(settings, "command"), *read.strings(settings, "args")]
        self._cwd = read.path(settings, "cwd")
        self._env = environment(
            read.one_of(settings, "inherit", "all", "minimal"), read.named_strings(settings, "env"), path
        )
        self._stderr = Tail(STDERR_BYTES)
        self._buried = False

    def open(self) -> None:
        try:
            self._child: Child = self._family.spawn(
                self._argv, cwd=self._cwd, env=self._env, on_exit=self._exited, talks=True
            )
        except (OSError, ValueError) as error:
            raise Fault(
                wire.SERVER,
                f"server {self.name} cannot be started: {self._argv[0]}: {reason(error)}",
                server=self.name,
                **super().last_words(),
            ) from None
        lines = Lines(wire.MAX_LINE_BYTES - ENVELOPE_BYTES, self.session.receive, self.session.overlong)
        self._stdin = Sink(self._loop, self._child.stdin)
        self._stdout = Source(self._loop, self._child.stdout, lines.feed, self._silenced, self._gate)
        self._errors = Source(self._loop, self._child.stderr, self._stderr.feed)

    def post(self, data: bytes, number: int | None) -> None:
        if self._stdin.waiting_bytes + len(data) > UNREAD_BYTES:
            raise Fault(wire.SERVER, f"server {self.name} does not read what it is sent", server=self.name)
        self._stdin.send(data + b"\n")

    def hang_up(self) -> None:
        self._stdin.close()

    def terminate(self) -> None:
        try:
            os.killpg(self._child.pid, signal.SIGTERM)
        except OSError:
            pass

    def stop(self, then: Callable[[], object]) -> None:
        self._family.end(self._child, lambda: (self._close(), then()))

    @property
    def alive(self) -> bool:
        return self._child.exit_code is None

    def last_words(self) -> dict[str, Any]:
        return {"exit_code": self._child.exit_code, "stderr": self._stderr.text()}

    def _silenced(self) -> None:
        """It closed its stdout: no reply can come. Mostly it is about to exit: its code is worth a wait."""
        self._loop.later(EXIT_SECONDS, lambda: self._bury("closed its stdout"))

    def _exited(self, exit_code: int) -> None:
        how = f"ended with exit code {exit_code}" if exit_code >= 0 else f"was ended by signal {-exit_code}"
        self._bury(how)

    def _bury(self, why: str) -> None:
        if self._buried or self.state is State.ENDED:
            return
        self._buried = True

        def buried() -> None:
            self._close()
            self.lost(why)

        self._family.end(self._child, buried)

    def _close(self) -> None:
        self._stdout.drain()
        self._errors.drain()
        self._stdin.close()
