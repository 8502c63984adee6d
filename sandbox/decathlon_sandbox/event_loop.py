"""Single-threaded event loop: descriptors, timers, signals and callbacks of threads. And the driver's log."""

from __future__ import annotations

import collections
import heapq
import itertools
import os
import select
import selectors
import signal
import sys
import time
from collections.abc import Callable

Callback = Callable[[], object]

MAX_WAIT_SECONDS = 3600.0
_MAX_LOG_BYTES = 4000  # below PIPE_BUF: a pipe that polls as writable accepts this much without blocking


class Timer:
    """A callback scheduled with `EventLoop.call_later`. Cancelling it after it ran has no effect."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callback) -> None:
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        self.callback = None


class EventLoop:
    """Waits for events and runs their callbacks. An exception in a callback is logged; the loop goes on."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._callbacks: dict[int, Callback] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._purge_at_count = 100
        self._timer_order = itertools.count()
        self._ready: collections.deque[Callback] = collections.deque()
        self._running = True
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self.add_reader(self._wake_read, self._drain_wake_pipe)

    def add_reader(self, fd: int, callback: Callback) -> None:
        """Call `callback` whenever `fd` (non-blocking) is readable or at its end."""
        self._callbacks[fd] = callback
        self._selector.register(fd, selectors.EVENT_READ)

    def add_writer(self, fd: int, callback: Callback) -> None:
        """Call `callback` whenever `fd` (non-blocking) is writable or broken."""
        self._callbacks[fd] = callback
        self._selector.register(fd, selectors.EVENT_WRITE)

    def remove(self, fd: int) -> None:
        """Stop watching `fd`; call it before closing `fd`. No effect if `fd` is not watched."""
        if self._callbacks.pop(fd, None) is not None:
            self._selector.unregister(fd)

    def call_later(self, seconds: float, callback: Callback) -> Timer:
        # Most timers are deadlines and most deadlines are cancelled, so cancelled timers would pile up.
        if len(self._timers) >= self._purge_at_count:
            self._timers = [entry for entry in self._timers if entry[2].callback is not None]
            heapq.heapify(self._timers)
            self._purge_at_count = 2 * len(self._timers) + 100
        timer = Timer(callback)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._timer_order), timer))
        return timer

    def call_soon_threadsafe(self, callback: Callback) -> None:
        """Run `callback` in the loop. Callable from any thread; callbacks run in the order of the calls."""
        self._ready.append(callback)
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            pass  # the pipe is full, so the loop wakes up anyway

    def add_signal_handler(self, number: int, callback: Callback) -> None:
        # The wake-up descriptor ends the wait, and Python runs the handler before the loop looks at `_ready`.

        def handler(number: int, frame: object) -> None:
            self._ready.append(callback)

        signal.signal(number, handler)

    def stop(self) -> None:
        self._running = False

    def run(self) -> None:
        """Run until `stop` is called."""
        while self._running:
            for key, _ in self._selector.select(self._seconds_to_next_event()):
                callback = self._callbacks.get(key.fd)
                if callback is not None:
                    self._call(callback)
            while self._ready:
                self._call(self._ready.popleft())
            self._run_due_timers()

    def _seconds_to_next_event(self) -> float | None:
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        if self._ready:
            return 0.0
        if not self._timers:
            return None
        # epoll_wait(2) waits for at most 24 days.
        return min(max(0.0, self._timers[0][0] - time.monotonic()), MAX_WAIT_SECONDS)

    def _run_due_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            callback = heapq.heappop(self._timers)[2].callback
            if callback is not None:
                self._call(callback)

    def _drain_wake_pipe(self) -> None:
        try:
            os.read(self._wake_read, 4096)
        except BlockingIOError:
            pass

    def _call(self, callback: Callback) -> None:
        try:
            callback()
        except Exception:  # noqa: BLE001  (an error in one request must not end the others)
            log_exception("a callback failed")


def log(text: str) -> None:
    """Write an entry of at most 4 kB to stderr, without blocking. Dropped if stderr is full or closed."""
    data = text.encode("utf-8", "replace")[:_MAX_LOG_BYTES].rstrip(b"\n") + b"\n"
    try:
        poll = select.poll()
        poll.register(2, select.POLLOUT)
        if any(event & select.POLLOUT for _, event in poll.poll(0)):
            os.write(2, data)
    except OSError:
        pass


def log_exception(message: str) -> None:
    """Log the exception being handled, with the places it passed through."""
    # Without the module `traceback`: it would be imported from a file system that an agent may have changed.
    kind, error, trace = sys.exc_info()
    lines = [f"decathlon: {message}: {kind.__name__ if kind else None}: {error}"]
    while trace is not None:
        code = trace.tb_frame.f_code
        lines.append(f"  {code.co_filename}:{trace.tb_lineno} in {code.co_name}")
        trace = trace.tb_next
    log("\n".join(lines))
