"""Lists the sandboxes of a server that may have died, for a command that opens none itself."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import anyio.to_thread
from docker.errors import APIError

from decathlon_mcp.errors import ProviderUnavailableError
from decathlon_mcp.sandboxes.docker.engine import Engine, engine_message
from decathlon_mcp.sandboxes.docker.events import OWNER_LABEL, SANDBOX_LABEL
from decathlon_mcp.sandboxes.docker.provider import DockerProvider
from decathlon_mcp.sandboxes.local.process_table import sandboxes_with_processes
from decathlon_mcp.sandboxes.local.provider import LocalProvider
from decathlon_mcp.sandboxes.local.resources import OWNER_FILE

ALIVE = frozenset({"created", "running", "paused", "restarting"})
"""States of containers whose first process has not ended."""


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


class LocalInventory:
    """Local sandboxes in one folder."""

    name = "local"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def sandboxes(self, owner: str) -> dict[str, bool]:
        alive = await anyio.to_thread.run_sync(sandboxes_with_processes, owner)
        owners = await anyio.to_thread.run_sync(self._owners)
        return {name: name in alive for name in alive | {name for name, of in owners.items() if of == owner}}

    async def owners(self) -> set[str]:
        """The owners of the folders there are."""
        return set((await anyio.to_thread.run_sync(self._owners)).values())

    async def remove(self, owner: str) -> int:
        return await LocalProvider(owner, self._folder).sweep(owner)

    def _owners(self) -> dict[str, str]:
        owners: dict[str, str] = {}
        for file in self._folder.glob(f"*/{OWNER_FILE}"):
            try:
                owners[file.parent.name] = file.read_text("utf-8", "replace")
            except OSError:  # its server removes it
                continue
        return owners


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
