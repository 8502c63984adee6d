"""What is no file in the place of a state folder's file is refused, and nothing waits for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from decathlon_mcp.errors import BadRequestError, SettingsError
from decathlon_mcp.plugins.page.access import PAGE_KEY_FILE, load_or_create_page_key
from decathlon_mcp.plugins.regrade.kept_attempts import AttemptFiles
from decathlon_mcp.storage.disk import NotRegularError
from decathlon_mcp.storage.kept_tools import CACHE_FOLDER, CachedLists
from decathlon_mcp.storage.trajectory import TRAJECTORY_FILE, Trajectory

pytestmark = pytest.mark.timeout(20)


def fifo(file: Path) -> None:
    os.mkfifo(file)


def link(file: Path) -> None:
    target = file.with_name("elsewhere")
    target.write_bytes(b'{"event":"end"}\n')
    file.symlink_to(target)


@pytest.mark.parametrize("place", [fifo, link])
@pytest.mark.parametrize("read", [Trajectory.update, Trajectory.reopen])
def test_what_is_no_trajectory_is_refused_at_once(
    place: Callable[[Path], None], read: Callable[[Trajectory], object], tmp_path: Path
) -> None:
    place(tmp_path / TRAJECTORY_FILE)
    with pytest.raises(NotRegularError, match="not a regular file"):
        read(Trajectory(tmp_path))


def test_other_files_that_are_none_are_refused_at_once(tmp_path: Path) -> None:
    kept, cache = AttemptFiles(tmp_path), CachedLists(tmp_path)
    fifo(tmp_path / "kept")
    with pytest.raises(BadRequestError, match="not a regular file"):
        kept.read("kept")
    with pytest.raises(NotRegularError):
        kept.restore_archive("kept", tmp_path / "restored", 1000)
    assert not (tmp_path / "restored").exists()
    (tmp_path / CACHE_FOLDER).mkdir()
    fifo(tmp_path / CACHE_FOLDER / "kept")
    assert cache.read("kept") is None
    fifo(tmp_path / PAGE_KEY_FILE)
    with pytest.raises(SettingsError, match="not a regular file"):
        load_or_create_page_key(tmp_path)


def test_a_key_may_be_a_link(tmp_path: Path) -> None:
    key = tmp_path / "mounted"
    key.write_text("0f" * 32)
    key.chmod(0o600)
    (tmp_path / PAGE_KEY_FILE).symlink_to(key)
    assert load_or_create_page_key(tmp_path) == "0f" * 32
