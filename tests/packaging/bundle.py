"""Builds the bundle and starts it as Claude Desktop does; validates the registry's file against its schema.

These tests download a packer, a linter and the bundle's packages, so they are not collected by default:

    python -m pytest tests/packaging/bundle.py
"""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters, stdio_client

from tests.docs.pages import REPOSITORY
from tests.docs.snippets import install, output_of
from tests.probe.serving import serving

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

TIMEOUT_SECONDS = 600


@pytest.mark.timeout(TIMEOUT_SECONDS * 2)
async def test_the_bundle_connects_to_the_configured_server(tmp_path: Path) -> None:
    command = [sys.executable, "packaging/build_bundle.py", "--into", tmp_path]
    with zipfile.ZipFile((await output_of(command, REPOSITORY)).strip()) as bundle:
        bundle.extractall(tmp_path / "bundle")
    programs = await install(tmp_path, "uv")
    async with serving(tmp_path / "state", provider="host") as served:
        manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text("utf-8"))
        config: Any = manifest["server"]["mcp_config"]
        values: dict[str, str] = {"${__dirname}": str(tmp_path / "bundle"), "${user_config.url}": served.url}
        templates: list[str] = config["args"]
        arguments = [values.get(template, template) for template in templates]
        server = StdioServerParameters(
            command=str(programs / "uv"),
            args=arguments,
            env={**os.environ, **config["env"], "UV_CACHE_DIR": str(tmp_path / "cache")},
        )
        with anyio.fail_after(TIMEOUT_SECONDS):
            async with Client(stdio_client(server)) as client:
                started = await client.call_tool("start_episode", {"task": "find-answer"})
                assert started.structured_content is not None
                handle = started.structured_content["episode"]
                verdict = await client.call_tool("evaluate", {"episode": handle})
        assert verdict.structured_content is not None
        assert verdict.structured_content["reward"] == 0.0


@pytest.mark.timeout(TIMEOUT_SECONDS)
async def test_the_registrys_file_matches_the_registrys_schema(tmp_path: Path) -> None:
    programs = await install(tmp_path, "skillsaw")
    (tmp_path / "registry").mkdir()
    (tmp_path / "registry" / "server.json").write_bytes((REPOSITORY / "server.json").read_bytes())
    rule = ("--rule", "mcp-registry-server-json-valid", "--strict")
    await output_of([programs / "skillsaw", "lint", *rule, "registry"], tmp_path)
