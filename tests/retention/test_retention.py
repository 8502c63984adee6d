"""Deleting what is kept of episodes that ended long ago."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from decathlon_mcp.plugins import retention
from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.plugins.history.values import EpisodeQuery
from decathlon_mcp.plugins.page.control import delete_run, pin_run
from decathlon_mcp.plugins.retention import delete_old_episodes
from decathlon_mcp.storage.store import EpisodeRow, Store
from tests.history.stored_episodes import LIVE, LOST, add_episode, add_run, episode_row

pytestmark = pytest.mark.anyio

LONG_AGO = time.time() - 100 * 86_400


@pytest.fixture
def store(tmp_path: Path) -> Generator[Store]:
    with Store.open(tmp_path, "me") as store:
        yield store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "episodes"


def insert(store: Store, handle: str, *, ended: bool = True) -> None:
    store.insert_episode(episode_row(handle, server="me", phase="ready", spec={}))
    if ended:
        store.end_episode(handle, "closed")


def add(folder: Path, name: str, store: Store | None, *, ended: bool = True) -> Path:
    own = folder / name
    own.mkdir(parents=True)
    (own / "trajectory.jsonl").write_text("{}\n")
    if store is not None:
        insert(store, name, ended=ended)
    return own


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def age(own: Path) -> None:
    for path in (*own.iterdir(), own):
        os.utime(path, (LONG_AGO, LONG_AGO), follow_symlinks=False)


async def test_ended_episodes_are_deleted_with_their_folders_once_they_are_old(
    store: Store, folder: Path
) -> None:
    ended, live = add(folder, "ended", store), add(folder, "live", store, ended=False)
    assert await delete_old_episodes(store, folder, 1) == 0
    assert await delete_old_episodes(store, folder, -1) == 1
    assert not ended.exists()
    assert live.exists()
    row = store.find_one(EpisodeRow, id="ended")
    assert row is not None
    assert (row.phase, row.spec) == ("ended", {})
    assert await delete_old_episodes(store, folder, -1) == 0


async def test_a_run_keeps_its_numbers_when_its_files_are_deleted(tmp_path: Path) -> None:
    add_run(tmp_path, "r", {"a": [1.0, 0.0, LOST]})
    name = add_episode(tmp_path, "one", labels={"run": "r"}, started_at=2.0)
    history = EpisodeHistory([tmp_path])
    before = history.run("r")
    with Store.open(tmp_path, "me") as store:
        assert await delete_old_episodes(store, tmp_path / "episodes", -1) == 4
        assert history.run("r") == before
    summary = history.episodes(EpisodeQuery(), limit=1).items[0]
    assert (summary.public_id, summary.reward, summary.has_files) == (name, 1.0, False)
    details = history.episode(name)
    assert details is not None
    assert (details.verdict, details.calls) == (None, 0)


async def test_files_of_a_pinned_run_are_kept_also_of_episodes_that_start_later(tmp_path: Path) -> None:
    folder = tmp_path / "episodes"
    add_run(tmp_path, "r", {"a": [1.0]})
    add_episode(tmp_path, "other", labels={"run": "other"})
    with Store.open(tmp_path, "me") as store:
        pin_run(store, "r", pinned=True)
    add_episode(tmp_path, "later", labels={"run": "r"}, started_at=2.0)
    report = EpisodeHistory([tmp_path]).run("r")
    assert report is not None
    assert report.summary.pinned
    with Store.open(tmp_path, "me") as store:
        assert await delete_old_episodes(store, folder, -1) == 1
        pin_run(store, "r", pinned=False, owner="somebody else")
        assert await delete_old_episodes(store, folder, -1) == 0
        pin_run(store, "r", pinned=False)
        assert await delete_old_episodes(store, folder, -1) == 2


async def test_a_run_is_deleted_with_its_rows_and_files_but_not_what_plays(
    store: Store, folder: Path
) -> None:
    for name in ("one", "two"):
        add(folder, name, None)
        add_episode(folder.parent, name, labels={"run": "r"}, token=name)
    add(folder, "live", None)
    live = add_episode(folder.parent, "live", labels={"run": "r"}, reward=LIVE)
    kept = add(folder, "kept", store)
    assert await delete_run(store, folder, "r", owner="one") == 1
    assert names_in(folder) == ["kept", "live", "two"]
    assert await delete_run(store, folder, "r") == 1
    page = EpisodeHistory([folder.parent]).episodes(EpisodeQuery(run="r"))
    assert [summary.public_id for summary in page.items] == [live]
    assert kept.exists()


async def test_a_round_is_bounded(store: Store, folder: Path) -> None:
    for number in range(5):
        add(folder, f"{number}", store)
    assert [await delete_old_episodes(store, folder, -1, limit=2) for _ in range(4)] == [2, 2, 1, 0]


@pytest.mark.parametrize("known", [True, False])
async def test_links_are_not_followed(known: bool, store: Store, folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    own = add(folder, "one", store if known else None)
    (own / "link").symlink_to(outside)
    age(own)
    add(folder, "two", store)
    (folder / "two" / "trajectory.jsonl").unlink()
    (folder / "two").rmdir()
    (folder / "two").symlink_to(outside)
    assert await delete_old_episodes(store, folder, -1 if known else 1) == (2 if known else 1)
    assert not own.exists()
    assert (outside / "precious").exists()


async def test_folders_that_the_store_does_not_know_are_as_old_as_their_newest_file(
    store: Store, folder: Path
) -> None:
    old, new, still_open = (add(folder, name, None) for name in ("old", "new", "open"))
    (still_open / ".verdict.reserved").touch()
    for own in (old, new, still_open):
        age(own)
    (new / "trajectory.jsonl").touch()
    assert await delete_old_episodes(store, folder, 99) == 1
    assert names_in(folder) == ["new", "open"]
    assert await delete_old_episodes(store, folder, 90) == 1  # no episode takes a week
    assert names_in(folder) == ["new"]


async def test_a_handle_that_is_no_name_deletes_nothing(store: Store, folder: Path, tmp_path: Path) -> None:
    add(folder, "one", store)
    for handle in ("..", ".", "", "../outside", "one/two"):
        insert(store, handle)
    (tmp_path / "outside").mkdir()
    assert await delete_old_episodes(store, folder, -1) == 1
    assert {"outside", "episodes"} <= set(names_in(tmp_path))


def test_tools_with_which_an_episode_begins_meanwhile_are_kept(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the trajectories of thousands of episodes takes seconds."""
    (folder / "begins").mkdir(parents=True)
    (tools := tmp_path / "tools").mkdir()
    (tools / "digest.json").write_text("[]")
    os.utime(tools / "digest.json", (LONG_AGO, LONG_AGO))

    def read(folder: Path) -> list[str]:
        os.utime(tools / "digest.json")
        return []

    monkeypatch.setattr(retention, "_ready_digests", read)
    assert retention.remove_unnamed_tools(tmp_path, time.time() - 60) == 0
    assert (tools / "digest.json").exists()
