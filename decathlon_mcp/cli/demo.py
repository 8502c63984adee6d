"""`demo`: a real server, a real client, real tasks; the player alone is scripted."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream
from decathlon_client import ClientError, Decathlon, Episode, Verdict
from decathlon_client.script import ScriptError, Step, play_script
from decathlon_client.shutdown import shutdown_on_signal

from decathlon_mcp.background import background_tasks
from decathlon_mcp.cli.console import Screen
from decathlon_mcp.cli.options import PREFIX
from decathlon_mcp.errors import DecathlonError, UnknownTaskError
from decathlon_mcp.starter import oracle, oracle_ids
from decathlon_mcp.types import JsonObject

DEFAULT_TASK = "tune-reactor"
READY_SECONDS = 60.0
STOP_SECONDS = 45.0


async def play(task: str | None, everything: bool) -> int:
    """0 only when every reward came back 1.0. Raises UnknownTaskError for a task that has no player."""
    known = oracle_ids()
    names = known if everything else [task or DEFAULT_TASK]
    if unknown := set(names).difference(known):
        raise UnknownTaskError(
            f"no player for {', '.join(unknown)}; there are {', '.join(known)}", near=known
        )
    scripts = {name: oracle(name) for name in names}
    async with shutdown_on_signal() as departure:  # the server must not be left behind
        return await _play(scripts)
    return departure.status or 1


async def _play(scripts: Mapping[str, Sequence[Step]]) -> int:
    screen = Screen()
    rewards: dict[str, float | None] = {}
    screen.title("decathlon-mcp: one MCP server, tasks with tools, a reward at the end")
    async with _server(screen) as url, Decathlon(url) as d:
        there = await d.tasks(prompts=False)
        screen.say("client", f"connected to {url}/mcp, which has {len(there)} tasks")
        for number, (name, steps) in enumerate(scripts.items(), 1):
            screen.title(f"{name} ({number} of {len(scripts)})")
            try:
                rewards[name] = (await _attempt(d, name, steps, screen)).reward
            except (ClientError, ScriptError) as error:
                screen.fault(str(error))
                rewards[name] = None
    screen.title("rewards")
    for name, reward in rewards.items():
        screen.say(str(reward), name, "green" if reward == 1.0 else "bold red")
    return 0 if all(reward == 1.0 for reward in rewards.values()) else 1


async def _attempt(d: Decathlon, name: str, steps: Sequence[Step], screen: Screen) -> Verdict:
    async with AsyncExitStack() as stack:
        async with screen.waiting("opening a sandbox and starting the task's servers"):
            episode = await stack.enter_async_context(d.episode(name))
        _introduce(episode, screen)
        await play_script(episode, steps, screen)
        screen.call("evaluate", {})
        async with screen.waiting("grading in a fresh sandbox"):
            verdict = await episode.evaluate()
    _judge(verdict, screen)
    return verdict


def _introduce(episode: Episode, screen: Screen) -> None:
    screen.say("episode", episode.address)
    screen.prompt(episode.prompt)
    screen.say("tools", ", ".join(tool.name for tool in episode.tools))


def _judge(verdict: Verdict, screen: Screen) -> None:
    metrics = {name: round(value, 3) for name, value in verdict.metrics.items()}
    success = "the attempt succeeded" if verdict.success else "the attempt failed"
    screen.say("verdict", success, "bold green" if verdict.success else "bold red")
    screen.say("metrics", json.dumps(metrics))
    screen.say("reward", str(verdict.reward), "bold green" if verdict.reward == 1.0 else "bold red")


@asynccontextmanager
async def _server(screen: Screen) -> AsyncGenerator[str]:
    """The real one, in a process of its own on a free port, with a state folder that goes with it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    words = ["serve", "--suite", "starter", "--provider", "local", "--port", "0", "--log-format", "json"]
    with tempfile.TemporaryDirectory(prefix="decathlon-demo-") as state:
        command = [sys.executable, "-m", "decathlon_mcp.cli", *words, "--state", state]
        screen.say("server", f"decathlon-mcp {' '.join(words)}")
        async with background_tasks() as tasks:
            process = await anyio.open_process(command, stdout=None, env=environment, cwd=Path(state))
            try:
                log = _Log(process)
                async with screen.waiting("starting the server"):
                    tasks.start_soon(log.follow)
                    url = await log.url()
                screen.say("server", f"listening at {url}")
                yield url
            finally:
                with anyio.CancelScope(shield=True):
                    await _stop(process)


class _Log:
    """What the server writes to stderr, a JSON object a line."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._last: deque[str] = deque(maxlen=10)
        self._url: str | None = None
        self._known = anyio.Event()

    async def follow(self) -> None:
        """Until the server ends; it must not be held up by a full pipe."""
        assert self._process.stderr is not None
        rest = ""
        async for chunk in TextReceiveStream(self._process.stderr, errors="replace"):
            *lines, rest = (rest + chunk).split("\n")
            for line in lines:
                self._read(line)
        self._known.set()

    async def url(self) -> str:
        """Where it listens. Raises DecathlonError with its last words when it does not."""
        with anyio.move_on_after(READY_SECONDS):
            await self._known.wait()
        if self._url is None:
            raise DecathlonError(f"the server did not start: {' | '.join(self._last) or 'not a word'}")
        return self._url

    def _read(self, line: str) -> None:
        self._last.append(line)
        try:
            told: JsonObject = json.loads(line)
        except ValueError:
            return
        if told.get("message") == "listening":
            self._url = str(told["url"])
            self._known.set()


async def _stop(process: Process) -> None:
    """As an operator would; by force where that does not help."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    with anyio.move_on_after(STOP_SECONDS):
        await process.wait()
    if process.returncode is None:
        process.kill()
    await process.aclose()
