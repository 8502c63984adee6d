"""Lists the sandboxes of a server that may have died, for a command that opens none itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol

import anyio.to_thread

from decathlon_mcp.sandboxes.base import Provider
from decathlon_mcp.sandboxes.processes.resources import living_sandboxes, sandbox_owners


class Inventory(Protocol):
    """The sandboxes of one provider."""

    @property
    def name(self) -> str:
        """The provider's name."""
        ...

    async def sandboxes(self, owner: str) -> dict[str, bool]:
        """The sandboxes labelled with `owner`: whether the first process of each is alive, by name.

        Raises ProviderUnavailableError.
        """
        ...

    async def owners(self) -> set[str]:
        """The owners of what is in the state folder. Raises ProviderUnavailableError."""
        ...

    async def remove(self, owner: str) -> None:
        """Remove the sandboxes labelled with `owner`. Raises ProviderUnavailableError if some are left."""
        ...


class ProcessInventory:
    """Sandboxes that are processes of this machine, of one provider's name.

    `folders`: the folder of the sandboxes of each kind of provider that has this name. A kind is called with
    an owner and its folder, and is not entered.
    """

    def __init__(self, name: str, folders: Mapping[Callable[[str, Path], Provider], Path]) -> None:
        self.name = name
        self._folders = folders

    async def sandboxes(self, owner: str) -> dict[str, bool]:
        found: dict[str, bool] = {}
        for folder in self._folders.values():
            found |= await anyio.to_thread.run_sync(living_sandboxes, folder, owner)
        return found

    async def owners(self) -> set[str]:
        found: set[str] = set()
        for folder in self._folders.values():
            found |= set((await anyio.to_thread.run_sync(sandbox_owners, folder)).values())
        return found

    async def remove(self, owner: str) -> None:
        for provider, folder in self._folders.items():
            await provider(owner, folder).sweep(owner)


def process_inventory(
    name: str, folders: Mapping[Callable[[str, Path], Provider], str]
) -> Callable[[Path], AbstractAsyncContextManager[ProcessInventory]]:
    """`ProviderPlugin.inventory` of a provider whose sandboxes have these folders in the state folder."""

    @asynccontextmanager
    async def inventory(state: Path) -> AsyncGenerator[ProcessInventory]:
        yield ProcessInventory(name, {kind: state / folder for kind, folder in folders.items()})

    return inventory
