"""Which tasks are for training and which for testing, and which must never run side by side."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, TypeAdapter

from decathlon_mcp.suites.documents import check, read_json, read_yaml

log = logging.getLogger("decathlon.suites")

TRAIN_PERCENT = 80
CONFLICTS = "task_conflict.json"
PACKAGED = Path(__file__).parent / "profiles" / "splits"


class _Conflicts(BaseModel):
    conflict_groups: tuple[Annotated[tuple[str, ...], Field(min_length=1)], ...] = ()


_CONFLICTS = TypeAdapter(_Conflicts)


@cache
def packaged_splits(profile: str) -> Mapping[str, str]:
    """The split of each task that this package lists for a profile (`docs/splits.py` says how)."""
    path = PACKAGED / f"{profile}.yaml"
    lists = read_yaml(path) if path.is_file() else {}
    return {task_id: split for split, listed in lists.items() for task_id in listed}


def splits_of(task_id: str, lists: Mapping[str, Sequence[str]], profile: str = "") -> tuple[str, ...]:
    """The splits that list a task: those of the checkout's own lists, else of the package's for its profile.

    What neither has is in `train` or `test` by a hash of its id, 80 to 20. The folder below `tasks/` says
    nothing of it: upstream keeps all tasks in one.
    """
    if lists:
        return tuple(name for name, listed in lists.items() if any(fnmatchcase(task_id, p) for p in listed))
    if (split := packaged_splits(profile).get(task_id)) is not None:
        return (split,)
    number = int.from_bytes(hashlib.sha256(task_id.encode()).digest()[:8], "big") % 100
    return ("train",) if number < TRAIN_PERCENT else ("test",)


def read_conflicts(tasks: Path) -> list[tuple[str, ...]]:
    """The groups of every `tasks/<split>/task_conflict.json`. Raises SuiteError: file, line, field."""
    return [
        group
        for path in sorted(tasks.glob(f"*/{CONFLICTS}"))
        for group in check(path, _CONFLICTS, read_json(path)).conflict_groups
    ]


def warn_of_strangers(ids: Collection[str], field: str, words: Iterable[str]) -> None:
    """Say which words of a list fit no task: most likely a slip of the pen."""
    for word in words:
        if not any(fnmatchcase(name, word) for name in ids):
            log.warning(
                "suite.yaml names a task that is not there", extra={"fields": {"field": field, "task": word}}
            )
