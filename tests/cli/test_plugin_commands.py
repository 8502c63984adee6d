"""Commands that come from plug-ins of other packages. `tests/docs/test_extending.py` runs one that works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BROKEN = """
from decathlon_mcp.hooks import Command, Plugin

PLUGIN = Plugin(name="broken", commands={"broken": Command("missing:f", "Fail.")})
"""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import missing_module", "the plug-in broken:PLUGIN cannot be loaded (ModuleNotFoundError: "),
        ("PLUGIN = 1", "broken:PLUGIN is a int, and not a Plugin"),
        (BROKEN, "the plug-in broken cannot be loaded (ModuleNotFoundError: "),
    ],
    ids=["module", "value", "part"],
)
def test_a_broken_plug_in_is_one_line_that_names_it(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "broken.py").write_text(source, "utf-8")
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n", "utf-8")
    (info / "entry_points.txt").write_text("[decathlon_mcp.plugins]\nbroken = broken:PLUGIN\n", "utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "decathlon_mcp.cli", "broken"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout.startswith(f"decathlon-mcp: {message}")
    assert done.stdout.count("\n") == 1
