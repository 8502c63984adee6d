"""Two episodes side by side: their outcomes, and their calls aligned by tool and arguments."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

from starlette.responses import Response

from decathlon_mcp.plugins.history.values import CallEntry
from decathlon_mcp.plugins.page.calls import ShownCall, shown
from decathlon_mcp.plugins.page.episodes import BOX_CALLS, find_episode
from decathlon_mcp.plugins.page.site import Visit

SHOWN_ROWS = 60
"""Rows that one page has. Equal calls are folded, except those beside a row that differs."""
MAX_COMPARED = 2_000
"""Calls of each episode that are compared: the alignment of these takes up to a second."""


@dataclass(frozen=True, slots=True)
class _Digest:
    """A call as it is compared."""

    key: tuple[str, bytes]
    """Tool and arguments, by which calls are aligned."""
    reply: bytes


@dataclass(frozen=True, slots=True)
class Row:
    """Calls that were aligned, by their numbers; None where an episode has none.

    `differs`: in what; empty for equal calls. `folded`: how many equal rows this one stands for.
    """

    a: int | None
    b: int | None
    differs: str
    folded: int = 0


@dataclass(frozen=True, slots=True)
class Pair:
    """A row with its calls."""

    row: Row
    a: ShownCall | None
    b: ShownCall | None


def compare_episodes(visit: Visit) -> Response:
    """`/compare/episodes?a=ID&b=ID`"""
    a, b = find_episode(visit, visit.query("a")), find_episode(visit, visit.query("b"))
    ids = a.summary.public_id, b.summary.public_id
    rows = align(*(list(_digests(visit, each)) for each in ids))
    folded = list(fold(rows))
    pairs = [
        Pair(row, None, None)
        if row.folded
        else Pair(row, _call(visit, ids[0], row.a), _call(visit, ids[1], row.b))
        for row in folded[:SHOWN_ROWS]
    ]
    return visit.render(
        "compare_episodes.html",
        a=a,
        b=b,
        equal=sum(not row.differs for row in rows),
        differing=sum(bool(row.differs) for row in rows),
        pairs=pairs,
        hidden=len(folded) - len(pairs),
        cut=max(a.calls, b.calls) > MAX_COMPARED,
        compared=MAX_COMPARED,
    )


def align(a: list[_Digest], b: list[_Digest]) -> list[Row]:
    """The calls of two episodes in order, those with equal tool and arguments in one row.

    Between two such rows, calls of the same tool at the same place share a row: their arguments differ.
    """
    rows: list[Row] = []
    matcher = SequenceMatcher(None, [call.key for call in a], [call.key for call in b], autojunk=False)
    for tag, a_start, a_end, b_start, b_end in matcher.get_opcodes():
        if tag == "equal":
            for i, j in zip(range(a_start, a_end), range(b_start, b_end), strict=True):
                rows.append(Row(i + 1, j + 1, "" if a[i].reply == b[j].reply else "another reply"))
            continue
        shared = min(a_end - a_start, b_end - b_start)
        for offset in range(shared):
            i, j = a_start + offset, b_start + offset
            same_tool = a[i].key[0] == b[j].key[0]
            rows.append(Row(i + 1, j + 1, "other arguments" if same_tool else "another tool"))
        rows += [Row(i + 1, None, "only in A") for i in range(a_start + shared, a_end)]
        rows += [Row(None, j + 1, "only in B") for j in range(b_start + shared, b_end)]
    return rows


def fold(rows: list[Row]) -> Iterator[Row]:
    """The rows; of more than two equal ones that follow each other only the first and the last."""
    start = 0
    while start < len(rows):
        end = start
        while end < len(rows) and not rows[end].differs:
            end += 1
        if end - start > 3:
            yield rows[start]
            yield Row(None, None, "", folded=end - start - 2)
            yield rows[end - 1]
        else:
            yield from rows[start:end]
        if end < len(rows):
            yield rows[end]
        start = end + 1


def _digests(visit: Visit, public_id: str) -> Iterator[_Digest]:
    for start in range(1, MAX_COMPARED + 1, BOX_CALLS):
        found = visit.history.calls(public_id, start, start + BOX_CALLS - 1)
        calls = [entry for entry in found if isinstance(entry, CallEntry)]
        for call in calls:
            arguments, reply = (
                hashlib.sha256(
                    repr(part and (part.raw, part.size_bytes)).encode("utf-8", "surrogatepass")
                ).digest()
                for part in (call.arguments, call.reply)
            )
            yield _Digest((call.name, arguments), reply)
        if len(calls) < BOX_CALLS:
            return


def _call(visit: Visit, public_id: str, seq: int | None) -> ShownCall | None:
    entries = [] if seq is None else shown(visit.history.calls(public_id, seq, seq))
    return next((entry for entry in entries if isinstance(entry, ShownCall)), None)
