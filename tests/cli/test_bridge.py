"""`stdio --url`: a bridge between a client on stdin and stdout and a server over HTTP."""

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
"""Waits for the note that the tool writes when it is cancelled."""


@pytest.fixture
async def served(tmp_path: Path, anyio_backend: object) -> AsyncGenerator[Served]:
    async with serving(tmp_path / "state", provider="local") as served:
        yield served


@asynccontextmanager
async def connect_bridge(
    shell: Shell, *words: str, era: str = "handshake", token: str | None = None, **options: Any
) -> AsyncGenerator[Client]:
    """Connect the SDK's client over stdio to a bridge."""
    environment = {**shell.environment, **({"DECATHLON_TOKEN": token} if token else {})}
    arguments = [*COMMAND[1:], "stdio", *words]
    server = StdioServerParameters(command=COMMAND[0], args=arguments, env=environment, cwd=shell.folder)
    with (shell.folder / "log").open("w") as log:
        async with Client(stdio_client(server, errlog=log), mode=ERAS[era], **options) as client:
            yield client


@pytest.mark.parametrize("era", ERAS)
async def test_an_episode_with_progress_cancellation_and_a_changing_tool_list(
    era: str, shell: Shell, served: Served
) -> None:
    progress_reports: list[tuple[float, str | None]] = []
    changed = anyio.Event()

    async def on_message(message: object) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            changed.set()

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        progress_reports.append((progress, message))

    async with connect_bridge(shell, "--url", served.url, era=era, message_handler=on_message) as lobby:
        assert lobby.protocol_version == ("2025-11-25" if era == "handshake" else "2026-07-28")
        started = (await lobby.call_tool("start_episode", {"task": "find-answer"})).structured_content
        assert started is not None
        handle = {"episode": started["episode"]}
        if era == "handshake":
            await changed.wait()
            assert "probe__write" in {tool.name for tool in (await lobby.list_tools()).tools}

        async def call(name: str, **arguments: Any) -> Any:
            params = {**handle, "name": f"probe__{name}", "arguments": arguments}
            return (await lobby.call_tool("call_tool", params, progress_callback=on_progress)).content[0]

        assert (await call("count", to=3, pause=0.01)).text == "counted to 3"
        assert [report for report in progress_reports if report[1]] == [(1, "at 1"), (2, "at 2"), (3, "at 3")]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: call("sleep", seconds=100, note="gone"))
            assert (await call("echo", text="quick ✓\u2028 “” ")).text == "quick ✓\u2028 “” "
            await anyio.sleep(0.3)  # the tool can only note the cancellation if it has started
            tasks.cancel_scope.cancel()
        assert (await call("shell", **CANCELLED)).text == "gone\n"
        await call("write", path="answer.txt", text="42")
        verdict = (await lobby.call_tool("evaluate", handle)).structured_content
        assert verdict is not None
        assert verdict["reward"] == 1.0


async def test_a_tasks_address_opens_an_episode_that_ends_with_the_client(
    shell: Shell, served: Served
) -> None:
    async with connect_bridge(
        shell, "--url", served.url, "--task", "find-answer", era="sessionless"
    ) as client:
        assert client.protocol_version == "2025-11-25"
        assert "answer.txt" in (client.instructions or "")
        await client.call_tool("probe__write", {"path": "answer.txt", "text": "42"})
        (episode,) = served.episodes.live
        await client.call_tool("claim_done")
        assert (await client.call_tool("evaluate")).structured_content["reward"] == 1.0  # pyright: ignore[reportOptionalSubscript]
    await episode.state.reach(Phase.ENDED)


@pytest.mark.parametrize("end", ["SIGTERM", "eof"])
async def test_replies_pass_unchanged_and_the_end_of_stdin_ends_the_episode(
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
        await bridge.stdin.send(_initialize(1) + ready + _line({"id": "o", **odd}) + b"no JSON\n")
        output = b""
        while b'"mood"' not in output or b"not JSON" not in output:
            output += await bridge.stdout.receive()
        (episode,) = served.episodes.live
        if end == "eof":
            await bridge.stdin.aclose()
        else:
            bridge.send_signal(signal.SIGTERM)
        assert await bridge.wait() == 0
        await episode.state.reach(Phase.ENDED)
    messages = [json.loads(line) for line in output.splitlines()]
    assert {message["jsonrpc"] for message in messages} == {"2.0"}
    result = next(message["result"] for message in messages if message.get("id") == "o")
    assert result["content"][0] == {"type": "hologram", "depth": 3, "frames": [1, 2]}
    assert result["mood"] == "cheerful"


async def test_errors_of_the_server_reach_the_client(shell: Shell, tmp_path: Path) -> None:
    secret, line = new_token("alice", "player")
    (tmp_path / "tokens").write_text(line)
    tokens = Tokens.read(tmp_path / "tokens")
    async with serving(tmp_path / "state", tokens=tokens, provider="local") as served:
        with _raises_mcp_error("a token is needed"):
            async with connect_bridge(shell, "--url", served.url):
                pass
        async with connect_bridge(shell, "--url", served.url, token=secret) as lobby:
            assert (await lobby.list_tools()).tools
            with pytest.raises(MCPError, match="there is no task 'find-anser'"):
                await lobby.call_tool("start_episode", {"task": "find-anser"})
    assert secret not in (shell.folder / "log").read_text()


async def test_an_unreachable_server_is_an_error(shell: Shell) -> None:
    with _raises_mcp_error("no server answers at http://127.0.0.1:1/mcp"):
        async with connect_bridge(shell, "--url", "http://127.0.0.1:1"):
            pass


async def test_a_lobby_continues_after_a_restart_of_its_server(shell: Shell, tmp_path: Path) -> None:
    async with RestartableServer(tmp_path) as server, connect_bridge(shell, "--url", server.url) as lobby:
        assert (await lobby.list_tools()).tools
        await server.restart()
        started = await lobby.call_tool("start_episode", {"task": "find-answer"})
        assert started.structured_content is not None


class RestartableServer:
    """A server that can be stopped and started again at the same address."""

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

    async def __aenter__(self) -> RestartableServer:
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


async def test_the_bridge_needs_no_package_of_the_server(shell: Shell) -> None:
    only_client = (
        "import sys; sys.modules.update(dict.fromkeys(('cyclopts', 'yaml', 'docker', 'rich')));"
        "sys.argv = ['decathlon-mcp', 'stdio', '--url', 'http://127.0.0.1:1'];"
        "from decathlon_mcp.cli import main; main()"
    )
    done = await anyio.run_process(
        [sys.executable, "-c", only_client], input=_initialize(1), env=shell.environment, cwd=shell.folder
    )
    assert "no server answers at http://127.0.0.1:1/mcp" in json.loads(done.stdout)["error"]["message"]


@pytest.mark.parametrize(
    ("url", "task", "expected"),
    [
        ("http://host:1", None, "http://host:1/mcp"),
        ("http://host:1/", None, "http://host:1/mcp"),
        ("https://host/mcp", "a", "https://host/tasks/a/mcp"),
        ("http://host/tasks/a/mcp?seed=1", None, "http://host/tasks/a/mcp?seed=1"),
        ("http://host/episodes/e/mcp", None, "http://host/episodes/e/mcp"),
    ],
)
async def test_address_is_the_lobbys_or_a_tasks(url: str, task: str | None, expected: str) -> None:
    assert address(url, task) == expected


@pytest.mark.parametrize("url", ["host:8765", "", "ftp://host", "http:///mcp"])
async def test_a_url_that_is_not_a_servers_is_an_error(url: str) -> None:
    with pytest.raises(BadRequestError, match="not the address of a server"):
        address(url)


async def test_events_are_parsed_across_any_chunk_boundaries() -> None:
    stream = (
        b": hello\r\nid: 1\r\ndata:\r\n\r\nevent: message\r\ndata: {}\r\n\r\ndata: [1,\ndata: 2]\n\ndata: cut"
    )

    async def chunks(size: int) -> AsyncGenerator[bytes]:
        for start in range(0, len(stream), size):
            yield stream[start : start + size]

    for size in range(1, len(stream) + 1):
        assert [data async for data in events(chunks(size))] == [b"{}", b"[1,\n2]"]


def _raises_mcp_error(text: str) -> AbstractContextManager[object]:
    """Expect an MCPError with this text, in any exception group."""
    return pytest.RaisesGroup(pytest.RaisesExc(MCPError, match=re.escape(text)), flatten_subgroups=True)


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"


def _initialize(number: int) -> bytes:
    client = {"name": "test", "version": "1"}
    params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client}
    return _line({"id": number, "method": "initialize", "params": params})
