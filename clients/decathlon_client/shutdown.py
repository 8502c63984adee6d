"""Leaving when told to: what a body has opened is closed first."""

from __future__ import annotations

import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskStatus

from decathlon_client.background import background_tasks

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Departure:
    """Whether a signal has ended the body, and the status that a shell then expects."""

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None

    @property
    def status(self) -> int | None:
        """128 and the signal's number; None as long as there was none."""
        return None if self._signal is None else 128 + self._signal

    async def watch(self, leave: Callable[[], object], *, task_status: TaskStatus[None]) -> None:
        """Until the first signal, which calls `leave`; a second one ends the process at once."""
        with anyio.open_signal_receiver(*SIGNALS) as signals:
            task_status.started()
            async for received in signals:
                self._signal = received
                leave()
                return


@asynccontextmanager
async def departing(leave: Callable[[], object] | None = None) -> AsyncGenerator[Departure]:
    """SIGINT, SIGTERM and SIGHUP (a terminal that was closed) cancel the body, or do what `leave` does."""
    departure = Departure()
    async with background_tasks() as tasks:
        await tasks.start(departure.watch, leave or tasks.cancel_scope.cancel)
        yield departure
