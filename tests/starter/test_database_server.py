"""The server `database`: queries and changes, and confinement to one file."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncGenerator

import pytest

from tests.starter.bench import Server, serving

pytestmark = pytest.mark.anyio
SHOP = "shop.db"


@pytest.fixture(scope="module")
async def database(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Server]:
    workspace = tmp_path_factory.mktemp("database") / "workspace"
    workspace.mkdir()
    for path in (workspace / SHOP, workspace.parent / "other.db"):
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE goods (id INTEGER PRIMARY KEY, name TEXT NOT NULL, picture BLOB)")
        connection.executemany("INSERT INTO goods VALUES (?, ?, ?)", [(1, "Lamp", b"abc"), (2, "Rope", None)])
        connection.commit()
        connection.close()
    async with serving("database", workspace) as server:
        yield server


async def test_tables_are_listed_and_described(database: Server) -> None:
    assert "table goods: " in await database.call_ok("list_tables", database=SHOP)
    assert "name TEXT NOT NULL" in await database.call_ok("describe_table", database=SHOP, table="goods")
    assert "no table" in await database.call_error("describe_table", database=SHOP, table="bads")


async def test_a_query_returns_json_and_reports_truncation(database: Server) -> None:
    sql = "SELECT * FROM goods WHERE id < ? ORDER BY id"
    answer = json.loads(await database.call_ok("query", database=SHOP, sql=sql, parameters=[3]))
    assert answer["columns"] == ["id", "name", "picture"]
    assert answer["rows"] == [[1, "Lamp", "<3 bytes>"], [2, "Rope", None]]
    assert not answer["more"]
    answer = json.loads(await database.call_ok("query", database=SHOP, sql=sql, parameters=[3], limit=1))
    assert (len(answer["rows"]), answer["more"]) == (1, True)


async def test_a_change_is_atomic(database: Server) -> None:
    done = await database.call_ok(
        "execute", database=SHOP, sql="INSERT INTO goods (name) VALUES (?), (?)", parameters=["Map", "Pen"]
    )
    assert "2 rows" in done
    failed = await database.call_error(
        "execute", database=SHOP, sql="INSERT INTO goods (name) VALUES ('Tin'), (NULL)"
    )
    assert "NOT NULL" in failed
    assert '["Tin"]' not in await database.call_ok("query", database=SHOP, sql="SELECT name FROM goods")


async def test_a_query_changes_nothing(database: Server) -> None:
    for sql in ("DELETE FROM goods", "CREATE TABLE x (y)", "DROP TABLE goods"):
        assert "SQLite says" in await database.call_error("query", database=SHOP, sql=sql)


async def test_no_statement_leads_out_of_the_file(database: Server) -> None:
    for sql in (
        "ATTACH '../other.db' AS other",
        "VACUUM INTO '../copy.db'",
        "PRAGMA journal_mode = WAL",
        "SELECT load_extension('evil.so')",
        "SELECT writefile('../x', 'y')",
    ):
        await database.call_error("execute", database=SHOP, sql=sql)
        await database.call_error("query", database=SHOP, sql=sql)
    assert sorted(path.name for path in database.workspace.parent.iterdir()) == ["other.db", "workspace"]


async def test_no_path_leads_out_of_the_workspace(database: Server) -> None:
    for path in ("../other.db", "/tmp/../etc/passwd", f"{SHOP}/../../other.db"):
        for tool in ("query", "execute"):
            assert "outside the workspace" in await database.call_error(tool, database=path, sql="SELECT 1")
        assert "outside the workspace" in await database.call_error("list_tables", database=path)


async def test_a_missing_file_is_not_created(database: Server) -> None:
    assert "no file" in await database.call_error("execute", database="new.db", sql="CREATE TABLE x (y)")
    assert not (database.workspace / "new.db").exists()


async def test_a_path_is_never_read_as_a_uri(database: Server) -> None:
    (database.workspace / "odd?mode=memory#.db").write_bytes((database.workspace / SHOP).read_bytes())
    assert "goods" in await database.call_ok("list_tables", database="odd?mode=memory#.db")
