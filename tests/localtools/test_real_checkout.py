"""Upstream's own local tools through ours and by themselves, in its image without a network: the same words.

Where DECATHLON_TOOLATHLON is a checkout and DECATHLON_TOOLATHLON_IMAGE names an image with its Python.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from decathlon_mcp.driver_client.driver import DriverClient
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.episodes.tools import LocalTools, ToolRoute, ToolRouter, ToolSession
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.suites.local_tools import Described, local_spec
from decathlon_mcp.suites.tasks import Needs, Task
from decathlon_mcp.suites.truncation import FOLDER, cut
from decathlon_mcp.types import JsonObject
from tests.probe.serving import serving

pytestmark = [pytest.mark.anyio, pytest.mark.docker, pytest.mark.slow]

UPSTREAM = """
import asyncio, json, os, sys
from types import SimpleNamespace
sys.path.insert(0, os.getcwd())
with open(sys.argv[1], encoding="utf-8") as file:
    order = json.load(file)
from agents.tool import RunContextWrapper
context = RunContextWrapper(context={"_agent_workspace": order["workspace"]})

def tools():
    from utils.aux_tools.basic import tool_sleep
    from utils.aux_tools.overlong_tool_manager import overlong_tool_tools
    from utils.aux_tools.python_interpretor import tool_python_execute
    from utils.aux_tools.web_search import tool_web_search
    return [tool_python_execute, tool_sleep, tool_web_search, *overlong_tool_tools]

async def one(name, arguments):
    tool = {tool.name: tool for tool in tools()}["local-" + name]
    try:
        return str(await tool.on_invoke_tool(context, json.dumps(arguments)))
    except Exception as error:  # as custom_run_impl.py has it
        return f"Error running tool {tool.name}: {error}"

async def reply(content):
    from agents.mcp.util import MCPUtil
    from mcp.types import CallToolResult
    import utils.openai_agents_monkey_patch.custom_mcp_util
    async def call_tool(name, arguments):
        return CallToolResult.model_validate({"content": content})
    server, tool = SimpleNamespace(name="server", call_tool=call_tool), SimpleNamespace(name="tool")
    return await MCPUtil.invoke_mcp_tool(server, tool, context, "{}")

async def main():
    if order["ask"] == "describe":
        return [[tool.name, tool.description, tool.params_json_schema] for tool in tools()]
    if order["ask"] == "reply":
        return await reply(order["content"])
    return [await one(name, arguments) for name, arguments in order["calls"]]

with os.fdopen(int(os.environ["DECATHLON_CHANNEL"]), "w", encoding="utf-8") as channel:
    json.dump(asyncio.run(main()), channel)
"""

NEEDS = ("python_execute", "sleep", "web_search", "handle_overlong_tool_outputs")


@dataclass(frozen=True)
class Room:
    """A sandbox with the suite's code in it, its local tools our way and upstream's."""

    sandbox_factory: SandboxFactory
    sandbox: Sandbox
    driver: DriverClient
    described: Described
    calls: ToolSession

    @property
    def workspace(self) -> str:
        return str(self.sandbox.root / self.sandbox_factory.suite.profile.workspace)

    async def ours(self, name: str, **arguments: Any) -> str:
        reply = await self.calls.call(ToolRoute("local", name), {"name": name, "arguments": arguments})
        (item,) = reply["result"]["content"]
        return item["text"]

    async def upstream(self, ask: str, **order: Any) -> Any:
        said = json.dumps({"ask": ask, "workspace": self.workspace, **order})
        await self.driver.arrange({"write": "/tmp/order.json", "text": said})
        result = await self.driver.run(
            [*self.sandbox_factory.suite.profile.python, "-c", UPSTREAM, "/tmp/order.json"],
            cwd=str(self.sandbox.root),
            timeout_seconds=100,
            channel=True,
        )
        assert result.exit_code == 0, result.stderr[-2000:]
        return json.loads(result.channel or "")

    async def both(self, *calls: tuple[str, JsonObject]) -> list[tuple[str, str]]:
        """What each call says, our way and upstream's, but for what no two calls share."""
        theirs: Sequence[str] = await self.upstream("call", calls=calls)
        return [(steady(await self.ours(n, **a)), steady(t)) for (n, a), t in zip(calls, theirs, strict=True)]


def steady(text: str) -> str:
    text = re.sub(r"\d+\.\d{3} seconds", "some seconds", text)
    text = re.sub(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}", "a-uuid", text)
    return re.sub(r"(Session ID: |session_id ')[0-9a-f]{8}", r"\1a-session", text)


@pytest.fixture(scope="module")
async def room(tmp_path_factory: pytest.TempPathFactory, anyio_backend: object) -> AsyncGenerator[Room]:
    state = tmp_path_factory.mktemp("state")
    checkout, image = os.environ["DECATHLON_TOOLATHLON"], os.environ["DECATHLON_TOOLATHLON_IMAGE"]
    async with serving(state, suite=(checkout,), provider="docker", image=image, network="none") as served:
        (suite,) = served.episodes.catalogue.suites
        sandbox_factory = served.episodes.sandbox_factory(suite.name)
        async with sandbox_factory.open("localtools-test", "none") as (sandbox, driver):
            await sandbox.put(sandbox.root, sandbox_factory.common)
            await driver.arrange({"make": str(sandbox.root / suite.profile.workspace)})
            some = next(iter(suite.tasks.values()))
            task = Task(id="any", suite=suite.name, folder=some.folder, needs=Needs(local_tools=NEEDS))
            described = await LocalTools().describe(
                suite, task, driver, root=sandbox.root, timeout_seconds=60
            )
            spec = local_spec(suite.profile, described, sandbox.root)
            calls = ToolSession(driver, ToolRouter({}, "decathlon"), local_server=spec)
            yield Room(sandbox_factory, sandbox, driver, described, calls)


async def test_they_are_described_in_upstreams_words(room: Room) -> None:
    ours = [
        [f"local-{tool['name']}", tool["description"], tool["inputSchema"]]
        for tools in room.described.values()
        for tool in tools
    ]
    assert ours == await room.upstream("describe")
    assert len(ours) == 7


async def test_python_execute_says_what_upstreams_does(room: Room) -> None:
    run = "python-execute"
    said = await room.both(
        (run, {"code": "import sys; print('héllo'); print(sys.executable, file=sys.stderr)"}),
        (run, {"code": "pass"}),
        (run, {"code": "1/0", "filename": "division"}),
        (run, {"code": "import sys; sys.exit(3)", "timeout": 500}),
        (run, {"code": "import time; time.sleep(60)", "filename": "slow.py", "timeout": 1}),
        (run, {"code": "print('x' * 150_000)"}),
        (run, {"code": "input()"}),
        (run, {"code": "import os; print(os.getcwd(), sorted(os.listdir('.')))"}),
        (run, {}),
        (run, {"code": "", "timeout": "long"}),
        (run, {"code": "print(1)", "filename": "no/such/folder.py"}),
        (run, {"code": 7}),
    )
    for ours, theirs in said:
        assert ours == theirs
    texts = [ours for ours, _ in said]
    assert "=== STDOUT ===\nhéllo" in texts[0]
    assert "ZeroDivisionError" in texts[2]
    assert "Timeout limit: 120 seconds" in texts[3]
    assert "Execution timed out after 1 seconds" in texts[4]
    assert len(texts[5]) > 150_000


async def test_sleep_and_search_say_what_upstreams_do(room: Room) -> None:
    said = await room.both(
        ("sleep", {"seconds": 0.5}),
        ("sleep", {"seconds": "long"}),
        ("web_search", {"query": " "}),
        ("web_search", {"query": "decathlon", "num_results": 3}),
    )
    for ours, theirs in said:
        assert ours == theirs
    assert said[1][0].startswith("Error running tool local-sleep: ")


FITS = 100_000 - len('{"type":"text","text":"","annotations":null}')
CONTENTS: dict[str, list[JsonObject]] = {
    "short": [{"type": "text", "text": 'é "\n\u2028\x01'}],
    "none": [],
    "long": [{"type": "text", "text": "é" * 100_000}],
    "annotated": [
        {"type": "text", "text": "a" * 100_000, "annotations": {"priority": 1.0}, "_meta": {"b": 1}}
    ],
    "several": [{"type": "text", "text": "é" * 60_000}, {"type": "text", "text": "b" * 60_000}],
    "image": [{"type": "image", "mimeType": "image/png", "data": "AAAA" * 30_000}],
    "resource": [{"type": "resource", "resource": {"text": "a" * 100_000, "uri": "file:///a"}}],
    "just fits": [{"type": "text", "text": "a" * FITS}],
    "just not": [{"type": "text", "text": "a" * (FITS + 1)}],
}


@pytest.mark.parametrize("kind", CONTENTS)
async def test_replies_are_cut_where_and_as_upstream_cuts_them(room: Room, kind: str) -> None:
    theirs: str = await room.upstream("reply", content=CONTENTS[kind])
    overlong = cut(
        {"content": CONTENTS[kind]}, room.sandbox.root / room.sandbox_factory.suite.profile.workspace
    )
    if kind in ("short", "none", "just fits"):
        assert overlong is None
        assert len(theirs) <= 100_000
        return
    assert overlong is not None
    (item,) = overlong.shown["content"]
    name = re.search(r"shortuuid identifier: (\w+)", theirs)
    assert name is not None
    assert item["text"].replace(overlong.path.stem, name.group(1)) == theirs
    saved = await room.driver.run(
        ["cat", f"{room.workspace}/{FOLDER}/{name.group(1)}.json"],
        cwd="/",
        timeout_seconds=10,
        output_bytes=1 << 20,
    )
    assert saved.stdout == overlong.whole


async def test_a_saved_reply_is_found_by_the_tools_that_page_through_it(room: Room) -> None:
    overlong = cut(
        {"content": CONTENTS["long"]}, room.sandbox.root / room.sandbox_factory.suite.profile.workspace
    )
    assert overlong is not None
    await room.driver.arrange(
        {"make": str(overlong.path.parent)}, {"write": str(overlong.path), "text": overlong.whole}
    )
    name = overlong.path.stem
    said = await room.both(
        ("view_overlong_tooloutput", {"shortuuid": name, "page_size": 50}),
        ("search_overlong_tooloutput", {"shortuuid": name, "pattern": "annotations.*"}),
        ("search_overlong_tooloutput", {"shortuuid": name, "pattern": "("}),
        ("view_overlong_tooloutput", {"shortuuid": "none"}),
        ("view_overlong_tooloutput_navigate", {"view_session_id": "none"}),
    )
    for ours, theirs in said:
        assert ours == theirs
    viewed = await room.ours("view_overlong_tooloutput", shortuuid=name, page_size=1000)
    session = re.search(r"View Session ID: (\w+)", viewed)
    assert session is not None
    last = await room.ours(
        "view_overlong_tooloutput_navigate", view_session_id=session.group(1), action="last_page"
    )
    assert "[End of file reached" in last
