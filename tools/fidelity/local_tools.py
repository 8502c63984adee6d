"""Upstream's local tools return the same results through our server as in upstream's scaffold.

`pytest tools/fidelity/local_tools.py` runs in upstream's image, without a network. DECATHLON_TOOLATHLON is
the path of a checkout, DECATHLON_TOOLATHLON_IMAGE the name of an image with its Python.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from decathlon_sandbox.truncation import CutResult, cut

from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.driver.replies import OVERLONG_FOLDER, CallParams
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.episodes.tools.offered import ToolDescriptions, ToolRoute
from decathlon_mcp.episodes.tools.tool_session import ServerStarts, ToolSession
from decathlon_mcp.plugins.toolathlon.toolathlon import ToolathlonHooks
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.suites.tasks import Needs, Task
from decathlon_mcp.types import JsonObject
from tests.fakes.calls import call_tool
from tests.probe.serving import serving

pytestmark = [pytest.mark.anyio, pytest.mark.docker, pytest.mark.slow]

UPSTREAM = """
import asyncio, json, os, sys
from types import SimpleNamespace
sys.path.insert(0, os.getcwd())
with open(sys.argv[1], encoding="utf-8") as file:
    request = json.load(file)
from agents.tool import RunContextWrapper
context = RunContextWrapper(context={"_agent_workspace": request["workspace"]})

def tools():
    from utils.aux_tools.basic import tool_sleep
    from utils.aux_tools.overlong_tool_manager import overlong_tool_tools
    from utils.aux_tools.python_interpretor import tool_python_execute
    from utils.aux_tools.web_search import tool_web_search
    return [tool_python_execute, tool_sleep, tool_web_search, *overlong_tool_tools]

async def call(name, arguments):
    tool = {tool.name: tool for tool in tools()}["local-" + name]
    try:
        return str(await tool.on_invoke_tool(context, json.dumps(arguments)))
    except Exception as error:  # like custom_run_impl.py
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
    if request["action"] == "describe":
        return [[tool.name, tool.description, tool.params_json_schema] for tool in tools()]
    if request["action"] == "reply":
        return await reply(request["content"])
    return [await call(name, arguments) for name, arguments in request["calls"]]

with os.fdopen(int(os.environ["DECATHLON_CHANNEL"]), "w", encoding="utf-8") as channel:
    json.dump(asyncio.run(main()), channel)
"""

LIMIT_CHARACTERS = 100_000
NEEDS = ("python_execute", "sleep", "web_search", "handle_overlong_tool_outputs")


@dataclass(frozen=True)
class LocalToolsSandbox:
    """A sandbox with the suite's code. Calls its local tools through our server or with upstream's code."""

    sandbox_factory: SandboxFactory
    sandbox: Sandbox
    driver: DriverClient
    descriptions: ToolDescriptions
    session: ToolSession

    @property
    def workspace(self) -> str:
        return str(self.sandbox.root / self.sandbox_factory.suite.profile.workspace)

    def truncate(self, content: list[JsonObject]) -> CutResult | None:
        return cut({"content": content}, f"{self.workspace}/{OVERLONG_FOLDER}", LIMIT_CHARACTERS)

    async def call_server(self, name: str, **arguments: Any) -> str:
        reply = await call_tool(self.session, ToolRoute("local", name), CallParams.of(arguments))
        (item,) = reply.decoded()["result"]["content"]
        return item["text"]

    async def call_upstream(self, action: str, **fields: Any) -> Any:
        text = json.dumps({"action": action, "workspace": self.workspace, **fields})
        await self.driver.arrange({"write": "/tmp/request.json", "text": text})
        result = await self.driver.run(
            [*self.sandbox_factory.suite.profile.python, "-c", UPSTREAM, "/tmp/request.json"],
            cwd=str(self.sandbox.root),
            timeout_seconds=100,
            channel=True,
        )
        assert result.exit_code == 0, result.stderr[-2000:]
        return json.loads(result.channel or "")

    async def call_both(self, *calls: tuple[str, JsonObject]) -> list[tuple[str, str]]:
        """Return the results of our server and of upstream for each call, without times and random ids."""
        upstream: Sequence[str] = await self.call_upstream("call", calls=calls)
        return [
            (normalise(await self.call_server(name, **arguments)), normalise(text))
            for (name, arguments), text in zip(calls, upstream, strict=True)
        ]


def normalise(text: str) -> str:
    text = re.sub(r"\d+\.\d{3} seconds", "some seconds", text)
    text = re.sub(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}", "a-uuid", text)
    return re.sub(r"(Session ID: |session_id ')[0-9a-f]{8}", r"\1a-session", text)


@pytest.fixture(scope="module")
async def local_tools(
    tmp_path_factory: pytest.TempPathFactory, anyio_backend: object
) -> AsyncGenerator[LocalToolsSandbox]:
    state = tmp_path_factory.mktemp("state")
    checkout, image = os.environ["DECATHLON_TOOLATHLON"], os.environ["DECATHLON_TOOLATHLON_IMAGE"]
    async with serving(state, suite=(checkout,), provider="docker", image=image, network="none") as served:
        (suite,) = served.episodes.catalogue.suites
        sandbox_factory = served.episodes.factory(suite.name)
        async with sandbox_factory.open("localtools-test", "none") as (sandbox, driver):
            await sandbox.put(sandbox.root, sandbox_factory.common)
            await driver.arrange({"make": str(sandbox.root / suite.profile.workspace)})
            any_task = next(iter(suite.tasks.values()))
            task = Task(id="any", suite=suite.name, folder=any_task.folder, needs=Needs(local_tools=NEEDS))
            hooks = ToolathlonHooks(suite)
            descriptions = await hooks.describe_local_tools(
                task, driver, root=sandbox.root, timeout_seconds=60
            )
            spec = hooks.local_server(descriptions, sandbox.root)
            await driver.define([spec])
            starts = ServerStarts(driver, start_seconds=60, optional=["local"])
            session = ToolSession(driver, starts)
            yield LocalToolsSandbox(sandbox_factory, sandbox, driver, descriptions, session)


async def test_descriptions_are_upstreams(local_tools: LocalToolsSandbox) -> None:
    descriptions = [
        [f"local-{tool['name']}", tool["description"], tool["inputSchema"]]
        for tools in local_tools.descriptions.values()
        for tool in tools
    ]
    assert descriptions == await local_tools.call_upstream("describe")
    assert len(descriptions) == 7


async def test_python_execute_gives_upstreams_results(local_tools: LocalToolsSandbox) -> None:
    run = "python-execute"
    results = await local_tools.call_both(
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
    for result, upstream in results:
        assert result == upstream
    texts = [result for result, _ in results]
    assert "=== STDOUT ===\nhéllo" in texts[0]
    assert "ZeroDivisionError" in texts[2]
    assert "Timeout limit: 120 seconds" in texts[3]
    assert "Execution timed out after 1 seconds" in texts[4]
    assert len(texts[5]) > 150_000


async def test_sleep_and_search_give_upstreams_results(local_tools: LocalToolsSandbox) -> None:
    results = await local_tools.call_both(
        ("sleep", {"seconds": 0.5}),
        ("sleep", {"seconds": "long"}),
        ("web_search", {"query": " "}),
        ("web_search", {"query": "decathlon", "num_results": 3}),
    )
    for result, upstream in results:
        assert result == upstream
    assert results[1][0].startswith("Error running tool local-sleep: ")


FITS = LIMIT_CHARACTERS - len('{"type":"text","text":"","annotations":null}')
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
async def test_results_are_truncated_as_upstream_truncates_them(
    local_tools: LocalToolsSandbox, kind: str
) -> None:
    upstream: str = await local_tools.call_upstream("reply", content=CONTENTS[kind])
    truncated = local_tools.truncate(CONTENTS[kind])
    if kind in ("short", "none", "just fits"):
        assert truncated is None
        assert len(upstream) <= 100_000
        return
    assert truncated is not None
    assert truncated.path is not None
    (item,) = truncated.result["content"]
    name = re.search(r"shortuuid identifier: (\w+)", upstream)
    assert name is not None
    assert item["text"].replace(Path(truncated.path).stem, name.group(1)) == upstream
    saved = await local_tools.driver.run(
        ["cat", f"{local_tools.workspace}/{OVERLONG_FOLDER}/{name.group(1)}.json"],
        cwd="/",
        timeout_seconds=10,
        output_bytes=1 << 20,
    )
    assert saved.stdout == truncated.full_text


async def test_upstreams_tools_read_a_saved_result(local_tools: LocalToolsSandbox) -> None:
    truncated = local_tools.truncate(CONTENTS["long"])
    assert truncated is not None
    assert truncated.path is not None
    await local_tools.driver.arrange(
        {"make": str(Path(truncated.path).parent)}, {"write": truncated.path, "text": truncated.full_text}
    )
    name = Path(truncated.path).stem
    results = await local_tools.call_both(
        ("view_overlong_tooloutput", {"shortuuid": name, "page_size": 50}),
        ("search_overlong_tooloutput", {"shortuuid": name, "pattern": "annotations.*"}),
        ("search_overlong_tooloutput", {"shortuuid": name, "pattern": "("}),
        ("view_overlong_tooloutput", {"shortuuid": "none"}),
        ("view_overlong_tooloutput_navigate", {"view_session_id": "none"}),
    )
    for result, upstream in results:
        assert result == upstream
    viewed = await local_tools.call_server("view_overlong_tooloutput", shortuuid=name, page_size=1000)
    session = re.search(r"View Session ID: (\w+)", viewed)
    assert session is not None
    last = await local_tools.call_server(
        "view_overlong_tooloutput_navigate", view_session_id=session.group(1), action="last_page"
    )
    assert "[End of file reached" in last
