"""The columns of an episode's row that only lists and the numbers of runs read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from decathlon_mcp.types import as_object

ALONG_LABEL = "along"
"""Label of a branch that only shows what an attempt was worth after a call: the number of the call."""
REPLAY_LABEL = "replay_of"
"""Label of an episode that plays the calls of another again."""


class Outcome(IntEnum):
    """What came of an attempt, in the order in which people look for failures.

    It is live until it has ended or has a verdict. A lost episode has no reward.
    """

    LOST = 0
    FAILED = 1
    LIVE = 2
    SUCCEEDED = 3


def columns_of(members: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that are made of these members of a row."""
    columns: dict[str, Any] = {}
    if "spec" in members:
        branch = as_object(members["spec"].get("branch")) or {}
        columns |= {"branch_of": branch.get("episode"), "branch_at": branch.get("at")}
        columns["step"] = _number(members["labels"].get("step"))
        columns["is_derived"] = REPLAY_LABEL in members["labels"] or bool(branch)
    # What a branch differs in is unknown until the set-up, which compares, is done.
    if "ready_at" in (progress := as_object(members.get("progress")) or {}):
        noted = as_object((as_object(progress.get("facts")) or {}).get("branch")) or {}
        columns |= {"differences": noted.get("differences", 0), "exact": noted.get("exact", False)}
    if (verdict := members.get("verdict")) is not None:
        columns |= {name: verdict.get(name) for name in ("status", "success", "reward")}
        columns["turns"] = (as_object(verdict.get("metrics")) or {}).get("turns")
        is_lost = verdict.get("reward") is None
        columns["outcome"] = Outcome.LOST if is_lost else Outcome.FAILED
        if verdict.get("success"):
            columns["outcome"] = Outcome.SUCCEEDED
    return columns


def _number(text: str | None) -> float | None:
    """The finite number that a text is; None if it is none."""
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None
