"""The lease of an episode: the deadline of a cancel scope, renewed by every request."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager

import anyio


class Lease:
    """An idle time limit within an absolute one; the absolute one starts with `start`."""

    def __init__(self, *, idle_seconds: float, absolute_seconds: float) -> None:
        self._idle_seconds = idle_seconds
        self._absolute_seconds = absolute_seconds
        self._absolute_deadline = math.inf
        self._holders = 0
        self._renewed_at = anyio.current_time()
        self._scope: anyio.CancelScope | None = None
        self._ended = False

    @property
    def deadline(self) -> float:
        """When the lease expires, by the event loop's clock; infinite while it is held before `start`."""
        idle_deadline = math.inf if self._holders else self._renewed_at + self._idle_seconds
        return min(idle_deadline, self._absolute_deadline)

    @property
    def absolute_expired(self) -> bool:
        """Whether the absolute time limit has passed."""
        return anyio.current_time() >= self._absolute_deadline

    @property
    def expired(self) -> bool:
        """Whether the lease ran out inside the current `limit`, or `end` was called."""
        return self._ended or (self._scope is not None and self._scope.cancel_called)

    @contextmanager
    def limit(self) -> Generator[anyio.CancelScope]:
        """Cancel the body when the lease expires or `end` is called."""
        try:
            with anyio.CancelScope(deadline=self.deadline) as self._scope:
                if self._ended:
                    self._scope.cancel()
                yield self._scope
        finally:
            self._scope = None

    def start(self) -> None:
        """Start the absolute time limit and renew the idle one."""
        self._absolute_deadline = anyio.current_time() + self._absolute_seconds
        self._renew()

    @contextmanager
    def hold(self) -> Generator[None]:
        """Stop the idle time limit while a request is served or a stream is open, then renew it."""
        self._holders += 1
        self._renew()
        try:
            yield
        finally:
            self._holders -= 1
            self._renew()

    def end(self) -> None:
        """Cancel the body of `limit`, now or as soon as it is entered."""
        self._ended = True
        if self._scope is not None:
            self._scope.cancel()

    def suspend(self) -> None:
        """Remove the deadline of the current `limit`: neither time nor `end` cancels its body any more."""
        if self._scope is not None:
            self._scope.deadline = math.inf
            self._scope = None

    def _renew(self) -> None:
        self._renewed_at = anyio.current_time()
        if self._scope is not None:
            self._scope.deadline = self.deadline
