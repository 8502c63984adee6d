"""SQL over the rows of episodes: queries, trees of branches, and the sums for numbers of runs.

A search may branch without end, so a tree has at most MAX_TREE_EPISODES, MAX_TREE_BRANCHES of one episode,
and MAX_TREE_LEVELS below its root. The episode comes first, its nearest MAX_TREE_ORIGINS origins next, and
then its branches.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from decathlon_mcp.episodes.state import Ending
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.plugins.history.columns import Outcome
from decathlon_mcp.plugins.history.values import (
    BranchOrigin,
    Column,
    Counts,
    EpisodeQuery,
    EpisodeSummary,
    EpisodeTree,
    Sums,
    TreeNode,
)
from decathlon_mcp.storage.store import EpisodeRow
from decathlon_mcp.types import as_json, is_public_id, read_object

CLOSED = str(Ending.CLOSED)
LOST, FAILED, LIVE, SUCCEEDED = map(int, Outcome)
CURVE_POINTS = 50
"""Points of a curve over time; one over steps has a point for each step, at most MAX_STEPS."""
MAX_STEPS = 2_000
_COUNTED = "run IS NOT NULL AND NOT is_derived"
_SUMMARY = (
    "public_id, suite, task, phase, token, labels, started_at, ended_at, ending, calls, turns, status,"
    " success, reward, is_derived, pinned, has_files, server, outcome, cause, branch_of, branch_at,"
    " differences, exact"
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
_SCORED_SUMS = "count(reward), total(reward), total(reward * reward)"

Condition: TypeAlias = tuple[str, tuple[Any, ...]]
MAX_TREE_EPISODES = 256
MAX_TREE_BRANCHES = 64
MAX_TREE_ORIGINS = 16
MAX_TREE_LEVELS = 32
"""Templates draw a tree by recursion."""


class TaskKey(NamedTuple):
    """A task of a suite, as rows name them."""

    suite: str
    task: str


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


@dataclass(slots=True)
class AttemptSums:
    """Attempts of some task or run, in sums that can be added."""

    live: int = 0
    finished: int = 0
    successes: int = 0
    rewards: Sums = field(default_factory=Sums)
    calls: Sums = field(default_factory=Sums)
    turns: Sums = field(default_factory=Sums)
    started_at: float = float("inf")
    newest_at: float = 0.0
    unpinned: int = 0

    def add(self, other: AttemptSums) -> None:
        self.live += other.live
        self.finished += other.finished
        self.successes += other.successes
        self.rewards.add(other.rewards)
        self.calls.add(other.calls)
        self.turns.add(other.turns)
        self.started_at = min(self.started_at, other.started_at)
        self.newest_at = max(self.newest_at, other.newest_at)
        self.unpinned += other.unpinned

    @property
    def counts(self) -> Counts:
        return Counts(
            live=self.live, finished=self.finished, scored=self.rewards.count, successes=self.successes
        )


def run_times(connection: sqlite3.Connection, owner: str | None) -> Iterator[tuple[str, float]]:
    """The runs, each with the start of its newest episode."""
    where, values = _owned(owner)
    yield from connection.execute(
        f"SELECT run, max(started_at) FROM episodes WHERE {_COUNTED}{where} GROUP BY run", values
    )


def task_sums(
    connection: sqlite3.Connection, runs: Sequence[str] | None, owner: str | None
) -> Iterator[tuple[str, TaskKey, AttemptSums]]:
    """The sums of each task of these runs; of all runs, if `runs` is None."""
    where, values = _owned(owner)
    among = "" if runs is None else f" AND run IN ({_marks(runs)})"
    statement = (
        f"SELECT run, suite, task, count(*), total(outcome = {LIVE}), total(outcome = {SUCCEEDED}),"
        f" {_SCORED_SUMS}, count(calls), total(calls), count(turns), total(turns), min(started_at),"
        " max(started_at), total(NOT pinned)"
        f" FROM episodes WHERE {_COUNTED}{among}{where} GROUP BY run, suite, task"
    )
    for row in connection.execute(statement, (*(runs or ()), *values)):
        run, suite, task, count, live, successes, scored, total, squares = row[:9]
        calls, all_calls, turns, all_turns, oldest, newest, unpinned = row[9:]
        yield (
            run,
            TaskKey(suite, task),
            AttemptSums(
                live=int(live),
                finished=count - int(live),
                successes=int(successes),
                rewards=Sums(scored, total, squares),
                calls=Sums(calls, all_calls),
                turns=Sums(turns, all_turns),
                started_at=oldest,
                newest_at=newest,
                unpinned=int(unpinned),
            ),
        )


def lost_reasons(connection: sqlite3.Connection, run: str, owner: str | None) -> Iterator[tuple[str, int]]:
    """Why episodes of a run were lost, and how many for each reason. A client's own words are one of them."""
    where, values = _owned(owner)
    lost = f"FROM episodes WHERE {_COUNTED} AND run = ? AND +outcome = {LOST}{where}"
    for ending, status, count in connection.execute(
        f"SELECT ending, status, count(*) {lost} AND ending IS NOT ? GROUP BY ending, status",
        (run, *values, CLOSED),
    ):
        yield reason(ending, status, None), count
    # Not by GROUP BY: the index for numbers has no causes.
    words = connection.execute(f"SELECT cause {lost} AND ending = ?", (run, *values, CLOSED))
    yield from Counter(reason(CLOSED, None, cause) for (cause,) in words).items()


def has_steps(connection: sqlite3.Connection, run: str, owner: str | None) -> bool:
    where, values = _owned(owner)
    return bool(
        connection.execute(
            f"SELECT EXISTS (SELECT 1 FROM episodes WHERE {_COUNTED} AND run = ?{where}"
            " AND step IS NOT NULL)",
            (run, *values),
        ).fetchone()[0]
    )


class CurveSums(NamedTuple):
    """The finished attempts of one point of a curve."""

    at: float
    finished: int
    successes: int
    rewards: Sums
    lowest: float | None
    highest: float | None


def curve(
    connection: sqlite3.Connection, run: str, owner: str | None, bins: tuple[float, float] | None
) -> Iterator[CurveSums]:
    """The points of a curve, by step; or by time, if `bins` has the first bin's start and a bin's width."""
    where, values = _owned(owner)
    first, width = bins or (0.0, 1.0)
    at = "step" if bins is None else "? + ? * CAST((started_at - ?) / ? AS INTEGER)"
    parameters = () if bins is None else (first, width, first, width)
    rows = connection.execute(
        f"SELECT {at} AS at, count(*), total(outcome = {SUCCEEDED}), {_SCORED_SUMS}, min(reward), max(reward)"
        f" FROM episodes WHERE {_COUNTED} AND run = ? AND outcome <> {LIVE} {where}"
        f" GROUP BY at HAVING at IS NOT NULL ORDER BY at LIMIT {MAX_STEPS}",
        (*parameters, run, *values),
    )
    for start, count, successes, scored, total, squares, lowest, highest in rows:
        yield CurveSums(start, count, int(successes), Sums(scored, total, squares), lowest, highest)


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
        conditions.append((f"({', '.join(keys)}) {beyond} ({_marks(keys)})", after))
    where = " AND ".join(text for text, _ in conditions) or "1"
    values = [value for _, some in conditions for value in some]
    rows = connection.execute(
        f"SELECT {_SUMMARY}, {', '.join(keys)} FROM episodes WHERE {where}"
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
    """An episode with what only this module's package may know of it: its handle."""

    summary: EpisodeSummary
    handle: str
    launch_time: str | None
    verdict: str | None


def find(connection: sqlite3.Connection, public_id: str) -> FoundEpisode | None:
    """The episode with this public id. `verdict` is JSON."""
    row = connection.execute(
        f"SELECT {_SUMMARY}, id, spec, verdict FROM episodes WHERE public_id = ?", (public_id,)
    ).fetchone()
    if row is None:
        return None
    *_, handle, spec, verdict = row
    launch_time = (read_object(spec) or {}).get("launch_time")
    return FoundEpisode(_summary(row), handle, launch_time, verdict)


def found_row(row: EpisodeRow) -> FoundEpisode:
    """An episode that plays, and whose row is not in a database yet."""
    live = EpisodeSummary(
        public_id=row.public_id,
        suite=row.suite,
        task=row.task,
        phase=row.phase,
        owner=row.token,
        labels=row.labels,
        started_at=row.started_at,
        ended_at=None,
        ending=None,
        calls=None,
        turns=None,
        status=None,
        success=None,
        reward=None,
        reason=None,
        cause=None,
        is_live=True,
        is_derived=False,
        pinned=False,
        has_files=True,
        server=row.server,
        origin=None,
    )
    verdict = None if row.verdict is None else json.dumps(row.verdict)
    return FoundEpisode(live, row.id, row.spec.get("launch_time"), verdict)


def summary(connection: sqlite3.Connection, public_id: str, owner: str | None) -> EpisodeSummary | None:
    """The episode with this public id, if it is one of that token's."""
    where, values = _owned(owner)
    row = connection.execute(
        f"SELECT {_SUMMARY} FROM episodes WHERE public_id = ?{where}", (public_id, *values)
    ).fetchone()
    return None if row is None else _summary(row)


def branches(
    connection: sqlite3.Connection, public_id: str, owner: str | None, limit: int
) -> list[EpisodeSummary]:
    """The branches of an episode: graded branches from the best on, then live, then lost branches."""
    where, values = _owned(owner)
    rows = connection.execute(
        f"SELECT {_SUMMARY} FROM episodes WHERE branch_of = ?{where}"
        " ORDER BY reward DESC, outcome DESC, started_at, public_id LIMIT ?",
        (public_id, *values, limit),
    )
    return list(map(_summary, rows))


def branch_counts(
    connection: sqlite3.Connection, public_ids: Sequence[str], owner: str | None
) -> Mapping[str, int]:
    """Number of branches by episode, for these episodes; none for an episode without branches."""
    where, values = _owned(owner)
    return dict(
        connection.execute(
            "SELECT branch_of, count(*) FROM episodes"
            f" WHERE branch_of IN ({_marks(public_ids)}){where} GROUP BY branch_of",
            (*public_ids, *values),
        ).fetchall()
    )


def reason(ending: str | None, status: str | None, cause: str | None) -> str:
    """Why an episode was lost, for people. If its client has closed it, the cause is the client's."""
    if ending == CLOSED:
        return cause or "client left before grading"
    text = ending or "it has not ended yet"
    return text if status is None else f"{text} ({status})"


def _summary(row: tuple[Any, ...]) -> EpisodeSummary:
    ending, status, success, outcome = row[8], row[11], row[12], row[18]
    return EpisodeSummary(
        public_id=row[0],
        suite=row[1],
        task=row[2],
        phase=row[3],
        owner=row[4],
        labels={name: str(value) for name, value in (read_object(row[5]) or {}).items()},
        started_at=row[6],
        ended_at=row[7],
        ending=ending,
        calls=row[9],
        turns=row[10],
        status=status,
        success=None if success is None else bool(success),
        reward=row[13],
        reason=reason(ending, status, row[19]) if outcome == LOST else None,
        cause=row[19],
        is_live=outcome == LIVE,
        is_derived=bool(row[14]),
        pinned=bool(row[15]),
        has_files=bool(row[16]),
        server=row[17],
        origin=_origin(*row[20:24]),
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


def _owned(owner: str | None) -> tuple[str, tuple[str, ...]]:
    return ("", ()) if owner is None else (" AND token = ?", (owner,))


def _marks(values: Iterable[object]) -> str:
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
