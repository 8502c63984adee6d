"""Record `decathlon-mcp demo` for the README: a real run in a pseudo-terminal, drawn as an SVG.

    .venv/bin/python docs/images/record.py                   plays the demo, writes docs/images/demo.svg
    .venv/bin/python docs/images/record.py --still OUT.svg   all of it below each other, as one long picture
    .venv/bin/python docs/images/record.py --task recount-ballots

The picture is a film: every line comes when it came, but for pauses longer than IDLE_SECONDS, and what does
not fit scrolls away. Where nothing moves (in print, for a reader who wants no motion, in a program that knows
no CSS animation) it shows the end. Nothing in it is fetched from anywhere. Needs Linux, and the extras server
and starter.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import struct
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from rich.console import Console
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME as THEME
from rich.text import Text

HERE = Path(__file__).parent
COLUMNS = 112
ROWS = 36
CELL, LINE, FONT = 8.4, 19.0, 14.0
"""Pixels: a cell's width, a line's height, the letters' size."""
MARGIN, BAR = 14.0, 34.0
IDLE_SECONDS = 1.5
HOLD_SECONDS = 8.0
"""How long the end stands before the film starts again."""
TITLE = "decathlon-mcp demo"
CONSOLE = Console(width=COLUMNS)
CONTROL = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])|\r|\n")


@dataclass(slots=True)
class Row:
    """A line of the terminal as it ended: its text with colours, and when the last of it came."""

    text: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class Screen:
    """As much of a terminal as the demo uses: lines, colours, a spinner's line cleared and written anew."""

    rows: list[Row] = field(default_factory=lambda: [Row()])
    at: int = 0

    def feed(self, text: str, seconds: float) -> None:
        """Take what was written. Raises ValueError for a sequence that is not known."""
        start = 0
        for match in CONTROL.finditer(text):
            self._write(text[start : match.start()], seconds)
            self._obey(match, seconds)
            start = match.end()
        self._write(text[start:], seconds)

    def _write(self, text: str, seconds: float) -> None:
        if text:
            self.rows[self.at].text += text
            self.rows[self.at].seconds = seconds

    def _obey(self, match: re.Match[str], seconds: float) -> None:
        match match[0], match[2]:
            case "\n", _:
                self.at += 1
                if self.at == len(self.rows):
                    self.rows.append(Row(seconds=seconds))
            case "\r", _:
                pass  # what follows is a new line, or an order to clear this one
            case _, "m":
                self._write(match[0], seconds)
            case "\x1b[2K", _:
                self.rows[self.at] = Row(seconds=seconds)
            case "\x1b[1A", _:
                self.at -= 1
            case _, "l" | "h":
                pass  # the cursor, hidden and shown
            case _:
                raise ValueError(f"what is this: {match[0]!r}")


def play(words: Sequence[str]) -> tuple[int, list[Row]]:
    """Run a command in a pseudo-terminal; its exit status and what stands on the screen in the end."""
    started = time.monotonic()
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(ROWS), TMPDIR="/tmp")
        for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
            os.environ.pop(name, None)
        os.execvp(words[0], list(words))
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    screen, rest = Screen(), b""
    for chunk in _chunks(terminal):
        *full_text, rest = (rest + chunk).split(b"\n")
        for line in full_text:
            screen.feed(line.decode() + "\n", time.monotonic() - started)
    screen.feed(rest.decode(), time.monotonic() - started)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), screen.rows


def _chunks(terminal: int) -> Iterator[bytes]:
    while True:
        try:
            chunk = os.read(terminal, 1 << 16)
        except OSError:  # what Linux says when the last process of a terminal has gone
            return
        if not chunk:
            return
        yield chunk


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the picture."""

    text: Text
    seconds: float


def wrapped(rows: Sequence[Row]) -> list[Line]:
    """The lines as they fit into the width, between words; times never go back."""
    lines: list[Line] = []
    latest = shown = 0.0
    for row in rows:
        shown += min(IDLE_SECONDS, max(0.0, row.seconds - latest))
        latest = max(latest, row.seconds)
        text = Text.from_ansi(row.text)
        indent = _indent(text.flatten)
        for number, part in enumerate(_parts(text, indent)):
            if number:
                part.pad_left(indent)
            lines.append(Line(part, shown))
    while lines and not lines[-1].text.flatten.strip():
        lines.pop()
    return lines


def _indent(line: str) -> int:
    """Where what does not fit goes on: below the words of a fact, or of what a tool is told and says."""
    if line[2:3] in ("→", "←") or (line.startswith("    ") and not line.startswith(" " * 12)):
        return 4
    return 12 if line.startswith("  ") else 0


def _parts(text: Text, indent: int) -> Iterator[Text]:
    rest, room = text, COLUMNS
    while len(rest.flatten) > room:
        space = rest.flatten.rfind(" ", indent, room + 1)
        cut = space if space > room // 2 else room
        yield rest[:cut]
        rest = rest[cut + 1 :] if cut == space else rest[cut:]
        room = COLUMNS - indent
    yield rest


def draw(lines: Sequence[Line], *, film: bool) -> str:
    """The SVG."""
    rows = ROWS if film else len(lines)
    width = 2 * MARGIN + COLUMNS * CELL
    height = BAR + rows * LINE + MARGIN
    ground, ink = THEME.background_color.hex, THEME.foreground_color.hex
    body = "\n".join(_text(line, number) for number, line in enumerate(lines))
    lights = "".join(
        f'<circle cx="{22 + 20 * n}" cy="17" r="6" fill="{colour}"/>'
        for n, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" \
role="img" aria-label="A recording of {TITLE}">
<title>A recording of {TITLE}</title>
<style>
text {{ font: {FONT}px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; \
fill: {ink}; white-space: pre; }}
{_motion(lines) if film else ""}</style>
<rect width="100%" height="100%" rx="9" fill="{ground}"/>
{lights}<text x="50%" y="22" text-anchor="middle" opacity="0.7">{TITLE}</text>
<svg x="0" y="{BAR:.0f}" width="{width:.0f}" height="{rows * LINE:.0f}">
<g class="film">
{body}
</g>
</svg>
</svg>
"""


def _motion(lines: Sequence[Line]) -> str:
    """Each line is there from its time on, and the whole moves up by what does not fit."""
    full_text = lines[-1].seconds + HOLD_SECONDS
    moves = ["0% { transform: translateY(0); }"]
    appear: list[str] = []
    for number, line in enumerate(lines):
        percent = 100 * line.seconds / full_text
        appear.append(
            f"@keyframes l{number} {{ 0%, {max(0, percent - 0.001):.3f}% {{ opacity: 0; }} "
            f"{percent:.3f}%, 100% {{ opacity: 1; }} }}\n"
            f"#l{number} {{ animation: l{number} {full_text:.2f}s infinite; }}"
        )
        if number >= ROWS:
            moves.append(f"{percent:.3f}% {{ transform: translateY({-(number + 1 - ROWS) * LINE:.0f}px); }}")
    end = -max(0, len(lines) - ROWS) * LINE
    joined = "\n".join(appear)
    return (
        f".film {{ transform: translateY({end:.0f}px); }}\n"
        "@media screen and (prefers-reduced-motion: no-preference) {\n"
        f"@keyframes film {{ {' '.join(moves)} 100% {{ transform: translateY({end:.0f}px); }} }}\n"
        f".film {{ animation: film {full_text:.2f}s step-end infinite; }}\n{joined}\n}}\n"
    )


def _text(line: Line, number: int) -> str:
    spans: list[str] = []
    column = 0
    for segment in line.text.render(CONSOLE):
        text, style = segment.text.rstrip("\n"), segment.style or Style()
        if text.strip():
            lead = len(text) - len(text.lstrip())
            x = MARGIN + (column + lead) * CELL
            shown = text.strip()
            place = f'x="{x:.1f}" textLength="{len(shown) * CELL:.1f}"'
            spans.append(f"<tspan {place}{_style(style)}>{escape(shown)}</tspan>")
        column += len(text)
    return f'<text id="l{number}" y="{number * LINE + FONT:.1f}">{"".join(spans)}</text>'


def _style(style: Style) -> str:
    text_ = f' fill="{style.color.get_truecolor(THEME).hex}"' if style.color else ""
    if style.bold:
        text_ += ' font-weight="bold"'
    if style.dim:
        text_ += ' opacity="0.75"'
    return text_


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", help="the task to play")
    parser.add_argument("--still", type=Path, metavar="FILE", help="all of it as one long picture")
    words_ = parser.parse_args()
    command = str(Path(sys.executable).with_name("decathlon-mcp"))
    status, rows = play([command, "demo", *(["--task", words_.task] if words_.task else [])])
    if status != 0:
        sys.exit(f"the demo ended with status {status}: no picture of that")
    into = words_.still or HERE / "demo.svg"
    into.write_text(draw(wrapped(rows), film=words_.still is None), "utf-8")


if __name__ == "__main__":
    main()
