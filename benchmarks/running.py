"""One run of the benchmarks: its options, the servers that it measures, and what they leave behind."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import docker
import httpx2
from anyio.abc import Process

from benchmarks.machine import process_cpu_seconds, processes_with, resident_memory_kib

SUITE = Path(__file__).parent / "suite"
TOOL_SERVER = SUITE / "local_servers" / "echo_server.py"
START_SECONDS = 60.0
POLL_SECONDS = 0.005
POLL_PART = 0.02
"""Time between two polls, as a part of the time that has passed: the error of what is measured by polling."""
LOG_CHARACTERS = 10_000
"""How much of a server's log is printed if a benchmark fails."""
REMOVAL_SECONDS = 30.0
"""How long removals that were under way may take before what remains counts as left behind."""
RUN_VARIABLE = "DECATHLON_BENCHMARK_RUN"
"""In the environment of every process that a run starts."""
LONG = ("idle", "first_use", "grace", "servers", "set_up", "evaluation")
LONG_SECONDS = 3600
"""Time limits of servers: in a large batch an episode waits long until the others are open or graded."""
OWNER_LABEL = "decathlon.owner"
RUN_LABEL = "decathlon.benchmark"
"""Label of the containers that a run creates itself, as floors."""
SURVIVING_FOLDERS = ("scratch", "sandboxes", "namespaces", "servers")
"""Folders of a state folder that are empty when its servers have ended in order."""


class UnavailableError(Exception):
    """Something cannot be measured here; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure and how often.

    `repeats`: how often each figure is measured. `rounds`, `openings`: operations of each kind in one repeat.
    `batch`: number of episodes opened at once where no size is given.
    """

    image: str = "decathlon-test:latest"
    repeats: int = 3
    sizes: tuple[int, ...] = (1, 4, 16, 64)
    rounds: int = 300
    openings: int = 8
    batch: int = 24
    load_seconds: float = 3.0
    tool_servers: tuple[str, ...] = ("plain", "echo")
    """Of `sizes`; each is also the name of a task."""

    @classmethod
    def short(cls, image: str) -> Options:
        """Every operation a few times: shows that everything works, not how fast."""
        return cls(
            image,
            repeats=1,
            sizes=(2,),
            rounds=5,
            openings=1,
            batch=1,
            load_seconds=0.2,
            tool_servers=("plain",),
        )


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one section.

    `id` is in the labels of the containers, and in the environment or command line of the processes, that it
    starts itself.
    """

    options: Options
    id: str
    owners: set[str] = field(default_factory=set[str])
    """Labels of the servers' containers."""
    left: Counter[str] = field(default_factory=Counter[str])
    """Files in the state folders of servers that have ended."""
    skipped: dict[str, str] = field(default_factory=dict[str, str])
    """What was not measured, with the reason."""

    async def count_remaining(self) -> dict[str, int]:
        """Wait for removals under way, and return how much of each kind is left."""
        remaining = await anyio.to_thread.run_sync(self._count)
        with anyio.move_on_after(REMOVAL_SECONDS):
            while any(remaining.values()):
                await anyio.sleep(40 * POLL_SECONDS)
                remaining = await anyio.to_thread.run_sync(self._count)
        return remaining

    def _count(self) -> dict[str, int]:
        api: Any = docker.APIClient()
        try:
            containers = api.containers(all=True)
        finally:
            api.close()
        labels: list[dict[str, str]] = [container["Labels"] or {} for container in containers]
        ours = [one for one in labels if one.get(OWNER_LABEL) in self.owners or one.get(RUN_LABEL) == self.id]
        processes = processes_with(self.id.encode())
        return {"containers": len(ours), "processes": processes, "files": self.left.total()}


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server in another process."""

    url: str
    pid: int

    @property
    def cpu_seconds(self) -> float:
        """User and system time that the process has used."""
        return process_cpu_seconds(self.pid)

    @property
    def memory_kib(self) -> int:
        """Resident memory of the process."""
        return resident_memory_kib(self.pid)


@dataclass(frozen=True, slots=True)
class Server(ServerProcess):
    """This project's server. `url` is its base URL."""

    def task(self, task: str) -> str:
        return f"{self.url}/tasks/{task}/mcp"

    def episode(self, episode: str) -> str:
        return f"{self.url}/episodes/{episode}/mcp"

    async def wait_until_empty(self) -> None:
        """Wait until no episode is open and no sandbox is in use."""

        def is_empty(text: str) -> bool:
            health = json.loads(text)
            return not (health["sandboxes"] or health["episodes"])

        await self._poll("healthz", is_empty)

    async def wait_until_ready(self, count: int) -> None:
        """Wait until this many episodes are ready: a tool list is no sign of it if it was known before.

        Raises RuntimeError if one of them has ended.
        """

        def are_ready(text: str) -> bool:
            queued, opening, ready = (
                _metric(text, f'decathlon_episodes{{phase="{phase}",')
                for phase in ("queued", "opening", "ready")
            )
            if queued + opening + ready < count:
                raise RuntimeError("an episode has ended before it was ready")
            return ready >= count

        await self._poll("metrics", are_ready)

    async def wait_for_metric(self, prefix: str, value: float) -> None:
        """Wait until the values of the metrics that begin with `prefix` add up to `value` at least."""
        await self._poll("metrics", lambda text: _metric(text, prefix) >= value)

    async def _poll(self, path: str, is_over: Callable[[str], bool]) -> None:
        """Request a path until its text is as expected, ever less often: answers cost the server time."""
        start = anyio.current_time()
        async with httpx2.AsyncClient(timeout=START_SECONDS) as client:
            while not is_over((await client.get(f"{self.url}/{path}")).text):  # noqa: ASYNC110
                await anyio.sleep(max(POLL_SECONDS, POLL_PART * (anyio.current_time() - start)))


@asynccontextmanager
async def decathlon(
    run: Run, *, environment: Mapping[str, str] | None = None, **settings: object
) -> AsyncGenerator[Server]:
    """Start this project's server as a user does; `settings` are flags, with `_` for `-`.

    By default it has containers. `environment`: further variables.
    """
    defaults: dict[str, object] = {"provider": "docker", "image": run.options.image, "log_level": "warning"}
    defaults |= {f"{name}_seconds": LONG_SECONDS for name in LONG}
    values = defaults | settings
    if values["provider"] != "docker":
        values.pop("image", None)
    with tempfile.TemporaryDirectory(prefix="decathlon-benchmark-", ignore_cleanup_errors=True) as name:
        state, ready = Path(name) / "state", Path(name) / "ready"
        values |= {"suite": SUITE, "port": 0, "state": state, "ready_file": ready}
        flags = [part for key, value in values.items() for part in _flag(key, value)]
        command = [sys.executable, "-m", "decathlon_mcp.cli", "serve", "--no-supervisor", *flags]
        log = Path(name) / "log"
        try:
            with log.open("wb") as output:
                async with started(run, command, env=environment, output=output.fileno()) as process:
                    await wait_for_file(ready, process)
                    run.owners.update(file.name for file in (state / "servers").iterdir())
                    yield Server(ready.read_text().strip(), process.pid)
        except BaseException:
            sys.stderr.write(log.read_text()[-LOG_CHARACTERS:])
            raise
        finally:
            run.left["files"] += sum(
                len(list(folder.iterdir()))
                for folder in map(state.joinpath, SURVIVING_FOLDERS)
                if folder.exists()
            )


def _flag(name: str, value: object) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    return [flag] if value is True else [flag, str(value)]


@asynccontextmanager
async def tool_server(
    run: Run, responses: Literal["json", "events"] = "json"
) -> AsyncGenerator[ServerProcess]:
    """Start the suite's tool server over the SDK's streamable HTTP, outside Docker.

    `events` is the SDK's default response format, `json` its fastest. As for this project's server, uvicorn
    uses uvloop and httptools if they are installed.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        command = [sys.executable, str(TOOL_SERVER), str(listener.fileno()), responses]
        async with started(run, command, inherited=[listener.fileno()]) as process:
            yield ServerProcess(f"http://127.0.0.1:{listener.getsockname()[1]}/mcp", process.pid)


@asynccontextmanager
async def started(
    run: Run,
    command: Sequence[str],
    *,
    inherited: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
    output: int | None = None,
    errors: int | None = None,
) -> AsyncGenerator[Process]:
    """Run a command; at the end, stop it and wait for its end.

    `inherited`: descriptors that it gets; `output`, `errors`: its stdout and stderr, by default the same.
    """
    environment = {**os.environ, **(env or {}), RUN_VARIABLE: run.id}
    process = await anyio.open_process(
        command,
        stdin=None,
        stdout=output,
        stderr=output if errors is None else errors,
        env=environment,
        pass_fds=inherited,
    )
    try:
        yield process
    finally:
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                process.terminate()
            with anyio.move_on_after(REMOVAL_SECONDS):
                await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()


async def wait_for_file(file: Path, process: Process) -> None:
    """Wait until a server has written its ready file."""
    with anyio.fail_after(START_SECONDS):
        while not _has_content(file):
            if process.returncode is not None:
                raise RuntimeError(f"the server ended with status {process.returncode}")
            await anyio.sleep(POLL_SECONDS)


def _has_content(file: Path) -> bool:
    return file.exists() and bool(file.read_text())


def _metric(text: str, prefix: str) -> float:
    """The sum of the values whose names begin with `prefix`, in Prometheus's text format."""
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(prefix))
