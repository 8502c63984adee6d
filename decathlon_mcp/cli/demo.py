"""`demo`: play bundled tasks from scripts, with a real client on a real server in its own process."""

from __future__ import annotations

import json
import os
import signal
import sys
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
from decathlon_mcp.cli.console import ScriptConsole
from decathlon_mcp.cli.options import PREFIX
from decathlon_mcp.cli.output import shell_path, this_command
from decathlon_mcp.errors import DecathlonError, UnknownTaskError
from decathlon_mcp.hooks import plugins
from decathlon_mcp.sandboxes.local_isolation import LocalIsolation
from decathlon_mcp.settings import default_state
from decathlon_mcp.starter import oracle, oracle_ids
from decathlon_mcp.storage.database import SCHEMA_VERSION
from decathlon_mcp.types import JsonObject

DEFAULT_TASK = "tune-reactor"
READY_SECONDS = 60.0
"""A start takes seconds; the first one on a slow disk compiles every module."""


async def demo(task: str | None, all_tasks: bool) -> int:
    """Play one task or all of them; return 0 only if every reward is 1.0.

    Raises UnknownTaskError for a task without a script.
    """
    known = oracle_ids()
    names = known if all_tasks else [task or DEFAULT_TASK]
    if unknown := set(names).difference(known):
        raise UnknownTaskError(
            f"no script for {', '.join(unknown)}; there are scripts for {', '.join(known)}", near=known
        )
    scripts = {name: oracle(name) for name in names}
    async with shutdown_on_signal() as watcher:  # so that a signal also stops the server
        return await _play(scripts)
    return watcher.status or 1


def demo_state() -> Path:
    """The state folder of demos, where what they played can be looked at later.

    Each version of the store has its own, since none reads another's.
    """
    return default_state() / f"demo-{SCHEMA_VERSION}"


async def _play(scripts: Mapping[str, Sequence[Step]]) -> int:
    console = ScriptConsole()
    rewards: dict[str, float | None] = {}
    console.title("decathlon-mcp: one MCP server, tasks with tools, a reward at the end")
    async with _server(console) as url, Decathlon(url) as d:
        tasks = await d.tasks(prompts=False)
        console.line("client", f"connected to {url}/mcp, which has {len(tasks)} tasks")
        for number, (name, steps) in enumerate(scripts.items(), 1):
            console.title(f"{name} ({number} of {len(scripts)})")
            try:
                rewards[name] = (await _attempt(d, name, steps, console)).reward
            except (ClientError, ScriptError) as error:
                console.error(str(error))
                rewards[name] = None
    console.title("rewards")
    for name, reward in rewards.items():
        console.line(str(reward), name, "green" if reward == 1.0 else "bold red")
    if any(plugin.page for plugin in plugins()):
        console.line("look", f"{this_command()} view --open {shell_path(demo_state())}")
    return 0 if all(reward == 1.0 for reward in rewards.values()) else 1


async def _attempt(d: Decathlon, name: str, steps: Sequence[Step], console: ScriptConsole) -> Verdict:
    async with AsyncExitStack() as stack:
        async with console.waiting("opening a sandbox and starting the task's servers"):
            episode = await stack.enter_async_context(d.episode(name))
        _show_episode(episode, console)
        await play_script(episode, steps, console)
        console.call("evaluate", {})
        async with console.waiting("grading in a fresh sandbox"):
            verdict = await episode.evaluate()
    _show_verdict(verdict, console)
    return verdict


def _show_episode(episode: Episode, console: ScriptConsole) -> None:
    console.line("episode", episode.address)
    console.prompt(episode.prompt)
    console.line("tools", ", ".join(tool.name for tool in episode.tools))


def _show_verdict(verdict: Verdict, console: ScriptConsole) -> None:
    metrics = {name: round(value, 3) for name, value in verdict.metrics.items()}
    success = "the attempt succeeded" if verdict.success else "the attempt failed"
    console.line("verdict", success, "bold green" if verdict.success else "bold red")
    console.line("metrics", json.dumps(metrics))
    console.line("reward", str(verdict.reward), "bold green" if verdict.reward == 1.0 else "bold red")


@asynccontextmanager
async def _server(console: ScriptConsole) -> AsyncGenerator[str]:
    """Start a server on a free port with a state folder of its own, and yield its URL."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    # Only a server that may be continued keeps rows of its episodes; nobody continues this one.
    environment[f"{PREFIX}SURVIVE_SECONDS"] = "1"
    arguments = ["serve", "--suite", "starter", "--provider", "local", "--port", "0", "--log-format", "json"]
    state = demo_state()
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = [sys.executable, "-m", "decathlon_mcp.cli", *arguments, "--state", str(state)]
    console.line("server", f"decathlon-mcp {' '.join(arguments)}")
    async with background_tasks() as tasks:
        process = await anyio.open_process(command, stdout=None, env=environment, cwd=state)
        try:
            log = _ServerLog(process)
            async with console.waiting("starting the server"):
                tasks.start_soon(log.follow)
                url = await log.url()
            console.line("server", f"listening at {url}")
            console.line("isolation", _isolation(state))
            yield url
        finally:
            with anyio.CancelScope(shield=True):
                await _stop(process)


def _isolation(state: Path) -> str:
    found = LocalIsolation.read(state)
    if found is None or found.isolation == "none":
        why = f": {found.why}" if found is not None and found.why else ""
        return f"none, sandboxes are ordinary processes of this user{why}"
    return "namespaces, sandboxes see this machine's programs and nothing else of it"


class _ServerLog:
    """Reads the server's log on stderr, one JSON object per line, to learn its URL."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._last_lines: deque[str] = deque(maxlen=10)
        self._url: str | None = None
        self._url_known = anyio.Event()

    async def follow(self) -> None:
        """Read until the server ends."""
        # Also after the URL is known: a full pipe would block the server.
        assert self._process.stderr is not None
        partial = ""
        async for chunk in TextReceiveStream(self._process.stderr, errors="replace"):
            *lines, partial = (partial + chunk).split("\n")
            for line in lines:
                self._parse(line)
        self._url_known.set()

    async def url(self) -> str:
        """Wait for the server's URL. Raises DecathlonError with its last log lines if there is none."""
        with anyio.move_on_after(READY_SECONDS):
            await self._url_known.wait()
        if self._url is None:
            raise DecathlonError(
                f"the server did not start: {' | '.join(self._last_lines) or 'it printed nothing'}"
            )
        return self._url

    def _parse(self, line: str) -> None:
        self._last_lines.append(line)
        try:
            record: JsonObject = json.loads(line)
        except ValueError:
            return
        if record.get("message") == "listening":
            self._url = str(record["url"])
            self._url_known.set()


async def _stop(process: Process) -> None:
    """Send SIGTERM, and SIGKILL if the process does not end in time."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    with anyio.move_on_after(45):  # longer than the server's own drain of 30 s
        await process.wait()
    if process.returncode is None:
        process.kill()
    await process.aclose()
