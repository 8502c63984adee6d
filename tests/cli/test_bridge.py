"""`stdio --url`: a client of stdin and stdout, and a server elsewhere, with nothing lost between them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import mcp_types as types
import pytest
from decathlon_client.bridge import address
from decathlon_client.sse import events
from mcp import Client, StdioServerParameters, stdio_client
from mcp.shared.exceptions import MCPError

from decathlon_mcp.app import bootstrap
from decathlon_mcp.background import background_tasks
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.http.application import http_app
from decathlon_mcp.http.authentication import Tokens, new_token
from decathlon_mcp.http.server import listen, serve_http
from decathlon_mcp.settings import Settings
from tests.cli.conftest import COMMAND
from tests.probe.clients import ERAS
from tests.probe.serving import SUITE, Served, serving

if TYPE_CHECKING:
    from tests.cli.conftest import Shell

pytestmark = pytest.mark.anyio

CANCELLED = {"command": "until [ -s cancelled.txt ]; do sleep 0.02; done; cat cancelled.txt"}
"""Waits for what the tool notes when it was cancelled."""


@pytest.fixture
async def served(tmp_path: Path, anyio_backend: object) -> AsyncGenerator[Served]:
    async with serving(tmp_path / "state", provider="local") as served:
        yield served


@asynccontextmanager
async def bridged(
    shell: Shell, *words: str, era: str = "handshake", token: str | None = None, **options: Any
) -> AsyncGenerator[Client]:
    """The SDK's client over stdio, and the bridge between it and a server."""
    environment = {**shell.environment, **({"DECATHLON_TOKEN": token} if token else {})}
    arguments = [*COMMAND[1:], "stdio", *words]
    server = StdioServerParameters(command=COMMAND[0], args=arguments, env=environment, cwd=shell.folder)
    with (shell.folder / "log").open("w") as log:
        async with Client(stdio_client(server, errlog=log), mode=ERAS[era], **options) as client:
            yield client


@pytest.mark.parametrize("era", ERAS)
async def test_an_episode_is_played_with_progress_cancellation_and_a_list_that_changes(
    era: str, shell: Shell, served: Served
) -> None:
    heard: list[tuple[float, str | None]] = []
    changed = anyio.Event()

    async def note(message: object) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            changed.set()

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append((progress, message))

    async with bridged(shell, "--url", served.url, era=era, message_handler=note) as lobby:
        assert lobby.protocol_version == ("2025-11-25" if era == "handshake" else "2026-07-28")
        started = (await lobby.call_tool("start_episode", {"task": "find-answer"})).structured_content
        assert started is not None
        handle = {"episode": started["episode"]}
        if era == "handshake":
            await changed.wait()
            assert "probe__write" in {tool.name for tool in (await lobby.list_tools()).tools}

        async def call(name: str, **arguments: Any) -> Any:
            asked = {**handle, "name": f"probe__{name}", "arguments": arguments}
            return (await lobby.call_tool("call_tool", asked, progress_callback=hear)).content[0]

        assert (await call("count", to=3, pause=0.01)).text == "counted to 3"
        assert [said for said in heard if said[1]] == [(1, "at 1"), (2, "at 2"), (3, "at 3")]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: call("sleep", seconds=100, note="gone"))
            assert (await call("echo", text="quick ✓\u2028 “” ")).text == "quick ✓\u2028 “” "
            await anyio.sleep(0.3)  # the tool must have begun for its being cancelled to be noted
            tasks.cancel_scope.cancel()
        assert (await call("shell", **CANCELLED)).text == "gone\n"
        await call("write", path="answer.txt", text="42")
        verdict = (await lobby.call_tool("evaluate", handle)).structured_content
        assert verdict is not None
        assert verdict["reward"] == 1.0


async def test_a_tasks_address_is_an_episode_that_ends_with_the_client(shell: Shell, served: Served) -> None:
    async with bridged(shell, "--url", served.url, "--task", "find-answer", era="sessionless") as client:
        assert client.protocol_version == "2025-11-25"
        assert "answer.txt" in (client.instructions or "")
        await client.call_tool("probe__write", {"path": "answer.txt", "text": "42"})
        (episode,) = served.episodes.live
        await client.call_tool("claim_done")
        assert (await client.call_tool("evaluate")).structured_content["reward"] == 1.0  # pyright: ignore[reportOptionalSubscript]
    await episode.state.reach(Phase.ENDED)


@pytest.mark.parametrize("end", ["SIGTERM", "eof"])
async def test_what_a_tool_answers_passes_as_it_came_and_the_end_of_stdin_ends_the_episode(
    end: str, shell: Shell, served: Served
) -> None:
    odd = {"method": "tools/call", "params": {"name": "probe__odd", "_meta": {"progressToken": 1}}}
    async with await anyio.open_process(
        [*COMMAND, "stdio", "--url", served.task("find-answer")],
        env=shell.environment,
        cwd=shell.folder,
        stderr=subprocess.DEVNULL,
    ) as bridge:
        assert bridge.stdin
        assert bridge.stdout
        ready = _line({"method": "notifications/initialized"})
        await bridge.stdin.send(_hello(1) + ready + _line({"id": "o", **odd}) + b"no JSON\n")
        said = b""
        while b'"mood"' not in said or b"not JSON" not in said:
            said += await bridge.stdout.receive()
        (episode,) = served.episodes.live
        if end == "eof":
            await bridge.stdin.aclose()
        else:
            bridge.send_signal(signal.SIGTERM)
        assert await bridge.wait() == 0
        await episode.state.reach(Phase.ENDED)
    told = [json.loads(line) for line in said.splitlines()]
    assert {message["jsonrpc"] for message in told} == {"2.0"}
    result = next(message["result"] for message in told if message.get("id") == "o")
    assert result["content"][0] == {"type": "hologram", "depth": 3, "frames": [1, 2]}
    assert result["mood"] == "cheerful"


async def test_refusals_reach_the_client_in_the_servers_words(shell: Shell, tmp_path: Path) -> None:
    secret, line = new_token("alice", "player")
    (tmp_path / "tokens").write_text(line)
    tokens = Tokens.read(tmp_path / "tokens")
    async with serving(tmp_path / "state", tokens=tokens, provider="local") as served:
        with _failing("a token is needed"):
            async with bridged(shell, "--url", served.url):
                pass
        async with bridged(shell, "--url", served.url, token=secret) as lobby:
            assert (await lobby.list_tools()).tools
            with pytest.raises(MCPError, match="there is no task 'find-anser'"):
                await lobby.call_tool("start_episode", {"task": "find-anser"})
    assert secret not in (shell.folder / "log").read_text()


async def test_a_server_that_is_not_there_is_told(shell: Shell) -> None:
    with _failing("no server answers at http://127.0.0.1:1/mcp"):
        async with bridged(shell, "--url", "http://127.0.0.1:1"):
            pass


async def test_a_lobby_goes_on_after_its_server_was_started_anew(shell: Shell, tmp_path: Path) -> None:
    async with AsyncServer(tmp_path) as server, bridged(shell, "--url", server.url) as lobby:
        assert (await lobby.list_tools()).tools
        await server.restart()
        started = await lobby.call_tool("start_episode", {"task": "find-answer"})
        assert started.structured_content is not None


class AsyncServer:
    """A server that can be ended and started again at the same address."""

    def __init__(self, folder: Path) -> None:
        self._settings = Settings.model_validate(
            {"suite": (SUITE,), "provider": "local", "state": folder / "state", "drain_seconds": 5}
        )
        self._port = 0
        self._stack = anyio.create_task_group()
        self._stop = anyio.Event()
        self._stopped = anyio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> AsyncServer:
        await self._stack.__aenter__()
        await self._stack.start(self._serve)
        return self

    async def __aexit__(self, *failure: Any) -> None:
        self._stop.set()
        await self._stack.__aexit__(*failure)

    async def restart(self) -> None:
        self._stop.set()
        await self._stopped.wait()
        self._stop, self._stopped = anyio.Event(), anyio.Event()
        await self._stack.start(self._serve)

    async def _serve(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        listener = listen("127.0.0.1", self._port)
        self._port = listener.getsockname()[1]
        stop, stopped = self._stop, self._stopped
        async with bootstrap(self._settings) as episodes, background_tasks():
            ready = task_status.started
            await serve_http(http_app(episodes), listener, drain=episodes.drain, on_ready=ready, stop=stop)
        stopped.set()


async def test_it_wants_no_package_of_the_servers(shell: Shell) -> None:
    only_client = (
        "import sys; sys.modules.update(dict.fromkeys(('cyclopts', 'yaml', 'docker', 'rich')));"
        "sys.argv = ['decathlon-mcp', 'stdio', '--url', 'http://127.0.0.1:1'];"
        "from decathlon_mcp.cli import main; main()"
    )
    done = await anyio.run_process(
        [sys.executable, "-c", only_client], input=_hello(1), env=shell.environment, cwd=shell.folder
    )
    assert "no server answers at http://127.0.0.1:1/mcp" in json.loads(done.stdout)["error"]["message"]


@pytest.mark.parametrize(
    ("given", "task", "found"),
    [
        ("http://host:1", None, "http://host:1/mcp"),
        ("http://host:1/", None, "http://host:1/mcp"),
        ("https://host/mcp", "a", "https://host/tasks/a/mcp"),
        ("http://host/tasks/a/mcp?seed=1", None, "http://host/tasks/a/mcp?seed=1"),
        ("http://host/episodes/e/mcp", None, "http://host/episodes/e/mcp"),
    ],
)
async def test_an_address_is_found(given: str, task: str | None, found: str) -> None:
    assert address(given, task) == found


@pytest.mark.parametrize("given", ["host:8765", "", "ftp://host", "http:///mcp"])
async def test_what_is_no_address_is_said(given: str) -> None:
    with pytest.raises(BadRequestError, match="not the address of a server"):
        address(given)


async def test_events_are_found_however_they_are_cut() -> None:
    stream = (
        b": hello\r\nid: 1\r\ndata:\r\n\r\nevent: message\r\ndata: {}\r\n\r\ndata: [1,\ndata: 2]\n\ndata: cut"
    )

    async def chunks(size: int) -> AsyncGenerator[bytes]:
        for start in range(0, len(stream), size):
            yield stream[start : start + size]

    for size in range(1, len(stream) + 1):
        assert [data async for data in events(chunks(size))] == [b"{}", b"[1,\n2]"]


def _failing(words: str) -> AbstractContextManager[object]:
    """The client could not connect, for that reason."""
    return pytest.RaisesGroup(pytest.RaisesExc(MCPError, match=re.escape(words)), flatten_subgroups=True)


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"


def _hello(number: int) -> bytes:
    client = {"name": "test", "version": "1"}
    params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client}
    return _line({"id": number, "method": "initialize", "params": params})
