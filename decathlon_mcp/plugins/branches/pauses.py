"""Pauses of an episode's calls, in which its state can be saved."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio

from decathlon_mcp.episodes.calls import CallGate, EpisodeCalls
from decathlon_mcp.episodes.operations import Call


class CallPauses(CallGate):
    """Times in which no call of an episode runs: new calls wait, those that were accepted before may end."""

    def __init__(self, calls: EpisodeCalls) -> None:
        self.on_still: Callable[[], None] | None = None
        """Called when the last call that runs has ended, unless calls are paused."""
        self._calls = calls
        self._count = self._last = 0
        """How many hold calls back now, and the number of the last call that may run meanwhile."""
        self._over = anyio.Event()
        self._ended = anyio.Event()

    def begin(self) -> int:
        """Let calls that come from now on wait until `end`; returns the number of the last one before."""
        if self._count == 0:
            self._last, self._over = self._calls.log.last, anyio.Event()
        self._count += 1
        return self._last

    def end(self) -> None:
        """Let calls run again, if nobody else holds them."""
        self._count -= 1
        if self._count == 0:
            self._over.set()

    @asynccontextmanager
    async def hold(self, seconds: float) -> AsyncGenerator[int | None]:
        """Pause calls in the body, and wait for the end of those that run.

        Yields the number of the last one, or None if one has run for longer than `seconds`.
        """
        last = self.begin()
        try:
            with anyio.move_on_after(seconds):
                while not self._is_still:
                    self._ended = anyio.Event()
                    await self._ended.wait()
            yield last if self._is_still else None
        finally:
            self.end()

    def holds(self, call: Call) -> bool:
        """Whether the call has to wait now."""
        return self._count > 0 and call.seq > self._last

    async def passed(self, call: Call) -> None:
        """Wait until the call may run."""
        while self.holds(call):
            await self._over.wait()

    def call_ended(self) -> None:
        """A call has ended."""
        self._ended.set()
        if self.on_still is not None and not self._count and self._is_still:
            self.on_still()

    @property
    def _is_still(self) -> bool:
        return all(map(self.holds, self._calls.unanswered))
