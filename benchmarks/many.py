"""`python -m benchmarks.many N`: many live episodes on one server, and what each of them weighs.

All episodes are opened at once; each is called and stays open until all are. Then the memory is measured, and
all are claimed, graded and closed. Every other episode writes a wrong answer, so that a verdict of another
episode would be noticed.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import docker
import httpx2

from benchmarks.machine import machine
from benchmarks.wire_client import WireClient, wire_client

ProviderName = Literal["docker", "host"]

SUITE = Path(__file__).parent / "suite"
OWNER_LABEL = "decathlon.owner"
TASKS = {1: "note", 2: "pair", 4: "four"}
"""The task with so many servers, each a process that imports the MCP SDK."""
PAIR = ("notes__note", "echo__echo")
CALLS = {"note": PAIR[:1], "pair": PAIR, "four": (*PAIR, "git__git_status", "excel__describe_sheet")}
LEASE_SECONDS = 36_000
"""Limits of an episode: the last one of many may open an hour after the first."""
START_SECONDS = 60.0
END_SECONDS = 1_800.0
"""How long the removal of all sandboxes may take."""
LEARN_SECONDS = 120.0
POLL_SECONDS = 0.5
PROGRESS_SECONDS = 5.0
STEADY_MIB = 64
"""Merging has ended when it saved less than this in `STEADY_SECONDS`."""
STEADY_SECONDS = 20.0
KSM = Path("/sys/kernel/mm/ksm")
IN_USE = ("episodes", "sandboxes")
"""Fields of `/healthz`."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure.

    `settle_seconds`: limit on the wait for merging. `warm_up`: one episode is played before, and with
    `--preload` its servers' libraries are learnt. `more`: further options of `serve`.
    """

    episodes: int
    merge_pages: bool = False
    servers: int = 2
    provider: ProviderName = "docker"
    image: str = "decathlon-test:latest"
    settle_seconds: float = 300.0
    warm_up: bool = False
    more: tuple[str, ...] = ()
    progress: bool = False


@dataclass(slots=True)
class Counts:
    """How many episodes have got how far. `wrong`: graded with another reward than their answer deserves."""

    opened: int = 0
    called: int = 0
    claimed: int = 0
    graded: int = 0
    wrong: int = 0
    closed: int = 0
    errors: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class Many:
    """The result. Memory in MiB, times in seconds.

    For each episode: `available_mib` is what is missing in the machine's available memory (MemAvailable, so
    that nothing else may run meanwhile), which includes the engine's and the kernel's share; `processes_mib`
    is the proportional share (PSS) of the processes in its sandbox and of the engine's process for it;
    `server_kib` is the growth of the server's resident memory. `lowest_mib`: the lowest available memory on
    the way. `merged_mib`: what merging saved by then. `cpu_seconds`: of all processes from the start of the
    server to its end, `remaining`: what is left then.
    """

    episodes: int
    provider: str
    task: str
    merge_pages: bool
    counts: Counts = field(default_factory=Counts)
    open_seconds: float = 0.0
    calls_seconds: float = 0.0
    settle_seconds: float = 0.0
    grade_seconds: float = 0.0
    close_seconds: float = 0.0
    available_mib: float = 0.0
    processes_mib: float = 0.0
    server_kib: float = 0.0
    lowest_mib: float = 0.0
    merged_mib: float = 0.0
    cpu_seconds: float = 0.0
    remaining: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def is_complete(self) -> bool:
        """Whether every episode was opened, called, graded correctly and closed, and nothing is left."""
        counts = self.counts
        steps = (counts.opened, counts.called, counts.claimed, counts.graded, counts.closed)
        return (
            all(step == self.episodes for step in steps)
            and not counts.wrong
            and not counts.errors
            and not any(self.remaining.values())
        )

    def to_json(self) -> dict[str, Any]:
        rates = {
            "openings_per_second": self.counts.opened / self.open_seconds if self.open_seconds else 0.0,
            "gradings_per_second": self.counts.graded / self.grade_seconds if self.grade_seconds else 0.0,
        }
        return {**asdict(self), **rates}


@dataclass(frozen=True, slots=True)
class Server:
    """The server under test. `owner`: label of its containers."""

    url: str
    pid: int
    owner: str
    state: Path

    async def health(self) -> dict[str, Any]:
        async with httpx2.AsyncClient(timeout=60) as client:
            return (await client.get(f"{self.url}/healthz")).json()

    @property
    def resident_kib(self) -> int:
        return _field(Path(f"/proc/{self.pid}/status"), "VmRSS")


@asynccontextmanager
async def _server(options: Options) -> AsyncGenerator[Server]:
    """Start the server as a user does, without a supervisor, which a measurement does not need."""
    size = str(options.episodes)
    with tempfile.TemporaryDirectory(prefix="decathlon-many-", ignore_cleanup_errors=True) as name:
        state, ready = Path(name) / "state", Path(name) / "ready"
        flags = {
            "--suite": str(SUITE),
            "--provider": options.provider,
            "--port": "0",
            "--state": str(state),
            "--ready-file": str(ready),
            "--max-sandboxes": size,
            "--max-queue": size,
            "--log-level": "warning",
            **{
                f"--{limit}-seconds": str(LEASE_SECONDS)
                for limit in ("idle", "first-use", "grace", "episode", "set-up", "servers", "evaluation")
            },
        }
        if options.provider == "docker":
            flags["--image"] = options.image
        command = [sys.executable, "-m", "decathlon_mcp.cli", "serve", "--no-supervisor"]
        command += [part for flag in flags.items() for part in flag]
        command += ["--merge-pages"] if options.merge_pages else []
        command += options.more
        async with await anyio.open_process(
            command, stdin=None, stdout=subprocess.DEVNULL, stderr=None
        ) as process:
            try:
                with anyio.fail_after(START_SECONDS):
                    while not (ready.exists() and ready.read_text()):  # noqa: ASYNC110
                        await anyio.sleep(0.05)
                (owner,) = (file.name for file in (state / "servers").iterdir())
                yield Server(ready.read_text().strip(), process.pid, owner, state)
            finally:
                with suppress(ProcessLookupError):
                    process.terminate()
                with anyio.CancelScope(shield=True):
                    await process.wait()


class _Player:
    """One episode. Each step is done by all players before the next."""

    def __init__(self, number: int, server: Server, many: Many) -> None:
        self._server = server
        self._many = many
        self._is_right = number % 2 == 0
        self._client: WireClient | None = None

    async def open(self) -> None:
        async with wire_client(f"{self._server.url}/tasks/{self._many.task}/mcp") as client:
            await client.request("tools/list", {})
            self._client = client
        self._many.counts.opened += 1

    async def call(self) -> None:
        for name in CALLS[self._many.task]:
            await self._call(name, {"text": "right" if self._is_right else "wrong"})
        self._many.counts.called += 1

    async def grade(self) -> None:
        await self._call("claim_done", {})
        self._many.counts.claimed += 1
        verdict = (await self._call("evaluate", {})).get("structuredContent", {})
        if verdict.get("status") != "scored":
            raise RuntimeError(f"the verdict is {verdict.get('status')}: {verdict.get('detail')}")
        self._many.counts.graded += 1
        self._many.counts.wrong += verdict.get("reward") != float(self._is_right)

    async def close(self) -> None:
        async with self._connected() as client:
            await client.end()
        self._many.counts.closed += 1

    async def _call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        async with self._connected() as client:
            return await client.request("tools/call", {"name": name, "arguments": arguments})

    @asynccontextmanager
    async def _connected(self) -> AsyncGenerator[WireClient]:
        """The session on a new connection: the server closes those that are unused for a minute."""
        if self._client is None:
            raise RuntimeError("it was not opened")
        async with self._client.sibling() as self._client:
            yield self._client


async def measure_many(options: Options) -> Many:
    """Open the episodes, and so on until nothing is left; see the module."""
    many = Many(options.episodes, options.provider, TASKS[options.servers], options.merge_pages)
    cpu_seconds = _cpu_seconds()
    async with _server(options) as server:
        if options.warm_up:
            await _warm_up(server, options)
        players = [_Player(number, server, many) for number in range(options.episodes)]
        available_mib, resident_kib = _available_mib(), server.resident_kib
        many.lowest_mib = available_mib
        merged_mib = _merged_mib()
        async with anyio.create_task_group() as background:
            watching = anyio.CancelScope()

            async def watch() -> None:
                with watching:
                    while True:
                        many.lowest_mib = min(many.lowest_mib, _available_mib())
                        if options.progress:
                            sys.stderr.write(f"{many.counts}, {_available_mib():.0f} MiB available\n")
                        await anyio.sleep(PROGRESS_SECONDS if options.progress else POLL_SECONDS)

            background.start_soon(watch)
            many.open_seconds = await _all(players, _Player.open, many)
            many.calls_seconds = await _all(players, _Player.call, many)
            many.settle_seconds = await _settle(many, options.settle_seconds)
            many.available_mib = (available_mib - _available_mib()) / options.episodes
            many.processes_mib = await anyio.to_thread.run_sync(_processes_mib, server, options.provider)
            many.processes_mib /= options.episodes
            many.server_kib = (server.resident_kib - resident_kib) / options.episodes
            many.merged_mib = _merged_mib() - merged_mib
            many.grade_seconds = await _all(players, _Player.grade, many)
            started = time.perf_counter()
            await _all(players, _Player.close, many)
            # Episodes of failed players end with the server.
            with anyio.move_on_after(END_SECONDS if not many.counts.errors else 0):
                # An episode ends a little later than its sandbox.
                while _in_use(await server.health()):  # noqa: ASYNC110
                    await anyio.sleep(POLL_SECONDS)
            many.close_seconds = time.perf_counter() - started
            watching.cancel()
        health = await server.health()
    many.cpu_seconds = _cpu_seconds() - cpu_seconds
    many.remaining = {name: int(health[name]) for name in IN_USE}
    if options.provider == "docker":
        # Not earlier: sandboxes that were opened ahead stay until the server ends.
        many.remaining["containers"] = len(await anyio.to_thread.run_sync(_containers, server.owner))
    return many


async def _warm_up(server: Server, options: Options) -> None:
    """Play an episode, and wait until every program's libraries are known and imported."""
    first = Many(1, options.provider, TASKS[options.servers], options.merge_pages)
    player = _Player(0, server, first)
    for step in (_Player.open, _Player.call, _Player.grade, _Player.close):
        await step(player)
    kept = server.state / "preload.json"
    with anyio.fail_after(LEARN_SECONDS):
        while "--preload" in options.more and not (  # noqa: ASYNC110  (nothing else says it)
            kept.exists() and len(json.loads(kept.read_bytes())["programs"]) == options.servers
        ):
            await anyio.sleep(POLL_SECONDS)
        # They wait for the imports, which come next.
        player = _Player(0, server, first)
        for step in (_Player.open, _Player.call, _Player.close):
            await step(player)
        while _in_use(await server.health()):  # noqa: ASYNC110
            await anyio.sleep(POLL_SECONDS)


def _cpu_seconds() -> float:
    """Of processes that have ended, and were waited for by their parents."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _in_use(health: dict[str, Any]) -> bool:
    return any(health[name] for name in IN_USE)


async def _all(players: list[_Player], step: Callable[[_Player], Awaitable[None]], many: Many) -> float:
    """Let all players do a step at once; returns the seconds that the last of them needed."""

    async def run(player: _Player) -> None:
        try:
            await step(player)
        except (OSError, EOFError, RuntimeError, ValueError) as error:
            many.counts.errors.append(f"{step.__name__}: {type(error).__name__}: {error}"[:300])

    started = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for player in players:
            tasks.start_soon(run, player)
    return time.perf_counter() - started


async def _settle(many: Many, limit_seconds: float) -> float:
    """Wait until merging saves no more. Returns the seconds."""
    started, before = time.perf_counter(), 0.0
    while many.merge_pages and time.perf_counter() - started < limit_seconds:
        await anyio.sleep(STEADY_SECONDS)
        if _merged_mib() - before < STEADY_MIB:
            break
        before = _merged_mib()
    return time.perf_counter() - started


def _containers(owner: str) -> list[str]:
    """Ids of this server's containers, in whatever state."""
    api: Any = docker.APIClient()
    try:
        containers = api.containers(all=True, filters={"label": f"{OWNER_LABEL}={owner}"})
    finally:
        api.close()
    return [container["Id"] for container in containers]


def _processes_mib(server: Server, provider: str) -> float:
    """PSS of the sandboxes' processes, and of the engine's process for each container."""
    children: dict[int, list[int]] = {}
    roots, containers = {server.pid}, set[bytes]()
    if provider == "docker":
        containers = {identifier.encode() for identifier in _containers(server.owner)}
        roots = set[int]()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with suppress(OSError, IndexError, ValueError):
            stat = (folder / "stat").read_text()
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(folder.name))
            if provider == "docker" and "containerd-shim" in stat:
                arguments = (folder / "cmdline").read_bytes().split(b"\0")
                if arguments[arguments.index(b"-id") + 1] in containers:
                    roots.add(int(folder.name))
    pending, pids = [*roots], set(roots)
    while pending:
        below = children.get(pending.pop(), [])
        pids.update(below)
        pending += below
    return sum(_share_kib(pid) for pid in pids - {server.pid}) / 1024


def _share_kib(pid: int) -> int:
    try:
        return _field(Path(f"/proc/{pid}/smaps_rollup"), "Pss")
    except (OSError, ValueError):
        return 0


def _available_mib() -> float:
    return _field(Path("/proc/meminfo"), "MemAvailable") / 1024


def _merged_mib() -> float:
    """Memory that merging saves now."""
    try:
        return int((KSM / "general_profit").read_text()) / (1 << 20)
    except (OSError, ValueError):
        return 0.0


def _field(file: Path, name: str) -> int:
    """A value in KiB of a file in the format of /proc/meminfo."""
    for line in file.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    raise ValueError(f"{file} has no {name}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many", description=__doc__)
    parser.add_argument("episodes", type=int, metavar="N", help="number of episodes at the same time")
    parser.add_argument("--merge-pages", action="store_true", help="merge equal pages of memory")
    parser.add_argument("--servers", type=int, choices=TASKS, default=2, help="servers a task [%(default)s]")
    parser.add_argument("--provider", choices=("docker", "host"), default="docker")
    parser.add_argument("--image", default="decathlon-test:latest", help="[%(default)s]")
    parser.add_argument("--settle", type=float, default=300, help="seconds to wait for merging [%(default)s]")
    parser.add_argument("--warm-up", action="store_true", help="play one episode before")
    parser.add_argument("--serve", default="", help="more options of `serve`, in one argument")
    parser.add_argument("--progress", action="store_true", help="print how far it is to stderr")
    given = parser.parse_args()
    options = Options(
        episodes=given.episodes,
        merge_pages=given.merge_pages,
        servers=given.servers,
        provider=given.provider,
        image=given.image,
        settle_seconds=given.settle,
        warm_up=given.warm_up,
        more=tuple(shlex.split(given.serve)),
        progress=given.progress,
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    before = machine()
    many = anyio.run(measure_many, options)
    json.dump({**before, **many.to_json()}, sys.stdout, indent=2)
    sys.stdout.write("\n")
    sys.exit(0 if many.is_complete else 1)


if __name__ == "__main__":
    main()
