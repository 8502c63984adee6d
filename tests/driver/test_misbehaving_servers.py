"""Servers that misbehave: only that call or that server fails, and nothing else is affected."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tests.driver.peer import DriverPeer, WireError, driver, stdio_server

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def check_answers(peer: DriverPeer, server: str = "scripted") -> None:
    """The server still answers."""
    assert await peer.text(server, "text", unit="ok", times=1) == "ok"


# at the start


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
    await peer.start(peer.scripted_server("plain"))
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


async def test_noise_before_the_handshake_is_ignored(peer: DriverPeer) -> None:
    await peer.start(peer.scripted_server("noisy"))
    await check_answers(peer)


# in a call


@pytest.fixture(scope="module")
async def plain(anyio_backend: object) -> AsyncGenerator[DriverPeer]:
    """A driver whose server answers, for tests that end neither."""
    async with driver(sys.executable) as peer:
        await peer.start(peer.scripted_server("plain"))
        yield peer


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


async def test_reply_over_the_limit_of_its_call_is_an_error(plain: DriverPeer) -> None:
    with pytest.raises(WireError, match=r"has \d+ bytes, more than the limit of 1000 bytes") as error:
        await call_text(plain, 1000, max_bytes=1000)
    assert error.value.reason == "too_long"
    assert "result" in await call_text(plain, 10, max_bytes=1000)
    long = await call_text(plain, 4_000_000, max_bytes=30_000_000)
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
