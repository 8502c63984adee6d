"""Records `decathlon-mcp demo` in a pseudo-terminal and draws it as an animated SVG for the README.

    .venv/bin/python docs/images/record.py                   runs the demo, writes docs/images/demo.svg
    .venv/bin/python docs/images/record.py --still OUT.svg   one tall picture without animation
    .venv/bin/python docs/images/record.py --task recount-ballots

Every line appears when it appeared in the terminal, but pauses are cut to IDLE_SECONDS; lines that do not fit
scroll off. The picture starts with the end, and without animation (in print, with reduced motion, in a
program without CSS animation) it shows only the end. It loads nothing from the network. Requires Linux
and the extras server and starter.
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
CELL_WIDTH, LINE_HEIGHT, FONT_SIZE = 8.4, 19.0, 14.0
MARGIN, TITLE_BAR = 14.0, 34.0
"""All in pixels."""
IDLE_SECONDS = 1.5
"""The longest pause between two lines."""
HOLD_SECONDS = 8.0
"""How long the last picture stays before the animation starts again."""
FIRST_SECONDS = 3.0
"""How long of this time the picture shows the end when it is opened: a preview shows only the first frame."""
TITLE = "decathlon-mcp demo"
CONSOLE = Console(width=COLUMNS)
CONTROL = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])|\r|\n")


@dataclass(slots=True)
class Row:
    """A terminal line: its final text with escape sequences for colours, and the time of its last change."""

    text: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class Screen:
    """The part of a terminal that the demo needs: lines, colours, and clearing a spinner's line."""

    rows: list[Row] = field(default_factory=lambda: [Row()])
    cursor: int = 0

    def feed(self, text: str, seconds: float) -> None:
        """Apply output of the program. Raises ValueError for an unknown escape sequence."""
        start = 0
        for match in CONTROL.finditer(text):
            self._write(text[start : match.start()], seconds)
            self._apply(match, seconds)
            start = match.end()
        self._write(text[start:], seconds)

    def _write(self, text: str, seconds: float) -> None:
        if text:
            self.rows[self.cursor].text += text
            self.rows[self.cursor].seconds = seconds

    def _apply(self, match: re.Match[str], seconds: float) -> None:
        match match[0], match[2]:
            case "\n", _:
                self.cursor += 1
                if self.cursor == len(self.rows):
                    self.rows.append(Row(seconds=seconds))
            case "\r", _:
                pass  # followed by a line feed or by the sequence that clears the line
            case _, "m":
                self._write(match[0], seconds)
            case "\x1b[2K", _:
                self.rows[self.cursor] = Row(seconds=seconds)
            case "\x1b[1A", _:
                self.cursor -= 1
            case _, "l" | "h":
                pass  # hides and shows the cursor
            case _:
                raise ValueError(f"unknown escape sequence: {match[0]!r}")


def run(command: Sequence[str]) -> tuple[int, list[Row]]:
    """Run a command in a pseudo-terminal. Returns its exit code and the lines on the screen at its end."""
    started = time.monotonic()
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(ROWS), TMPDIR="/tmp")
        for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
            os.environ.pop(name, None)
        os.execvp(command[0], list(command))
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    screen, rest = Screen(), b""
    for chunk in _chunks(terminal):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            screen.feed(line.decode() + "\n", time.monotonic() - started)
    screen.feed(rest.decode(), time.monotonic() - started)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), screen.rows


def _chunks(terminal: int) -> Iterator[bytes]:
    while True:
        try:
            chunk = os.read(terminal, 1 << 16)
        except OSError:  # Linux raises EIO once the last process of the terminal has ended
            return
        if not chunk:
            return
        yield chunk


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the picture and the time at which it appears."""

    text: Text
    seconds: float


def wrap(rows: Sequence[Row]) -> list[Line]:
    """Break the rows between words at COLUMNS; times never decrease."""
    lines: list[Line] = []
    latest = appears = 0.0
    for row in rows:
        appears += min(IDLE_SECONDS, max(0.0, row.seconds - latest))
        latest = max(latest, row.seconds)
        text = Text.from_ansi(row.text)
        indent = _indent(text.plain)
        for number, part in enumerate(_parts(text, indent)):
            if number:
                part.pad_left(indent)
            lines.append(Line(part, appears))
    while lines and not lines[-1].text.plain.strip():
        lines.pop()
    return lines


def _indent(line: str) -> int:
    """The indent of continuation lines: that of the text after a label, an argument or a tool's output."""
    if line[2:3] in ("→", "←") or (line.startswith("    ") and not line.startswith(" " * 12)):
        return 4
    return 12 if line.startswith("  ") else 0


def _parts(text: Text, indent: int) -> Iterator[Text]:
    rest, width = text, COLUMNS
    while len(rest.plain) > width:
        space = rest.plain.rfind(" ", indent, width + 1)
        cut = space if space > width // 2 else width
        yield rest[:cut]
        rest = rest[cut + 1 :] if cut == space else rest[cut:]
        width = COLUMNS - indent
    yield rest


def draw(lines: Sequence[Line], *, animated: bool) -> str:
    """The SVG document."""
    rows = ROWS if animated else len(lines)
    width = 2 * MARGIN + COLUMNS * CELL_WIDTH
    height = TITLE_BAR + rows * LINE_HEIGHT + MARGIN
    background, foreground = THEME.background_color.hex, THEME.foreground_color.hex
    body = "\n".join(_text(line, number) for number, line in enumerate(lines))
    buttons = "".join(
        f'<circle cx="{22 + 20 * n}" cy="17" r="6" fill="{colour}"/>'
        for n, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" \
role="img" aria-label="A recording of {TITLE}">
<title>A recording of {TITLE}</title>
<style>
text {{ font: {FONT_SIZE}px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; \
fill: {foreground}; white-space: pre; }}
{_animation(lines) if animated else ""}</style>
<rect width="100%" height="100%" rx="9" fill="{background}"/>
{buttons}<text x="50%" y="22" text-anchor="middle" opacity="0.7">{TITLE}</text>
<svg x="0" y="{TITLE_BAR:.0f}" width="{width:.0f}" height="{rows * LINE_HEIGHT:.0f}">
<g class="film">
{body}
</g>
</svg>
</svg>
"""


def _animation(lines: Sequence[Line]) -> str:
    """CSS that shows each line from its time on and scrolls up once the picture is full."""
    duration = lines[-1].seconds + HOLD_SECONDS
    timing = (
        f"{duration:.2f}s {FIRST_SECONDS - duration:.2f}s"  # a negative delay starts within the animation
    )
    scroll = ["0% { transform: translateY(0); }"]
    appear: list[str] = []
    for number, line in enumerate(lines):
        percent = 100 * line.seconds / duration
        appear.append(
            f"@keyframes l{number} {{ 0%, {max(0, percent - 0.001):.3f}% {{ opacity: 0; }} "
            f"{percent:.3f}%, 100% {{ opacity: 1; }} }}\n"
            f"#l{number} {{ animation: l{number} {timing} infinite; }}"
        )
        if number >= ROWS:
            scroll.append(
                f"{percent:.3f}% {{ transform: translateY({-(number + 1 - ROWS) * LINE_HEIGHT:.0f}px); }}"
            )
    end = -max(0, len(lines) - ROWS) * LINE_HEIGHT
    joined = "\n".join(appear)
    return (
        f".film {{ transform: translateY({end:.0f}px); }}\n"
        "@media screen and (prefers-reduced-motion: no-preference) {\n"
        f"@keyframes film {{ {' '.join(scroll)} 100% {{ transform: translateY({end:.0f}px); }} }}\n"
        f".film {{ animation: film {timing} step-end infinite; }}\n{joined}\n}}\n"
    )


def _text(line: Line, number: int) -> str:
    spans: list[str] = []
    column = 0
    for segment in line.text.render(CONSOLE):
        text, style = segment.text.rstrip("\n"), segment.style or Style()
        if text.strip():
            indent = len(text) - len(text.lstrip())
            x = MARGIN + (column + indent) * CELL_WIDTH
            visible = text.strip()
            position = f'x="{x:.1f}" textLength="{len(visible) * CELL_WIDTH:.1f}"'
            spans.append(f"<tspan {position}{_style(style)}>{escape(visible)}</tspan>")
        column += len(text)
    return f'<text id="l{number}" y="{number * LINE_HEIGHT + FONT_SIZE:.1f}">{"".join(spans)}</text>'


def _style(style: Style) -> str:
    attributes = f' fill="{style.color.get_truecolor(THEME).hex}"' if style.color else ""
    if style.bold:
        attributes += ' font-weight="bold"'
    if style.dim:
        attributes += ' opacity="0.75"'
    return attributes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", help="the task to play")
    parser.add_argument("--still", type=Path, metavar="FILE", help="write one tall picture without animation")
    options = parser.parse_args()
    program = str(Path(sys.executable).with_name("decathlon-mcp"))
    exit_code, rows = run([program, "demo", *(["--task", options.task] if options.task else [])])
    if exit_code != 0:
        sys.exit(f"the demo ended with exit code {exit_code}; no picture was written")
    output = options.still or HERE / "demo.svg"
    output.write_text(draw(wrap(rows), animated=options.still is None), "utf-8")


if __name__ == "__main__":
    main()
