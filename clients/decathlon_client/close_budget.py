"""How long good-byes may take: each a while of its own, and all of them little once somebody wants out."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager

import anyio

HURRY_SECONDS = 3.5
"""What is left of closing, however much there is to close, once whoever waits for it was interrupted."""


class ThreadInterrupted(Exception):  # noqa: N818
    """Ctrl-C in another thread, told to the event loop's."""


class CloseBudget:
    """Shared by what is closed together."""

    def __init__(self) -> None:
        self._deadline = math.inf
        self._scopes: set[anyio.CancelScope] = set()

    @contextmanager
    def shielded(self, seconds: float) -> Generator[anyio.CancelScope]:
        """Not cancelled from outside; given up after so long, or sooner in a hurry."""
        deadline = min(anyio.current_time() + seconds, self._deadline)
        with anyio.CancelScope(deadline=deadline, shield=True) as scope:
            self._scopes.add(scope)
            try:
                yield scope
            finally:
                self._scopes.discard(scope)

    def hurry(self, seconds: float = HURRY_SECONDS) -> None:
        """From now on, so long for everything that is under way or still to come."""
        self._deadline = min(self._deadline, anyio.current_time() + seconds)
        for scope in self._scopes:
            scope.deadline = min(scope.deadline, self._deadline)

    @contextmanager
    def hurried(self, seconds: float = HURRY_SECONDS) -> Generator[None]:
        """A body that is interrupted leaves in a hurry."""
        try:
            yield
        except BaseException as error:
            if is_interruption(error):
                self.hurry(seconds)
            raise


def is_interruption(error: BaseException | None) -> bool:
    """A cancellation, or Ctrl-C."""
    kinds = (KeyboardInterrupt, ThreadInterrupted, anyio.get_cancelled_exc_class())
    return isinstance(error, kinds)
