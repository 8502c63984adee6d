"""One bench for every provider: how to open its sandboxes, and what of them is left on the machine."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import anyio
import pytest

from decathlon_mcp.driver_client.driver import BOOT_COMMAND
from decathlon_mcp.sandboxes.base import Limits, Provider, SandboxSpec
from decathlon_mcp.sandboxes.docker.events import OWNER_LABEL
from decathlon_mcp.sandboxes.docker.provider import DockerProvider
from decathlon_mcp.sandboxes.local.processes import marked
from decathlon_mcp.sandboxes.local.provider import LocalProvider
from decathlon_mcp.types import Network
from tests.fakes import FakeMachine, FakeProvider, FakeRun, RunReply

ROOT = PurePosixPath("/episode")


@dataclass(frozen=True)
class Bench:
    """A provider under test. `again` makes another one of the same owner on the same machine."""

    owner: str
    provider: Provider
    again: Callable[[], Provider]
    left: Callable[[], list[str]]
    """What there is of this owner's sandboxes: containers, processes, folders."""
    processes: Callable[[], Collection[str]] = tuple
    """Of these sandboxes, those that have a process of this machine."""
    image: str | None = None
    engine: Any = None
    """Where there is one: `docker.APIClient`."""

    def spec(
        self,
        *command: str,
        name: str = "",
        image: str | None = None,
        network: Network = "none",
        limits: Limits | None = None,
        environment: tuple[tuple[str, str], ...] = (),
    ) -> SandboxSpec:
        """A sandbox whose first process is the driver, unless another is given."""
        return SandboxSpec(
            name=name or f"{self.owner}-{secrets.token_hex(4)}",
            command=command or BOOT_COMMAND,
            root=ROOT,
            image=image or self.image,
            network=network,
            limits=limits or Limits(memory_mib=512),
            environment=environment,
        )

    def python(self, script: str) -> SandboxSpec:
        """A sandbox whose first process is a Python script."""
        return self.spec("python3", "-I", "-S", "-u", "-c", script)

    async def nothing_is_left(self) -> None:
        """Waits for it; the test's own deadline bounds it."""
        while self.left():  # noqa: ASYNC110  (nobody tells when a process or a container is gone)
            await anyio.sleep(0.05)

    async def no_process_is_left(self) -> None:
        """The same."""
        while self.processes():  # noqa: ASYNC110
            await anyio.sleep(0.05)


@asynccontextmanager
async def _bench(kind: str, request: pytest.FixtureRequest, folder: Path) -> AsyncGenerator[Bench]:
    owner = f"test-{secrets.token_hex(4)}"
    if kind == "fake":
        bench = _fake(owner)
    elif kind == "local":
        bench = _local(owner, folder / "sandboxes")
    else:
        bench = _docker(
            owner, request.getfixturevalue("docker_engine"), request.getfixturevalue("test_image")
        )
    async with bench.provider:
        yield bench
        assert bench.left() == []


def _fake(owner: str) -> Bench:
    machine = FakeMachine()

    def run(asked: FakeRun) -> RunReply:
        return RunReply(stdout=" ".join(asked.argv[1:]) + "\n")  # whatever is run is `echo`

    def again() -> FakeProvider:
        return FakeProvider(owner, machine=machine, run=run)

    return Bench(owner, again(), again, lambda: list(machine.sandboxes))


def _local(owner: str, folder: Path) -> Bench:
    def again() -> LocalProvider:
        return LocalProvider(owner, folder)

    def left() -> list[str]:
        return [*marked(owner), *(path.name for path in folder.glob("*"))]

    return Bench(owner, again(), again, left, lambda: marked(owner))


def _docker(owner: str, engine: Any, image: str) -> Bench:
    filters = {"label": f"{OWNER_LABEL}={owner}"}

    def again() -> DockerProvider:
        return DockerProvider(owner)

    def left() -> list[str]:
        return [each["Names"][0] for each in engine.containers(all=True, filters=filters)]

    return Bench(owner, again(), again, left, image=image, engine=engine)


@pytest.fixture(params=["fake", "local", pytest.param("docker", marks=pytest.mark.docker)])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    """Every provider in turn."""
    async with _bench(request.param, request, tmp_path) as bench:
        yield bench


@pytest.fixture(params=["local", pytest.param("docker", marks=pytest.mark.docker)])
async def real(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    """Every provider that runs processes."""
    async with _bench(request.param, request, tmp_path) as bench:
        yield bench


@pytest.fixture
async def local(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    async with _bench("local", request, tmp_path) as bench:
        yield bench


@pytest.fixture
async def docker(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    async with _bench("docker", request, tmp_path) as bench:
        yield bench
