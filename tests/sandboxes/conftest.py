"""The providers under test, and how to see what they leave on the machine."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.driver_client.driver import BOOT_COMMAND
from decathlon_mcp.sandboxes.base import Limits, Provider, SandboxSpec
from decathlon_mcp.sandboxes.conformance import ROOT, ProviderUnderTest
from decathlon_mcp.sandboxes.docker.events import OWNER_LABEL
from decathlon_mcp.sandboxes.docker.provider import DockerProvider
from decathlon_mcp.sandboxes.local.process_table import sandboxes_with_processes
from decathlon_mcp.sandboxes.local.provider import LocalProvider
from decathlon_mcp.types import Network
from tests.fakes.driver import FakeRun, RunReply
from tests.fakes.provider import FakeMachine, FakeProvider


@dataclass(frozen=True, kw_only=True)
class Bench(ProviderUnderTest):
    """A provider under test, with what tests of one provider need besides."""

    engine: Any = None
    """`docker.APIClient`; None without an engine."""

    def spec(
        self,
        *command: str,
        image: str | None = None,
        network: Network = "none",
        limits: Limits | None = None,
    ) -> SandboxSpec:
        """A sandbox whose first process is the driver, unless another is given."""
        return driver_spec(
            f"{self.owner}-{secrets.token_hex(4)}",
            command=command or BOOT_COMMAND,
            image=image or self.image,
            network=network,
            limits=limits or Limits(memory_mib=512),
        )

    def processes(self) -> Collection[str]:
        """This owner's sandboxes that have a process on this machine."""
        return sandboxes_with_processes(self.owner)


def driver_spec(
    name: str,
    *,
    command: tuple[str, ...] = BOOT_COMMAND,
    image: str | None = None,
    network: Network = "none",
    limits: Limits | None = None,
) -> SandboxSpec:
    return SandboxSpec(name, command, ROOT, image, network, limits or Limits())


@asynccontextmanager
async def open_bench(kind: str, request: pytest.FixtureRequest, folder: Path) -> AsyncGenerator[Bench]:
    owner = f"test-{secrets.token_hex(4)}"
    if kind == "fake":
        bench = fake_bench(owner, folder)
    elif kind == "local":
        bench = local_bench(owner, folder)
    else:
        engine, image = request.getfixturevalue("docker_engine"), request.getfixturevalue("test_image")
        bench = docker_bench(owner, folder, engine, image)
    async with bench.provider:
        yield bench
        await bench.assert_nothing_left()


def fake_bench(owner: str, folder: Path) -> Bench:
    machine = FakeMachine()

    def run(request: FakeRun) -> RunReply:
        return RunReply(stdout=" ".join(request.argv[1:]) + "\n")  # every program is `echo`

    async def resources() -> Collection[str]:
        return list(machine.sandboxes)

    return bench_of(
        owner,
        folder,
        lambda: FakeProvider(owner, machine=machine, run=run),
        resources=resources,
        runs_commands=False,
    )


def local_bench(owner: str, folder: Path) -> Bench:
    sandboxes = folder / "sandboxes"

    async def resources() -> Collection[str]:
        return [*sandboxes_with_processes(owner), *(path.name for path in sandboxes.glob("*"))]

    return bench_of(owner, folder, lambda: LocalProvider(owner, sandboxes), resources=resources)


def docker_bench(owner: str, folder: Path, engine: Any, image: str) -> Bench:
    filters = {"label": f"{OWNER_LABEL}={owner}"}

    async def resources() -> Collection[str]:
        return [container["Names"][0] for container in engine.containers(all=True, filters=filters)]

    return bench_of(
        owner, folder, lambda: DockerProvider(owner), resources=resources, image=image, engine=engine
    )


def bench_of(owner: str, folder: Path, create: Callable[[], Provider], **fields: Any) -> Bench:
    return Bench(owner=owner, provider=create(), create_second=create, scratch=folder, **fields)


@pytest.fixture
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    """The provider named by the test's parameter."""
    async with open_bench(request.param, request, tmp_path) as bench:
        yield bench


@pytest.fixture(params=["local", pytest.param("docker", marks=pytest.mark.docker)])
async def real(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    """Every provider that runs processes."""
    async with open_bench(request.param, request, tmp_path) as bench:
        yield bench


@pytest.fixture
async def local(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    async with open_bench("local", request, tmp_path) as bench:
        yield bench


@pytest.fixture
async def docker(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    async with open_bench("docker", request, tmp_path) as bench:
        yield bench
