"""What there is to know of the provider `docker` without creating it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from decathlon_mcp.plugins.docker.container import DEFAULT_NETWORK
from decathlon_mcp.plugins.docker.events import LIVING_STATES, SANDBOX_LABEL
from decathlon_mcp.plugins.docker.image import images_on_engine
from decathlon_mcp.plugins.docker.provider import DockerProvider, containers_of
from decathlon_mcp.sandboxes.plugins import Offer, ProviderContext, ProviderPlugin


class EngineInventory:
    """Containers of some engines. `providers`: of one name, one for each; they open none, and are entered."""

    def __init__(self, providers: Sequence[DockerProvider]) -> None:
        (self.name,) = {provider.name for provider in providers}
        self._providers = providers

    async def sandboxes(self, owner: str) -> dict[str, bool]:
        return {
            str(container["Labels"].get(SANDBOX_LABEL)): container["State"] in LIVING_STATES
            for provider in self._providers
            for container in await containers_of(provider.engine, owner)
        }

    async def owners(self) -> set[str]:
        return set()  # what else is on the engine can belong to servers on other state folders

    async def remove(self, owner: str) -> None:
        for provider in self._providers:
            await provider.sweep(owner)


@asynccontextmanager
async def engine_inventory(*providers: DockerProvider) -> AsyncGenerator[EngineInventory]:
    """The containers of the engines of these providers. Raises ProviderUnavailableError if one is silent."""
    async with AsyncExitStack() as stack:
        for provider in providers:
            await stack.enter_async_context(provider)
            await provider.engine.api()
        yield EngineInventory(providers)


@asynccontextmanager
async def inventory(state: Path) -> AsyncGenerator[EngineInventory]:
    """The containers of the engine that DOCKER_HOST names."""
    async with engine_inventory(DockerProvider("gc")) as found:
        yield found


class DockerOptions(BaseModel):
    """See `ProviderPlugin.options`."""

    network: Annotated[str, Field(min_length=1)] = Field(
        DEFAULT_NETWORK,
        description="network of sandboxes with outbound access, by default a bridge network on which they "
        "cannot reach each other",
    )
    runtime: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="runtime by its name in the engine, such as `runsc`, by default the engine's"
    )


def create(context: ProviderContext[DockerOptions]) -> DockerProvider:
    """The provider of one server."""
    settings = context.settings
    return DockerProvider(
        context.owner,
        network=context.options.network,
        runtime=context.options.runtime,
        at_once=context.max_opening,
        max_sandboxes=settings.max_sandboxes,
    )


def offer(context: ProviderContext[DockerOptions], image: str | None) -> Offer:
    """See `ProviderPlugin.offer`."""
    is_shared = context.options.network == "host"
    return Offer(shared_network="leave out --provider-option network=host" if is_shared else "")


PROVIDER = ProviderPlugin(
    create, inventory=inventory, options=DockerOptions, offer=offer, service_images=images_on_engine
)
