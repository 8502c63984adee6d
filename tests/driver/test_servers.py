"""MCP servers on stdio. Of one that misbehaves, only that call or that server fails."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import anyio
import pytest
from decathlon_sandbox import wire

from tests.driver.peer import DriverPeer, WireError, stdio_server

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_servers_start_and_answer_concurrently(peer: DriverPeer) -> None:
    info = await peer.start(peer.sdk_server("one"), peer.scripted_server("plain", "two"))
    assert set(info) == {"one", "two"}
    slow = [await peer.begin_tool("one", "sleep", seconds=1000) for _ in range(3)]
    assert await peer.text("two", "text", unit="quick", times=1) == "quick"
    assert await peer.text("one", "echo", words="meanwhile") == "meanwhile"
    assert not set(slow) & peer.responses.keys()
    for number in slow:
        await peer.cancel(number)


async def test_progress_carries_the_id_of_the_call_and_keeps_its_order(peer: DriverPeer) -> None:
    await peer.start(peer.sdk_server())
    numbers = [await peer.begin_tool("sdk", "count", meta={"progressToken": "same"}, to=5) for _ in range(2)]
    for number in numbers:
        assert (await peer.result(number))["result"]["content"][0]["text"] == "counted to 5"
    for number in numbers:
        steps = [
            params["params"]
            for method, params in peer.notifications
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
    await peer.until(lambda: bool(peer.notifications))
    ((method, params),) = peer.notifications
    assert method == wire.MESSAGE
    assert isinstance(params["params"]["data"]["cancelled"]["requestId"], int)
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


async def check_answers(peer: DriverPeer, server: str = "scripted") -> None:
    """The server still answers."""
    assert await peer.text(server, "text", unit="ok", times=1) == "ok"


@pytest.mark.parametrize(
    ("behaviour", "message", "data"),
    [
        ("dies", "server scripted ended with exit code 7", {"exit_code": 7, "stderr": "no such luck\n"}),
        ("silent", "server scripted was not up after 2 s", {"exit_code": None, "stderr": "thinking\n"}),
        ("refuses", "server scripted answered initialize with an error: not today", {"exit_code": None}),
        ("endless", "has an endless list of tools", {"exit_code": None}),
        ("orphaned", "server scripted ended with exit code 0", {"exit_code": 0}),
    ],
)
async def test_server_that_does_not_start_fails_the_request_and_stops_the_others(
    peer: DriverPeer, behaviour: str, message: str, data: dict[str, Any]
) -> None:
    with pytest.raises(WireError) as error:
        await peer.start(
            peer.scripted_server("daemonic", "other"),
            peer.scripted_server(behaviour),
            deadline_seconds=2 if behaviour == "silent" else 1000,
        )
    assert error.value.reason == "server"
    assert message in error.value.message
    assert {"server": "scripted", **data}.items() <= error.value.data.items()
    assert peer.living() == []
    await peer.start(peer.scripted_server("noisy"))  # before the handshake, which is ignored
    await check_answers(peer)


async def test_missing_program_fails_the_start(peer: DriverPeer) -> None:
    missing = {"command": "no-such-program"}, {"cwd": "/no/such/folder"}, {"env": {"PATH": "/nowhere"}}
    for settings in missing:
        server = {**stdio_server("none", "sh", "-c", "exit 1"), **settings}
        with pytest.raises(WireError, match="server none cannot be started") as error:
            await peer.start(peer.scripted_server("plain"), server)
        assert error.value.reason == "server"
        assert error.value.data == {"server": "none", "stderr": "", "exit_code": None}
        assert peer.living() == []


@pytest.mark.parametrize(
    ("tool", "code", "message"),
    [
        ("die", 3, "ended with exit code 3"),
        ("die_by_signal", -9, "was ended by signal 9"),
    ],
)
async def test_exit_during_a_call_fails_all_calls_of_the_server_and_is_reported(
    peer: DriverPeer, tool: str, code: int, message: str
) -> None:
    await peer.start(peer.scripted_server("daemonic"), peer.scripted_server("plain", "other"))
    hanging = await peer.begin_tool("scripted", "hang")
    dying = await peer.begin_tool("scripted", tool)
    for number in (hanging, dying):
        with pytest.raises(WireError, match=message) as error:
            await peer.result(number)
        assert error.value.reason == "server"
        assert error.value.data == {
            "server": "scripted",
            "exit_code": code,
            "stderr": "the last words\n" if tool == "die" else "",
        }
    with pytest.raises(WireError, match=message) as error:
        await peer.tool("scripted", "text")
    assert error.value.reason == "server"
    await check_answers(peer, "other")
    assert len(peer.living()) == 1  # its daemon was killed too


async def call_text(peer: DriverPeer, characters: int, **options: Any) -> Any:
    return await peer.result(await peer.begin_tool("scripted", "text", unit="é", times=characters, **options))


async def test_reply_over_the_limit_of_its_call_is_an_error(peer: DriverPeer) -> None:
    await peer.start(peer.scripted_server("plain"))
    with pytest.raises(WireError, match=r"has \d+ bytes, more than the limit of 1000 bytes") as error:
        await call_text(peer, 1000, max_bytes=1000)
    assert error.value.reason == "too_long"
    assert "result" in await call_text(peer, 10, max_bytes=1000)
    long = await call_text(peer, 4_000_000, max_bytes=30_000_000)
    assert len(long["result"]["content"][0]["text"]) == 4_000_000


async def test_long_result_is_cut_before_its_length_counts(peer: DriverPeer, tmp_path: Path) -> None:
    await peer.start(peer.scripted_server("plain"))
    folder = tmp_path / "not there"
    options = {"max_bytes": 10_000, "cut": {"folder": str(folder), "characters": 1000}}
    reply = await call_text(peer, 1_000_000, **options)
    text = reply["result"]["content"][0]["text"]
    (file,) = folder.iterdir()
    assert str(file) in text
    assert "é" * 900 in text
    assert json.loads(file.read_text("utf-8"))["text"] == "é" * 1_000_000
    short = await call_text(peer, 900, **options)
    assert short["result"]["content"][0]["text"] == "é" * 900


@pytest.mark.parametrize("tool", ["flood_stderr", "flood_stdout"])
async def test_flood_of_output_does_not_affect_other_servers(peer: DriverPeer, tool: str) -> None:
    """More than the limit of a line, without a line end."""
    await peer.start(peer.scripted_server("plain"), peer.scripted_server("plain", "other"))
    flood = await peer.begin_tool("scripted", tool, mib=80)
    for _ in range(10):
        await check_answers(peer, "other")
    if tool == "flood_stderr":
        assert (await peer.result(flood))["result"]["content"][0]["text"] == "flooded"
        with pytest.raises(WireError) as error:
            await peer.tool("scripted", "die")
        assert error.value.data["stderr"].endswith("eeethe endthe last words\n")
        assert len(error.value.data["stderr"]) == 8192
    else:  # the line could have been the reply to the only call
        with pytest.raises(WireError) as error:
            await peer.result(flood)
        assert error.value.reason == "too_long"
        await check_answers(peer)


async def test_server_that_does_not_read_blocks_no_other(peer: DriverPeer) -> None:
    await peer.start(
        peer.scripted_server("deaf", request_seconds=0.5), peer.scripted_server("plain", "other")
    )
    big = "x" * (20 << 20)
    numbers = [await peer.begin_tool("scripted", "text", unit=big) for _ in range(5)]
    await check_answers(peer, "other")
    reasons: list[str] = []
    for number in numbers:
        with pytest.raises(WireError, match=r"does not read|has not answered") as error:
            await peer.result(number)
        reasons.append(error.value.reason)
    assert reasons == ["timeout"] * 3 + ["server"] * 2
