"""The store of episodes and sessions."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.errors import AtCapacityError, BadRequestError, SettingsError
from decathlon_mcp.storage import store as store_module
from decathlon_mcp.storage.database import SCHEMA_VERSION
from decathlon_mcp.storage.store import ENDED, EpisodeRow, SandboxRow, SessionRow, Store
from tests.history.stored_episodes import episode_row


def episode(name: str = "one", **fields: Any) -> EpisodeRow:
    return episode_row(name, server="me", spec={"launch_time": "2026-01-01", "text": "\ud800"}, **fields)


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_database_of_another_schema_is_refused_as_it_is(tmp_path: Path, version: int) -> None:
    with Store.open(tmp_path, "me") as store:
        store.insert_episode(episode())
    set_schema_version(tmp_path, version)
    cure = "move the folder away, or use the version that wrote it"
    message = rf"store\.db has schema {version}, .* needs schema {SCHEMA_VERSION}: {cure}"
    for open_store in (lambda: Store.open(tmp_path, "me"), lambda: Store.open_read_only(tmp_path)):
        with pytest.raises(SettingsError, match=message), open_store():
            pass
    set_schema_version(tmp_path, SCHEMA_VERSION)
    with Store.open(tmp_path, "me") as store:
        assert [row.id for row in store.unfinished_episodes()] == ["one"]
        assert store.generation == 2


def set_schema_version(state: Path, version: int) -> None:
    with closing(sqlite3.connect(state / "store.db")) as connection:
        connection.execute(f"PRAGMA user_version = {version}")


def test_database_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    with Store.open(tmp_path, "me"):
        assert (tmp_path / "store.db").stat().st_mode & 0o077 == 0
        assert (tmp_path / "store.db-wal").stat().st_mode & 0o077 == 0


@contextmanager
def locked(state: Path) -> Generator[None]:
    """Another process writes to the database, as a person with `sqlite3` would."""
    with closing(sqlite3.connect(state / "store.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


@contextmanager
def full(store: Store) -> Generator[None]:
    """The database file cannot grow."""
    connection = store._connection  # pyright: ignore[reportPrivateUsage]
    ((pages,),) = connection.execute("PRAGMA page_count").fetchall()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    yield
    connection.execute("PRAGMA max_page_count = 1000000000")


def test_changes_while_the_store_is_locked_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "RETRY_SECONDS", 60.0)
    with Store.open(tmp_path, "me") as store:
        store.insert_episode(episode())
        with locked(tmp_path):
            began_at = time.monotonic()
            for number in range(100):
                store.update_episode("one", phase="ready", progress={"number": number})
            store.end_episode("one", "closed")
            # Only the first of them has waited.
            assert time.monotonic() - began_at < 5 * store_module.WRITE_SECONDS
            with pytest.raises(AtCapacityError):
                store.insert_episode(episode("two"))
        # At once, without waiting for the time of the next try.
        store.insert_episode(episode("two"))
        row = store.find_one(EpisodeRow, id="one")
        assert row is not None
        assert (row.phase, row.progress) == (ENDED, {"number": 99})


@contextmanager
def read_only(store: Store) -> Generator[None]:
    """The error of a statement is that of a read-only file."""
    connection = store._connection  # pyright: ignore[reportPrivateUsage]
    connection.execute("PRAGMA query_only = ON")
    yield
    assert store.why_unwritable() == "attempt to write a readonly database"
    connection.execute("PRAGMA query_only = OFF")


@pytest.mark.parametrize("fails", [full, read_only])
def test_changes_that_the_disk_refuses_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: Callable[[Store], AbstractContextManager[None]]
) -> None:
    monkeypatch.setattr(store_module, "RETRY_SECONDS", 0.0)
    with Store.open(tmp_path, "me") as store:
        store.insert_episode(episode())
        with fails(store):
            store.update_episode("one", verdict={"detail": "x" * 100_000})
            store.end_episode("one", "closed")
            assert [row.id for row in store.unfinished_episodes()] == ["one"]
            with pytest.raises(AtCapacityError):
                store.insert_episode(episode("two"))
        store.insert_episode(episode("two"))
        row = store.find_one(EpisodeRow, id="one")
        assert row is not None
        assert row.phase == ENDED
        assert row.verdict == {"detail": "x" * 100_000}


def test_changes_that_could_not_be_written_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_UNWRITTEN", 10)
    with Store.open(tmp_path, "me") as store:
        with locked(tmp_path):
            for number in range(100):
                store.save(SessionRow(id=f"{number}", server="", address="lobby", path="/", data={}))
        monkeypatch.setattr(store, "_retry_at", 0.0)
        store.delete(SandboxRow, "none")
        assert store.find_one(SessionRow, id="0", server=store.server) is None
        assert store.find_one(SessionRow, id="99", server=store.server) is not None


@pytest.mark.parametrize("columns", [{"cause": "\ud800"}, {"calls": 2**70}])
def test_change_that_can_never_be_written_holds_up_no_other(tmp_path: Path, columns: dict[str, Any]) -> None:
    with Store.open(tmp_path, "me") as store:
        store.insert_episode(episode("one"))
        store.update_episode("one", **columns)
        store.update_episode("one", phase="ready")
        store.insert_episode(episode("two"))
        assert {row.id: row.phase for row in store.unfinished_episodes()} == {"one": "ready", "two": "queued"}
        assert store.why_unwritable() is None


def test_adopting_fails_if_the_store_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "BUSY_SECONDS", 0.1)
    with Store.open(tmp_path, "dead") as store:
        store.insert_episode(episode())
    with Store.open(tmp_path, "next") as store:
        with locked(tmp_path), pytest.raises(SettingsError, match="another process has locked it"):
            store.adopt([])
        store.adopt([])
        assert [row.id for row in store.unfinished_episodes()] == ["one"]


def test_damaged_store_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with Store.open(tmp_path, "me") as store:
        for number in range(200):
            store.insert_episode(episode(f"{number}"))
    file = tmp_path / "store.db"
    data = file.read_bytes()
    half = len(data) // 2

    def start() -> None:
        with Store.open(tmp_path, "next") as store:
            store.adopt([])
            store.unfinished_episodes()

    for damaged in (b"no database" * 1000, data[:5000], data[:4096] + b"\xff" * half):
        file.write_bytes(damaged)
        with pytest.raises(SettingsError, match=r"it is damaged: move store\.db\* out of the folder"):
            start()


def test_second_episode_of_an_operation_is_refused(tmp_path: Path) -> None:
    with Store.open(tmp_path, "me") as store:
        store.insert_episode(episode("one", operation="op"))
        with pytest.raises(BadRequestError, match="use a new id for each"):
            store.insert_episode(episode("two", operation="op"))
