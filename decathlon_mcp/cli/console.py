"""Console output of `demo` and `play`: coloured on a terminal, plain in a pipe; and notes of long waits."""

from __future__ import annotations

import json
import textwrap
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
from decathlon_client.client_values import server_url
from decathlon_client.sdk import http_client, httpx
from rich.text import Text

from decathlon_mcp.background import background_tasks
from decathlon_mcp.cli.terminal import Terminal
from decathlon_mcp.cli.usage import report

STATUS_SECONDS = 5.0
"""Interval of the lines that show a wait in a pipe."""
MAX_REPLY_LINES = 6
MAX_LINE_CHARACTERS = 300
MAX_INDENT = 12
"""Columns by which the rest of a long line is indented at most."""
MIN_WIDTH = 20
"""Columns that the text of a line has at least, on however narrow a terminal."""


class ScriptConsole:
    """Prints the steps of a script on stdout or stderr."""

    def __init__(self, *, stderr: bool = False) -> None:
        self._console = Terminal(highlight=False, markup=False, stderr=stderr)

    def line(self, label: str, text: str, style: str = "") -> None:
        self._print(f"  {label:<9} ", "bold", text, style)

    def title(self, text: str) -> None:
        self._console.print(Text(f"\n{text}", "bold cyan"), soft_wrap=True)

    def prompt(self, text: str) -> None:
        for number, line in enumerate(text.splitlines()):
            self.line("prompt" if number == 0 else "", line, "dim")

    def call(self, tool: str, arguments: Mapping[str, Any]) -> None:
        arguments_json = json.dumps(arguments, ensure_ascii=False) if arguments else ""
        self._console.print()
        self._print(f"  → {tool} ", "bold blue", _shorten(arguments_json))

    def progress(self, progress: float, total: float | None, message: str | None) -> None:
        share = f"{progress:g} of {total:g}" if total else f"{progress:g}"
        self._print("    · ", "magenta", f"{message or 'in progress'} ({share})", "magenta")

    def reply(self, text: str, *, failed: bool = False) -> None:
        lines = text.splitlines() or ["(empty)"]
        for number, line in enumerate(lines[:MAX_REPLY_LINES]):
            arrow = "  ← " if number == 0 else "    "
            self._print(arrow, "bold green", _shorten(line), "red" if failed else "")
        if len(lines) > MAX_REPLY_LINES:
            self._print("    … ", "dim", f"{len(lines) - MAX_REPLY_LINES} more lines", "dim")

    def error(self, text: str) -> None:
        self._print("  ✗ ", "bold red", text, "bold red")

    @asynccontextmanager
    async def waiting(self, what: str) -> AsyncGenerator[None]:
        """Show that the body is being waited for, and at its end how long it took."""
        started = anyio.current_time()
        async with background_tasks() as tasks:
            tasks.start_soon(self._spin if self._console.is_terminal else self._tick, what, started)
            yield
        self.line("done", f"{what} ({anyio.current_time() - started:.1f} s)", "dim")

    async def _spin(self, what: str, started: float) -> None:
        with self._console.status(what) as status:
            while True:
                await anyio.sleep(0.5)  # the time shown has whole seconds
                status.update(f"{what} ({anyio.current_time() - started:.0f} s)")

    async def _tick(self, what: str, started: float) -> None:
        self.line("waiting", f"{what} …")
        while True:
            await anyio.sleep(STATUS_SECONDS)
            self.line("waiting", f"{what}: {anyio.current_time() - started:.0f} s …")

    def _print(self, head: str, head_style: str, text: str, style: str = "") -> None:
        if self._console.is_terminal:
            # Between words and indented; addresses stay whole, so that they can be copied.
            indent = min(len(head), MAX_INDENT)
            lines = textwrap.wrap(
                text,
                max(self._console.width - indent, MIN_WIDTH),
                initial_indent=" " * (len(head) - indent),
                break_long_words=False,
                break_on_hyphens=False,
                replace_whitespace=False,
            )
            text = f"\n{' ' * indent}".join(lines)[len(head) - indent :]
        self._console.print(Text.assemble((head, head_style), (text, style)), soft_wrap=True)


def _shorten(text: str) -> str:
    if len(text) <= MAX_LINE_CHARACTERS:
        return text
    return f"{text[:MAX_LINE_CHARACTERS]} … ({len(text)} characters)"


QUIET_SECONDS = 3.0
"""Pause between two questions. Most commands end before the first one."""
ANSWER_SECONDS = 2.0
"""How long a server that works takes to answer `/healthz` at most; with the pause, 5 s until the line."""
OF_A_PROXY = frozenset({502, 504})
"""Statuses with which a proxy answers for a server that is gone."""


@asynccontextmanager
async def reporting_absence(url: str | None) -> AsyncGenerator[None]:
    """Ask the server at `url` in the background whether it works, as long as the body runs.

    The body itself goes on: a request may take minutes on a server that works, and after a lost connection it
    is sent again. None: see `server_url`. Raises ValueError for a URL that cannot be right.
    """
    root = server_url(url, is_root=True).rstrip("/").removesuffix("/mcp")
    async with background_tasks() as tasks:
        tasks.start_soon(_report_absence, root)
        yield


async def server_answers(root: str) -> bool:
    """Whether a server works at its root address."""
    async with http_client({}) as client:
        return await _answers(client, root)


async def _report_absence(root: str) -> None:
    is_away = False
    async with http_client({}) as client:
        while True:
            await anyio.sleep(QUIET_SECONDS)
            if await _answers(client, root) is not is_away:
                continue
            is_away = not is_away
            what = "does not answer; this command waits for it" if is_away else "answers again"
            report(f"the server at {root} {what}")


async def _answers(client: httpx.AsyncClient, root: str) -> bool:
    with anyio.move_on_after(ANSWER_SECONDS):
        try:
            # One byte of any answer is enough; its body is not read.
            async with client.stream("GET", f"{root}/healthz", follow_redirects=False) as response:
                return response.status_code not in OF_A_PROXY
        except (httpx.HTTPError, httpx.InvalidURL):
            return False
    return False
