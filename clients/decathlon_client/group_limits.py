"""The deadlines of a batch's groups."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager

import anyio
from anyio import CancelScope


class GroupLimits:
    """Gives each group `seconds` from the start of its first attempt; None: no limit.

    The clock stands still while the caller does not wait for results: while a trainer updates its weights, no
    attempts are drawn, and attempts of a group that has begun must not be late for that.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        # By the clock that stands still; to these the scopes' deadlines are set again after a pause.
        self._deadlines: dict[int, float] = {}
        self._scopes: dict[CancelScope, float] = {}
        self._paused_at: float | None = None
        self._paused_seconds = 0.0

    @contextmanager
    def limit(self, group: int) -> Generator[CancelScope]:
        """Cancel the body at the group's deadline, or `lift` it before. The first use starts the clock."""
        with CancelScope() as scope:
            if self._seconds is not None:
                now = anyio.current_time() if self._paused_at is None else self._paused_at
                deadline = now - self._paused_seconds + self._seconds
                self._scopes[scope] = self._deadlines.setdefault(group, deadline)
                self._set(scope)
            try:
                yield scope
            finally:
                self._scopes.pop(scope, None)

    def lift(self, scope: CancelScope) -> None:
        """Do not cancel the body of `limit` any more."""
        self._scopes.pop(scope, None)
        scope.deadline = math.inf

    @contextmanager
    def paused(self) -> Generator[None]:
        """Let the clock stand still."""
        self._paused_at = anyio.current_time()
        for scope in self._scopes:
            self._set(scope)
        try:
            yield
        finally:
            self._paused_seconds += anyio.current_time() - self._paused_at
            self._paused_at = None
            for scope in self._scopes:
                self._set(scope)

    def _set(self, scope: CancelScope) -> None:
        is_running = self._paused_at is None
        scope.deadline = self._scopes[scope] + self._paused_seconds if is_running else math.inf
