"""The values in a checkout's token files, read without running them.

`configs/global_configs.py` and `configs/token_key_session.py` are Python modules:
`all_token_key_session = Dict(key="...")`. The real values are computed in the sandbox, by the payload
`token_values`, because only there are the suite's own Python and the files that preprocess wrote and token
files read. This module only tells which values are not filled in.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeAlias

from decathlon_mcp.suites.profile import SuiteProfile

SOURCES = {
    "config": ("configs/global_configs.py", "global_configs"),
    "token": ("configs/token_key_session.py", "all_token_key_session"),
}
"""The token files of a suite and the variable in each, by the prefix of their names in templates."""
TASK_FILE = "token_key_session.py"
"""A task's own token file, in its folder."""

TokenValues: TypeAlias = Mapping[str, str | None]
"""Values by name (`token.x`, `config.x`); None where the file computes the value."""


def read_tokens(path: Path, variable: str) -> TokenValues:
    """The entries of `variable = Dict(key=value, ...)` or `variable = {...}`, without those that are None.

    Empty where the file does not exist or has another form.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    values: dict[str, str | None] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == variable for target in statement.targets
        ):
            values.update(_entries(statement.value))
    return values


def read_checkout_tokens(checkout: Path, profile: SuiteProfile) -> TokenValues:
    """The values of the suite's token files."""
    values: dict[str, str | None] = {}
    for prefix, (file, variable) in SOURCES.items():
        tokens = read_tokens(token_file(checkout, profile, file), variable)
        values.update({f"{prefix}.{key}": value for key, value in tokens.items()})
    return values


def token_file(checkout: Path, profile: SuiteProfile, file: str) -> Path:
    """A file of `SOURCES` in the checkout, or the one that the profile has in its place if it is missing."""
    path = checkout / file
    return path if path.exists() else checkout / dict(profile.stand_ins).get(file, file)


def read_task_tokens(folder: Path) -> TokenValues:
    """The values of a task's own token file, which override the suite's."""
    values = read_tokens(folder / TASK_FILE, SOURCES["token"][1])
    return {f"token.{key}": value for key, value in values.items()}


def is_filled_in(name: str, values: TokenValues, placeholders: Collection[str]) -> bool:
    """Whether a name has a value other than a placeholder. A computed value counts as filled in."""
    return name in values and values[name] not in placeholders


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
    """The text of a constant, nothing for the constant None, and None for a computed value."""
    # The sandbox does not have the operator's environment: `os.environ.get("X", "XX")` is its default.
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "os.environ.get" and len(value.args) == 2:
        return _constant(value.args[1])
    if isinstance(value, ast.Constant):
        return () if value.value is None else (str(value.value),)
    return (None,)
