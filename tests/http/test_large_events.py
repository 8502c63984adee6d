"""Replies that go out as events: the Python SDK's session ends with one of over 1 MiB."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import pytest
from decathlon_client import Decathlon
from decathlon_client.sdk import LARGE_EVENTS
from mcp import Client
from mcp.shared.exceptions import MCPError

from tests.probe.clients import ERAS, connected
from tests.probe.serving import SUITE, Served, serving

pytestmark = pytest.mark.anyio

LARGE = "x" * 1_200_000
RESULTS: dict[str, dict[str, Any]] = {
    "_meta": {"_meta": {"a/b": LARGE}},
    "structuredContent": {"structuredContent": {"a": LARGE}},
    "an-unknown-member": {"mood": LARGE},
    "content": {"content": [{"type": "text", "text": LARGE}]},
}
ODD = 'return {"content": [], **json.loads(open(workspace_path("odd.json")).read())}'


@pytest.fixture(scope="module", params=["true", "false"])
async def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, anyio_backend: object
) -> AsyncGenerator[Served]:
    """A server whose agent has replaced the task's server."""
    suite = tmp_path_factory.mktemp("suites") / "suite"
    shutil.copytree(SUITE, suite)
    server = suite / "local_servers" / "probe_server.py"
    text = server.read_text().replace("return odd()", ODD)
    server.write_text(text.replace('"again": "tomorrow"', '"again": "x" * 1_200_000'))
    state = tmp_path_factory.mktemp("state")
    with (suite / "suite.yaml").open("a") as file:
        file.write(f"cuts_overlong: {request.param}\n")
    async with serving(state, suite=(str(suite),), provider="host", survives=True) as served:
        yield served


async def write(call: Any, members: dict[str, Any]) -> None:
    await call("probe__write", {"path": "odd.json", "text": json.dumps(members)})


async def goes_on(client: Client) -> None:
    reply: Any = await client.call_tool("probe__echo", {"text": "on"})
    assert reply.content[0].text == "on"


@pytest.mark.parametrize("era", ERAS)
async def test_a_large_reply_does_not_end_the_session_of_the_python_sdk(served: Served, era: str) -> None:
    async with Decathlon(served.url) as d, d.episode("find-answer") as e:
        async with connected(e.address, era, read_timeout_seconds=30) as client:
            for name, members in RESULTS.items():
                await write(client.call_tool, members)
                result: Any = await client.call_tool("probe__odd")
                if name != "content":  # which is shortened with `cuts_overlong`
                    # Without a session the answer is a JSON body, which has no such limit.
                    assert result.is_error == (era == "handshake")
                if result.is_error:
                    assert "bytes, more than" in result.content[0].text
                    assert result.meta["decathlon/error"]["code"] == "limit_exceeded"
                await goes_on(client)
            with suppress(MCPError):
                assert (await client.call_tool("probe__refuse")).is_error
            await goes_on(client)


async def test_a_client_that_takes_large_events_gets_large_replies(served: Served) -> None:
    async with Decathlon(served.url) as d, d.episode("find-answer") as e:
        for member in ("_meta", "mood"):
            members = RESULTS["_meta" if member == "_meta" else "an-unknown-member"]
            await write(e.call, members)
            reply = await e.call("probe__odd")
            assert reply.is_error == (not LARGE_EVENTS)  # an old SDK does not take them
            if reply.is_error:
                continue
            assert LARGE in json.dumps(reply.raw[member])
