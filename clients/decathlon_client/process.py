"""This process's signals and stdin: an orderly shutdown, and a read of stdin that can be ended."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Self

import anyio
from anyio.abc import TaskStatus

from decathlon_client.task_groups import background_tasks

CHUNK_BYTES = 1 << 16
MAX_LINE_BYTES = 16 << 20
"""Longest line that is passed on: four times the largest request that a server accepts by default."""
OVERLONG_LINE = b"(a line over the limit)\n"
"""Passed on in place of an overlong line. It is not JSON, so it is answered with a parse error."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that stop this process in order: SIGINT, SIGTERM, and SIGHUP (the terminal was closed).

    Not SIGHUP where `nohup` has had it ignored, nor on Windows, which has none.
    """
    hang_up: signal.Signals | None = getattr(signal, "SIGHUP", None)
    if hang_up is None or signal.getsignal(hang_up) is signal.SIG_IGN:
        return signal.SIGINT, signal.SIGTERM
    return signal.SIGINT, signal.SIGTERM, hang_up


class SignalWatcher:
    """Keeps the exit status that a shell expects for a signal; None if none was received."""

    status: int | None = None


@asynccontextmanager
async def shutdown_on_signal() -> AsyncGenerator[SignalWatcher]:
    """Cancel the body at the first of `stop_signals`."""
    watcher = SignalWatcher()

    async def watch(*, task_status: TaskStatus[None]) -> None:
        # Only the first: the receiver is closed then, so a second signal ends the process at once.
        with anyio.open_signal_receiver(*stop_signals()) as signals:
            task_status.started()
            async for received in signals:
                watcher.status = 128 + received
                tasks.cancel_scope.cancel()
                return

    async with background_tasks() as tasks:
        await tasks.start(watch)
        yield watcher


class StdinPump:
    """Copies the lines of a file descriptor into a socket until the descriptor ends or `stop` is called.

    Readers of the socket's other end then see the end of the file. A line over `MAX_LINE_BYTES` is replaced
    by `OVERLONG_LINE`. `on_end` is called in the thread at the descriptor's end.
    """

    # A thread that blocks in a read of stdin cannot be interrupted. This daemon thread need not be: readers
    # use the socket, which can be shut down under them.

    def __init__(self, source: int, sink: socket.socket, on_end: Callable[[], object] | None = None) -> None:
        self._source = source
        self._sink = sink
        self._on_end = on_end
        threading.Thread(target=self._copy, name="stdin", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _copy(self) -> None:
        with suppress(OSError):
            # The beginning of a line whose end has not been read; None for the rest of an overlong line.
            line: bytearray | None = bytearray()
            while chunk := os.read(self._source, CHUNK_BYTES):
                complete, newline, rest = chunk.rpartition(b"\n")
                if newline:
                    if line is None:
                        complete = complete.partition(b"\n")[2]
                        self._sink.sendall(OVERLONG_LINE + complete + (newline if complete else b""))
                    else:
                        self._sink.sendall(bytes(line) + complete + newline)
                    line = bytearray(rest)
                elif line is not None:
                    line += rest
                    if len(line) > MAX_LINE_BYTES:
                        line = None
            if line:
                self._sink.sendall(line)
        self.stop()
        if self._on_end is not None:
            with suppress(RuntimeError):  # the event loop is closed
                self._on_end()

    def stop(self) -> None:
        """End the copy. Calling it again does nothing."""
        with suppress(OSError):
            self._sink.shutdown(socket.SHUT_WR)


async def stop_on_signal(pump: StdinPump) -> bool:
    """Stop the pump at the first of `stop_signals`. False, at once, on systems without signal receivers."""
    with suppress(NotImplementedError), anyio.open_signal_receiver(*stop_signals()) as signals:
        async for _ in signals:
            pump.stop()
            return True
    return False
