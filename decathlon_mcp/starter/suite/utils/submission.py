"""Reads the files in an agent's workspace.

The files are untrusted: a file may be missing, huge, of the wrong kind, or crafted to break its reader. All
functions here read within limits, raise Wrong for unexpected content, and execute nothing.
"""

import csv
import io
import json
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from utils.evaluation import Wrong, require

MAX_BYTES = 4 * 1024 * 1024
MAX_UNPACKED_BYTES = 64 * 1024 * 1024
MAX_FILES = 5000
MAX_SECONDS = 20


def regular_file(workspace: Path, name: str, limit_bytes: int = MAX_BYTES) -> Path:
    """Return the path of a regular file; raises Wrong for a folder, a link or anything behind a link."""
    path = workspace
    for part in Path(name).parts:
        path = path / part
        require(not path.is_symlink(), f"{name} is, or is behind, a symbolic link")
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise Wrong(f"{name} is missing") from None
    require(stat.S_ISREG(status.st_mode), f"{name} is not a file")
    require(status.st_size <= limit_bytes, f"{name} is larger than {limit_bytes} bytes")
    return path


def read_text(workspace: Path, name: str) -> str:
    """Read a UTF-8 text, with or without a byte order mark."""
    try:
        return regular_file(workspace, name).read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise Wrong(f"{name} is not UTF-8 text") from None


def read_json(workspace: Path, name: str) -> object:
    """Read any JSON value."""
    try:
        return json.loads(read_text(workspace, name))
    except (ValueError, RecursionError) as error:
        raise Wrong(f"{name} is not JSON: {error}") from None


def read_object(workspace: Path, name: str, fields: set[str]) -> dict[str, object]:
    """Read a JSON object with exactly these fields."""
    value = read_json(workspace, name)
    if not isinstance(value, dict):
        raise Wrong(f"{name} is not a JSON object")
    require(set(value) == fields, f"{name} must have the fields {sorted(fields)} and no others")
    return value


def read_csv(workspace: Path, name: str, header: list[str]) -> list[list[str]]:
    """Return the rows below the header of a CSV file, without whitespace around the fields."""
    try:
        rows = [
            [field.strip() for field in row] for row in csv.reader(io.StringIO(read_text(workspace, name)))
        ]
    except csv.Error as error:
        raise Wrong(f"{name} is not CSV: {error}") from None
    rows = [row for row in rows if any(row)]
    require(bool(rows) and rows[0] == header, f"{name} must begin with the line {','.join(header)}")
    for row in rows[1:]:
        require(len(row) == len(header), f"{name}: a row has {len(row)} fields instead of {len(header)}")
    return rows[1:]


def number(value: object) -> float | None:
    """Return a JSON value or CSV field as a finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        result = float(value)
    except (ValueError, OverflowError):
        return None
    return result if abs(result) < 1e15 else None


def close(value: object, expected: float, tolerance: float = 0.005) -> bool:
    """Return whether a JSON value or CSV field is this number, by default to within half a cent."""
    actual = number(value)
    return actual is not None and abs(actual - expected) <= tolerance


def tree(workspace: Path) -> list[str]:
    """Return the relative paths of all files, sorted. Ignores empty folders; raises Wrong for a link."""
    files: list[str] = []
    for path in workspace.rglob("*"):
        name = path.relative_to(workspace).as_posix()
        require(not path.is_symlink(), f"{name} is a symbolic link")
        if not path.is_dir():
            files.append(name)
            require(len(files) <= MAX_FILES, f"there are more than {MAX_FILES} files")
    return sorted(files)


@contextmanager
def open_database(workspace: Path, name: str) -> Iterator[sqlite3.Connection]:
    """Open a SQLite file read-only. Raises Wrong if a query fails or exceeds MAX_SECONDS.

    Fetch with a limit: a "table" may be a view that yields endless or huge rows.
    """
    path = regular_file(workspace, name, MAX_UNPACKED_BYTES)
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    deadline = time.monotonic() + MAX_SECONDS
    connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_BYTES)
    try:
        connection.execute("PRAGMA trusted_schema = OFF")
        yield connection
    except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
        raise Wrong(f"{name} cannot be read: {error}") from None
    finally:
        connection.close()
