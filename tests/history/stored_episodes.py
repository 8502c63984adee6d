"""Writes episodes into the store of a state folder, as a server does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from decathlon_mcp.storage.store import EpisodeRow, Store

LOST, LIVE = "lost", "live"


def episode_row(name: str = "one", **fields: Any) -> EpisodeRow:
    """The row of an episode that waits; `fields` are what differs."""
    values: dict[str, Any] = {
        "id": name,
        "agent_id": f"{name}-agent",
        "server": "",
        "suite": "s",
        "task": "t",
        "phase": "queued",
        "started_at": 1.0,
        "spec": {"launch_time": "2026-01-01T00:00:00+00:00"},
        "progress": {},
    }
    values.update(fields)
    return EpisodeRow(**values)


def add_episode(
    state: Path,
    name: str,
    *,
    reward: float | str = 1.0,
    success: bool | None = None,
    task: str = "task",
    suite: str = "s",
    started_at: float = 1.0,
    token: str | None = None,
    labels: Mapping[str, str] | None = None,
    branch_of: str | None = None,
    at: int = 1,
    calls: int = 2,
) -> str:
    """Write an episode as a server does; its public id. `reward`: LOST and LIVE have none."""
    with Store.open(state, "server") as store:
        row = episode_row(
            name, suite=suite, task=task, started_at=started_at, token=token, labels=labels or {}
        )
        if branch_of:
            row = replace(row, spec={**row.spec, "branch": {"episode": branch_of, "at": at}})
        store.insert_episode(row)
        if reward == LIVE:
            return row.public_id
        verdict: dict[str, Any] = {"status": "evaluator_error", "metrics": {}}
        if not isinstance(reward, str):
            succeeded = reward == 1.0 if success is None else success
            verdict = {"status": "scored", "success": succeeded, "reward": reward, "metrics": {"turns": 3.0}}
        store.update_episode(name, verdict=verdict)
        ending = "its evaluation gave no verdict" if reward == LOST else "scored"
        store.end_episode(name, ending, calls=calls)
        return row.public_id


def add_run(state: Path, run: str, rewards: Mapping[str, list[float | str]]) -> None:
    for task, results in rewards.items():
        for number, reward in enumerate(results):
            add_episode(state, f"{run}-{task}-{number}", reward=reward, task=task, labels={"run": run})
