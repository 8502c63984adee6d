"""Plots as SVG, made on the server. Each point says its numbers; shapes and dashes stand beside colours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup, escape

from decathlon_mcp.plugins.history.values import CallTime, CurvePoint, Estimate
from decathlon_mcp.plugins.page.rendering import duration, exact, number

WIDTH, HEIGHT = 720, 220
LEFT, RIGHT, TOP, BOTTOM = 40, 40, 12, 28
TIMELINE_BARS = 180
LABEL_WIDTH = 90
SHORT_SECONDS = 600.0
"""Span of time below which labels show seconds, since the minutes of neighbours would be the same."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Numbers from `low` to `high` onto lengths from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        share = (value - self.low) / span if span > 0 else 0.5
        return round(self.start + share * (self.end - self.start), 2)


def curve(points: Sequence[CurvePoint], by: Literal["step", "time"]) -> Markup:
    """Mean reward with its spread, and success rate, against steps or time."""
    values = [
        value
        for point in points
        for value in (point.lowest, point.highest, point.reward and point.reward.mean)
        if value is not None
    ]
    low, high = min([0.0, *values]), max([1.0, *values])
    x = Scale(points[0].at, points[-1].at, LEFT + 8, WIDTH - RIGHT - 8)
    y = Scale(low, high, HEIGHT - BOTTOM, TOP)
    parts = [_frame(x, y, [point.at for point in points], by)]
    spread = [
        (x(point.at), y(point.lowest), y(point.highest))
        for point in points
        if point.lowest is not None and point.highest is not None
    ]
    parts.append(_band(spread, "spread"))
    errors = [
        (x(point.at), y(point.reward.mean - error), y(point.reward.mean + error))
        for point in points
        if point.reward is not None and (error := point.reward.standard_error) is not None
    ]
    parts.append(_band(errors, "error"))
    rewards = [(point, point.reward) for point in points if point.reward is not None]
    successes = [(point, point.success) for point in points if point.success is not None]
    parts.append(_line([(x(point.at), y(value.mean)) for point, value in successes], "success-line"))
    parts.append(_line([(x(point.at), y(value.mean)) for point, value in rewards], "reward-line"))
    for point, value in successes:
        title = _point_title("success rate", point, value, by)
        at_x, at_y = x(point.at), y(value.mean)
        parts.append(
            f'<rect class="success-mark" x="{at_x - 3}" y="{at_y - 3}" width="6" height="6">{title}</rect>'
        )
    for point, value in rewards:
        title = _point_title("reward", point, value, by)
        parts.append(
            f'<circle class="reward-mark" cx="{x(point.at)}" cy="{y(value.mean)}" r="3.5">{title}</circle>'
        )
    return _svg(WIDTH, HEIGHT, "plot", "Reward and success rate", parts)


def curves(runs: Sequence[Sequence[CurvePoint]], letters: str) -> Markup:
    """Mean rewards of several runs against steps, each with its letter at its end."""
    rewards = [[(point, point.reward) for point in points if point.reward is not None] for points in runs]
    steps = sorted({point.at for points in runs for point in points})
    means = [value.mean for points in rewards for _, value in points]
    x = Scale(steps[0], steps[-1], LEFT + 8, WIDTH - RIGHT - 8)
    y = Scale(min([0.0, *means]), max([1.0, *means]), HEIGHT - BOTTOM, TOP)
    parts = [_frame(x, y, steps, "step")]
    for letter, points in zip(letters, rewards, strict=False):
        places = [(x(point.at), y(value.mean)) for point, value in points]
        parts.append(_line(places, f"run-line run-{letter}"))
        for (at_x, at_y), (point, value) in zip(places, points, strict=True):
            title = _point_title(f"{letter}: reward", point, value, "step")
            parts.append(
                f'<circle class="run-mark run-{letter}" cx="{at_x}" cy="{at_y}" r="3">{title}</circle>'
            )
        if places:
            at_x, at_y = places[-1]
            parts.append(f'<text class="tick" x="{at_x + 8}" y="{at_y + 4}">{letter}</text>')
    return _svg(WIDTH, HEIGHT, "plot", "Rewards of the runs by step", parts)


def along(rewards: Mapping[int, float], path: str) -> Markup:
    """The reward that an attempt would have had after each of its calls; each point leads to its call."""
    y = Scale(min([0.0, *rewards.values()]), max([1.0, *rewards.values()]), HEIGHT - BOTTOM, TOP)
    x = Scale(min(rewards), max(rewards), LEFT + 8, WIDTH - RIGHT - 8)
    parts = [_frame(x, y, sorted(rewards), "step")]
    parts.append(_line([(x(call), y(reward)) for call, reward in sorted(rewards.items())], "reward-line"))
    for call, reward in sorted(rewards.items()):
        title = (
            f"after call {call}: reward {number(reward)}" if call else f"at first: reward {number(reward)}"
        )
        parts.append(
            f'<a href="{escape(path)}?call={max(1, call)}#c{max(1, call)}" aria-label="{title}">'
            f'<circle class="reward-mark" cx="{x(call)}" cy="{y(reward)}" r="4"/><title>{title}</title></a>'
        )
    return _svg(WIDTH, HEIGHT, "plot", "Reward after each call", parts)


def _point_title(name: str, point: CurvePoint, value: Estimate, by: Literal["step", "time"]) -> Markup:
    where = f"step {point.at:g}" if by == "step" else exact(point.at)
    error = "" if value.standard_error is None else f" ± {number(value.standard_error)}"
    text = f"{where}: {name} {number(value.mean)}{error}, {value.count} attempts"
    return Markup(f"<title>{escape(text)}</title>")


def _frame(x: Scale, y: Scale, places: Sequence[float], by: Literal["step", "time"]) -> str:
    parts: list[str] = []
    for value in _ticks(y.low, y.high):
        parts.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value)}" y2="{y(value)}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{y(value) + 4}">{value:g}</text>')
    shown = slice(11, 19) if places[-1] - places[0] < SHORT_SECONDS else slice(5, 16)
    free_from = -math.inf
    for at in places:
        if x(at) < free_from:
            continue
        free_from = x(at) + LABEL_WIDTH
        text = f"{at:g}" if by == "step" else exact(at)[shown]
        parts.append(f'<text class="tick middle" x="{x(at)}" y="{HEIGHT - 8}">{escape(text)}</text>')
    return "".join(parts)


def _ticks(low: float, high: float) -> Iterable[float]:
    step = 10 ** math.floor(math.log10(max(high - low, 1e-9)))
    step = next(each for each in (step / 4, step / 2, step, step * 2) if (high - low) / each <= 5)
    first = math.ceil(low / step - 1e-9)
    return (round(index * step, 9) for index in range(first, math.floor(high / step + 1e-9) + 1))


def _band(points: Sequence[tuple[float, float, float]], name: str) -> str:
    if len(points) < 2:
        return ""
    edge = [f"{x},{upper}" for x, _, upper in points] + [f"{x},{lower}" for x, lower, _ in reversed(points)]
    return f'<polygon class="{name}" points="{" ".join(edge)}"/>'


def _line(points: Sequence[tuple[float, float]], name: str) -> str:
    if len(points) < 2:
        return ""
    return f'<polyline class="{name}" points="{" ".join(f"{x},{y}" for x, y in points)}"/>'


def timeline(times: Sequence[CallTime], path: str) -> Markup:
    """How many calls of an episode started when, and how many of these failed, in TIMELINE_BARS parts.

    A bar leads to its first call that failed, or to its first call. `path`: the address of the episode.
    """
    total = max(time.start + (time.seconds or 0.0) for time in times) or 1e-3
    groups: list[list[CallTime]] = [[] for _ in range(TIMELINE_BARS)]
    for time in times:
        groups[min(TIMELINE_BARS - 1, int(TIMELINE_BARS * time.start / total))].append(time)
    most, width = max(map(len, groups)), WIDTH / TIMELINE_BARS
    bars: list[str] = []
    for index, group in enumerate(groups):
        if not group:
            continue
        failed = sum(time.failed for time in group)
        height = max(3.0, 40 * len(group) / most)
        red = height * failed / len(group)
        first = next((time.seq for time in group if time.failed), group[0].seq)
        title = f"{len(group)} calls from call {group[0].seq} on, {failed} failed"
        bars.append(
            f'<a href="{escape(path)}?call={first}#c{first}" aria-label="{title}">'
            f'<rect class="bar" x="{index * width:.2f}" y="{44 - height:.2f}" width="{width - 0.6:.2f}" '
            f'height="{height - red:.2f}"/>'
            f'<rect class="bar failed" x="{index * width:.2f}" y="{44 - red:.2f}" width="{width - 0.6:.2f}" '
            f'height="{red:.2f}"/><title>{title}</title></a>'
        )
    ticks = (
        f'<text class="tick" x="0" y="58">0 s</text>'
        f'<text class="tick middle" x="{WIDTH / 2}" y="58">{escape(duration(total / 2))}</text>'
        f'<text class="tick end" x="{WIDTH}" y="58">{escape(duration(total))}</text>'
    )
    return _svg(WIDTH, 60, "timeline", "When the calls ran", [*bars, ticks])


def _svg(width: float, height: float, name: str, label: str, parts: Iterable[str]) -> Markup:
    # A group and not an image: what is inside can be reached by keyboard and screen reader.
    return Markup(
        f'<svg class="{name}" viewBox="0 0 {width:g} {height:g}" role="group" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )
