"""What there is to know of the provider `bubblewrap` without creating it."""

from __future__ import annotations

from pathlib import Path

from decathlon_mcp.sandboxes.bubblewrap.provider import NO_NETWORK, BubblewrapProvider
from decathlon_mcp.sandboxes.inventory import process_inventory
from decathlon_mcp.sandboxes.plugins import NoOptions, Offer, ProviderContext, ProviderPlugin

FOLDER = "bubblewrap"
"""In the state folder."""


def image_setting(context: ProviderContext[NoOptions]) -> Path | None:
    """The folder of the image, if it is set."""
    image = context.settings.image
    return Path(image).expanduser() if image else None


def create(context: ProviderContext[NoOptions]) -> BubblewrapProvider:
    """The provider of one server."""
    folder = context.settings.state / FOLDER
    return BubblewrapProvider(context.owner, folder, image=image_setting(context))


PROVIDER = ProviderPlugin(
    create,
    image="folder",
    inventory=process_inventory(BubblewrapProvider.name, {BubblewrapProvider: FOLDER}),
    is_remote=False,
    offer=lambda context: Offer(without_network=NO_NETWORK.format(BubblewrapProvider.name)),
)
