"""Supervised servers to kill, what their stores say, and what is left of them at the end."""

from __future__ import annotations

import signal
import sqlite3
import sys
import tempfile
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import docker
from docker.errors import APIError

from decathlon_mcp.plugins.docker.exit_events import OWNER_LABEL, SANDBOX_LABEL
from decathlon_mcp.sandboxes.host.plugin import FOLDER
from decathlon_mcp.sandboxes.host.sandbox_folder import LEADER_FILE, read_process
from decathlon_mcp.storage.database import FILE_NAME
from decathlon_mcp.storage.store import EpisodeRow, SandboxRow, Store
from tests.probe.leftovers import processes_marked
from tests.survival.servers import SupervisedServer, supervised_server

ProviderName = Literal["docker", "host"]

IMAGE = "decathlon-test:latest"
ANSWER = "42"
"""What `find-answer` of the probe suite is rewarded for, in answer.txt."""
LOG_CHARACTERS = 20_000
"""How much of a server's log is printed if a benchmark fails."""
REMOVAL_SECONDS = 30.0
"""How long removals that were under way may take before what remains counts as left behind."""


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What remains of a state folder's servers after they have ended."""

    containers: int
    processes: int
    folders: int

    @property
    def count(self) -> int:
        return self.containers + self.processes + self.folders

    def __str__(self) -> str:
        return f"{self.containers} containers, {self.processes} processes, {self.folders} folders"


@dataclass(frozen=True, slots=True)
class Sandboxes:
    """The sandboxes of one state folder, as the engine or the kernel knows them."""

    provider: ProviderName
    state: Path

    async def kill_first_process(self, sandbox: SandboxRow) -> bool:
        """Kill a sandbox's first process by SIGKILL from outside; returns whether there was one."""
        kill = self._kill_container if self.provider == "docker" else self._kill_process
        return await anyio.to_thread.run_sync(kill, sandbox)

    def _kill_container(self, sandbox: SandboxRow) -> bool:
        api: Any = docker.APIClient()
        labels = [f"{OWNER_LABEL}={sandbox.owner}", f"{SANDBOX_LABEL}={sandbox.name}"]
        killed = False
        try:
            for container in api.containers(filters={"label": labels}):
                # It may end, or be paused, at the same moment.
                with suppress(APIError):
                    api.kill(container["Id"], "SIGKILL")
                    killed = True
        finally:
            api.close()
        return killed

    def _kill_process(self, sandbox: SandboxRow) -> bool:
        leader = read_process(self.state / FOLDER / sandbox.name, LEADER_FILE)
        if leader is None:
            return False
        try:
            leader.send(signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def count_containers(self, owners: Collection[str]) -> int:
        """Count the containers of these servers, in whatever state."""
        if self.provider != "docker":
            return 0
        api: Any = docker.APIClient()
        try:
            containers = api.containers(all=True, filters={"label": OWNER_LABEL})
        finally:
            api.close()
        return sum(container["Labels"][OWNER_LABEL] in owners for container in containers)

    def count_leftovers(self) -> Leftovers:
        owners: set[str] = set()
        # A server whose episodes end with it has no store, and no container that could be left.
        if (self.state / FILE_NAME).exists():
            with closing(sqlite3.connect(self.state / FILE_NAME)) as connection:
                owners = {server for (server,) in connection.execute("SELECT server FROM server_starts")}
        folders = [*(self.state / "servers").iterdir(), *(self.state / "scratch").iterdir()]
        if (self.state / FOLDER).is_dir():
            folders += [*(self.state / FOLDER).iterdir()]
        processes = processes_marked(self.state)
        return Leftovers(self.count_containers(owners), len(processes), len(folders))


@dataclass(frozen=True, slots=True)
class KillableServer:
    """A supervised server on a state folder of its own. `leftovers` gets its item at the end."""

    process: SupervisedServer
    sandboxes: Sandboxes
    leftovers: list[Leftovers]

    @property
    def url(self) -> str:
        return self.process.url

    @property
    def state(self) -> Path:
        return self.process.state

    def live_episodes(self) -> list[tuple[EpisodeRow, list[SandboxRow]]]:
        """The episodes that have not ended, with their sandboxes, as the store has them."""
        with Store.open_read_only(self.state) as store:
            assert store is not None
            return [(row, store.find(SandboxRow, episode=row.id)) for row in store.unfinished_episodes()]


@asynccontextmanager
async def killable_server(provider: ProviderName, *arguments: str) -> AsyncGenerator[KillableServer]:
    """Run a server with the probe suite under its supervisor; at the end, stop it and count what is left."""
    options = [*arguments, "--log-level", "warning"]
    if provider == "docker":
        options += ["--image", IMAGE]
    with tempfile.TemporaryDirectory(prefix="decathlon-survival-", ignore_cleanup_errors=True) as folder:
        state = Path(folder) / "state"
        sandboxes = Sandboxes(provider, state)
        leftovers: list[Leftovers] = []
        try:
            async with supervised_server(state, *options, provider=provider) as process:
                yield KillableServer(process, sandboxes, leftovers)
        except BaseException:
            sys.stderr.write(state.with_suffix(".log").read_text()[-LOG_CHARACTERS:])
            raise
        with anyio.move_on_after(REMOVAL_SECONDS):
            while (await anyio.to_thread.run_sync(sandboxes.count_leftovers)).count:  # noqa: ASYNC110
                await anyio.sleep(0.2)
        leftovers.append(await anyio.to_thread.run_sync(sandboxes.count_leftovers))
