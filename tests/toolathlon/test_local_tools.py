"""Local tools: their descriptions come from the suite's own code."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath

import pytest

from decathlon_mcp.driver.client import BOOT_COMMAND, DriverClient, connect
from decathlon_mcp.driver.replies import CallParams
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.errors import DriverError, SetUpError
from decathlon_mcp.plugins.toolathlon.toolathlon import ToolathlonHooks
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.suites.loading import load_suite
from decathlon_mcp.types import JsonObject
from tests.episodes.environment import echo, make_call, running_registry
from tests.fakes.driver import FakeRun, Faults, RunReply
from tests.fakes.provider import FakeProvider
from tests.localtools.conftest import SUITE as LOCAL_TOOLS_SUITE

ROOT = PurePosixPath("/suite")


def tool(name: str) -> JsonObject:
    return {"name": name, "inputSchema": {"type": "object"}}


@asynccontextmanager
async def describing(*replies: RunReply) -> AsyncGenerator[tuple[DriverClient, list[FakeRun]]]:
    """A driver whose processes end with these replies, and the processes that were run."""
    requests: list[FakeRun] = []
    remaining = list(replies)

    def run(request: FakeRun) -> RunReply:
        requests.append(request)
        return remaining.pop(0)

    async with FakeProvider(run=run) as provider:
        async with provider.open(SandboxSpec("tools", BOOT_COMMAND, ROOT)) as sandbox:
            async with connect(sandbox) as driver:
                yield driver, requests


@pytest.mark.anyio
async def test_local_tools_are_described_once_by_the_suites_code() -> None:
    suite = load_suite(LOCAL_TOOLS_SUITE)
    task = suite.tasks["play"]
    described = {need: [tool(f"{need}_tool")] for need in task.needs.local_tools}
    local_tools = ToolathlonHooks(suite)
    async with describing(RunReply(channel=json.dumps(described))) as (driver, requests):
        for _ in range(2):
            found = await local_tools.describe_local_tools(task, driver, root=ROOT, timeout_seconds=5)
            assert {need: list(tools) for need, tools in found.items()} == described
    assert len(requests) == 1


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        (RunReply(exit_code=1, stderr=f"{'a' * 2000}{'b' * 1999}c"), "(?<=: )b{1999}c$"),
        (RunReply(channel="no JSON"), "gave no tools"),
        (RunReply(timed_out=True), "took too long"),
    ],
)
async def test_local_tools_that_cannot_be_described_fail_the_set_up(reply: RunReply, cause: str) -> None:
    suite = load_suite(LOCAL_TOOLS_SUITE)
    async with describing(reply) as (driver, _):
        with pytest.raises(SetUpError, match=rf"could not be described: .*{cause}"):
            await ToolathlonHooks(suite).describe_local_tools(
                suite.tasks["play"], driver, root=ROOT, timeout_seconds=5
            )


@pytest.mark.anyio
async def test_an_episode_goes_on_without_the_server_of_its_local_tools(tmp_path: Path) -> None:
    needs = load_suite(LOCAL_TOOLS_SUITE).tasks["play"].needs
    described = json.dumps({need: [tool(f"{need}_tool")] for need in needs.local_tools})
    provider = FakeProvider(
        tools={name: {"echo": echo} for name in needs.servers},
        run=lambda request: RunReply(channel=described),
        faults=Faults(servers_that_fail={"local": "no memory"}),
    )
    async with running_registry(tmp_path, provider, suite=LOCAL_TOOLS_SUITE) as registry:
        episode = registry.start("play", Principal())
        await episode.ready()
        for _ in range(2):
            with pytest.raises(DriverError, match="server local did not come up"):
                await make_call(episode, f"local__{needs.local_tools[0]}_tool", CallParams())
        assert episode.state.phase is Phase.READY
