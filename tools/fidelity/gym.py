"""Tasks of toolathlon_gym whose evaluator and preprocess need no database: no public fork has its dump.

Their servers that need it are left out of the copy that is played. An attempt writes the files of the ground
truth, or the same with a mistake, with the task's tool for Python; evaluators may expect more files.
"""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Mapping
from pathlib import Path

from tests.probe.clients import Player
from tools.fidelity.calls import run_python
from tools.fidelity.files import TASKS, TRUTH, archive, with_mistake

SERVERS = ("filesystem",)
"""Those of the image."""
_NEEDS_MORE = re.compile(r"psycopg|asyncpg|PGHOST|\b5432\b|\brequests\b|\burllib\b")


def playable(checkout: Path) -> list[str]:
    """Names of the tasks whose scripts use neither the database nor the web."""
    return [
        config.parent.name
        for config in sorted((checkout / TASKS).glob("*/task_config.json"))
        if (config.parent / TRUTH).exists()
        and not any(_NEEDS_MORE.search(text) for text in _scripts(config.parent))
    ]


def _scripts(task: Path) -> list[str]:
    folders = ("evaluation", "preprocess")
    return [path.read_text("utf-8", "replace") for name in folders for path in (task / name).rglob("*.py")]


def draw(checkout: Path, count: int, seed: int) -> list[str]:
    """As many of these tasks, chosen at random by the seed; all of them if there are not more."""
    names = playable(checkout)
    return random.Random(seed).sample(names, min(count, len(names)))


def leave_out_the_database(copy: Path) -> None:
    """Let the playable tasks of a copy need neither the database nor servers that use it."""
    names = playable(copy)
    for name in names:
        config = copy / TASKS / name / "task_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "needed_mcp_servers": SERVERS}))
    (copy / "suite.yaml").write_text(json.dumps({"tasks": {name: {"services": []} for name in names}}))


async def write_truth(player: Player, task: Path, attempt: str) -> None:
    """Write the files of the ground truth, each with a mistake if "wrong"."""
    truth = task / TRUTH
    files: Mapping[str, bytes | None] = {
        str(path.relative_to(truth)): path.read_bytes() for path in sorted(truth.rglob("*")) if path.is_file()
    }
    packed = base64.b64encode(archive(with_mistake(files) if attempt == "wrong" else files)).decode()
    await run_python(
        player,
        f"import base64, io, tarfile\n"
        f"packed = io.BytesIO(base64.b64decode('{packed}'))\n"
        f"tarfile.open(fileobj=packed).extractall('.', filter='data')\n",
        tool="local__python_execute",
    )
