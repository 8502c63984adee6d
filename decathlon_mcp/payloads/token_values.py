"""Computes token values in a sandbox: runs the suite's token files and the task's own.

    python -c SOURCE TASK_FOLDER NAME...

Runs in the suite's root. NAMEs are `config.x` or `token.x`. Writes {NAME: VALUE} as JSON to the descriptor
that DECATHLON_CHANNEL names; names without a value are left out. Standard library only, any Python from 3.8.

Which types count, and that the task's own values override the suite's, follows Toolathlon's
`utils/mcp/tool_servers.py` (`_get_template_variables`).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any, cast

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

TASK_FILE = "token_key_session.py"


def main() -> None:
    sys.path.insert(0, str(Path.cwd()))
    task, names = sys.argv[1], set(sys.argv[2:])
    values: dict[str, str] = {}
    for prefix, mapping in mappings(task, names):
        for key, value in entries(mapping):
            name = f"{prefix}.{key}"
            if name in names and isinstance(value, (str, int, float, bool)):
                values[name] = str(value)
    with os.fdopen(int(os.environ["DECATHLON_CHANNEL"]), "w", encoding="utf-8") as channel:
        json.dump(values, channel)


def mappings(task: str, names: set[str]) -> Iterator[tuple[str, Any]]:
    """The mappings of the token files that define any of these names, the task's own last."""
    if any(name.startswith("config.") for name in names):
        yield "config", importlib.import_module("configs.global_configs").global_configs
    if any(name.startswith("token.") for name in names):
        yield "token", importlib.import_module("configs.token_key_session").all_token_key_session
        path = Path(task, TASK_FILE)
        if path.exists():
            yield "token", load(path).all_token_key_session


def entries(value: Any) -> list[tuple[str, Any]]:
    """The entries of a dict (addict's `Dict` is one); none for anything else."""
    return list(cast("dict[str, Any]", value).items()) if isinstance(value, dict) else []


def load(path: Path) -> Any:
    """Run a token file as a module of its own, since the suite's has the same name."""
    spec = importlib.util.spec_from_file_location("token_key_session", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
