"""Tool names, routes and calls."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import anyio
import pytest

from decathlon_mcp.driver.client import BOOT_COMMAND, DriverClient, connect
from decathlon_mcp.driver.replies import CallParams, Reply
from decathlon_mcp.episodes.tools.offered import ORIGINAL_KEY, OfferedTools, ToolRoute
from decathlon_mcp.episodes.tools.tool_session import ServerStarts, ToolSession
from decathlon_mcp.errors import DriverError, SetUpError, UnknownToolError
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.host.provider import HostProvider
from decathlon_mcp.types import JsonObject, Names
from tests.fakes.calls import call_tool

ROOT = PurePosixPath("/suite")


def tool(name: str, **fields: Any) -> JsonObject:
    return {"name": name, "inputSchema": {"type": "object"}, **fields}


def router(names: Names = "decathlon", **offered: Sequence[JsonObject]) -> OfferedTools:
    return OfferedTools(offered, {}, names)


def test_evaluate_is_not_suggested_to_a_client_that_may_not_evaluate() -> None:
    with pytest.raises(UnknownToolError) as unknown:
        router().route("evaluat")
    assert "evaluate" not in unknown.value.data["near"]


def test_names_of_two_tools_that_clash_fail_the_set_up() -> None:
    with pytest.raises(SetUpError, match="two tools are called 'read'"):
        router("raw", files=[tool("read")], web=[tool("read")])
    with pytest.raises(SetUpError, match="two tools are called 'mail_read_all'"):
        router("verified", mail=[tool("read-all"), tool("read_all")])


def test_a_verified_name_leads_to_the_tool_and_tells_its_own_name() -> None:
    offered = router("verified", **{"pdf-tools": [tool("read-page")]})
    definition, claim = offered.tools
    assert claim["name"] == "local_claim_done"
    assert definition["_meta"] == {ORIGINAL_KEY: {"server": "pdf-tools", "tool": "read-page"}}
    assert offered.route(definition["name"]) == ToolRoute("pdf-tools", "read-page")


def test_which_arguments_headers_repeat_is_known_at_once_for_a_tool_with_a_long_schema() -> None:
    marked = {"type": "object", "properties": {"text": {"type": "string", "x-mcp-header": "Text"}}}
    long: JsonObject = {"type": "object", "enum": [{} for _ in range(70_000)]}
    offered = router(probe=[tool("marked", inputSchema=marked), tool("long", inputSchema=long)])
    started = time.process_time()
    for _ in range(500):
        # Each took 5 ms of the event loop.
        assert offered.schema_with_headers("probe__long") is None
    assert time.process_time() - started < 0.5
    assert offered.schema_with_headers("probe__marked") == marked
    assert offered.schema_with_headers("claim_done") is offered.schema_with_headers("unknown") is None


def test_a_schema_without_a_type_gets_one_and_other_fields_are_unchanged() -> None:
    definition, _ = router(files=[{"name": "read", "inputSchema": {}, "x-unknown": [1]}]).tools
    assert definition["inputSchema"] == {"type": "object"}
    assert definition["x-unknown"] == [1]


def test_a_shortened_name_comes_with_the_original_one() -> None:
    long_name = "a" * 100
    tools = router(files=[tool(long_name, _meta={"kept": 1})])
    definition, _ = tools.tools
    assert len(definition["name"]) == 64
    assert definition["_meta"] == {"kept": 1, ORIGINAL_KEY: {"server": "files", "tool": long_name}}
    assert tools.route(definition["name"]).tool == long_name


def tool_session(
    driver: DriverClient, *, start_seconds: float = 5, optional: Sequence[str] = ("local",), **options: Any
) -> ToolSession:
    """A session with a server `local`, which may end and is started again."""
    starts = ServerStarts(driver, start_seconds=start_seconds, optional=optional)
    return ToolSession(driver, starts, **options)


def text_of(reply: Reply) -> str:
    return reply.decoded()["result"]["content"][0]["text"]


SCRIPTED = Path(__file__).parent.parent / "driver" / "servers" / "scripted.py"


@asynccontextmanager
async def scripted_local_server(folder: Path, behaviour: str, **options: Any) -> AsyncGenerator[ToolSession]:
    """A real driver whose server of the local tools is `tests/driver/servers/scripted.py`."""
    server: JsonObject = {
        "name": "local",
        "command": sys.executable,
        "args": ["-S", str(SCRIPTED), behaviour, "token"],
        "cwd": "/",
        "env": {},
        "inherit": "minimal",
        "request_seconds": 20,
    }
    spec = SandboxSpec("local-tools", BOOT_COMMAND, ROOT)
    async with HostProvider(f"test-{secrets.token_hex(4)}", folder, isolation="none") as provider:
        async with provider.open(spec) as sandbox, connect(sandbox) as driver:
            await driver.define([server])
            yield tool_session(driver, **options)


def called(name: str, **arguments: Any) -> tuple[ToolRoute, CallParams]:
    return ToolRoute("local", name), CallParams.of(arguments)


@pytest.mark.anyio
async def test_local_tools_work_again_after_calls_that_failed_together(tmp_path: Path) -> None:
    """One of the calls may learn of the server's end after another call has started it again."""
    async with scripted_local_server(tmp_path, "normal", start_seconds=60) as session:
        for _ in range(3):
            async with anyio.create_task_group() as tasks:
                for name in ("hang", "hang", "hang", "die"):
                    tasks.start_soon(fails, session, name)
            assert text_of(await call_tool(session, *called("text", unit="alive", times=1))) == "alive"


async def fails(session: ToolSession, name: str) -> None:
    with pytest.raises(DriverError, match="exit code"):
        await call_tool(session, *called(name))


@pytest.mark.anyio
async def test_server_that_died_before_a_restart_is_an_error_of_its_calls(tmp_path: Path) -> None:
    """The next server does not know which servers run; one that ran is not started again."""
    async with scripted_local_server(tmp_path, "normal", start_seconds=60) as session:
        await fails(session, "die")
        next_session = tool_session(session.driver, optional=())
        for _ in range(2):
            await fails(next_session, "text")
        assert not next_session.starts.failed.is_set()
