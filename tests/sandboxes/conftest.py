"""The providers under test, and how to see what they leave on the machine."""

from __future__ import annotations

import json
import secrets
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import Process

from decathlon_mcp.driver.client import BOOT_COMMAND
from decathlon_mcp.plugins.conformance.conformance import ROOT, LastStep, ProviderUnderTest
from decathlon_mcp.plugins.docker.exit_events import OWNER_LABEL
from decathlon_mcp.plugins.docker.provider import DockerProvider
from decathlon_mcp.sandboxes.base import Limits, Provider, SandboxSpec
from decathlon_mcp.sandboxes.host.cgroups import Hierarchies
from decathlon_mcp.sandboxes.host.isolation import why_no_own_network, why_unavailable
from decathlon_mcp.sandboxes.host.plugin import FOLDER
from decathlon_mcp.types import Network
from tests.fakes.driver import FakeRun, RunReply
from tests.fakes.provider import FakeMachine, FakeProvider
from tests.probe.leftovers import processes_by_sandbox
from tests.sandboxes.killed_server import host_provider, spec_arguments


@dataclass(frozen=True, kw_only=True)
class Bench(ProviderUnderTest):
    """A provider under test, with what tests of one provider need besides."""

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
        return driver_spec(
            f"{self.owner}-{secrets.token_hex(4)}",
            command=command or BOOT_COMMAND,
            image=image or self.image,
            network=network,
            limits=limits or Limits(memory_mib=512),
        )

    def processes(self) -> Collection[str]:
        """The sandboxes without isolation that have a process on this machine."""
        return processes_by_sandbox(self.scratch / FOLDER).keys()


def driver_spec(
    name: str,
    *,
    command: tuple[str, ...] = BOOT_COMMAND,
    image: str | None = None,
    network: Network = "none",
    limits: Limits | None = None,
) -> SandboxSpec:
    return SandboxSpec(name, command, ROOT, image, network, limits or Limits())


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
    elif kind == "namespaces":
        bench = namespaces_bench(owner, folder)
    elif kind == "networked":
        assert (reason := why_no_own_network()) is None, reason
        bench = namespaces_bench(owner, folder, network="outbound")
    elif kind == "image":
        bench = host_bench(owner, folder, image=request.getfixturevalue("unpacked_image"))
    elif kind == "gvisor":
        request.getfixturevalue("runsc")
        bench = host_bench(owner, folder, image=request.getfixturevalue("unpacked_image"), kernel="gvisor")
    else:
        assert kind == "docker", kind
        engine, image = request.getfixturevalue("docker_engine"), request.getfixturevalue("test_image")
        bench = docker_bench(owner, folder, engine, image)
    async with bench.machine or nullcontext(), bench.provider:
        yield bench
        await bench.assert_nothing_left()


def fake_bench(owner: str, folder: Path) -> Bench:
    machine = FakeMachine()

    def run(request: FakeRun) -> RunReply:
        return RunReply(stdout=" ".join(request.argv[1:]) + "\n")  # every program is `echo`

    async def resources() -> Collection[str]:
        return list(machine.sandboxes)

    async def leave_behind(specs: Sequence[SandboxSpec], last_step: LastStep) -> None:
        async with FakeProvider(former(owner), machine=machine, run=run) as server, AsyncExitStack() as stack:
            for spec in specs:
                sandbox = await stack.enter_async_context(server.open(spec))
                if last_step == "pause":
                    await sandbox.pause()
                elif last_step == "end":
                    await sandbox.lose()
            server.die()

    return bench_of(
        owner,
        folder,
        lambda: FakeProvider(owner, machine=machine, run=run),
        leave_behind=leave_behind,
        resources=resources,
        runs_commands=False,
        machine=machine,
    )


def plain_bench(owner: str, folder: Path) -> Bench:
    sandboxes = folder / FOLDER

    async def resources() -> Collection[str]:
        return [*processes_by_sandbox(sandboxes), *(path.name for path in sandboxes.glob("*"))]

    return bench_of(
        owner,
        folder,
        lambda: host_provider(owner, sandboxes, "none"),
        resources=resources,
        host={"isolation": "none"},
    )


def namespaces_bench(owner: str, folder: Path, *, network: Network = "none") -> Bench:
    assert (reason := why_unavailable()) is None, reason
    return host_bench(owner, folder, network=network)


def host_bench(
    owner: str,
    folder: Path,
    *,
    image: str | None = None,
    kernel: str | None = None,
    network: Network = "none",
) -> Bench:
    sandboxes = folder / FOLDER
    parents = set(Hierarchies.of_this_process().by_limit.values())

    async def resources() -> Collection[str]:
        groups = [str(path) for parent in parents for path in parent.glob(f"decathlon-{owner}-*")]
        return [*groups, *(path.name for path in sandboxes.glob("*"))]

    return bench_of(
        owner,
        folder,
        lambda: host_provider(owner, sandboxes, kernel=kernel),
        resources=resources,
        image=image,
        network=network,
        host={"kernel": kernel},
    )


def docker_bench(owner: str, folder: Path, engine: Any, image: str) -> Bench:
    async def resources() -> Collection[str]:
        labels = [f"{OWNER_LABEL}={owner}" for owner in (owner, former(owner))]
        found = [engine.containers(all=True, filters={"label": label}) for label in labels]
        return [container["Names"][0] for containers in found for container in containers]

    return bench_of(
        owner, folder, lambda: DockerProvider(owner), resources=resources, image=image, engine=engine
    )


def bench_of(
    owner: str,
    folder: Path,
    create: Callable[[], Provider],
    *,
    host: Mapping[str, str | None] | None = None,
    plugin: tuple[str, Sequence[str]] | None = None,
    **fields: Any,
) -> Bench:
    """A bench. Of the provider that its killed servers have, `host` are the arguments of `host_provider`,
    and `plugin` the name and the options.
    """

    async def leave_behind(specs: Sequence[SandboxSpec], last_step: LastStep) -> None:
        async with killed_server(
            former(owner), folder, specs, last_step, host=host, wait_for="ready", plugin=plugin
        ) as server:
            server.kill()
            await server.wait()

    fields = {"leave_behind": leave_behind, **fields}
    return Bench(
        owner=owner,
        former_owner=former(owner),
        provider=create(),
        create_second=create,
        scratch=folder,
        **fields,
    )


def former(owner: str) -> str:
    """Owner of the servers that are killed before the test's own."""
    return f"{owner}-former"


@asynccontextmanager
async def killed_server(
    owner: str,
    folder: Path,
    specs: Sequence[SandboxSpec],
    last_step: LastStep = "none",
    *,
    host: Mapping[str, str | None] | None = None,
    wait_for: str,
    plugin: tuple[str, Sequence[str]] | None = None,
    survival: int | None = None,
) -> AsyncGenerator[Process]:
    """A separate process that opens sandboxes, in the folder that the bench's provider uses.

    `host`: arguments of `host_provider`.
    `wait_for`: what it must have reported, "opening" or "ready". `survival`: as in that program.
    """
    arguments = {
        "owner": owner,
        "folder": str(folder / FOLDER),
        "host": host,
        "specs": [spec_arguments(spec) for spec in specs],
        "last_step": last_step,
        "plugin": plugin,
        "survival": survival,
    }
    command = [sys.executable, "-m", "tests.sandboxes.killed_server", json.dumps(arguments)]
    async with await anyio.open_process(command, stderr=None) as server:
        assert server.stdout is not None
        reported = b""
        while wait_for.encode() not in reported:
            reported += await server.stdout.receive()
        yield server


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
