"""The cache of small files: what is damaged, too much or too long."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from decathlon_mcp.storage import file_cache
from decathlon_mcp.storage.file_cache import UNFINISHED, FileCache


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_content_is_read_back_until_it_is_replaced(tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "cache")
    assert cache.read("key") is None
    for content in (b"one\ntwo\n", b""):
        cache.write("key", content)
        assert cache.read("key") == content
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "cache" / "key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", [b"", b"no digest", b"0" * 64 + b"\ncontent"])
def test_damaged_file_is_deleted(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "key").write_bytes(damage)
    assert FileCache(tmp_path).read("key") is None
    assert names(tmp_path) == []


def test_file_is_deleted_only_with_the_content_that_is_meant(tmp_path: Path) -> None:
    cache = FileCache(tmp_path)
    cache.write("key", b"of another server")
    assert not cache.delete("key", b"mine")
    assert cache.delete("key", b"of another server")
    assert not cache.delete("key", b"of another server")


@pytest.mark.parametrize("limits", [{"max_files": 2}, {"max_bytes": 2 * (65 + 10)}])
def test_files_whose_last_use_is_longest_ago_are_deleted(tmp_path: Path, limits: dict[str, int]) -> None:
    cache = FileCache(tmp_path, **limits)
    for number, key in enumerate("abc"):
        cache.write(key, b"x" * 10)
        os.utime(tmp_path / key, (number, number))
    assert names(tmp_path) == ["b", "c"]
    cache.read("b")
    cache.write("d", b"x" * 10)
    assert names(tmp_path) == ["b", "d"]


def test_link_counts_as_itself_and_is_deleted_in_its_turn(tmp_path: Path) -> None:
    (tmp_path / "huge").write_bytes(bytes(1000))
    folder = tmp_path / "cache"
    cache = FileCache(folder, max_files=3, max_bytes=500)
    cache.write("a", b"")
    for time, (name, target) in enumerate((("dangling", "nowhere"), ("link", "huge"))):
        (folder / name).symlink_to(tmp_path / target)
        os.utime(folder / name, (time, time), follow_symlinks=False)
    cache.write("b", b"")
    assert names(folder) == ["a", "b", "link"]
    cache.write("c", b"")
    assert names(folder) == ["a", "b", "c"]
    assert (tmp_path / "huge").exists()


def test_file_that_is_too_long_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = FileCache(tmp_path)
    monkeypatch.setattr(file_cache, "MAX_FILE_BYTES", 100)
    cache.write("key", b"x" * 100)
    assert names(tmp_path) == []


def test_unfinished_file_of_a_dead_server_is_deleted(tmp_path: Path) -> None:
    for name, time in ((f"{UNFINISHED}old", 1), (f"{UNFINISHED}new", None)):
        (tmp_path / name).write_bytes(b"half")
        if time is not None:
            os.utime(tmp_path / name, (time, time))
    FileCache(tmp_path).write("key", b"")
    assert names(tmp_path) == [f"{UNFINISHED}new", "key"]


def test_folder_that_cannot_be_written_only_costs_the_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    cache = FileCache(tmp_path / "file")
    cache.write("key", b"")
    assert cache.read("key") is None
    assert "could not be written" in caplog.text
