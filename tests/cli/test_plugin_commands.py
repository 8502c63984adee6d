"""Commands that come from plug-ins of other packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

GREETING = """
from decathlon_mcp.hooks import Command, Plugin

PLUGIN = Plugin(name="greeting", commands={"greet": Command("greeting:greet", "Greet somebody.")})

def greet(name: str) -> int:
    "Greet somebody."
    print(f"hello {name}")
    return 0
"""
BROKEN = """
from decathlon_mcp.hooks import Command, Plugin

PLUGIN = Plugin(name="broken", commands={"broken": Command("missing:f", "Fail.")})
"""


def command(folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and output of the command, with the packages in a folder installed."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", "decathlon_mcp.cli", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout


def install(folder: Path, name: str, source: str) -> None:
    """Put a package with a plug-in into a folder, as an installer does."""
    (folder / f"{name}.py").write_text(source, "utf-8")
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", "utf-8")
    (info / "entry_points.txt").write_text(f"[decathlon_mcp.plugins]\n{name} = {name}:PLUGIN\n", "utf-8")


def test_a_command_of_another_packages_plug_in_is_listed_and_runs(tmp_path: Path) -> None:
    install(tmp_path, "greeting", GREETING)
    status, output = command(tmp_path, "--help")
    assert status == 0
    assert "Greet somebody." in output
    assert command(tmp_path, "greet", "Ada") == (0, "hello Ada\n")


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
    install(tmp_path, "broken", source)
    status, output = command(tmp_path, "broken")
    assert status == 1
    assert output.startswith(f"decathlon-mcp: {message}")
    assert output.count("\n") == 1
