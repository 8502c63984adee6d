"""A recording: the web as the sandboxes of one task saw it, in one SQLite file.

A recording belongs to a suite, its revision and a task, and fixes the launch time of the episodes that use
it. It has an exchange for each time that a request was made: the n-th occurrence of a request in a sandbox
gets the n-th response, later occurrences the last. Bodies are stored once, compressed. Requests without a
response are listed too; where the site could not be reached, replays fail in the same way.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from decathlon_mcp.plugins.web.exchanges import MEBIBYTE, Counts, Headers, Part, RequestKey, WebResponse

VERSION = 1
SUFFIX = ".sqlite"
FOLDER = "recordings"
MAX_EXCHANGES = 50_000
EXCHANGE_BYTES = 1024
"""What an exchange counts against the limit of its recording, in addition to its body."""
MAX_ROLLOUTS = 200
"""Of more rollouts, the oldest are forgotten."""
MAX_UNANSWERED = 1000
"""Of more requests without a response, the longest unused are forgotten."""
MAX_REASON_CHARACTERS = 500
BUSY_SECONDS = 20.0
"""How long a lock of another process on the file, such as `recordings prune`, is waited for."""
RUNNABLE_RATE = 0.9
"""Part of the requests of another rollout that a recording has to answer."""

_SIZE = "SELECT coalesce((SELECT sum(size) FROM bodies), 0), (SELECT count(*) FROM exchanges)"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS bodies (digest TEXT PRIMARY KEY, size INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS exchanges (
    part TEXT NOT NULL, request TEXT NOT NULL, variant TEXT NOT NULL, number INTEGER NOT NULL,
    method TEXT NOT NULL, url TEXT NOT NULL, status INTEGER NOT NULL, reason TEXT NOT NULL,
    headers TEXT NOT NULL, body TEXT NOT NULL, recorded_at TEXT NOT NULL,
    PRIMARY KEY (part, request, variant, number));
CREATE TABLE IF NOT EXISTS rollouts (
    episode TEXT PRIMARY KEY, mode TEXT NOT NULL, requests TEXT NOT NULL, counts TEXT NOT NULL,
    at TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS unanswered (
    part TEXT NOT NULL, request TEXT NOT NULL, method TEXT NOT NULL, url TEXT NOT NULL,
    failure TEXT NOT NULL, count INTEGER NOT NULL, at TEXT NOT NULL, PRIMARY KEY (part, request));
"""


class RecordingError(Exception):
    """A recording cannot be read or written; the message names the file."""


class RecordingFullError(RecordingError):
    """A response does not fit into the recording any more."""


@dataclass(frozen=True, slots=True)
class RecordingId:
    """What a recording belongs to."""

    suite: str
    revision: str
    task: str

    def path(self, folder: Path) -> Path:
        """Its file. `folder` has all recordings."""
        suite, task, revision = (_file_name(name) for name in (self.suite, self.task, self.revision))
        return folder / suite / task / f"{revision}{SUFFIX}"


@dataclass(frozen=True, slots=True)
class Exchange:
    """One recorded exchange without its body."""

    part: str
    request: str
    variant: str
    number: int
    """Which occurrence of the request in its sandbox, from 0."""
    method: str
    url: str
    status: int
    body: str
    """SHA-256 of the body, which has `size` bytes."""
    size: int
    recorded_at: str


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A request without a response, made `count` times, the last time at `at`.

    `failure`: why the site could not be reached while recording; empty if it was not asked.
    `url` is redacted.
    """

    part: str
    method: str
    url: str
    failure: str
    count: int
    at: str


@dataclass(frozen=True, slots=True)
class Rollout:
    """An episode that used the recording. `requests`: digest of the set of its agent's requests."""

    episode: str
    mode: str
    requests: str
    counts: Counts
    at: str


@dataclass(frozen=True, slots=True)
class Summary:
    """A recording at a glance. `rate`: part of the requests of different rollouts that it answered."""

    id: RecordingId
    launch_time: datetime
    exchanges: int
    body_bytes: int
    rollouts: int
    rate: float | None

    @property
    def runnable(self) -> bool:
        """Whether a different rollout got at least `RUNNABLE_RATE` of its responses."""
        return self.rate is not None and self.rate >= RUNNABLE_RATE

    @property
    def rate_text(self) -> str:
        """The rate, and whether it is high enough, for people."""
        if self.rate is None:
            return "no other rollout yet"
        verdict = "runnable" if self.runnable else f"under {RUNNABLE_RATE:.0%}"
        return f"{self.rate:.1%} of other rollouts' requests ({verdict})"


class Recording:
    """An open recording. Its methods block, and can be called in any thread, one at a time.

    Raises RecordingError for a file that cannot be used.
    """

    def __init__(self, path: Path, *, max_bytes: int = 1024 * MEBIBYTE) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._connection = _connect(path, create=False)
        with ExitStack() as stack:
            stack.callback(self._connection.close)
            about = dict(self._rows("SELECT name, value FROM about"))
            if about.get("version") != str(VERSION) or "launch_time" not in about:
                raise RecordingError(f"{path} is not a recording of version {VERSION}")
            stack.pop_all()
        self.id = RecordingId(about["suite"], about["revision"], about["task"])
        self.launch_time = datetime.fromisoformat(about["launch_time"])

    @classmethod
    def create(
        cls, folder: Path, belongs_to: RecordingId, launch_time: datetime, *, max_bytes: int = 1024 * MEBIBYTE
    ) -> Self:
        """Open the recording of a task; it is created with this launch time if it does not exist."""
        path = belongs_to.path(folder)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = {**asdict(belongs_to), "version": str(VERSION), "launch_time": launch_time.isoformat()}
        with closing(_connect(path, create=True)) as connection, _as_recording_error(path), connection:
            connection.executemany("INSERT OR IGNORE INTO about VALUES (?, ?)", about.items())
        return cls(path, max_bytes=max_bytes)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection]:
        with _as_recording_error(self.path), self._connection:
            yield self._connection

    def find(self, part: Part, key: RequestKey, number: int) -> WebResponse | None:
        """The response to the request that a sandbox makes for the `number`-th time, from 0.

        Of responses to other variants of the request, the first that was recorded.
        """
        # A part of a page (206) is no answer to who asks for all of it, or for another part.
        row = self._row(
            """SELECT status, reason, headers, bodies.body FROM exchanges
            JOIN bodies ON bodies.digest = exchanges.body
            WHERE part = :part AND request = :request AND variant = (
                SELECT variant FROM exchanges
                WHERE part = :part AND request = :request AND (variant = :variant OR status <> 206)
                ORDER BY variant <> :variant, number, recorded_at, variant LIMIT 1)
            ORDER BY number > :number, CASE WHEN number <= :number THEN -number ELSE number END LIMIT 1""",
            {"part": part, "request": key.digest, "variant": key.variant, "number": number},
        )
        return None if row is None else _response(*row)

    def response(self, exchange: Exchange) -> WebResponse:
        """The response of one of `exchanges`. Raises RecordingError if it has been removed since."""
        row = self._row(
            "SELECT status, reason, headers, bodies.body FROM exchanges JOIN bodies "
            "ON digest = exchanges.body WHERE part = ? AND request = ? AND variant = ? AND number = ?",
            (exchange.part, exchange.request, exchange.variant, exchange.number),
        )
        if row is None:
            raise RecordingError(f"{self.path}: {exchange.url} has been removed")
        return _response(*row)

    def _rows(self, query: str, values: Mapping[str, Any] | Sequence[Any] = ()) -> list[Any]:
        with self._transaction() as connection:
            return connection.execute(query, values).fetchall()

    def _row(self, query: str, values: Mapping[str, Any] | Sequence[Any] = ()) -> Any:
        return next(iter(self._rows(query, values)), None)

    def add(self, part: Part, key: RequestKey, number: int, response: WebResponse) -> None:
        """Store a response, replacing a response of the same number. Raises RecordingFullError."""
        digest = hashlib.sha256(response.body).hexdigest()
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        headers = json.dumps(response.headers.items)
        row = (part, key.digest, key.variant, number, key.method, key.url, response.status, response.reason)
        compressed = zlib.compress(response.body, 6)
        with self._transaction() as connection:
            stored, count = connection.execute(_SIZE).fetchone()
            size = stored + (count + 1) * EXCHANGE_BYTES + len(response.body)
            if size > self._max_bytes or count >= MAX_EXCHANGES:
                raise RecordingFullError(f"{self.path}: the recording is full")
            connection.execute(
                "INSERT OR IGNORE INTO bodies VALUES (?, ?, ?)", (digest, len(response.body), compressed)
            )
            connection.execute(
                "INSERT OR REPLACE INTO exchanges VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*row, headers, digest, now),
            )
            connection.execute("DELETE FROM unanswered WHERE part = ? AND request = ?", (part, key.digest))
            _delete_unused_bodies(connection)

    def add_unanswered(self, part: Part, key: RequestKey, count: int, failure: str = "") -> None:
        """Note a request without a response. `failure`: why its site, if asked, could not be reached."""
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        row = (part, key.digest, key.method, key.url, failure[:MAX_REASON_CHARACTERS], count, now)
        with self._transaction() as connection:
            connection.execute(
                "INSERT INTO unanswered VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                "count = count + excluded.count, at = excluded.at, "
                "failure = CASE excluded.failure WHEN '' THEN failure ELSE excluded.failure END",
                row,
            )
            connection.execute(
                "DELETE FROM unanswered WHERE rowid IN "
                "(SELECT rowid FROM unanswered ORDER BY failure <> '' DESC, at DESC LIMIT -1 OFFSET ?)",
                (MAX_UNANSWERED,),
            )

    def find_failure(self, part: Part, key: RequestKey) -> str | None:
        """Why the site could not be reached while recording; None if it was not asked, or has answered."""
        row = self._row(
            "SELECT failure FROM unanswered WHERE part = ? AND request = ? AND failure <> ''",
            (part, key.digest),
        )
        return None if row is None else str(row[0])

    def unanswered(self) -> list[Unanswered]:
        """The requests without a response, the most frequent first."""
        return [
            Unanswered(*row)
            for row in self._rows(
                "SELECT part, method, url, failure, count, at FROM unanswered ORDER BY count DESC, url, part"
            )
        ]

    def add_rollout(self, rollout: Rollout) -> None:
        """Note how the requests of an ended episode were answered."""
        with self._transaction() as connection:
            counts = json.dumps(asdict(rollout.counts))
            row = (rollout.episode, rollout.mode, rollout.requests, counts, rollout.at)
            connection.execute("INSERT OR REPLACE INTO rollouts VALUES (?, ?, ?, ?, ?)", row)
            connection.execute(
                "DELETE FROM rollouts WHERE mode <> 'record' AND episode NOT IN "
                "(SELECT episode FROM rollouts ORDER BY at DESC LIMIT ?)",
                (MAX_ROLLOUTS,),
            )

    def exchanges(self) -> list[Exchange]:
        """All exchanges without their bodies, by part, address and number."""
        rows = self._rows(
            "SELECT part, request, variant, number, method, url, status, exchanges.body, size, recorded_at "
            "FROM exchanges JOIN bodies ON digest = exchanges.body "
            "ORDER BY part, url, method, variant, number"
        )
        return [Exchange(*row) for row in rows]

    def rollouts(self) -> list[Rollout]:
        """The episodes that used it, the oldest first."""
        rows = self._rows("SELECT episode, mode, requests, counts, at FROM rollouts ORDER BY at")
        return [
            Rollout(episode, mode, requests, Counts(**json.loads(counts)), at)
            for episode, mode, requests, counts, at in rows
        ]

    def remove(self, *, part: str | None = None, url_glob: str = "*") -> int:
        """Delete the exchanges whose address matches; returns their number. Failures are forgotten too."""
        matching = "WHERE url GLOB ? AND (? IS NULL OR part = ?)"
        with self._transaction() as connection:
            cursor = connection.execute(f"DELETE FROM exchanges {matching}", (url_glob, part, part))
            connection.execute(f"DELETE FROM unanswered {matching}", (url_glob, part, part))
            _delete_unused_bodies(connection)
        self._connection.execute("VACUUM")
        return cursor.rowcount

    def summary(self) -> Summary:
        """The numbers of `recordings list`."""
        size, exchanges = self._row(_SIZE)
        rollouts = self.rollouts()
        return Summary(self.id, self.launch_time, exchanges, size, len(rollouts), hit_rate(rollouts))


def hit_rate(rollouts: list[Rollout]) -> float | None:
    """Part of the requests that the recording answered in rollouts that differ from its own.

    None if there was none with a request.
    """
    recorded = {rollout.requests for rollout in rollouts if rollout.mode == "record"}
    total = Counts()
    for rollout in rollouts:
        if rollout.mode != "record" and rollout.requests not in recorded:
            total += rollout.counts
    return total.replayed / total.requests if total.requests else None


def find_recordings(folder: Path) -> Iterator[Path]:
    """The files of all recordings, sorted."""
    yield from sorted(folder.glob(f"*/*/*{SUFFIX}"))


def revisions(folder: Path, suite: str, task: str) -> list[str]:
    """The revisions of which a task has recordings."""
    files = (folder / _file_name(suite) / _file_name(task)).glob(f"*{SUFFIX}")
    return sorted(file.stem for file in files)


def delete(path: Path) -> None:
    """Delete a recording with what SQLite keeps next to it."""
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _file_name(name: str) -> str:
    quoted = quote(name, safe=" ")
    return quoted.replace(".", "%2E") if quoted.startswith(".") else quoted


def _connect(path: Path, *, create: bool) -> sqlite3.Connection:
    try:
        if create:
            path.touch(mode=0o600)
        uri = f"{path.absolute().as_uri()}?mode=rw"
        connection = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, check_same_thread=False)
        with closing(connection.cursor()) as cursor:
            # A commit then does not wait for the disk; a recording can be made again.
            cursor.execute("PRAGMA journal_mode = WAL")
            cursor.execute("PRAGMA synchronous = NORMAL")
            cursor.executescript(_SCHEMA)
    except (sqlite3.Error, OSError) as error:
        raise RecordingError(f"{path}: {error}") from error
    return connection


@contextmanager
def _as_recording_error(path: Path) -> Generator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise RecordingError(f"{path}: {error}") from error


def _response(status: int, reason: str, headers: str, body: bytes) -> WebResponse:
    pairs = tuple((str(name), str(value)) for name, value in json.loads(headers))
    return WebResponse(status, reason, Headers(pairs), zlib.decompress(body))


def _delete_unused_bodies(connection: sqlite3.Connection) -> None:
    connection.execute("DELETE FROM bodies WHERE digest NOT IN (SELECT body FROM exchanges)")
