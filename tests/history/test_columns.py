"""The columns of an episode's row that lists read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from decathlon_mcp.plugins.history.columns import Outcome
from decathlon_mcp.storage import store as store_module
from decathlon_mcp.storage.store import Store
from tests.storage.test_store import episode


def cells(store: Store, columns: str) -> list[tuple[object, ...]]:
    return store.query(f"SELECT {columns} FROM episodes ORDER BY id")


def test_columns_that_lists_read_follow_the_labels_the_verdict_and_the_end(tmp_path: Path) -> None:
    with Store.open(tmp_path, "me") as store:
        store.insert_episode(replace(episode(), labels={"run": "a", "step": "7"}))
        store.insert_episode(replace(episode("two"), labels={"replay_of": "0123456789abcdef", "step": "x"}))
        store.update_episode("one", phase="claimed", progress={}, calls=3)
        verdict = {"status": "scored", "success": False, "reward": 0.5, "metrics": {"turns": 4.0}}
        store.update_episode("one", verdict=verdict)
        store.end_episode("one", "scored")
        store.end_episode("two", "its set-up failed", cause="no such image" + "x" * 1_000, calls=0)
        assert cells(store, "run, step, is_derived, pinned, has_files") == [
            ("a", 7.0, 0, 0, 1),
            (None, None, 1, 0, 1),
        ]
        assert cells(store, "calls, turns, status, success, reward, outcome") == [
            (3, 4, "scored", 0, 0.5, Outcome.FAILED),
            (0, None, None, None, None, Outcome.LOST),
        ]
        assert cells(store, "length(cause)") == [(None,), (store_module.MAX_CAUSE_CHARACTERS,)]


def test_a_branch_names_its_origin_and_how_it_came_there_once_it_is_ready(tmp_path: Path) -> None:
    branch = {"branch": {"episode": "0123456789abcdef", "at": 3}}
    ready = {"ready_at": "2026-01-01T00:00:00Z"}

    def with_branch(**noted: Any) -> dict[str, Any]:
        return {"facts": {"branch": noted}}

    with Store.open(tmp_path, "me") as store:
        store.insert_episode(replace(episode(), spec=branch))
        for progress, expected in (
            (with_branch(differences=1), (None, None)),
            ({**with_branch(differences=2), **ready}, (2, 0)),
            (ready, (0, 0)),
            ({**with_branch(exact=True), **ready}, (0, 1)),
        ):
            store.update_episode("one", phase="ready", progress=progress)
            assert cells(store, "differences, exact") == [expected]
        store.insert_episode(
            replace(episode("two"), spec=branch, progress={**with_branch(differences=1), **ready})
        )
        assert cells(store, "branch_of, branch_at, differences, exact, is_derived") == [
            ("0123456789abcdef", 3, 0, 1, 1),
            ("0123456789abcdef", 3, 1, 0, 1),
        ]
