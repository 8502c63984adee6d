"""What clients of other SDKs notice when the server dies: `docs/results/killed-servers.md`.

Not part of the normal test run, because it installs the libraries and takes about twenty minutes. To run it:

    python -m pytest tests/survival/other_clients.py

Each client is a program of `programs/` with its real library. It takes calls from the test, so that the test
decides what happens when. The server runs under its supervisor.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import httpx2
import pytest
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from decathlon_client import Decathlon, Episode

from decathlon_mcp.background import background_tasks
from tests.conformance.suites import node, run_npm
from tests.driver.peer import until
from tests.probe.serving import SUITE
from tests.survival.servers import SupervisedServer, supervised_server

INSTALL_SECONDS = 900
HANG_SECONDS = 60.0
"""A call that has neither a reply nor an error after so long counts as one that hangs."""
DOWN_SECONDS = 10.0
GRADING_SECONDS = 3
TASK = "find-answer"
PROGRAMS = Path(__file__).parent / "programs"

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(INSTALL_SECONDS + 300)]


@dataclass(frozen=True, slots=True)
class Library:
    """A client: its program, the packages it needs, and how it connects.

    `address`: of a task, or of an episode that was started before. `bridge`: through the project's bridge.
    """

    name: str
    program: str
    packages: tuple[str, ...]
    address: Literal["task", "episode"] = "task"
    options: tuple[str, ...] = ()
    bridge: bool = False

    @property
    def is_typescript(self) -> bool:
        return self.program.endswith(".mjs")


PYTHON_1 = ("mcp>=1.30,<2",)
PYTHON_2 = ("mcp>=2.3,<3",)
LIBRARIES = (
    Library("python-1", "python_sdk_1.py", PYTHON_1),
    Library("python-2", "python_sdk_2.py", PYTHON_2),
    Library("python-2-sessionless", "python_sdk_2.py", PYTHON_2, "episode", ("auto",)),
    Library("typescript-1", "typescript_sdk.mjs", ("@modelcontextprotocol/sdk@1",)),
    Library("typescript-2", "typescript_sdk.mjs", ("@modelcontextprotocol/client@2",)),
    Library("langchain", "langchain_adapters.py", ("langchain-mcp-adapters", "langchain")),
    Library("bridge", "python_sdk_1.py", PYTHON_1, bridge=True),
)
BY_NAME = {library.name: library for library in LIBRARIES}
SESSIONLESS = "python-2-sessionless"
ENDED = "the program ended"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call, how often its tool ran, and which client could play the episode to its end."""

    call: str = "reply"
    runs: int = 1
    usable: bool = True

    @classmethod
    def during_call(cls, library: Library) -> Outcome:
        """What is expected when the server dies during a call."""
        # Without a session a reply is JSON, and this client ends with any connection that breaks.
        return cls(ENDED, usable=False) if library.name == SESSIONLESS else cls()


@dataclass
class Player:
    """A running client program."""

    process: Process
    folder: Path
    outcomes: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    notifications: list[str] = field(default_factory=list[str])
    connected: bool = False
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def read(self) -> None:
        """Read the program's output, until it ends."""
        assert self.process.stdout is not None
        lines = BufferedByteReceiveStream(self.process.stdout)
        try:
            while True:
                self._note(json.loads(await lines.receive_until(b"\n", 16 << 20)))
        except (anyio.EndOfStream, anyio.IncompleteRead):
            self._note({"ended": True})

    def _note(self, line: dict[str, Any]) -> None:
        if "id" in line:
            self.outcomes[line["id"]] = line
        elif "notification" in line:
            self.notifications.append(line["notification"])
        else:
            self.connected = "connected" in line

    async def start(self, tool: str, **arguments: Any) -> int:
        """Send a call, and return its number."""
        assert self.process.stdin is not None
        number = next(self.numbers)
        command = {"id": number, "tool": tool, "arguments": arguments}
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # the program ended
            await self.process.stdin.send(json.dumps(command).encode() + b"\n")
        return number

    async def outcome(self, number: int, seconds: float = HANG_SECONDS) -> dict[str, Any]:
        """The outcome of a call, in which `error` is set if the call hangs or the program ended."""
        with anyio.move_on_after(seconds):
            await until(lambda: number in self.outcomes or not self.connected)
        default = {"error": "hangs" if self.connected else ENDED}
        return self.outcomes.get(number, default)

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        return await self.outcome(await self.start(tool, **arguments), 30)


@dataclass(frozen=True, slots=True)
class Situation:
    """A server, and a client that is connected to it.

    The calls of `start` write a line into `runs` whenever their tool runs.
    """

    server: SupervisedServer
    player: Player
    runs: Path

    async def start(self, command: str = "true") -> int:
        """Call a tool that runs a shell command; its reply is "done"."""
        return await self.player.start(
            "probe__shell", command=f"echo ran >> {self.runs}; {command}; echo done"
        )

    async def outcome(self, number: int) -> Outcome:
        """Wait for the outcome of a call of `start`, and play the episode to its end."""
        reply = await self.player.outcome(number)
        if "text" in reply:
            assert reply["text"] == "done\n"
        usable = await self.play()
        runs = self.runs.read_text().count("ran") if self.runs.exists() else 0
        return Outcome(reply.get("error", "reply"), runs, usable)

    async def play(self) -> bool:
        """Play the episode to the reward 1.0. Returns whether this client could."""
        written = await self.player.call("probe__write", path="answer.txt", text="42")
        if "error" not in written:
            assert "error" not in await self.player.call("claim_done")
            verdict = await self.player.call("evaluate")
            assert verdict["structured"]["reward"] == 1.0, verdict
            return True
        async with self.elsewhere() as episode:
            await episode.call("probe__write", {"path": "answer.txt", "text": "42"})
            await episode.claim_done()
            assert (await episode.evaluate()).reward == 1.0
        return False

    @asynccontextmanager
    async def elsewhere(self) -> AsyncGenerator[Episode]:
        """The episode in another client."""
        (folder,) = (self.server.state / "episodes").iterdir()
        async with Decathlon(self.server.url) as client, client.attach(folder.name) as episode:
            yield episode


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("libraries")


@pytest.fixture(params=BY_NAME)
async def library(request: pytest.FixtureRequest, libraries: Path, anyio_backend: object) -> Library:
    """A client whose packages are installed."""
    library = BY_NAME[request.param]
    await anyio.to_thread.run_sync(command_of, library, libraries)
    return library


def command_of(library: Library, libraries: Path) -> list[str]:
    """The command that runs a client's program; its packages are installed first, in a folder of theirs."""
    folder = libraries / "-".join(library.packages).replace("/", "-").replace("<", "-").replace(">", "-")
    python, program = str(folder / "venv" / "bin" / "python"), str(folder / library.program)
    if not folder.exists():
        shutil.copytree(PROGRAMS, folder)
        if library.is_typescript:
            run_npm(folder, "install", "--no-audit", "--no-fund", *library.packages)
        else:
            pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *library.packages]
            for command in ([sys.executable, "-m", "venv", str(folder / "venv")], pip):
                subprocess.run(command, check=True, timeout=INSTALL_SECONDS)
    if library.is_typescript:
        return [str(node()), program, library.name.rpartition("-")[2]]
    return [python, program]


@asynccontextmanager
async def running(command: list[str], folder: Path) -> AsyncGenerator[Player]:
    """Run a client program."""
    with (folder / "client.log").open("wb") as log:
        process = await anyio.open_process(command, stderr=log, env={**os.environ, "PYTHONPATH": ""})
        async with process, background_tasks() as tasks:
            player = Player(process, folder)
            tasks.start_soon(player.read)
            try:
                await until(lambda: player.connected)
                yield player
            finally:
                with suppress(ProcessLookupError):  # it has ended
                    process.kill()


@pytest.fixture
async def situation(library: Library, libraries: Path, tmp_path: Path) -> AsyncGenerator[Situation]:
    """The client at a task's or an episode's address."""
    async with connected(library, libraries, tmp_path) as situation:
        yield situation


@asynccontextmanager
async def connected(
    library: Library, libraries: Path, folder: Path, *, suite: str = SUITE, lobby: bool = False
) -> AsyncGenerator[Situation]:
    # Without isolation, so that this process sees the file into which the tool writes.
    async with supervised_server(folder / "state", "--isolation", "none", suite=suite) as server:
        if lobby:
            address = f"{server.url}/mcp"
        elif library.address == "task":
            address = f"{server.url}/tasks/{TASK}/mcp"
        else:
            async with Decathlon(server.url) as client:
                started = (await client.call_lobby("start_episode", {"task": TASK})).structured
            assert started is not None
            address = str(started["address"])
        command = command_of(library, libraries)
        if library.bridge:
            command += [sys.executable, "-m", "decathlon_mcp.cli", "stdio", "--url", address]
        else:
            command += [address, *library.options]
        async with running(command, folder) as player:
            yield Situation(server, player, folder / "runs.txt")


async def serving_again(server: SupervisedServer) -> None:
    """Wait until the next server answers."""
    async with httpx2.AsyncClient(timeout=60) as http:
        await http.get(f"{server.url}/healthz")


@asynccontextmanager
async def down(server: SupervisedServer) -> AsyncGenerator[None]:
    """Kill the server; while the block runs, no other is started."""
    server.process.send_signal(signal.SIGSTOP)  # the supervisor
    try:
        server.kill_at_once()
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


async def test_killed_between_two_calls(situation: Situation) -> None:
    assert "text" in await situation.player.call("probe__echo", text="before")
    await situation.server.kill()
    assert await situation.outcome(await situation.start()) == Outcome()


async def test_killed_between_two_calls_of_a_silent_client(situation: Situation) -> None:
    await situation.server.kill()
    await serving_again(situation.server)
    await anyio.sleep(5)
    assert await situation.outcome(await situation.start()) == Outcome()


async def test_call_sent_while_no_server_runs(situation: Situation) -> None:
    async with down(situation.server):
        await anyio.sleep(0.5)  # Node does not notice at once that its idle connection is closed
        number = await situation.start()
        await anyio.sleep(DOWN_SECONDS)
    assert await situation.outcome(number) == Outcome()


async def test_killed_in_the_middle_of_a_call(situation: Situation, library: Library) -> None:
    number = await situation.start("sleep 2")
    await until(situation.runs.exists)
    await situation.server.kill()
    assert await situation.outcome(number) == Outcome.during_call(library)


async def test_killed_in_the_middle_of_a_call_and_down_for_long(
    situation: Situation, library: Library
) -> None:
    number = await situation.start("sleep 2")
    await until(situation.runs.exists)
    async with down(situation.server):
        await anyio.sleep(DOWN_SECONDS)
    assert await situation.outcome(number) == Outcome.during_call(library)


async def test_killed_twice_at_once_in_a_call(situation: Situation, library: Library) -> None:
    number = await situation.start("sleep 5")
    await until(situation.runs.exists)
    await situation.server.kill()
    await situation.server.kill()
    assert await situation.outcome(number) == Outcome.during_call(library)


async def test_killed_twice_in_a_call_after_the_client_came_back(
    situation: Situation, library: Library
) -> None:
    ending = situation.runs.with_name("ending")
    number = await situation.start(f"until [ -e {ending} ]; do sleep 0.1; done")
    await until(situation.runs.exists)
    for _ in range(2):
        await situation.server.kill()
        await serving_again(situation.server)
        await anyio.sleep(2.5)
    ending.touch()
    assert await situation.outcome(number) == Outcome.during_call(library)


async def test_killed_while_evaluate_grades(library: Library, libraries: Path, tmp_path: Path) -> None:
    suite, grading = tmp_path / "suite", tmp_path / "grading.txt"
    shutil.copytree(SUITE, suite)
    evaluator = suite / "tasks" / "probe" / TASK / "evaluation" / "main.py"
    delay = f"import time\nopen({str(grading)!r}, 'a').close()\ntime.sleep({GRADING_SECONDS})\n"
    evaluator.write_text(delay + evaluator.read_text())
    async with connected(library, libraries, tmp_path, suite=str(suite)) as situation:
        player = situation.player
        assert "text" in await player.call("probe__write", path="answer.txt", text="42")
        assert "text" in await player.call("claim_done")
        number = await player.start("evaluate")
        await until(grading.exists)
        await situation.server.kill()
        outcome = await player.outcome(number)
        if library.name == SESSIONLESS:
            assert outcome == {"error": ENDED}
            async with situation.elsewhere() as episode:
                assert (await episode.evaluate()).reward == 1.0
        else:
            assert outcome["structured"]["reward"] == 1.0


async def test_notifications_arrive_after_each_of_two_kills(
    library: Library, libraries: Path, tmp_path: Path
) -> None:
    if library.address == "episode":
        pytest.skip("without a session, there are no notifications outside of a reply")
    async with connected(library, libraries, tmp_path, lobby=True) as situation:
        player, counts = situation.player, list[int]()
        for _ in range(3):
            assert "text" in await player.call("start_episode", task=TASK)
            await anyio.sleep(0.5)
            counts.append(player.notifications.count("notifications/tools/list_changed"))
            await situation.server.kill()
            await serving_again(situation.server)
            await anyio.sleep(5)
        assert counts == [1, 2, 3]


async def test_reply_of_one_and_a_half_mib(situation: Situation, library: Library) -> None:
    result = await situation.player.call("probe__big", characters=3 << 19)
    if library.name == "python-2":
        assert "more than the 1047552 that this client may take" in result["error"]
    else:
        assert len(result["text"]) == 3 << 19
    assert await situation.play()
