"""What there is to know of the provider `local` without creating it: it has two kinds of isolation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from decathlon_mcp.errors import SettingsError
from decathlon_mcp.sandboxes.base import Provider
from decathlon_mcp.sandboxes.bubblewrap.host_provider import HostProvider
from decathlon_mcp.sandboxes.inventory import process_inventory
from decathlon_mcp.sandboxes.local import LOCAL, LocalProvider
from decathlon_mcp.sandboxes.local_isolation import LocalIsolation, decide_isolation
from decathlon_mcp.sandboxes.plugins import NoOptions, Offer, ProviderContext, ProviderPlugin
from decathlon_mcp.settings import Settings
from decathlon_mcp.storage.store import SandboxRow, Store
from decathlon_mcp.suites.loading import STARTER

PLAIN_FOLDER, NAMESPACES_FOLDER = "sandboxes", "namespaces"
"""In the state folder: the sandboxes without isolation, and those in namespaces."""


def local_isolation(settings: Settings) -> LocalIsolation:
    """How sandboxes of the local provider are isolated. Raises as `decide_isolation`."""

    def sandboxes() -> list[SandboxRow]:
        with suppress(SettingsError), Store.open_read_only(settings.state) as store:
            return [] if store is None else store.sandboxes()
        return []  # a server says itself what its store has

    return decide_isolation(settings.isolation, settings.state, sandboxes)


def answer_folders(settings: Settings) -> list[Path]:
    """The folders of this machine that have answers or handles in them."""
    # With the bundled suite, the scripts that solve its tasks.
    own = [STARTER.parent, settings.state]
    return own + [Path(where).expanduser() for where in settings.suite if where != "starter"]


def create(context: ProviderContext[NoOptions]) -> HostProvider | LocalProvider:
    """The provider of one server."""
    settings, found = context.settings, local_isolation(context.settings)
    if found.isolation == "namespaces":
        return HostProvider(
            context.owner,
            settings.state / NAMESPACES_FOLDER,
            hidden=answer_folders(settings),
            why_shared=found.why_shared,
        )
    return LocalProvider(context.owner, settings.state / PLAIN_FOLDER, why=found.why)


def others(context: ProviderContext[NoOptions]) -> Sequence[Provider]:
    """The provider with the other isolation, to remove what a server with that one has left."""
    state = context.settings.state
    if local_isolation(context.settings).isolation == "namespaces":
        return [LocalProvider(context.owner, state / PLAIN_FOLDER)]
    return [HostProvider(context.owner, state / NAMESPACES_FOLDER)]


def offer(context: ProviderContext[NoOptions]) -> Offer:
    """See `ProviderPlugin.offer`."""
    found = local_isolation(context.settings)
    return Offer(shared_network=found.why_shared or "", varying_root=found.isolation == "none")


def begin(context: ProviderContext[NoOptions]) -> None:
    """Keep with the state folder how its sandboxes are isolated: see `local_isolation`."""
    if context.settings.isolation != "none":
        local_isolation(context.settings).keep(context.settings.state)


PROVIDER = ProviderPlugin(
    create,
    image="none",
    inventory=process_inventory(LOCAL, {LocalProvider: PLAIN_FOLDER, HostProvider: NAMESPACES_FOLDER}),
    is_remote=False,
    offer=offer,
    begin=begin,
    others=others,
)
