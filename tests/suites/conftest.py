"""A checkout in Toolathlon's layout, written piece by piece by each test."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from decathlon_mcp.suites.loading import load_suite
from decathlon_mcp.suites.suite import Suite

# Nothing is skipped: what cannot run here is not collected.
collect_ignore = (
    []
    if os.environ.get("DECATHLON_TOOLATHLON") or os.environ.get("DECATHLON_TOOLATHLON_GYM")
    else ["test_real_checkouts.py"]
)


class Checkout:
    """`write` anything; `task` and `server` write what the layout asks for."""

    def __init__(self, path: Path) -> None:
        self.path = path

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
        **more: Any,
    ) -> Path:
        folder = f"tasks/{split}/{name}"
        config = {"needed_mcp_servers": [*servers], "needed_local_tools": [*local_tools], **more}
        self.write(f"{folder}/task_config.json", json.dumps(config, indent=2))
        self.write(f"{folder}/docs/task.md", "Find the paper.")
        self.write(f"{folder}/evaluation/main.py", "raise SystemExit(0)\n")
        for file, text in (files or {}).items():
            self.write(f"{folder}/{file}", text)
        return self.path / folder

    def server(self, name: str, text: str | None = None, *, file: str | None = None) -> Path:
        plain = f"type: stdio\nname: {name}\nparams:\n  command: {name}-server\n"
        return self.write(f"configs/mcp_servers/{file or name}.yaml", plain if text is None else text)

    def load(self) -> Suite:
        return load_suite(self.path)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """Empty; without marks it is taken for Toolathlon's own."""
    return Checkout(tmp_path / "checkout")


@pytest.fixture
def gym(checkout: Checkout) -> Checkout:
    """A checkout with a mark of toolathlon_gym."""
    checkout.write("toolathlon-gym.mdx")
    return checkout
