"""The providers under test, and how to see what they leave on the machine."""

from __future__ import annotations

import pickle
import secrets
import sys
import tempfile
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Generator,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import Process

from decathlon_mcp.driver.client import BOOT_COMMAND
from decathlon_mcp.plugins.conformance.conformance import ROOT, LastStep, ProviderUnderTest
from decathlon_mcp.plugins.docker.exit_events import OWNER_LABEL
from decathlon_mcp.plugins.docker.provider import DockerProvider
from decathlon_mcp.plugins.gvisor.sandbox import GvisorSandbox
from decathlon_mcp.sandboxes.base import Limits, SandboxSpec
from decathlon_mcp.sandboxes.host.cgroups import Hierarchies
from decathlon_mcp.sandboxes.host.namespaces import NamespaceSandbox
from decathlon_mcp.sandboxes.host.plugin import FOLDER
from decathlon_mcp.sandboxes.host.provider import HostProvider
from decathlon_mcp.types import Network
from tests.fakes.driver import FakeRun, RunReply
from tests.fakes.provider import FakeMachine, FakeProvider
from tests.probe.leftovers import processes_by_sandbox


@dataclass(frozen=True, kw_only=True)
class Bench(ProviderUnderTest):
    """A provider under test, with what tests of one provider need besides."""

    create: Callable[[str], Any]
    """Makes a provider of an owner; it can be pickled, for servers that are killed."""
    engine: Any = None
    """`docker.APIClient`; None without an engine."""
    machine: FakeMachine | None = None

    def spec(
        self,
        *command: str,
        image: str | None = None,
        network: Network = "none",
        limits: Limits | None = None,
    ) -> SandboxSpec:
        """A sandbox whose first process is the driver, unless another is given."""
        name = f"{self.owner}-{secrets.token_hex(4)}"
        limits = limits or Limits(memory_mib=512)
        return SandboxSpec(name, command or BOOT_COMMAND, ROOT, image or self.image, network, limits)

    def processes(self) -> Collection[str]:
        """The sandboxes without isolation that have a process on this machine."""
        return processes_by_sandbox(self.scratch / FOLDER).keys()

    @asynccontextmanager
    async def killed_server(
        self,
        specs: Sequence[SandboxSpec],
        last_step: LastStep = "none",
        *,
        wait_for: str = "ready",
        survival: int | None = None,
    ) -> AsyncGenerator[Process]:
        """A separate process that opens sandboxes. `wait_for`: what it must have reported.

        `survival`: as in that program.
        """
        create, saved = partial(self.create, self.former_owner), self.scratch / "saved-by-server"
        specs = [replace(spec, limits=Limits(memory_mib=512)) for spec in specs]
        arguments = pickle.dumps((create, specs, last_step, saved, survival)).hex()
        command = [sys.executable, "-m", "tests.sandboxes.killed_server", arguments]
        async with await anyio.open_process(command, stderr=None) as server:
            assert server.stdout is not None
            reported = b""
            try:
                while wait_for.encode() not in reported:
                    reported += await server.stdout.receive()
                yield server
            finally:
                with suppress(ProcessLookupError):
                    server.kill()


@contextmanager
def open_to_everyone() -> Generator[Path]:
    """A folder for other users too, which root's sandboxes run as. They cannot enter those of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@asynccontextmanager
async def open_bench(kind: str, request: pytest.FixtureRequest, folder: Path) -> AsyncGenerator[Bench]:
    owner = f"test-{secrets.token_hex(4)}"
    if kind == "fake":
        bench = fake_bench(owner, folder)
    elif kind == "plain":
        bench = plain_bench(owner, folder)
    elif kind == "docker":
        engine, image = request.getfixturevalue("docker_engine"), request.getfixturevalue("test_image")
        bench = docker_bench(owner, folder, engine, image)
    else:
        image = request.getfixturevalue("unpacked_image") if kind in ("image", "gvisor") else None
        if kind == "gvisor":
            request.getfixturevalue("runsc")
        elif kind != "image":
            request.getfixturevalue("own_network" if kind == "networked" else "namespaces")
        bench = namespaces_bench(owner, folder, kind, image)
    async with bench.machine or nullcontext(), bench.provider:
        yield bench
        await bench.assert_nothing_left()


def fake_bench(owner: str, folder: Path) -> Bench:
    machine = FakeMachine()

    def run(request: FakeRun) -> RunReply:
        return RunReply(stdout=" ".join(request.argv[1:]) + "\n")  # every program is `echo`

    async def resources() -> Collection[str]:
        return list(machine.sandboxes)

    create = partial(FakeProvider, machine=machine, run=run)

    async def leave_behind(specs: Sequence[SandboxSpec], last_step: LastStep) -> None:
        async with create(former(owner)) as server, AsyncExitStack() as stack:
            for spec in specs:
                sandbox = await stack.enter_async_context(server.open(spec))
                if last_step == "pause":
                    await sandbox.pause()
                elif last_step == "end":
                    await sandbox.lose()
            server.die()

    fields: dict[str, Any] = {"leave_behind": leave_behind, "runs_commands": False, "machine": machine}
    return bench_of(owner, folder, create, resources, **fields)


def plain_bench(owner: str, folder: Path) -> Bench:
    sandboxes = folder / FOLDER

    async def resources() -> Collection[str]:
        return [*processes_by_sandbox(sandboxes), *(path.name for path in sandboxes.glob("*"))]

    return bench_of(owner, folder, partial(HostProvider, folder=sandboxes, isolation="none"), resources)


def namespaces_bench(owner: str, folder: Path, kind: str, image: str | None) -> Bench:
    sandboxes = folder / FOLDER
    parents = set(Hierarchies.of_this_process().by_limit.values())

    async def resources() -> Collection[str]:
        groups = [str(path) for parent in parents for path in parent.glob(f"decathlon-{owner}-*")]
        return [*groups, *(path.name for path in sandboxes.glob("*"))]

    sandbox = GvisorSandbox if kind == "gvisor" else NamespaceSandbox
    create = partial(HostProvider, folder=sandboxes, kernel=sandbox)
    network = "outbound" if kind == "networked" else "none"
    return bench_of(owner, folder, create, resources, image=image, network=network)


def docker_bench(
    owner: str,
    folder: Path,
    engine: Any,
    image: str,
    create: Callable[[str], Any] = DockerProvider,
    **fields: Any,
) -> Bench:
    async def resources() -> Collection[str]:
        labels = [f"{OWNER_LABEL}={owner}" for owner in (owner, former(owner))]
        found = [engine.containers(all=True, filters={"label": label}) for label in labels]
        return [container["Names"][0] for containers in found for container in containers]

    return bench_of(owner, folder, create, resources, image=image, engine=engine, **fields)


def bench_of(
    owner: str,
    folder: Path,
    create: Callable[[str], Any],
    resources: Callable[[], Awaitable[Collection[str]]],
    **fields: Any,
) -> Bench:
    async def leave_behind(specs: Sequence[SandboxSpec], last_step: LastStep) -> None:
        async with bench.killed_server(specs, last_step):
            pass

    fields = {"leave_behind": leave_behind, **fields}
    bench = Bench(
        owner=owner,
        former_owner=former(owner),
        create=create,
        provider=create(owner),
        create_second=lambda: create(owner),
        resources=resources,
        scratch=folder,
        **fields,
    )
    return bench


def former(owner: str) -> str:
    """Owner of the servers that are killed before the test's own."""
    return f"{owner}-former"


@pytest.fixture
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    """The provider named by the test's parameter."""
    async with open_bench(request.param, request, tmp_path) as bench:
        yield bench


@pytest.fixture(params=["plain", pytest.param("docker", marks=pytest.mark.docker)])
async def real(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    """Every provider that runs processes."""
    async with open_bench(request.param, request, tmp_path) as bench:
        yield bench


def _bench_fixture(name: str, kind: str) -> Any:
    @pytest.fixture(name=name)
    async def of_kind(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
        async with open_bench(kind, request, tmp_path) as bench:
            yield bench

    return of_kind


local = _bench_fixture("local", "plain")
networked = _bench_fixture("networked", "networked")
bubblewrap = _bench_fixture("bubblewrap", "image")
gvisor = _bench_fixture("gvisor", "gvisor")
docker = _bench_fixture("docker", "docker")
