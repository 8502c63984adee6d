"""The database of a state folder, `store.db`: its tables, its opening, and the meaning of its errors."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

from decathlon_mcp.errors import SchemaError, SettingsError
from decathlon_mcp.storage.disk import REPAIR_OR_LEAVE

FILE_NAME = "store.db"
BUSY_SECONDS = 5.0
"""How long a starting server waits for another process's transaction; these take microseconds."""
MAX_LOG_BYTES = 64 << 20
"""Size of SQLite's log at which it is emptied, although that makes writers wait for the disk."""
SCHEMA_VERSION = 6
"""A database of another version is refused: nothing converts one."""
# The columns that lists read come first: SQLite reads the pages of a long row only as far as it must.
# `outcome` (`plugins.history.columns`) is 0 for a lost attempt, and no generated column: for these SQLite
# reads rows, whatever indexes have. `episodes_in_numbers` has all that the numbers of a run are made of;
# `branches_by_reward` has the order in which a tree shows branches. Pass rates of now are read while clients
# wait (`plugins.curriculum`): `graded…` has them without a look at the episodes of other tokens and runs.
_SCHEMA = """
CREATE TABLE server_starts (generation INTEGER PRIMARY KEY AUTOINCREMENT, server TEXT, started_at REAL);
CREATE TABLE episodes (
    id TEXT PRIMARY KEY,
    public_id TEXT NOT NULL UNIQUE,
    agent_id TEXT NOT NULL UNIQUE,
    server TEXT NOT NULL,
    suite TEXT NOT NULL,
    task TEXT NOT NULL,
    token TEXT,
    run TEXT,
    step REAL,
    phase TEXT NOT NULL,
    started_at REAL NOT NULL,
    ended_at REAL,
    calls INTEGER,
    turns INTEGER,
    reward REAL,
    success INTEGER,
    status TEXT,
    is_derived INTEGER NOT NULL DEFAULT 0,
    pinned INTEGER NOT NULL DEFAULT 0,
    has_files INTEGER NOT NULL DEFAULT 1,
    outcome INTEGER NOT NULL DEFAULT 2,
    branch_of TEXT,
    branch_at INTEGER,
    differences INTEGER,
    exact INTEGER,
    ending TEXT,
    operation TEXT,
    labels TEXT NOT NULL,
    cause TEXT,
    spec TEXT NOT NULL,
    progress TEXT NOT NULL,
    tools TEXT,
    verdict TEXT
) WITHOUT ROWID;
CREATE INDEX episodes_by_phase ON episodes (phase, server);
CREATE INDEX episodes_by_start ON episodes (started_at, public_id);
CREATE INDEX episodes_by_run ON episodes (run, started_at, public_id);
CREATE INDEX episodes_by_token ON episodes (token, started_at, public_id) WHERE token IS NOT NULL;
CREATE INDEX episodes_by_token_and_run ON episodes (token, run, started_at, public_id)
    WHERE token IS NOT NULL;
CREATE INDEX episodes_by_task ON episodes (task, started_at, public_id);
CREATE INDEX episodes_by_outcome ON episodes (outcome, started_at, public_id);
CREATE INDEX episodes_by_run_and_outcome ON episodes (run, outcome, started_at, public_id);
CREATE INDEX episodes_with_files ON episodes (ended_at) WHERE ended_at IS NOT NULL AND has_files;
CREATE INDEX episodes_in_numbers ON episodes (
    run, suite, task, is_derived, outcome, reward, calls, turns, started_at, step, token, pinned, status,
    ending
) WHERE run IS NOT NULL;
CREATE INDEX branches_by_start ON episodes (branch_of, started_at, public_id) WHERE branch_of IS NOT NULL;
CREATE INDEX branches_by_reward ON episodes (
    branch_of, reward DESC, outcome DESC, started_at, public_id, token
) WHERE branch_of IS NOT NULL;
CREATE INDEX graded ON episodes (
    started_at, public_id, suite, task, success, reward, is_derived
) WHERE reward IS NOT NULL AND NOT is_derived;
CREATE INDEX graded_by_run ON episodes (
    run, started_at, public_id, suite, task, success, reward, is_derived
) WHERE reward IS NOT NULL AND NOT is_derived;
CREATE INDEX graded_by_token ON episodes (
    token, started_at, public_id, suite, task, success, reward, is_derived
) WHERE reward IS NOT NULL AND NOT is_derived;
CREATE INDEX graded_by_token_and_run ON episodes (
    token, run, started_at, public_id, suite, task, success, reward, is_derived
) WHERE reward IS NOT NULL AND NOT is_derived;
CREATE UNIQUE INDEX episodes_by_operation ON episodes (operation) WHERE operation IS NOT NULL;
CREATE TABLE sandboxes (
    name TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    episode TEXT NOT NULL,
    role TEXT NOT NULL,
    provider TEXT NOT NULL,
    isolation TEXT NOT NULL,
    wire_version INTEGER NOT NULL,
    spec TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX sandboxes_by_episode ON sandboxes (episode);
CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    server TEXT NOT NULL,
    address TEXT NOT NULL,
    path TEXT NOT NULL,
    episode TEXT,
    used_at REAL NOT NULL,
    data TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX sessions_by_episode ON sessions (episode) WHERE episode IS NOT NULL;
"""


_DAMAGED = (
    "it is damaged: move {name}* out of the folder. Then episodes in progress end; the files of all episodes "
    "stay"
)
_LOCKED = f"another process has locked it for over {BUSY_SECONDS:g} s"
_CURES = {
    **dict.fromkeys((sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB), _DAMAGED),
    **dict.fromkeys((sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED), _LOCKED),
    **dict.fromkeys(
        (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR),
        REPAIR_OR_LEAVE,
    ),
}
"""What to do about errors, by the primary result code of SQLite."""


@contextmanager
def read_only_connection(state: Path) -> Generator[sqlite3.Connection | None]:
    """A connection that reads the database of a state folder while servers write; None if there is none.

    Raises SettingsError if it cannot be read, or has another schema; also for errors in the body.
    """
    file = state / FILE_NAME
    if not file.is_file():
        yield None
        return
    with errors_named(file):
        address = f"{file.absolute().as_uri()}?mode=ro"
        connection = sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
        with closing(connection):
            _refuse_other_schema(connection, file)
            yield connection


def connect(file: Path) -> sqlite3.Connection:
    """A connection that writes; creates the database if there is none.

    Raises SchemaError for a database of another schema, sqlite3.Error and OSError.
    """
    connection = sqlite3.connect(file, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        file.chmod(0o600)  # handles of episodes are capabilities
        connection.execute("PRAGMA journal_mode = WAL")
        # Without fsync for each row: rows survive the process, and a power cut ends the sandboxes too.
        connection.execute("PRAGMA synchronous = NORMAL")
        # A checkpoint waits for the disk; `Store.maintain` does it in a thread.
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            if connection.execute("PRAGMA user_version").fetchone() == (0,):  # it is new
                # Not `executescript`, which would commit.
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        _refuse_other_schema(connection, file)
    except BaseException:
        connection.close()
        raise
    return connection


def _refuse_other_schema(connection: sqlite3.Connection, file: Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version != SCHEMA_VERSION:
        raise SchemaError(
            f"--state: {file} has schema {version}, and this version of decathlon-mcp needs schema "
            f"{SCHEMA_VERSION}: move the folder away, or use the version that wrote it"
        )


def set_timeout(connection: sqlite3.Connection, seconds: float) -> None:
    """Let the statements of a connection wait so long for another process's lock."""
    connection.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")


def error_code(error: sqlite3.Error) -> int:
    """The primary result code of SQLite; 0 for Python's own errors, such as a closed connection."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


@contextmanager
def errors_named(file: Path) -> Generator[None]:
    """Raise SettingsError, with what to do, for an error of the database."""
    try:
        yield
    except sqlite3.Error as error:
        cure = _CURES.get(error_code(error), "choose another folder").format(name=file.name)
        raise SettingsError(f"--state: {file} cannot be used: {error}; {cure}") from None
