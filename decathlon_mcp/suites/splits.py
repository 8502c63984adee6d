"""Splits: which tasks are for training and which for testing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from decathlon_mcp.suites.documents import read_yaml

TRAIN_PERCENT = 80
PACKAGED = Path(__file__).parent / "profiles" / "splits"


@cache
def packaged_splits(profile: str) -> Mapping[str, str]:
    """The split of each task that this package lists for a profile. `docs/splits.py` makes the lists."""
    path = PACKAGED / f"{profile}.yaml"
    lists = read_yaml(path) if path.is_file() else {}
    return {task_id: split for split, tasks in lists.items() for task_id in tasks}


def splits_of(task_id: str, lists: Mapping[str, Sequence[str]], profile: str = "") -> tuple[str, ...]:
    """The splits of a task: those of the suite's own lists, else of the package's list for its profile.

    A task that neither lists is in `train` or `test`, by a hash of its id, 80 to 20.
    """
    # The folder below `tasks/` is no split in this sense: upstream keeps all its tasks in `finalpool`.
    if lists:
        return tuple(
            name
            for name, patterns in lists.items()
            if any(fnmatchcase(task_id, pattern) for pattern in patterns)
        )
    if (split := packaged_splits(profile).get(task_id)) is not None:
        return (split,)
    number = int.from_bytes(hashlib.sha256(task_id.encode()).digest()[:8], "big") % 100
    return ("train",) if number < TRAIN_PERCENT else ("test",)
