"""Lists the sandboxes of a server that may have died, for a command that opens none itself."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import anyio.to_thread
from docker.errors import APIError

from decathlon_mcp.errors import ProviderUnavailableError
from decathlon_mcp.sandboxes.bubblewrap.provider import BubblewrapProvider
from decathlon_mcp.sandboxes.docker.engine import Engine, engine_message
from decathlon_mcp.sandboxes.docker.events import OWNER_LABEL, SANDBOX_LABEL
from decathlon_mcp.sandboxes.docker.provider import DockerProvider
from decathlon_mcp.sandboxes.local.process_table import sandboxes_with_processes
from decathlon_mcp.sandboxes.local.provider import LocalProvider
from decathlon_mcp.sandboxes.local.resources import OWNER_FILE

ALIVE = frozenset({"created", "running", "paused", "restarting"})
"""States of containers whose first process has not ended."""


LOCAL_FOLDER, BUBBLEWRAP_FOLDER = "sandboxes", "bubblewrap"
"""In the state folder: the folders of the sandboxes that are processes of this machine."""


class Inventory(Protocol):
    """The sandboxes of one kind of provider."""

    @property
    def name(self) -> str:
        """The provider's name."""
        ...

    async def sandboxes(self, owner: str) -> dict[str, bool]:
        """The sandboxes labelled with `owner`: whether a process of each is alive, by name.

        Raises ProviderUnavailableError.
        """
        ...

    async def remove(self, owner: str) -> int:
        """Remove the sandboxes labelled with `owner`; returns their number.

        Raises ProviderUnavailableError.
        """
        ...


class ProcessInventory:
    """Sandboxes that are processes of this machine, with their folders in one folder."""

    def __init__(self, provider: type[LocalProvider] | type[BubblewrapProvider], folder: Path) -> None:
        self.name = provider.name
        self._folder = folder
        self._provider = provider

    async def sandboxes(self, owner: str) -> dict[str, bool]:
        label = self._provider.label(owner)
        alive = await anyio.to_thread.run_sync(sandboxes_with_processes, label)
        owners = await anyio.to_thread.run_sync(self._owners)
        return {name: name in alive for name in alive | {name for name, of in owners.items() if of == owner}}

    async def owners(self) -> set[str]:
        """The owners of the folders there are."""
        return set((await anyio.to_thread.run_sync(self._owners)).values())

    async def remove(self, owner: str) -> int:
        return await self._provider(owner, self._folder).sweep(owner)

    def _owners(self) -> dict[str, str]:
        owners: dict[str, str] = {}
        for file in self._folder.glob(f"*/{OWNER_FILE}"):
            try:
                owners[file.parent.name] = file.read_text("utf-8", "replace")
            except OSError:  # its server removes it
                continue
        return owners


def process_inventories(state: Path) -> list[ProcessInventory]:
    """The inventories of the providers whose sandboxes have folders in this state folder."""
    return [
        ProcessInventory(LocalProvider, state / LOCAL_FOLDER),
        ProcessInventory(BubblewrapProvider, state / BUBBLEWRAP_FOLDER),
    ]


class DockerInventory:
    """Containers of the engine that DOCKER_HOST names."""

    name = "docker"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def sandboxes(self, owner: str) -> dict[str, bool]:
        filters = {"label": f"{OWNER_LABEL}={owner}"}
        try:
            containers = await self._engine.run(lambda api: api.containers(all=True, filters=filters))
        except APIError as error:
            raise ProviderUnavailableError(f"the engine refused: {engine_message(error)}") from error
        return {
            str(container["Labels"].get(SANDBOX_LABEL)): container["State"] in ALIVE
            for container in containers
        }

    async def remove(self, owner: str) -> int:
        async with DockerProvider(owner) as provider:
            return await provider.sweep(owner)
