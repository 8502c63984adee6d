"""Orderly shutdown on a signal: whatever the body has opened is closed first."""

from __future__ import annotations

import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskStatus

from decathlon_client.background import background_tasks

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalWatcher:
    """Waits for a signal and keeps the exit status that a shell expects for it."""

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None

    @property
    def status(self) -> int | None:
        """128 plus the signal's number; None if none was received."""
        return None if self._signal is None else 128 + self._signal

    async def run(self, on_signal: Callable[[], object], *, task_status: TaskStatus[None]) -> None:
        """Call `on_signal` at the first signal and return."""
        # Only the first: the receiver is closed then, so a second signal ends the process at once.
        with anyio.open_signal_receiver(*SIGNALS) as signals:
            task_status.started()
            async for received in signals:
                self._signal = received
                on_signal()
                return


@asynccontextmanager
async def shutdown_on_signal(on_signal: Callable[[], object] | None = None) -> AsyncGenerator[SignalWatcher]:
    """Cancel the body, or call `on_signal`, at SIGINT, SIGTERM or SIGHUP (the terminal was closed)."""
    watcher = SignalWatcher()
    async with background_tasks() as tasks:
        await tasks.start(watcher.run, on_signal or tasks.cancel_scope.cancel)
        yield watcher
