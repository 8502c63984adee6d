"""Saved states of episodes: what is kept, and what makes room."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from decathlon_mcp.errors import LimitExceededError
from decathlon_mcp.plugins.branches.states import (
    SavedState,
    SavedStates,
    nearest_state,
    remove_states_of_ended,
)
from decathlon_mcp.storage.kept_files import RESERVED_FILE


def save(
    states: SavedStates,
    episode: Path,
    at: int,
    size_bytes: int = 1,
    sealed: Path | None = None,
    token: str | None = None,
) -> Path:
    episode.mkdir(exist_ok=True)
    folder = states.prepare(episode, at)
    folder.mkdir()
    state = SavedState(
        folder=folder,
        at=at,
        provider="host",
        wire_version=1,
        generation=256,
        size_bytes=size_bytes,
        sealed=sealed is not None,
        token=token,
        progress={"dense": True},
        tools={"servers": {}, "local": {}},
    )
    states.add(state, sealed)
    assert SavedState.read(folder) == state
    return folder


def kept(*episodes: Path) -> list[list[int]]:
    """The calls of the states of each episode that can be used."""
    return [sorted(int(file.stem) for file in (episode / "snapshots").glob("*.json")) for episode in episodes]


def test_the_newest_states_of_an_episode_are_kept(tmp_path: Path) -> None:
    states = SavedStates(tmp_path, max_bytes=100, kept=2)
    for at in (1, 5, 3):
        save(states, tmp_path / "a", at)
    assert kept(tmp_path / "a") == [[3, 5]]
    assert not (tmp_path / "a" / "snapshots" / "1").exists()
    nearest = [nearest_state(tmp_path / "a", at) for at in (2, 3, 4, 9)]
    assert [state and state.at for state in nearest] == [None, 3, 3, 5]
    assert nearest_state(tmp_path / "b", 9) is None


def test_the_oldest_states_of_all_make_room_also_after_a_restart(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    states = SavedStates(tmp_path, max_bytes=100, kept=9)
    save(states, a, 1, 40)
    save(states, b, 1, 40)
    save(states, a, 2, 40)
    assert kept(a, b) == [[2], [1]]
    again = SavedStates(tmp_path, max_bytes=100, kept=9)
    save(again, b, 2, 30)
    assert kept(a, b) == [[2], [2]]
    with pytest.raises(LimitExceededError, match="--snapshot-mib"):
        save(again, a, 3, 101)
    assert not (a / "snapshots" / "3").exists()
    assert kept(a, b) == [[2], [2]]
    assert not SavedStates(tmp_path, max_bytes=0, kept=1).are_saved


def test_states_of_one_token_do_not_push_out_those_of_another_within_its_share(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    states = SavedStates(tmp_path, max_bytes=100, kept=9)
    save(states, small, 1, 20, token="bob")
    save(states, small, 2, 30, token="bob")
    for at in range(1, 8):
        states = SavedStates(tmp_path, max_bytes=100, kept=9)  # as after a restart
        save(states, large, at, 20, token="alice")
    assert kept(small, large) == [[1, 2], [6, 7]]
    # Without states of others, all space is one token's.
    shutil.rmtree(small)
    for at in range(8, 12):
        save(states, large, at, 20, token="alice")
    assert kept(large) == [[7, 8, 9, 10, 11]]
    # And it gives back what is another's share.
    save(states, small, 3, 50, token="bob")
    assert kept(small, large) == [[3], [10, 11]]


def test_a_state_that_others_shares_leave_no_space_for_is_not_kept(tmp_path: Path) -> None:
    states = SavedStates(tmp_path, max_bytes=100, kept=9)
    save(states, tmp_path / "small", 1, 45, token="bob")
    with pytest.raises(LimitExceededError, match="the states of other tokens leave less"):
        save(states, tmp_path / "large", 1, 60, token="alice")
    assert kept(tmp_path / "small", tmp_path / "large") == [[1], []]
    assert not (tmp_path / "large/snapshots/1").exists()


def test_an_unfinished_state_is_none_and_is_removed(tmp_path: Path) -> None:
    states = SavedStates(tmp_path, max_bytes=100, kept=9)
    episode = tmp_path / "a"
    (tmp_path / "sealed").write_text("sealed")
    folder = save(states, episode, 4, sealed=tmp_path / "sealed")
    assert (episode / "snapshots").stat().st_mode & 0o077 == 0
    unfinished = episode / "snapshots" / "7"
    unfinished.mkdir()
    state = nearest_state(episode, 9)
    assert state is not None
    assert state.folder == folder
    assert state.task_folder_archive.read_text() == "sealed"
    states.prepare(episode, 8)
    assert not unfinished.exists()
    (episode / "snapshots" / "4.json").write_text('{"at": "many"}')
    assert nearest_state(episode, 9) is None


def test_states_of_episodes_that_are_over_are_removed(tmp_path: Path) -> None:
    over, live = tmp_path / "over", tmp_path / "live"
    states = SavedStates(tmp_path, max_bytes=100, kept=9)
    for episode in (over, live):
        save(states, episode, 1)
        save(states, episode, 2)
    (live / RESERVED_FILE).touch()
    assert remove_states_of_ended(tmp_path, dry_run=True) == 2
    assert kept(over, live) == [[1, 2], [1, 2]]
    assert remove_states_of_ended(tmp_path, dry_run=False) == 2
    assert kept(over, live) == [[], [1, 2]]
    assert not (over / "snapshots").exists()
    # The server goes on with what is left.
    save(states, live, 3, 98)
    assert kept(live) == [[1, 2, 3]]
