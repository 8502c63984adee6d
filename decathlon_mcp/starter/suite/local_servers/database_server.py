"""MCP server `database`: the SQLite files of one workspace. Run as `database_server.py WORKSPACE`."""

import json
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations
from pydantic import Field

from workspace import Workspace

MAX_ROWS = 1000
MAX_SECONDS = 20

READ_ONLY = ToolAnnotations(read_only_hint=True, open_world_hint=False)
DESTRUCTIVE = ToolAnnotations(read_only_hint=False, destructive_hint=True, open_world_hint=False)

Database = Annotated[
    str, Field(description="The SQLite file: relative to the workspace, or absolute and inside it.")
]
Parameters = Annotated[
    list[str | int | float | None] | None, Field(description="Values for the statement's ? placeholders.")
]

workspace = Workspace(sys.argv[1])
server = MCPServer("database", log_level="WARNING")


@server.tool(annotations=READ_ONLY, structured_output=False)
def list_tables(database: Database) -> str:
    """List the tables and views, with the number of rows of each."""
    with _connect(database, "ro") as connection:
        tables = connection.execute(
            "SELECT type, name FROM sqlite_schema "
            "WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite_%' ORDER BY name"
        ).fetchall()
        counts = [
            connection.execute(f"SELECT count(*) FROM {_quote(name)}").fetchone()[0] for _, name in tables
        ]
    return (
        "\n".join(f"{kind} {name}: {rows} rows" for (kind, name), rows in zip(tables, counts, strict=True))
        or "(no tables)"
    )


@server.tool(annotations=READ_ONLY, structured_output=False)
def describe_table(database: Database, table: str) -> str:
    """Show the statement that created a table or view: its columns, types, keys and constraints."""
    with _connect(database, "ro") as connection:
        row = connection.execute(
            "SELECT sql FROM sqlite_schema WHERE name = ? AND sql IS NOT NULL", [table]
        ).fetchone()
    if row is None:
        raise ToolError(f"There is no table {table!r}")
    return row[0]


@server.tool(annotations=READ_ONLY, structured_output=False)
def query(
    database: Database,
    sql: Annotated[str, Field(description="One SELECT (or WITH ... SELECT, or VALUES) statement.")],
    parameters: Parameters = None,
    limit: Annotated[int, Field(ge=1, le=MAX_ROWS, description="Maximum number of rows.")] = 200,
) -> str:
    """Run one statement that only reads. Returns JSON: columns, whether there are more rows, rows."""
    with _connect(database, "ro") as connection:
        cursor = connection.execute(sql, parameters or [])
        columns = [column[0] for column in cursor.description or ()]
        rows = cursor.fetchmany(limit + 1)
    lines = [json.dumps([_json_value(value) for value in row], ensure_ascii=False) for row in rows[:limit]]
    head = f'"columns": {json.dumps(columns, ensure_ascii=False)}, "more": {json.dumps(len(rows) > limit)}'
    return f'{{{head}, "rows": [\n' + ",\n".join(lines) + "\n]}"


@server.tool(annotations=DESTRUCTIVE, structured_output=False)
def execute(
    database: Database,
    sql: Annotated[str, Field(description="One statement: INSERT, UPDATE, DELETE, CREATE, ...")],
    parameters: Parameters = None,
) -> str:
    """Run one statement that changes the database, in a transaction of its own. The file must exist."""
    with _connect(database, "rw") as connection, connection:
        changed = connection.execute(sql, parameters or []).rowcount
    return f"Done; {changed} rows changed" if changed >= 0 else "Done"


@contextmanager
def _connect(database: str, mode: str) -> Iterator[sqlite3.Connection]:
    """Connect to this file and no other. Statements are interrupted MAX_SECONDS after connecting."""
    file = workspace.file(database)
    connection = sqlite3.connect(f"{file.as_uri()}?mode={mode}", uri=True, timeout=MAX_SECONDS)
    deadline = time.monotonic() + MAX_SECONDS
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_authorizer(_authorise)
        connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        yield connection
    except sqlite3.Error as error:
        timed_out = time.monotonic() > deadline
        message = f"Stopped after {MAX_SECONDS} s" if timed_out else f"SQLite says: {error}"
        raise ToolError(message) from None
    finally:
        connection.close()


def _authorise(action: int, *_: object) -> int:
    denied = action in (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH, sqlite3.SQLITE_PRAGMA)
    return sqlite3.SQLITE_DENY if denied else sqlite3.SQLITE_OK


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _json_value(value: object) -> object:
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else value


if __name__ == "__main__":
    server.run()
