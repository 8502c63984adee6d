"""Time limits for closing, shortened after an interrupt."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager

import anyio

INTERRUPTED_SECONDS = 3.5
"""Time to close everything after an interrupt, however much there is to close."""


class ThreadInterrupted(Exception):  # noqa: N818
    """Ctrl-C in another thread, passed on to the event loop's thread."""


class CloseBudget:
    """The time that closing may take, shared by everything that is closed together."""

    def __init__(self) -> None:
        self._deadline = math.inf
        self._scopes: set[anyio.CancelScope] = set()

    @contextmanager
    def shield(self, seconds: float) -> Generator[anyio.CancelScope]:
        """Protect the body from cancellation for that long, or less after an interrupt."""
        deadline = min(anyio.current_time() + seconds, self._deadline)
        with anyio.CancelScope(deadline=deadline, shield=True) as scope:
            self._scopes.add(scope)
            try:
                yield scope
            finally:
                self._scopes.discard(scope)

    def shorten(self, seconds: float = INTERRUPTED_SECONDS) -> None:
        """Limit everything that is being closed, or will be, to that long from now."""
        self._deadline = min(self._deadline, anyio.current_time() + seconds)
        for scope in self._scopes:
            scope.deadline = min(scope.deadline, self._deadline)

    @contextmanager
    def shorten_on_interrupt(self) -> Generator[None]:
        """Shorten the budget if the body is cancelled or interrupted."""
        try:
            yield
        except BaseException as error:
            if is_interrupt(error):
                self.shorten()
            raise


def is_interrupt(error: BaseException | None) -> bool:
    """Whether the error is a cancellation or Ctrl-C."""
    kinds = (KeyboardInterrupt, ThreadInterrupted, anyio.get_cancelled_exc_class())
    return isinstance(error, kinds)
