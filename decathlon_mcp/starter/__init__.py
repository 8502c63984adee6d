"""The bundled suite: small real tasks in Toolathlon's layout that need no network, account or container.

`suite/` is the checkout. `oracles/` holds a script per task that solves it with the task's MCP tools; it is
outside the checkout, so that no solution is ever copied into a sandbox. `template/` is the suite that
`decathlon-mcp init` creates, without the modules that it has from the bundled suite.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from decathlon_mcp.errors import UnknownTaskError
from decathlon_mcp.validation import quoted

if TYPE_CHECKING:
    from decathlon_client.script import Step

__all__ = ["TEMPLATE_TASK", "copy_template", "oracle", "oracle_ids", "suite_path"]

_HERE = Path(__file__).resolve().parent

TEMPLATE_TASK = "restock-shop"
"""The task of the suite that `copy_template` creates."""
_SHARED = ("utils/evaluation.py", "utils/submission.py")
"""Modules of the bundled suite that the template's evaluator uses."""


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


def copy_template(folder: Path) -> list[Path]:
    """Create a suite with one task in a folder that is empty or does not exist; returns its files.

    Raises OSError.
    """
    sources = {file.relative_to(_HERE / "template"): file for file in (_HERE / "template").rglob("*")}
    sources |= {Path(name): _HERE / "suite" / name for name in _SHARED}
    files = {name: file for name, file in sources.items() if file.is_file() and file.suffix != ".pyc"}
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in sorted(files.items()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        # Without the mode: an installed package may be read-only.
        (folder / name).write_bytes(file.read_bytes())
    return [folder / name for name in sorted(files)]
