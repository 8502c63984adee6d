"""A Ray cluster of three nodes on this machine, and batches that are played on it.

Not part of the normal test run, because it installs Ray and takes some ten minutes. To run it:

    python -m pytest tests/ray/three_nodes.py -s

Ray and this project go into an environment of their own; `DECATHLON_RAY` names one that exists. The client
runs in the environment of the tests, without Ray. Needs a Docker engine and the tests' image.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import tempfile
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from anyio.abc import Process
from decathlon_client import Decathlon, Episode, NodeLostError, Result

from decathlon_mcp.http.authentication import new_token
from tests.docs.pages import REPOSITORY
from tests.docs.snippets import install
from tests.ports import free_port
from tests.probe.serving import SUITE

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(1800)]

START_SECONDS = 240
END_SECONDS = 120
NODES = 3
PER_NODE = 32
OBJECT_STORE_BYTES = 100 << 20
RUN_VARIABLE = "DECATHLON_RAY_RUN"
"""In the environment of everything that a test starts; its value is the test's."""


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with Ray and this project."""
    if given := os.environ.get("DECATHLON_RAY"):
        return Path(given) / "bin"
    return anyio.run(install, tmp_path_factory.mktemp("ray"), f"{REPOSITORY}[server,ray]")


@dataclass
class Cluster:
    """A cluster: its head without sandboxes, and nodes that have them. `url` is that of Serve's proxy."""

    programs: Path
    folder: Path
    run: str = field(default_factory=lambda: secrets.token_hex(6))
    ray_token: str = field(default_factory=lambda: secrets.token_hex(32))
    port: int = 0
    url: str = ""
    token: str = ""
    names: list[str] = field(default_factory=list[str])
    serving: Process | None = None

    def environment(self, node: str) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "PYTHONPATH": "",
            "RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING": "0",
            "RAY_DEDUP_LOGS": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.ray_token,
            # Otherwise the next program with Ray on this machine looks for this cluster.
            "RAY_TMPDIR": str(self.folder),
            "DECATHLON_STATE": str(self.folder / node),
            RUN_VARIABLE: self.run,
            "DECATHLON_REQUIRE_DOCKER": "",
            f"{RUN_VARIABLE}_NODE": node,
        }

    def processes(self, node: str | None = None) -> list[int]:
        """Everything that was started for this cluster, or for one of its nodes."""
        marks = {f"{RUN_VARIABLE}={self.run}".encode()}
        if node is not None:
            marks.add(f"{RUN_VARIABLE}_NODE={node}".encode())
        found, children = list[int](), dict[int, list[int]]()
        for folder in Path("/proc").iterdir():
            with suppress(OSError):
                if folder.name.isdecimal():
                    pid = int(folder.name)
                    parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                    children.setdefault(int(parent), []).append(pid)
                    if marks <= set((folder / "environ").read_bytes().split(b"\0")):
                        found.append(pid)
        # Ray's workers overwrite their environment with their titles, but they are children of what has it.
        for pid in found:
            found += (child for child in children.get(pid, ()) if child not in found)
        return found

    def servers(self) -> list[int]:
        """Its nodes' servers, and their supervisors."""
        found: list[int] = []
        for pid in self.processes():
            with suppress(OSError):
                found += [pid] * (b"decathlon_mcp.cli" in Path(f"/proc/{pid}/cmdline").read_bytes())
        return found

    def signal(self, number: int, node: str | None = None) -> None:
        for pid in self.processes(node):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    async def run_program(self, name: str, *arguments: str, node: str = "head") -> None:
        command = [str(self.programs / name), *arguments]
        address = {"RAY_ADDRESS": f"127.0.0.1:{self.port}"} if name == "serve" else {}
        await anyio.run_process(command, env={**self.environment(node), **address}, stderr=None)

    async def serve(self, *arguments: str) -> None:
        """Start a program that serves until it is interrupted."""
        command = [str(self.programs / "serve"), *arguments]
        # With its own action for SIGINT, which shells let background jobs ignore.
        self.serving = await anyio.open_process(
            ["env", "--default-signal=INT", *command],
            env={**self.environment("head"), "RAY_ADDRESS": f"127.0.0.1:{self.port}"},
            stdout=None,
            stderr=None,
        )

    async def add_node(self, name: str) -> None:
        self.names.append(name)
        resources = json.dumps({"decathlon": 1})
        await self.run_program(
            *("ray", "start", "--address", f"127.0.0.1:{self.port}", "--num-cpus", "1"),
            *("--object-store-memory", str(OBJECT_STORE_BYTES), "--resources", resources),
            node=name,
        )

    async def nodes(self) -> list[str]:
        async with httpx2.AsyncClient(timeout=10) as client:
            try:
                return (await client.get(f"{self.url}/nodes")).json()["nodes"]
            except (httpx2.HTTPError, ValueError):
                return []

    async def wait_for_nodes(self, count: int) -> None:
        with anyio.fail_after(START_SECONDS):
            while len(await self.nodes()) != count:  # noqa: ASYNC110
                await anyio.sleep(0.5)


@asynccontextmanager
async def cluster_of(programs: Path, folder: Path, nodes: int, *options: str) -> AsyncGenerator[Cluster]:
    """Start a cluster as the documentation says; at the end nothing of it is left."""
    cluster = Cluster(programs, folder)
    cluster.token, line = new_token("trainer", "player")
    tokens = folder / "tokens"
    tokens.write_text(line)
    cluster.port, port = free_port(), free_port()
    cluster.url = f"http://127.0.0.1:{port}"
    arguments = (f"nodes={nodes}", f"tokens={tokens}", f"suite={SUITE}", "log_level=warning", *options)
    try:
        await cluster.run_program(
            *("ray", "start", "--head", "--port", str(cluster.port), "--num-cpus", "1"),
            *("--include-dashboard=false", "--object-store-memory", str(OBJECT_STORE_BYTES)),
        )
        for number in range(nodes):
            await cluster.add_node(f"node{number}")
        proxy = ("--http-host", "127.0.0.1", "--http-port", str(port), "--proxy-location", "HeadOnly")
        await cluster.run_program("serve", "start", *proxy)
        await cluster.serve("run", "decathlon_mcp.plugins.cluster.ray:app", *arguments)
        await cluster.wait_for_nodes(nodes)
        yield cluster
    finally:
        with anyio.CancelScope(shield=True):
            cluster.signal(signal.SIGCONT)
            if cluster.serving is not None:
                cluster.serving.send_signal(signal.SIGINT)
                await cluster.serving.wait()
            with anyio.fail_after(END_SECONDS):
                while cluster.servers():  # noqa: ASYNC110
                    await anyio.sleep(0.5)
            cluster.signal(signal.SIGKILL)
            # What a server left that was killed; the next one on its folder would remove it.
            for name in cluster.names:
                await cluster.run_program("decathlon-mcp", "gc", "--abandon", "--state", str(folder / name))


async def solve(e: Episode) -> str:
    await e.call("probe__write", {"path": "answer.txt", "text": "42"})
    await e.claim_done()
    return e.address


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short: Ray's sockets lie deep below it, and their paths may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def containers(docker_engine: Any) -> int:
    return len(docker_engine.containers(all=True, filters={"label": "decathlon.owner"}))


@dataclass
class Play:
    """A batch whose episodes are all open before any is played."""

    cluster: Cluster
    results: list[Result[str]] = field(default_factory=list[Result[str]])
    open: int = 0
    all_open: anyio.Event = field(default_factory=anyio.Event)
    go_on: anyio.Event = field(default_factory=anyio.Event)
    noticed: anyio.Event = field(default_factory=anyio.Event)

    async def player(self, e: Episode) -> str:
        self.open += 1
        if self.open == NODES * PER_NODE:
            self.all_open.set()
        await self.all_open.wait()
        try:
            while not self.go_on.is_set():
                await e.call("probe__echo", {"text": "here"})
                await anyio.sleep(2)
        except NodeLostError:
            self.noticed.set()
            raise
        return await solve(e)

    async def run(self, d: Decathlon) -> None:
        size = NODES * PER_NODE
        async with d.batch(["find-answer"] * size, concurrency=size, progress=False) as batch:
            async for result in batch.run(self.player):
                self.results.append(result)


@pytest.mark.docker
@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_96_episodes_of_which_a_third_lose_their_node(
    environment: Path, folder: Path, test_image: str, docker_engine: Any, fault: str
) -> None:
    before = containers(docker_engine)
    options = ("provider=docker", f"image={test_image}", "max_opening=2")
    options += (f"max_sandboxes={PER_NODE * 2}",)
    async with cluster_of(environment, folder, NODES, *options) as cluster:
        play = Play(cluster)
        async with Decathlon(cluster.url, cluster.token) as d, anyio.create_task_group() as tasks:
            tasks.start_soon(play.run, d)
            await play.all_open.wait()
            number = signal.SIGKILL if fault == "killed" else signal.SIGSTOP
            cluster.signal(number, "node0")
            with anyio.fail_after(120):
                await play.noticed.wait()
                await anyio.sleep(10)
            play.go_on.set()
        lost = [one for result in play.results for one in result.lost]
        assert [result.reward for result in play.results] == [1.0] * NODES * PER_NODE
        assert len(lost) == len(set(lost)) >= PER_NODE // 2
        assert len(lost) < 2 * PER_NODE
        await cluster.wait_for_nodes(NODES - 1)
        if fault == "killed":
            await cluster.add_node("node3")
            await cluster.wait_for_nodes(NODES)
            async with Decathlon(cluster.url, cluster.token) as d:
                async with d.batch(["find-answer"] * 12, concurrency=6, progress=False) as batch:
                    again = [result async for result in batch.run(solve)]
            assert [result.reward for result in again] == [1.0] * 12
            assert len({str(result.played).partition("/episodes/")[0] for result in again}) == NODES
    assert containers(docker_engine) == before
    assert not cluster.processes()
