"""SQL over the rows of episodes: lists of episodes, one episode, and trees of branches.

A search may branch without end, so a tree has at most MAX_TREE_EPISODES, MAX_TREE_BRANCHES of one episode,
and MAX_TREE_LEVELS below its root. The episode comes first, its nearest MAX_TREE_ORIGINS origins next, and
then its branches.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from decathlon_mcp.episodes.state import Ending
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.plugins.history.columns import Outcome, columns_of
from decathlon_mcp.plugins.history.values import (
    BranchOrigin,
    Column,
    EpisodeQuery,
    EpisodeSummary,
    EpisodeTree,
    TreeNode,
)
from decathlon_mcp.storage.store import EpisodeRow
from decathlon_mcp.types import JsonObject, as_json, is_public_id, read_object

CLOSED = str(Ending.CLOSED)
LOST, FAILED, LIVE, _ = map(int, Outcome)
_SAME = (
    *("public_id", "suite", "task", "phase", "started_at", "ended_at", "ending", "calls", "turns", "status"),
    *("reward", "cause", "server"),
)
"""Columns that are members of an `EpisodeSummary` as they are."""
_COLUMNS = (
    *_SAME,
    *("token", "labels", "success", "is_derived", "pinned", "has_files", "outcome"),
    *("branch_of", "branch_at", "differences", "exact"),
)
_KEYS: Mapping[Column, tuple[str, ...]] = {
    "started": (),
    "result": ("-(outcome + ifnull(min(1, max(0, reward)), 0) / 2.0)",),
    "task": ("task",),
    "run": ("ifnull(run, '')",),
    "calls": ("ifnull(calls, -1)",),
    "took": ("ifnull(ended_at - started_at, -1)",),
}
"""What each order compares before the start."""
MAX_CURSOR_CHARACTERS = 4_000
MAX_TREE_EPISODES = 256
MAX_TREE_BRANCHES = 64
MAX_TREE_ORIGINS = 16
MAX_TREE_LEVELS = 32
"""Templates draw a tree by recursion."""
Condition: TypeAlias = tuple[str, tuple[Any, ...]]
Position: TypeAlias = tuple[Any, ...]
"""Where a page ended: what its order compares, each a number or a text."""


def cursor_of(position: Position) -> str:
    return json.dumps(position, separators=(",", ":"))


def parse_cursor(cursor: str, like: Position) -> Position:
    """The position that `cursor_of` has written. `like`: one of the same list, for the types.

    Raises BadRequestError for any other text.
    """
    try:
        values = json.loads(cursor[:MAX_CURSOR_CHARACTERS])
        position = tuple(type(kind)(value) for kind, value in zip(like, values, strict=True))
        for value in position:
            str(value).encode()
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise BadRequestError("the cursor is not one of this list") from None
    return position


def episodes(
    connection: sqlite3.Connection, query: EpisodeQuery, cursor: str | None, limit: int
) -> list[tuple[Position, EpisodeSummary]]:
    """The first `limit` episodes of a query after a cursor, in its order. Raises BadRequestError."""
    keys = (*_KEYS[query.order.column], "started_at", "public_id")
    way, beyond = ("DESC", "<") if query.order.descending else ("ASC", ">")
    conditions = list(_conditions(query))
    if cursor is not None:
        text = "" if query.order.column in ("task", "run") else 0.0
        after = parse_cursor(cursor, (text, 0.0, "")[-len(keys) :])
        conditions.append((f"({', '.join(keys)}) {beyond} ({marks(keys)})", after))
    where = " AND ".join(text for text, _ in conditions) or "1"
    values = [value for _, some in conditions for value in some]
    rows = connection.execute(
        f"SELECT {', '.join((*_COLUMNS, *keys))} FROM episodes WHERE {where}"
        f" ORDER BY {', '.join(f'{key} {way}' for key in keys)} LIMIT ?",
        (*values, limit),
    )
    return [(row[-len(keys) :], _summary(row)) for row in rows]


def _conditions(query: EpisodeQuery) -> Iterator[Condition]:
    # With an owner, only indexes that begin with its token: by another index SQLite would read everybody's
    # rows to find the few that are the owner's. It uses no index for a column with a plus.
    plus = "" if query.owner is None else "+"
    outcome = f"{plus}outcome"
    columns = {
        "run": query.run,
        f"{plus}suite": query.suite,
        f"{plus}task": query.task,
        "token": query.owner,
        f"{plus}branch_of": query.branch_of,
    }
    yield from ((f"{column} = ?", (value,)) for column, value in columns.items() if value is not None)
    for name, value in query.labels.items():
        # Most rows are left out before their labels are parsed.
        yield "instr(labels, ?)", (as_json(value).decode(),)
        yield (
            "EXISTS (SELECT 1 FROM json_each(labels) WHERE json_each.key = ? AND json_each.value = ?)",
            (name, value),
        )
    if query.live is not None:
        yield f"{outcome} {'=' if query.live else '<>'} {LIVE}", ()
    if query.failed is not None:
        yield f"{outcome} {'IN' if query.failed else 'NOT IN'} ({LOST}, {FAILED})", ()
    if query.lost is not None:
        yield f"{outcome} {'=' if query.lost else '<>'} {LOST}", ()
    if query.stray is not None:
        # A client that leaves closes the attempt, which is a claim that is not the agent's.
        claimed = "json_extract(progress, '$.claim.by_agent')"
        stray = f"run IS NULL AND verdict IS NULL AND outcome <> {LIVE} AND {claimed} IS NOT 1"
        yield f"({stray})" if query.stray else f"NOT ({stray})", ()
    if not query.with_branches:
        yield "NOT is_derived", ()


class FoundEpisode(NamedTuple):
    """An episode with what only this package may know of it: its folder has the handle as its name."""

    summary: EpisodeSummary
    folder: Path
    """Of its files."""
    launch_time: str | None
    verdict: str | None
    """JSON."""


def find(connection: sqlite3.Connection, state: Path, public_id: str) -> FoundEpisode | None:
    """The episode with this public id in the database of a state folder."""
    names = (*_COLUMNS, "id", "spec", "verdict")
    row = connection.execute(
        f"SELECT {', '.join(names)} FROM episodes WHERE public_id = ?", (public_id,)
    ).fetchone()
    return None if row is None else _found(state, dict(zip(names, row, strict=True)))


def found_row(state: Path, row: EpisodeRow) -> FoundEpisode:
    """An episode that plays, and whose row is not in a database yet."""
    values = {member.name: getattr(row, member.name) for member in fields(row)}
    made = {"public_id": row.public_id, "has_files": True, "outcome": LIVE, **columns_of(values)}
    objects = {name: json.dumps(value) for name, value in values.items() if isinstance(value, dict)}
    return _found(state, {**dict.fromkeys(_COLUMNS), **values, **made, **objects})


def _found(state: Path, values: JsonObject) -> FoundEpisode:
    """The episode of a row. Its objects are JSON."""
    launch_time = (read_object(values["spec"]) or {}).get("launch_time")
    summary = _summary([values[name] for name in _COLUMNS])
    return FoundEpisode(summary, state / "episodes" / values["id"], launch_time, values["verdict"])


def _summaries(
    connection: sqlite3.Connection, condition: str, key: object, owner: str | None, rest: str = ""
) -> list[EpisodeSummary]:
    """The episodes of a condition with one value, if they are that token's."""
    where, values = owned(owner)
    statement = f"SELECT {', '.join(_COLUMNS)} FROM episodes WHERE {condition}{where}{rest}"
    return list(map(_summary, connection.execute(statement, (key, *values))))


def summary(connection: sqlite3.Connection, public_id: str, owner: str | None) -> EpisodeSummary | None:
    """The episode with this public id, if it is one of that token's."""
    return next(iter(_summaries(connection, "public_id = ?", public_id, owner)), None)


def branches(
    connection: sqlite3.Connection, public_id: str, owner: str | None, limit: int
) -> list[EpisodeSummary]:
    """The branches of an episode: graded branches from the best on, then live, then lost branches."""
    rest = f" ORDER BY reward DESC, outcome DESC, started_at, public_id LIMIT {limit:d}"
    return _summaries(connection, "branch_of = ?", public_id, owner, rest)


def branch_counts(
    connection: sqlite3.Connection, public_ids: Sequence[str], owner: str | None
) -> Mapping[str, int]:
    """Number of branches by episode, for these episodes; none for an episode without branches."""
    where, values = owned(owner)
    return dict(
        connection.execute(
            "SELECT branch_of, count(*) FROM episodes"
            f" WHERE branch_of IN ({marks(public_ids)}){where} GROUP BY branch_of",
            (*public_ids, *values),
        ).fetchall()
    )


def reason(ending: str | None, status: str | None, cause: str | None) -> str:
    """Why an episode was lost, for people. If its client has closed it, the cause is the client's."""
    if ending == CLOSED:
        return cause or "client left before grading"
    text = ending or "it has not ended yet"
    return text if status is None else f"{text} ({status})"


def _summary(row: Sequence[Any]) -> EpisodeSummary:
    """The episode of the first columns of a row."""
    values = dict(zip(_COLUMNS, row, strict=False))
    outcome, success = values["outcome"], values["success"]
    is_lost = outcome == LOST
    return EpisodeSummary(
        **{name: values[name] for name in _SAME},
        owner=values["token"],
        labels={name: str(value) for name, value in (read_object(values["labels"]) or {}).items()},
        success=None if success is None else bool(success),
        reason=reason(values["ending"], values["status"], values["cause"]) if is_lost else None,
        is_live=outcome == LIVE,
        is_derived=bool(values["is_derived"]),
        pinned=bool(values["pinned"]),
        has_files=bool(values["has_files"]),
        origin=_origin(*row[len(_COLUMNS) - 4 : len(_COLUMNS)]),
    )


def _origin(episode: object, at: object, differences: object, exact: object) -> BranchOrigin | None:
    # The folder may come from somewhere else.
    if not isinstance(episode, str) or not is_public_id(episode) or not isinstance(at, int):
        return None
    return BranchOrigin(
        episode,
        at,
        differences if isinstance(differences, int) else None,
        None if exact is None else bool(exact),
    )


def owned(owner: str | None) -> tuple[str, tuple[str, ...]]:
    return ("", ()) if owner is None else (" AND token = ?", (owner,))


def marks(values: Iterable[object]) -> str:
    return ", ".join("?" for _ in values)


def read_tree(connection: sqlite3.Connection, public_id: str, owner: str | None) -> EpisodeTree | None:
    """The tree that an episode is in; None if it is no branch and has none. `owner`: only that token's."""
    episode = summary(connection, public_id, owner)
    if episode is None:
        return None
    if episode.origin is None and not branches(connection, public_id, owner, 1):
        return None
    path = _path(connection, episode, owner)
    nodes = {node.public_id: node for node in path}
    # From the episode to the root, then level by level.
    waiting = deque((node, len(path) - 1 - above) for above, node in enumerate(reversed(path)))
    while waiting:
        node, level = waiting.popleft()
        room = MAX_TREE_EPISODES - len(nodes)
        if level == MAX_TREE_LEVELS or not room:
            continue
        # One of them may be there: the next of the path.
        for branch in branches(connection, node.public_id, owner, min(MAX_TREE_BRANCHES, room + 1)):
            if branch.public_id not in nodes and len(nodes) < MAX_TREE_EPISODES:
                nodes[branch.public_id] = added = TreeNode(branch.public_id, branch)
                node.branches.append(added)
                waiting.append((added, level + 1))
    for public_id, count in branch_counts(connection, list(nodes), owner).items():
        nodes[public_id].hidden = count - len(nodes[public_id].branches)
    for node in nodes.values():
        node.branches.sort(key=_rank)
    root = path[0]
    is_cut = any(node.hidden for node in nodes.values()) or bool(root.episode and root.episode.origin)
    episodes = tuple(node.episode for node in nodes.values() if node.episode is not None)
    return EpisodeTree(root, episodes, is_cut)


def _path(connection: sqlite3.Connection, episode: EpisodeSummary, owner: str | None) -> list[TreeNode]:
    """The episode and its origins, each a branch of the episode before it."""
    path = [TreeNode(episode.public_id, episode)]
    while episode.origin is not None and len(path) <= MAX_TREE_ORIGINS:
        above = summary(connection, episode.origin.episode, owner)
        path.insert(0, TreeNode(episode.origin.episode, above, [path[0]]))
        if above is None:
            break
        episode = above
    return path


def _rank(node: TreeNode) -> tuple[bool, float]:
    reward = None if node.episode is None else node.episode.reward
    return not node.branches, math.inf if reward is None else -reward
