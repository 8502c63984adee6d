"""Reads state folders: runs, episodes, and what their trajectories have, while servers write them."""

from __future__ import annotations

import math
import re
import sqlite3
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TypeVar

from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.plugins.history import queries
from decathlon_mcp.plugins.history.entries import JSON_BYTES, EntryReader
from decathlon_mcp.plugins.history.queries import FoundEpisode, cursor_of, parse_cursor, read_tree
from decathlon_mcp.plugins.history.reports import RunNumbers, compare_runs
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
from decathlon_mcp.storage.trajectory import NOTHING, Trajectory
from decathlon_mcp.types import JsonObject, as_object, is_public_id, read_object

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
        numbers = None if by == "newest" else self._numbers(None, owner)
        ordered: list[tuple[float | str, str]] = (
            [*self._runs_by_time(owner)]
            if numbers is None
            else sorted(((_RUN_KEYS[by](each.summary), run) for run, each in numbers.items()), reverse=True)
        )
        if not descending:
            ordered.reverse()
        if cursor is not None:
            after = parse_cursor(cursor, ("" if by == "run" else 0.0, ""))
            ordered = [item for item in ordered if (item < after if descending else item > after)]
        limit = _bounded(limit)
        page, rest = ordered[:limit], ordered[limit:]
        if numbers is None:
            numbers = self._numbers([run for _, run in page], owner)
        return Page(
            tuple(numbers[run].summary for _, run in page if run in numbers),
            cursor_of(page[-1]) if rest else None,
        )

    def run_names(self, *, owner: str | None = None, limit: int = PAGE_ITEMS) -> list[str]:
        """The names of the newest runs, without their numbers, which take longer. `owner`: as for `runs`."""
        return [run for _, run in self._runs_by_time(owner)[: _bounded(limit)]]

    def _runs_by_time(self, owner: str | None) -> list[tuple[float, str]]:
        """Each run with the start of its newest episode, the newest first."""
        newest: dict[str, float] = {}
        for run, started_at in self._each(lambda db: queries.run_times(db, owner)):
            newest[run] = max(started_at, newest.get(run, started_at))
        return sorted(((started_at, run) for run, started_at in newest.items()), reverse=True)

    def run(self, name: str, *, owner: str | None = None) -> RunReport | None:
        """The numbers of one run; None if it has no episodes."""
        numbers = self._numbers([name], owner).get(name)
        if numbers is None:
            return None
        lost = Counter[str]()
        for reason, count in self._each(lambda db: queries.lost_reasons(db, name, owner)):
            lost[reason] += count
        by_step = any(self._each(lambda db: [queries.has_steps(db, name, owner)]))
        bins = None if by_step else numbers.bins
        curve = list(self._each(lambda db: queries.curve(db, name, owner, bins)))
        return numbers.report(lost, curve, "step" if by_step else "time")

    def compare(self, names: Sequence[str], *, owner: str | None = None) -> RunComparison | None:
        """Two runs or more by task; None if one of them has no episodes."""
        numbers = self._numbers(names, owner)
        return compare_runs([numbers[name] for name in names]) if numbers.keys() >= {*names} else None

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
        found = self._find(public_id)
        if found is None:
            return None
        state, episode = found
        head = ready = claim = answer = system = task = index = None
        with self._reader(state, episode) as reader:
            if reader is not None:
                index = reader.index
                places = [index.placed.get(event, NOTHING) for event in ("start", "ready", "claim")]
                head, ready, claim = map(reader.line, places)
                system, task = _prompts(ready)
                if ready is None and (place := places[1]) != NOTHING:
                    # Too long to be parsed: both texts as they were written.
                    task = reader.value(place)
                answer = _text((claim or {}).get("answer"))
                if claim is None and (place := places[2]) != NOTHING:
                    answer = reader.value(place)
        return EpisodeDetails(
            summary=episode.summary,
            launch_time=episode.launch_time,
            head=head,
            ready=ready,
            system_prompt=system,
            task_prompt=task,
            claim=claim,
            answer=answer,
            verdict=_parsed(episode.verdict),
            verdict_text=episode.verdict,
            calls=0 if index is None else index.last,
            notes=0 if index is None else len(index.notes),
            size_bytes=0 if index is None else index.size_bytes,
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
            return [] if reader is None else list(reader.entries(first, min(last, first + MAX_ENTRIES - 1)))

    def entries(self, public_id: str, *, limit_bytes: int = JSON_BYTES) -> Iterator[Entry]:
        """All calls and notes in order, one at a time in memory. Values above `limit_bytes` are cut."""
        with self._trajectory(public_id) as reader:
            if reader is not None:
                yield from reader.entries(1, reader.index.last, limit=limit_bytes)

    def call_times(self, public_id: str) -> list[CallTime]:
        """When each call ran, in the order of their numbers."""
        with self._trajectory(public_id) as reader:
            return [] if reader is None else reader.call_times()

    def find(self, public_id: str, text: str, *, after: int = 0, failed_only: bool = False) -> int | None:
        """Number of the next call after `after` that has the text in its name, arguments or reply.

        Case does not matter for ASCII. `failed_only`: only calls that failed; with an empty text the next
        failed call. Raises BadRequestError for a text above MAX_SEARCH_CHARACTERS.
        """
        if len(text) > MAX_SEARCH_CHARACTERS:
            raise BadRequestError(f"the text to look for has more than {MAX_SEARCH_CHARACTERS} characters")
        with self._trajectory(public_id) as reader:
            return None if reader is None else reader.find(text, after, failed_only=failed_only)

    def raw_reply(self, public_id: str, seq: int) -> Iterator[bytes] | None:
        """JSON of a call's whole reply, in chunks; None if there is none."""
        with self._trajectory(public_id) as reader:
            return None if reader is None else reader.value_chunks(reader.index.places(seq)[1])

    def note(self, public_id: str, number: int) -> NoteEntry | None:
        """One note; None if there is none with this number, from 1."""
        with self._trajectory(public_id) as reader:
            return None if reader is None else reader.note(number)

    def usage(self, public_id: str) -> UsageSums:
        """The tokens and the cost that the client has reported with notes, of the first MAX_SUMMED_NOTES."""
        sums: dict[str, float] = {}
        with self._trajectory(public_id) as reader:
            if reader is None:
                return UsageSums(sums, is_cut=False)
            for number in range(1, MAX_SUMMED_NOTES + 1):
                if (note := reader.note(number)) is None:
                    break
                for name, value in note.usage.items():
                    sums[name] = sums.get(name, 0) + value
            return UsageSums(sums, is_cut=len(reader.index.notes) > MAX_SUMMED_NOTES)

    def workspace(self, public_id: str) -> Workspace | None:
        """The files that the agent left; None if they are not kept."""
        found = self._find(public_id)
        return None if found is None else list_workspace(found[0] / "episodes" / found[1].handle)

    def left_file(self, public_id: str, number: int) -> tuple[LeftFile, Iterator[bytes]] | None:
        """One of these files by its number, and its content in chunks; None for what is no file."""
        found = self._find(public_id)
        return None if found is None else read_left_file(found[0] / "episodes" / found[1].handle, number)

    def has_workspace(self, public_id: str) -> bool:
        """Whether the files that the agent left are kept."""
        found = self._find(public_id)
        return found is not None and (found[0] / "episodes" / found[1].handle / KEPT_WORKSPACE).is_file()

    def server_logs(self, public_id: str) -> dict[str, str]:
        """The end of what each of the task's servers wrote to stderr, by its name; empty if not kept."""
        found = self._find(public_id)
        if found is None:
            return {}
        try:
            with open_regular(found[0] / "episodes" / found[1].handle / SERVER_LOGS_FILE) as file:
                logs = read_object(file.read(MAX_SERVER_LOGS_BYTES)) or {}
        except OSError:
            return {}
        return {name: text for name, text in logs.items() if isinstance(text, str)}

    def tools(self, public_id: str) -> bytes | None:
        """JSON of the tools that were offered to the agent; None if they are not kept."""
        found, details = self._find(public_id), self.episode(public_id)
        digest = None if details is None or details.ready is None else details.ready.get("tools")
        if found is None or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            return None
        try:
            with open_regular(found[0] / "tools" / f"{digest}.json") as file:
                return file.read(MAX_TOOLS_BYTES)
        except OSError:
            return None

    # internals

    def _each(self, read: Callable[[sqlite3.Connection], Iterable[T]]) -> Iterator[T]:
        """What a function reads in the database of each folder that has one."""
        for state in self._states:
            with read_only_connection(state) as connection:
                # All of it at once, so that no transaction stays open.
                yield from [] if connection is None else list(read(connection))

    def _numbers(self, runs: Sequence[str] | None, owner: str | None) -> dict[str, RunNumbers]:
        numbers: dict[str, RunNumbers] = {}
        for run, task, sums in self._each(lambda db: queries.task_sums(db, runs, owner)):
            numbers.setdefault(run, RunNumbers(run)).add(task, sums)
        return numbers

    def _find(self, public_id: str) -> tuple[Path, FoundEpisode] | None:
        if not is_public_id(public_id):
            return None
        # Asked first: the row is in the database before it is not here any more.
        if (row := self._unwritten(public_id)) is not None:
            return self._states[0], queries.found_row(row)
        for state in self._states:
            with read_only_connection(state) as connection:
                if connection is not None and (found := queries.find(connection, public_id)) is not None:
                    return state, found
        return None

    @contextmanager
    def _trajectory(self, public_id: str) -> Generator[EntryReader | None]:
        found = self._find(public_id)
        if found is None:
            yield None
            return
        with self._reader(*found) as reader:
            yield reader

    @contextmanager
    def _reader(self, state: Path, episode: FoundEpisode) -> Generator[EntryReader | None]:
        """An episode's trajectory as it is now; None if it was deleted or cannot be read."""
        try:
            reader = EntryReader(self._known(state / "episodes" / episode.handle).update())
        except OSError:
            yield None
            return
        with reader:
            yield reader

    def _known(self, folder: Path) -> Trajectory:
        with self._lock:
            trajectory = self._trajectories.pop(folder, None) or Trajectory(folder)
            self._trajectories[folder] = trajectory
            if len(self._trajectories) > KEPT_TRAJECTORIES:
                self._trajectories.popitem(last=False)
            return trajectory


def _prompts(ready: JsonObject | None) -> tuple[Text | None, Text | None]:
    prompt = as_object((ready or {}).get("prompt")) or {}
    return _text(prompt.get("system")), _text(prompt.get("task"))


def _text(value: object) -> Text | None:
    if not isinstance(value, str):
        return None
    return Text(value, truncated=False, size_bytes=len(value.encode("utf-8", "surrogatepass")))


def _parsed(verdict: str | None) -> JsonObject | None:
    return None if verdict is None or len(verdict) > JSON_BYTES else read_object(verdict)


def _bounded(limit: int) -> int:
    return max(1, min(limit, MAX_PAGE_ITEMS))
