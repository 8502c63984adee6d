"""Files that are kept for a later grading: complete or absent, bounded, and the owner's only."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from decathlon_mcp.errors import BadRequestError, LimitExceededError
from decathlon_mcp.plugins.regrade.kept_attempts import AttemptFiles
from decathlon_mcp.storage.kept_files import RESERVED_FILE, VERDICT_BYTES, VERDICT_FILE

NAME = "workspace.tar.gz"


@pytest.fixture
def files(tmp_path: Path) -> AttemptFiles:
    folder = tmp_path / "episode"
    folder.mkdir()
    return AttemptFiles(folder)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.write_bytes(bytes(range(256)) * 20_000)
    return source


def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call it in a worker thread of an event loop, as the server does."""
    return anyio.run(partial(anyio.to_thread.run_sync, function, *arguments))


def names(files: AttemptFiles) -> list[str]:
    return sorted(path.name for path in files.folder.iterdir())


def test_a_kept_archive_comes_back_as_it_was(files: AttemptFiles, source: Path, tmp_path: Path) -> None:
    in_thread(files.keep_archive, source, NAME, 1 << 30)
    assert (files.folder / NAME).stat().st_size < source.stat().st_size // 10
    in_thread(files.restore_archive, NAME, tmp_path / "back", 1 << 30)
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


def test_an_archive_over_its_limit_leaves_nothing(files: AttemptFiles, source: Path) -> None:
    with pytest.raises(LimitExceededError, match="over the limit of 1000 bytes"):
        in_thread(files.keep_archive, source, NAME, 1000)
    assert names(files) == []


def test_a_compressed_bomb_is_not_unpacked(files: AttemptFiles, tmp_path: Path) -> None:
    (files.folder / NAME).write_bytes(gzip.compress(bytes(16 << 20)))
    with pytest.raises(LimitExceededError):
        in_thread(files.restore_archive, NAME, tmp_path / "back", 2 << 20)
    assert (tmp_path / "back").stat().st_size <= 2 << 20


@pytest.mark.parametrize("damage", [b"no gzip", gzip.compress(b"x" * 100_000)[:-20]])
def test_a_broken_archive_is_an_error(files: AttemptFiles, tmp_path: Path, damage: bytes) -> None:
    (files.folder / NAME).write_bytes(damage)
    with pytest.raises(BadRequestError, match=r"workspace\.tar\.gz is broken"):
        in_thread(files.restore_archive, NAME, tmp_path / "back", 1 << 30)


@pytest.mark.anyio
async def test_a_cancelled_archive_leaves_nothing(files: AttemptFiles, tmp_path: Path) -> None:
    endless = tmp_path / "endless"
    with endless.open("wb") as file:
        file.truncate(1 << 40)
    with anyio.move_on_after(0.2):
        await anyio.to_thread.run_sync(files.keep_archive, endless, NAME, 1 << 50)
    assert names(files) == []


def test_verdicts_are_numbered_and_never_replaced(files: AttemptFiles) -> None:
    (files.folder / "verdict.json").write_text("the first")
    (files.folder / "verdict-3.json").write_text("somebody's")
    assert [files.add_verdict({"number": number}) for number in range(2)] == [
        "verdict-2.json",
        "verdict-4.json",
    ]
    assert json.loads((files.folder / "verdict-4.json").read_text()) == {"number": 1}
    assert (files.folder / "verdict-3.json").read_text() == "somebody's"
    assert (files.folder / "verdict.json").read_text() == "the first"


def test_room_for_the_verdict_is_reserved_and_given_back(tmp_path: Path) -> None:
    files = AttemptFiles(tmp_path)
    files.reserve_verdict()
    assert (tmp_path / RESERVED_FILE).stat().st_blocks * 512 >= VERDICT_BYTES
    (tmp_path / ".traj_log.json.partial").write_bytes(b"half")
    files.reserve_again()
    assert [file.name for file in tmp_path.iterdir()] == [RESERVED_FILE]
    files.write_verdict({"reward": 1.0})
    files.reserve_again()
    files.write_verdict({"reward": 0.0})
    assert [file.name for file in tmp_path.iterdir()] == [VERDICT_FILE]
    assert files.read(VERDICT_FILE) == {"reward": 0.0}
    files.reserve_verdict()
    files.release_verdict()
    assert not (tmp_path / RESERVED_FILE).exists()
