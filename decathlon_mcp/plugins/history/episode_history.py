"""Reads state folders: runs, episodes, and what their trajectories have, while servers write them."""

from __future__ import annotations

import math
import re
import sqlite3
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Lock
from typing import TypeVar

from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.plugins.history import queries, reports
from decathlon_mcp.plugins.history.entries import JSON_BYTES, EntryReader
from decathlon_mcp.plugins.history.queries import FoundEpisode, cursor_of, parse_cursor, read_tree
from decathlon_mcp.plugins.history.reports import AttemptSums, TaskKey
from decathlon_mcp.plugins.history.values import (
    CallTime,
    Entry,
    EpisodeDetails,
    EpisodeQuery,
    EpisodeSummary,
    EpisodeTree,
    NoteEntry,
    Page,
    RunColumn,
    RunComparison,
    RunReport,
    RunSummary,
    Text,
    UsageSums,
)
from decathlon_mcp.plugins.history.workspaces import (
    KEPT_WORKSPACE,
    LeftFile,
    Workspace,
    list_workspace,
    read_left_file,
)
from decathlon_mcp.storage.database import read_only_connection
from decathlon_mcp.storage.disk import open_regular
from decathlon_mcp.storage.kept_files import SERVER_LOGS_FILE
from decathlon_mcp.storage.store import EpisodeRow
from decathlon_mcp.storage.trajectory import Trajectory
from decathlon_mcp.types import as_object, is_public_id, read_object

PAGE_ITEMS = 100
MAX_PAGE_ITEMS = 10_000
MAX_ENTRIES = 1_000
"""Calls that one request reads."""
MAX_SUMMED_NOTES = 5_000
"""Notes that are read for the sums of their usage: a tenth of a second."""
MAX_SEARCH_CHARACTERS = 1_000
KEPT_TRAJECTORIES = 64
"""Trajectories, the last used, whose places of lines stay in memory; 33 bytes a call."""
MAX_TOOLS_BYTES = 16 << 20
MAX_SERVER_LOGS_BYTES = 4 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")

_RUN_KEYS: Mapping[RunColumn, Callable[[RunSummary], float | str]] = {
    "run": lambda run: run.name,
    "success": lambda run: -1.0 if run.counts.success_rate is None else run.counts.success_rate,
    "reward": lambda run: -math.inf if run.mean_reward is None else run.mean_reward,
    "episodes": lambda run: run.counts.episodes,
    "lost": lambda run: run.counts.lost,
    "tasks": lambda run: run.tasks,
}

T = TypeVar("T")


class EpisodeHistory:
    """The episodes of several state folders, read as one. All methods block: run them in a worker thread.

    Methods raise SettingsError if a folder's database cannot be read, or has another schema. A run that is in
    several folders is one run. `unwritten`: returns the row of an episode of this process, by its public id,
    that the database of the first folder does not have yet. It is called from worker threads.
    """

    def __init__(
        self, states: Sequence[Path], unwritten: Callable[[str], EpisodeRow | None] = lambda _: None
    ) -> None:
        self._states = tuple(states)
        self._unwritten = unwritten
        self._trajectories: OrderedDict[Path, Trajectory] = OrderedDict()
        self._lock = Lock()

    def runs(
        self,
        *,
        owner: str | None = None,
        by: RunColumn = "newest",
        descending: bool = True,
        limit: int = PAGE_ITEMS,
        cursor: str | None = None,
    ) -> Page[RunSummary]:
        """The runs, first the run with the newest episode. `owner`: only with that token's episodes.

        Any order but that by `newest` needs the numbers of all runs. Raises BadRequestError for a bad cursor.
        """
        summaries = None if by == "newest" else self._summaries(None, owner)
        ordered: list[tuple[float | str, str]] = (
            [*self._runs_by_time(owner)]
            if summaries is None
            else sorted(((_RUN_KEYS[by](each), run) for run, each in summaries.items()), reverse=True)
        )
        if not descending:
            ordered.reverse()
        if cursor is not None:
            after = parse_cursor(cursor, ("" if by == "run" else 0.0, ""))
            ordered = [item for item in ordered if (item < after if descending else item > after)]
        limit = _bounded(limit)
        page, rest = ordered[:limit], ordered[limit:]
        if summaries is None:
            summaries = self._summaries([run for _, run in page], owner)
        return Page(
            tuple(summaries[run] for _, run in page if run in summaries),
            cursor_of(page[-1]) if rest else None,
        )

    def run_names(self, *, owner: str | None = None, limit: int = PAGE_ITEMS) -> list[str]:
        """The names of the newest runs, without their numbers, which take longer. `owner`: as for `runs`."""
        return [run for _, run in self._runs_by_time(owner)[: _bounded(limit)]]

    def _runs_by_time(self, owner: str | None) -> list[tuple[float, str]]:
        """Each run with the start of its newest episode, the newest first."""
        newest: dict[str, float] = {}
        for run, started_at in self._each(lambda db: reports.run_times(db, owner)):
            newest[run] = max(started_at, newest.get(run, started_at))
        return sorted(((started_at, run) for run, started_at in newest.items()), reverse=True)

    def run(self, name: str, *, owner: str | None = None) -> RunReport | None:
        """The numbers of one run; None if it has no episodes."""
        tasks = self._task_sums([name], owner).get(name)
        if tasks is None:
            return None
        lost = Counter[str]()
        for reason, count in self._each(lambda db: reports.lost_reasons(db, name, owner)):
            lost[reason] += count
        by_step = any(self._each(lambda db: [reports.has_steps(db, name, owner)]))
        bins = None if by_step else reports.bins_of(tasks)
        curve = reports.joined(self._each(lambda db: reports.curve(db, name, owner, bins)))
        return reports.report_of(name, tasks, lost, curve, "step" if by_step else "time")

    def compare(self, names: Sequence[str], *, owner: str | None = None) -> RunComparison | None:
        """Two runs or more by task; None if one of them has no episodes."""
        runs = self._task_sums(names, owner)
        return reports.compare_runs([(name, runs[name]) for name in names]) if {*runs} >= {*names} else None

    def episodes(
        self, query: EpisodeQuery, *, limit: int = PAGE_ITEMS, cursor: str | None = None
    ) -> Page[EpisodeSummary]:
        """The episodes of a query, from their rows alone. Raises BadRequestError for a bad cursor."""
        limit = _bounded(limit)
        found = list(self._each(lambda db: queries.episodes(db, query, cursor, limit + 1)))
        found.sort(key=lambda item: item[0], reverse=query.order.descending)
        page = found[:limit]
        next_cursor = cursor_of(page[-1][0]) if len(found) > limit else None
        return Page(tuple(summary for _, summary in page), next_cursor)

    def all_episodes(self, query: EpisodeQuery) -> Iterator[EpisodeSummary]:
        """Every episode of a query, a page at a time in memory."""
        cursor = None
        while True:
            page = self.episodes(query, limit=MAX_PAGE_ITEMS, cursor=cursor)
            yield from page.items
            if (cursor := page.cursor) is None:
                return

    def episode(self, public_id: str) -> EpisodeDetails | None:
        """One episode; None if there is none. The first time, its trajectory is read once."""
        episode = self._find(public_id)
        if episode is None:
            return None
        with self._reader(episode.folder) as reader:
            index = reader.index
            head, ready, claim = (reader.placed(event) for event in ("start", "ready", "claim"))
            prompt = as_object((ready or {}).get("prompt")) or {}
            # Of a line that is too long to be parsed: its long value as it was written.
            task = reader.placed_value("ready") if ready is None else _text(prompt.get("task"))
            answer = reader.placed_value("claim") if claim is None else _text(claim.get("answer"))
        return EpisodeDetails(
            summary=episode.summary,
            launch_time=episode.launch_time,
            head=head,
            ready=ready,
            system_prompt=_text(prompt.get("system")),
            task_prompt=task,
            claim=claim,
            answer=answer,
            verdict=read_object(episode.verdict or "") if len(episode.verdict or "") <= JSON_BYTES else None,
            verdict_text=episode.verdict,
            calls=index.last,
            notes=len(index.notes),
            size_bytes=index.size_bytes,
        )

    def tree(self, public_id: str, *, owner: str | None = None) -> EpisodeTree | None:
        """The tree of branches that an episode is in; None if it is no branch and has none.

        `owner`: only with that token's episodes. An episode and its branches are in the same folder.
        """
        trees = list(self._each(lambda db: filter(None, [read_tree(db, public_id, owner)])))
        return trees[0] if trees else None

    def calls(self, public_id: str, first: int, last: int) -> list[Entry]:
        """The calls with these numbers, in order, with the notes before each; after the last, all notes.

        At most MAX_ENTRIES calls.
        """
        with self._trajectory(public_id) as reader:
            return list(reader.entries(first, min(last, first + MAX_ENTRIES - 1)))

    def entries(self, public_id: str, *, limit_bytes: int = JSON_BYTES) -> Iterator[Entry]:
        """All calls and notes in order, one at a time in memory. Values above `limit_bytes` are cut."""
        with self._trajectory(public_id) as reader:
            yield from reader.entries(1, reader.index.last, limit=limit_bytes)

    def call_times(self, public_id: str) -> list[CallTime]:
        """When each call ran, in the order of their numbers."""
        with self._trajectory(public_id) as reader:
            return reader.call_times()

    def find(self, public_id: str, text: str, *, after: int = 0, failed_only: bool = False) -> int | None:
        """Number of the next call after `after` that has the text in its name, arguments or reply.

        Case does not matter for ASCII. `failed_only`: only calls that failed; with an empty text the next
        failed call. Raises BadRequestError for a text above MAX_SEARCH_CHARACTERS.
        """
        if len(text) > MAX_SEARCH_CHARACTERS:
            raise BadRequestError(f"the text to look for has more than {MAX_SEARCH_CHARACTERS} characters")
        with self._trajectory(public_id) as reader:
            return reader.find(text, after, failed_only=failed_only)

    def raw_reply(self, public_id: str, seq: int) -> Iterator[bytes] | None:
        """JSON of a call's whole reply, in chunks; None if there is none."""
        with self._trajectory(public_id) as reader:
            return reader.value_chunks(reader.index.places(seq)[1])

    def note(self, public_id: str, number: int) -> NoteEntry | None:
        """One note; None if there is none with this number, from 1."""
        with self._trajectory(public_id) as reader:
            return reader.note(number)

    def usage(self, public_id: str) -> UsageSums:
        """The tokens and the cost that the client has reported with notes, of the first MAX_SUMMED_NOTES."""
        sums: dict[str, float] = {}
        with self._trajectory(public_id) as reader:
            for number in range(1, MAX_SUMMED_NOTES + 1):
                if (note := reader.note(number)) is None:
                    break
                for name, value in note.usage.items():
                    sums[name] = sums.get(name, 0) + value
            return UsageSums(sums, is_cut=len(reader.index.notes) > MAX_SUMMED_NOTES)

    def workspace(self, public_id: str) -> Workspace | None:
        """The files that the agent left; None if they are not kept."""
        found = self._find(public_id)
        return None if found is None else list_workspace(found.folder)

    def left_file(self, public_id: str, number: int) -> tuple[LeftFile, Iterator[bytes]] | None:
        """One of these files by its number, and its content in chunks; None for what is no file."""
        found = self._find(public_id)
        return None if found is None else read_left_file(found.folder, number)

    def has_workspace(self, public_id: str) -> bool:
        """Whether the files that the agent left are kept."""
        found = self._find(public_id)
        return found is not None and (found.folder / KEPT_WORKSPACE).is_file()

    def server_logs(self, public_id: str) -> dict[str, str]:
        """The end of what each of the task's servers wrote to stderr, by its name; empty if not kept."""
        found = self._find(public_id)
        content = found and _content(found.folder / SERVER_LOGS_FILE, MAX_SERVER_LOGS_BYTES)
        logs = read_object(content or b"") or {}
        return {name: text for name, text in logs.items() if isinstance(text, str)}

    def tools(self, public_id: str) -> bytes | None:
        """JSON of the tools that were offered to the agent; None if they are not kept."""
        found = self._find(public_id)
        if found is None:
            return None
        with self._reader(found.folder) as reader:
            digest = (reader.placed("ready") or {}).get("tools")
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            return None
        return _content(found.folder.parents[1] / "tools" / f"{digest}.json", MAX_TOOLS_BYTES)

    # internals

    def _each(self, read: Callable[[sqlite3.Connection], Iterable[T]]) -> Iterator[T]:
        """What a function reads in the database of each folder that has one."""
        for state in self._states:
            with read_only_connection(state) as connection:
                # All of it at once, so that no transaction stays open.
                yield from [] if connection is None else list(read(connection))

    def _task_sums(
        self, runs: Sequence[str] | None, owner: str | None
    ) -> dict[str, dict[TaskKey, AttemptSums]]:
        """The sums of each task by run."""
        found: dict[str, dict[TaskKey, AttemptSums]] = {}
        sums = reports.joined(self._each(lambda db: reports.task_sums(db, runs, owner)))
        for (run, task), of_task in sums.items():
            found.setdefault(run, {})[task] = of_task
        return found

    def _summaries(self, runs: Sequence[str] | None, owner: str | None) -> dict[str, RunSummary]:
        sums = self._task_sums(runs, owner)
        return {run: reports.summary_of(run, tasks) for run, tasks in sums.items()}

    def _find(self, public_id: str) -> FoundEpisode | None:
        if not is_public_id(public_id):
            return None
        # Asked first: the row is in the database before it is not here any more.
        if (row := self._unwritten(public_id)) is not None:
            return queries.found_row(self._states[0], row)
        for state in self._states:
            with read_only_connection(state) as connection:
                if connection is not None and (found := queries.find(connection, state, public_id)):
                    return found
        return None

    def _trajectory(self, public_id: str) -> AbstractContextManager[EntryReader]:
        """An episode's trajectory as it is now; an empty one if there is none."""
        found = self._find(public_id)
        return EntryReader(None) if found is None else self._reader(found.folder)

    def _reader(self, folder: Path) -> EntryReader:
        with self._lock:
            trajectory = self._trajectories.pop(folder, None) or Trajectory(folder)
            self._trajectories[folder] = trajectory
            if len(self._trajectories) > KEPT_TRAJECTORIES:
                self._trajectories.popitem(last=False)
        try:
            return EntryReader(trajectory.update())
        except OSError:
            return EntryReader(None)  # it was deleted, or cannot be read


def _text(value: object) -> Text | None:
    return Text.whole(value) if isinstance(value, str) else None


def _content(file: Path, limit_bytes: int) -> bytes | None:
    try:
        with open_regular(file) as content:
            return content.read(limit_bytes)
    except OSError:
        return None


def _bounded(limit: int) -> int:
    return max(1, min(limit, MAX_PAGE_ITEMS))
