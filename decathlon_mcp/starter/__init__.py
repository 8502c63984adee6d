"""The bundled suite: small real tasks in Toolathlon's layout that need no network, account or container.

`suite/` is the checkout. `oracles/` holds a script per task that solves it with the task's MCP tools; it is
outside the checkout, so that no solution is ever copied into a sandbox.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from decathlon_mcp.errors import UnknownTaskError
from decathlon_mcp.foreign_names import quoted

if TYPE_CHECKING:
    from decathlon_client.script import Step

__all__ = ["oracle", "oracle_ids", "suite_path"]

_HERE = Path(__file__).resolve().parent


def suite_path() -> Path:
    """Return the path of the bundled checkout."""
    return _HERE / "suite"


def oracle_ids() -> list[str]:
    """Return the ids of the tasks that have a script, sorted."""
    return sorted(path.stem for path in (_HERE / "oracles").glob("*.jsonl"))


def oracle(task_id: str) -> list[Step]:
    """Return the steps that solve a task, the claim last. Raises UnknownTaskError if there is no script."""
    # Imported here because it takes a second.
    from decathlon_client.script import read_steps

    known = oracle_ids()
    if task_id not in known:
        raise UnknownTaskError(f"The starter suite has no task {quoted(task_id)}", near=known)
    return read_steps((_HERE / "oracles" / f"{task_id}.jsonl").read_text("utf-8"))
