"""The server in this process whose episodes agents play: its application, and settings that fit a program."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from decathlon_client import Decathlon
from decathlon_client.embedded import EmbeddedEndpoint
from starlette.types import ASGIApp

from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.http.application import http_app
from decathlon_mcp.http.authentication import AllowedHosts
from decathlon_mcp.http.protocol import ConnectionLimits
from decathlon_mcp.settings import Settings

WAIT_SECONDS = 60.0
"""How much longer than an attempt an episode lives without a request, so that a program that has stopped to
play is ended by its own time limit."""


@dataclass(frozen=True, slots=True)
class EmbeddedServer:
    """The episodes of an embedded server, its ASGI application, and the limits of its connections."""

    registry: EpisodeRegistry
    app: ASGIApp
    limits: ConnectionLimits


def with_longer_lives(settings: Settings, seconds: float) -> Settings:
    """Settings with which no episode ends before an attempt of that time, whatever its agent does."""
    names = ("idle_seconds", "first_use_seconds")
    return settings.model_copy(
        update={name: max(getattr(settings, name), seconds + WAIT_SECONDS) for name in names}
    )


@asynccontextmanager
async def embedded_server(
    d: Decathlon, settings: Settings, hosts: AllowedHosts | None = None
) -> AsyncGenerator[EmbeddedServer]:
    """The server of an open `Decathlon.embedded`."""
    endpoint = d._server  # pyright: ignore[reportPrivateUsage]
    assert isinstance(endpoint, EmbeddedEndpoint)
    max_body_bytes = settings.max_body_mib << 20
    app = http_app(endpoint.registry, hosts=hosts, max_body_bytes=max_body_bytes)
    limits = ConnectionLimits.for_bodies(max_body_bytes)
    async with app.running():
        yield EmbeddedServer(endpoint.registry, app, limits)
