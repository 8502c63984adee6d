"""Telling how far a batch is: a bar on a terminal, with `rich`; lines everywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TextIO, TypeAlias

from decathlon_client.tally import Tally

LINE_SECONDS = 10.0

Show: TypeAlias = Callable[[Tally], None]
"""Called whenever the tally has changed."""


@contextmanager
def shown(wanted: bool) -> Generator[Show]:
    """On stderr."""
    if not wanted:
        yield lambda tally: None
        return
    if sys.stderr.isatty():
        try:
            import rich  # noqa: F401  # pyright: ignore[reportUnusedImport]
        except ImportError:
            pass
        else:
            with _bar() as show:
                yield show
            return
    yield Lines(sys.stderr).show


class Lines:
    """A line now and then, and one at the end."""

    def __init__(self, stream: TextIO, every_seconds: float = LINE_SECONDS) -> None:
        self._stream = stream
        self._every_seconds = every_seconds
        self._last = time.monotonic()

    def show(self, tally: Tally) -> None:
        now = time.monotonic()
        if tally.done != tally.total and now - self._last < self._every_seconds:
            return
        self._last = now
        of = "" if tally.total is None else f" of {tally.total}"
        self._stream.write(f"{tally.done}{of} episodes: {tally}\n")
        self._stream.flush()


@contextmanager
def _bar() -> Generator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        row = bar.add_task("", total=None)

        def show(tally: Tally) -> None:
            bar.update(row, completed=tally.done, total=tally.total, description=str(tally))

        yield show
