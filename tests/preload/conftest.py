"""Sandboxes in namespaces, in which servers start by themselves or as forks."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest

from decathlon_mcp.driver.client import BOOT_COMMAND, DriverClient, connect
from decathlon_mcp.driver.transfers import put_archive
from decathlon_mcp.plugins.conformance.conformance import ROOT
from decathlon_mcp.plugins.conformance.target import file_entry, pack
from decathlon_mcp.plugins.preload.forkable_programs import NotPythonError, program_of
from decathlon_mcp.plugins.preload.libraries import find_libraries
from decathlon_mcp.plugins.preload.preloader import Preloader
from decathlon_mcp.plugins.preload.preloads import Kind, Preloads
from decathlon_mcp.sandboxes.base import Limits, SandboxSpec
from decathlon_mcp.sandboxes.host.host_files import HostFiles
from decathlon_mcp.sandboxes.host.namespaces import NamespaceSandbox
from decathlon_mcp.sandboxes.host.provider import HostProvider
from tests.fakes.calls import call_server
from tests.sandboxes.conftest import open_to_everyone

SERVERS = Path(__file__).with_name("servers")
LIBRARIES = ("mcp.server.mcpserver", "mcp.server.stdio", "anyio._backends._asyncio")


def spec_of(
    name: str, *args: str, command: str = "python3", env: dict[str, str] | None = None
) -> dict[str, Any]:
    return {
        "name": name,
        "command": command,
        "args": list(args),
        "env": env or {},
        "inherit": "minimal",
        "cwd": str(ROOT),
        "request_seconds": 60.0,
    }


STATE = spec_of("state", str(ROOT / "servers/state.py"), "--some", "argument", env={"OWN": "value"})


@dataclass(eq=False)
class Machine:
    """A provider whose servers are forks if `kinds` has them."""

    provider: HostProvider
    preloads: Forks
    files: HostFiles

    merges: bool = False
    """Whether memory of its sandboxes is merged."""

    async def preload(self, spec: dict[str, Any], libraries: Sequence[str] = LIBRARIES) -> Preloader:
        """Let servers of this definition be forks. Checks the libraries."""
        program = program_of(spec, self.files, merged=self.merges)
        found, left_out = await find_libraries(program, self.files, "", libraries)
        assert not left_out, left_out
        kind = Kind(program, self.files, None)
        await self.preloads.preload(kind, found)
        self.preloads.known[spec["name"]] = kind
        assert kind.process is not None
        return kind.process

    @asynccontextmanager
    async def sandbox(self, *specs: dict[str, Any]) -> AsyncGenerator[tuple[NamespaceSandbox, DriverClient]]:
        """A sandbox with the test's servers, which are defined."""
        limits = Limits(memory_mib=1024, pids=100)
        name = f"test-{secrets.token_hex(4)}"
        spec = SandboxSpec(name, BOOT_COMMAND, ROOT, limits=limits, merge_pages=self.merges)
        async with self.provider.open(spec) as sandbox, connect(sandbox) as driver:
            assert isinstance(sandbox, NamespaceSandbox)
            archive = pack(
                *[file_entry(f"servers/{file.name}", file.read_bytes()) for file in SERVERS.glob("*.py")]
            )
            await put_archive(sandbox, driver, sandbox.root, archive)
            await driver.define(specs)
            yield sandbox, driver

    async def call(self, driver: DriverClient, tool: str, **arguments: Any) -> str:
        reply = await call_server(driver, "state", {"name": tool, "arguments": arguments})
        return reply.decoded()["result"]["content"][0]["text"]


@dataclass(eq=False)
class Forks(Preloads):
    """Knows servers by their names, without episodes. `cold`: the reasons that others had."""

    known: dict[str, Kind] = field(default_factory=dict)
    cold: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(Path("/nowhere"))

    async def kind_of(self, sandbox: NamespaceSandbox, server: str) -> tuple[Kind, None]:
        if server not in self.known:
            raise NotPythonError("it is not preloaded")
        return self.known[server], None

    def note(self, server: str, reason: str) -> None:
        self.cold.append(reason)


@pytest.fixture
async def machine(anyio_backend: object, namespaces: None) -> AsyncIterator[Machine]:
    with open_to_everyone() as folder:
        async with HostProvider(f"test-{secrets.token_hex(4)}", folder / "sandboxes") as provider:
            files = await anyio.to_thread.run_sync(HostFiles.of_this_server)
            preloads = Forks()
            provider.connect(preloads.channel, preloads.run)
            await anyio.wait_all_tasks_blocked()
            yield Machine(provider, preloads, files)
            preloads.kinds = preloads.known
