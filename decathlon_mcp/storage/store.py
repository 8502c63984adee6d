"""The store: what a server must know about its episodes and sessions to continue them after a restart.

One SQLite database in the state folder, `store.db`. A row is written before the server acts upon it, so that
a server that starts later finds at least what the dead one did. Calls are not here but in each episode's
`trajectory.jsonl`.

Every row has the name of the server that runs its episode (`server`, as in `lock`). A `serve` writes the rows
of its own episodes, and takes over its predecessor's rows by `adopt`; other servers add the rows of episodes
that have ended. `plugins.history` makes the columns that only lists and the numbers of runs need.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections import deque
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar

import anyio
import anyio.to_thread

from decathlon_mcp.errors import AtCapacityError, BadRequestError
from decathlon_mcp.hooks import load, plugins
from decathlon_mcp.storage.database import (
    BUSY_SECONDS,
    FILE_NAME,
    MAX_LOG_BYTES,
    connect,
    error_code,
    errors_named,
    read_only_connection,
    set_timeout,
)
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject, as_json, public_id, read_object

WRITE_SECONDS = 0.1
"""How long a running server, whose event loop stands still meanwhile, waits for a lock."""
RETRY_SECONDS = 1.0
"""Time between two tries to write what could not be written."""
MAX_UNWRITTEN = 2_000
"""Changes that wait for the next try, in memory; the oldest are dropped."""
CHECKPOINT_SECONDS = 5.0
"""Time between two moves of new rows from the log into the database file."""
ENDED = "ended"
"""Value of `EpisodeRow.phase` of an episode that is over."""
MAX_CAUSE_CHARACTERS = 500
"""Longest text of a cause in a row; the trajectory has the whole."""

_log = logging.getLogger("decathlon.storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """One episode, as the server that runs or continues it needs it. See also `episodes.records`."""

    id: str
    """The episode's handle."""
    agent_id: str
    server: str
    """Name of the server that runs it, as in `lock`."""
    suite: str
    task: str
    phase: str
    started_at: float
    """Unix seconds."""
    spec: JsonObject
    """What is fixed at the start."""
    progress: JsonObject
    """What changes."""
    token: str | None = None
    """Name of the owner's token."""
    operation: str | None = None
    """Id of the request that started the episode."""
    ending: str | None = None
    calls: int | None = None
    """How many calls were sent; None before the attempt is closed."""
    tools: JsonObject | None = None
    """What each server of the task offered."""
    verdict: JsonObject | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def public_id(self) -> str:
        return public_id(self.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRow:
    """One sandbox, written before it is opened."""

    name: str
    owner: str
    """The sandbox's label: the server that opened it."""
    episode: str
    role: str
    """`agent`, `preprocess`, `grader` or `service`."""
    provider: str
    isolation: str
    wire_version: int
    """Of the sandbox's driver."""
    spec: JsonObject
    """See `episodes.records`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRow:
    """One MCP session of a revision with a handshake."""

    id: str
    server: str
    address: str
    """Kind of address: `task`, `episode` or `lobby`."""
    path: str
    """Path of the URL at which the session was opened."""
    data: JsonObject
    """What `protocol` needs to continue the session."""
    episode: str | None = None
    used_at: float = 0.0
    """When a server last started or wrote the session, in Unix seconds."""


_Row = TypeVar("_Row", EpisodeRow, SandboxRow, SessionRow)
_TABLES = {EpisodeRow: "episodes", SandboxRow: "sandboxes", SessionRow: "sessions"}
_OBJECTS = frozenset({"spec", "progress", "tools", "verdict", "labels", "data"})
"""Columns that are JSON objects."""
Change: TypeAlias = "tuple[str, Sequence[Any]]"
"""An SQL statement with its values."""
_TRANSIENT = frozenset(
    {
        *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR),
        *(sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOMEM),
    }
)
"""Codes of errors that can be gone at the next try: a lock, a full or read-only disk, no descriptor."""


class Store:
    """The database, for one thread: the event loop's. Statements take microseconds.

    A change that cannot be written (a full disk, another process's lock) is logged and tried again, before
    later changes. If the server dies before that, it costs the continuation of what it describes; it never
    costs the running episode. `insert_episode` and `adopt` raise instead. Methods that read raise
    SettingsError if the database is damaged.
    """

    def __init__(self, file: Path, connection: sqlite3.Connection, server: str = "") -> None:
        self._file = file
        self._connection = connection
        self.server = server
        """This server's name."""
        self.generation = 0
        """Number of this server's start on the state folder; higher than at every earlier start."""
        self._unwritten: deque[tuple[Change, ...]] = deque()
        """Changes that are not in the database, each of them the statements of one transaction."""
        self._retry_at = 0.0
        self._failure = ""
        """Why the last try to write failed."""

    @classmethod
    @contextmanager
    def open(cls, state: Path, server: str) -> Generator[Self]:
        """Open or create the database of a state folder for the server of that name.

        A server that ends this context has ended its episodes: no other server continues its sessions, which
        are deleted. A server that leaves them to the next ends without it.

        Raises SettingsError if the folder's file system cannot hold it, or it has another schema.
        """
        file = state / FILE_NAME
        with errors_named(file):
            connection = connect(file)
        with closing(connection):
            store = cls(file, connection, server)
            with errors_named(file):
                start = connection.execute(
                    "INSERT INTO server_starts (server, started_at) VALUES (?, ?)", (server, time.time())
                )
                set_timeout(connection, WRITE_SECONDS)
            store.generation = start.lastrowid or 0
            try:
                yield store
            finally:
                store._retry_at = 0.0
                store.write(("DELETE FROM sessions WHERE server = ?", (server,)))

    @classmethod
    @contextmanager
    def open_read_only(cls, state: Path) -> Generator[Self | None]:
        """Open the database of a state folder to read it while servers write; None if there is none.

        Raises SettingsError if it cannot be read, or has another schema.
        """
        with read_only_connection(state) as connection:
            yield None if connection is None else cls(state / FILE_NAME, connection)

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
                self.write()
                try:
                    await anyio.to_thread.run_sync(self._checkpoint, connection)
                except (sqlite3.Error, OSError) as error:
                    _log.warning("the store could not be checkpointed", extra=fields(why=str(error)))

    def _checkpoint(self, connection: sqlite3.Connection) -> None:
        log = self._file.with_name(f"{FILE_NAME}-wal")
        mode = "TRUNCATE" if log.exists() and log.stat().st_size > MAX_LOG_BYTES else "PASSIVE"
        connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()

    # statements

    def query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """The rows of a SELECT statement, also one of a plug-in over the columns in `database`."""
        with errors_named(self._file):
            return self._connection.execute(statement, values).fetchall()

    def write(self, *change: Change) -> None:
        """Write a change, all of its statements or none; without any, only what could not be written."""
        if change:
            self._unwritten.append(change)
            if len(self._unwritten) > MAX_UNWRITTEN:
                self._unwritten.popleft()
        while self._unwritten and time.monotonic() >= self._retry_at:
            try:
                self._commit(self._unwritten[0])
            except sqlite3.Error as error:
                _log.error("the store could not be written", extra=fields(why=str(error)))
                if error_code(error) in _TRANSIENT:
                    self._note_failure(error)
                    return
            except (UnicodeError, OverflowError) as error:
                # SQLite has no such value. Kept, it would keep everything behind it from being written.
                _log.error("the store could not be written", extra=fields(why=str(error)))
            self._unwritten.popleft()

    def why_unwritable(self) -> str | None:
        """Why nothing can be written now; None if something can. A lock is waited for as by every change."""
        self.write()
        if not self._unwritten and time.monotonic() >= self._retry_at:
            try:
                self._commit(())
            except sqlite3.Error as error:
                self._note_failure(error)
            else:
                return None
        return self._failure

    def _commit(self, change: Sequence[Change]) -> None:
        if len(change) == 1:
            self._connection.execute(*change[0])
            return
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            for statement in change:
                self._connection.execute(*statement)

    def _note_failure(self, error: sqlite3.Error) -> None:
        self._retry_at, self._failure = time.monotonic() + RETRY_SECONDS, str(error)

    # rows

    def find(self, kind: type[_Row], **columns: Any) -> list[_Row]:
        """The rows of a table whose columns have these values; all of them without any."""
        where = " AND ".join(f"{name} = ?" for name in columns) or "true"
        return self._select(kind, where, *columns.values())

    def find_one(self, kind: type[_Row], **columns: Any) -> _Row | None:
        """The row whose columns have these values; None if there is none."""
        return next(iter(self.find(kind, **columns)), None)

    def _select(self, kind: type[_Row], where: str, *values: Any) -> list[_Row]:
        names = [column.name for column in fields_of(kind)]
        rows = self.query(f"SELECT {', '.join(names)} FROM {_TABLES[kind]} WHERE {where}", *values)
        return [kind(**dict(zip(names, map(_value, names, row), strict=True))) for row in rows]

    def save(self, row: SandboxRow | SessionRow) -> None:
        """Insert a row or replace it; a session becomes one of this server's."""
        if isinstance(row, SessionRow):
            row = replace(row, server=self.server, used_at=time.time())
        columns = {column.name: _cell(column.name, getattr(row, column.name)) for column in fields_of(row)}
        into = f"{_TABLES[type(row)]} ({', '.join(columns)})"
        places = ", ".join("?" * len(columns))
        self.write((f"INSERT OR REPLACE INTO {into} VALUES ({places})", (*columns.values(),)))

    def unused_sessions(self, unix_seconds: float) -> list[SessionRow]:
        """This server's sessions that no server has started or written since that time."""
        return self._select(SessionRow, "server = ? AND used_at < ?", self.server, unix_seconds)

    def delete(self, kind: type[SandboxRow | SessionRow], key: str) -> None:
        """Delete a row, if there is one with this key."""
        self.write((f"DELETE FROM {_TABLES[kind]} WHERE {fields_of(kind)[0].name} = ?", (key,)))

    # episodes

    def insert_episode(self, row: EpisodeRow) -> None:
        """Write a new episode; `pinned` is as in the newest one of its run and token.

        Raises AtCapacityError if the disk is full or the database cannot be written, BadRequestError if there
        is an episode with this operation.
        """
        run = row.labels.get("run")
        columns = _columns(
            {column.name: getattr(row, column.name) for column in fields_of(row)}
            | {"server": self.server, "public_id": row.public_id, "run": run}
        )
        statement = (
            f"INSERT INTO episodes ({', '.join(columns)}, pinned) VALUES ({'?, ' * len(columns)}coalesce(("
            "SELECT pinned FROM episodes WHERE run = ? AND token IS ? ORDER BY started_at DESC LIMIT 1), 0))"
        )
        reason = "earlier changes are not written yet"
        # A lock is mostly gone by now. Waiting for the next try would refuse every start until then.
        self._retry_at = 0.0
        self.write()
        try:
            if not self._unwritten:
                self._commit([(statement, (*columns.values(), run, row.token))])
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

    def update_episode(self, episode: str, **columns: Any) -> None:
        """Replace some columns of an episode; its run stays the same."""
        values = _columns(columns)
        names = ", ".join(f"{name} = ?" for name in values)
        self.write((f"UPDATE episodes SET {names} WHERE id = ?", (*values.values(), episode)))

    def end_episode(
        self, episode: str, ending: str, *, cause: str | None = None, calls: int | None = None
    ) -> None:
        """Mark an episode as over, and forget its sandboxes and its tools.

        `cause`: the error behind the ending. `calls`: how many were sent; without it, what was
        written before stays.
        """
        end = (
            "UPDATE episodes SET phase = ?, ending = ?, ended_at = ?, tools = NULL, cause = ?,"
            " calls = coalesce(?, calls), outcome = iif(status IS NULL, 0, outcome) WHERE id = ?"
        )
        # It may name a file of a sandbox, whose bytes are no UTF-8.
        short = cause and cause[:MAX_CAUSE_CHARACTERS].encode("utf-8", "replace").decode()
        self.write(
            (end, (ENDED, ending, time.time(), short, calls, episode)),
            ("DELETE FROM sandboxes WHERE episode = ?", (episode,)),
        )

    def unfinished_episodes(self) -> list[EpisodeRow]:
        """The episodes that are not over, oldest first."""
        return self._select(EpisodeRow, "phase <> ? ORDER BY started_at", ENDED)

    def find_episodes(self, prefix: str, limit: int) -> list[EpisodeRow]:
        """The episodes whose public id begins like that."""
        # `g` comes after every hexadecimal digit.
        where = "public_id >= ? AND public_id < ? LIMIT ?"
        return self._select(EpisodeRow, where, prefix, f"{prefix}g", limit)

    def adopt(self, leave: Collection[str]) -> None:
        """Make the episodes that are not over, and the sessions, of all servers but these this server's own.

        Raises SettingsError if that cannot be written: a server that went on without these episodes would
        remove their sandboxes.
        """
        others = f"server NOT IN ({', '.join('?' * len(leave))})"
        episodes = f"UPDATE episodes SET server = ? WHERE phase <> ? AND {others}"
        sessions = f"UPDATE sessions SET server = ?, used_at = ? WHERE {others}"
        with errors_named(self._file):
            set_timeout(self._connection, BUSY_SECONDS)
            self._commit(
                [
                    (episodes, (self.server, ENDED, *leave)),
                    (sessions, (self.server, time.time(), *leave)),
                ]
            )
            set_timeout(self._connection, WRITE_SECONDS)


def _columns(members: Mapping[str, Any]) -> dict[str, Any]:
    """What columns of the table `episodes` have for members of a row, with what plug-ins make of them."""
    columns = {name: _cell(name, value) for name, value in members.items()}
    for part in (part for plugin in plugins() for part in plugin.columns):
        columns |= load(part)(members)
    return columns


def _cell(name: str, value: Any) -> Any:
    return as_json(dict(value)).decode() if name in _OBJECTS and value is not None else value


def _value(name: str, cell: Any) -> Any:
    # Empty for a damaged object, whose reader then refuses it alone.
    return read_object(cell) or {} if name in _OBJECTS and cell is not None else cell
