"""The lock by which a server recognises what dead servers left behind."""

from __future__ import annotations

from pathlib import Path

from decathlon_mcp.storage.instance import forget, instance_lock


def test_running_server_is_not_listed_as_dead(tmp_path: Path) -> None:
    with instance_lock(tmp_path) as (first, _), instance_lock(tmp_path) as (second, dead):
        assert dead == []
        assert first != second


def test_lock_file_without_a_lock_belongs_to_a_dead_server(tmp_path: Path) -> None:
    with instance_lock(tmp_path):
        pass
    assert list((tmp_path / "servers").iterdir()) == []
    (tmp_path / "servers" / "abc").touch()
    with instance_lock(tmp_path) as (_, dead):
        assert dead == ["abc"]


def test_dead_server_is_listed_until_it_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / "servers").mkdir()
    (tmp_path / "servers" / "abc").touch()
    with instance_lock(tmp_path) as (_, dead):
        assert dead == ["abc"]
    with instance_lock(tmp_path) as (_, dead):
        assert dead == ["abc"]
        forget(tmp_path, "abc")
    with instance_lock(tmp_path) as (_, dead):
        assert dead == []
