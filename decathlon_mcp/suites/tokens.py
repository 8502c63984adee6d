"""What a checkout's token files hold, read without running them.

`configs/global_configs.py` and `token_key_session.py` are Python: `all_token_key_session = Dict(key="...")`.
Their real values are computed in the sandbox (`VALUES_SCRIPT`), where the suite's own Python is and where
preprocess may have written what they read. Here it only matters which of them nobody has filled in.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from pathlib import Path

from decathlon_mcp.suites.profile import SuiteProfile

SOURCES = {
    "config": ("configs/global_configs.py", "global_configs"),
    "token": ("configs/token_key_session.py", "all_token_key_session"),
}
TASK_FILE = "token_key_session.py"

CHANNEL_VARIABLE = "DECATHLON_CHANNEL"
"""The wire's CHANNEL_VARIABLE; only the link shares the driver's words, and a test holds the two together."""

VALUES_SCRIPT = f"""\
import importlib.util, json, os, sys
sys.path.insert(0, os.getcwd())
task, wanted = sys.argv[1], set(sys.argv[2:])
values = {{}}
def take(prefix, holder):
    for key, value in holder.items() if isinstance(holder, dict) else ():
        if f"{{prefix}}.{{key}}" in wanted and isinstance(value, (str, int, float, bool)):
            values[f"{{prefix}}.{{key}}"] = str(value)
if any(name.startswith("config.") for name in wanted):
    from configs.global_configs import global_configs
    take("config", global_configs)
if any(name.startswith("token.") for name in wanted):
    from configs.token_key_session import all_token_key_session
    take("token", all_token_key_session)
    path = os.path.join(task, "{TASK_FILE}")
    if os.path.exists(path):
        spec = importlib.util.spec_from_file_location("token_key_session", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        take("token", module.all_token_key_session)
with os.fdopen(int(os.environ["{CHANNEL_VARIABLE}"]), "w", encoding="utf-8") as channel:
    json.dump(values, channel)
"""
"""Arguments: the task's folder, then the names wanted. Which types count, and that the task's own values
outweigh the suite's, is as in Toolathlon's `utils/mcp/tool_servers.py` (`_get_template_variables`)."""

Reading = Mapping[str, str | None]
"""Names with their values; None where the value is computed."""


def read_tokens(path: Path, name: str) -> Reading:
    """What `name = Dict(key=value, ...)` (or a `{...}`) of a Python file gives, but for keys that are None.

    Empty where there is no such file, or where it is not of that form.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    reading: dict[str, str | None] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == name for target in statement.targets
        ):
            reading.update(_entries(statement.value))
    return reading


def read_checkout(checkout: Path, profile: SuiteProfile) -> Reading:
    """The suite-wide names, `config.x` and `token.x`, from the files or from what stands in for them."""
    reading: dict[str, str | None] = {}
    for prefix, (file, name) in SOURCES.items():
        path = checkout / file
        if not path.exists():
            path = checkout / dict(profile.stand_ins).get(file, file)
        reading.update({f"{prefix}.{key}": value for key, value in read_tokens(path, name).items()})
    return reading


def read_task(folder: Path) -> Reading:
    """The names that a task's own token file gives; they outweigh the suite's."""
    return {
        f"token.{key}": value for key, value in read_tokens(folder / TASK_FILE, SOURCES["token"][1]).items()
    }


def filled(name: str, reading: Reading, placeholders: Collection[str]) -> bool:
    """Has somebody given this name a value, as far as can be told without running anything?"""
    return name in reading and reading[name] not in placeholders


def _entries(value: ast.expr) -> dict[str, str | None]:
    pairs: list[tuple[str, ast.expr]] = []
    if isinstance(value, ast.Call):
        pairs = [(keyword.arg, keyword.value) for keyword in value.keywords if keyword.arg]
    elif isinstance(value, ast.Dict):
        pairs = [
            (key.value, entry)
            for key, entry in zip(value.keys, value.values, strict=True)
            if isinstance(key, ast.Constant) and isinstance(key.value, str)
        ]
    return {key: text for key, entry in pairs for text in _constant(entry)}


def _constant(value: ast.expr) -> tuple[str | None, ...]:
    """The text of a constant (none for None), or None for what is computed.

    `os.environ.get("X", "XX")` is its default: the sandbox's environment is not the operator's.
    """
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "os.environ.get" and len(value.args) == 2:
        return _constant(value.args[1])
    if isinstance(value, ast.Constant):
        return () if value.value is None else (str(value.value),)
    return (None,)
