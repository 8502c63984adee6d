"""The bridge, `stdio --url`: messages pass between stdin and stdout and an HTTP server without loss."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import mcp_types as types
import pytest
from anyio.abc import SocketAttribute, SocketStream
from decathlon_client.bridge import address
from mcp import Client, StdioServerParameters, stdio_client
from mcp.shared.exceptions import MCPError

from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.http.authentication import Tokens, new_token
from tests.cli.conftest import COMMAND, Shell, shell
from tests.clients.relay import port_of, relayed
from tests.ports import free_port
from tests.probe.clients import ERAS, refused
from tests.probe.serving import SUITE, Served, serving

__all__ = ["shell"]

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

LARGE_BYTES = 2 << 20
"""More than the SDK's client reads in one event by default."""
CANCELLED = {"command": "until [ -s cancelled.txt ]; do sleep 0.02; done; cat cancelled.txt"}
"""Waits until the cancelled tool has written its note."""


@pytest.fixture
async def served(tmp_path: Path, anyio_backend: object) -> AsyncGenerator[Served]:
    async with serving(tmp_path / "state", provider="host") as served:
        yield served


@asynccontextmanager
async def bridged(
    shell: Shell, *arguments: str, era: str = "handshake", token: str | None = None, **options: Any
) -> AsyncGenerator[Client]:
    """The SDK's client over stdio, connected to a server through the bridge."""
    environment = {**shell.environment, **({"DECATHLON_TOKEN": token} if token else {})}
    command = [*COMMAND[1:], "stdio", *arguments]
    server = StdioServerParameters(command=COMMAND[0], args=command, env=environment, cwd=shell.folder)
    with (shell.folder / "log").open("w") as log:
        async with Client(stdio_client(server, errlog=log), mode=ERAS[era], **options) as client:
            yield client


@pytest.mark.parametrize("era", ERAS)
async def test_an_episode_works_with_progress_cancellation_and_tool_list_changes(
    era: str, shell: Shell, served: Served
) -> None:
    reports: list[tuple[float, str | None]] = []
    changed = anyio.Event()

    async def on_message(message: object) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            changed.set()

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        reports.append((progress, message))

    labels = {"run": "a, b=c%", "model": "größer"}
    texts = [text for name, value in labels.items() for text in ("--label", f"{name}={value}")]
    async with bridged(shell, "--url", served.url, *texts, era=era, message_handler=on_message) as lobby:
        assert lobby.protocol_version == ("2025-11-25" if era == "handshake" else "2026-07-28")
        started = (await lobby.call_tool("start_episode", {"task": "find-answer"})).structured_content
        assert started is not None
        handle = {"episode": started["episode"]}
        assert dict(served.find(started["episode"]).spec.labels) == labels
        if era == "handshake":
            await changed.wait()
            assert "probe__write" in {tool.name for tool in (await lobby.list_tools()).tools}

        async def call(name: str, **arguments: Any) -> Any:
            params = {**handle, "name": f"probe__{name}", "arguments": arguments}
            return (await lobby.call_tool("call_tool", params, progress_callback=on_progress)).content[0]

        assert (await call("count", to=3, pause=0.01)).text == "counted to 3"
        assert [report for report in reports if report[1]] == [(1, "at 1"), (2, "at 2"), (3, "at 3")]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: call("sleep", seconds=100, note="gone"))
            assert (await call("echo", text="quick ✓\u2028 “” ")).text == "quick ✓\u2028 “” "
            await anyio.sleep(0.3)  # the tool must have begun for its being cancelled to be noted
            tasks.cancel_scope.cancel()
        assert (await call("shell", **CANCELLED)).text == "gone\n"
        assert len((await call("echo", text="x" * LARGE_BYTES)).text) == LARGE_BYTES
        await call("write", path="answer.txt", text="42")
        verdict = (await lobby.call_tool("evaluate", handle)).structured_content
        assert verdict is not None
        assert verdict["reward"] == 1.0


VERSION = '"io.modelcontextprotocol/protocolVersion"'
RUDE_LINES = (
    b'{"jsonrpc":"2.0","id":5,"method":"ping","params":{"a":%b}}' % (b"[" * 190 + b"]" * 190),
    b'{"jsonrpc":"2.0","id":5,"method":"ping","params":{"a":%b}}' % (b'{"a":' * 9_000 + b"1" + b"}" * 9_000),
    b'{"jsonrpc":"2.0","id":5,"method":"ping","params":{"a":[%b0]}}' % (b"[]," * 200_000),
    b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":[1]}}',
    *(
        b'{"jsonrpc":"2.0","id":%b,"method":"ping"}' % number
        for number in (b'{"a":1}', b"null", b"true", b"1.5", b"1e400", b"1" * 9_000, b'"\\ud800"')
    ),
    b'{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":[1],"progress":NaN}}',
    b'[{"jsonrpc":"2.0","id":7,"method":"ping"}]',
    b'{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"a","arguments":{"a":NaN,"b":1e999}}}',
    b'{"jsonrpc":"2.0","id":7,"method":"\\u0416\\n","params":{"_meta":{%b:"2026-07-28"}}}' % VERSION.encode(),
    b'{"jsonrpc":"2.0","id":7,"method":"ping","params":{"_meta":{%b:"\\u0416"}}}' % VERSION.encode(),
    b'{"jsonrpc":"2.0","id":7,"method":"ping","params":{"_meta":{%b:"2026-07-28\\r\\nX: y"}}}'
    % VERSION.encode(),
    b'{"jsonrpc":"2.0","id":99,"result":{}}',
    *(
        b'{"jsonrpc":"2.0","id":99,%b"params":{"_meta":{%b:"2026-07-28"}},"result":{}}'
        % (method, VERSION.encode())
        for method in (b"", b'"method":5,')
    ),
    b'{"jsonrpc":"2.0","id":null,"error":{"code":1,"message":"x"}}',
    b'{"jsonrpc":"2.0","id":7,"method":"\xff\xfe"}',
    b'\xef\xbb\xbf{"jsonrpc":"2.0","id":7,"method":"ping"}',
    b"\0\0",
    b"",
    b"a" * (20 << 20),
)
"""Lines that no client should send: depth, ids, versions, methods, encodings, lengths."""


@pytest.mark.parametrize("address", ["bridge", "server"])
@pytest.mark.long
async def test_rude_lines_end_neither_the_bridge_nor_the_stdio_server(
    address: str, shell: Shell, served: Served
) -> None:
    options = ["--url", served.url] if address == "bridge" else ["--suite", SUITE, "--provider", "host"]
    async with await anyio.open_process(
        [*COMMAND, "stdio", *options], env=shell.environment, cwd=shell.folder, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdin
        assert process.stdout
        await process.stdin.send(initialize(1) + line({"method": "notifications/initialized"}))
        for number, rude in enumerate(RUDE_LINES):
            await process.stdin.send(rude + b"\n" + line({"id": f"after-{number}", "method": "ping"}))
            output = b""
            while b'"after-%d"' % number not in output:
                output += await process.stdout.receive()
        await process.stdin.aclose()
        assert await process.wait() == 0


@pytest.mark.parametrize("version", ["2025-03-26", "2025-11-25"])
async def test_each_request_of_a_batch_and_each_that_is_no_message_is_answered(
    version: str, shell: Shell, served: Served
) -> None:
    batch = [{"jsonrpc": "2.0", "id": number, "method": "ping"} for number in ("a", "b")]
    lines = [
        b"\xef\xbb\xbf" + initialize(1, version),
        line({"method": "notifications/initialized"}),
        json.dumps([*batch, {"jsonrpc": "2.0", "method": "notifications/none"}]).encode() + b"\n",
        b'{"id":"c","method":"ping"}\n',
        b'{"jsonrpc":"2.0","id":"d","result":5}\n',
        line({"id": "e", "method": "ping"}),
    ]
    async with await anyio.open_process(
        [*COMMAND, "stdio", "--url", served.url], env=shell.environment, cwd=shell.folder
    ) as bridge:
        assert bridge.stdin
        assert bridge.stdout
        await bridge.stdin.send(b"".join(lines))
        output = b""
        with anyio.fail_after(30):
            while len(output.splitlines()) < 6 or not output.endswith(b"\n"):
                output += await bridge.stdout.receive()
        await bridge.stdin.aclose()
        assert await bridge.wait() == 0
    answers = {answer["id"]: answer for answer in map(json.loads, output.splitlines())}
    assert set(answers) == {1, "a", "b", "c", "e", None}
    assert "result" in answers["e"]
    assert {"result" in answers[number] for number in ("a", "b")} == {version == "2025-03-26"}
    assert answers["c"]["error"]["code"] == types.PARSE_ERROR


@pytest.mark.parametrize("end", ["SIGTERM", "eof"])
async def test_replies_pass_unchanged_and_the_end_of_stdin_or_sigterm_ends_the_episode(
    end: str, shell: Shell, served: Served
) -> None:
    request = {"method": "tools/call", "params": {"name": "probe__odd", "_meta": {"progressToken": 1}}}
    async with await anyio.open_process(
        [*COMMAND, "stdio", "--url", served.task("find-answer")],
        env=shell.environment,
        cwd=shell.folder,
        stderr=subprocess.DEVNULL,
    ) as bridge:
        assert bridge.stdin
        assert bridge.stdout
        ready = line({"method": "notifications/initialized"})
        await bridge.stdin.send(initialize(1) + ready)
        # What is not JSON for every server is refused and not called.
        echo = b'{"jsonrpc":"2.0","id":"e","method":"tools/call","params":%b}\n'
        for value in (b"NaN", b"1e400", b'[{"a": Infinity}]', b"[" * 150 + b"]" * 150):
            params = b'{"name":"probe__echo","arguments":{"text":%b}}' % value
            await bridge.stdin.send(echo % params)
        output = b""
        while output.count(b'"id":"e"') < 4:
            output += await bridge.stdout.receive()
        (episode,) = served.episodes.live
        assert episode.calls.sent == 0
        await bridge.stdin.send(line({"id": "o", **request}) + b"no JSON\n")
        while b'"mood"' not in output or b"not a JSON-RPC message" not in output:
            output += await bridge.stdout.receive()
        if end == "eof":
            await bridge.stdin.aclose()
        else:
            bridge.send_signal(signal.SIGTERM)
        assert await bridge.wait() == 0
        await episode.state.reach(Phase.ENDED)
    messages = [json.loads(line) for line in output.splitlines()]
    assert {message["jsonrpc"] for message in messages} == {"2.0"}
    refusals = [message["error"]["code"] for message in messages if message.get("id") == "e"]
    assert refusals == [types.INVALID_PARAMS] * 4
    result = next(message["result"] for message in messages if message.get("id") == "o")
    assert result["content"][0] == {"type": "text", "text": "a hologram", "depth": 3, "frames": [1, 2]}
    assert result["mood"] == "cheerful"


async def test_the_bridge_ends_while_initialize_has_no_answer(shell: Shell) -> None:
    received = anyio.Event()

    async def never_answer(stream: SocketStream) -> None:
        async with stream:
            await stream.receive()
            received.set()
            await anyio.sleep_forever()

    async with answering(never_answer) as url:
        command = [*COMMAND, "stdio", "--url", url]
        async with await anyio.open_process(command, env=shell.environment, cwd=shell.folder) as bridge:
            assert bridge.stdin
            await bridge.stdin.send(initialize(1))
            await received.wait()
            bridge.send_signal(signal.SIGTERM)
            with anyio.fail_after(30):
                assert await bridge.wait() == 0


async def test_the_bridge_ends_when_nobody_reads_its_answers(shell: Shell) -> None:
    command = [*COMMAND, "stdio", "--url", f"http://127.0.0.1:{free_port()}"]
    reader, stdout = os.pipe()
    os.close(reader)
    async with await anyio.open_process(
        command, env=shell.environment, cwd=shell.folder, stdout=stdout, stderr=subprocess.DEVNULL
    ) as bridge:
        os.close(stdout)
        assert bridge.stdin
        await bridge.stdin.send(line({"id": "p", "method": "ping"}))
        with anyio.fail_after(30):
            assert await bridge.wait() == 0  # as every command whose output nobody reads


@pytest.mark.parametrize("origin", ["", "http://127.0.0.2:9"])
async def test_a_redirect_is_followed_within_the_servers_origin_only(origin: str, shell: Shell) -> None:
    """Elsewhere the token, and the arguments of calls, would reach somebody else."""
    paths, output = list[bytes](), b""
    moved = f"HTTP/1.1 307 Moved\r\nLocation: {origin}/below/mcp\r\n".encode(), b""
    found = (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n",
        b'{"jsonrpc":"2.0","id":"p","result":{}}',
    )

    async def redirect(stream: SocketStream) -> None:
        request = b""
        async with stream:
            with suppress(anyio.EndOfStream):
                while not request.endswith(b"}"):
                    request += await stream.receive()
                paths.append(request.split()[1])
                head, body = moved if paths[-1] == b"/mcp" else found
                head += b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
                await stream.send(head + body)

    async with answering(redirect) as url:
        command = [*COMMAND, "stdio", "--url", url]
        async with await anyio.open_process(command, env=shell.environment, cwd=shell.folder) as bridge:
            assert bridge.stdin
            assert bridge.stdout
            await bridge.stdin.send(line({"id": "p", "method": "ping"}) * 2)
            while output.count(b"\n") < 2:
                output += await bridge.stdout.receive()
            await bridge.stdin.aclose()
            await bridge.wait()
    replies = [json.loads(line) for line in output.splitlines()]
    if origin:
        assert all(f"redirects to {origin}/below/mcp" in reply["error"]["message"] for reply in replies)
    else:
        assert replies == [json.loads(found[1])] * 2
    assert set(paths) == ({b"/mcp"} if origin else {b"/mcp", b"/below/mcp"})


@pytest.mark.long
@pytest.mark.parametrize(("version", "session"), [("\u0416", b"a"), ("1\r\nX: y", b"a"), ("1", b"\xc3\xa4")])
async def test_values_of_a_server_that_no_header_can_have_are_not_sent_back(
    version: str, session: bytes, shell: Shell
) -> None:
    async def answer(stream: SocketStream) -> None:
        request = b""
        async with stream:
            with suppress(anyio.EndOfStream):
                while not request.endswith(b"}"):
                    request += await stream.receive()
                message = json.loads(request.partition(b"\r\n\r\n")[2])
                result = {"protocolVersion": version} if message["method"] == "initialize" else {}
                body = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}).encode()
                head = (
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nMcp-Session-Id: %b\r\n" % session
                )
                await stream.send(
                    head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
                )

    listener, output = await anyio.create_tcp_listener(local_host="127.0.0.1"), b""
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer)
        url = f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
        command = [*COMMAND, "stdio", "--url", url]
        async with await anyio.open_process(command, env=shell.environment, cwd=shell.folder) as bridge:
            assert bridge.stdin
            assert bridge.stdout
            await bridge.stdin.send(initialize(1) + line({"id": "p", "method": "ping"}))
            while output.count(b"\n") < 2:
                output += await bridge.stdout.receive()
            await bridge.stdin.aclose()
            assert await bridge.wait() == 0
        tasks.cancel_scope.cancel()
    assert [json.loads(line).get("result") for line in output.splitlines()] == [
        {"protocolVersion": version},
        {},
    ]


async def test_the_servers_errors_reach_the_client(shell: Shell, tmp_path: Path) -> None:
    secret, line = new_token("alice", "player")
    (tmp_path / "tokens").write_text(line)
    tokens = Tokens.read(tmp_path / "tokens")
    async with serving(tmp_path / "state", tokens=tokens, provider="host") as served:
        with connection_fails("a token is needed"):
            async with bridged(shell, "--url", served.url):
                pass
        shell.environment["DECATHLON_URL"] = served.url
        async with bridged(shell, token=secret) as lobby:
            assert (await lobby.list_tools()).tools
            assert "there is no task 'find-anser'" in await refused(lobby, "start_episode", task="find-anser")
    assert secret not in (shell.folder / "log").read_text()


async def test_a_lobby_session_that_the_server_forgot_is_renewed_and_a_tasks_session_is_not(
    shell: Shell, served: Served, tmp_path: Path
) -> None:
    async with (
        serving(tmp_path / "next", provider="host") as following,
        relayed(served) as (relay, url),
        bridged(shell, "--url", url) as lobby,
        bridged(shell, "--url", url, "--task", "find-answer") as task,
    ):
        assert (await lobby.list_tools()).tools
        assert (await task.list_tools()).tools
        relay.port = port_of(following)
        await relay.cut()
        started = await lobby.call_tool("start_episode", {"task": "find-answer"})
        assert started.structured_content is not None
        with pytest.raises(MCPError, match="ended this session and its episode; start a new one"):
            await task.call_tool("probe__echo", {"text": ""})


@pytest.mark.long
async def test_the_stream_of_notifications_is_opened_again_however_often_it_breaks(
    shell: Shell, served: Served
) -> None:
    changed = anyio.Event()

    async def on_message(message: object) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            changed.set()

    async with relayed(served) as (relay, url):
        async with bridged(shell, "--url", url, message_handler=on_message) as lobby:
            for _ in range(3):
                await lobby.list_tools()
                await relay.cut()
                await relay.connected.wait()
            await lobby.call_tool("start_episode", {"task": "find-answer"})
            await changed.wait()


@pytest.mark.parametrize("era", ERAS)
async def test_a_call_is_sent_again_after_its_connection_was_cut_or_refused(
    era: str, shell: Shell, served: Served
) -> None:
    cuts = [True]

    async def cut_once(progress: float, total: float | None, message: str | None) -> None:
        if message and cuts:
            cuts.pop()
            await relay.cut()

    async def listen_later() -> None:
        await anyio.sleep(1)
        await relay.listen()

    async with relayed(served) as (relay, url), anyio.create_task_group() as tasks:
        async with bridged(shell, "--url", url, "--task", "find-answer", era=era) as client:
            before = len(relay.operations)
            counting = {"to": 2, "pause": 0.3}
            counted = await client.call_tool("probe__count", counting, progress_callback=cut_once)
            assert counted.content == [types.TextContent(text="counted to 2")]
            operations = relay.operations[before:]
            assert len(operations) == 2
            assert len(set(operations)) == 1
            await relay.refuse()
            tasks.start_soon(listen_later)
            echoed = await client.call_tool("probe__echo", {"text": "after"})
            assert echoed.content == [types.TextContent(text="after")]


async def test_an_argument_that_belongs_in_a_header_is_repeated_there(shell: Shell, tmp_path: Path) -> None:
    suite = str(Path(SUITE).parents[1] / "conformance" / "suite")
    async with serving(tmp_path / "state", provider="host", suite=(suite,)) as served:
        async with bridged(shell, "--url", served.task("everything"), era="sessionless") as client:
            # A server refuses a call that lacks the header.
            result = await client.call_tool("test_x_mcp_header", {"region": "north"})
            assert not result.is_error


async def test_the_bridge_runs_without_the_servers_packages(shell: Shell) -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('cyclopts', 'yaml', 'docker', 'rich')));"
        "from decathlon_mcp.cli import main; main()"
    )
    done = await anyio.run_process(
        [sys.executable, "-c", code, "stdio"],
        input=initialize(1),
        env={**shell.environment, "DECATHLON_URL": "http://127.0.0.1:1"},
        cwd=shell.folder,
    )
    assert "no server answers at http://127.0.0.1:1/mcp" in json.loads(done.stdout)["error"]["message"]


@pytest.mark.parametrize(
    ("url", "task", "expected"),
    [
        ("http://host:1", None, "http://host:1/mcp"),
        ("https://host/mcp", "a", "https://host/tasks/a/mcp"),
        ("http://host/tasks/a/mcp?seed=1", None, "http://host/tasks/a/mcp?seed=1"),
        ("http://host/episodes/e/mcp", None, "http://host/episodes/e/mcp"),
    ],
)
async def test_address_completes_a_servers_url(url: str, task: str | None, expected: str) -> None:
    assert address(url, task) == expected


@asynccontextmanager
async def answering(handle: Callable[[SocketStream], Awaitable[None]]) -> AsyncGenerator[str]:
    """The URL of a server that treats each connection so."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, handle)
        yield f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
        tasks.cancel_scope.cancel()


def connection_fails(message: str) -> AbstractContextManager[object]:
    """Expects that the client cannot connect, with that message."""
    return pytest.RaisesGroup(pytest.RaisesExc(MCPError, match=re.escape(message)), flatten_subgroups=True)


def line(message: dict[str, Any]) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"


def initialize(number: int, version: str = "2025-11-25") -> bytes:
    client = {"name": "test", "version": "1"}
    params = {"protocolVersion": version, "capabilities": {}, "clientInfo": client}
    return line({"id": number, "method": "initialize", "params": params})
