"""Runs the server in this process on a free loopback port, by default with the probe suite."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from decathlon_mcp.app import bootstrap
from decathlon_mcp.background import background_tasks
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.http.application import HttpApp, http_app, page_for
from decathlon_mcp.http.authentication import Tokens
from decathlon_mcp.http.listening import hosts_for, listen
from decathlon_mcp.http.protocol import ConnectionLimits
from decathlon_mcp.http.server import serve_http
from decathlon_mcp.sandboxes.plugins import is_image_folder
from decathlon_mcp.settings import read_settings
from decathlon_mcp.types import public_id

SUITE = str(Path(__file__).parent / "suite")


@dataclass(frozen=True, slots=True)
class Served:
    """A running server. `url` is the base of its addresses."""

    url: str
    episodes: EpisodeRegistry
    state: Path

    def task(self, task_id: str) -> str:
        return f"{self.url}/tasks/{task_id}/mcp"

    def episode(self, episode_id: str) -> str:
        return f"{self.url}/episodes/{episode_id}/mcp"

    @property
    def lobby(self) -> str:
        return f"{self.url}/mcp"

    def find(self, episode_id: str) -> Episode:
        """Return the episode with this handle, regardless of its owner."""
        return self.episodes.find(episode_id, Principal(role="admin"))


def folder_of(state: Path, episode: str) -> Path:
    """The folder of the episode with this public id."""
    (folder,) = [folder for folder in (state / "episodes").iterdir() if public_id(folder.name) == episode]
    return folder


@asynccontextmanager
async def serving(
    state: Path,
    *,
    tokens: Tokens | None = None,
    limits: ConnectionLimits | None = None,
    origins: tuple[str, ...] = (),
    page: bool = False,
    survives: bool = False,
    **settings: Any,
) -> AsyncGenerator[Served]:
    """Serve until the context exits, then drain as after SIGTERM. `survives`: see `bootstrap`."""
    # Eager, so that an episode that lists its tools is ready. Without isolation, so that tests see the files
    # of local sandboxes; others choose "auto", as users do.
    defaults = {
        "suite": (SUITE,),
        "state": state,
        "drain_seconds": 5,
        "servers": "eager",
        "isolation": "none",
    }
    if is_image_folder(settings.get("image")):
        defaults["isolation"] = "auto"
    values = {**defaults, **settings}
    configured = read_settings(values)
    async with bootstrap(configured, serves=page or survives) as episodes:
        hosts = hosts_for("127.0.0.1", (), Tokens(), origins)
        shown = page_for(episodes, state, tokens or Tokens(), hosts) if page else None
        max_body_bytes = configured.max_body_mib << 20
        app = http_app(episodes, tokens=tokens, hosts=hosts, max_body_bytes=max_body_bytes, page=shown)
        async with serving_app(app, episodes, state, limits=limits) as served:
            yield served


@asynccontextmanager
async def serving_app(
    app: HttpApp, episodes: EpisodeRegistry, state: Path, *, limits: ConnectionLimits | None = None
) -> AsyncGenerator[Served]:
    """Serve an application with these episodes until the context exits, then drain."""
    listener = listen("127.0.0.1", 0)
    async with background_tasks() as tasks:
        ready, stop, stopped = anyio.Event(), anyio.Event(), anyio.Event()

        async def serve() -> None:
            await serve_http(
                app,
                listener,
                drain=episodes.shutdown.drain,
                on_ready=ready.set,
                stop=stop,
                limits=limits,
                events=episodes.events,
            )
            stopped.set()

        tasks.start_soon(serve)
        await ready.wait()
        try:
            yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", episodes, state)
        finally:
            stop.set()
            with anyio.CancelScope(shield=True), anyio.move_on_after(20):
                await stopped.wait()


def module_server(**settings: Any) -> Any:
    """A fixture: a server with these settings for all tests of a module."""

    @pytest.fixture(scope="module")
    async def served(
        tmp_path_factory: pytest.TempPathFactory, anyio_backend: object
    ) -> AsyncGenerator[Served]:
        async with serving(tmp_path_factory.mktemp("state"), **settings) as served:
            yield served

    return served
