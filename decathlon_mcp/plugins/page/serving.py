"""The page of a server, as `serve` has it."""

from __future__ import annotations

from pathlib import Path

from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.http.authentication import AllowedHosts, Tokens
from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.plugins.page.access import PageKey, Secrets, Sessions, load_or_create_page_key
from decathlon_mcp.plugins.page.application import PageApp
from decathlon_mcp.plugins.page.changes import RegistryControl
from decathlon_mcp.plugins.page.live import LiveFeed, RegistryLive
from decathlon_mcp.plugins.page.play.attempts import PlayPages
from decathlon_mcp.plugins.page.site import Site


def create_page(
    registry: EpisodeRegistry,
    state: Path,
    tokens: Tokens,
    hosts: AllowedHosts,
    public_url: str | None = None,
) -> PageApp:
    """The page of a server on a state folder.

    Raises SettingsError if the key of the page cannot be read or written.
    """
    key = None if tokens else load_or_create_page_key(state)
    accepted: Secrets = tokens if key is None else PageKey(key)
    site = Site(
        EpisodeHistory([state]),
        Sessions(accepted),
        live=LiveFeed(RegistryLive(registry)),
        control=RegistryControl(registry),
        folders=(str(state),),
        public_url=public_url,
    )
    site.can_play = True
    routes = PlayPages(site, registry).routes()
    return PageApp(site, hosts.answers_to, public_url=public_url, routes=routes, key=key)
