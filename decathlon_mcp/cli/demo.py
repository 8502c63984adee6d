"""`demo`: play the bundled tasks from scripts, with a real client and server."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import sys
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from decathlon_client import ClientError, Decathlon, Episode, Verdict
from decathlon_client.local_server import ChildServer, child_server
from decathlon_client.process import shutdown_on_signal
from decathlon_client.script import ScriptError, Step, play_script

from decathlon_mcp.cli.console import ScriptConsole
from decathlon_mcp.cli.options import PREFIX
from decathlon_mcp.cli.output import shell_path, this_command
from decathlon_mcp.errors import DecathlonError, SettingsError, UnknownTaskError
from decathlon_mcp.hooks import plugins
from decathlon_mcp.sandboxes.host.isolation import HostIsolation
from decathlon_mcp.settings import default_state
from decathlon_mcp.starter import oracle, oracle_ids
from decathlon_mcp.storage.database import SCHEMA_VERSION
from decathlon_mcp.validation import did_you_mean

DEFAULT_TASK = "tune-reactor"


async def demo(task: str | None, all_tasks: bool) -> int:
    """Play one task or all of them; return 0 only if every reward is 1.0.

    Raises UnknownTaskError for a task without a script.
    """
    known = oracle_ids()
    names = known if all_tasks else [task or DEFAULT_TASK]
    if unknown := set(names).difference(known):
        hint = "".join(did_you_mean(name, known) for name in unknown)
        hint = hint or f"; there are scripts for {', '.join(known)}"
        raise UnknownTaskError(f"no script for {', '.join(unknown)}{hint}", near=known)
    scripts = {name: oracle(name) for name in names}
    async with shutdown_on_signal() as watcher:  # so that a signal also stops the server
        with demo_state() as state:
            return await _play(scripts, state)
    return watcher.status or 1


@contextmanager
def demo_state() -> Generator[Path]:
    """The state folder of this demo alone, where what it played can be looked at later.

    Each version of the store has its own, since none reads another's. So has a demo beside another. Raises
    SettingsError if none can be created.
    """
    for number in itertools.count(1):
        state = default_state() / f"demo-store-v{SCHEMA_VERSION}{'' if number == 1 else f'-{number}'}"
        try:
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = (state / "demo.lock").open("w")
        except OSError as error:
            why = f"{error.filename}: {error.strerror}"
            raise SettingsError(f"{why}: name another folder in XDG_STATE_HOME") from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield state
            return


async def _play(scripts: Mapping[str, Sequence[Step]], state: Path) -> int:
    console = ScriptConsole()
    rewards: dict[str, float | None] = {}
    console.title("decathlon-mcp: one MCP server, tasks with tools, a reward at the end")
    async with _server(console, state) as url, Decathlon(url) as d:
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
        console.line("look", f"{this_command()} view --open {shell_path(state)}")
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
async def _server(console: ScriptConsole, state: Path) -> AsyncGenerator[str]:
    """Start a server on a free port, and yield its URL. Raises DecathlonError with the end of its log."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    # Only a server that may be continued keeps rows of its episodes; nobody continues this one. On a busy
    # machine it is silent for seconds, so that with fewer its sandboxes would take it for dead.
    settings = {"provider": "host", "state": state, "survive_seconds": 60}
    command = [sys.executable, "-m", "decathlon_mcp.cli"]
    console.line("server", "decathlon-mcp serve --suite starter --provider host --port 0")
    server = ChildServer(command, ["starter"], settings, environment=environment, cwd=state)
    async with AsyncExitStack() as stack:
        async with console.waiting("starting the server"):
            try:
                url = await stack.enter_async_context(child_server(server))
            except ClientError as error:
                raise DecathlonError(error.message) from error
        console.line("server", f"listening at {url}")
        console.line("isolation", _isolation(state))
        yield url


def _isolation(state: Path) -> str:
    found = HostIsolation.read(state)
    if found is None or found.isolation == "none":
        why = f": {found.why}" if found is not None and found.why else ""
        return f"none, sandboxes are ordinary processes of this user{why}"
    return "namespaces, sandboxes see this machine's programs and nothing else of it"
