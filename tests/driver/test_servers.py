"""MCP servers on stdio: start, calls, cancellation and notifications."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import pytest
from decathlon_sandbox import wire

from tests.driver.peer import DriverPeer, WireError, driver

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_servers_start_and_answer_concurrently(peer: DriverPeer) -> None:
    info = await peer.start(peer.sdk_server("one"), peer.scripted_server("plain", "two"))
    assert set(info) == {"one", "two"}
    slow = [await peer.begin_tool("one", "sleep", seconds=1000) for _ in range(3)]
    assert await peer.text("two", "text", unit="quick", times=1) == "quick"
    assert await peer.text("one", "echo", words="meanwhile") == "meanwhile"
    assert not set(slow) & peer.lines.keys()
    for number in slow:
        await peer.cancel(number)


@pytest.fixture(scope="module")
async def sdk(anyio_backend: object) -> AsyncGenerator[DriverPeer]:
    """A driver with the server of servers/sdk.py, for tests that end neither."""
    async with driver(sys.executable) as peer:
        await peer.start(peer.sdk_server())
        yield peer


async def test_progress_carries_the_id_of_the_call_and_keeps_its_order(sdk: DriverPeer) -> None:
    numbers = [await sdk.begin_tool("sdk", "count", meta={"progressToken": "same"}, to=5) for _ in range(2)]
    for number in numbers:
        assert (await sdk.result(number))["result"]["content"][0]["text"] == "counted to 5"
    for number in numbers:
        steps = [
            params["params"]
            for method, params in sdk.notifications
            if method == wire.PROGRESS and params["id"] == number
        ]
        assert [step["progress"] for step in steps] == [1, 2, 3, 4, 5]
        assert steps[0]["message"] == "step 1"
        assert steps[0]["total"] == 5


async def test_timed_out_call_is_cancelled_at_the_server(peer: DriverPeer) -> None:
    await peer.start(peer.scripted_server("plain", request_seconds=0.2))
    number = await peer.begin_tool("scripted", "hang")
    with pytest.raises(WireError, match=r"has not answered within 0\.2 s") as error:
        await peer.result(number)
    assert error.value.reason == "timeout"
    cancellation = await peer.notification(wire.MESSAGE)
    assert isinstance(cancellation["params"]["data"]["cancelled"]["requestId"], int)
    assert await peer.text("scripted", "text", unit="on", times=1) == "on"


async def test_server_gets_its_environment_and_folder_and_no_descriptors_of_the_driver(
    peer: DriverPeer, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "env": {"A": "é", "TERM": "none", "PATH": "/bin:/usr/bin"},
        "cwd": str(tmp_path),
    }
    await peer.start(
        peer.scripted_server("plain", "one", **settings), peer.scripted_server("plain", "two", inherit="all")
    )
    result = json.loads(await peer.text("one", "where"))
    assert result["cwd"] == str(tmp_path)
    assert result["environment"]["PATH"] == "/bin:/usr/bin"
    assert (result["environment"]["A"], result["environment"]["TERM"]) == ("é", "none")
    allowed = {"HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "A", "DECATHLON_MARK", "LC_CTYPE"}
    assert result["environment"].keys() <= allowed
    assert set(result["descriptors"]) == {"0", "1", "2"}
    ours = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    ours["PWD"] = "/"
    assert ours.items() <= json.loads(await peer.text("two", "where"))["environment"].items()


async def test_all_pages_of_tools_are_listed_unchanged(peer: DriverPeer) -> None:
    info = await peer.start(peer.scripted_server("paged"), peer.scripted_server("toolless", "none"))
    assert [tool["name"] for tool in info["scripted"]["tools"]] == [f"tool{page}" for page in range(5)]
    assert info["scripted"]["tools"][0]["x-unknown"] == {"kept": [1, None]}
    assert info["none"]["tools"] == []


async def test_start_cancelled_at_any_moment_leaves_no_process(peer: DriverPeer) -> None:
    for step in range(8):
        servers = [
            peer.scripted_server("daemonic", f"one{step}"),
            peer.scripted_server("silent", f"two{step}"),
        ]
        number = await peer.begin_start(*servers, deadline_seconds=1000)
        await anyio.sleep(0.02 * step)
        await peer.cancel(number)
        with pytest.raises(WireError):
            await peer.result(number)
        assert peer.living() == []


async def test_server_that_has_ended_is_started_again_only_on_request(peer: DriverPeer) -> None:
    await peer.start(peer.scripted_server("plain"))
    with pytest.raises(WireError):
        await peer.tool("scripted", "die")
    with pytest.raises(WireError, match="exit code 3") as error:
        await peer.request(wire.START, names=["scripted"], deadline_seconds=30)
    assert error.value.data["ended"] is True
    await peer.start(peer.scripted_server("plain"))
    assert await peer.text("scripted", "text", unit="back", times=1) == "back"


# memory that is merged
