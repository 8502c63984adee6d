"""Trajectories as a test looks at them."""

from __future__ import annotations

import json
from pathlib import Path

from decathlon_mcp.storage.trajectory import Trajectory
from decathlon_mcp.types import JsonObject


def events(trajectory: Trajectory | Path, event: str | None = None) -> list[JsonObject]:
    """The lines, of one kind if it is given, in order. A path is that of the folder."""
    folder = trajectory.folder if isinstance(trajectory, Trajectory) else trajectory
    lines = (json.loads(line) for line in (folder / "trajectory.jsonl").read_bytes().splitlines())
    return [line for line in lines if event in (None, line["event"])]
