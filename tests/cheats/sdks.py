"""Four SDKs' clients, the newest of each line, with every generated definition and result of a task's server.

Not part of the normal test run, because it installs packages of npm and PyPI and takes minutes. To run it:

    python -m pytest tests/cheats/sdks.py

No client may refuse the list of tools, raise for a result, or wait for one in vain.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from tests.cheats.agent import SUITE
from tests.cheats.test_results import replies
from tests.conformance.suites import node, run_npm
from tests.docs.snippets import install, output_of
from tests.fuzz.results import definitions
from tests.probe.clients import start
from tests.probe.serving import Served, serving

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

CALL_SECONDS = 30
FOLDER = Path(__file__).parent


SDKS = {
    "@modelcontextprotocol/sdk": ("legacy",),
    "@modelcontextprotocol/client": ("legacy", "auto"),
    "mcp>=1.24,<2": ("legacy",),
    "mcp>=2.3,<3": ("legacy", "auto"),
}
"""The packages of the SDKs, and the ways in which their clients can connect."""


async def command_of(package: str, folder: Path) -> Sequence[str]:
    """Install an SDK in a folder. Returns the words of the command that makes the calls."""
    if package.startswith("mcp"):
        return [str(await install(folder, package) / "python"), str(FOLDER / "sdk_calls.py")]
    await anyio.to_thread.run_sync(run_npm, folder, "install", "--no-audit", "--no-fund", package)
    return [str(node()), str(FOLDER / "sdk_calls.mjs"), package]


@pytest.fixture(scope="module", name="server")
async def server_of_all_definitions(
    tmp_path_factory: pytest.TempPathFactory, anyio_backend: object
) -> AsyncGenerator[Served]:
    """A server of the suite of attacks, whose server lists a tool for each generated definition too."""
    folder = tmp_path_factory.mktemp("suite")
    suite = shutil.copytree(SUITE, folder / "cheats")
    tools = [{**definition, "name": f"tool_{number}"} for number, definition in enumerate(definitions())]
    (suite / "local_servers" / "definitions.json").write_text(json.dumps(tools))
    async with serving(folder / "state", suite=(str(suite),), provider="host") as served:
        yield served


@pytest.mark.timeout(900)
@pytest.mark.parametrize("package", SDKS)
async def test_no_definition_and_no_result_makes_a_client_fail(
    package: str, server: Served, tmp_path: Path
) -> None:
    command = await command_of(package, tmp_path)
    (tmp_path / "replies.json").write_text(json.dumps(replies(1)))
    for mode in SDKS[package]:
        started = await start(server, "sum-prices")
        words = [*command, mode, started["address"], str(tmp_path / "replies.json"), str(CALL_SECONDS)]
        outcome = json.loads(await output_of(words, tmp_path, seconds=900))
        raised = outcome["raised"]
        print(f"{package} {mode}: {len(outcome['tools'])} tools, {len(raised)} failures")  # noqa: T201
        assert raised == [], (len(raised), raised[:5])
        assert sum(tool.startswith("root__tool_") for tool in outcome["tools"]) == len(definitions())
        server.find(started["episode"]).close()
