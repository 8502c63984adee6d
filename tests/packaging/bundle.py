"""The bundle, built by the format's own packer and started as the program that installs it does; the file for
the registry, against the registry's own schema.

Not run with the others (they fetch a packer, a linter and the bundle's packages), but by name:

    python -m pytest tests/packaging/bundle.py
"""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters, stdio_client

from tests.probe.serving import serving

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

REPOSITORY = Path(__file__).parents[2]
PATIENCE_SECONDS = 600


async def _run(*words: str) -> CompletedProcess[bytes]:
    with anyio.fail_after(PATIENCE_SECONDS):
        return await anyio.run_process(words, cwd=REPOSITORY)


async def _installed(package: str, folder: Path) -> Path:
    """The program of that name, in an environment of its own."""
    await _run(sys.executable, "-m", "venv", str(folder))
    await _run(str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", package)
    return folder / "bin" / package


@pytest.mark.timeout(PATIENCE_SECONDS * 2)
async def test_the_bundle_is_a_client_of_the_server_that_its_user_names(tmp_path: Path) -> None:
    built = await _run(sys.executable, "packaging/build_bundle.py", "--into", str(tmp_path))
    with zipfile.ZipFile(built.stdout.decode().strip()) as bundle:
        bundle.extractall(tmp_path / "bundle")
    uv = await _installed("uv", tmp_path / "uv")
    async with serving(tmp_path / "state", provider="local") as served:
        manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text("utf-8"))
        told: Any = manifest["server"]["mcp_config"]
        filled: dict[str, str] = {"${__dirname}": str(tmp_path / "bundle"), "${user_config.url}": served.url}
        given: list[str] = told["args"]
        words = [filled.get(word, word) for word in given]
        server = StdioServerParameters(
            command=str(uv),
            args=words,
            env={**os.environ, **told["env"], "UV_CACHE_DIR": str(tmp_path / "cache")},
        )
        with anyio.fail_after(PATIENCE_SECONDS):
            async with Client(stdio_client(server)) as client:
                started = await client.call_tool("start_episode", {"task": "find-answer"})
                assert started.structured_content is not None
                handle = started.structured_content["episode"]
                verdict = await client.call_tool("evaluate", {"episode": handle})
        assert verdict.structured_content is not None
        assert verdict.structured_content["reward"] == 0.0


@pytest.mark.timeout(PATIENCE_SECONDS)
async def test_the_registrys_file_is_what_the_registrys_schema_says(tmp_path: Path) -> None:
    linter = await _installed("skillsaw", tmp_path / "linter")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "server.json").write_bytes((REPOSITORY / "server.json").read_bytes())
    rule = ("--rule", "mcp-registry-server-json-valid", "--strict")
    await _run(str(linter), "lint", *rule, str(tmp_path / "here"))
