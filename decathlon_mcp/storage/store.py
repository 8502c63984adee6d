"""The store: what a server must know about its episodes and sessions to continue them after a restart.

One SQLite database in the state folder, `store.db`. A row is written before the server acts upon it, so that
a server that starts later finds at least what the dead one did. Calls are not here but in each episode's
`trajectory.jsonl`.

Every row has the name of the server that runs its episode (`server`, as in `lock`). A `serve` writes the rows
of its own episodes, and makes those of the one before it its own by `adopt`; other servers add the rows of
episodes that have ended.
"""

from __future__ import annotations

import logging
import math
import sqlite3
import time
from collections import deque
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from dataclasses import fields as fields_of
from enum import IntEnum
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar

import anyio
import anyio.to_thread

from decathlon_mcp.errors import AtCapacityError, BadRequestError, DecathlonError
from decathlon_mcp.storage.database import (
    BUSY_SECONDS,
    FILE_NAME,
    checkpoint,
    connect,
    create_schema,
    error_code,
    errors_named,
    read_only_connection,
)
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject, as_json, as_object, public_id, read_object

WRITE_SECONDS = 0.1
"""How long a running server, whose event loop stands still meanwhile, waits for one."""
RETRY_SECONDS = 1.0
"""Time between two tries to write what could not be written."""
MAX_UNWRITTEN = 2_000
"""Changes that wait for the next try, in memory; the oldest are dropped."""
CHECKPOINT_SECONDS = 5.0
"""Time between two moves of new rows from the log into the database file."""
ENDED = "ended"
"""Value of `EpisodeRow.phase` of an episode that is over."""
REPLAY_LABEL = "replay_of"
"""Label of an episode that plays the calls of another again."""
MAX_CAUSE_CHARACTERS = 500
"""Longest text of a cause in a row; the trajectory has the whole."""

_log = logging.getLogger("decathlon.storage")


class Outcome(IntEnum):
    """What came of an attempt, in the order in which people look for failures.

    It is live until it has ended or has a verdict. A lost one has no reward.
    """

    LOST = 0
    FAILED = 1
    LIVE = 2
    SUCCEEDED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """One episode. `spec` is fixed at the start, `progress` changes; see `episodes.records`.

    `token`: name of the owner's token. `operation`: id of the request that started it. `tools`: what each
    server of the task offered. Times in Unix seconds. `calls`: how many were sent, known once the attempt is
    closed. `turns`, `reward`, `success`, `status`: of the verdict. `cause`: the error that ended the episode,
    for people. `is_derived`: it replays or branches from another episode, so that no summary counts it. Only
    a branch has `branch_of` and `branch_at`: of which episode (public id), and after which of its calls.
    `differences`, `exact`: as in its verdict's `branch`; None until it is ready.
    `pinned`: `--keep-days` keeps its files. `has_files`: they are not deleted.
    """

    id: str
    agent_id: str
    server: str
    suite: str
    task: str
    phase: str
    started_at: float
    spec: JsonObject
    progress: JsonObject
    token: str | None = None
    operation: str | None = None
    ended_at: float | None = None
    ending: str | None = None
    tools: JsonObject | None = None
    verdict: JsonObject | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    calls: int | None = None
    turns: int | None = None
    reward: float | None = None
    success: bool | None = None
    status: str | None = None
    cause: str | None = None
    is_derived: bool = False
    pinned: bool = False
    has_files: bool = True
    branch_of: str | None = None
    branch_at: int | None = None
    differences: int | None = None
    exact: bool | None = None

    @property
    def public_id(self) -> str:
        return public_id(self.id)

    @property
    def run(self) -> str | None:
        """The run that the episode belongs to: its label `run`."""
        return self.labels.get("run")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRow:
    """One sandbox, written before it is opened. `owner`: its label, the server that opened it.

    `role`: `agent`, `preprocess`, `grader` or `service`. `isolation`: of its provider. `wire_version`: of its
    driver. `spec`: see `episodes.records`.
    """

    name: str
    owner: str
    episode: str
    role: str
    provider: str
    isolation: str
    wire_version: int
    spec: JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRow:
    """One MCP session of a revision with a handshake.

    `address`: kind of address, `task`, `episode` or `lobby`. `path`: of the URL at which it was opened.
    `data`: what `protocol` needs to continue it. `used_at`: when a server last started or wrote it.
    """

    id: str
    server: str
    address: str
    path: str
    data: JsonObject
    episode: str | None = None
    used_at: float = 0.0


_Row = TypeVar("_Row", EpisodeRow, SandboxRow, SessionRow)
_OBJECTS = frozenset({"spec", "progress", "tools", "verdict", "labels", "data"})
"""Columns that are JSON objects."""
_BOOLEANS = frozenset({"success", "is_derived", "pinned", "has_files", "exact"})
_Statement: TypeAlias = "tuple[str, tuple[Any, ...]]"
_TRANSIENT = frozenset(
    {
        *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR),
        *(sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOMEM),
    }
)
"""Codes of errors that can be gone at the next try: a lock, a full or read-only disk, no descriptor."""


class Store:
    """The database, for one thread: the event loop's. Statements take microseconds.

    `server`: this server's name. `generation`: number of its start on this state folder; higher than that of
    every start before.

    A change that cannot be written (a full disk, another process's lock) is logged and tried again, before
    later ones. If the server dies before that, it costs the continuation of what it describes; it never costs
    the running episode. `insert_episode` and `adopt` raise instead. Methods that read raise SettingsError if
    the database is damaged.
    """

    def __init__(self, file: Path, connection: sqlite3.Connection, *, server: str) -> None:
        self._file = file
        self._connection = connection
        self.server = server
        self.generation = 0
        # Changes that are not in the database, each of them statements of one transaction.
        self._unwritten: deque[tuple[_Statement, ...]] = deque()
        self._retry_at = 0.0
        self._failure = ""
        """Why they are not, since the last try."""

    @classmethod
    @contextmanager
    def open(cls, state: Path, server: str) -> Generator[Self]:
        """Open or create the database of a state folder for the server of that name.

        A server that ends this context has ended its episodes: no other one continues its sessions, which are
        deleted. One that leaves them to the next ends without it.

        Raises SettingsError if the folder's file system cannot hold it, or it has another schema.
        """
        file = state / FILE_NAME
        with errors_named(file):
            connection = connect(file)
        with closing(connection):
            with errors_named(file):
                create_schema(connection, file)
            store = cls(file, connection, server=server)
            with errors_named(file):
                store.generation = store._add_start()
                store._set_timeout(WRITE_SECONDS)
            try:
                yield store
            finally:
                store._retry_at = 0.0
                store.delete_sessions(server)
                store._write()

    @classmethod
    @contextmanager
    def open_read_only(cls, state: Path) -> Generator[Self | None]:
        """Open the database of a state folder to read it while servers write; None if there is none.

        Raises SettingsError if it cannot be read, or has another schema.
        """
        with read_only_connection(state) as connection:
            yield None if connection is None else cls(state / FILE_NAME, connection, server="")

    async def maintain(self) -> None:
        """Move new rows into the database file from time to time, until cancelled."""
        # One connection for all of them: opening and closing take locks of their own, and on a busy machine a
        # writer has waited for more than `WRITE_SECONDS`.
        connection = sqlite3.connect(
            self._file, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        with closing(connection):
            while True:
                await anyio.sleep(CHECKPOINT_SECONDS)
                self._write()
                try:
                    await anyio.to_thread.run_sync(checkpoint, connection, self._file)
                except (sqlite3.Error, OSError) as error:
                    _log.warning("the store could not be checkpointed", extra=fields(why=str(error)))

    def why_unwritable(self) -> str | None:
        """Why nothing can be written now; None if something can. A lock is waited for as by every change."""
        if time.monotonic() < self._retry_at:
            return self._failure
        self._write()
        if self._unwritten:
            return self._failure
        try:
            self._execute("BEGIN IMMEDIATE")
            self._execute("ROLLBACK")
        except sqlite3.Error as error:
            self._fail(error)
            return self._failure
        return None

    # episodes

    def insert_episode(self, row: EpisodeRow) -> None:
        """Raises AtCapacityError if the disk is full or the database cannot be written.

        Raises BadRequestError if there is an episode with this operation.
        """
        names = (
            *("id", "public_id", "agent_id", "server", "suite", "task", "token", "operation", "phase"),
            *("started_at", "spec", "progress", "labels", "run"),
        )
        statement = (
            f"INSERT INTO episodes ({', '.join(names)}, step, is_derived, branch_of, branch_at, differences,"
            f" exact, pinned) VALUES ({'?, ' * len(names)}?, ?, ?, ?, ?, ?, coalesce((SELECT pinned"
            " FROM episodes WHERE run = ? AND token IS ? ORDER BY started_at DESC LIMIT 1), 0))"
        )
        branch = as_object(row.spec.get("branch")) or {}
        values = (
            *_values(replace(row, server=self.server), names),
            _number(row.labels.get("step")),
            REPLAY_LABEL in row.labels or bool(branch),
            branch.get("episode"),
            branch.get("at"),
            *_compared(row.progress),
            row.run,
            row.token,
        )
        reason = "earlier changes are not written yet"
        # A lock is mostly gone by now. Waiting for the next try would refuse every start until then.
        self._retry_at = 0.0
        self._write()
        try:
            if not self._unwritten:
                self._execute(statement, values)
                return
        except sqlite3.IntegrityError:
            raise BadRequestError(
                "another request has used this operation id to start an episode; use a new id for each"
            ) from None
        except sqlite3.Error as error:
            reason = str(error)
        raise AtCapacityError(
            f"the state folder cannot be written for another episode: {reason}", retryAfterSeconds=60.0
        )

    def update_episode(
        self,
        episode: str,
        *,
        phase: str,
        progress: JsonObject,
        tools: JsonObject | None = None,
        calls: int | None = None,
    ) -> None:
        """Replace phase and progress of an episode, and its tools and its number of calls if given."""
        statement = "UPDATE episodes SET phase = ?, progress = ?, differences = ?, exact = ?"
        values = [phase, _text(progress), *_compared(progress)]
        if tools is not None:
            statement, values = f"{statement}, tools = ?", [*values, _text(tools)]
        if calls is not None:
            statement, values = f"{statement}, calls = ?", [*values, calls]
        self._write((f"{statement} WHERE id = ?", (*values, episode)))

    def set_labels(self, episode: str, labels: Mapping[str, str]) -> None:
        """Replace the labels of an episode; its run stays the one with which it began."""
        self._write(("UPDATE episodes SET labels = ? WHERE id = ?", (_text(dict(labels)), episode)))

    def set_verdict(self, episode: str, verdict: JsonObject) -> None:
        """Write a verdict, with its numbers in columns of their own."""
        metrics = as_object(verdict.get("metrics")) or {}
        self._write(
            (
                (
                    "UPDATE episodes SET verdict = ?, status = ?, success = ?, reward = ?, outcome = ?,"
                    " turns = ? WHERE id = ?"
                ),
                (
                    _text(verdict),
                    verdict.get("status"),
                    verdict.get("success"),
                    verdict.get("reward"),
                    _outcome(verdict),
                    metrics.get("turns"),
                    episode,
                ),
            )
        )

    def end_episode(
        self, episode: str, ending: str, *, cause: str | None = None, calls: int | None = None
    ) -> None:
        """Mark an episode as over, and forget its sandboxes and its tools.

        `cause`: the error behind the ending. `calls`: how many were sent; without it, what was
        written before stays.
        """
        self._write(
            (
                (
                    "UPDATE episodes SET phase = ?, ending = ?, ended_at = ?, tools = NULL, cause = ?,"
                    " calls = coalesce(?, calls), outcome = CASE WHEN status IS NULL THEN ? ELSE outcome END"
                    " WHERE id = ?"
                ),
                (
                    ENDED,
                    ending,
                    time.time(),
                    cause and cause[:MAX_CAUSE_CHARACTERS],
                    calls,
                    Outcome.LOST,
                    episode,
                ),
            ),
            ("DELETE FROM sandboxes WHERE episode = ?", (episode,)),
        )

    def add_ended(self, row: EpisodeRow, ending: str, *, cause: str | None, calls: int) -> None:
        """Write an episode that is over, with its verdict. What cannot be written is logged."""
        try:
            # The ids of requests are known to the server that ran it alone.
            self.insert_episode(replace(row, operation=None))
        except DecathlonError as error:
            _log.error("the row of an episode is lost", extra=fields(why=error.message))
            return
        if row.verdict is not None:
            self.set_verdict(row.id, row.verdict)
        self.end_episode(row.id, ending, cause=cause, calls=calls)

    def episode(self, episode: str) -> EpisodeRow | None:
        """The episode with this handle."""
        return next(iter(self._episodes("WHERE id = ?", (episode,))), None)

    def episode_of_agent(self, agent_id: str) -> EpisodeRow | None:
        """The episode with this agent id."""
        return next(iter(self._episodes("WHERE agent_id = ?", (agent_id,))), None)

    def episode_of_operation(self, operation: str) -> EpisodeRow | None:
        """The episode that the request with this operation id has started."""
        return next(iter(self._episodes("WHERE operation = ?", (operation,))), None)

    def unfinished_episodes(self) -> list[EpisodeRow]:
        """The episodes that are not over, oldest first."""
        return self._episodes("WHERE phase <> ? ORDER BY started_at", (ENDED,))

    def handles(self) -> set[str]:
        """The handles of all episodes."""
        return {str(row[0]) for row in self._rows("SELECT id FROM episodes")}

    def find_episodes(self, prefix: str, limit: int) -> list[EpisodeRow]:
        """The episodes whose public id begins like that."""
        # `g` comes after every hexadecimal digit.
        return self._episodes("WHERE public_id >= ? AND public_id < ? LIMIT ?", (prefix, f"{prefix}g", limit))

    def old_episodes(self, ended_before: float, limit: int) -> list[str]:
        """Handles of episodes with files that ended before that time and are not pinned, the oldest first."""
        rows = self._rows(
            "SELECT id FROM episodes WHERE ended_at IS NOT NULL AND has_files AND ended_at < ? AND NOT pinned"
            " ORDER BY ended_at LIMIT ?",
            (ended_before, limit),
        )
        return [str(row[0]) for row in rows]

    def forget_files(self, episode: str) -> None:
        """Note that the files of an episode that is over were deleted: only its numbers and labels stay."""
        self._write(
            (
                (
                    "UPDATE episodes SET has_files = 0, operation = NULL, verdict = NULL, spec = '{}',"
                    " progress = '{}' WHERE id = ? AND phase = ?"
                ),
                (episode, ENDED),
            )
        )

    def ended_of_run(self, run: str, owner: str | None, limit: int) -> list[str]:
        """Handles of a run's episodes that are over, of that token if one is given."""
        where, values = ("", ()) if owner is None else (" AND token = ?", (owner,))
        rows = self._rows(
            f"SELECT id FROM episodes WHERE run = ? AND phase = ?{where} LIMIT ?",
            (run, ENDED, *values, limit),
        )
        return [str(row[0]) for row in rows]

    def pin_run(self, run: str, *, pinned: bool, owner: str | None = None) -> None:
        """Keep the files of a run's episodes from `--keep-days`, or no longer.

        `owner`: only episodes of that token. Episodes that start later are as the newest of their run.
        """
        where, values = ("", ()) if owner is None else (" AND token = ?", (owner,))
        self._write((f"UPDATE episodes SET pinned = ? WHERE run = ?{where}", (pinned, run, *values)))

    def delete_ended(self, episode: str) -> None:
        """Delete the row of an episode that is over."""
        self._write(("DELETE FROM episodes WHERE id = ? AND phase = ?", (episode, ENDED)))

    def adopt(self, leave: Collection[str]) -> None:
        """Make the episodes that are not over, and the sessions, of all servers but these this server's own.

        Raises SettingsError if that cannot be written: a server that went on without these episodes would
        remove their sandboxes.
        """
        others = f"server NOT IN ({', '.join('?' * len(leave))})"
        with errors_named(self._file):
            self._set_timeout(BUSY_SECONDS)
            self._commit(
                [
                    (
                        f"UPDATE episodes SET server = ? WHERE phase <> ? AND {others}",
                        (self.server, ENDED, *leave),
                    ),
                    (
                        f"UPDATE sessions SET server = ?, used_at = ? WHERE {others}",
                        (self.server, time.time(), *leave),
                    ),
                ]
            )
            self._set_timeout(WRITE_SECONDS)

    # sandboxes

    def insert_sandbox(self, row: SandboxRow) -> None:
        self._write(_replacement("sandboxes", row))

    def delete_sandbox(self, name: str) -> None:
        self._write(("DELETE FROM sandboxes WHERE name = ?", (name,)))

    def sandboxes(self, episode: str | None = None) -> list[SandboxRow]:
        """The sandboxes of one episode, or all of them."""
        where, values = ("", ()) if episode is None else (" WHERE episode = ?", (episode,))
        return self._read(SandboxRow, f"sandboxes{where}", values)

    # sessions

    def save_session(self, row: SessionRow) -> None:
        """Insert or replace a session."""
        self._write(_replacement("sessions", replace(row, server=self.server, used_at=time.time())))

    def session(self, session: str) -> SessionRow | None:
        """A session of this server."""
        rows = self._read(SessionRow, "sessions WHERE id = ? AND server = ?", (session, self.server))
        return next(iter(rows), None)

    def delete_session(self, session: str) -> None:
        """Delete a session."""
        self._write(("DELETE FROM sessions WHERE id = ?", (session,)))

    def delete_sessions(self, server: str) -> None:
        """Delete the sessions of a server."""
        self._write(("DELETE FROM sessions WHERE server = ?", (server,)))

    def session_counts(self) -> dict[str, int]:
        """How many sessions each server has."""
        return {
            str(row[0]): row[1] for row in self._rows("SELECT server, count(*) FROM sessions GROUP BY server")
        }

    def unused_sessions(self, unix_seconds: float) -> list[SessionRow]:
        """This server's sessions that no server has started or written since that time."""
        where = "sessions WHERE server = ? AND used_at < ?"
        return self._read(SessionRow, where, (self.server, unix_seconds))

    # internals

    def _add_start(self) -> int:
        cursor = self._execute(
            "INSERT INTO server_starts (server, started_at) VALUES (?, ?)", (self.server, time.time())
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def _episodes(self, where: str, values: Sequence[Any]) -> list[EpisodeRow]:
        return self._read(EpisodeRow, f"episodes {where}", values)

    def _read(self, kind: type[_Row], source: str, values: Sequence[Any]) -> list[_Row]:
        """The rows of a table, as dataclasses. `source`: the table, and which of its rows."""
        names = [column.name for column in fields_of(kind)]
        rows = self._rows(f"SELECT {', '.join(names)} FROM {source}", values)
        return [kind(**dict(zip(names, map(_value, names, row), strict=True))) for row in rows]

    def _rows(self, statement: str, values: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        with errors_named(self._file):
            return self._execute(statement, values).fetchall()

    def _execute(self, statement: str, values: Iterable[Any] = ()) -> sqlite3.Cursor:
        return self._connection.execute(statement, tuple(values))

    def _write(self, *statements: _Statement) -> None:
        """Write a change, after earlier ones that could not be written; without statements only these."""
        if statements:
            self._unwritten.append(statements)
            if len(self._unwritten) > MAX_UNWRITTEN:
                self._unwritten.popleft()
        if not self._unwritten or time.monotonic() < self._retry_at:
            return
        while self._unwritten:
            try:
                self._commit(self._unwritten[0])
            except sqlite3.Error as error:
                _log.error("the store could not be written", extra=fields(why=str(error)))
                if error_code(error) in _TRANSIENT:
                    self._fail(error)
                    return
            self._unwritten.popleft()

    def _fail(self, error: sqlite3.Error) -> None:
        self._retry_at, self._failure = time.monotonic() + RETRY_SECONDS, str(error)

    def _commit(self, statements: Sequence[_Statement]) -> None:
        """Write statements, all of them or none. Raises sqlite3.Error."""
        if len(statements) == 1:
            self._execute(*statements[0])
            return
        with self._connection:
            self._execute("BEGIN IMMEDIATE")
            for statement in statements:
                self._execute(*statement)

    def _set_timeout(self, seconds: float) -> None:
        self._execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")


def _replacement(table: str, row: SandboxRow | SessionRow) -> _Statement:
    """The statement that inserts a row or replaces it."""
    names = [column.name for column in fields_of(row)]
    places = ", ".join("?" * len(names))
    return f"INSERT OR REPLACE INTO {table} ({', '.join(names)}) VALUES ({places})", _values(row, names)


def _values(row: EpisodeRow | SandboxRow | SessionRow, names: Iterable[str]) -> tuple[Any, ...]:
    """What the columns of a row have in the database."""
    values = {name: getattr(row, name) for name in names}
    return tuple(_text(dict(value)) if name in _OBJECTS else value for name, value in values.items())


def _value(name: str, value: Any) -> Any:
    """The value of a row's column that the database has."""
    if value is None:
        return None
    if name in _OBJECTS:
        return read_object(value) or {}  # for a damaged row, which its reader then refuses alone
    return bool(value) if name in _BOOLEANS else value


def _outcome(verdict: JsonObject) -> Outcome:
    if verdict.get("success"):
        return Outcome.SUCCEEDED
    return Outcome.LOST if verdict.get("reward") is None else Outcome.FAILED


def _compared(progress: JsonObject) -> tuple[int | None, bool | None]:
    """The columns `differences` and `exact`: unknown until the set-up, which compares, is done."""
    if "ready_at" not in progress:
        return None, None
    branch = as_object((as_object(progress.get("facts")) or {}).get("branch")) or {}
    return branch.get("differences", 0), branch.get("exact", False)


def _number(text: str | None) -> float | None:
    """The finite number that a text is; None if it is none."""
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _text(value: JsonObject) -> str:
    return as_json(value).decode("utf-8")
