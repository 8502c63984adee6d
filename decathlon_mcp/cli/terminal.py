"""A console for texts that clients, sandboxes and suites may have written."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from decathlon_mcp.cli.output import without_controls


class Terminal(Console):
    """Shows a sign in the place of each control character of a text: rich passes them on to the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=without_controls(segment.text))

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # as print does; rich would raise SystemExit
