"""A checkout in Toolathlon's layout that each test writes as it needs it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from decathlon_mcp.suites.loading import load_suite
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.types import Language


class Checkout:
    """Writes files; `task` and `server` write the files that the layout requires."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # By which Toolathlon is known.
        (path / "global_preparation").mkdir(parents=True, exist_ok=True)

    def write(self, name: str, text: str = "") -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text), encoding="utf-8")
        return path

    def task(
        self,
        name: str = "find-paper",
        *,
        split: str = "finalpool",
        servers: tuple[str, ...] = (),
        local_tools: tuple[str, ...] = ("claim_done",),
        files: Mapping[str, str] | None = None,
        **config: Any,
    ) -> Path:
        folder = f"tasks/{split}/{name}"
        required = {"needed_mcp_servers": [*servers], "needed_local_tools": [*local_tools]}
        self.write(f"{folder}/task_config.json", json.dumps({**required, **config}, indent=2))
        self.write(f"{folder}/docs/task.md", "Find the paper.")
        self.write(f"{folder}/evaluation/main.py", "raise SystemExit(0)\n")
        for file, text in (files or {}).items():
            self.write(f"{folder}/{file}", text)
        return self.path / folder

    def server(self, name: str, text: str | None = None, *, file: str | None = None) -> Path:
        default = f"type: stdio\nname: {name}\nparams:\n  command: {name}-server\n"
        return self.write(f"configs/mcp_servers/{file or name}.yaml", default if text is None else text)

    def load(self, language: Language = "en") -> Suite:
        return load_suite(self.path, language)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """An empty checkout, whose profile is Toolathlon's."""
    return Checkout(tmp_path / "checkout")


@pytest.fixture
def gym(checkout: Checkout) -> Checkout:
    """An empty checkout with toolathlon_gym's profile."""
    checkout.write("toolathlon-gym.mdx")
    return checkout
