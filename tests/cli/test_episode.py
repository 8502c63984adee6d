"""`episode`: a whole attempt from a shell, one process per step."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from decathlon_mcp.cli import console
from decathlon_mcp.http.authentication import Tokens, new_token
from tests.cli.conftest import Shell
from tests.probe.serving import Served, serving

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture
async def served(tmp_path: Path, anyio_backend: object, shell: Shell) -> AsyncGenerator[Served]:
    async with serving(tmp_path / "served", provider="host", max_sandboxes=1, max_queue=0) as served:
        shell.environment["DECATHLON_URL"] = served.url
        yield served


class Steps:
    """Runs steps beside the server in this process."""

    def __init__(self, commands: Shell) -> None:
        self._commands = commands

    async def output(self, *arguments: str, status: int = 0) -> dict[str, Any]:
        """Run a step and return the one JSON value that it prints."""
        done = await anyio.to_thread.run_sync(self._commands.run, "episode", *arguments)
        assert done.returncode == status, done
        assert done.stdout.count("\n") == 1
        assert done.stdout.rstrip("\n").isprintable()
        return json.loads(done.stdout)

    async def error(self, *arguments: str, status: int) -> str:
        """Run a step that must fail, and return its one-line message."""
        return await anyio.to_thread.run_sync(
            partial(self._commands.error, "episode", *arguments, status=status)
        )


@pytest.fixture
def steps(shell: Shell) -> Steps:
    return Steps(shell)


async def test_what_a_sandbox_replies_is_not_obeyed_by_the_terminal(steps: Steps, served: Served) -> None:
    started = await steps.output("start", "find-answer")
    text = "\x1b[31m \x9b31m \x7f ü"
    arguments = json.dumps({"text": text})
    reply = await steps.output("call", started["episode"], "probe__echo", arguments)
    assert reply["content"][0]["text"] == text


async def test_exit_status_tells_a_failed_tool_a_failed_attempt_and_a_full_server_apart(
    served: Served, steps: Steps
) -> None:
    handle = (await steps.output("start", "find-answer", "--label", "run=a"))["episode"]
    assert dict(served.find(handle).spec.labels) == {"run": "a"}
    assert "full" in await steps.error("start", "find-answer", status=75)
    assert (await steps.output("call", handle, "probe__fail", status=3))["isError"] is True
    assert "there is no tool 'nothing'" in await steps.error("call", handle, "nothing", status=1)
    assert (await steps.output("claim", handle, "I give up."))["claimed"] is True
    assert (await steps.output("evaluate", handle, status=4))["reward"] == 0.0
    assert (await steps.output("status", handle))["claimed"] is True
    (listed,) = (await steps.output("list"))["episodes"]
    assert (listed["episode"], listed["task"], listed["claimed"]) == (handle, "find-answer", True)


async def test_the_list_without_a_token_has_what_this_user_started_on_this_server(
    served: Served, steps: Steps, shell: Shell
) -> None:
    handle = (await steps.output("start", "find-answer", "--no-wait"))["episode"]
    listed = (await steps.output("list", "--url", f"{served.url}/mcp"))["episodes"]
    assert [row["episode"] for row in listed] == [handle]
    state = Path(shell.environment["XDG_STATE_HOME"]) / "decathlon-mcp"
    folder = next(state.glob("shell/*"))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / ("f" * 48)).touch()
    assert len((await steps.output("list"))["episodes"]) == 1
    assert [file.name for file in folder.iterdir()] == [handle]
    shell.environment["XDG_STATE_HOME"] = "/dev/null"
    await steps.output("close", handle)
    assert await steps.output("list") == {"episodes": []}


async def test_no_verdict_has_its_own_exit_status(served: Served, steps: Steps) -> None:
    handle = (await steps.output("start", "lost-verdict"))["episode"]
    verdict = await steps.output("evaluate", handle, status=5)
    assert "reward" not in verdict


async def test_an_attempt_can_be_ended_as_truncated(served: Served, steps: Steps) -> None:
    handle = (await steps.output("start", "find-answer", "--max-calls", "9"))["episode"]
    await steps.output("claim", handle, "--truncated", "--turns", "3")
    assert (await steps.output("evaluate", handle, status=4))["truncated"] is True


async def test_an_address_works_as_a_handle_and_arguments_may_come_from_a_file(
    served: Served, steps: Steps, tmp_path: Path, shell: Shell
) -> None:
    started = await steps.output("start", "find-answer", "--no-wait")
    assert "tools" not in started
    shell.environment["DECATHLON_URL"] = "http://127.0.0.1:1"
    assert (await steps.output("tools", started["address"]))["tools"]
    (tmp_path / "arguments").write_text('{"path": "answer.txt", "text": "42"}')
    await steps.output("call", started["address"], "probe__write", f"@{tmp_path / 'arguments'}")
    assert (await steps.output("evaluate", started["address"]))["reward"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("call", "e" * 48, "tool", "[1"), 2, "the arguments are not JSON"),
        (("call", "e" * 48, "tool", "@nowhere"), 2, "nowhere: No such file"),
        (("status", "http://127.0.0.1:1/mcp"), 2, "'http://127.0.0.1:1/mcp' is not an episode: name the"),
        (("status", "http://127.0.0.1:1/episodes/e/mcp"), 2, "is not an episode: name the"),
        (("call", "probe__echo", '{"text": "x"}'), 2, "'probe__echo' is not an episode: name the"),
        (("status", "e" * 48, "--url", "http://127.0.0.1:1"), 1, "no server answers at http://127.0.0.1:1"),
        (("status", "e" * 48), 1, "there is no such episode here"),
        (("start", "find-anser"), 1, "there is no task 'find-anser'"),
    ],
    ids=str,
)
async def test_an_error_is_one_line(
    arguments: tuple[str, ...], status: int, message: str, served: Served, steps: Steps
) -> None:
    assert message in await steps.error(*arguments, status=status)


async def test_a_token_comes_from_the_environment(tmp_path: Path, steps: Steps, shell: Shell) -> None:
    secret, line = new_token("alice", "player")
    (tmp_path / "tokens").write_text(line)
    async with serving(
        tmp_path / "state", tokens=Tokens.read(tmp_path / "tokens"), provider="host"
    ) as served:
        shell.environment["DECATHLON_URL"] = served.url
        assert "a token is needed" in await steps.error("start", "find-answer", status=1)
        shell.environment["DECATHLON_TOKEN"] = "not one"
        assert "DECATHLON_TOKEN: not a token" in await steps.error("start", "find-answer", status=2)
        shell.environment["DECATHLON_TOKEN"] = secret
        handle = (await steps.output("start", "find-answer", "--no-wait"))["episode"]
        assert [row["episode"] for row in (await steps.output("list"))["episodes"]] == [handle]
        await steps.output("close", handle)


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class HangingServer:
    """Holds every request until its health was asked for three times, and answers only the second time."""

    def __init__(self) -> None:
        self._questions = 0
        self._done = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self._questions += head.startswith(b"GET /healthz ")
        if self._questions == 2:
            writer.write(OK)
        else:
            if self._questions == 3:
                self._done.set()
            await self._done.wait()
        writer.close()
        await writer.wait_closed()


async def test_a_command_says_that_its_server_is_away_and_that_it_is_back(
    monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    monkeypatch.setattr(console, "QUIET_SECONDS", 0.05)
    monkeypatch.setattr(console, "ANSWER_SECONDS", 0.5)
    async with await asyncio.start_server(HangingServer().serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        url = f"http://{host}:{port}"
        done = await anyio.to_thread.run_sync(shell.run, "episode", "status", "e" * 48, "--url", url)
    assert done.returncode == 1
    assert done.stderr.splitlines()[:2] == [
        f"decathlon-mcp: the server at {url} does not answer; this command waits for it",
        f"decathlon-mcp: the server at {url} answers again",
    ]
