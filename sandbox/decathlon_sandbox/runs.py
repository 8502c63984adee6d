"""`run`: one process that ends, and what it said."""

from __future__ import annotations

import time

from decathlon_sandbox import params as read
from decathlon_sandbox import wire
from decathlon_sandbox.family import environment
from decathlon_sandbox.fault import Fault, reason
from decathlon_sandbox.streams import Head, Source, Tail

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from decathlon_sandbox.family import Child, Family
    from decathlon_sandbox.loop import Loop
    from decathlon_sandbox.request import Request

CHANNEL_BYTES = 1 << 20
MOST_OUTPUT_BYTES = 4 << 20


class Run:
    """Answers its request when the process has ended and its tree is gone, for whatever reason."""

    def __init__(self, loop: Loop, family: Family, request: Request, params: dict[str, Any]) -> None:
        self._family = family
        self._request = request
        self._timed_out = False
        self._cancelled = False
        kept_bytes = read.whole_number(params, "output_bytes", MOST_OUTPUT_BYTES)
        timeout_seconds = read.number(params, "timeout_seconds")
        with_channel = read.flag(params, "channel")
        self._leave = read.flag(params, "leave")
        self._began_at = time.monotonic()
        self._child = self._spawn(params, with_channel=with_channel)
        self._stdout, self._stderr, self._channel = Tail(kept_bytes), Tail(kept_bytes), Head(CHANNEL_BYTES)
        self._sources = [
            Source(loop, self._child.stdout, self._stdout.feed),
            Source(loop, self._child.stderr, self._stderr.feed),
        ]
        if with_channel:
            self._sources.append(Source(loop, self._child.channel, self._channel.feed))
        self._with_channel = with_channel
        self._deadline = loop.later(timeout_seconds, self._expire)
        request.on_cancel = self._cancel

    def _spawn(self, params: dict[str, Any], *, with_channel: bool) -> Child:
        argv = read.strings(params, "argv")
        if not argv or not argv[0]:
            raise Fault(wire.BAD_PARAMS, "`argv` must name a program")
        env = environment(read.one_of(params, "inherit", "all", "minimal"), read.named_strings(params, "env"))
        try:
            return self._family.spawn(
                argv, cwd=read.path(params, "cwd"), env=env, on_exit=self._exited, channel=with_channel
            )
        except (OSError, ValueError) as error:
            raise Fault(wire.SPAWN, f"{argv[0]} cannot be run: {reason(error)}") from None

    def _expire(self) -> None:
        self._timed_out = True
        self._family.end(self._child, lambda: None)

    def _cancel(self) -> None:
        self._cancelled = True
        self._family.end(self._child, lambda: None)

    def _exited(self, exit_code: int) -> None:
        self._deadline.cancel()
        self._seconds = time.monotonic() - self._began_at
        if self._leave and not (self._timed_out or self._cancelled):
            self._family.leave(self._child)
            # Whoever lives on may write to these pipes: read on, or it is ended by a broken one.
            for source in self._sources:
                source.take()
            self._answer()
        else:
            self._family.end(self._child, self._clear)

    def _clear(self) -> None:
        for source in self._sources:
            source.drain()
        self._answer()

    def _answer(self) -> None:
        if self._cancelled:
            self._request.fail(Fault(wire.CANCELLED, "the run was given up"))
            return
        code = self._child.exit_code
        self._request.answer(
            {
                "exit_code": code if code is not None and code >= 0 else None,
                "signal": -code if code is not None and code < 0 else None,
                "timed_out": self._timed_out,
                "stdout": self._stdout.text(),
                "stderr": self._stderr.text(),
                "truncated": self._stdout.truncated or self._stderr.truncated or self._channel.truncated,
                "channel": self._channel.text() if self._with_channel else None,
                "seconds": round(self._seconds, 6),
            }
        )
