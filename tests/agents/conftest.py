"""Fixtures for the commands that let agents play."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from decathlon_mcp.cli.options import PREFIX


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder of the command, whose other settings are the default ones."""
    for name in os.environ:
        if name.startswith(PREFIX) or name.endswith("_BASE_URL"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "state"
    monkeypatch.setenv("DECATHLON_STATE", str(folder))
    return folder
