"""Plots of cost against size as SVG: both axes logarithmic, measured values as points with their range.

Decided 2026-11-22: written here and not by matplotlib. Its files differ from version to version, so that no
test could compare them with the results, weigh ten times as much, and refer to the network (a DTD and
metadata), and six plots would cost every installation of the tests 60 MiB.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 600, 320
LEFT, RIGHT, BOTTOM = 62, 28, 44
LINE_HEIGHT = 18
TEXT = "#767e88"
"""Grey with a contrast of more than 4 against white and against the dark theme's background: a picture cannot
know which of them the page has. The lines' colours have more than 3 against both."""
COLOURS = ("#1a936f", "#d1702a", "#5b7fd6", "#c0559b")
TICKS_PER_DECADE = (1, 2, 5)
MAX_TICKS = 9
HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"
role="img" font-family="sans-serif" font-size="13" fill="{colour}">"""


@dataclass(frozen=True, slots=True)
class Point:
    """A value at a size, with the lowest and highest of its repeats. All are positive."""

    size: int
    value: float
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True)
class Line:
    """`dashed`: the floor of the line before it, whose colour it gets."""

    name: str
    points: tuple[Point, ...]
    dashed: bool = False


def plot(title: str, unit: str, lines: Sequence[Line]) -> str:
    """The plot as an SVG document. `unit`: label of the vertical axis."""
    top = LINE_HEIGHT * (len(lines) + 1) + 16
    height = HEIGHT + LINE_HEIGHT * len(lines)
    points = [point for line in lines for point in line.points]
    sizes = sorted({point.size for point in points})
    x = _Axis(sizes[0], sizes[-1], LEFT, WIDTH - RIGHT)
    low, high = min(p.lowest for p in points), max(p.highest for p in points)
    ticks = _ticks(low, high)
    y = _Axis(min(low, ticks[0]), max(high, ticks[-1]), height - BOTTOM, top)
    middle, centre = (LEFT + WIDTH - RIGHT) / 2, (top + height - BOTTOM) / 2
    parts = [
        HEAD.format(width=WIDTH, height=height, colour=TEXT),
        f"<title>{escape(title)}</title>",
        f'<text x="{LEFT}" y="{LINE_HEIGHT}" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for tick in ticks:
        parts.append(_rule(LEFT, y(tick), WIDTH - RIGHT, y(tick)))
        parts.append(_text(LEFT - 8, y(tick) + 4, f"{tick:,g}", "end"))
    for size in sizes:
        parts.append(_rule(x(size), height - BOTTOM, x(size), height - BOTTOM + 5))
        parts.append(_text(x(size), height - BOTTOM + 19, f"{size:,}"))
    parts.append(_text(middle, height - 6, "concurrent episodes"))
    parts.append(_text(14, centre, unit, turned=True))
    colour = -1
    for position, line in enumerate(lines):
        colour += not line.dashed
        style = f'stroke="{COLOURS[colour % len(COLOURS)]}" stroke-width="2" fill="none"'
        style += ' stroke-dasharray="5 4"' if line.dashed else ""
        label_y = LINE_HEIGHT * (position + 2)
        parts.append(f'<path d="M{LEFT} {label_y - 4}h28" {style}/>')
        parts.append(_text(LEFT + 36, label_y, line.name, "start"))
        parts += _drawn(line, x, y, style, COLOURS[colour % len(COLOURS)])
    return "\n".join((*parts, "</svg>")) + "\n"


def _drawn(line: Line, x: _Axis, y: _Axis, style: str, colour: str) -> Iterable[str]:
    path = "L".join(f"{x(point.size):.1f} {y(point.value):.1f}" for point in line.points)
    yield f'<path d="M{path}" {style}/>'
    for point in line.points:
        if not line.dashed:
            yield f'<circle cx="{x(point.size):.1f}" cy="{y(point.value):.1f}" r="3.5" fill="{colour}"/>'
        if point.highest > point.lowest:
            ends = f"M{x(point.size):.1f} {y(point.lowest):.1f}V{y(point.highest):.1f}"
            yield f'<path d="{ends}" stroke="{colour}" stroke-width="1"/>'


@dataclass(frozen=True, slots=True)
class _Axis:
    """Maps values to positions, logarithmically."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        if self.low == self.high:
            return (self.start + self.end) / 2
        part = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + part * (self.end - self.start)


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{TEXT}" stroke-opacity="0.35"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle", *, turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{escape(text)}</text>'


def _ticks(low: float, high: float) -> list[float]:
    """Round values that enclose the range: 1, 2 and 5 of each power of ten, or only the powers if many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for steps in (TICKS_PER_DECADE, (1,)):
        ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        inside = [
            tick
            for tick, after, before in zip(ticks, [*ticks[1:], math.inf], [0.0, *ticks[:-1]], strict=True)
            if after > low and before < high
        ]
        if len(inside) <= MAX_TICKS:
            return inside
    return inside
