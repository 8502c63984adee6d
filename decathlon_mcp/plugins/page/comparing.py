"""Two episodes call by call, up to the first call that differs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from starlette.responses import Response

from decathlon_mcp.plugins.history.values import CallEntry
from decathlon_mcp.plugins.page.calls import ShownCall, ShownNote, shown
from decathlon_mcp.plugins.page.episodes import BOX_CALLS, find_episode
from decathlon_mcp.plugins.page.site import Visit

SHOWN_BEFORE = 2
SHOWN_AFTER = 8
MAX_COMPARED = 20_000
"""Calls that are compared; reading them takes time."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The calls with one number in two episodes. `differs`: in what, nothing if they are equal."""

    a: ShownCall | None
    b: ShownCall | None
    differs: str


def compare_episodes(visit: Visit) -> Response:
    """`/compare/episodes?a=ID&b=ID`"""
    a, b = find_episode(visit, visit.query("a")), find_episode(visit, visit.query("b"))
    first = _first_difference(visit, a.summary.public_id, b.summary.public_id, max(a.calls, b.calls))
    start = max(1, (first or max(a.calls, b.calls) + 1) - SHOWN_BEFORE)
    end = start + SHOWN_BEFORE + SHOWN_AFTER
    sides = [_calls(shown(visit.history.calls(details.summary.public_id, start, end))) for details in (a, b)]
    pairs = [
        Pair(x, y, _difference(x and x.entry, y and y.entry)) for x, y in zip_longest(sides[0], sides[1])
    ]
    return visit.render(
        "compare_episodes.html",
        a=a,
        b=b,
        first=first,
        equal=(first or max(a.calls, b.calls) + 1) - 1,
        pairs=pairs,
    )


def _calls(entries: list[ShownCall | ShownNote]) -> list[ShownCall]:
    return [entry for entry in entries if isinstance(entry, ShownCall)]


def _first_difference(visit: Visit, a: str, b: str, last: int) -> int | None:
    """The number of the first call that differs; None if there is none."""
    for start in range(1, min(last, MAX_COMPARED) + 1, BOX_CALLS):
        for number, (x, y) in enumerate(_side_by_side(visit, a, b, start), start):
            if _difference(x, y):
                return number
    return None


def _side_by_side(
    visit: Visit, a: str, b: str, start: int
) -> Iterator[tuple[CallEntry | None, CallEntry | None]]:
    x, y = (
        [
            entry
            for entry in visit.history.calls(each, start, start + BOX_CALLS - 1)
            if isinstance(entry, CallEntry)
        ]
        for each in (a, b)
    )
    yield from zip_longest(x, y)


def _difference(a: CallEntry | None, b: CallEntry | None) -> str:
    """In what two calls differ; nothing if they are equal. Times always differ and do not count."""
    if a is None or b is None:
        return "only in one"
    if a.name != b.name:
        return "another tool"
    if a.arguments != b.arguments:
        return "other arguments"
    if a.reply != b.reply:
        return "another reply"
    return ""
