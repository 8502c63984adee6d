"""Lists the sandboxes of a server that may have died, for a command that opens none itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TypeAlias

import anyio.to_thread

from decathlon_mcp.sandboxes.bubblewrap.host_provider import HostProvider
from decathlon_mcp.sandboxes.bubblewrap.provider import BubblewrapProvider
from decathlon_mcp.sandboxes.docker.engine import Engine
from decathlon_mcp.sandboxes.docker.events import LIVING_STATES, SANDBOX_LABEL
from decathlon_mcp.sandboxes.docker.provider import DockerProvider, containers_of
from decathlon_mcp.sandboxes.gvisor.provider import GvisorProvider
from decathlon_mcp.sandboxes.local import LocalProvider
from decathlon_mcp.sandboxes.processes.resources import living_sandboxes, sandbox_owners

LOCAL_FOLDER, NAMESPACES_FOLDER, BUBBLEWRAP_FOLDER = "sandboxes", "namespaces", "bubblewrap"
GVISOR_FOLDER = "gvisor"
"""In the state folder: the folders of the sandboxes that are processes of this machine."""


class Inventory(Protocol):
    """The sandboxes of one kind of provider."""

    @property
    def name(self) -> str:
        """The provider's name."""
        ...

    async def sandboxes(self, owner: str) -> dict[str, bool]:
        """The sandboxes labelled with `owner`: whether the first process of each is alive, by name.

        Raises ProviderUnavailableError.
        """
        ...

    async def remove(self, owner: str) -> None:
        """Remove the sandboxes labelled with `owner`. Raises ProviderUnavailableError if some are left."""
        ...


ProcessProviderType: TypeAlias = type[LocalProvider] | type[HostProvider] | type[BubblewrapProvider]


class ProcessInventory:
    """Sandboxes that are processes of this machine, of one provider's name.

    `folders`: the folder of the sandboxes of each kind of provider that has this name.
    """

    def __init__(self, folders: Mapping[ProcessProviderType, Path]) -> None:
        (self.name,) = {provider.name for provider in folders}
        self._folders = folders

    async def sandboxes(self, owner: str) -> dict[str, bool]:
        found: dict[str, bool] = {}
        for folder in self._folders.values():
            found |= await anyio.to_thread.run_sync(living_sandboxes, folder, owner)
        return found

    async def owners(self) -> set[str]:
        """The owners of the folders there are."""
        found: set[str] = set()
        for folder in self._folders.values():
            found |= set((await anyio.to_thread.run_sync(sandbox_owners, folder)).values())
        return found

    async def remove(self, owner: str) -> None:
        for provider, folder in self._folders.items():
            await provider(owner, folder).sweep(owner)


def process_inventories(state: Path) -> list[ProcessInventory]:
    """The inventories of the providers whose sandboxes have folders in this state folder."""
    return [
        ProcessInventory({LocalProvider: state / LOCAL_FOLDER, HostProvider: state / NAMESPACES_FOLDER}),
        ProcessInventory({BubblewrapProvider: state / BUBBLEWRAP_FOLDER}),
        ProcessInventory({GvisorProvider: state / GVISOR_FOLDER}),
    ]


class DockerInventory:
    """Containers of the engine that DOCKER_HOST names."""

    name = "docker"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def sandboxes(self, owner: str) -> dict[str, bool]:
        return {
            str(container["Labels"].get(SANDBOX_LABEL)): container["State"] in LIVING_STATES
            for container in await containers_of(self._engine, owner)
        }

    async def remove(self, owner: str) -> None:
        async with DockerProvider(owner) as provider:
            await provider.sweep(owner)
