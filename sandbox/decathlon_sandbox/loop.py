"""The one thread that does everything: descriptors, timers, signals, and what other threads hand over."""

from __future__ import annotations

import collections
import heapq
import itertools
import os
import selectors
import signal
import time

from decathlon_sandbox.log import log_failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Action = Callable[[], object]


class Timer:
    """An action at a time to come; cancelling one that has gone off is fine."""

    __slots__ = ("action",)

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def cancel(self) -> None:
        self.action = None


class Loop:
    """Waits, and calls. An action that raises is logged and harms no other."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._actions: dict[int, Action] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._tidy_at = 100
        self._order = itertools.count()
        self._handed: collections.deque[Action] = collections.deque()
        self._running = True
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self.reads(self._wake_read, self._woken)

    def reads(self, fd: int, action: Action) -> None:
        """Call `action` whenever `fd` (non-blocking) has something to read, or has ended."""
        self._actions[fd] = action
        self._selector.register(fd, selectors.EVENT_READ)

    def writes(self, fd: int, action: Action) -> None:
        """Call `action` whenever `fd` (non-blocking) takes something, or is broken."""
        self._actions[fd] = action
        self._selector.register(fd, selectors.EVENT_WRITE)

    def forget(self, fd: int) -> None:
        """Stop watching `fd`; before it is closed. One that is not watched is fine."""
        if self._actions.pop(fd, None) is not None:
            self._selector.unregister(fd)

    def later(self, seconds: float, action: Action) -> Timer:
        if len(self._timers) >= self._tidy_at:  # most timers are deadlines, and most of those are cancelled
            self._timers = [entry for entry in self._timers if entry[2].action is not None]
            heapq.heapify(self._timers)
            self._tidy_at = 2 * len(self._timers) + 100
        timer = Timer(action)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), timer))
        return timer

    def hand_over(self, action: Action) -> None:
        """Have `action` called by the loop; from any thread, in the order handed over."""
        self._handed.append(action)
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            pass  # the pipe is full: the loop wakes anyway

    def on_signal(self, number: int, action: Action) -> None:
        # The wake-up descriptor ends the wait; the handler runs before what was handed over is looked at.

        def handler(number: int, frame: object) -> None:
            self._handed.append(action)

        signal.signal(number, handler)

    def stop(self) -> None:
        self._running = False

    def run(self) -> None:
        """Until `stop`."""
        while self._running:
            for key, _ in self._selector.select(self._until_next_timer()):
                action = self._actions.get(key.fd)
                if action is not None:
                    self._call(action)
            while self._handed:
                self._call(self._handed.popleft())
            self._call_timers()

    def _until_next_timer(self) -> float | None:
        while self._timers and self._timers[0][2].action is None:
            heapq.heappop(self._timers)
        if self._handed:
            return 0.0
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _call_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            action = heapq.heappop(self._timers)[2].action
            if action is not None:
                self._call(action)

    def _woken(self) -> None:
        try:
            os.read(self._wake_read, 4096)
        except BlockingIOError:
            pass

    def _call(self, action: Action) -> None:
        try:
            action()
        except Exception:  # noqa: BLE001  (a fault of one request must not end the others)
            log_failure("an action failed")
