"""The driver of a terminal that can go away while the player runs: a closed window, a lost connection."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TextIO, cast

from textual.drivers.linux_driver import LinuxDriver


class LossyFile:
    """A terminal's output; what is written after the terminal has gone is lost without an error."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with suppress(OSError):
            return self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class TerminalDriver(LinuxDriver):
    """Textual's driver, which does not hang when its terminal has gone. Checked with Textual 8.2."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)  # pyright: ignore[reportUnknownMemberType]
        # An error ends Textual's thread for output, and its queue then fills up: the application would wait
        # for ever for a place in it, at the latest when it restores the terminal.
        self._file = cast("TextIO", LossyFile(self._file))
