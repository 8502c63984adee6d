"""Rules for every payload: its imports, its Python versions, the channel's variable."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
from decathlon_sandbox import wire

from decathlon_mcp import payloads

PACKAGE = payloads.__name__
PAYLOADS = [
    *((path.stem, PACKAGE) for path in Path(payloads.__file__).parent.glob("[!_]*.py")),
    ("local_tools_server", "decathlon_mcp.plugins.toolathlon"),
    ("program_probe", "decathlon_mcp.plugins.readiness"),
    ("program_starter", "decathlon_mcp.plugins.agents"),
    ("rubric_probe", "decathlon_mcp.plugins.readiness"),
    ("script_player", "decathlon_mcp.plugins.exports"),
    ("trust", "decathlon_mcp.plugins.web"),
]


@pytest.mark.parametrize(("name", "package"), PAYLOADS)
def test_a_payload_needs_nothing_but_the_python_that_its_docstring_names(name: str, package: str) -> None:
    source = payloads.source(name, package)
    docstring = " ".join((ast.get_docstring(ast.parse(source)) or "").split())
    version = re.search(r"any Python from (\d+)\.(\d+)\.", docstring)
    assert version is not None
    imported: set[str] = set()
    for node in ast.walk(ast.parse(source, feature_version=(int(version[1]), int(version[2])))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert imported <= sys.stdlib_module_names
    assert {*re.findall(r"DECATHLON_\w+", source)} <= {wire.CHANNEL_VARIABLE}
