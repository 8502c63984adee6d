"""The plug-in of the provider `host`, with all that is known without creating it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from anyio import to_thread

from decathlon_mcp.errors import SettingsError
from decathlon_mcp.hooks import kernels, load
from decathlon_mcp.sandboxes.host.image_folder import UNPACK
from decathlon_mcp.sandboxes.host.isolation import HOST, HostIsolation, decide_isolation, why_no_own_network
from decathlon_mcp.sandboxes.host.namespaces import NamespaceSandbox, why_no_network
from decathlon_mcp.sandboxes.host.provider import HostProvider
from decathlon_mcp.sandboxes.host.sandbox_folder import living_sandboxes, sandbox_owners
from decathlon_mcp.sandboxes.plugins import (
    NoOptions,
    Offer,
    ProviderContext,
    ProviderPlugin,
    is_image_folder,
)
from decathlon_mcp.settings import Settings
from decathlon_mcp.storage.store import SandboxRow, Store
from decathlon_mcp.suites.loading import STARTER

FOLDER = "sandboxes"
"""In the state folder."""


def image(settings: Settings, own: str | None, is_starter: bool) -> str | None:
    """The folder of the image of a suite's sandboxes; None for this machine's files.

    The starter suite has this machine's, unless somebody chose by name what runs it.
    """
    given = settings.image
    if given is None or (is_starter and not _is_chosen(settings)):
        return None
    if not is_image_folder(given):
        raise SettingsError(f"--image {given} is no folder: {UNPACK}, a path with / or ./ before it")
    if settings.isolation == "none":
        raise SettingsError(f"--isolation none runs this machine's own programs: leave out --image {given}")
    return str(Path(given).expanduser().absolute())


def _is_chosen(settings: Settings) -> bool:
    return settings.provider is not None or settings.kernel is not None


def kernel_of(settings: Settings) -> type[NamespaceSandbox]:
    """The kind of sandboxes that has the kernel in the settings. Raises SettingsError."""
    if settings.kernel is None:
        return NamespaceSandbox
    parts = kernels()
    if settings.kernel not in parts:
        names = ", ".join(sorted(parts)) or "this machine's"
        raise SettingsError(f"--kernel {settings.kernel}: there is no such kernel, only {names}")
    if settings.isolation == "none":
        raise SettingsError(
            f"--isolation none has this machine's kernel: leave out --kernel {settings.kernel}"
        )
    return load(parts[settings.kernel])


def isolation_of(settings: Settings) -> HostIsolation:
    """How the sandboxes of a server are isolated. Raises as `decide_isolation`."""
    if _needs_namespaces(settings):
        # Suites that have this machine's files besides may need a network.
        return HostIsolation("namespaces", why_shared=None if _is_chosen(settings) else why_no_own_network())

    def sandboxes() -> list[SandboxRow]:
        with suppress(SettingsError), Store.open_read_only(settings.state) as store:
            return [] if store is None else store.find(SandboxRow)
        return []  # a server says itself what its store has

    return decide_isolation(settings.isolation, settings.state, sandboxes)


def answer_folders(settings: Settings) -> list[Path]:
    """The folders of this machine that have answers or handles in them."""
    # With the bundled suite, the scripts that solve its tasks.
    own = [STARTER.parent, settings.state]
    return own + [Path(where).expanduser() for where in settings.suite if where != "starter"]


def _needs_namespaces(settings: Settings) -> bool:
    """Whether there is no choice, since some sandboxes have other files or another kernel."""
    return settings.isolation != "none" and (settings.kernel is not None or is_image_folder(settings.image))


def create(context: ProviderContext[NoOptions]) -> HostProvider:
    """The provider of one server."""
    settings, found = context.settings, isolation_of(context.settings)
    return HostProvider(
        context.owner,
        settings.state / FOLDER,
        isolation=found.isolation,
        kernel=kernel_of(settings),
        image=Path(settings.image).expanduser() if settings.image else None,
        # Where all sandboxes have the image's files, there is nothing to be hidden.
        hidden=() if settings.kernel or (settings.image and settings.provider) else answer_folders(settings),
        why=found.why,
        why_shared=found.why_shared,
    )


def offer(context: ProviderContext[NoOptions], image: str | None) -> Offer:
    """See `ProviderPlugin.offer`."""
    if image is not None or context.settings.kernel is not None:
        return Offer(without_network=why_no_network())
    found = isolation_of(context.settings)
    varying_root = found.isolation == "none"
    return Offer(shared_network=found.why_shared or "", varying_root=varying_root, has_own_zone=False)


def begin(context: ProviderContext[NoOptions]) -> None:
    """Keep with the state folder how its sandboxes are isolated: see `isolation_of`."""
    settings = context.settings
    if settings.isolation != "none" and not _needs_namespaces(settings):
        isolation_of(settings).keep(settings.state)


class HostInventory:
    """What dead servers have left in the folder of sandboxes, whatever their files and their kernel are."""

    name = HOST

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def sandboxes(self, owner: str) -> dict[str, bool]:
        return await to_thread.run_sync(living_sandboxes, self._folder, owner)

    async def owners(self) -> set[str]:
        return set((await to_thread.run_sync(sandbox_owners, self._folder)).values())

    async def remove(self, owner: str) -> None:
        await HostProvider(owner, self._folder).sweep(owner)


@asynccontextmanager
async def inventory(state: Path) -> AsyncGenerator[HostInventory]:
    """See `ProviderPlugin.inventory`."""
    yield HostInventory(state / FOLDER)


PROVIDER = ProviderPlugin(
    create,
    image=image,
    has_kernels=True,
    inventory=inventory,
    is_remote=False,
    offer=offer,
    begin=begin,
)
