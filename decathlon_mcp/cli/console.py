"""What is shown of a script as it is played: colours on a terminal, plain text in a pipe, no silent wait."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
from rich.console import Console
from rich.text import Text

from decathlon_mcp.background import background_tasks

TICK_SECONDS = 0.5
STILL_SECONDS = 5.0
REPLY_LINES = 6
WIDTH = 100


class Screen:
    """Writes on stdout, or on stderr."""

    def __init__(self, *, stderr: bool = False) -> None:
        self._console = Console(highlight=False, markup=False, stderr=stderr)

    def say(self, what: str, text: str, style: str = "") -> None:
        """One fact: what it is, and it."""
        self._print(Text.assemble((f"  {what:<9} ", "bold"), (text, style)))

    def title(self, text: str) -> None:
        self._print(Text(f"\n{text}", "bold cyan"))

    def prompt(self, text: str) -> None:
        """The task's words, the whole of them."""
        for number, line in enumerate(text.splitlines()):
            self._print(Text.assemble((f"  {'prompt' if number == 0 else '':<9} ", "bold"), (line, "dim")))

    def call(self, tool: str, arguments: Mapping[str, Any]) -> None:
        """What is asked of a tool."""
        given = json.dumps(arguments, ensure_ascii=False) if arguments else ""
        self._print(Text.assemble(("\n  → ", "bold blue"), (tool, "bold blue"), f" {_cut(given)}"))

    def progress(self, progress: float, total: float | None, message: str | None) -> None:
        """What a call that is under way says."""
        share = f"{progress:g} of {total:g}" if total else f"{progress:g}"
        self._print(Text(f"    · {message or 'under way'} ({share})", "magenta"))

    def reply(self, text: str, *, failed: bool = False) -> None:
        """What came back."""
        lines = text.splitlines() or ["(nothing)"]
        for number, line in enumerate(lines[:REPLY_LINES]):
            arrow = "  ← " if number == 0 else "    "
            self._print(Text.assemble((arrow, "bold green"), (_cut(line), "red" if failed else "")))
        if len(lines) > REPLY_LINES:
            self._print(Text(f"    … {len(lines) - REPLY_LINES} lines more", "dim"))

    def fault(self, text: str) -> None:
        """What went wrong."""
        self._print(Text(f"  ✗ {text}", "bold red"))

    @asynccontextmanager
    async def waiting(self, what: str) -> AsyncGenerator[None]:
        """Say what is being waited for, and go on saying so; then how long it took."""
        started = anyio.current_time()
        async with background_tasks() as tasks:
            tasks.start_soon(self._spin if self._console.is_terminal else self._tick, what, started)
            yield
        self.say("done", f"{what} ({anyio.current_time() - started:.1f} s)", "dim")

    async def _spin(self, what: str, started: float) -> None:
        with self._console.status(what) as status:
            while True:
                await anyio.sleep(TICK_SECONDS)
                status.update(f"{what} ({anyio.current_time() - started:.0f} s)")

    async def _tick(self, what: str, started: float) -> None:
        self.say("waiting", f"{what} …")
        while True:
            await anyio.sleep(STILL_SECONDS)
            self.say("waiting", f"{what}: {anyio.current_time() - started:.0f} s …")

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)


def _cut(text: str) -> str:
    return text if len(text) <= 3 * WIDTH else f"{text[: 3 * WIDTH]} … ({len(text)} characters)"
