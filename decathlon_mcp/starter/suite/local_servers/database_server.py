"""MCP server `database`: SQLite files of one workspace. Run as `database_server.py WORKSPACE`."""

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

from confined import Workspace

MAX_ROWS = 1000
MAX_SECONDS = 20

READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
CHANGES = ToolAnnotations(read_only_hint=False, destructive_hint=True, open_world_hint=False)

Database = Annotated[
    str, Field(description="The SQLite file: relative to the workspace, or absolute and inside it.")
]
Parameters = Annotated[
    list[str | int | float | None] | None, Field(description="Values for the statement's ? placeholders.")
]

workspace = Workspace(sys.argv[1])
server = MCPServer("database", log_level="WARNING")


@server.tool(annotations=READS, structured_output=False)
def list_tables(database: Database) -> str:
    """List the tables and views, with the number of rows of each."""
    with _opened(database, "ro") as connection:
        found = connection.execute(
            "SELECT type, name FROM sqlite_schema "
            "WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite_%' ORDER BY name"
        ).fetchall()
        counts = [
            connection.execute(f"SELECT count(*) FROM {_quoted(name)}").fetchone()[0] for _, name in found
        ]
    return (
        "\n".join(f"{kind} {name}: {rows} rows" for (kind, name), rows in zip(found, counts, strict=True))
        or "(no tables)"
    )


@server.tool(annotations=READS, structured_output=False)
def describe_table(database: Database, table: str) -> str:
    """Show the statement that made a table or view: its columns, types, keys and constraints."""
    with _opened(database, "ro") as connection:
        row = connection.execute(
            "SELECT sql FROM sqlite_schema WHERE name = ? AND sql IS NOT NULL", [table]
        ).fetchone()
    if row is None:
        raise ToolError(f"There is no table {table!r}")
    return row[0]


@server.tool(annotations=READS, structured_output=False)
def query(
    database: Database,
    sql: Annotated[str, Field(description="One SELECT (or WITH ... SELECT, or VALUES) statement.")],
    parameters: Parameters = None,
    limit: Annotated[int, Field(ge=1, le=MAX_ROWS, description="How many rows at most.")] = 200,
) -> str:
    """Run one statement that only reads. Answers in JSON: columns, whether there were more rows, rows."""
    with _opened(database, "ro") as connection:
        cursor = connection.execute(sql, parameters or [])
        columns = [column[0] for column in cursor.description or ()]
        rows = cursor.fetchmany(limit + 1)
    lines = [json.dumps([_plain(value) for value in row], ensure_ascii=False) for row in rows[:limit]]
    head = f'"columns": {json.dumps(columns, ensure_ascii=False)}, "more": {json.dumps(len(rows) > limit)}'
    return f'{{{head}, "rows": [\n' + ",\n".join(lines) + "\n]}"


@server.tool(annotations=CHANGES, structured_output=False)
def execute(
    database: Database,
    sql: Annotated[str, Field(description="One statement: INSERT, UPDATE, DELETE, CREATE, ...")],
    parameters: Parameters = None,
) -> str:
    """Run one statement that changes the database, in a transaction of its own. The file must exist."""
    with _opened(database, "rw") as connection, connection:
        changed = connection.execute(sql, parameters or []).rowcount
    return f"Done; {changed} rows changed" if changed >= 0 else "Done"


@contextmanager
def _opened(database: str, mode: str) -> Iterator[sqlite3.Connection]:
    """A connection that sees this one file and no other, and is given up after MAX_SECONDS."""
    file = workspace.file(database)
    connection = sqlite3.connect(f"{file.as_uri()}?mode={mode}", uri=True, timeout=MAX_SECONDS)
    over = time.monotonic() + MAX_SECONDS
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_authorizer(_authorise)
        connection.set_progress_handler(lambda: time.monotonic() > over, 10_000)
        yield connection
    except sqlite3.Error as error:
        late = time.monotonic() > over
        raise ToolError(f"Given up after {MAX_SECONDS} s" if late else f"SQLite says: {error}") from None
    finally:
        connection.close()


def _authorise(action: int, *_: object) -> int:
    refused = action in (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH, sqlite3.SQLITE_PRAGMA)
    return sqlite3.SQLITE_DENY if refused else sqlite3.SQLITE_OK


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _plain(value: object) -> object:
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else value


if __name__ == "__main__":
    server.run()
