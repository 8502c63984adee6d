"""The curve as SVG: mean reward by step of several trainings, each with its spread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 320, 46, 150, 14, 40
TEXT = "#767e88"
"""Grey with enough contrast to a white and to a dark page."""
COLOURS = ("#1a936f", "#d1702a", "#5b7fd6", "#c0559b", "#8a8f3a", "#767e88")


HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"
role="img" font-family="sans-serif" font-size="13" fill="{colour}">"""


@dataclass(frozen=True, slots=True)
class Line:
    """One training: the mean of each step, and how far its band reaches to both sides."""

    name: str
    means: Sequence[float]
    spreads: Sequence[float] = ()
    dashes: str = ""


def smoothed(values: Sequence[float], width: int = 5) -> list[float]:
    """The mean of each value and those before it, `width` of them at most."""
    windows = [values[max(0, end - width) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]


def plot(title: str, lines: Sequence[Line]) -> str:
    """The plot as an SVG document. The lines are of rewards, from 0 to 1."""
    steps = max(len(line.means) for line in lines)
    parts = [
        HEAD.format(width=WIDTH, height=HEIGHT, colour=TEXT),
        f"<title>{escape(title)}</title>",
        *frame(steps),
    ]
    for number, line in enumerate(lines):
        parts += drawn(line, COLOURS[number % len(COLOURS)], steps)
    ends = sorted((line.means[-1], number) for number, line in enumerate(lines))
    below = HEIGHT - BOTTOM + 16.0
    for end, number in ends:
        # Names stand at the ends of their lines, one above the other where lines end alike.
        below = min(below - 16, y(end) + 4)
        parts.append(
            f'<text x="{WIDTH - RIGHT + 8}" y="{below:.1f}" fill="{COLOURS[number % len(COLOURS)]}">'
            f"{escape(lines[number].name)}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


def x(step: float, steps: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * step / max(1, steps - 1)


def y(reward: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(1.0, max(0.0, reward))


def frame(steps: int) -> Iterator[str]:
    """Axes with their numbers."""
    for tick in (0, 0.25, 0.5, 0.75, 1):
        at = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"'
        yield f'<line {at} stroke="{TEXT}" stroke-opacity="0.25"/>'
        yield f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
    every = max(1, round(steps / 8 / 5) * 5)
    for step in range(0, steps, every):
        yield f'<text x="{x(step, steps):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>'
    yield f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">step</text>'


def drawn(line: Line, colour: str, steps: int) -> Iterator[str]:
    """The band and the line."""
    if line.spreads:
        pairs = list(zip(line.means, line.spreads, strict=True))
        upper = [f"{x(step, steps):.1f},{y(mean + spread):.1f}" for step, (mean, spread) in enumerate(pairs)]
        lower = [f"{x(step, steps):.1f},{y(mean - spread):.1f}" for step, (mean, spread) in enumerate(pairs)]
        edge = " ".join([*upper, *reversed(lower)])
        yield f'<polygon points="{edge}" fill="{colour}" fill-opacity="0.13"/>'
    points = " ".join(f"{x(step, steps):.1f},{y(mean):.1f}" for step, mean in enumerate(line.means))
    dashes = f' stroke-dasharray="{line.dashes}"' if line.dashes else ""
    yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
