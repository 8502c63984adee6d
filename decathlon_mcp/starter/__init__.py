"""The bundled suite: small real tasks in Toolathlon's layout that need no network, no account, no container.

`suite/` is the checkout, to be read like any other. `oracles/` lies outside it, so that nothing that is
handed to a sandbox holds a solution: a scripted player for each task, through its MCP tools only.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from decathlon_mcp.errors import UnknownTaskError

if TYPE_CHECKING:
    from decathlon_client.script import Step

__all__ = ["oracle", "oracle_ids", "suite_path"]

_HERE = Path(__file__).resolve().parent


def suite_path() -> Path:
    """The bundled checkout."""
    return _HERE / "suite"


def oracle_ids() -> list[str]:
    """The tasks that have a scripted player, sorted."""
    return sorted(path.stem for path in (_HERE / "oracles").glob("*.jsonl"))


def oracle(task_id: str) -> list[Step]:
    """The calls that solve a task, the claim last. Raises UnknownTaskError when there are none."""
    # Only here: it takes a second to import.
    from decathlon_client.script import read_steps

    known = oracle_ids()
    if task_id not in known:
        raise UnknownTaskError(f"The starter suite has no task {task_id!r}", near=known)
    return read_steps((_HERE / "oracles" / f"{task_id}.jsonl").read_text("utf-8"))
