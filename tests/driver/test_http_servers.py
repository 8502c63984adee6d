"""Task servers reached by URL: streamable HTTP and the older HTTP+SSE transport."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest
from anyio.streams.text import TextReceiveStream
from decathlon_sandbox import wire

from tests.driver.peer import BOUND_SECONDS, SERVERS, DriverPeer, WireError, until

pytestmark = pytest.mark.anyio


class WebServer:
    """A web server in its own process. It prints its URL, then other lines."""

    def __init__(self, process: anyio.abc.Process) -> None:
        assert process.stdout is not None
        self.process = process
        self.url = ""
        self._output = TextReceiveStream(process.stdout)
        self._rest = ""

    async def line(self) -> str:
        with anyio.fail_after(BOUND_SECONDS):
            while "\n" not in self._rest:
                self._rest += await self._output.receive()
        line, _, self._rest = self._rest.partition("\n")
        return line

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    def settings(self, kind: str = "streamable_http", **params: Any) -> dict[str, Any]:
        return {"name": "web", "type": kind, "url": self.url, "headers": {}, "request_seconds": 30, **params}


@asynccontextmanager
async def web_server(program: str, *args: str) -> AsyncGenerator[WebServer]:
    command = [sys.executable, str(SERVERS / program), *args]
    async with await anyio.open_process(command, stdout=subprocess.PIPE, stderr=None) as process:
        server = WebServer(process)
        try:
            server.url = await server.line()
            yield server
        finally:
            server.kill()


KINDS = [("http", "streamable_http"), ("json", "streamable_http"), ("sse", "sse")]


@pytest.mark.parametrize(("program", "kind"), KINDS)
async def test_real_server_answers_concurrent_calls(peer: DriverPeer, program: str, kind: str) -> None:
    async with web_server("sdk.py", program, peer.token) as server:
        info = (await peer.start(server.settings(kind, headers={"X-Mine": "yes"})))["web"]
        assert info["protocolVersion"] == "2025-11-25"
        assert "echo" in {tool["name"] for tool in info["tools"]}
        slow = await peer.begin_tool("web", "sleep", seconds=1000)
        numbers = {
            await peer.begin_tool("web", "echo", words=f"w{count}"): f"w{count}" for count in range(10)
        }
        for number, words in numbers.items():
            assert (await peer.result(number))["result"]["content"][0]["text"] == words
        assert json.loads(await peer.text("web", "headers"))["x-mine"] == "yes"
        big = "é" * 300_000
        assert await peer.text("web", "echo", words=big) == big
        assert slow not in peer.lines
        await peer.cancel(slow)
        await peer.close()
        server.kill()


@pytest.mark.parametrize(("program", "kind"), [KINDS[0], KINDS[2]])
async def test_progress_log_messages_and_cancellation_are_relayed(
    peer: DriverPeer, tmp_path: Path, program: str, kind: str
) -> None:
    async with web_server("sdk.py", program, peer.token) as server:
        await peer.start(server.settings(kind))
        number = await peer.begin_tool("web", "count", meta={"progressToken": "t"}, to=3)
        await peer.result(number)
        steps = [
            params["params"]["progress"] for method, params in peer.notifications if method == wire.PROGRESS
        ]
        assert steps == [1, 2, 3]
        number = await peer.begin_tool("web", "log_message", words="hm")
        await peer.result(number)
        assert (await peer.notification(wire.MESSAGE, id=number))["params"]["data"] == "hm"
        number = await peer.begin_tool("web", "hang", meta={"progressToken": "t"}, note=f"{tmp_path}/note")
        await peer.notification(wire.PROGRESS, id=number)
        await peer.cancel(number)
        with pytest.raises(WireError) as error:
            await peer.result(number)
        assert error.value.reason == "cancelled"
        await until((tmp_path / "note").exists)
        await peer.close()
        server.kill()


@pytest.mark.parametrize(("program", "kind"), [KINDS[0], KINDS[2]])
async def test_changed_tools_are_reported(peer: DriverPeer, program: str, kind: str) -> None:
    async with web_server("sdk.py", program, peer.token) as server:
        await peer.start(server.settings(kind))
        await peer.tool("web", "add_tool")
        assert await peer.notification(wire.CHANGED) == {"server": "web"}
        await peer.close()
        server.kill()


async def test_session_id_is_sent_with_every_request_and_deleted_at_the_end(peer: DriverPeer) -> None:
    async with web_server("scripted_http.py", "plain", peer.token) as plain:
        info = await peer.start(plain.settings())
        assert info["web"]["protocolVersion"] == "2025-06-18"
        seen = (await peer.tool("web", "seen"))["result"]["seen"]
        assert seen == [
            "initialize None None",
            "notifications/initialized s-1 2025-06-18",
            "tools/list s-1 2025-06-18",
            "tools/call s-1 2025-06-18",
        ]
        assert await peer.close() == 0
        assert await plain.line() == "DELETE s-1"
        plain.kill()


async def test_freeze_deletes_http_sessions(peer: DriverPeer) -> None:
    async with web_server("scripted_http.py", "plain") as plain:
        await peer.start(plain.settings())
        await peer.request(wire.FREEZE)
        assert await plain.line() == "DELETE s-1"


async def test_replies_are_relayed_unchanged(peer: DriverPeer) -> None:
    async with web_server("scripted_http.py", "plain") as plain:
        await peer.start(plain.settings())
        for tool in ("pretty", "events"):
            number = await peer.begin_tool("web", tool)
            assert (await peer.result(number))["result"] == {"x-unknown": 1.1}
            assert b'"x-unknown": 1.1' in peer.lines[number]
        assert (await peer.tool("web", "error"))["error"] == {"code": -5, "message": "as a reply"}


async def test_interrupted_stream_is_resumed_at_its_last_event(peer: DriverPeer) -> None:
    async with web_server("scripted_http.py", "plain") as plain:
        await peer.start(plain.settings())
        assert (await peer.tool("web", "resumed"))["result"] == {"resumed": True}


@pytest.mark.parametrize(
    ("tool", "reason", "message"),
    [
        ("other", "server", "something other than the reply"),
        ("nan", "server", "not JSON"),
        ("fault", "server", "HTTP 500: it broke"),
        ("html", "server", "answered with text/html"),
        ("cut", "server", "the response is incomplete"),
        ("silence", "server", "without a reply"),
        ("overlong", "too_long", "more than"),
    ],
)
async def test_invalid_http_response_fails_the_call(
    peer: DriverPeer, tool: str, reason: str, message: str
) -> None:
    async with web_server("scripted_http.py", "plain") as plain:
        await peer.start(plain.settings())
        with pytest.raises(WireError, match=message) as error:
            await peer.tool("web", tool)
        assert error.value.reason == reason
        assert (await peer.tool("web", "pretty"))["result"]


async def test_expired_session_ends_the_server(peer: DriverPeer) -> None:
    async with web_server("scripted_http.py", "plain") as plain:
        await peer.start(plain.settings())
        with pytest.raises(WireError, match="404"):
            await peer.tool("web", "expired")
        with pytest.raises(WireError, match="has ended the session"):
            await peer.tool("web", "pretty")


async def test_sse_server_is_lost_when_its_event_stream_ends(peer: DriverPeer) -> None:
    async with web_server("sdk.py", "sse", peer.token) as server:
        await peer.start(server.settings("sse"))
        number = await peer.begin_tool("web", "hang", meta={"progressToken": 1}, note="/dev/null")
        await peer.notification(wire.PROGRESS, id=number)
        server.kill()
        with pytest.raises(WireError, match=r"closed its event stream|cannot be reached"):
            await peer.result(number)
        with pytest.raises(WireError, match=r"closed its event stream|cannot be reached"):
            await peer.tool("web", "text")


async def test_redirects_are_followed_within_the_origin_only(peer: DriverPeer) -> None:
    async with (
        web_server("scripted_http.py", "moved") as moved,
        web_server("scripted_http.py", "elsewhere") as elsewhere,
    ):
        await peer.start(moved.settings())
        with pytest.raises(WireError, match="redirected to another origin"):
            await peer.start({**elsewhere.settings(), "name": "other"})


@pytest.mark.parametrize("kind", ["streamable_http", "sse"])
@pytest.mark.parametrize("url", ["http://127.0.0.1:1/mcp", "ftp://127.0.0.1/", "nonsense", "http://[/"])
async def test_url_that_cannot_be_reached_fails_the_start(peer: DriverPeer, url: str, kind: str) -> None:
    server: dict[str, Any] = {"name": "web", "type": kind, "url": url, "headers": {}, "request_seconds": 30}
    with pytest.raises(WireError) as error:
        await peer.start(server, deadline_seconds=1)
    assert error.value.reason == "server"
    assert error.value.data["server"] == "web"


async def test_start_waits_for_a_server_that_does_not_listen_yet(peer: DriverPeer, tmp_path: Path) -> None:
    """A task's set-up may have launched it just before."""
    async with web_server("scripted_http.py", "plain") as plain:
        port = plain.url.split(":")[2].split("/")[0]
        plain.kill()
    number = await peer.begin_start(plain.settings(), deadline_seconds=60)
    script = (SERVERS / "scripted_http.py").read_text().replace('("127.0.0.1", 0)', f'("127.0.0.1", {port})')
    (tmp_path / "late.py").write_text(script)
    async with await anyio.open_process([sys.executable, str(tmp_path / "late.py"), "plain"]) as late:
        assert "web" in (await peer.result(number))["servers"]
        await peer.close()
        late.kill()
